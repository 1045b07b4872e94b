"""Nothing overflows, but the 16-bit mantissa loses what matters.

Looks like   finite losses that stay above fp32's, and an op whose output differs from fp32's by a good part of its
             variation: positions, masses or timestamps of 3000 +- 1 (half has steps of 2 there), differences of large
             numbers, values next to 1. bf16, with three bits less, is worse.
Not this     values that leave the range (`forward_overflow`, `forward_underflow`), or gradients that vanish
             (`gradient_underflow`).
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Finding, Rule
from autoprec.diagnosis.plain import behind_twin
from autoprec.evidence import Evidence
from autoprec.policy import Limits
from autoprec.verify import worse


def check(evidence: Evidence, limits: Limits) -> Finding | None:
    """Worse than the twin, and an op at which the signal is lost."""
    main, drift, comparison = evidence.main, evidence.drift, evidence.comparison
    if main is None or drift is None or comparison is None or drift.place is None:
        return None
    reason = worse(comparison, limits)
    if reason is None:
        return None
    precision = main.spec.precision
    return Finding(
        mode=RULE.mode,
        because=f"at {drift.op} values of size {drift.size:.4g} vary by {drift.variation:.3g}, and {precision} misses "
        f"{drift.error:.0%} of that; {reason}",
        where=drift.place,
        op=drift.op,
        ruled_out=(
            "an overflow: every value is finite",
            f"earlier ops keep to fp32 within {limits.drift:.0%} of their variation ({drift.ops_compared} compared)",
        ),
        suggestion="centre or rescale what enters the op, or compute it in fp32 (x.float())",
        evidence={"error": drift.error, "size": drift.size, "variation": drift.variation},
        confidence=0.8,
    )


RULE = Rule(
    mode="precision_loss",
    needs=("leg:main", "leg:fp32", "comparison", "drift"),
    check=check,
    doc=__doc__ or "",
    relevant=behind_twin,
)
