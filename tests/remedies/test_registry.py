"""Every remedy of the registry: it undoes itself exactly, its change is JSON, and it says where it cannot help."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import learners  # first: it silences fastai's import
import pytest
import torch
from fastai.callback.training import GradientClip

from autoprec.evidence import (
    Configuration,
    DataSample,
    Evidence,
    Feature,
    Leg,
    LegSpec,
    Misuse,
    Place,
    ScaleSearch,
    Step,
)
from autoprec.policy import Remedies
from autoprec.precision import Setting, carried
from autoprec.remedies import REMEDIES, Subject
from autoprec.schedule import FitPlan
from autoprec.snapshot import fingerprint
from autoprec.testing import check_remedy

if TYPE_CHECKING:
    from collections.abc import Callable

thread_left_alone = learners.thread_left_alone
pytestmark = learners.FASTAI_WARNINGS

FEATURE = Feature(name="input 0, column 0", min=-3e5, max=3e5, mean=1e5, std=3e5, typical=3e5)
PLACE = Place(module="", module_class="Attention", file=learners.__file__, line=10, function="forward")


def evidence(*, scales=(65536.0,) * 8, norms=(1.0,) * 8, skipped=(), misuses=(), lr=0.1, **parts) -> Evidence:
    """A probe of as many steps as there are scales, and the twin's gradient norms."""
    configuration = {"device": "cpu", "emulated": True, "requested": "fp16", **parts.pop("configuration", {})}
    steps = [
        Step(step=i, loss=1.0, lr=lr, grad_norm=n, scale_before=s, scale_after=s, skipped=i in skipped)
        for i, (s, n) in enumerate(zip(scales, norms, strict=True))
    ]
    legs = {
        "main": Leg(spec=LegSpec(precision="fp16"), steps=tuple(steps), misuses=misuses),
        "fp32": Leg(spec=LegSpec(precision="fp32"), steps=tuple(steps)),
    }
    data = DataSample(batches=10, features=(FEATURE,), nonfinite_rows=parts.pop("rows", ()))
    return Evidence(configuration=Configuration(**configuration), **{"legs": legs, "data": data, **parts})


def search(largest: float | None, unflushed: float | None = None) -> ScaleSearch:
    return ScaleSearch(largest_finite=largest, smallest_tried=1.0, batches=2, smallest_unflushed=unflushed)


def plain():
    return learners.mlp(batches=4)


def with_two_callbacks():
    return plain().to_fp16(init_scale=8.0).to_bf16()


def half_with_an_optimizer():
    learn = plain()
    learn.model.half()
    learn.create_opt()
    p = next(learn.model.parameters())
    learn.opt.state[p] = {"grad_avg": torch.ones_like(p), "step": 3}
    return learn


def poisoned():
    learn = plain()
    with torch.no_grad():
        learn.model[1].running_mean[3] = math.nan
    return learn


def misusing():
    learn = plain()
    learn.add_cb(learners.UnscalesTwice())
    return learn


MISUSE = Misuse(callback="UnscalesTwice", what="unscales", place=PLACE, clips_to=1.0)


@dataclass(frozen=True)
class Scenario:
    """Where a remedy applies, and where it does not, each with a part of the reason it gives."""

    make: Callable[[], Any] = plain
    evidence: Evidence = field(default_factory=evidence)
    settings: dict[str, Any] = field(default_factory=dict)
    place: Place | None = None
    refused: tuple[tuple[dict[str, Any], str], ...] = ()


