"""Compute the loss function outside autocast, in fp32.

Cures        a product, sum or epsilon that leaves half's range inside the loss: fastai casts the prediction to fp32,
             but the loss runs under autocast.
Costs        next to nothing: the loss is a small part of a step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autoprec.outcome import Change
from autoprec.policy import LossFp32 as Settings
from autoprec.remedies.base import Remedy, Subject

if TYPE_CHECKING:
    from autoprec.evidence import Evidence

__all__ = ["LossFp32"]


class LossFp32(Remedy[Settings]):
    """Leave autocast before the loss."""

    name = "loss_fp32"

    def obstacle(self, subject: Subject, evidence: Evidence, settings: Settings) -> str | None:
        if subject.setting.precision == "fp32":
            return "the run is in fp32 already"
        failure = evidence.main.failure if evidence.main else None
        if failure is not None and failure.phase == "forward":
            return "the fault is in the model, not in the loss"
        return "the loss runs in fp32 already" if subject.setting.loss_fp32 else None

    def apply(self, subject: Subject, evidence: Evidence, settings: Settings) -> Change:
        subject.hold(self.name, subject.setting)
        before = subject.setting.precision
        subject.setting = replace(subject.setting, loss_fp32=True)
        return Change(remedy=self.name, what="loss function", before=f"under {before} autocast", after="in fp32")

    def undo(self, subject: Subject, change: Change) -> None:
        subject.setting = subject.release(self.name)
