"""The planned fit: which of fastai's fit methods, for how long, at which learning rate.

A probe runs the very same method with fewer steps (see `observe.leg`), so the plan is the one place that
knows how the methods differ: what they call their learning rate, and that `fine_tune` is two fits in one.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import fastai.callback.schedule  # noqa: F401  # patches fit_one_cycle and the rest onto Learner

from autoprec.errors import InputError

if TYPE_CHECKING:
    from fastai.learner import Learner

__all__ = ["SCHEDULES", "FitPlan"]

SCHEDULES: Mapping[str, tuple[str, str]] = {
    "fit": ("fit", "lr"),
    "one_cycle": ("fit_one_cycle", "lr_max"),
    "flat_cos": ("fit_flat_cos", "lr"),
    "fine_tune": ("fine_tune", "base_lr"),
}
"""Name -> (method of Learner, its keyword for the learning rate)."""

_ARGUMENTS = ("audit", "emulate_cuda", "epochs", "extra_remedies", "extra_rules", "lr", "on_failure", "policy",
              "schedule", "seed")  # fmt: skip
"""What autoprec's own functions take, for a hint at a misspelt one."""

_OURS = {"n_epoch", "epochs", "lr", "lr_max", "base_lr", "cbs", "self"}


@dataclass(frozen=True)
class FitPlan:
    """One call of a fastai fit method.

    Attributes:
        schedule: "fit", "one_cycle", "flat_cos" or "fine_tune".
        epochs: epochs of the (last) fit, at least 1.
        lr: learning rate, float or slice; None takes the learner's (or, for fine_tune, fastai's) default.
        lr_factor: what remedies multiply the learning rate by; 1 is the user's own.
        kwargs: passed on to the method unchanged.
    """

    schedule: str
    epochs: int
    lr: float | slice | None = None
    lr_factor: float = 1.0
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def checked(
        cls, learn: Learner, epochs: object, lr: object, schedule: object, kwargs: Mapping[str, Any]
    ) -> FitPlan:
        """Build a plan from a caller's arguments.

        Raises:
            InputError: an unknown schedule or keyword, epochs that is no whole number from 1 on, or an lr that is
                not a positive number or slice.
        """
        if not isinstance(schedule, str) or schedule not in SCHEDULES:
            close = difflib.get_close_matches(str(schedule), SCHEDULES, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InputError(f"schedule is {schedule!r}; allowed are {', '.join(map(repr, SCHEDULES))}{hint}")
        if isinstance(epochs, bool) or not isinstance(epochs, Integral) or epochs < 1:
            raise InputError(f"epochs is {epochs!r}; give the number of epochs to train, a whole number from 1 on")
        method, _ = SCHEDULES[schedule]
        allowed = set(inspect.signature(getattr(learn, method)).parameters)
        if schedule == "fine_tune":
            allowed |= set(inspect.signature(learn.fit_one_cycle).parameters) - {"lr_max", "pct_start"}
        allowed -= {"kwargs"} | _OURS
        for name in kwargs:
            if name in ("lr_max", "base_lr"):
                raise InputError(f"{name!r} is fastai's name for the learning rate of one schedule; give it as lr=")
            if name not in allowed:
                close = difflib.get_close_matches(name, [*allowed, *_ARGUMENTS], n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise InputError(
                    f"{name!r} is no argument of autoprec or of Learner.{method}, which takes "
                    f"{', '.join(sorted(allowed))}{hint}"
                )
        return cls(schedule, int(epochs), _checked_lr(lr, schedule), 1.0, dict(kwargs))

    def scaled(self, factor: float) -> FitPlan:
        """The same plan with the learning rate times `factor` (discriminative rates keep their ratios)."""
        return replace(self, lr_factor=self.lr_factor * factor)

    def learning_rate(self, learn: Learner) -> float | slice | None:
        """What is handed to fastai: None only where nothing was asked for and nothing is scaled."""
        lr = self.lr
        if self.lr_factor == 1.0:
            return lr
        if lr is None:
            default = inspect.signature(learn.fine_tune).parameters["base_lr"].default
            lr = default if self.schedule == "fine_tune" else learn.lr
        if isinstance(lr, slice):
            start = None if lr.start is None else lr.start * self.lr_factor
            return slice(start, lr.stop * self.lr_factor)
        return float(lr) * self.lr_factor

    def stages(self, learn: Learner) -> tuple[int, ...]:
        """Training batches of each inner fit, in order (`fine_tune` has two)."""
        batches = len(learn.dls.train)
        stages = [self.epochs * batches]
        if self.schedule == "fine_tune":
            default = inspect.signature(learn.fine_tune).parameters["freeze_epochs"].default
            stages.insert(0, self.kwargs.get("freeze_epochs", default) * batches)
        return tuple(stages)

    def run(self, learn: Learner, cbs: list[Any] | None = None) -> None:
        """Call the fit method with the plan's arguments and `cbs` added for its time."""
        method, lr_name = SCHEDULES[self.schedule]
        kwargs = dict(self.kwargs)
        lr = self.learning_rate(learn)
        if lr is not None:
            kwargs[lr_name] = lr
        getattr(learn, method)(self.epochs, cbs=cbs, **kwargs)


def _checked_lr(lr: object, schedule: str) -> float | slice | None:
    if lr is None:
        return None
    if isinstance(lr, slice):
        if schedule == "fine_tune":
            raise InputError(f"lr is {lr!r}; fine_tune takes one number (its base_lr) and makes the slice itself")
        ends = [e for e in (lr.start, lr.stop) if e is not None]
        if lr.stop is not None and all(_positive(e) for e in ends):
            return lr
    elif _positive(lr):
        return float(lr)  # type: ignore[arg-type]  # _positive has seen that it is a number
    raise InputError(f"lr is {lr!r}; give a positive number, or a slice of them for discriminative rates")


def _positive(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and 0 < float(value) < float("inf")