FP32, BF16 = {"setting": Setting("fp32")}, {"setting": Setting("bf16")}
SCENARIOS: dict[str, Scenario] = {
    "one_precision_callback": Scenario(with_two_callbacks, refused=(({"make": plain}, "at most one"),)),
    "master_weights": Scenario(half_with_an_optimizer, refused=(({"make": plain}, "no weight is stored in 16 bits"),)),
    "replace_callback": Scenario(
        misusing, evidence(misuses=(MISUSE,)),
        refused=(({"evidence": evidence()}, "no callback was seen"), ({"make": plain}, "not in the learner")),
    ),
    "reset_buffers": Scenario(poisoned, refused=(({"make": plain}, "no BatchNorm statistic"),)),
    "skip_nonfinite_batches": Scenario(
        evidence=evidence(rows=((3, 1),)),
        refused=(
            ({"evidence": evidence(rows=((0, 1), (3, 1)))}, "20% of the sampled batches"),
            ({"setting": Setting("fp32", skip_nonfinite=True)}, "already"),
            ({"evidence": evidence(data=None)}, "no batch"),
        ),
    ),
    "normalize_inputs": Scenario(
        refused=(
            ({"settings": {"mode": "check"}}, "mode: check"),
            ({"evidence": evidence(configuration={"normalized": True})}, "normalize already"),
            ({"evidence": evidence(data=DataSample(batches=3))}, "no floating-point input"),
            ({"evidence": evidence(data=None)}, "no floating-point input"),
        ),
    ),
    "keep_modules_fp32": Scenario(
        place=PLACE,
        refused=(
            (FP32, "fp32 already"),
            ({"place": None}, "names no place"),
            ({"place": Place(file="loss.py", line=3)}, "names no place"),
            ({"place": Place(module="nowhere", module_class="Linear")}, "no module 'nowhere'"),
            ({"place": Place(module="")}, "nothing smaller than the whole model"),
        ),
    ),
    "loss_fp32": Scenario(
        refused=((FP32, "fp32 already"), ({"setting": Setting("fp16", loss_fp32=True)}, "fp32 already")),
    ),
    "clip_gradients": Scenario(
        refused=(
            ({"make": lambda: _with(GradientClip(1.0))}, "clips its gradients already"),
            ({"evidence": evidence(norms=(math.nan,) * 8)}, "no finite gradient norm"),
            ({"evidence": evidence(legs={})}, "no finite gradient norm"),
        ),
    ),
    "lower_lr": Scenario(
        settings={"factors": (0.1,)},
        refused=(({"settings": {"factors": (0.1,), "floor": 0.05}}, "below the policy's floor of 0.05"),),
    ),
    "carry_scale": Scenario(
        evidence=evidence(scales=(65536.0, 1024.0, 1024.0), norms=(1.0,) * 3),
        refused=(
            (FP32, "fp32 has no loss scale"),
            (BF16, "bf16 has no loss scale"),
            ({"evidence": evidence()}, "settled where it started"),
            ({"evidence": evidence(scales=(65536.0, 8.0), norms=(1.0, 1.0), skipped=(1,))}, "had not settled"),
            ({"evidence": evidence(legs={})}, "had not settled"),
        ),
    ),
    "init_scale": Scenario(
        evidence=evidence(scale_search=search(4096.0)),
        refused=(
            (FP32, "fp32 has no loss scale"),
            ({"evidence": evidence()}, "no scale keeps"),
            ({"evidence": evidence(scale_search=search(None))}, "no scale keeps"),
            ({"evidence": evidence(scale_search=search(2.0**18))}, "already starts at 65536"),
        ),
    ),
    "bf16": Scenario(
        refused=(
            (BF16, "in bf16"),
            (FP32, "in fp32"),
            ({"evidence": evidence(configuration={"bf16_native": False, "unavailable_reason": "too old"})}, "too old"),
            (
                {
                    "evidence": evidence(configuration={"bf16_available": False, "unavailable_reason": "none at all"}),
                    "settings": {"native_only": False},
                },
                "none at all",
            ),
        ),
    ),
    "fp32": Scenario(refused=((FP32, "fp32 already"),)),
}  # fmt: skip


def _with(*cbs):
    learn = plain()
    learn.add_cbs(cbs)
    return learn


def settings_of(name, given):
    return getattr(Remedies(), name).model_copy(update=given)


def subject_of(learn, setting=None, place=None):
    return Subject(
        learn, FitPlan("fit", 1, slice(0.01, 0.1)), setting or Setting("fp16"), emulate_cuda=True, place=place
    )


def test_every_remedy_has_a_scenario():
    assert set(SCENARIOS) == set(REMEDIES), "a new remedy needs a scenario here: where it applies, and where not"


