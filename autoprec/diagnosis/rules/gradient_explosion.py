"""Single gradients are so large that one step ruins the weights, in every precision.

Looks like   training goes well until one batch has a gradient norm a hundred times the usual one; with clipped
             gradients the same run trains.
Not this     a loss that grows steadily (see `lr_divergence`, which a smaller lr cures).
"""

from __future__ import annotations

import math
import statistics

from autoprec.diagnosis.finding import Finding, Rule
from autoprec.diagnosis.fp32 import CLIP, LOWER_LR, at, fp32_fails, may_be_lr
from autoprec.evidence import Evidence
from autoprec.policy import Limits
from autoprec.verify import trains


def check(evidence: Evidence, limits: Limits) -> Finding | None:
    """fp32 fails, no smaller lr helps, and clipping does."""
    twin, clipped = evidence.twin, evidence.legs.get(CLIP)
    if twin is None or clipped is None or not trains(clipped, limits):
        return None
    if any((leg := evidence.legs.get(name)) is not None and trains(leg, limits) for name, _ in LOWER_LR):
        return None
    norms = [s.grad_norm for s in twin.steps if s.grad_norm is not None and not math.isnan(s.grad_norm)]
    if not norms:
        return None
    usual, peak = statistics.median(norms), max(norms)
    if peak < limits.explosion_ratio * usual:
        return None
    return Finding(
        mode=RULE.mode,
        because=f"fp32 fails too ({at(twin)}); one gradient norm is {peak:.3g} where {usual:.3g} is usual, and clipped "
        f"to {clipped.spec.clip:.3g} the run trains",
        ruled_out=("16-bit arithmetic: fp32 fails on the same batches", "the lr: a hundredth fails as well"),
        suggestion="clip the gradients: GradientClip(max_norm)",
        evidence={"peak": peak, "usual": usual},
    )


RULE = Rule(
    mode="gradient_explosion",
    needs=("leg:main", "leg:fp32", *(f"leg:{name}" for name, _ in LOWER_LR), f"leg:{CLIP}"),
    check=check,
    doc=__doc__ or "",
    relevant=lambda e, limits: fp32_fails(e, limits) and may_be_lr(e),
)
