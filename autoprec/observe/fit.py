"""Watching the real fit: a ledger and the first failure, read only, in step with what fastai reads anyway.

The callback draws no random number, changes no tensor and leaves the learner when the fit ends; a healthy fit is
bit for bit what it would have been without. It ends the fit at the first non-finite training loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from fastai.callback.core import Callback, CancelFitException

from autoprec.evidence import Failure, Leg, LegSpec, Step
from autoprec.observe.tensors import nonfinite_names

if TYPE_CHECKING:
    from fastai.learner import Learner

    from autoprec.evidence import Precision

__all__ = ["FitLog", "FitWatch"]


@dataclass
class FitLog:
    """What was seen of a fit."""

    steps: list[Step] = field(default_factory=list)
    failure: Failure | None = None
    loss: float = math.nan
    scale: float | None = None
    skipped: bool = True
    phase: Literal["forward", "loss", "backward"] | None = None

    def leg(self, learn: Learner, precision: Precision, planned: int) -> Leg:
        """The fit as a leg, so that the same judge can judge it; weights, buffers and validation included."""
        failure = self.failure
        last = max(0, len(self.steps) - 1)
        names = nonfinite_names(learn.model.named_parameters())
        buffers = nonfinite_names(learn.model.named_buffers())
        values = learn.recorder.values[-1] if getattr(learn.recorder, "values", None) else ()
        if failure is None and names:
            failure = Failure(step=last, where="weight", names=names)
        if failure is None and buffers:
            failure = Failure(step=last, where="buffer", names=buffers)
        validation = self.validation_loss(learn)
        if failure is None and values and validation is not None and not math.isfinite(validation):
            failure = Failure(step=last, where="validation")
        return Leg(
            spec=LegSpec(precision=precision),
            steps=tuple(self.steps),
            planned_steps=planned,
            failure=failure,
            poisoned_buffers=buffers,
            validation=() if validation is None else (validation,),
        )

    @staticmethod
    def final_values(learn: Learner) -> dict[str, float]:
        """The recorder's last row by column name; columns that are no number are left out."""
        recorder = learn.recorder
        rows = getattr(recorder, "values", None)
        if not rows:
            return {}
        names = [n for n in recorder.metric_names if n not in ("epoch", "time")]
        return {n: float(v) for n, v in zip(names, rows[-1], strict=False) if isinstance(v, (int, float))}

    @classmethod
    def validation_loss(cls, learn: Learner) -> float | None:
        """The last validation loss by name; None if there was none."""
        return cls.final_values(learn).get("valid_loss")


class FitWatch(Callback):
    """Right after MixedPrecision (order 10): its scaler has been updated, nothing else has happened yet."""

    order = 10.5

    def __init__(self, fit_log: FitLog) -> None:
        self.fit_log = fit_log

    def before_batch(self) -> None:
        """Know what is being computed, for an exception."""
        self.fit_log.phase = "forward"

    def after_pred(self) -> None:
        """Likewise."""
        self.fit_log.phase = "loss"

    def after_batch(self) -> None:
        """What comes after a batch is no computing of the model's."""
        self.fit_log.phase = None

    def after_loss(self) -> None:
        """Read the loss; end the fit where it is not finite, before the step."""
        log = self.fit_log
        log.phase = "backward"
        if not self.training or not len(self.yb):
            return
        log.loss = float(self.learn.loss.detach().float().mean())
        if not math.isfinite(log.loss):
            log.failure = Failure(step=len(log.steps), where="loss")
            raise CancelFitException

    def before_backward(self) -> None:
        """A new step; note the scale it starts with."""
        log = self.fit_log
        log.skipped = True
        if log.scale is None:
            log.scale = self._scale()

    def before_step(self) -> None:
        """Reached only by a step that the scaler lets through."""
        self.fit_log.skipped = False

    def after_step(self) -> None:
        """One row of the ledger."""
        log, after = self.fit_log, self._scale()
        log.steps.append(
            Step(
                step=len(log.steps),
                loss=log.loss,
                lr=float(self.opt.hypers[-1]["lr"]),
                scale_before=log.scale,
                scale_after=after,
                skipped=log.skipped,
            )
        )
        log.scale = after

    def before_fit(self) -> None:
        """An inner fit builds a new scaler."""
        self.fit_log.scale = None

    def _scale(self) -> float | None:
        scaler: torch.amp.GradScaler | None = getattr(self.learn, "scaler", None)
        return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None