@pytest.mark.parametrize("name", REMEDIES)
def test_a_remedy_passes_the_checks_that_outside_ones_run(name):
    s = SCENARIOS[name]
    learners.seed_all()
    check_remedy(
        REMEDIES[name], s.make, evidence=s.evidence, settings=settings_of(name, s.settings), place=s.place
    )  # fmt: skip


@pytest.mark.parametrize("name", REMEDIES)
def test_apply_then_undo_leaves_learner_plan_and_setting_as_they_were(name):
    s, remedy = SCENARIOS[name], REMEDIES[name]
    learners.seed_all()
    learn = s.make()
    settings, subject = settings_of(name, s.settings), subject_of(learn, place=s.place)
    before, was = fingerprint(learn), replace(subject)
    data = [t.clone() for t in learn.dls.train.dataset.tensors]
    draws = torch.get_rng_state()
    assert remedy.obstacle(subject, s.evidence, settings) is None
    assert before.differences(fingerprint(learn)) == ()
    assert (subject.plan, subject.setting) == (was.plan, was.setting)

    change = remedy.apply(subject, s.evidence, settings)
    moved = before.differences(fingerprint(learn)) != ()
    assert moved or (subject.plan, subject.setting) != (was.plan, was.setting)
    assert torch.equal(draws, torch.get_rng_state())
    assert change.remedy == name
    assert change.what
    assert change.before != change.after
    assert type(change).model_validate_json(change.model_dump_json()) == change
    json.loads(change.model_dump_json(), parse_constant=_no_constant)

    remedy.undo(subject, change)
    assert before.differences(fingerprint(learn)) == ()
    assert subject.plan is was.plan
    assert subject.setting is was.setting
    assert subject.held == {}
    assert all(torch.equal(a, b) for a, b in zip(data, learn.dls.train.dataset.tensors, strict=True))


def _no_constant(text):
    raise AssertionError(f"{text} is no JSON")


@pytest.mark.parametrize("name", REMEDIES)
def test_undoing_twice_over_changes_nothing_more(name):
    """Two rounds of apply and undo: what undo holds back for itself is used up."""
    s, remedy = SCENARIOS[name], REMEDIES[name]
    learners.seed_all()
    learn = s.make()
    settings, subject = settings_of(name, s.settings), subject_of(learn, place=s.place)
    before = fingerprint(learn)
    changes = []
    for _ in range(2):
        changes.append(remedy.apply(subject, s.evidence, settings))
        remedy.undo(subject, changes[-1])
    assert changes[0] == changes[1]
    assert before.differences(fingerprint(learn)) == ()


REFUSALS = [(n, i) for n, s in SCENARIOS.items() for i in range(len(s.refused))]


@pytest.mark.parametrize(("name", "index"), REFUSALS)
def test_the_obstacle_says_why_it_does_not_apply(name, index):
    s = SCENARIOS[name]
    differs, words = s.refused[index]
    learners.seed_all()
    learn = differs.get("make", s.make)()
    settings = settings_of(name, differs.get("settings", s.settings))
    subject = subject_of(learn, differs.get("setting"), differs.get("place", s.place))
    before = fingerprint(learn)
    found = REMEDIES[name].obstacle(subject, differs.get("evidence", s.evidence), settings)
    assert found is not None
    assert words in found
    assert before.differences(fingerprint(learn)) == ()


@pytest.mark.parametrize("name", [n for n in REMEDIES if n not in ("normalize_inputs", "clip_gradients", "lower_lr")])
def test_a_remedy_that_has_been_applied_is_refused_the_second_time(name):
    s, remedy = SCENARIOS[name], REMEDIES[name]
    learners.seed_all()
    settings, subject = settings_of(name, s.settings), subject_of(s.make(), place=s.place)
    for _ in range(10 if remedy.grows else 1):
        if remedy.obstacle(subject, s.evidence, settings) is None:
            remedy.apply(subject, s.evidence, settings)
    assert remedy.obstacle(subject, s.evidence, settings) is not None


# ---- what each does -------------------------------------------------------------------------------------------


def applied(name, learn=None, **kwargs):
    s = SCENARIOS[name]
    learners.seed_all()
    subject = subject_of(learn or s.make(), kwargs.pop("setting", None), kwargs.pop("place", s.place))
    given = kwargs.pop("evidence", s.evidence)
    settings = settings_of(name, {**s.settings, **kwargs})
    assert REMEDIES[name].obstacle(subject, given, settings) is None
    return subject, REMEDIES[name].apply(subject, given, settings)


