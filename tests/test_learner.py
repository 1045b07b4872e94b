"""AutoPrecisionLearner: a Learner with verbs of ours, that hides nothing of the Learner."""

from __future__ import annotations

import copy
import io
import pickle

import learners  # first: it silences fastai's import
import pytest
import torch
from learners import same_state, state_of

import autoprec
from autoprec import AutoPrecisionLearner
from autoprec.errors import InputError, PolicyError, UnrepairedError
from autoprec.snapshot import fingerprint

thread_left_alone = learners.thread_left_alone
pytestmark = learners.FASTAI_WARNINGS


@pytest.fixture
def audit(tmp_path):
    return tmp_path / "audit.jsonl"


@pytest.fixture
def learn(tmp_path):
    learners.seed_all()
    learn = learners.mlp(batches=6)
    learn.path = tmp_path
    return learn


@pytest.fixture
def wrapped(learn):
    return AutoPrecisionLearner(learn, emulate_cuda=True)


# ---- the verbs ------------------------------------------------------------------------------------------------


def test_fit_safely_is_the_function_bit_for_bit(audit, tmp_path):
    for name in ("mlp", "attention"):
        kind, ends = learners.KINDS[name], []
        for wrap in (True, False):
            learn = kind.learner()
            path = tmp_path / f"{name}{wrap}.jsonl"
            if wrap:
                apl = AutoPrecisionLearner(learn, emulate_cuda=True)
                assert apl.fit_safely(kind.epochs, kind.lr, schedule="fit", seed=3, audit=path) is apl
                outcome = apl.outcome
            else:
                autoprec.fit_safely(
                    learn, kind.epochs, kind.lr, schedule="fit", seed=3, audit=path, emulate_cuda=True
                )  # fmt: skip
                outcome = learn.autoprec
            ends.append((state_of(learn), [list(v) for v in learn.recorder.values], outcome.diagnosis, outcome.changes))
        assert same_state(ends[0][0], ends[1][0]) == []
        assert ends[0][1:] == ends[1][1:]


def test_probing_and_diagnosing_change_nothing():
    kind = learners.KINDS["attention"]
    learn = kind.learner()
    before, draws = fingerprint(learn), torch.get_rng_state()
    apl = AutoPrecisionLearner(learn, emulate_cuda=True)
    evidence = apl.probe(1, kind.lr, schedule="fit", seed=1)
    assert evidence.main.failure.where in ("loss", "prediction")
    assert evidence.main.spec.precision == "fp16"
    assert apl.diagnose(1, kind.lr, schedule="fit").primary.mode == "forward_overflow"
    assert before.differences(fingerprint(learn)) == ()
    assert torch.equal(draws, torch.get_rng_state())
    assert apl.outcome is None


def test_remediate_keeps_what_is_in_the_learner(audit):
    kind = learners.KINDS["two_callbacks"]
    learn = kind.learner()
    apl = AutoPrecisionLearner(learn, emulate_cuda=True)
    weights = state_of(learn)
    outcome = apl.remediate(1, kind.lr, schedule="fit", audit=audit)
    assert apl.outcome is outcome
    assert (outcome.result, outcome.price.fit_seconds) == ("repaired", None)
    assert sum(cb.name == "mixed_precision" for cb in learn.cbs) == 1
    assert same_state(weights, state_of(learn)) == []


def test_a_failure_is_remembered_and_raised(audit):
    kind = learners.KINDS["log_of_zero"]
    apl = AutoPrecisionLearner(kind.learner(), emulate_cuda=True)
    with pytest.raises(UnrepairedError) as raised:
        apl.fit_safely(1, kind.lr, audit=audit)
    assert apl.outcome is raised.value.outcome
    assert apl.fit_safely(1, kind.lr, audit=audit, on_failure="return") is apl
    assert apl.outcome.result == "unrepaired"


def test_the_wrappers_policy_is_the_one_that_counts(audit):
    kind = learners.KINDS["attention"]
    apl = AutoPrecisionLearner(kind.learner(), "diagnose-only", emulate_cuda=True)
    apl.fit_safely(1, kind.lr, schedule="fit", on_failure="return", audit=audit)
    assert (apl.outcome.result, apl.outcome.attempts) == ("unrepaired", ())


# ---- what is the learner's ------------------------------------------------------------------------------------


def test_reading_reaches_the_learner(learn, wrapped):
    assert wrapped.model is learn.model
    assert wrapped.dls is learn.dls
    assert wrapped.cbs is learn.cbs
    assert wrapped.recorder is learn.recorder
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = wrapped.nothing_of_this_name
    assert not hasattr(wrapped, "nothing_of_this_name")


def test_setting_reaches_the_learner(learn, wrapped):
    wrapped.lr = 0.5
    wrapped.a_new_name = 3
    assert learn.lr == 0.5
    assert learn.a_new_name == 3
    assert "lr" not in vars(wrapped)
    del wrapped.a_new_name
    assert not hasattr(learn, "a_new_name")


def test_its_own_names_stay_with_the_wrapper(learn, wrapped):
    wrapped.policy = "documented"
    wrapped.emulate_cuda = False
    assert wrapped.policy.name == "documented"
    assert not hasattr(learn, "policy")
    assert not hasattr(learn, "emulate_cuda")
    other = learners.mlp(batches=2)
    wrapped.learn = other
    assert wrapped.model is other.model


