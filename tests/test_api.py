"""What users call: bit-identity of healthy runs, refusal of what cannot be used, and what stays behind."""

from __future__ import annotations

import copy
import gc
import inspect
import random
import weakref

import learners  # first: it silences fastai's import
import numpy as np
import pytest
import torch
from fastai.callback.mixup import MixUp
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.torch_core import set_seed
from learners import same_state, state_of
from torch import nn

import autoprec
from autoprec import api
from autoprec.errors import AuditError, InputError, PolicyError
from autoprec.policy import load_policy
from autoprec.snapshot import fingerprint

thread_left_alone = learners.thread_left_alone
pytestmark = learners.FASTAI_WARNINGS


@pytest.fixture
def audit(tmp_path):
    return tmp_path / "audit.jsonl"


@pytest.fixture
def learn():
    learners.seed_all()
    return learners.mlp(batches=6)


# ---- bit for bit ----------------------------------------------------------------------------------------------

METHODS = {"fit": "fit", "one_cycle": "fit_one_cycle", "flat_cos": "fit_flat_cos", "fine_tune": "fine_tune"}


def everything(learn):
    """All that a user could compare after a fit."""
    recorder = learn.recorder
    return {
        "state": state_of(learn),
        "optimizer": copy.deepcopy(learn.opt.state_dict()),
        "values": [list(v) for v in recorder.values],
        "losses": [float(x) for x in recorder.losses],
        "lrs": list(recorder.lrs),
        "iters": list(recorder.iters),
        "hypers": [dict(h) for h in learn.opt.hypers],
        "hps": {k: [float(x) for x in v] for k, v in getattr(recorder, "hps", {}).items()},
        "epoch": (learn.epoch, learn.n_epoch, learn.train_iter),
        "training": learn.model.training,
        "requires_grad": [p.requires_grad for p in learn.model.parameters()],
        # The generators have been drawn from as often: the next numbers are the same.
        "next": (random.random(), float(np.random.rand()), float(torch.rand(1)), learn.dls.train.rng.random()),
    }


def differing(a, b):
    """Names of the entries that differ; tensors are compared by their bits."""
    found = [k for k in a if k not in ("state", "optimizer") and repr(a[k]) != repr(b[k])]
    found += [f"state/{n}" for n in same_state(a["state"], b["state"])]
    return found + (["optimizer"] if flat(a["optimizer"]) != flat(b["optimizer"]) else [])


