"""Some batches have gradients so large that the scaler keeps skipping their steps.

Looks like   a loss scale that works on most batches, found and lost again and again: steps are skipped long after it
             had time to settle, in single batches whose gradients are far larger than the others'.
Not this     a scale that works on no batch (`gradient_overflow`), or one that settles late (`skipped_steps`).
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Finding, Rule
from autoprec.diagnosis.rules.gradient_overflow import relevant
from autoprec.evidence import Evidence
from autoprec.ledger import Skips
from autoprec.policy import Limits


def check(evidence: Evidence, limits: Limits) -> Finding | None:
    """Skips go on after a step was taken, though a working scale exists."""
    main, search = evidence.main, evidence.scale_search
    if main is None or search is None or search.largest_finite is None or search.largest_finite < limits.scale_floor:
        return None
    skips = Skips.of(main.steps)
    if skips.late < 2 or skips.late_rate <= limits.skip_rate or skips.one_descent:
        return None
    at = [s.step for s in main.steps if s.skipped and s.step >= skips.leading]
    return Finding(
        mode=RULE.mode,
        because=f"{skips.late} of the last {skips.late_attempted} steps were skipped "
        f"(steps {', '.join(map(str, at[-4:]))}), though on the first {search.batches} batches a loss scale of "
        f"{search.largest_finite:g} works; it ended at {skips.last_scale:g}",
        ruled_out=("a scale that never works: most batches take their step", "the forward pass: every loss is finite"),
        suggestion="look at these batches for outliers in inputs or targets",
        evidence={"late": skips.late, "late_attempted": skips.late_attempted, "works": search.largest_finite},
        confidence=0.8,
    )


RULE = Rule(
    mode="gradient_spike",
    needs=("leg:main", "leg:fp32", "scale_search"),
    check=check,
    doc=__doc__ or "",
    relevant=relevant,
)