def test_one_precision_callback_keeps_the_last():
    subject, change = applied("one_precision_callback")
    callbacks, setting = carried(subject.learn)
    assert (len(callbacks), setting.precision) == (1, "bf16")
    assert subject.learn.mixed_precision is callbacks[0]
    assert (change.before, change.after) == (["MixedPrecision", "MixedPrecision"], ["MixedPrecision"])


def test_master_weights_are_the_same_parameters_in_fp32():
    learn = half_with_an_optimizer()
    parameters = list(learn.model.parameters())
    values = [p.detach().float().clone() for p in parameters]
    applied("master_weights", learn)
    assert all(a is b for a, b in zip(parameters, learn.model.parameters(), strict=True))
    assert all(p.dtype == torch.float32 for p in parameters)
    assert all(b.dtype != torch.float16 for b in learn.model.buffers())
    assert all(torch.equal(p, v) for p, v in zip(parameters, values, strict=True))
    state = learn.opt.state[parameters[0]]
    assert (state["grad_avg"].dtype, state["step"]) == (torch.float32, 3)


def test_a_replaced_callback_clips_where_it_clipped():
    subject, change = applied("replace_callback")
    names = [type(cb).__name__ for cb in subject.learn.cbs]
    assert "UnscalesTwice" not in names
    assert [cb.max_norm for cb in subject.learn.cbs if isinstance(cb, GradientClip)] == [1.0]
    assert (change.before, change.after) == (["UnscalesTwice"], ["GradientClip(1)"])


def test_reset_buffers_are_the_statistics_of_the_training_batches():
    learners.seed_all()
    learn = poisoned()
    before = {n: p.clone() for n, p in learn.model.named_parameters()}
    subject, change = applied("reset_buffers", learn)
    x = learn.dls.train.dataset.tensors[0]
    with torch.no_grad():
        h = torch.stack([learn.model[0](b) for b in x.split(learners.BS)]).double()
    assert torch.allclose(subject.learn.model[1].running_mean.double(), h.mean(1).mean(0), atol=1e-6)
    assert torch.allclose(subject.learn.model[1].running_var.double(), h.var(1).mean(0), rtol=1e-5)
    assert "4 training batches" in change.after
    assert all(torch.equal(p, before[n]) for n, p in learn.model.named_parameters())
    assert learn.model[1].momentum == 0.1


@pytest.mark.parametrize(
    ("norms", "settings", "expected"),
    [
        ((1.0, 2.0, 3.0, 4.0, 5.0), {}, 3.0),
        ((5.0, 1.0, 4.0, 2.0, 3.0), {"quantile": 0.9}, 5.0),
        ((1.0, 2.0, 3.0, 4.0), {"quantile": 0.0}, 1.0),
        ((1.0, 2.0, 3.0, 4.0), {"quantile": 1.0}, 4.0),
        ((1.0, math.nan, 3.0, math.inf), {}, 3.0),
        ((1.23456, 1.23456), {}, 1.23),
        ((1.0, 2.0), {"max_norm": 0.5}, 0.5),
        # an explosion and what follows it are no usual gradients
        ((1.0, 1.2, 1.1, 1.0, 1e4, 1e4, 1e4, 1e4), {}, 1.1),
    ],
)
def test_the_clip_norm_is_a_quantile_of_the_usual_norms(norms, settings, expected):
    given = evidence(norms=norms, scales=(1.0,) * len(norms))
    subject, change = applied("clip_gradients", evidence=given, **settings)
    assert change.after == expected
    assert [cb.max_norm for cb in subject.learn.cbs if isinstance(cb, GradientClip)] == [expected]


