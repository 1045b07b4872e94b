"""Who touches scaled gradients is named, and who does no harm is not."""

from __future__ import annotations

import inspect
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fits import BS, classified, fitted, leg
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fastai's own imports
    from fastai.callback.core import Callback
    from fastai.callback.training import GradientAccumulation, GradientClip

from autoprec.evidence import Leg, Misuse
from autoprec.precision import Setting
from autoprec.snapshot import fingerprint

SCALE = 2.0**10


def clip(model: nn.Module, norm: float) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), norm)


class Unscales(Callback):
    order = 5

    def before_step(self) -> None:
        scaler = getattr(self.learn, "scaler", None)
        if scaler is not None and scaler.is_enabled():
            scaler.unscale_(self.learn.opt)  # this unscales


class UnscalesAndClips(Unscales):
    def before_step(self) -> None:
        super().before_step()
        clip(self.model, 0.01)


class ClipsAfterBackward(Callback):
    def after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)  # this clips


class ClipsTooEarly(Callback):
    order = 5

    def before_step(self) -> None:
        clip(self.model, 1.0)


class ClipsLateAndEarly(Callback):
    """`before_step` is late enough, `after_backward` is not."""

    order = 12

    def after_backward(self) -> None:
        for p in self.model.parameters():
            p.grad.mul_(0.5)  # this halves

    def before_step(self) -> None:
        clip(self.model, 1.0)


class ClipsInTime(Callback):
    order = 12

    def before_step(self) -> None:
        clip(self.model, 0.01)


class Reads(Callback):
    order = 5

    def __init__(self) -> None:
        self.norms_seen: list[float] = []

    def after_backward(self) -> None:
        self.norms_seen.append(float(self.model[0].weight.grad.norm()))

    def before_step(self) -> None:
        self.norms_seen.append(float(self.model[0].weight.grad.norm()))


class ReadsTheScale(Callback):
    order = 5

    def before_step(self) -> None:
        assert self.learn.scaler is None or self.learn.scaler.get_scale() > 0


def watched(*callbacks: Any, precision: Any = "fp16", scale: float = SCALE, quota: int = 5) -> Leg:
    torch.manual_seed(0)
    learn = fitted(*classified(), cbs=list(callbacks))
    before = fingerprint(learn)
    found = leg(learn, quota, precision=precision, setting=Setting(precision, {"init_scale": scale}))
    assert fingerprint(learn) == before
    return found


def one(found: Leg) -> Misuse:
    (misuse,) = found.misuses
    return misuse


def at(misuse: Misuse, callback: type, method: str, source: str | None = None) -> None:
    """The class, and the line that does it: by its source, else that of the method."""
    assert misuse.callback == callback.__name__
    assert misuse.place.file is not None
    assert Path(misuse.place.file).resolve() == Path(__file__).resolve()
    assert misuse.place.function == f"{callback.__qualname__}.{method}"
    assert misuse.place.source == (source or f"def {method}(self) -> None:")
    if source is None:
        assert misuse.place.line == inspect.getsourcelines(getattr(callback, method))[1]
    else:
        assert misuse.place.line is not None
        assert Path(__file__).read_text().splitlines()[misuse.place.line - 1].strip() == source


def test_unscaling_is_named() -> None:
    misuse = one(watched(Unscales()))
    at(misuse, Unscales, "before_step", "scaler.unscale_(self.learn.opt)  # this unscales")
    assert misuse.clips_to is None
    assert misuse.what == "unscales"
    assert misuse.ratio == pytest.approx(1 / SCALE, rel=1e-3)


def test_unscaling_and_clipping_is_unscaling() -> None:
    misuse = one(watched(UnscalesAndClips()))
    at(misuse, UnscalesAndClips, "before_step")
    assert misuse.what == "unscales"
    assert misuse.ratio is not None
    assert misuse.ratio < 0.1 / SCALE
    assert misuse.clips_to == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("callback", "method", "source"),
    [
        (ClipsAfterBackward, "after_backward", "nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)  # this clips"),
        (ClipsTooEarly, "before_step", None),  # it calls a function that does
    ],
)
def test_clipping_scaled_gradients_is_named(callback: type, method: str, source: str | None) -> None:
    free, misuse = watched(), one(watched(callback()))
    at(misuse, callback, method, source)
    assert misuse.clips_to == pytest.approx(1.0, rel=1e-3)
    assert misuse.what == "changes scaled gradients"
    # To 1.0 from the gradient's norm times the loss scale.
    assert free.steps[0].grad_norm is not None
    assert misuse.ratio == pytest.approx(1 / (free.steps[0].grad_norm * SCALE), rel=1e-3)


def test_the_event_that_does_it_is_named() -> None:
    misuse = one(watched(ClipsLateAndEarly()))
    at(misuse, ClipsLateAndEarly, "after_backward", "p.grad.mul_(0.5)  # this halves")
    assert misuse.ratio == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("callback", [ClipsInTime, Reads, ReadsTheScale, lambda: GradientClip(0.01)])
def test_what_does_no_harm_is_not_named(callback: Any) -> None:
    assert watched(callback()).misuses == ()


def test_each_is_named_once_and_the_innocent_between_them_is_not() -> None:
    found = watched(ClipsTooEarly(), Reads(), Unscales(), GradientClip(1.0), ClipsInTime())
    assert sorted(m.callback for m in found.misuses) == ["ClipsTooEarly", "Unscales"]


def test_reading_is_left_as_it_was() -> None:
    reads = Reads()
    learn = fitted(*classified(), cbs=[reads])
    seen: list[float] = []
    found = leg(
        learn,
        3,
        precision="fp16",
        setting=Setting("fp16", {"init_scale": SCALE}),
        inside=lambda: seen.extend(reads.norms_seen),
    )
    assert found.misuses == ()
    assert len(seen) == 6
    assert seen[0] == seen[1]
    assert math.log2(seen[0] / SCALE) < 3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_a_scaler_nothing_is_misused(precision: Any) -> None:
    assert watched(ClipsTooEarly(), ClipsAfterBackward(), precision=precision).misuses == ()


def test_gradients_that_overflow_are_no_misuse() -> None:
    # Norms are infinite on both sides of one that only reads.
    found = watched(Reads(), ClipsTooEarly(), scale=2.0**40, quota=3)
    assert all(s.skipped for s in found.steps)
    assert [m for m in found.misuses if m.callback == "Reads"] == []


def test_accumulated_batches_are_watched_too() -> None:
    found = watched(GradientAccumulation(n_acc=2 * BS), ClipsAfterBackward(), quota=6)
    assert one(found).callback == "ClipsAfterBackward"


def test_the_ledger_is_the_same_with_watchers() -> None:
    free, read = watched(), watched(Reads())
    assert [s.loss for s in free.steps] == [s.loss for s in read.steps]
    assert [s.grad_norm for s in free.steps] == [s.grad_norm for s in read.steps]


class Fills(Callback):
    """As a loss that is ignored in this batch: nothing but zeros before and after."""

    order = 5

    def before_step(self) -> None:
        for p in self.model.parameters():
            p.grad.mul_(0.0 if float(p.grad.abs().max()) == 0 else 1.0)


def test_zero_gradients_are_no_misuse() -> None:
    x, y = classified()
    learn = fitted(x * 0, y, cbs=[Fills()], loss=lambda pred, _: pred.float().sum() * 0)
    found = leg(learn, 3, precision="fp16", setting=Setting("fp16", {"init_scale": SCALE}))
    assert found.failure is None
    assert found.misuses == ()
