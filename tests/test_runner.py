"""The whole way on small learners with known answers: what is found, what is done about it, and what is left behind."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path

import learners  # first: it silences fastai's import
import pytest
import torch
from fastai.callback.core import Callback, CancelFitException
from learners import KINDS, finite, same_state, state_of
from torch import nn

import autoprec
from autoprec.audit.events import EVENTS
from autoprec.snapshot import fingerprint

thread_left_alone = learners.thread_left_alone
pytestmark = learners.FASTAI_WARNINGS
HEALTHY = [name for name, kind in KINDS.items() if kind.result == "healthy"]
REPAIRED = [name for name, kind in KINDS.items() if kind.result == "repaired"]
UNREPAIRED = [name for name, kind in KINDS.items() if kind.result == "unrepaired"]


@pytest.fixture
def audit(tmp_path):
    return tmp_path / "audit.jsonl"


def go(kind, learn, audit, **kwargs):
    arguments = {"schedule": "fit", "emulate_cuda": True, "audit": audit, **kwargs}
    return autoprec.run(learn, kind.epochs, kind.lr, **arguments)


def events(audit):
    return [e.event for e in autoprec.read_audit(audit).events]


# ---- the table ------------------------------------------------------------------------------------------------


def stock_is_well(kind):
    """Train by stock fastai in fp16 and judge by what is left: no part of autoprec's own judgement is used."""
    learn, seen = kind.learner(), learners.Recording()
    with learners.stock_fp16_on_cpu():
        try:
            learn.fit(kind.epochs, kind.lr, cbs=seen)
        except RuntimeError:
            from autoprec.snapshot import release_autocast

            release_autocast()
            torch.set_autocast_dtype("cpu", torch.bfloat16)
            return False
    valid = learn.recorder.values[-1][1]
    return finite(learn) and math.isfinite(valid) and all(map(math.isfinite, seen.seen)) and seen.last < kind.below


# Two precision callbacks nest and half weights may still train: found by looking at the learner, not by failing.
@pytest.mark.parametrize("name", sorted(set(KINDS) - {"two_callbacks", "half_model"}))
def test_the_faults_bite_and_the_healthy_are_well_without_us(name):
    assert stock_is_well(KINDS[name]) == (name in HEALTHY)


@pytest.mark.parametrize("name", [*HEALTHY, *REPAIRED])
def test_what_is_found_and_done(name, audit):
    kind = KINDS[name]
    learn, seen = kind.learner(), learners.Recording()
    outcome = go(kind, learn, audit, cbs=[seen])
    primary = outcome.diagnosis.primary
    assert (primary.mode if primary else None) == kind.mode
    assert (outcome.result, outcome.precision) == (kind.result, kind.precision)
    assert tuple(c.remedy for c in outcome.changes) == kind.remedies
    # ... and the truth of it, from the learner itself
    assert finite(learn)
    assert all(map(math.isfinite, seen.seen))
    assert seen.last < kind.below
    assert math.isfinite(learn.recorder.values[-1][1])
    with learners.stock_fp16_on_cpu():
        assert math.isfinite(learn.validate()[0])
    assert outcome.learner is learn
    assert outcome.islands if "keep_modules_fp32" in kind.remedies else not outcome.islands
    assert events(audit)[0] == "run_started"
    assert events(audit)[-1] == "run_finished"
    assert set(events(audit)) <= set(EVENTS)


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in_a_healthy_one(name, audit):
    kind = KINDS[name]
    outcome = go(kind, kind.learner(), audit)
    assert outcome.diagnosis.findings == ()
    assert outcome.changes == ()
    assert outcome.attempts == ()
    assert outcome.next_step == ""


@pytest.mark.parametrize("name", UNREPAIRED)
def test_what_no_setting_cures_is_named_and_not_trained(name, audit):
    kind = KINDS[name]
    learn = kind.learner()
    before = fingerprint(learn)
    outcome = go(kind, learn, audit)
    assert before.differences(fingerprint(learn)) == ()
    assert (outcome.result, outcome.precision) == ("unrepaired", None)
    assert outcome.diagnosis.primary.mode == kind.mode
    assert outcome.next_step
    assert outcome.changes == ()
    assert outcome.price.fit_seconds is None


