"""Which precision a learner carries, what a device offers, and the callback that works on any device."""

from __future__ import annotations

from contextlib import nullcontext

import learners  # first: it silences fastai's import
import pytest
import torch
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.fp16 import AMPMode, MixedPrecision, NonNativeMixedPrecision
from torch import nn

from autoprec.emulation import is_emulating
from autoprec.precision import (
    Availability,
    DevicePrecision,
    Setting,
    attached,
    availability,
    carried,
    computing,
    device_type,
    is_half,
    stock_callback,
)

thread_left_alone = learners.thread_left_alone
pytestmark = learners.FASTAI_WARNINGS
FP16, BF16, FP32 = Setting("fp16"), Setting("bf16"), Setting("fp32")


@pytest.fixture
def learn():
    learners.seed_all()
    return learners.mlp(batches=4)


# ---- what there is --------------------------------------------------------------------------------------------


def test_the_device_is_the_loaders_and_the_models_only_without_one(learn):
    learn.dls.device = torch.device("cuda", 1)
    assert device_type(learn) == "cuda"
    learn.dls.device = None
    learn.model.to("meta")
    assert device_type(learn) == "meta"


@pytest.mark.parametrize(
    ("device", "emulate", "expected"),
    [
        ("cpu", True, Availability(fp16=True, bf16=True, bf16_native=True)),
        ("cpu", False, Availability(fp16=False, bf16=False, bf16_native=False)),
        ("mps", True, Availability(fp16=False, bf16=False, bf16_native=False)),
    ],
)
def test_availability_away_from_cuda(device, emulate, expected):
    found = availability(device, emulate_cuda=emulate)
    assert (found.fp16, found.bf16, found.bf16_native) == (expected.fp16, expected.bf16, expected.bf16_native)
    assert (found.reason is None) == expected.fp16
    if not expected.fp16:
        assert device in found.reason
        assert ("emulate_cuda=True" in found.reason) == (device == "cpu")


@pytest.mark.parametrize(
    ("capability", "native", "emulated", "expected"),
    [
        ((8, 0), True, True, (True, True)),
        ((9, 0), True, True, (True, True)),
        ((7, 5), False, True, (True, False)),
        ((7, 0), True, True, (True, False)),  # some builds claim bf16 below 8.0
        ((6, 1), False, False, (False, False)),
    ],
)
def test_bf16_on_cuda_is_native_from_8_0_on(monkeypatch, capability, native, emulated, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: emulated if including_emulation else native
    )
    found = availability("cuda", emulate_cuda=False)
    assert found.fp16
    assert (found.bf16, found.bf16_native) == expected
    assert (found.reason is None) == expected[1]
    if found.reason:
        assert f"{capability[0]}.{capability[1]}" in found.reason


def test_carried_is_what_was_added_last(learn):
    assert carried(learn) == ([], None)
    learn.to_fp16(init_scale=8.0, growth_interval=3)
    callbacks, setting = carried(learn)
    assert [type(c) for c in callbacks] == [MixedPrecision]
    assert setting == Setting("fp16", {"init_scale": 8.0, "growth_interval": 3})
    learn.to_bf16()
    callbacks, setting = carried(learn)
    assert (len(callbacks), setting.precision) == (2, "bf16")


def test_carried_knows_the_callback_that_casts_the_model(learn):
    learn.add_cb(NonNativeMixedPrecision())
    callbacks, setting = carried(learn)
    assert ([type(c) for c in callbacks], setting) == ([NonNativeMixedPrecision], FP16)


def test_what_a_fit_writes_into_the_callback_is_no_setting(learn):
    learn.to_fp16(init_scale=16.0)
    with learners.stock_fp16_on_cpu():
        learn.fit(1, 1e-3)
    assert learn.mixed_precision.kwargs["enabled"] is True
    assert carried(learn)[1] == Setting("fp16", {"init_scale": 16.0})


@pytest.mark.parametrize(
    ("setting", "mode", "kwargs"),
    [
        (Setting("fp16", {"init_scale": 4.0}), AMPMode.FP16, {"init_scale": 4.0}),
        (Setting("bf16", {"init_scale": 4.0}), AMPMode.BF16, {}),
    ],
)
def test_the_stock_callback_is_fastais_own(setting, mode, kwargs):
    callback = stock_callback(setting)
    assert type(callback) is MixedPrecision
    assert (callback.amp_mode, callback.kwargs) == (mode, kwargs)


def test_fp32_needs_no_callback():
    assert stock_callback(FP32) is None
    assert FP32.stock
    assert FP16.stock
    assert not Setting("fp16", loss_fp32=True).stock
    assert Setting("fp32", loss_fp32=True).stock


def test_is_half():
    assert is_half(torch.zeros(1, dtype=torch.float16))
    assert is_half(torch.zeros(1, dtype=torch.bfloat16))
    assert not is_half(torch.zeros(1))
    assert not is_half("float16")


# ---- attached -------------------------------------------------------------------------------------------------


class Spy(Callback):
    """Last in every event: what a batch is really computed in."""

    order = 5  # as MixedPrecision's place among others of order 10 matters, not this one's

    def __init__(self):
        self.predictions, self.scales, self.emulating = [], [], []

    def after_pred(self):
        self.predictions.append(self.learn.pred.dtype)
        self.emulating.append(is_emulating())
        scaler = getattr(self.learn, "scaler", None)
        self.scales.append(scaler.get_scale() if scaler is not None and scaler.is_enabled() else None)


