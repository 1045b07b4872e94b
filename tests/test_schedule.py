"""The planned fit: its checks, its length, its learning rate, and that fastai gets exactly what was asked for."""

from __future__ import annotations

import learners  # first: it silences fastai's import
import numpy as np
import pytest
from fastai.callback.core import Callback

from autoprec.errors import InputError
from autoprec.schedule import SCHEDULES, FitPlan

thread_left_alone = learners.thread_left_alone
pytestmark = learners.FASTAI_WARNINGS


@pytest.fixture
def learn():
    learners.seed_all()
    return learners.mlp(batches=4)


def checked(learn, epochs=1, lr=None, schedule="fit", **kwargs):
    return FitPlan.checked(learn, epochs, lr, schedule, kwargs)


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ({"schedule": "one_cycel"}, ["'one_cycel'", "did you mean 'one_cycle'", "'flat_cos'"]),
        ({"schedule": "xyz"}, ["'xyz'", "'fine_tune'"]),
        ({"schedule": None}, ["None", "'fit'"]),
        ({"schedule": ["fit"]}, ["['fit']"]),
        ({"epochs": 0}, ["epochs is 0", "from 1 on"]),
        ({"epochs": -1}, ["epochs is -1"]),
        ({"epochs": 1.5}, ["epochs is 1.5"]),
        ({"epochs": True}, ["epochs is True"]),
        ({"epochs": "3"}, ["epochs is '3'"]),
        ({"epochs": None}, ["epochs is None"]),
        ({"lr": 0}, ["lr is 0", "positive"]),
        ({"lr": -0.1}, ["lr is -0.1"]),
        ({"lr": "a"}, ["lr is 'a'"]),
        ({"lr": True}, ["lr is True"]),
        ({"lr": float("nan")}, ["lr is nan"]),
        ({"lr": float("inf")}, ["lr is inf"]),
        ({"lr": slice(None)}, ["slice(None, None, None)"]),
        ({"lr": slice(1e-3, 0)}, ["slice(0.001, 0, None)"]),
        ({"lr": slice(-1e-3, 1e-2)}, ["slice(-0.001"]),
        ({"lr": slice(1e-3, 1e-2), "schedule": "fine_tune"}, ["fine_tune takes one number", "base_lr"]),
        ({"lr_max": 0.1}, ["'lr_max' is fastai's name", "lr="]),
        ({"wdd": 0.1}, ["'wdd'", "did you mean 'wd'", "Learner.fit"]),
        ({"pct_start": 0.1}, ["'pct_start'", "Learner.fit"]),
        ({"n_epoch": 3}, ["'n_epoch'"]),
        ({"lr_max": 3, "schedule": "one_cycle"}, ["'lr_max'"]),
        ({"freeze_epoch": 3, "schedule": "fine_tune"}, ["did you mean 'freeze_epochs'"]),
    ],
)
def test_what_cannot_be_run_is_refused_in_words(learn, arguments, fragments):
    with pytest.raises(InputError) as refused:
        checked(learn, **arguments)
    for fragment in fragments:
        assert fragment in str(refused.value)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("lr", [None, 1, 0.1, np.float32(0.5), np.float64(0.25)])
def test_what_can_be_run_is_taken(learn, schedule, lr):
    plan = checked(learn, np.int64(2), lr, schedule)
    assert (plan.epochs, type(plan.epochs)) == (2, int)
    assert plan.lr == (None if lr is None else float(lr))
    assert plan.lr is None or type(plan.lr) is float


@pytest.mark.parametrize("lr", [slice(1e-3), slice(1e-4, 1e-2)])
def test_slices_are_taken_as_they_are(learn, lr):
    assert checked(learn, lr=lr).lr == lr


@pytest.mark.parametrize(
    ("schedule", "kwargs"),
    [
        ("fit", {"wd": 0.1, "reset_opt": True}),
        ("one_cycle", {"pct_start": 0.3, "div": 10.0, "wd": 0.1}),
        ("flat_cos", {"pct_start": 0.5, "div_final": 1e3}),
        ("fine_tune", {"freeze_epochs": 2, "lr_mult": 10, "pct_start": 0.2, "div": 4.0, "wd": 0.1}),
    ],
)
def test_the_keywords_of_each_method(learn, schedule, kwargs):
    assert checked(learn, schedule=schedule, **kwargs).kwargs == kwargs


def test_the_stages_of_each_schedule(learn):
    assert checked(learn, 3).stages(learn) == (12,)
    assert checked(learn, 3, schedule="one_cycle").stages(learn) == (12,)
    assert checked(learn, 3, schedule="fine_tune").stages(learn) == (4, 12)
    assert checked(learn, 3, schedule="fine_tune", freeze_epochs=2).stages(learn) == (8, 12)


@pytest.mark.parametrize(
    ("lr", "factor", "expected"),
    [
        (0.5, 0.1, 0.05),
        (slice(0.5), 0.1, slice(None, 0.05)),
        (slice(0.1, 0.5), 0.01, slice(0.001, 0.005)),
    ],
)
def test_a_scaled_rate_keeps_its_ratios(learn, lr, factor, expected):
    found = checked(learn, lr=lr).scaled(factor).learning_rate(learn)
    if isinstance(expected, slice):
        assert found.stop == pytest.approx(expected.stop)
        assert found.start == (None if expected.start is None else pytest.approx(expected.start))
        if expected.start:
            assert found.stop / found.start == pytest.approx(lr.stop / lr.start)
    else:
        assert found == pytest.approx(expected)


def test_scaling_twice_multiplies_and_leaves_the_plan_alone(learn):
    plan = checked(learn, lr=1.0)
    assert plan.scaled(0.1).scaled(0.1).learning_rate(learn) == pytest.approx(0.01)
    assert plan.learning_rate(learn) == 1.0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_default_rate_is_fastais(learn, schedule):
    plan = checked(learn, schedule=schedule)
    assert plan.learning_rate(learn) is None  # nothing is handed on: fastai takes its own
    default = 2e-3 if schedule == "fine_tune" else learn.lr
    assert plan.scaled(0.5).learning_rate(learn) == pytest.approx(default / 2)


class Rates(Callback):
    order = 70

    def __init__(self):
        self.seen = []

    def before_step(self):
        self.seen.append([h["lr"] for h in self.opt.hypers])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("lr", [None, 0.01])
def test_running_a_plan_is_calling_fastais_method(schedule, lr):
    seen = []
    for planned in (True, False):
        learners.seed_all()
        learn, rates = learners.mlp(batches=4), Rates()
        if planned:
            checked(learn, 2, lr, schedule).run(learn, [rates])
        else:
            method, name = SCHEDULES[schedule]
            getattr(learn, method)(2, **({} if lr is None else {name: lr}), cbs=[rates])
        assert rates not in learn.cbs
        seen.append((rates.seen, learners.state_of(learn)))
    assert seen[0][0] == seen[1][0]
    assert len(seen[0][0]) == (12 if schedule == "fine_tune" else 8)
    assert learners.same_state(seen[0][1], seen[1][1]) == []


def test_a_lowered_rate_reaches_the_optimizer(learn):
    rates = Rates()
    checked(learn, 1, slice(0.01, 0.1)).scaled(0.1).run(learn, [rates])
    assert rates.seen[0] == pytest.approx([0.001, 0.01])