@pytest.mark.parametrize(
    ("name", "function", "source"),
    [
        ("attention", "forward", "a = (q @ k.transpose(1, 2)) * 64**-0.5"),
        ("gram", "gram", "return f @ f.transpose(1, 2) / (f.shape[1] * f.shape[2])"),
        ("tiny_epsilon", "forward", None),
        ("masked", "forward", "scores = (self.qk(x) @ x.transpose(1, 2)).masked_fill(pad[:, None], -1e9)"),
        ("log_of_zero", "forward", "return -torch.log(p - p.detach().min()).mean()"),
    ],
)
def test_the_line_at_fault_is_named(name, function, source, audit):
    kind = KINDS[name]
    where = go(kind, kind.learner(), audit).diagnosis.primary.where
    assert Path(where.file).resolve() == Path(learners.__file__)
    assert where.function == function
    if source:
        assert where.source == source


def test_the_module_at_fault_is_named(audit):
    kind = KINDS["feed_forward"]
    outcome = go(kind, kind.learner(), audit)
    assert outcome.diagnosis.primary.where.module == "out"
    assert outcome.islands == ("out",)


@pytest.mark.long
def test_the_same_seed_gives_the_same_run_twice(audit, tmp_path):
    ends = []
    for path in (audit, tmp_path / "again.jsonl"):
        kind = KINDS["attention"]
        learn = kind.learner()
        outcome = go(kind, learn, path, seed=3)
        ends.append((state_of(learn), outcome.diagnosis, outcome.changes))
    assert same_state(ends[0][0], ends[1][0]) == []
    assert ends[0][1:] == ends[1][1:]


def test_a_repair_by_islands_comes_back_without_the_callback_that_would_break_it(audit):
    kind = KINDS["attention"]
    learn = kind.learner()
    go(kind, learn, audit)
    assert not hasattr(learn, "mixed_precision")
    assert not [h for m in learn.model.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]


@pytest.mark.parametrize(("name", "precision"), [("mlp", "fp16"), ("double_unscale", "bf16"), ("static_scale", "fp16")])
def test_otherwise_the_learner_carries_fastais_own_callback_for_what_it_was_trained_in(name, precision, audit):
    from fastai.callback.fp16 import MixedPrecision

    from autoprec.precision import carried

    kind = KINDS[name]
    learn = kind.learner()
    outcome = go(kind, learn, audit)
    callbacks, setting = carried(learn)
    assert [type(c) for c in callbacks] == [MixedPrecision]
    assert setting.precision == precision == outcome.precision
    if name == "static_scale":
        assert setting.scaler_kwargs["init_scale"] == outcome.changes[0].after > 1
        assert setting.scaler_kwargs["growth_interval"] == 1_000_000_000  # the user's own setting stays


# ---- unrepaired -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nan_rows", "attention", "high_lr", "two_callbacks", "half_model", "raw_inputs"])
def test_diagnose_only_names_and_changes_nothing(name, audit):
    kind = KINDS[name]
    learn = kind.learner()
    before = fingerprint(learn)
    outcome = go(kind, learn, audit, policy="diagnose-only")
    assert before.differences(fingerprint(learn)) == ()
    assert outcome.result == "unrepaired"
    assert outcome.diagnosis.primary.mode == kind.mode
    assert outcome.attempts == ()


@pytest.mark.parametrize(
    ("name", "ladder"),
    [
        # a finite but wrong run, a change of the learner itself, of the loaders, of the weights, of the plan
        ("attention", ["init_scale", "clip_gradients", "loss_fp32"]),
        ("masked", ["loss_fp32", "one_precision_callback"]),
        ("gram", ["keep_modules_fp32", "clip_gradients", "normalize_inputs", "lower_lr"]),
        ("hand_norm", ["normalize_inputs", "loss_fp32"]),
        ("log_of_zero", ["fp32"]),
    ],
)
def test_a_ladder_that_does_not_help_is_taken_back_whole(name, ladder, audit):
    kind = KINDS[name]
    policy = {"extends": "default", "ladders": {kind.mode: ladder}}
    learn = kind.learner()
    before = fingerprint(learn)
    outcome = go(kind, learn, audit, policy=policy)
    assert outcome.result == "unrepaired"
    assert before.differences(fingerprint(learn)) == ()
    assert not any(a.kept for a in outcome.attempts)
    assert [a.remedy for a in outcome.attempts] or not outcome.diagnosis.primary.repairable