@pytest.mark.parametrize(
    ("found", "settings", "now", "expected"),
    [
        (search(4096.0), {}, None, 1024.0),  # two doublings of room
        (search(2.0**20), {}, {"init_scale": 1.0}, 2.0**18),
        (search(2.0), {}, None, 1.0),  # the policy's least
        (search(2.0**40), {}, None, 2.0**24),  # the policy's most
        (search(2.0**40), {"max": 2.0**20}, None, 2.0**20),
        (search(64.0, unflushed=32.0), {}, None, 32.0),  # above what flushes
        (search(64.0, unflushed=2.0), {}, None, 16.0),
        (search(64.0, unflushed=256.0), {}, None, 64.0),  # never above what overflows
        (None, {"factors": (0.25,)}, {"init_scale": 64.0}, 16.0),
        (None, {"factors": (0.3,)}, {"init_scale": 64.0}, 16.0),  # 19.2: the power of two below
        (None, {"factors": (1e-9,)}, None, 1.0),
    ],
)
def test_the_initial_scale_that_is_aimed_at(found, settings, now, expected):
    setting = Setting("fp16", now or {})
    subject, change = applied("init_scale", evidence=evidence(scale_search=found), setting=setting, **settings)
    assert change.after == subject.setting.scaler_kwargs["init_scale"] == expected
    assert change.before == (now or {"init_scale": 65536.0})["init_scale"]
    assert math.log2(expected) == int(math.log2(expected))


def test_the_scale_changes_and_the_other_scaler_arguments_do_not():
    for name in ("init_scale", "carry_scale"):
        subject, _ = applied(name, setting=Setting("fp16", {"growth_interval": 7}))
        assert subject.setting.scaler_kwargs == {"growth_interval": 7, "init_scale": 1024.0}


@pytest.mark.parametrize("lr", [slice(0.001, 0.1), slice(0.1), 0.1])
def test_a_lower_lr_keeps_the_ratios_of_a_slice(lr):
    s = SCENARIOS["lower_lr"]
    learn = plain()
    subject = replace(subject_of(learn), plan=FitPlan("fit", 1, lr))
    change = REMEDIES["lower_lr"].apply(subject, s.evidence, settings_of("lower_lr", s.settings))
    found = subject.plan.learning_rate(learn)
    if isinstance(lr, slice):
        assert found.stop == pytest.approx(0.01)
        assert found.start == (None if lr.start is None else pytest.approx(1e-4))
    else:
        assert found == pytest.approx(0.01)
    assert (change.before, change.after) == (0.1, pytest.approx(0.01))


def test_islands_grow_from_the_line_to_the_function():
    s, remedy = SCENARIOS["keep_modules_fp32"], REMEDIES["keep_modules_fp32"]
    subject, settings = subject_of(plain(), place=PLACE), settings_of("keep_modules_fp32", {})
    first = remedy.apply(subject, s.evidence, settings)
    assert [(i.line, i.function) for i in subject.setting.islands] == [(10, "forward")]
    second = remedy.apply(subject, s.evidence, settings)
    assert [(i.line, i.function) for i in subject.setting.islands] == [(None, "forward")]  # in place of its line
    assert "nothing smaller" in remedy.obstacle(subject, s.evidence, settings)
    subject.place = Place(module="4", module_class="Linear")
    third = remedy.apply(subject, s.evidence, settings)
    assert [str(i) for i in subject.setting.islands][1:] == ["4"]
    for change, left in ((third, 1), (second, 1), (first, 0)):
        remedy.undo(subject, change)
        assert len(subject.setting.islands) == left
    assert subject.setting == Setting("fp16")
    assert subject.held == {}


@pytest.mark.parametrize("name", ["bf16", "fp32"])
def test_another_precision_drops_what_it_does_not_need_and_keeps_the_rest(name):
    before = Setting("fp16", {"init_scale": 4.0}, loss_fp32=True, skip_nonfinite=True)
    subject, change = applied(name, setting=before)
    assert subject.setting == Setting(name, skip_nonfinite=True)
    assert (change.before, change.after) == ("fp16", name)


def test_bf16_may_be_emulated_where_the_policy_says_so():
    given = evidence(configuration={"bf16_native": False, "unavailable_reason": "old"})
    subject, _ = applied("bf16", evidence=given, native_only=False)
    assert subject.setting.precision == "bf16"


def test_batches_that_are_not_finite_are_left_out_in_the_setting():
    subject, _ = applied("skip_nonfinite_batches", setting=Setting("bf16"))
    assert subject.setting == Setting("bf16", skip_nonfinite=True)
