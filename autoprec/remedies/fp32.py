"""Full precision: no autocast, no scaler.

Cures        everything that only 16-bit arithmetic breaks.
Costs        the most: about twice the time and memory of a 16-bit run on a GPU with tensor cores.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autoprec.outcome import Change
from autoprec.policy import Fp32 as Settings
from autoprec.precision import Setting
from autoprec.remedies.base import Remedy, Subject

if TYPE_CHECKING:
    from autoprec.evidence import Evidence

__all__ = ["Fp32"]


class Fp32(Remedy[Settings]):
    """Train in fp32."""

    name = "fp32"

    def obstacle(self, subject: Subject, evidence: Evidence, settings: Settings) -> str | None:
        return "the run is in fp32 already" if subject.setting.precision == "fp32" else None

    def apply(self, subject: Subject, evidence: Evidence, settings: Settings) -> Change:
        return switch(subject, self.name, Setting("fp32"))

    def undo(self, subject: Subject, change: Change) -> None:
        subject.setting = subject.release(self.name)


def switch(subject: Subject, remedy: str, to: Setting) -> Change:
    """Change the precision of the run; what it was is held under the remedy's name."""
    before = subject.setting
    subject.hold(remedy, before)
    subject.setting = replace(to, skip_nonfinite=before.skip_nonfinite)  # no matter of precision
    return Change(remedy=remedy, what="precision", before=before.precision, after=to.precision)