def test_the_error_carries_the_outcome_and_says_what_to_do(audit):
    kind = KINDS["log_of_zero"]
    learn = kind.learner()
    before = fingerprint(learn)
    with pytest.raises(autoprec.UnrepairedError) as raised:
        autoprec.fit_safely(learn, 1, kind.lr, schedule="fit", emulate_cuda=True, audit=audit)
    assert raised.value.outcome.result == "unrepaired"
    assert raised.value.outcome.learner is learn
    assert "fails_in_fp32" in str(raised.value)
    assert "torch.log" in str(raised.value)
    assert str(audit) in str(raised.value)
    assert isinstance(raised.value, RuntimeError)
    assert before.differences(fingerprint(learn)) == ()
    assert learn.autoprec == raised.value.outcome


def test_on_failure_return_gives_the_learner_back_as_it_was(audit):
    kind = KINDS["log_of_zero"]
    learn = kind.learner()
    before = fingerprint(learn)
    got = autoprec.fit_safely(
        learn, 1, kind.lr, schedule="fit", emulate_cuda=True, audit=audit, on_failure="return"
    )  # fmt: skip
    assert got is learn
    assert before.differences(fingerprint(learn)) == ()
    assert learn.autoprec.result == "unrepaired"


# ---- exceptions -----------------------------------------------------------------------------------------------


class Fuse(nn.Module):
    """Raises at its n-th forward pass, counted over all probes: the count is no part of the model's state."""

    def __init__(self, n, error):
        super().__init__()
        count = [0]

        def burn():
            count[0] += 1
            if count[0] == n:
                raise error

        self.burn = burn

    def forward(self, x):
        self.burn()
        return x


def fused(n, error, *, fp16=True):
    learners.seed_all()
    learn = learners.mlp(batches=20, shuffle=True)
    learn.model.append(Fuse(n, error))
    return learn.to_fp16() if fp16 else learn


ERRORS = [KeyboardInterrupt(), torch.OutOfMemoryError("out of memory"), MemoryError(), SystemExit(3)]
# 2 epochs of 20 steps: a leg is 40 training and 2 validation passes, so the fit begins after 84.
IN_MAIN, IN_TWIN, IN_FIT = 5, 60, 100


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("n", [1, IN_MAIN, 41, IN_TWIN])
def test_an_exception_in_a_probe_leaves_the_learner_as_it_was(error, n, audit):
    learn = fused(n, error)
    before = fingerprint(learn)
    with pytest.raises(type(error)) as raised:
        autoprec.run(learn, 2, 1e-2, schedule="fit", emulate_cuda=True, audit=audit)
    assert raised.value is error
    assert before.differences(fingerprint(learn)) == ()
    assert learners.thread_state()["autocast"] is False
    last = autoprec.read_audit(audit).events[-1]
    assert last.event == "failed"
    assert last.payload["error"] == type(error).__name__


def test_the_fit_after_an_interrupted_probe_is_a_true_fp32_fit(audit):
    """fastai leaves autocast and its cache of half weights on: the next fit would train against stale weights."""
    ends = []
    for interrupted in (True, False):
        learn = fused(IN_MAIN, KeyboardInterrupt())
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                autoprec.run(learn, 2, 1e-2, schedule="fit", emulate_cuda=True, audit=audit)
        else:
            learn.model[-1].burn = lambda: None
        seen = []
        learn.to_fp32()
        with _noting_predictions(seen) as cb:
            learn.fit(1, 1e-2, cbs=cb)
        assert set(seen) == {torch.float32}
        ends.append(state_of(learn))
    assert same_state(*ends) == []