def flat(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {k: flat(v) for k, v in value.items()}
    return [flat(v) for v in value] if isinstance(value, (list, tuple)) else value


def trained(ours, audit, *, fp16, schedule="one_cycle", seed=0, own=None, fit=None, make=None, lr=1e-2):
    learners.seed_all(11)
    learn = make() if make else learners.mlp(batches=8, shuffle=True, dropout=0.3)
    for cb in own() if own else []:
        learn.add_cb(cb)
    if fp16:
        learn.to_fp16()
    before = list(learn.cbs)
    kwargs = fit() if fit else {}
    if ours:
        got = autoprec.fit_safely(
            learn, 2, lr, schedule=schedule, seed=seed, emulate_cuda=fp16, audit=audit, **kwargs
        )  # fmt: skip
        assert got is learn
        assert learn.autoprec.result == "healthy"
        assert learn.autoprec.precision == ("fp16" if fp16 else "fp32")
    else:
        if seed is not None:
            set_seed(seed)
        method = getattr(learn, METHODS[schedule])
        if fp16:
            with learners.stock_fp16_on_cpu():
                method(2, lr, **kwargs)
        else:
            method(2, lr, **kwargs)
    assert len(learn.cbs) == len(before)
    assert all(a is b for a, b in zip(learn.cbs, before, strict=True))
    return everything(learn)


def both(audit, **kwargs):
    ours, stock = trained(True, audit, **kwargs), trained(False, audit, **kwargs)
    return differing(ours, stock)


@pytest.mark.parametrize("fp16", [True, False], ids=["fp16", "fp32"])
@pytest.mark.parametrize("schedule", METHODS)
def test_a_healthy_run_is_stock_fastais_bit_for_bit(schedule, fp16, audit):
    assert both(audit, fp16=fp16, schedule=schedule) == []


@pytest.mark.parametrize("seed", [None, 5])
def test_with_and_without_a_seed(seed, audit):
    assert both(audit, fp16=True, seed=seed) == []


@pytest.mark.parametrize("fp16", [True, False], ids=["fp16", "fp32"])
@pytest.mark.parametrize("where", ["own", "fit"])
@pytest.mark.parametrize("kind", ["accumulation", "mixup", "clip"])
def test_with_the_users_callbacks(kind, where, fp16, audit):
    make = {"accumulation": lambda: [GradientAccumulation(32)], "mixup": lambda: [MixUp(0.4)]}.get(
        kind, lambda: [GradientClip()]
    )
    kwargs = {"own": make} if where == "own" else {"fit": lambda: {"cbs": make()}}
    assert both(audit, fp16=fp16, schedule="fit", **kwargs) == []


def test_a_slice_of_rates_and_keywords_reach_fastai(audit):
    assert both(audit, fp16=True, lr=slice(1e-3, 1e-2), fit=lambda: {"wd": 0.1, "pct_start": 0.4}) == []


def test_a_second_fit_goes_on_from_the_first(audit, tmp_path):
    ends = []
    for ours in (True, False):
        learners.seed_all()
        learn = learners.mlp(batches=8, shuffle=True, dropout=0.3).to_fp16()
        for path in (audit, tmp_path / "second.jsonl"):
            if ours:
                autoprec.fit_safely(learn, 1, 1e-2, schedule="fit", emulate_cuda=True, audit=path)
            else:
                with learners.stock_fp16_on_cpu():
                    learn.fit(1, 1e-2)
        ends.append(everything(learn))
    assert differing(*ends) == []


def test_the_comparison_itself_can_fail(audit):
    ours = trained(True, audit, fp16=False)
    assert "losses" in differing(ours, trained(False, audit, fp16=False, lr=1.1e-2))
    assert "next" in differing(ours, trained(False, audit, fp16=False, seed=1))


# ---- bad input ------------------------------------------------------------------------------------------------


class NoFloats(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)

    def forward(self, x):
        return x


def without_floats():
    return learners.quiet(learners.loaders(*learners.rows(64, 8, 3)), NoFloats())


def without_targets():
    x = torch.randn(64, 8)
    return learners.quiet(learners.loaders(x), nn.Linear(8, 3))


def empty():
    x, y = learners.rows(40, 8, 3)
    dls = learners.loaders(x, y)
    dls.train.drop_last = True
    return learners.quiet(dls, nn.Linear(8, 3))


def no_rows():
    data = torch.utils.data.TensorDataset(torch.zeros(0, 8), torch.zeros(0, dtype=torch.long))
    dls = DataLoaders(DataLoader(data, bs=4), DataLoader(data, bs=4))
    dls.device = torch.device("cpu")
    return learners.quiet(dls, nn.Linear(8, 3))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(8), 1


def without_length():
    dls = DataLoaders(DataLoader(Stream(), bs=4), DataLoader(Stream(), bs=4))
    dls.device = torch.device("cpu")
    return learners.quiet(dls, nn.Linear(8, 3))


def fine():
    return learners.mlp(batches=4)


BAD = {
    "no learner": (lambda: "model", {}, ["str", "fastai Learner"]),
    "a model": (lambda: nn.Linear(2, 2), {}, ["Linear", "fastai Learner"]),
    "none": (lambda: None, {}, ["NoneType"]),
    "a wrapper": (lambda: autoprec.AutoPrecisionLearner(fine()), {}, ["AutoPrecisionLearner", ".learn"]),
    "epochs 0": (fine, {"epochs": 0}, ["epochs is 0", "from 1 on"]),
    "epochs -1": (fine, {"epochs": -1}, ["epochs is -1"]),
    "epochs 1.5": (fine, {"epochs": 1.5}, ["epochs is 1.5", "whole number"]),
    "epochs True": (fine, {"epochs": True}, ["epochs is True"]),
    "lr 0": (fine, {"lr": 0}, ["lr is 0", "positive"]),
    "lr a": (fine, {"lr": "a"}, ["lr is 'a'"]),
    "lr nan": (fine, {"lr": float("nan")}, ["lr is nan"]),
    "slice for fine_tune": (fine, {"lr": slice(1e-3), "schedule": "fine_tune"}, ["fine_tune takes one number"]),
    "schedule": (fine, {"schedule": "one_cylce"}, ["'one_cylce'", "did you mean 'one_cycle'"]),
    "keyword": (fine, {"epoch": 3}, ["'epoch'", "fit_one_cycle"]),
    "keyword close": (fine, {"pct_strat": 0.3}, ["did you mean 'pct_start'"]),
    "keyword of ours": (fine, {"shedule": "fit"}, ["did you mean 'schedule'"]),
    "emulate_cuda": (fine, {"emulate_cuda": "yes"}, ["emulate_cuda is 'yes'", "True and False"]),
    "seed -1": (fine, {"seed": -1}, ["seed is -1", "2**32"]),
    "seed 1.5": (fine, {"seed": 1.5}, ["seed is 1.5"]),
    "seed True": (fine, {"seed": True}, ["seed is True"]),
    "seed 2**32": (fine, {"seed": 2**32}, ["seed is 4294967296"]),
    "on_failure": (fine, {"on_failure": "ignore"}, ["on_failure is 'ignore'", "'raise'", "'return'"]),
    "empty loader": (empty, {}, ["loader is empty", "8 samples", "batch size 16", "drop_last"]),
    "no rows": (no_rows, {}, ["loader is empty", "0 samples"]),
    "no length": (without_length, {}, ["no length", "n="]),
    "no targets": (without_targets, {}, ["1 elements", "no target", "n_inp"]),
    "no floats": (without_floats, {}, ["NoFloats", "1 parameters", "floating point"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_refused_in_one_clear_error(name, audit):
    make, arguments, fragments = BAD[name]
    learners.seed_all()
    learn = make()
    real = isinstance(learn, learners.Learner)
    before, draws = fingerprint(learn) if real else None, random.getstate()
    with pytest.raises(InputError) as refused:
        autoprec.fit_safely(learn, **{"epochs": 1, "audit": audit, **arguments})
    for fragment in fragments:
        assert fragment in str(refused.value)
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value, ValueError)
    if real:
        assert before.differences(fingerprint(learn)) == ()
    assert random.getstate() == draws
    assert not audit.exists()


def test_an_unknown_policy_is_refused_with_what_there_is(learn, audit):
    before = fingerprint(learn)
    with pytest.raises(PolicyError, match=r"did you mean .?documented"):
        autoprec.fit_safely(learn, 1, policy="documnted", audit=audit)
    with pytest.raises(PolicyError, match="max_atempts"):
        autoprec.fit_safely(learn, 1, policy={"extends": "default", "max_atempts": 1}, audit=audit)
    assert before.differences(fingerprint(learn)) == ()
    assert not audit.exists()


@pytest.mark.parametrize("kind", ["folder", "below a file"])
@pytest.mark.parametrize("emulate", [True, False])
def test_an_audit_path_that_cannot_be_written(kind, emulate, learn, tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path if kind == "folder" else tmp_path / "file" / "audit.jsonl"
    before = fingerprint(learn)
    with pytest.raises(AuditError) as refused:
        autoprec.fit_safely(learn, 1, audit=path, emulate_cuda=emulate, seed=1)
    assert str(path) in str(refused.value)
    assert isinstance(refused.value, OSError)
    assert before.differences(fingerprint(learn)) == ()


def test_diagnose_and_remediate_refuse_the_same(audit):
    for call in (autoprec.diagnose, api.examine, api.remediate):
        with pytest.raises(InputError, match="epochs is 0"):
            call(fine(), 0, audit=audit)


# ---- defaults -------------------------------------------------------------------------------------------------


def test_the_arguments_of_run_are_those_of_fit_safely():
    fit, run = (list(inspect.signature(f).parameters) for f in (autoprec.fit_safely, autoprec.run))
    assert [p for p in fit if p != "on_failure"] == run


def test_without_a_path_the_audit_lies_beside_the_learner(learn, tmp_path):
    learn.path = tmp_path
    outcome = autoprec.run(learn, 1)
    files = list((tmp_path / "autoprec").glob("*.jsonl"))
    assert [str(f) for f in files] == [outcome.audit_path]
    assert files[0].stem == outcome.run_id
    assert autoprec.read_audit(files[0]).events[-1].event == "run_finished"


def test_a_policy_in_every_form_is_taken(learn, audit, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("extends: default\nprobe: {steps: 4}\n")
    for policy in (str(file), file, {"extends": "default", "probe": {"steps": 4}}, load_policy(file)):
        assert autoprec.run(learn, 1, policy=policy, audit=audit).price.steps == 4


def test_diagnose_changes_nothing_and_writes_nothing(tmp_path):
    kind = learners.KINDS["attention"]
    learn = kind.learner()
    learn.path = tmp_path
    before, draws = fingerprint(learn), torch.get_rng_state()
    found = autoprec.diagnose(learn, 1, kind.lr, schedule="fit", emulate_cuda=True, seed=3)
    assert found.primary.mode == "forward_overflow"
    assert before.differences(fingerprint(learn)) == ()
    assert torch.equal(draws, torch.get_rng_state())
    assert list(tmp_path.iterdir()) == []
    assert getattr(learn, "autoprec", None) is None


def test_remediate_keeps_the_changes_and_trains_nothing(audit):
    kind = learners.KINDS["raw_inputs"]
    learn = kind.learner()
    weights = state_of(learn)
    outcome = api.remediate(learn, 1, kind.lr, schedule="fit", emulate_cuda=True, audit=audit)
    assert (outcome.result, outcome.price.fit_seconds) == ("repaired", None)
    assert same_state(weights, state_of(learn)) == []
    x, _ = learn.dls.valid.one_batch()
    assert float(x.abs().max()) < 10
    assert float(learn.dls.train.dataset.tensors[0].abs().max()) > 1e5  # the data themselves are as they were


def test_callbacks_of_the_fit_are_gone_afterwards_whatever_came_of_it(audit):
    kind = learners.KINDS["log_of_zero"]
    learn = kind.learner()
    before = list(learn.cbs)
    seen = learners.Recording()
    outcome = autoprec.run(learn, 1, kind.lr, emulate_cuda=True, audit=audit, cbs=seen)
    assert outcome.result == "unrepaired"
    assert list(learn.cbs) == before
    assert seen.seen == []


# ---- learn.autoprec -------------------------------------------------------------------------------------------


def test_the_learner_recalls_its_outcome_and_holds_nothing_of_ours(audit):
    for name in ("mlp", "attention"):
        kind = learners.KINDS[name]
        learn = kind.learner()
        attributes = set(vars(learn))
        path = audit.with_name(f"{name}.jsonl")
        outcome = autoprec.run(learn, kind.epochs, kind.lr, schedule="fit", emulate_cuda=True, audit=path)
        assert learn.autoprec == outcome
        assert learn.autoprec.learner is learn
        assert learn.autoprec.explain() == outcome.explain()
        assert not [k for k, v in vars(learn).items() if type(v).__module__.startswith("autoprec")]
        assert "autoprec" not in vars(learn)
        if name == "mlp":
            stock = kind.learner()
            with learners.stock_fp16_on_cpu():
                stock.fit(1, kind.lr)
            assert set(vars(learn)) - attributes == set(vars(stock)) - attributes
        assert not [cb for cb in learn.cbs if type(cb).__module__.startswith("autoprec")]
        for module in learn.model.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
            assert not module._backward_hooks
        for p in learn.model.parameters():
            assert not p._backward_hooks


def test_a_learner_without_a_run_has_no_outcome(audit, learn):
    other = fine()
    autoprec.run(learn, 1, audit=audit)
    assert other.autoprec is None


def test_the_last_run_counts(audit, tmp_path, learn):
    autoprec.run(learn, 1, audit=audit)
    second = autoprec.run(learn, 1, audit=tmp_path / "second.jsonl")
    assert learn.autoprec.run_id == second.run_id


@pytest.mark.parametrize("name", ["mlp", "attention", "log_of_zero"])
def test_the_outcome_does_not_keep_the_learner_alive(name, audit):
    kind = learners.KINDS[name]
    learn = kind.learner()
    autoprec.run(learn, 1, kind.lr, schedule="fit", emulate_cuda=True, audit=audit)
    alive = weakref.ref(learn)
    model = weakref.ref(learn.model)
    count = len(api._outcomes)
    del learn
    gc.collect()
    assert alive() is None
    assert model() is None
    assert len(api._outcomes) < count


def test_an_outcome_keeps_its_own_learner(audit, learn):
    outcome = autoprec.run(learn, 1, audit=audit)
    assert outcome.learner is learn
    assert "learner" not in outcome.model_dump_json()
