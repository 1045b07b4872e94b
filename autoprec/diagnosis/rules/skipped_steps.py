"""Most of a short run is spent finding the loss scale.

Looks like   a fit of a few dozen steps whose first half or more is skipped while the scale halves its way down; nothing
             is NaN, the model has simply not been trained. Each fit starts again from init_scale.
Not this     a scale that never settles (`gradient_overflow`), or a few skips at the start of a long run (normal).
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Finding, Rule
from autoprec.diagnosis.rules.gradient_overflow import check as overflows
from autoprec.diagnosis.rules.gradient_overflow import relevant
from autoprec.diagnosis.rules.gradient_spike import check as spikes
from autoprec.evidence import Evidence
from autoprec.ledger import Skips
from autoprec.policy import Limits


def check(evidence: Evidence, limits: Limits) -> Finding | None:
    """Skips that a lower initial scale would have saved."""
    main, search = evidence.main, evidence.scale_search
    if main is None or search is None or search.largest_finite is None:
        return None
    if overflows(evidence, limits) is not None or spikes(evidence, limits) is not None:
        return None
    skips = Skips.of(main.steps)
    planned = max(evidence.configuration.planned_steps, skips.attempted)
    return Finding(
        mode=RULE.mode,
        because=f"{skips.skipped} of the {planned} steps planned are skipped while the loss scale falls from "
        f"{skips.first_scale:g} to {skips.last_scale:g}; a scale of {search.largest_finite:g} works from the start",
        ruled_out=("chronic: a working scale exists", "the loss: it is finite at every step"),
        suggestion=f"to_fp16(init_scale={search.largest_finite / 2:g}), or a mean instead of a sum in the loss",
        evidence={"skipped": skips.skipped, "planned": planned, "works": search.largest_finite},
    )


RULE = Rule(
    mode="skipped_steps",
    needs=("leg:main", "leg:fp32", "scale_search"),
    check=check,
    doc=__doc__ or "",
    relevant=relevant,
)
