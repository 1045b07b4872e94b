"""16 bits train worse than fp32 beyond noise, with no closer cause found.

Looks like   finite losses, no chronic skipping, and a loss that stays above the fp32 twin's on the same batches by more
             than fp32 runs scatter among themselves.
Not this     a model that learns slowly in fp32 as well, or a cause with a name (`gradient_underflow`, `skipped_steps`).
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Finding, Rule
from autoprec.diagnosis.plain import comparable
from autoprec.evidence import Evidence
from autoprec.policy import Limits
from autoprec.verify import worse


def check(evidence: Evidence, limits: Limits) -> Finding | None:
    """Worse than the twin beyond noise."""
    main, twin, comparison = evidence.main, evidence.legs.get("fp32"), evidence.comparison
    if main is None or twin is None or comparison is None:
        return None
    reason = worse(comparison, limits)
    if reason is None:
        return None
    same = "with the same steps taken" if comparison.same_steps else "though steps were skipped"
    return Finding(
        mode=RULE.mode,
        because=f"{reason}, {same}: loss {main.final_loss:.4g} against {twin.final_loss:.4g} after {len(main.steps)} "
        f"steps in {main.spec.precision} and fp32",
        ruled_out=("an overflow: every value is finite", "slow learning: fp32 learns faster from the same batches"),
        suggestion="look for small differences of large numbers (positions, offsets, values next to 1)",
        evidence={"excess": comparison.excess, "spread": comparison.spread},
        confidence=0.6,
    )


RULE = Rule(
    mode="plateau",
    needs=("leg:main", "leg:fp32", "comparison"),
    check=check,
    doc=__doc__ or "",
    relevant=comparable,
)
