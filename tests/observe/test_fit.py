"""Watching the real fit: the same ledger as a leg's, and a fit that is bit for bit the same."""

from __future__ import annotations

import math
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from fits import BS, classified, fitted, leg, seed_all
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fastai's own imports
    from fastai.callback.core import Callback
    from fastai.callback.training import GradientAccumulation
    from fastai.losses import CrossEntropyLossFlat
    from fastai.metrics import accuracy

from autoprec.evidence import Precision
from autoprec.observe.fit import FitLog, FitWatch
from autoprec.precision import Setting, attached
from autoprec.schedule import FitPlan
from autoprec.snapshot import preserved

NAN = math.nan


def watched(
    learn: Any, precision: Precision, plan: FitPlan, scaler: dict[str, Any] | None = None, *, watch: bool = True
) -> tuple[FitLog, list[Tensor], list[Any]]:
    """Make the fit, with or without the watch: the log, the weights it ends with, and the generators' states."""
    log = FitLog()
    with preserved(learn):
        with attached(learn, Setting(precision, scaler or {})):
            plan.run(learn, [FitWatch(log)] if watch else [])
        log_leg = log.leg(learn, precision, 10)
        weights = [p.detach().clone() for p in learn.model.parameters()]
        generators = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
        generators += [learn.dls.train.rng.getstate()]
        assert log_leg.steps == tuple(log.steps)
        assert not any(isinstance(cb, FitWatch) for cb in learn.cbs)
    return log, weights, generators


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("precision", "scaler"),
    [
        ("fp16", {"init_scale": 2.0**20}),
        ("fp16", {"init_scale": 2.0**14, "growth_interval": 2}),
        ("bf16", {}),
        ("fp32", {}),
    ],
)
def test_ledger_is_that_of_the_leg(precision: Precision, scaler: dict[str, Any]) -> None:
    seed_all(2)
    learn = fitted(*classified(), model=model(), shuffle=True)
    plan = FitPlan("one_cycle", 1, 0.1)
    log, _, _ = watched(learn, precision, plan, scaler)
    found = leg(learn, 10, precision=precision, plan=plan, setting=Setting(precision, scaler))
    assert len(log.steps) == 10
    for a, b in zip(log.steps, found.steps, strict=True):
        assert a == b.model_copy(update={"grad_norm": None})
    if precision == "fp16":
        assert {s.skipped for s in log.steps} == {True, False}


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_watching_changes_nothing_and_draws_nothing(precision: Precision) -> None:
    seed_all(3)
    learn = fitted(*classified(), model=model(), shuffle=True)
    plan = FitPlan("fit", 2, 0.1)
    scaler = {"init_scale": 2.0**20}
    with_log, weights, generators = watched(learn, precision, plan, scaler)
    without, same_weights, same_generators = watched(learn, precision, plan, scaler, watch=False)
    assert len(with_log.steps) == 20
    assert without.steps == []
    assert all(torch.equal(a, b) for a, b in zip(weights, same_weights, strict=True))
    assert generators == same_generators
    assert not torch.equal(weights[0], next(learn.model.parameters()))


def test_each_inner_fit_starts_from_its_own_scale() -> None:
    learn = fitted(*classified(), model=nn.Sequential(nn.Linear(5, 3)), splitter=lambda m: [[m[0].weight], [m[0].bias]])
    log, _, _ = watched(learn, "fp16", FitPlan("fine_tune", 1, 0.01), {"init_scale": 2.0**19})
    assert len(log.steps) == 20
    assert [log.steps[i].scale_before for i in (0, 10)] == [2.0**19, 2.0**19]
    for i in (0, 10):
        for a, b in zip(log.steps[i : i + 10], log.steps[i + 1 : i + 10], strict=False):
            assert a.scale_after == b.scale_before


def test_batches_that_only_accumulate_are_no_steps() -> None:
    learn = fitted(*classified(), cbs=[GradientAccumulation(n_acc=2 * BS)])
    plan = FitPlan("fit", 1, 0.1)
    log, _, _ = watched(learn, "fp16", plan, {"init_scale": 2.0**10})
    found = leg(learn, 10, precision="fp16", plan=plan, setting=Setting("fp16", {"init_scale": 2.0**10}))
    assert len(log.steps) == 5
    assert [(s.scale_before, s.scale_after, s.skipped, s.loss) for s in log.steps] == [
        (s.scale_before, s.scale_after, s.skipped, s.loss) for s in found.steps
    ]
    assert not any(s.skipped for s in log.steps)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_fit_ends_at_the_first_loss_that_is_not_finite(precision: Precision) -> None:
    x, y = classified()
    x[3 * BS] = NAN
    learn = fitted(x, y)
    log, weights, _ = watched(learn, precision, FitPlan("fit", 2, 0.1), {"init_scale": 2.0**10})
    assert log.failure is not None
    assert (log.failure.where, log.failure.step, len(log.steps)) == ("loss", 3, 3)
    assert math.isnan(log.loss)
    # Before the step: the weights are those that three good batches made.
    assert all(bool(torch.isfinite(w).all()) for w in weights)


class Breaks(Callback):
    """Makes a weight, a buffer or the validation loss NaN after the last training batch."""

    order = 950

    def __init__(self, broken_part: str) -> None:
        self.broken_part = broken_part

    def after_train(self) -> None:
        with torch.no_grad():
            if self.broken_part == "weight":
                self.model[1].weight[0, 0] = NAN
            if self.broken_part == "buffer":
                self.model[0].running_mean[0] = NAN
            if self.broken_part == "validation":
                self.learn.loss_func = nothing


def nothing(pred: Tensor, _target: Tensor) -> Tensor:
    return pred.sum() * NAN


@pytest.mark.parametrize(
    ("what", "where", "names", "poisoned"),
    [
        ("weight", "weight", ("1.weight",), ()),
        ("buffer", "buffer", ("0.running_mean",), ("0.running_mean",)),
        ("validation", "validation", (), ()),
        ("nothing", None, (), ()),
    ],
)
def test_fit_as_a_leg(what: str, where: str | None, names: tuple[str, ...], poisoned: tuple[str, ...]) -> None:
    learn = fitted(*classified(), model=nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)), metrics=accuracy)
    log = FitLog()
    learn.fit(1, 0.1, cbs=[FitWatch(log), Breaks(what)])
    found = log.leg(learn, "fp32", 10)
    assert (found.failure and found.failure.where) == where
    assert (found.failure.names if found.failure else ()) == names
    assert found.poisoned_buffers == poisoned
    assert (len(found.steps), found.planned_steps) == (10, 10)
    if where is None:
        assert found.validation == (learn.recorder.values[-1][1],)
        values = FitLog.final_values(learn)
        assert list(values) == ["train_loss", "valid_loss", "accuracy"]
        assert values["accuracy"] == learn.recorder.values[-1][2]
        assert found.failure is None
    assert isinstance(learn.loss_func, CrossEntropyLossFlat) == (what != "validation")


def test_learner_that_was_never_fitted_has_no_values() -> None:
    learn = fitted(*classified())
    assert FitLog.final_values(learn) == {}
    assert FitLog.validation_loss(learn) is None
