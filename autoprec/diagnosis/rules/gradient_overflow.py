"""Chronic gradient overflow: the loss scale keeps falling and steps keep being skipped.

Looks like   many skipped steps after the scale had time to settle, the loss itself finite; at the end the scale is
             below 1. No scale helps, since a gradient inside the network leaves half's range whatever the scale: a
             division by something tiny, a hand-written norm.
Not this     the first skips from 2**16 (normal), a scale that settles late in a short run (`skipped_steps`), single
             batches with huge gradients (`gradient_spike`), or a loss that is not finite (`forward_overflow`).
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Finding, Rule
from autoprec.evidence import Evidence
from autoprec.ledger import Skips
from autoprec.policy import Limits


def relevant(evidence: Evidence, limits: Limits) -> bool:
    """Steps are skipped beyond settling, in a leg whose losses are finite and whose twin is well."""
    main, twin = evidence.main, evidence.legs.get("fp32")
    if main is None or main.failure is not None or not main.steps or main.spec.precision != "fp16":
        return False
    if twin is not None and twin.failure is not None:
        return False
    skips = Skips.of(main.steps)
    too_many = skips.share_of(evidence.configuration.planned_steps) > limits.run_skip_rate
    return skips.chronic(limits) or too_many or not main.taken


def check(evidence: Evidence, limits: Limits) -> Finding | None:
    """No working scale on the first batches."""
    main, search = evidence.main, evidence.scale_search
    if main is None or search is None:
        return None
    skips = Skips.of(main.steps)
    works = search.largest_finite
    if works is not None and works >= limits.scale_floor:
        return None
    origin = main.origin or search.origin
    scale = (
        f"no scale down to {search.smallest_tried:.3g} keeps the gradients finite"
        if works is None
        else f"the largest scale that keeps the gradients finite is {works:g}"
    )
    return Finding(
        mode=RULE.mode,
        because=f"{skips.skipped} of {skips.attempted} steps were skipped{skips.late_words()}, the loss scale fell "
        f"from {skips.first_scale:g} to {skips.last_scale:.3g}; on the first {search.batches} batches {scale}",
        where=origin.place if origin else None,
        op=origin.operation.op if origin else None,
        ruled_out=("the forward pass: every loss is finite", "the lr or the model: fp32 trains"),
        suggestion="compute the op in fp32 (x.float())" if origin else None,
        evidence={
            "skipped": skips.skipped,
            "attempted": skips.attempted,
            "last_scale": skips.last_scale,
            "works": works,
        },
    )


RULE = Rule(
    mode="gradient_overflow",
    needs=("leg:main", "leg:fp32", "scale_search"),
    check=check,
    doc=__doc__ or "",
    relevant=relevant,
)