def _noting_predictions(seen):
    class Predictions(Callback):
        def after_pred(self):
            seen.append(self.learn.pred.dtype)

    return nullcontext(Predictions())


def test_an_error_of_the_model_that_fp32_has_too_is_a_finding(audit):
    learners.seed_all()
    learn = learners.mlp()
    learn.model.append(nn.Linear(4, 3))  # a shape that does not fit
    before = fingerprint(learn)
    outcome = autoprec.run(learn, 1, 1e-2, emulate_cuda=True, audit=audit)
    assert outcome.diagnosis.primary.mode == "fails_in_fp32"
    assert "RuntimeError" in outcome.diagnosis.primary.because
    assert before.differences(fingerprint(learn)) == ()


@pytest.mark.parametrize("error", [*ERRORS, ValueError("no")], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("fp16", [True, False])
def test_an_exception_in_the_fit_leaves_a_usable_learner(error, fp16, audit):
    learn = fused(IN_FIT if fp16 else IN_FIT - 40, error, fp16=fp16)
    before, cbs = state_of(learn), list(learn.cbs)
    with pytest.raises(type(error)) as raised:
        autoprec.run(learn, 2, 1e-2, schedule="fit", emulate_cuda=fp16, audit=audit, cbs=[learners.Recording()])
    assert raised.value is error
    assert events(audit)[-2:] == ["fit_started", "failed"]
    assert "finite" in autoprec.read_audit(audit).events[-1].payload["message"]
    assert finite(learn)
    assert same_state(before, state_of(learn)) != []  # what was trained is kept
    assert list(learn.cbs) == cbs
    assert learners.thread_state()["autocast"] is False
    learn.to_fp32().fit(1, 1e-2)
    assert math.isfinite(learn.recorder.values[-1][0])


def test_an_exception_in_the_fit_that_finds_ruined_weights_goes_back_to_the_start(audit):
    class Ruins(Callback):
        order = 80

        def __init__(self):
            # A closure: a count in an attribute would be put back after each probe.
            batches = [0]

            def count():
                batches[0] += 1
                return batches[0]

            self.count = count

        def after_batch(self):
            if self.training and self.count() == IN_FIT:
                with torch.no_grad():
                    next(self.model.parameters()).fill_(math.nan)
                raise KeyboardInterrupt

    learners.seed_all()
    learn = learners.mlp().to_fp16()
    before = state_of(learn)
    with pytest.raises(KeyboardInterrupt):
        autoprec.run(learn, 2, 1e-2, schedule="fit", emulate_cuda=True, audit=audit, cbs=[Ruins()])
    assert same_state(before, state_of(learn)) == []
    assert "before the fit" in autoprec.read_audit(audit).events[-1].payload["message"]


class InterruptsTheFit(Callback):
    """Ctrl-C at the 20th batch of the real fit, which it knows by autoprec's own watcher."""

    order = 30  # between MixedPrecision's two ends

    def after_pred(self):
        if (
            self.training
            and self.learn.train_iter == 20
            and any(type(cb).__name__ == "FitWatch" for cb in self.learn.cbs)
        ):
            raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["attention", "gram", "double_unscale"])
def test_an_interrupted_fit_takes_islands_and_emulation_along(name, audit):
    kind = KINDS[name]
    learn = kind.learner()
    before, cbs = state_of(learn), list(learn.cbs)
    with pytest.raises(KeyboardInterrupt):
        go(kind, learn, audit, cbs=[InterruptsTheFit()])
    assert events(audit)[-2:] == ["fit_started", "failed"]
    assert same_state(before, state_of(learn)) != []
    assert finite(learn)
    assert list(learn.cbs) == cbs
    assert not [h for m in learn.model.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]
    seen = []
    learn.to_fp32()
    with _noting_predictions(seen) as cb:
        learn.fit(1, kind.lr, cbs=cb)
    assert set(seen) == {torch.float32}


class StopsAt(Callback):
    """A user's own early stop: every fit ends after so many batches."""

    order = 75

    def __init__(self, n):
        self.n = n

    def after_batch(self):
        if self.training and self.learn.train_iter >= self.n:
            raise CancelFitException


