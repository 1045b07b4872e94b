"""A leg: the planned fit in fewer steps, each written down as torch's own scaler and plain SGD make it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import fits
import pytest
import torch
from faults import constant, square
from fits import BS, Recording, classified, fitted, leg, seed_all
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fastai's own imports
    from fastai.callback.core import Callback
    from fastai.callback.progress import CSVLogger, ProgressCallback
    from fastai.callback.schedule import combined_cos
    from fastai.callback.tracker import EarlyStoppingCallback, SaveModelCallback
    from fastai.callback.training import GradientAccumulation, GradientClip
    from fastai.losses import CrossEntropyLossFlat
    from fastai.metrics import accuracy
    from fastai.optimizer import SGD

from autoprec import emulation
from autoprec.evidence import LegSpec, Precision
from autoprec.observe.data import DataCollector
from autoprec.observe.leg import LegRun, quotas
from autoprec.precision import Setting
from autoprec.schedule import FitPlan
from autoprec.snapshot import preserved

NAN, INF = math.nan, math.inf


# ---- length and schedule --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "steps", "shares"),
    [
        ((100,), 40, (40,)),
        ((30,), 40, (30,)),
        ((100, 100), 40, (20, 20)),
        ((10, 100), 40, (10, 30)),
        ((100, 10), 40, (30, 10)),
        ((5, 5), 40, (5, 5)),
        ((0, 50), 40, (0, 40)),
        ((50, 50), 1, (0, 1)),
        ((50,), 0, (0,)),
    ],
)
def test_quotas(stages: tuple[int, ...], steps: int, shares: tuple[int, ...]) -> None:
    assert quotas(stages, steps) == shares


@settings(derandomize=True, max_examples=300)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=5), st.integers(0, 400))
def test_quotas_use_every_step_and_share_them_fairly(stages: list[int], steps: int) -> None:
    shares = quotas(stages, steps)
    assert sum(shares) == min(steps, sum(stages))
    assert all(0 <= s <= n for s, n in zip(shares, stages, strict=True))
    # Who has not got all of its own has no less than any other, but for the remainder of a division.
    assert all(max(shares) - s <= 1 for s, n in zip(shares, stages, strict=True) if s < n)


def one_cycle(steps: int, peak: float, *, pct_start: float = 0.25, div: float = 25.0) -> list[float]:
    schedule = combined_cos(pct_start, peak / div, peak, peak / 1e5)
    return [float(schedule(i / steps)) for i in range(steps)]


@pytest.mark.parametrize("steps", [4, 8, 20])
def test_squeezed_schedule_reaches_the_peak(steps: int) -> None:
    # Planned: 4 epochs of 10 batches, the peak in batch 10. The leg passes it in a quarter of its own.
    found = leg(fitted(*classified()), steps, plan=FitPlan("one_cycle", 4, 0.1))
    assert [s.lr for s in found.steps] == pytest.approx(one_cycle(steps, 0.1))
    assert max(s.lr for s in found.steps) == pytest.approx(0.1)
    assert [s.step for s in found.steps] == list(range(steps))
    assert found.planned_steps == steps


def test_lr_factor_scales_the_whole_schedule() -> None:
    found = leg(fitted(*classified()), 8, plan=FitPlan("one_cycle", 4, 0.1), lr_factor=0.1)
    assert [s.lr for s in found.steps] == pytest.approx(one_cycle(8, 0.01))


def test_fine_tune_passes_both_its_stages() -> None:
    learn = fitted(*classified(), splitter=lambda m: [[m[0].weight], [m[0].bias]])
    plan = FitPlan("fine_tune", 3, 0.1)
    assert plan.stages(learn) == (10, 30)
    found = leg(learn, 6, 10, plan=plan)
    frozen, whole = found.steps[:6], found.steps[6:]
    assert [s.lr for s in frozen] == pytest.approx(one_cycle(6, 0.1, pct_start=0.99))
    assert [s.lr for s in whole] == pytest.approx(one_cycle(10, 0.05, pct_start=0.3, div=5.0))
    assert found.planned_steps == 16


def test_quota_of_none_leaves_a_stage_out() -> None:
    learn = fitted(*classified(), splitter=lambda m: [[m[0].weight], [m[0].bias]])
    found = leg(learn, 0, 5, plan=FitPlan("fine_tune", 3, 0.1), validation=1)
    assert [s.lr for s in found.steps] == pytest.approx(one_cycle(5, 0.05, pct_start=0.3, div=5.0))
    assert len(found.validation) == 1


def test_leg_crosses_epochs_and_ends_within_one() -> None:
    learn = fitted(*classified(batches=3))
    recording = Recording()
    learn.add_cb(recording)
    seen: list[Tensor] = []
    found = leg(learn, 7, plan=FitPlan("fit", 9, 0.1), inside=lambda: seen.extend(recording.inputs_seen))
    assert len(found.steps) == 7
    assert len(seen) == 7
    for i, x in enumerate(seen):
        assert torch.equal(x, seen[i % 3])


# ---- the ledger beside torch's own ----------------------------------------------------------------------------


def linear() -> nn.Linear:
    model = nn.Linear(5, 3)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 15).reshape(3, 5))
        model.bias.zero_()
    return model


def by_hand(precision: Precision, steps: int, lr: float, **scaler: Any) -> list[dict[str, Any]]:
    """The same steps with torch alone: autocast, GradScaler, SGD."""
    x, y = classified(batches=steps)
    model, rows = linear(), []
    opt = torch.optim.SGD(model.parameters(), lr)
    scales = torch.amp.GradScaler("cpu", enabled=precision == "fp16", **scaler)
    on, dtype = precision != "fp32", {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    with emulation.emulate_cuda():
        for i in range(steps):
            with torch.autocast("cpu", dtype=dtype, enabled=on):
                loss = F.cross_entropy(model(x[i * BS : (i + 1) * BS]).float(), y[i * BS : (i + 1) * BS])
            opt.zero_grad()
            before, weight = scales.get_scale(), model.weight.detach().clone()
            scales.scale(loss).backward()
            scales.unscale_(opt)
            norm = math.sqrt(
                sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
            )
            scales.step(opt)
            scales.update()
            rows.append(
                {
                    "loss": float(loss.detach()),
                    "norm": norm,
                    "before": before,
                    "after": scales.get_scale(),
                    "skipped": torch.equal(weight, model.weight),
                }
            )
    return rows


@pytest.mark.parametrize("scaler", [{"init_scale": 2.0**20}, {"init_scale": 2.0**14, "growth_interval": 2}])
def test_ledger_is_that_of_torchs_scaler(scaler: dict[str, Any]) -> None:
    steps = 12
    wanted = by_hand("fp16", steps, 0.1, **scaler)
    found = leg(fitted(*classified(steps), model=linear()), steps, precision="fp16", setting=Setting("fp16", scaler))
    assert len(found.steps) == steps
    assert [s.scale_before for s in found.steps] == [w["before"] for w in wanted]
    assert [s.scale_after for s in found.steps] == [w["after"] for w in wanted]
    assert [s.skipped for s in found.steps] == [w["skipped"] for w in wanted]
    assert [s.loss for s in found.steps] == pytest.approx([w["loss"] for w in wanted], rel=1e-6)
    norms = [(s.grad_norm, w["norm"]) for s, w in zip(found.steps, wanted, strict=True) if not w["skipped"]]
    assert [a for a, _ in norms] == pytest.approx([b for _, b in norms], rel=1e-5)
    assert all(s.grad_norm is None for s in found.steps if s.skipped)
    # Both happen, or the comparison shows nothing.
    assert {w["skipped"] for w in wanted} == {True, False}
    assert ("growth_interval" in scaler) == any(w["after"] > w["before"] for w in wanted)
    assert found.failure is None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ledger_without_a_scaler(precision: Precision) -> None:
    wanted = by_hand(precision, 6, 0.1)
    found = leg(fitted(*classified(6), model=linear()), 6, precision=precision)
    assert [s.loss for s in found.steps] == pytest.approx([w["loss"] for w in wanted], rel=1e-6)
    assert [s.grad_norm for s in found.steps] == pytest.approx([w["norm"] for w in wanted], rel=1e-5)
    assert {(s.scale_before, s.scale_after, s.skipped) for s in found.steps} == {(None, None, False)}


def test_initial_scale_of_the_spec_goes_before_the_users() -> None:
    learn = fitted(*classified(), model=linear())
    found = leg(learn, 1, precision="fp16", setting=Setting("fp16", {"init_scale": 4.0}), init_scale=256.0)
    assert found.steps[0].scale_before == 256.0


def test_norm_is_that_before_clipping_and_the_clip_works() -> None:
    free = leg(fitted(*classified(3), model=linear()), 3)
    clipped = leg(fitted(*classified(3), model=linear()), 3, clip=0.01)
    assert free.steps[0].grad_norm == clipped.steps[0].grad_norm
    assert free.steps[0].grad_norm is not None
    assert free.steps[0].grad_norm > 0.1
    # SGD without momentum: the first step moves the weights by lr times the clipped norm.
    size = float(linear().weight.detach().norm())
    (one,) = [leg(fitted(*classified(3), model=linear()), 1, clip=0.01)]
    assert one.param_change == pytest.approx(0.1 * 0.01 / size, rel=1e-3)


def test_change_of_the_weights_is_their_relative_distance() -> None:
    learn, moved = fitted(*classified(), model=linear()), []
    found = leg(learn, 5, inside=lambda: moved.extend(p.detach().clone() for p in learn.model.parameters()))
    before = torch.cat([p.detach().flatten() for p in learn.model.parameters()]).double()
    after = torch.cat([p.flatten() for p in moved]).double()
    assert found.param_change == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-5)
    assert found.param_change > 0


def test_leg_trains_as_fastai_does() -> None:
    seed_all(1)
    learn = fitted(*classified(), model=linear(), shuffle=True)
    losses: list[float] = []

    class Noting(Callback):
        def after_loss(self) -> None:
            if self.training:
                losses.append(float(self.loss.detach()))

    found = leg(learn, 10, validation=2)
    learn.fit(1, 0.1, cbs=Noting())
    assert [s.loss for s in found.steps] == losses
    assert found.validation_loss == pytest.approx(learn.recorder.values[-1][1], rel=1e-6)


# ---- where a leg stops ----------------------------------------------------------------------------------------

AT = 3
"""The batch in which something happens."""


class FromBatch(nn.Module):
    """Does something to its output, its buffer or its caller from batch `AT` on, counted in training."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.calls, self.layer = what, 0, nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        if not self.training:
            return out / 0 if self.what == "validation" else out
        self.calls += 1
        if self.calls <= AT:
            return out
        if self.what == "prediction":
            return out * 1e38 * 1e38
        if self.what == "buffer":
            self.seen.add_(out.detach().abs().max() * 1e38).mul_(1e38)
        if self.what == "exception":
            raise RuntimeError("out\n   of ideas")
        return out


class FromBatchLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        loss = F.cross_entropy(pred, target)
        return loss / 0 if self.calls > AT else loss


class Roots(nn.Module):
    """Where every input is 0 the gradient of the root is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = constant(nn.Linear(2, 2, bias=False), 0.5), square(2, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).sqrt())


def squared(pred: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(pred, target)


@dataclass
class Stop:
    make: Callable[[], Any]
    where: str
    names: tuple[str, ...] = ()
    step: int = AT
    taken: int = AT
    op: str | None = None
    source: str | None = None
    lr: float = 0.1
    precision: Precision = "fp32"


def bad_input() -> Any:
    x, y = classified()
    x[AT * BS + 1, 2] = NAN
    return fitted(x, y)


def bad_target() -> Any:
    x, _ = classified()
    y = x[:, :3].clone()
    y[AT * BS + 1, 2] = INF
    return fitted(x, y, loss=squared)


def root_of_zero() -> Any:
    x = torch.ones(12 * BS, 2)
    x[AT * BS : (AT + 1) * BS] = 0
    return fitted(x, torch.ones(12 * BS, 2), model=Roots(), loss=squared)


def too_fast() -> Any:
    # One step of lr 1e38 times a gradient of some 100.
    x, _ = classified()
    return fitted(x, x[:, :3] * 300, loss=squared)


STOPS = {
    "input": Stop(bad_input, "input"),
    "input in fp16": Stop(bad_input, "input", precision="fp16"),
    "target": Stop(bad_target, "target"),
    "prediction": Stop(
        lambda: fitted(*classified(), model=FromBatch("prediction")), "prediction", op="aten.mul",
        source="return out * 1e38 * 1e38",
    ),
    "loss": Stop(
        lambda: fitted(*classified(), loss=FromBatchLoss()), "loss", op="aten.div",
        source="return loss / 0 if self.calls > AT else loss",
    ),
    "gradient": Stop(
        root_of_zero, "gradient", ("first.weight",), op="aten.div",
        source="return self.head(self.first(x).sqrt())",
    ),
    "gradient in bf16": Stop(
        root_of_zero, "gradient", ("first.weight",), op="aten.div",
        source="return self.head(self.first(x).sqrt())", precision="bf16",
    ),
    "weight": Stop(too_fast, "weight", ("0.weight", "0.bias"), step=0, taken=1, lr=1e38),
    "buffer": Stop(
        lambda: fitted(*classified(), model=FromBatch("buffer")), "buffer", ("seen",), taken=AT + 1, op="aten.mul_",
        source="self.seen.add_(out.detach().abs().max() * 1e38).mul_(1e38)",
    ),
    "validation": Stop(
        lambda: fitted(*classified(), model=FromBatch("validation")), "validation", step=9, taken=10, op="aten.div",
        source='return out / 0 if self.what == "validation" else out',
    ),
    "exception": Stop(lambda: fitted(*classified(), model=FromBatch("exception")), "exception"),
}  # fmt: skip


@pytest.mark.parametrize("name", STOPS)
def test_leg_stops_at_the_first_failure_and_says_where(name: str) -> None:
    stop = STOPS[name]
    learn = stop.make()
    found = leg(learn, 10, precision=stop.precision, plan=FitPlan("fit", 1, stop.lr), validation=2)
    assert found.failure is not None
    assert (found.failure.where, found.failure.step, found.failure.names) == (stop.where, stop.step, stop.names)
    assert len(found.steps) == stop.taken
    assert all(math.isfinite(s.loss) for s in found.steps)
    assert found.planned_steps == 10
    if stop.op is None:
        assert found.origin is None
    else:
        assert found.origin is not None
        assert found.origin.operation.op == stop.op
        assert found.origin.place.source == stop.source
    assert len(found.validation) == (2 if name == "validation" else 0)


def test_exception_is_told_in_one_line_with_its_place() -> None:
    found = leg(fitted(*classified(), model=FromBatch("exception")), 10)
    assert found.failure is not None
    assert found.failure.error == "RuntimeError: out of ideas"
    assert found.failure.place is not None
    assert found.failure.place.file is not None
    assert Path(found.failure.place.file).resolve() == Path(__file__).resolve()
    assert found.failure.place.source == 'raise RuntimeError("out\\n   of ideas")'


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, torch.OutOfMemoryError])
def test_interrupt_and_lack_of_memory_are_raised(error: type[BaseException]) -> None:
    class Raises(Callback):
        def after_pred(self) -> None:
            raise error("stop")

    learn = fitted(*classified(), cbs=[Raises()])
    with pytest.raises(error, match="stop"):
        leg(learn, 3)
    assert [type(cb).__name__ for cb in learn.cbs if "autoprec" in type(cb).__module__] == []


def test_poisoned_buffers_are_named_beside_a_bad_loss() -> None:
    x, y = classified()
    x[AT * BS] = INF
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))
    found = leg(fitted(x, y, model=model), 10)
    assert found.failure is not None
    assert found.failure.where == "input"
    assert found.poisoned_buffers == ("0.running_mean", "0.running_var")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_label_out_of_range_stops_before_the_loss(precision: Precision) -> None:
    x, y = classified()
    y[AT * BS] = 3
    learn = fitted(x, y)
    collector = DataCollector(100)
    run = LegRun(LegSpec(precision=precision), (10,), 2, data=collector)
    found = leg(learn, precision=precision, run=run)
    assert found.failure is not None
    assert (found.failure.where, found.failure.step, found.failure.names) == ("target", AT, ("target",))
    assert collector.sample().targets[0].out_of_range == 1
    # Nobody looking, it reaches the loss, which raises here and ends the process' context on a GPU.
    unseen = leg(learn, 10, precision=precision)
    assert unseen.failure is not None
    assert unseen.failure.where == "exception"


# ---- what rides along -----------------------------------------------------------------------------------------


def test_callbacks_with_side_effects_stay_out_and_come_back(tmp_path: Path) -> None:
    learn = fitted(*classified(), path=tmp_path)
    learn.add_cbs([ProgressCallback(), CSVLogger(), SaveModelCallback(), EarlyStoppingCallback(patience=1)])
    before = list(learn.cbs)
    present: list[str] = []

    class Notes(Callback):
        def before_fit(self) -> None:
            present.extend(type(cb).__name__ for cb in self.learn.cbs)

    notes = Notes()
    learn.add_cb(notes)
    found = leg(learn, 10, plan=FitPlan("fit", 3, 0.1), validation=2)
    assert found.failure is None
    assert len(found.steps) == 10
    assert "Notes" in present
    assert not {"ProgressCallback", "CSVLogger", "SaveModelCallback", "EarlyStoppingCallback"} & set(present)
    assert list(learn.cbs) == [*before, notes]
    assert list(tmp_path.iterdir()) == []


def test_batches_that_only_accumulate_are_no_steps() -> None:
    learn = fitted(*classified(), model=linear(), cbs=[GradientAccumulation(n_acc=2 * BS)])
    found = leg(learn, 8)
    assert [s.step for s in found.steps] == [0, 1, 2, 3]
    assert not any(s.skipped for s in found.steps)
    # The gradient is the sum over two batches (fastai divides the loss by their number).
    x, y = classified()
    model = linear()
    for i in range(2):
        (F.cross_entropy(model(x[i * BS : (i + 1) * BS]), y[i * BS : (i + 1) * BS]) / 2).backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
    assert found.steps[0].grad_norm == pytest.approx(norm, rel=1e-5)
    # The loss is that of the batch, not the part of it that is accumulated.
    with torch.no_grad():
        assert found.steps[0].loss == pytest.approx(float(F.cross_entropy(linear()(x[BS : 2 * BS]), y[BS : 2 * BS])))


def test_part_of_the_loss_that_a_callback_adds_is_seen() -> None:
    class Penalty(Callback):
        def after_loss(self) -> None:
            if self.training:
                self.learn.loss_grad += self.pred.sum() * (INF if self.iter == AT else 0.0)

    found = leg(fitted(*classified(), cbs=[Penalty()]), 10)
    assert found.failure is not None
    assert (found.failure.where, found.failure.step) == ("loss", AT)


def test_accumulation_under_a_scaler_skips_only_what_the_scaler_skips() -> None:
    learn = fitted(*classified(), model=linear(), cbs=[GradientAccumulation(n_acc=2 * BS)])
    found = leg(learn, 8, precision="fp16", setting=Setting("fp16", {"init_scale": 2.0**18}))
    skipped = [s.skipped for s in found.steps]
    assert len(skipped) == 4
    assert set(skipped) == {True, False}
    for s in found.steps:
        assert s.scale_before is not None
        assert s.scale_after == (s.scale_before / 2 if s.skipped else s.scale_before)


def test_two_legs_of_one_snapshot_see_the_same_batches() -> None:
    seed_all(5)
    learn = fitted(*classified(), shuffle=True, model=nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
    runs = [LegRun(LegSpec(precision=p), (10,), 0, keep=100) for p in ("fp32", "fp16", "fp32")]
    losses = []
    for run in runs:
        found = leg(learn, run=run, precision=run.spec.precision)
        losses.append(found.losses)
    for (first, labels), *others in zip(*[r.batches for r in runs], strict=True):
        for again, same_labels in others:
            assert torch.equal(first[0], again[0])
            assert torch.equal(labels[0], same_labels[0])
    assert len(runs[0].batches) == 10
    assert losses[0] == losses[2]
    assert losses[0] != losses[1]
    # Shuffled, or this shows nothing; and the fit that follows sees the very same batches.
    assert not torch.equal(runs[0].batches[0][0][0], classified()[0][:BS])
    recording = Recording()
    learn.fit(1, 0.1, cbs=recording)
    assert all(torch.equal(x, xb[0]) for x, (xb, _) in zip(recording.inputs_seen, runs[0].batches, strict=True))


def test_as_many_batches_are_kept_as_asked_for() -> None:
    for keep in (0, 2):
        run = LegRun(LegSpec(precision="fp32"), (5,), 0, keep=keep)
        leg(fitted(*classified()), run=run)
        assert len(run.batches) == keep


def test_metrics_and_validation_are_those_of_its_first_batches() -> None:
    x, y = classified(batches=10)
    learn = fitted(x, y, model=linear(), valid=6 * BS, metrics=[accuracy, always_nan])
    found = leg(learn, 3, plan=FitPlan("fit", 1, 1e-30), validation=2)
    held = slice(-6 * BS, -4 * BS)
    with torch.no_grad():
        pred = linear()(x[held])
    assert found.metrics["accuracy"] == pytest.approx(float((pred.argmax(1) == y[held]).float().mean()))
    assert math.isnan(found.metrics["always_nan"])
    losses = [float(F.cross_entropy(pred[i : i + BS], y[held][i : i + BS])) for i in (0, BS)]
    assert found.validation == pytest.approx(losses, rel=1e-6)
    none = leg(learn, 3, validation=0)
    assert (none.metrics, none.validation, none.validation_loss) == ({}, (), None)


def always_nan(pred: Tensor, target: Tensor) -> Tensor:
    return pred.sum() * NAN


# ---- variations -----------------------------------------------------------------------------------------------


def test_perturbed_weights_differ_by_two_to_the_minus_eleven() -> None:
    learn = fitted(
        torch.randn(12 * BS, 60), classified()[1], model=nn.Sequential(nn.Linear(60, 60), nn.BatchNorm1d(60))
    )
    seen: dict[int | None, list[Tensor]] = {}
    for seed in (None, 0, 1, 0):
        recording = Recording()
        learn.add_cb(recording)
        leg(
            learn,
            1,
            perturb_seed=seed,
            inside=lambda s=seed, r=recording: seen.setdefault(s, []).extend(r.weights_seen[0]),
        )
        learn.remove_cb(recording)
    plain, first, second = (seen[s] for s in (None, 0, 1))
    again = seen[0][len(first) // 2 :]
    first = first[: len(first) // 2]
    ratio = (first[0] / plain[0] - 1).flatten()
    assert float(ratio.std()) == pytest.approx(2.0**-11, rel=0.05)
    assert abs(float(ratio.mean())) < 2.0**-11 * 0.1
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], second[0])
    assert torch.equal(plain[0], learn.model[0].weight)


def test_skipped_steps_leave_the_weights_alone() -> None:
    learn = fitted(*classified(), model=linear())
    recording = Recording()
    learn.add_cb(recording)
    weights: list[Tensor] = []
    found = leg(learn, 6, skip_steps=(1, 2, 4), inside=lambda: weights.extend(w[0] for w in recording.weights_seen))
    assert [s.skipped for s in found.steps] == [False, True, True, False, True, False]
    moved = [not torch.equal(a, b) for a, b in pairwise(weights)]
    assert moved == [True, False, False, True, False]
    assert found.failure is None


class Named(nn.Module):
    """Attributes with the names that a watching callback would like to use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        for name in ("norm", "scale", "done", "steps", "failure", "data", "batches", "spec", "seen", "origin"):
            setattr(self, name, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_attributes_of_the_model_are_not_shadowed(precision: Precision) -> None:
    learn = fitted(*classified(), model=Named())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = leg(learn, 4, precision=precision, clip=1.0, validation=1)
    assert found.failure is None
    assert len(found.steps) == 4


def test_users_clip_runs_on_unscaled_gradients() -> None:
    learn = fitted(*classified(3), model=linear(), cbs=[GradientClip(0.01)])
    found = leg(learn, 1, precision="fp16")
    size = float(linear().weight.detach().norm())
    assert found.param_change == pytest.approx(0.1 * 0.01 / size, rel=1e-2)
    assert found.misuses == ()


def test_failing_leg_leaves_autocast_off_and_nothing_behind() -> None:
    learn = fitted(*classified(), model=FromBatch("exception"))
    before = list(learn.cbs)
    with preserved(learn):
        run = LegRun(LegSpec(precision="fp16"), (10,), 0)
        found = fits.run_leg(learn, FitPlan("fit", 1, 0.1), Setting("fp16"), run)
    assert found.failure is not None
    assert not torch.is_autocast_enabled("cpu")
    assert not emulation.is_emulating()
    assert list(learn.cbs) == before
    assert isinstance(learn.loss_func, CrossEntropyLossFlat)
    assert learn.opt_func is SGD
