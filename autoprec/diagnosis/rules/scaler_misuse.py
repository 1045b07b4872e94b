"""A callback unscales gradients that fastai unscales again, or changes them while they are still scaled.

Looks like   no NaN, no skipped step, no message: the loss just stalls. `scaler.unscale_(learn.opt)` in a callback makes
             gradients 65536 times too small; clipping before order 10 clips to a 65536th of the norm meant.
Not this     fastai's GradientClip (order 11), which runs after unscaling; gradients that vanish by themselves
             (`gradient_underflow`).
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Finding, Rule
from autoprec.diagnosis.plain import behind_twin
from autoprec.evidence import Evidence
from autoprec.policy import Limits
from autoprec.verify import worse


def relevant(evidence: Evidence, limits: Limits) -> bool:
    """A callback was caught, and the run is behind its twin."""
    main = evidence.main
    return main is not None and bool(main.misuses) and behind_twin(evidence, limits)


def check(evidence: Evidence, limits: Limits) -> Finding | None:
    """Name the callback."""
    main, comparison = evidence.main, evidence.comparison
    if main is None or not main.misuses or comparison is None:
        return None
    first = main.misuses[0]
    scale = next((s.scale_before for s in main.steps if s.scale_before), None)
    did = (
        f"calls scaler.unscale_(learn.opt); MixedPrecision does not know and unscales again, so that the gradients are "
        f"{scale or 0:g} times too small"
        if first.what == "unscales"
        else f"changes gradients that are still multiplied by the loss scale ({scale or 0:g}): their norm becomes "
        f"{first.ratio or 0:.3g} of what it was"
    )
    return Finding(
        mode=RULE.mode,
        because=f"{first.callback} {did}; {worse(comparison, limits)}",
        where=first.place,
        ruled_out=("an overflow: every value is finite and steps are taken; what reaches the optimizer is wrong",),
        suggestion="remove it and use GradientClip(max_norm), which runs after unscaling",
        evidence={"callback": first.callback, "what": first.what, "ratio": first.ratio, "scale": scale},
    )


RULE = Rule(
    mode="scaler_misuse",
    needs=("leg:main", "leg:fp32", "comparison"),
    check=check,
    doc=__doc__ or "",
    relevant=relevant,
)
