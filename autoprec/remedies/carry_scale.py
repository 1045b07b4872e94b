"""Start the fit from the loss scale on which the probe settled.

Cures        a short run of which most steps are spent on finding the scale: the probe has found it already.
Does not     help where the scale never settles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autoprec.ledger import Skips
from autoprec.outcome import Change
from autoprec.policy import CarryScale as Settings
from autoprec.remedies.base import Remedy, Subject
from autoprec.remedies.init_scale import scale_now

if TYPE_CHECKING:
    from autoprec.evidence import Evidence

__all__ = ["CarryScale"]


class CarryScale(Remedy[Settings]):
    """Set init_scale to the scale at the end of the probe."""

    name = "carry_scale"

    def obstacle(self, subject: Subject, evidence: Evidence, settings: Settings) -> str | None:
        if subject.setting.precision != "fp16":
            return f"{subject.setting.precision} has no loss scale"
        main = evidence.main
        steps = main.steps if main else ()
        if not steps or steps[-1].skipped or steps[-1].scale_after is None:
            return "the scale had not settled at the end of the probe"
        if Skips.of(steps).last_scale == scale_now(subject):
            return "the scale settled where it started"
        return None

    def apply(self, subject: Subject, evidence: Evidence, settings: Settings) -> Change:
        main = evidence.main
        settled = float(main.steps[-1].scale_after or 1.0) if main else 1.0
        before = scale_now(subject)
        subject.hold(self.name, subject.setting)
        kwargs = {**subject.setting.scaler_kwargs, "init_scale": settled}
        subject.setting = replace(subject.setting, scaler_kwargs=kwargs)
        return Change(remedy=self.name, what="initial loss scale", before=before, after=settled)

    def undo(self, subject: Subject, change: Change) -> None:
        subject.setting = subject.release(self.name)
