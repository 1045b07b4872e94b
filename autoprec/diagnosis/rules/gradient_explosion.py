"""Single gradients are so large that one step ruins the weights, in every precision.

Looks like   training goes well until one batch has a gradient norm a hundred times the usual one; with clipped
             gradients the same run trains.
Not this     a loss that grows steadily (see `lr_divergence`, which a smaller lr cures).
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Finding, Rule
from autoprec.diagnosis.fp32 import CLIP, LOWER_LR, at, fp32_fails, may_be_lr
from autoprec.evidence import Evidence
from autoprec.ledger import spike
from autoprec.policy import Limits
from autoprec.verify import trains


def check(evidence: Evidence, limits: Limits) -> Finding | None:
    """fp32 fails, no smaller lr helps, and clipping does."""
    twin, clipped = evidence.twin, evidence.legs.get(CLIP)
    if twin is None or clipped is None or not trains(clipped, limits):
        return None
    if any((leg := evidence.legs.get(name)) is not None and trains(leg, limits) for name, _ in LOWER_LR):
        return None
    _, usual, peak = spike(twin.steps)
    stands_out = peak > 0 and peak >= limits.explosion_ratio * usual
    seen = f"a gradient norm is {peak:.3g} where {usual:.3g} was usual before, and " if stands_out else ""
    return Finding(
        mode=RULE.mode,
        because=f"fp32 fails too ({at(twin)}); {seen}with gradients clipped to {clipped.spec.clip:.3g} the run trains",
        ruled_out=("16-bit arithmetic: fp32 fails on the same batches", "the lr: a hundredth fails as well"),
        suggestion="clip the gradients: GradientClip(max_norm)",
        evidence={"peak": peak, "usual": usual},
        confidence=1.0 if stands_out else 0.6,
    )


RULE = Rule(
    mode="gradient_explosion",
    needs=("leg:main", "leg:fp32", *(f"leg:{name}" for name, _ in LOWER_LR), f"leg:{CLIP}"),
    check=check,
    doc=__doc__ or "",
    relevant=lambda e, limits: fp32_fails(e, limits) and may_be_lr(e),
)
