"""Start the loss scaler from another scale.

Cures        a short run that is spent on halving the scale (lower), gradients that flush to zero at a scale that is
             too low (raise).
Does not     cure an overflow in the forward pass or the loss: these are not scaled.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from autoprec.outcome import Change
from autoprec.policy import InitScale as Settings
from autoprec.remedies.base import Remedy, Subject

if TYPE_CHECKING:
    from autoprec.evidence import Evidence

__all__ = ["DEFAULT_SCALE", "InitScale", "scale_now"]

DEFAULT_SCALE = 65536.0
"""GradScaler's own init_scale."""

_ROOM = 4.0
"""The scale starts two doublings below the largest that worked on the first batches, as later ones vary."""


def scale_now(subject: Subject) -> float:
    """The scale that a fit would start from."""
    return float(subject.setting.scaler_kwargs.get("init_scale", DEFAULT_SCALE))


class InitScale(Remedy[Settings]):
    """Set init_scale from the largest scale that keeps the gradients finite, or by the policy's factors."""

    name = "init_scale"
    needs = ("scale_search",)

    def obstacle(self, subject: Subject, evidence: Evidence, settings: Settings) -> str | None:
        if subject.setting.precision != "fp16":
            return f"{subject.setting.precision} has no loss scale"
        if not settings.factors and (evidence.scale_search is None or evidence.scale_search.largest_finite is None):
            return "no scale keeps the gradients finite"
        if self._target(subject, evidence, settings) == scale_now(subject):
            return f"the scale already starts at {scale_now(subject):g}"
        return None

    def apply(self, subject: Subject, evidence: Evidence, settings: Settings) -> Change:
        before, after = scale_now(subject), self._target(subject, evidence, settings)
        subject.hold(self.name, subject.setting)
        kwargs = {**subject.setting.scaler_kwargs, "init_scale": after}
        subject.setting = replace(subject.setting, scaler_kwargs=kwargs)
        return Change(remedy=self.name, what="initial loss scale", before=before, after=after)

    def undo(self, subject: Subject, change: Change) -> None:
        subject.setting = subject.release(self.name)

    @staticmethod
    def _target(subject: Subject, evidence: Evidence, settings: Settings) -> float:
        if settings.factors:
            wanted = scale_now(subject) * settings.factors[0]
        else:
            search = evidence.scale_search
            top = (search.largest_finite or settings.min) if search else settings.min
            # Inside the window: below what overflows, above what flushes where there is such a scale.
            wanted = max(top / _ROOM, min(top, (search.smallest_unflushed or 0.0) if search else 0.0))
        bounded = min(max(wanted, settings.min), settings.max)
        return float(2.0 ** math.floor(math.log2(bounded)))