@pytest.mark.parametrize(
    ("setting", "dtype", "scale"),
    [
        (FP16, torch.float16, 65536.0),
        (Setting("fp16", {"init_scale": 32.0}), torch.float16, 32.0),
        (Setting("bf16", {"init_scale": 32.0}), torch.bfloat16, None),
        (FP32, torch.float32, None),
    ],
)
@pytest.mark.parametrize("own", ["none", "fp16", "two"])
def test_attached_computes_in_the_setting_whatever_the_learner_carries(learn, setting, dtype, scale, own):
    if own != "none":
        learn.to_fp16(init_scale=2.0)
    if own == "two":
        learn.to_bf16()
    before, spy = list(learn.cbs), Spy()
    present = getattr(learn, "mixed_precision", None)
    with attached(learn, setting):
        learn.fit(1, 1e-3, cbs=spy)
    assert set(spy.predictions) == {dtype}
    assert spy.scales[0] == scale
    assert set(spy.emulating) == {setting.precision != "fp32"}
    assert len(learn.cbs) == len(before)
    assert all(a is b for a, b in zip(learn.cbs, before, strict=True))
    assert getattr(learn, "mixed_precision", None) is present
    assert all(cb.learn is learn for cb in learn.cbs)


def test_ours_stands_where_theirs_stood(learn):
    class Same(Callback):
        order = MixedPrecision.order

    first, last = Same(), Same()
    learn.add_cbs([first])
    learn.to_fp16()
    learn.add_cbs([last])
    with attached(learn, BF16):
        kinds = [type(cb) for cb in learn.cbs if cb.order == MixedPrecision.order]
    assert kinds == [Same, DevicePrecision, Same]
    assert [cb for cb in learn.cbs if isinstance(cb, Same)] == [first, last]


class Raises(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, _x):
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), torch.OutOfMemoryError("full")])
@pytest.mark.parametrize("setting", [FP16, BF16, FP32, Setting("fp16", loss_fp32=True)])
def test_attached_takes_itself_out_on_any_exception(learn, setting, error):
    from autoprec.snapshot import release_autocast

    learn.to_fp16()
    before = list(learn.cbs)
    learn.model.append(Raises(error))
    with pytest.raises(type(error)), attached(learn, setting):
        learn.fit(1, 1e-3)
    assert list(learn.cbs) == before
    assert not is_emulating()
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16  # torch's own default, which an unclosed autocast changes
    release_autocast()  # leaving autocast is what the runner does; see test_runner


def test_attached_equals_stock_fastai_bit_for_bit():
    ends = []
    for ours in (True, False):
        learners.seed_all()
        learn = learners.mlp(batches=6, shuffle=True, dropout=0.3)
        learn.to_fp16(init_scale=2.0**18)
        if ours:
            with attached(learn, carried(learn)[1]):
                learn.fit_one_cycle(1, 1e-2)
        else:
            with learners.stock_fp16_on_cpu():
                learn.fit_one_cycle(1, 1e-2)
        ends.append((learners.state_of(learn), list(learn.recorder.losses), learn.recorder.values))
    assert learners.same_state(ends[0][0], ends[1][0]) == []
    assert ends[0][1:] == ends[1][1:]


# ---- the loss in fp32 -----------------------------------------------------------------------------------------


class Squares:
    """A loss with a product that autocast makes half; notes what it computed in."""

    def __init__(self, error=None):
        self.seen, self.targets, self.error = [], [], error

    def __call__(self, out, target):
        product = out @ out.T
        self.seen.append((torch.is_autocast_enabled("cpu"), product.dtype))
        self.targets.append(target.dtype)
        if self.error:
            raise self.error
        return product.float().mean() + 0 * target.float().mean()


@pytest.mark.parametrize(("loss_fp32", "expected"), [(False, (True, torch.float16)), (True, (False, torch.float32))])
def test_the_loss_outside_autocast(learn, loss_fp32, expected):
    loss = learn.loss_func = Squares()
    spy = Spy()
    with attached(learn, Setting("fp16", loss_fp32=loss_fp32)):
        learn.fit(1, 1e-3, cbs=spy)
    assert set(loss.seen) == {expected}
    assert set(spy.predictions) == {torch.float16}  # the model itself stays in 16 bits


def test_half_targets_are_cast_up_for_a_loss_in_fp32(learn):
    class HalfTargets(Callback):
        def before_batch(self):
            self.learn.yb = tuple(y.half() for y in self.yb)

    learn.metrics = []
    for loss_fp32, dtype in ((False, torch.float16), (True, torch.float32)):
        loss = learn.loss_func = Squares()
        with attached(learn, Setting("fp16", loss_fp32=loss_fp32)):
            learn.fit(1, 1e-3, cbs=HalfTargets())
        assert set(loss.targets) == {dtype}


@pytest.mark.parametrize("error", [CancelFitException(), ValueError("no"), KeyboardInterrupt()])
def test_a_loss_that_raises_leaves_no_second_autocast_state_behind(learn, error):
    from autoprec.snapshot import release_autocast

    learn.loss_func = Squares(error)
    raised = nullcontext() if isinstance(error, CancelFitException) else pytest.raises(type(error))
    with raised, attached(learn, Setting("fp16", loss_fp32=True)):
        learn.fit(1, 1e-3)
    assert not [cb for cb in learn.cbs if type(cb).__module__.startswith("autoprec")]
    release_autocast()
    learn.loss_func = spy = Squares()
    learn.fit(1, 1e-3)
    assert set(spy.seen) == {(False, torch.float32)}


def test_computing_alone_lays_cudas_lists_over_the_cpu_and_takes_them_off(learn):
    with computing(learn, FP16):
        assert is_emulating()
    assert not is_emulating()
    with computing(learn, FP32):
        assert not is_emulating()


def test_nothing_is_said(learn, capsys):
    learn.logger = learners.say_nothing
    with attached(learn, FP16):
        learn.fit(1, 1e-3)
    assert capsys.readouterr() == ("", "")