def test_calling_reaches_the_learner(learn, wrapped):
    with learn.no_logging():
        wrapped.fit(1, 1e-2)
    assert len(learn.recorder.losses) == 6
    assert wrapped.validate()[0] == learn.validate()[0]
    wrapped.to_fp16()
    assert hasattr(learn, "mixed_precision")
    assert wrapped.to_fp32() is learn


def test_events_and_blocks_reach_the_learner(learn, wrapped):
    seen = []

    class Hears(learners.Callback):
        def before_fit(self):
            seen.append("before_fit")

    learn.add_cb(Hears())
    wrapped("before_fit")
    assert seen == ["before_fit"]
    with wrapped.no_logging():
        assert learn.logger is not learners.say_nothing
    with wrapped as inside:
        assert inside is learn


def test_dir_and_repr_show_both(wrapped):
    assert {"fit_safely", "probe", "fit_one_cycle", "dls", "model"} <= set(dir(wrapped))
    assert repr(wrapped) == "AutoPrecisionLearner(Sequential, policy='default', not run)"


def test_repr_tells_the_result(wrapped, audit):
    wrapped.fit_safely(1, 1e-2, audit=audit)
    assert repr(wrapped).endswith(f"{wrapped.outcome.result})")


# ---- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [None, "learn", torch.nn.Linear(2, 2)])
def test_only_a_learner_is_wrapped(what):
    with pytest.raises(InputError, match=f"{type(what).__name__}; give a fastai Learner"):
        AutoPrecisionLearner(what)


def test_it_is_not_wrapped_twice(wrapped):
    with pytest.raises(InputError, match="AutoPrecisionLearner already"):
        AutoPrecisionLearner(wrapped)
    with pytest.raises(InputError, match="AutoPrecisionLearner already"):
        wrapped.learn = wrapped


def test_a_policy_that_cannot_be_used_is_refused_and_the_old_one_stays(learn, wrapped):
    with pytest.raises(PolicyError, match="nowhere"):
        AutoPrecisionLearner(learn, "nowhere")
    with pytest.raises(PolicyError, match="nowhere"):
        wrapped.policy = "nowhere"
    assert wrapped.policy.name == "default"


def test_bad_arguments_are_refused_as_by_the_function(learn, wrapped, audit):
    before = fingerprint(learn)
    for verb in (wrapped.fit_safely, wrapped.probe, wrapped.diagnose, wrapped.remediate):
        with pytest.raises(InputError, match="epochs is 0"):
            verb(0, audit=audit)
    with pytest.raises(InputError, match="emulate_cuda is 'yes'"):
        AutoPrecisionLearner(learn, emulate_cuda="yes")
    assert before.differences(fingerprint(learn)) == ()
    assert not audit.exists()


# ---- copies ---------------------------------------------------------------------------------------------------


def weights_of(apl):
    return state_of(apl.learn)


def test_it_pickles_with_its_learner_policy_and_outcome(wrapped, audit):
    wrapped.policy = {"extends": "default", "max_attempts": 3}
    wrapped.fit_safely(1, 1e-2, audit=audit)
    stream = io.BytesIO()
    pickle.dump(wrapped, stream)
    stream.seek(0)
    again = pickle.load(stream)
    assert type(again) is AutoPrecisionLearner
    assert again.policy == wrapped.policy
    assert again.outcome.model_dump_json() == wrapped.outcome.model_dump_json()
    assert again.emulate_cuda is True
    assert same_state(weights_of(again), weights_of(wrapped)) == []
    again.logger = learners.say_nothing
    again.fit_safely(1, 1e-2, audit=audit.with_name("again.jsonl"))


def test_a_copy_shares_the_learner_and_a_deep_copy_does_not(wrapped, audit):
    wrapped.fit_safely(1, 1e-2, audit=audit)
    shallow, deep = copy.copy(wrapped), copy.deepcopy(wrapped)
    assert shallow.learn is wrapped.learn
    assert deep.learn is not wrapped.learn
    assert deep.model is not wrapped.model
    assert same_state(weights_of(deep), weights_of(wrapped)) == []
    assert shallow.outcome is wrapped.outcome
    assert deep.outcome.model_dump_json() == wrapped.outcome.model_dump_json()
    assert deep.outcome.learner is deep.learn
    shallow.policy = "documented"
    assert wrapped.policy.name == "default"
    with torch.no_grad():
        next(deep.model.parameters()).zero_()
    assert same_state(weights_of(deep), weights_of(wrapped)) != []


def test_unpickling_without_a_learner_does_not_recurse():
    empty = AutoPrecisionLearner.__new__(AutoPrecisionLearner)
    with pytest.raises(AttributeError):
        _ = empty.learn
    with pytest.raises(AttributeError):
        _ = empty.anything


def test_a_call_may_say_otherwise_than_the_wrapper(tmp_path):
    safe = autoprec.AutoPrecisionLearner(learners.attention().to_fp16())
    found = safe.diagnose(1, 3e-3, schedule="fit", emulate_cuda=True, policy="diagnose-only")
    assert found.primary.mode == "forward_overflow"
    assert safe.diagnose(1, 3e-3, schedule="fit").primary.mode == "precision_unavailable"
