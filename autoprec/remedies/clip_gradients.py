"""Clip the total gradient norm with fastai's GradientClip.

Cures        single gradients so large that one step ruins the weights.
Does not     cure an overflow: a gradient that is infinite has no direction left to keep, and clipping comes after
             unscaling anyway.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fastai.callback.training import GradientClip

from autoprec.ledger import measured_norms, spike
from autoprec.outcome import Change
from autoprec.policy import ClipGradients as Settings
from autoprec.remedies.base import Remedy, Subject

if TYPE_CHECKING:
    from autoprec.evidence import Evidence

__all__ = ["ClipGradients", "clip_norm"]

_STANDS_OUT = 10.0
"""Ratio to the usual norm from which on a gradient is left out of what is usual: an order of magnitude."""


def clip_norm(evidence: Evidence, settings: Settings) -> float | None:
    """The policy's norm, or its quantile of the finite norms of the fp32 twin (else of the main leg)."""
    if settings.max_norm is not None:
        return settings.max_norm
    for leg in (evidence.twin, evidence.main):
        steps = leg.steps if leg else ()
        at, usual, peak = spike(steps)
        seen = measured_norms(steps)
        # What follows an explosion says nothing about usual gradients.
        norms = sorted(n for n in (seen[:at] if peak > _STANDS_OUT * usual > 0 else seen) if n and math.isfinite(n))
        if norms:
            return norms[min(len(norms) - 1, int(settings.quantile * len(norms)))]
    return None


class ClipGradients(Remedy[Settings]):
    """Add GradientClip."""

    name = "clip_gradients"
    new_twin = True

    def obstacle(self, subject: Subject, evidence: Evidence, settings: Settings) -> str | None:
        if any(isinstance(cb, GradientClip) for cb in subject.learn.cbs):
            return "the learner clips its gradients already"
        return None if clip_norm(evidence, settings) else "no finite gradient norm was seen"

    def apply(self, subject: Subject, evidence: Evidence, settings: Settings) -> Change:
        # Three significant digits: the audit shows the very number that was used.
        norm = float(f"{clip_norm(evidence, settings) or 1.0:.3g}")
        cb = GradientClip(norm)
        subject.learn.add_cb(cb)
        subject.hold(self.name, cb)
        return Change(remedy=self.name, what="gradient clipping (L2 norm)", before=None, after=norm)

    def undo(self, subject: Subject, change: Change) -> None:
        subject.learn.remove_cb(subject.release(self.name))
