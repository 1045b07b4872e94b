"""Chronic gradient overflow: the loss scale keeps falling and steps keep being skipped.

Looks like   many skipped steps after the scale had time to settle, the loss itself finite; at the end the scale is
             below 1. No scale helps, since a gradient inside the network leaves half's range whatever the scale: a
             division by something tiny, a hand-written norm.
Not this     the first skips from 2**16 (normal), a scale that settles late in a short run (`skipped_steps`), or a
             loss that is not finite (`forward_overflow`).
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
    return skips.chronic(limits) or skips.share_of(evidence.configuration.planned_steps) > limits.run_skip_rate


def check(evidence: Evidence, limits: Limits) -> Finding | None:
    """No working scale on the first batches, or skips that go on after settling."""
    main, search = evidence.main, evidence.scale_search
    if main is None or search is None:
        return None
    skips = Skips.of(main.steps)
    works = search.largest_finite
    settles = works is not None and works >= limits.scale_floor
    if settles and not (skips.late >= 2 and skips.late_rate > limits.skip_rate and not _falling(main.steps)):
        return None
    origin = main.origin or search.origin
    scale = (
        f"on the first {search.batches} batches no scale down to {search.smallest_tried:.3g} keeps the gradients finite"
        if works is None
        else f"on the first {search.batches} batches the largest scale that keeps the gradients finite is {works:g}"
    )
    return Finding(
        mode=RULE.mode,
        because=f"{skips.skipped} of {skips.attempted} steps were skipped{skips.late_words()}, the loss scale fell from {skips.first_scale:g} to {skips.last_scale:.3g}; {scale}",
        where=origin.place if origin else None,
        op=origin.operation.op if origin else None,
        ruled_out=("the forward pass: every loss is finite", "the lr or the model: fp32 trains"),
        suggestion="compute the op in fp32 (x.float())" if origin else None,
        evidence={
            "skipped": skips.skipped, "attempted": skips.attempted, "last_scale": skips.last_scale, "works": works,
        },  # fmt: skip
    )


def _falling(steps: object) -> bool:
    """Whether every skip belongs to one descent: the scale never went up in between and the last step was taken."""
    rows = list(steps)  # type: ignore[call-overload]
    last_skip = max((i for i, s in enumerate(rows) if s.skipped), default=-1)
    return last_skip < len(rows) - 1 and all(
        (b.scale_before or 0) <= (a.scale_before or 0) for a, b in zip(rows, rows[1:], strict=False)
    )


RULE = Rule(
    mode="gradient_overflow",
    needs=("leg:main", "leg:fp32", "scale_search"),
    check=check,
    doc=__doc__ or "",
    relevant=relevant,
)