def test_a_users_callback_that_ends_the_fit_is_no_fault(audit):
    ends = []
    for ours in (True, False):
        learners.seed_all()
        learn = learners.mlp(shuffle=True).to_fp16()
        before = list(learn.cbs)
        if ours:
            outcome = autoprec.run(learn, 2, 1e-2, schedule="fit", emulate_cuda=True, audit=audit, cbs=[StopsAt(12)])
            assert (outcome.result, outcome.changes) == ("healthy", ())
        else:
            with learners.stock_fp16_on_cpu():
                learn.fit(2, 1e-2, cbs=[StopsAt(12)])
        assert list(learn.cbs) == before
        ends.append((state_of(learn), list(learn.recorder.losses)))
    assert len(ends[0][1]) == 12
    assert same_state(ends[0][0], ends[1][0]) == []
    assert ends[0][1] == ends[1][1]


def test_a_user_who_cancels_at_once_leaves_nothing_to_judge(audit):
    class Never(Callback):
        order = 75

        def before_fit(self):
            raise CancelFitException

    learners.seed_all()
    learn = learners.mlp().to_fp16()
    before = fingerprint(learn)
    outcome = autoprec.run(learn, 1, 1e-2, schedule="fit", emulate_cuda=True, audit=audit, cbs=[Never()])
    assert outcome.result == "unrepaired"
    assert before.differences(fingerprint(learn)) == ()


# ---- a CPU without emulation ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("ask", "requested"), [("to_fp16", "fp16"), ("to_bf16", "bf16")])
def test_a_precision_that_the_cpu_does_not_have_is_replaced_by_fp32(ask, requested, audit):
    learners.seed_all()
    learn = getattr(learners.mlp(), ask)()
    outcome = autoprec.run(learn, 2, 1e-2, schedule="fit", audit=audit)
    assert (outcome.result, outcome.precision) == ("repaired", "fp32")
    assert outcome.diagnosis.primary.mode == "precision_unavailable"
    assert requested in outcome.diagnosis.primary.because
    assert [c.remedy for c in outcome.changes] == ["fp32"]
    assert not hasattr(learn, "mixed_precision")
    assert finite(learn)
    learners.seed_all()
    stock = learners.mlp()
    stock.fit(2, 1e-2)
    assert same_state(state_of(stock), state_of(learn)) == []


def test_a_learner_that_did_not_ask_is_healthy_in_fp32(audit):
    learners.seed_all()
    outcome = autoprec.run(learners.mlp(), 2, 1e-2, schedule="fit", audit=audit)
    assert (outcome.result, outcome.precision) == ("healthy", "fp32")
    assert outcome.diagnosis.findings == ()


@pytest.mark.parametrize("asked", [True, False])
def test_never_fp32_means_never(asked, audit):
    learners.seed_all()
    learn = learners.mlp()
    if asked:
        learn.to_fp16()
    before = fingerprint(learn)
    outcome = autoprec.run(learn, 1, 1e-2, schedule="fit", policy="never-fp32", audit=audit)
    if asked:
        assert outcome.result == "unrepaired"
        assert outcome.diagnosis.primary.mode == "precision_unavailable"
        assert "CUDA" in outcome.next_step or "GPU" in outcome.next_step
        assert before.differences(fingerprint(learn)) == ()
    else:
        assert outcome.result == "healthy"  # its own fp32 is not a repair of ours


def test_with_emulation_the_policys_preference_is_tried_where_nothing_was_asked_for(audit):
    from autoprec.precision import carried

    learners.seed_all()
    learn = learners.mlp()
    outcome = autoprec.run(learn, 2, 1e-2, schedule="fit", emulate_cuda=True, audit=audit)
    assert (outcome.result, outcome.precision) == ("healthy", "fp16")
    assert carried(learn)[1].precision == "fp16"


# ---- a fault after the probe ----------------------------------------------------------------------------------


