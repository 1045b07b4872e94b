"""What the rules for faults of fp32 itself share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoprec.evidence import Evidence, Leg
from autoprec.verify import describe_failure, diverged

if TYPE_CHECKING:
    from autoprec.policy import Limits

__all__ = ["AGAIN", "CLIP", "LOWER_LR", "at", "certain", "fp32_fails", "may_be_lr"]

LOWER_LR: tuple[tuple[str, float], ...] = (("fp32 lr/10", 0.1), ("fp32 lr/100", 0.01))
"""Legs in fp32 at smaller learning rates, and the factors."""

CLIP = "fp32 clip"
"""The leg in fp32 with clipped gradients."""


AGAIN = "main again"
"""The main leg once more: what raised once and not twice is no fault of a dtype."""


def fp32_fails(evidence: Evidence, limits: Limits) -> bool:
    """Whether the fp32 twin failed or diverged."""
    twin = evidence.twin
    return twin is not None and (twin.failure is not None or diverged(twin, limits))


def certain(evidence: Evidence) -> bool:
    """Whether the failing batch fails in fp32 from the weights before the first step: no leg need be run to see it."""
    main = evidence.main
    return main is not None and main.origin is not None and main.origin.fails_from_start is True


def may_be_lr(evidence: Evidence) -> bool:
    """Whether a smaller lr could matter: a fault at step 0, an exception or bad data is no matter of the lr."""
    twin, data = evidence.twin, evidence.data
    if twin is None or certain(evidence) or (twin.origin is not None and twin.origin.fails_from_start is True):
        return False
    f = twin.failure
    if f is not None and (f.step == 0 or f.where in ("exception", "input", "target")):
        return False
    return data is None or not any([f.nonfinite for f in data.features] + [t.nonfinite for t in data.targets])


def at(leg: Leg) -> str:
    """Where a leg failed, in words."""
    if leg.failure is not None:
        return describe_failure(leg)
    return f"the loss rises from {leg.steps[0].loss:.4g} to {leg.final_loss:.4g}"
