"""A leg: the planned fit, shortened, in one precision, watched step by step.

It is the user's own fit method on the user's own callbacks; three callbacks of ours ride along. They read
and never write, but for the learning-rate schedule, which is squeezed into the leg's steps so that its peak is
reached. A leg stops at its first failure. The caller puts the learner back (`snapshot.preserved`); nothing
here undoes anything.

Costs, beside the steps themselves: one host read of the prediction, the loss, the gradient norm, the weights and
the buffers per step.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from fastai.callback.core import (
    Callback,
    CancelFitException,
    CancelStepException,
    CancelTrainException,
    CancelValidException,
)
from fastai.callback.training import GradientClip

from autoprec.evidence import Failure, Leg, LegSpec, Misuse, Origin, Step
from autoprec.observe.data import DataCollector
from autoprec.observe.misuse import watch_callbacks
from autoprec.observe.origin import Replay, fails_from, place_of_exception, trace
from autoprec.observe.tensors import all_finite, floating, largest, nonfinite_names, total_norm
from autoprec.precision import Setting, attached

if TYPE_CHECKING:
    from fastai.learner import Learner

    from autoprec.schedule import FitPlan

__all__ = ["LegRun", "run_leg"]

# Callbacks that write files, draw or stop early by what a whole run shows. By name: importing each would pull in
# every logging package.
_LEFT_OUT = {
    "CSVLogger",
    "CometCallback",
    "NeptuneCallback",
    "ProgressCallback",
    "SaveModelCallback",
    "ShowGraphCallback",
    "SwanLabCallback",
    "TensorBoardBaseCallback",
    "TerminateOnNaNCallback",
    "TrackerCallback",
    "WandbCallback",
}


@dataclass
class LegRun:
    """A leg in the making: settings and what was seen so far.

    Attributes:
        spec: what differs from the user's settings.
        quotas: training batches per inner fit.
        validation_batches: validation batches after the last step.
        data: collects inputs and targets, or None.
        origins: whether a failure is traced to its op.
        trace_scale: loss scale at or below which a skipped step is traced (above, skipping is how a scaler works).
        keep: training batches kept for later measurements.
    """

    spec: LegSpec
    quotas: tuple[int, ...]
    validation_batches: int
    data: DataCollector | None = None
    origins: bool = True
    trace_scale: float = 1.0
    keep: int = 0
    steps: list[Step] = field(default_factory=list)
    failure: Failure | None = None
    origin: Origin | None = None
    validation: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    poisoned: tuple[str, ...] = ()
    misuses: list[Misuse] = field(default_factory=list)
    batches: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = field(default_factory=list)
    replay: Replay | None = None
    loss: float = math.nan
    bad_prediction: bool = False
    tracing: float = 0.0
    loss_fp32: bool = False
    drawn: str | None = None
    inner_fit: int = -1
    done: int = 0
    norm: float | None = None
    scale: float | None = None
    skipped: bool = True
    start: list[torch.Tensor] = field(default_factory=list)
    phase: Literal["forward", "loss", "backward"] | None = None

    def fail(self, failure: Failure, **tracing: Any) -> None:
        """Note the first failure, trace it, and end the leg."""
        if self.failure is None:
            self.failure = failure
            self.trace(**tracing)
        raise CancelFitException

    def trace(self, *, scale: float | None = None) -> None:
        """Find the origin in the batch at hand."""
        if self.origins and self.origin is None and self.replay is not None:
            started = time.perf_counter()
            try:
                self.origin = trace(self.replay, self.spec.precision, scale=scale)
                self._try_from_start(backward=scale is not None)
            except Exception:  # noqa: BLE001, S110  # a model that cannot be run again must not hide its own failure
                pass
            self.tracing += time.perf_counter() - started

    def _try_from_start(self, *, backward: bool) -> None:
        """Where fp32 fails on the batch too: would it have from the weights that the leg started with?"""
        origin, replay = self.origin, self.replay
        if origin is None or replay is None or not self.start:
            return
        if self.spec.precision == "fp32" or (origin.fp32 is not None and not origin.fp32.finite):
            fails = fails_from(replay, self.start, backward=backward)
            self.origin = origin.model_copy(update={"fails_from_start": fails})


class _Ends(Callback):
    """Last at every event: what the model really gets, what comes out, and when the leg is over."""

    order = 1000

    def __init__(self, leg_run: LegRun) -> None:
        # All that changes is kept in `leg_run`: fastai warns when a callback sets a name that the model has too.
        self.leg_run = leg_run

    @property
    def _quota(self) -> int:
        return self.leg_run.quotas[min(self.leg_run.inner_fit, len(self.leg_run.quotas) - 1)]

    def before_fit(self) -> None:
        self.leg_run.inner_fit += 1
        self.leg_run.done = 0
        if self._quota == 0:
            raise CancelFitException

    def before_train(self) -> None:
        self._squeeze()

    def before_epoch(self) -> None:
        if self.leg_run.done >= self._quota:
            raise CancelFitException

    def before_batch(self) -> None:
        run = self.leg_run
        # The batch is kept as it is for a replay, where a failure of this leg would be traced.
        run.replay = Replay.capture(self.learn, loss_fp32=run.loss_fp32) if run.origins else None
        if not self.training:
            return
        if run.data is not None:
            run.data.inputs(self.xb)
        if len(run.batches) < run.keep:
            run.batches.append((tuple(self.xb), tuple(self.yb)))
        run.phase = "forward"

    def after_pred(self) -> None:
        run = self.leg_run
        run.phase = "loss"
        if not self.training:
            return
        run.bad_prediction = not all_finite(self.pred)
        if run.data is not None and len(self.yb):
            refused = run.data.targets(self.learn)
            if refused is not None:
                run.replay = None
                run.fail(Failure(step=len(run.steps), where="target", names=(refused,)))

    def after_loss(self) -> None:
        run = self.leg_run
        run.phase = "backward"
        if not len(self.yb):
            return
        if not self.training:
            if not all_finite(self.learn.loss) and all_finite(self.xb) and all_finite(self.yb):
                with torch.no_grad():
                    run.trace()
            return
        # loss_grad is what the step uses: a callback may have added to it, or divided it to accumulate.
        run.loss = float(self.learn.loss.detach().float().mean())
        if math.isfinite(run.loss) and all_finite(self.learn.loss_grad):
            return
        run.poisoned = nonfinite_names(self.model.named_buffers())
        where: Any = "prediction" if run.bad_prediction else "loss"
        for part, values in (("target", self.yb), ("input", self.xb)):
            if not all_finite(values):
                where = part
        if where in ("target", "input"):
            run.replay = None  # nothing made the value: there is no origin to look for
        run.fail(Failure(step=len(run.steps), where=where))

    def after_batch(self) -> None:
        run = self.leg_run
        if not self.training:
            loss = self.learn.loss
            if len(self.yb):
                run.validation.append(float(loss.detach().float().mean()) if loss is not None else math.nan)
            if self.iter + 1 >= run.validation_batches:
                raise CancelValidException
            return
        poisoned = nonfinite_names(self.model.named_buffers())
        if poisoned:
            run.poisoned = poisoned
            run.fail(Failure(step=max(0, len(run.steps) - 1), where="buffer", names=poisoned))
        run.done += 1
        if run.done >= self._quota:
            run.drawn = _generators()
            raise CancelTrainException
        self._squeeze()

    def before_validate(self) -> None:
        run = self.leg_run
        last = run.inner_fit >= len(run.quotas) - 1
        run.validation, run.metrics = [], {}
        if not last or run.validation_batches == 0 or run.done < self._quota:
            raise CancelValidException

    def after_validate(self) -> None:
        for metric in self.learn.metrics:
            try:
                self.leg_run.metrics[metric.name] = float(metric.value)
            except (TypeError, ValueError, ZeroDivisionError):  # noqa: PERF203  # a metric without batches, or not a number
                continue

    def _squeeze(self) -> None:
        # ParamScheduler reads pct_train in the next before_batch: the whole schedule passes in the leg's batches.
        self.learn.pct_train = self.leg_run.done / self._quota


class _Ledger(Callback):
    """Right after MixedPrecision (order 10), before GradientClip (11): gradients are unscaled here."""

    order = 10.5

    def __init__(self, leg_run: LegRun) -> None:
        self.leg_run = leg_run

    def _scale(self) -> float | None:
        scaler = getattr(self.learn, "scaler", None)
        return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def before_backward(self) -> None:
        run = self.leg_run
        run.norm, run.scale, run.skipped = None, self._scale(), True

    def before_step(self) -> None:
        run = self.leg_run
        gradients = self._gradients()
        run.norm = total_norm(gradients)
        if not math.isfinite(run.norm):
            names = nonfinite_names((n, p.grad) for n, p in self.model.named_parameters())
            run.fail(Failure(step=len(run.steps), where="gradient", names=names), scale=run.scale or 1.0)
        if len(run.steps) in run.spec.skip_steps:
            raise CancelStepException
        run.skipped = False

    def after_cancel_step(self) -> None:
        run = self.leg_run
        if run.scale is not None and run.scale <= run.trace_scale and run.norm is None:
            run.trace(scale=run.scale)

    def after_step(self) -> None:
        run = self.leg_run
        run.steps.append(
            Step(
                step=len(run.steps),
                loss=run.loss,
                lr=float(self.opt.hypers[-1]["lr"]),
                grad_norm=run.norm,
                scale_before=run.scale,
                scale_after=self._scale(),
                skipped=run.skipped,
            )
        )
        if not run.skipped and not math.isfinite(largest(floating(list(self.model.parameters())))):
            run.replay = None  # the optimizer made it, and the weights before it are gone
            run.fail(
                Failure(step=len(run.steps) - 1, where="weight", names=nonfinite_names(self.model.named_parameters()))
            )


def run_leg(learn: Learner, plan: FitPlan, setting: Setting, run: LegRun) -> Leg:
    """Make one leg on the learner as it is now; the caller restores.

    Args:
        learn: the learner, in the state from which all compared legs start.
        plan: the planned fit.
        setting: precision and scaler arguments of the leg (`run.spec` overrides the initial scale).
        run: what to do and what to collect.

    Returns:
        The leg. An exception inside it is its failure; KeyboardInterrupt and out-of-memory are raised.
    """
    started = time.perf_counter()
    kwargs = dict(setting.scaler_kwargs)
    if run.spec.init_scale is not None:
        kwargs["init_scale"] = run.spec.init_scale
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    _perturb(learn, run.spec)
    weights = [p.detach().clone() for p in learn.model.parameters() if p.is_floating_point()]
    run.start = weights
    for cb in [c for c in learn.cbs if {k.__name__ for k in type(c).__mro__} & _LEFT_OUT]:
        learn.remove_cb(cb)
    cbs: list[Any] = [_Ends(run), _Ledger(run)]
    if run.spec.clip is not None:
        cbs.append(GradientClip(run.spec.clip))
    learn.logger, learn.create_mbar = _silent, False
    if run.spec.precision == "fp16":
        watch_callbacks(learn, run.misuses)
    try:
        own = replace(setting, precision=run.spec.precision, scaler_kwargs=kwargs)
        run.loss_fp32 = own.loss_fp32
        with attached(learn, own):
            plan.scaled(run.spec.lr_factor).run(learn, cbs)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as e:  # noqa: BLE001  # whatever the user's model or loss raises is the leg's evidence
        text = f"{type(e).__name__}: {' '.join(str(e).split())}"
        run.failure = Failure(
            step=len(run.steps), where="exception", error=text[:500], place=place_of_exception(e), phase=run.phase
        )
    if run.failure is None and not all(math.isfinite(v) for v in run.validation):
        names = nonfinite_names(learn.model.named_buffers())
        run.failure = Failure(step=max(0, len(run.steps) - 1), where="validation", names=names)
    moved = [p.detach() for p in learn.model.parameters() if p.is_floating_point()]
    return Leg(
        spec=run.spec,
        steps=tuple(run.steps),
        planned_steps=sum(run.quotas),
        failure=run.failure,
        origin=run.origin,
        validation=tuple(run.validation),
        metrics=run.metrics,
        poisoned_buffers=run.poisoned,
        misuses=tuple(run.misuses),
        drawn=run.drawn,
        param_change=_change(weights, moved),
        seconds=time.perf_counter() - started - run.tracing,
        peak_memory=torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None,
    )


def quotas(stages: Sequence[int], steps: int) -> tuple[int, ...]:
    """Share `steps` training batches among a plan's inner fits: all of them if they fit, else equally.

    An inner fit shorter than its share leaves the rest to the others.
    """
    left = steps
    order = sorted(range(len(stages)), key=lambda i: stages[i])
    shares = dict.fromkeys(order, 0)
    for done, i in enumerate(order):
        shares[i] = min(stages[i], left // (len(order) - done))
        left -= shares[i]
    return tuple(shares[i] for i in range(len(stages)))


def _generators() -> str:
    """A digest of torch's generators, the accelerator's (which draws its dropout masks) included."""
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8)
    if torch.cuda.is_initialized():
        digest.update(torch.cuda.get_rng_state().numpy().tobytes())
    return digest.hexdigest()


def _perturb(learn: Learner, spec: LegSpec) -> None:
    if spec.perturb_seed is None:
        return
    generator = torch.Generator().manual_seed(spec.perturb_seed)
    with torch.no_grad():
        for p in learn.model.parameters():
            if p.is_floating_point():
                noise = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
                p.mul_(1 + 2**-11 * noise)
    if spec.reseed:
        torch.manual_seed(spec.perturb_seed)


def _change(before: list[torch.Tensor], after: list[torch.Tensor]) -> float | None:
    size = total_norm(before)
    if len(before) != len(after) or size == 0.0:
        return None
    return total_norm([b.to(a.device) - a for a, b in zip(before, after, strict=True)]) / size


def _silent(*_args: object) -> None:
    """In place of fastai's logger."""