def test_a_fault_behind_the_probes_last_step_is_found_and_repaired(audit):
    learners.seed_all()
    learn = learners.feed_forward(first=50, batches=64).to_fp16()
    seen = learners.Recording()
    outcome = autoprec.run(learn, 1, 1e-2, schedule="fit", emulate_cuda=True, audit=audit, cbs=[seen])
    assert (outcome.result, outcome.precision, outcome.islands) == ("repaired", "fp16", ("out",))
    assert outcome.diagnosis.primary.mode == "forward_overflow"
    assert [c.remedy for c in outcome.changes] == ["keep_modules_fp32"]
    assert events(audit).count("fit_started") == 2
    assert finite(learn)
    assert len(seen.seen) == 64
    assert all(map(math.isfinite, seen.seen))
    notes = [e for e in autoprec.read_audit(audit).events if e.event == "note"]
    assert "step 50" in notes[0].payload["text"]


@pytest.mark.long
def test_the_fit_behind_a_late_repair_is_the_one_a_known_repair_would_have_made(audit, tmp_path):
    """The failed fit leaves no trace: values, generators and schedule are those of a first try."""
    ends = []
    for steps, path in ((40, audit), (64, tmp_path / "long.jsonl")):
        learners.seed_all()
        learn = learners.feed_forward(first=50, batches=64).to_fp16()
        policy = {"extends": "default", "probe": {"steps": steps}}
        outcome = autoprec.run(learn, 1, 1e-2, schedule="one_cycle", emulate_cuda=True, audit=path, policy=policy)
        assert outcome.islands == ("out",)
        ends.append(state_of(learn))
    assert same_state(*ends) == []


def test_a_late_fault_that_nothing_cures_leaves_the_learner_as_it_was(audit):
    x, y = learners.rows(60 * learners.BS + 32, 8, 3)
    x[55 * learners.BS, 2] = math.nan
    learn = learners.quiet(learners.loaders(x, y), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    learn.to_fp16()
    before = fingerprint(learn)
    outcome = autoprec.run(learn, 1, 1e-2, schedule="fit", emulate_cuda=True, audit=audit)
    assert outcome.result == "unrepaired"
    assert outcome.diagnosis.primary.mode == "nonfinite_data"
    assert before.differences(fingerprint(learn)) == ()


def test_a_label_out_of_range_behind_the_probe_is_named_rather_than_raised(audit):
    x, y = learners.rows(60 * learners.BS + 32, 8, 3)
    y[52 * learners.BS + 3] = 9
    learn = learners.quiet(learners.loaders(x, y), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    before = fingerprint(learn.to_fp16())
    outcome = autoprec.run(learn, 1, 1e-2, schedule="fit", emulate_cuda=True, audit=audit)
    assert (outcome.result, outcome.diagnosis.primary.mode) == ("unrepaired", "invalid_targets")
    assert "(seen: 0 to 9)" in outcome.diagnosis.primary.because
    assert before.differences(fingerprint(learn)) == ()


def test_an_exception_of_the_late_fit_that_does_not_come_again_costs_a_second_look_only(audit):
    seen = [0]
    net = nn.Linear(8, 3)

    class Flaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            seen[0] += self.training
            # two legs of 40 steps, then step 50 of the fit
            if seen[0] == 131:
                raise OSError("the disk was away for a moment")
            return self.net(x)

    x, y = learners.rows(60 * learners.BS + 32, 8, 3)
    learn = learners.quiet(learners.loaders(x, y), Flaky()).to_fp16()
    before = fingerprint(learn)
    outcome = autoprec.run(learn, 1, 1e-2, schedule="fit", emulate_cuda=True, audit=audit)
    assert seen[0] > 131
    assert outcome.result == "healthy"  # looked at again, found well, and trained
    assert before.differences(fingerprint(learn)) != ()


def test_a_policy_may_forbid_a_second_look(audit):
    learners.seed_all()
    learn = learners.feed_forward(first=50, batches=64).to_fp16()
    before = fingerprint(learn)
    policy = {"extends": "default", "probe": {"late_failures": 0}}
    outcome = autoprec.run(learn, 1, 1e-2, schedule="fit", emulate_cuda=True, audit=audit, policy=policy)
    assert outcome.result == "unrepaired"
    assert "the fit failed" in outcome.detail
    assert events(audit).count("fit_started") == 1
    assert before.differences(fingerprint(learn)) == ()
