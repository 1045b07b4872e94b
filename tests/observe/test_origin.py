"""The op, the module, the line and the numbers of the first non-finite value, where models make it on purpose."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import faults
import numpy as np
import pytest
import torch
from faults import line_of, ones, replayed
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fastai's own imports
    from fastai.callback.core import Callback
    from fastai.losses import MSELossFlat
    from fastai.torch_core import TensorImage

from autoprec.evidence import Origin, Place
from autoprec.observe import origin as origin_module
from autoprec.observe.gradients import find_hidden
from autoprec.observe.origin import place_of_exception, trace
from autoprec.precision import Setting, computing

INF = math.inf


@dataclass
class Case:
    """What a model is given and what must be said of it.

    Attributes:
        make: builds the model.
        x: the input.
        op, module, line: of the origin; `line` is a marked name, None where the user wrote none.
        fp32: largest magnitude of the op's output in fp32, in closed form; None: there is no fp32 twin.
        inputs: dtypes and shapes of what goes in.
        input_max: the largest magnitude that goes in.
        zeros: zeros in the critical input, where 16 bits made them.
    """

    make: Callable[[], nn.Module]
    x: Tensor
    op: str
    module: str | None
    line: str | None
    fp32: float | None = None
    inputs: tuple[str, ...] | None = None
    input_max: float | None = None
    zeros: int | None = None
    phase: str = "forward"
    loss: Any = faults.total
    y: Tensor = field(default_factory=lambda: torch.zeros(1))
    scale: float | None = None
    precision: Any = "fp16"
    out: float = INF


def in_forward(way: str, op: str, fp32: float, *inputs: str, input_max: float = 300.0) -> Case:
    return Case(
        lambda: faults.InForward(way), ones(2, 2, value=300.0), op, "", way, fp32, inputs or None, input_max=input_max
    )


def half(*shapes: list[int]) -> tuple[str, ...]:
    return tuple(f"float16{s}" for s in shapes)


X300 = ones(2, 2, value=300.0)
FORWARD = {
    # A leaf module: the line is the user's that calls it, and none where only stock modules call each other.
    "stock_linear": Case(
        faults.stock_linear, ones(1, 2, value=100.0), "aten.addmm", "1.0", None, 80000, half([2], [1, 2], [2, 2]), 40000
    ),
    "stock_conv": Case(
        faults.stock_conv, ones(1, 1, 3, 3, value=10.0), "aten.convolution", "1", None, 90000,
        half([1, 1, 3, 3], [1, 1, 3, 3], [1]), 1000,
    ),
    "calls_linear": Case(
        faults.CallsLinear, ones(1, 2, value=100.0), "aten.addmm", "big", "calls_linear", 120000,
        half([2], [1, 2], [2, 2]), 300,
    ),
    "norm": Case(
        faults.norm, ones(1, 2, value=150.0), "aten.mul", "1.0", "norm", 90000, half([1, 2], [1, 2]), 300
    ),
    "twice": Case(faults.Twice, ones(1, 2, value=50.0), "aten.addmm", "shared", "twice", 180000, input_max=3000),
    "loop": Case(faults.Loop, ones(1, 2, value=300.0), "aten.add", "", "loop", 76800, half([1, 2], [1, 2]), 38400),
    "listed": Case(faults.Listed, ones(1, 2, value=300.0), "aten.addmm", "layers.7", "listed", 76800, input_max=38400),
    "attends": Case(
        faults.Attends, ones(1, 3, 4, value=20.0), "aten.bmm", "attention", "attends", 2 * 800**2 / math.sqrt(2),
        half([2, 3, 2], [2, 2, 3]), 800,
    ),
    "encodes": Case(
        faults.Encodes, torch.linspace(-1, 1, 40).reshape(2, 5, 4), "aten.addmm", "encoder.layers.1.linear2", "encodes",
        80000, half([4], [10, 8], [8, 4]), 10000,
    ),
    "hook": Case(faults.hooked, X300, "aten.mul", "", "hook", 90000, half([2, 2]), 300),
    # A constant that does not fit: named after the op that half is wanted for; fp32 has no such cast.
    "operand": Case(faults.Operand, X300, "aten.matmul", "", "operand", None, ("float32[2, 2]",), 1e6),
    "statistics": Case(
        faults.Statistics, torch.tensor([[-(2.0**83), 0.0], [2.0**83, 0.0]]), "aten.native_batch_norm", "norm",
        "statistics", None, input_max=2.0**83, precision="fp32",
    ),
    # In a forward that belongs to no submodule.
    "bmm": in_forward("bmm", "aten.bmm", 180000, *half([2, 1, 2], [2, 2, 1])),
    "einsum": in_forward("einsum", "aten.bmm", 180000, *half([2, 1, 2], [2, 2, 1])),
    "method": in_forward("method", "aten.mm", 180000, *half([2, 2], [2, 2])),
    "operator_matmul": in_forward("operator_matmul", "aten.mm", 180000, *half([2, 2], [2, 2])),
    "in_place": in_forward("in_place", "aten.mul_", 90000, *half([2, 2])),
    "operator_mul": in_forward("operator_mul", "aten.mul", 90000, *half([2, 2], [2, 2])),
    "operator_iadd": in_forward("operator_iadd", "aten.add_", 120000, *half([2, 2], [2, 2]), input_max=60000.0),
    "functional_linear": in_forward("functional_linear", "aten.mm", 180000, *half([2, 2], [2, 2])),
    "functional_conv": in_forward("functional_conv", "aten.convolution", 90000, *half([2, 1, 2], [1, 1, 2])),
    "function": in_forward("function", "aten.mul", 90000, *half([2, 2], [2, 2])),
    "two_lines": in_forward("two_lines", "aten.bmm", 180000, *half([2, 1, 2], [2, 2, 1])),
    "comprehension": in_forward("comprehension", "aten.mul", 90000, *half([2])),
    "custom_forward": Case(
        lambda: faults.ThroughFunction(faults.Times300), X300, "aten.mul", "", "custom_forward", 90000,
        half([2, 2]), 300,
    ),
    "checkpoint": Case(
        lambda: faults.Checkpointed(use_reentrant=False), X300, "aten.mul", "block", "block", 90000, input_max=300
    ),
    "reentrant checkpoint": Case(
        lambda: faults.Checkpointed(use_reentrant=True), X300.clone().requires_grad_(), "aten.mul", "block", "block",
        90000, input_max=300, scale=1.0,
    ),
    # -inf on purpose is passed over.
    "masked": Case(lambda: faults.Masked(overflows=True), X300, "aten.mul", "", "masked", 90000, half([2, 2]), 300),
    "absorbed": Case(faults.Absorbed, X300, "aten.mul", "", "absorbed", 90000, half([2, 2], [2, 2]), 300),
    "subclass": Case(
        faults.CallsLinear, TensorImage(ones(1, 2, value=100.0)), "aten.addmm", "big", "calls_linear", 120000,
        half([2], [1, 2], [2, 2]), 300,
    ),
    # Outputs that are no tensor.
    **{
        kind: Case(
            lambda kind=kind: faults.Structured(kind), X300, "aten.mul", "", "structured", 90000, half([2, 2]), 300,
            loss=faults.structured_loss,
        )
        for kind in ("dict", "nested", "dataclass")
    },
    # What vanishes: 2048.5 is 2048 in half, 256.5 is 256 in bfloat16, 1e-9 is 0 in half.
    "cancels": Case(
        lambda: faults.Cancels(2048.0), ones(1, 1, value=2048.5), "aten.reciprocal", "", "cancels", 2.0,
        ("float32[1, 1]",), 0.0, zeros=1,
    ),
    "cancels in bf16": Case(
        lambda: faults.Cancels(256.0), ones(1, 1, value=256.5), "aten.reciprocal", "", "cancels", 2.0,
        ("float32[1, 1]",), 0.0, zeros=1, precision="bf16",
    ),
    "log_of_small": Case(
        faults.LogOfSmall, ones(1, 1), "aten.log", "", "log_of_small", -math.log(1e-9), ("float32[1, 1]",), 0.0, zeros=1
    ),
    # Half a step past bfloat16's largest number, 2^128 - 2^120, and below float32's.
    "bf16 overflow": Case(
        lambda: nn.Sequential(faults.constant(nn.Linear(3, 1), 1.0)),
        torch.tensor([[2.0**127, 127 * 2.0**120, 2.0**119]]), "aten.addmm", "0", None, 2.0**128 - 2.0**119,
        ("bfloat16[1]", "bfloat16[1, 3]", "bfloat16[3, 1]"), 2.0**127, precision="bf16",
    ),
}  # fmt: skip
LOSS = {
    "loss_function": Case(
        lambda: faults.square(2, 0.5), X300, "aten.mm", None, "loss_function", 180000, half([2, 2], [2, 2]), 300,
        phase="loss", loss=faults.product_loss, y=X300,
    ),
    "loss_module": Case(
        lambda: faults.square(2, 0.5), X300, "aten.bmm", None, "loss_module", 180000, half([2, 1, 2], [2, 2, 1]), 300,
        phase="loss", loss=faults.ProductLoss(), y=X300,
    ),
    # fastai's own loss, in fp32 under autocast: no line of the user's. (3e19 - 1)^2 is past float32.
    "stock_loss": Case(
        lambda: faults.square(2, 0.5), ones(1, 2, value=3e19), "aten.mse_loss", None, None, None,
        phase="loss", loss=MSELossFlat(), y=ones(1, 2), precision="fp32",
    ),
}  # fmt: skip


def summed(pred: Tensor, _target: Tensor) -> Tensor:
    return pred.float().sum()


BACKWARD = {
    # The gradient that comes in is the scale; over 2^-10 it is 2^16, just past half.
    "divides": Case(
        lambda: faults.DividesBy(2.0**-10), ones(1, 2), "aten.div", "", "divides", 65536.0, half([1, 2]), 64.0,
        phase="backward", loss=summed, scale=64.0,
    ),
    # x = (1, 3) * 1e-4 is 1e-4 from its mean and has a deviation of sqrt(2) * 1e-4: the derivative of the quotient in
    # its denominator is 1e-4 / deviation^2, and the gradient that comes in 2 x 16.
    "hand_norm": Case(
        lambda: nn.Sequential(nn.Identity(), faults.Scales(1e-4), faults.HandNorm(), faults.square(2, 1.0)),
        torch.tensor([[1.0, 3.0]]), "aten.mul", "2", "hand_norm", 32e-4 / (math.sqrt(2) * 1e-4 + 1e-6) ** 2,
        half([1, 2], [1, 2]), phase="backward", loss=summed, scale=16.0,
    ),
    "grows": Case(
        faults.Grows, ones(1, 2, value=0.25), "aten.mm", "last", "grows", 2 * 4 * 64000.0, phase="backward",
        loss=summed, scale=64.0, input_max=64000.0,
    ),
    "custom_backward": Case(
        lambda: faults.ThroughFunction(faults.GrowsBackward), ones(1, 2), "aten.mul", "", "custom_backward", 128000.0,
        half([1, 2]), 128.0, phase="backward", loss=summed, scale=128.0,
    ),
    "root": Case(
        faults.RootAtZero, ones(1, 2, value=0.0), "aten.div", "", "root", None, ("float32[1, 2]", "float32[1, 2]"), 1.0,
        zeros=2, phase="backward", loss=summed, scale=1.0, precision="fp32",
    ),
}  # fmt: skip
SHARED = {
    "log_of_zero": Case(faults.LogOfZero, ones(1, 2), "aten.log", "", "log_of_zero", INF, zeros=2),
    "zero_by_zero": Case(
        faults.ZeroByZero, ones(1, 2), "aten.div", "", "zero_by_zero", math.nan, zeros=1, out=math.nan
    ),
    "std_of_one": Case(faults.StdOfOne, ones(1, 2), "aten.std", "", "std_of_one", math.nan, out=math.nan),
    "fully_masked": Case(faults.FullyMasked, ones(1, 2), "aten._softmax", "", "fully_masked", math.nan, out=math.nan),
    "fills": Case(faults.FillsIt, ones(1, 2), "aten.masked_fill", "", "fills", INF),
    "half": Case(lambda: faults.InForward("half"), X300, "aten._to_copy", "", "half", INF, ("float32[2, 2]",), 90000),
}


def found(case: Case, **kwargs: Any) -> Origin | None:
    with replayed(case.make(), case.loss, (case.x,), (case.y,), case.precision) as replay:
        return trace(replay, case.precision, scale=case.scale, **kwargs)


def at(place: Place, line: str | None) -> None:
    """The place is the marked line, or no line at all; never one of a library."""
    if line is None:
        assert (place.file, place.line, place.source, place.function) == (None, None, None, None)
        return
    assert place.file is not None
    assert Path(place.file).resolve() == faults.HERE
    assert place.line == line_of(line)
    assert place.source is not None
    assert place.source == faults.HERE.read_text().splitlines()[place.line - 1].strip()


def same(value: float | None, wanted: float) -> bool:
    return value is not None and (math.isnan(value) if math.isnan(wanted) else value == pytest.approx(wanted, rel=1e-6))


def check(case: Case, origin: Origin | None) -> None:
    assert origin is not None
    assert origin.phase == case.phase
    assert origin.operation.op == case.op
    assert origin.place.module == case.module
    at(origin.place, case.line)
    assert same(origin.operation.output_max, case.out)
    assert origin.ops_watched > 2
    if case.inputs is not None:
        assert origin.operation.inputs == case.inputs
    if case.input_max is not None:
        assert origin.operation.input_max == case.input_max
    if case.zeros is not None:
        assert origin.operation.input_zeros == case.zeros


@pytest.mark.parametrize("name", [*FORWARD, *LOSS])
def test_forward_and_loss_name_op_module_line_and_numbers(name: str) -> None:
    case = {**FORWARD, **LOSS}[name]
    origin = found(case)
    check(case, origin)
    assert origin is not None
    if case.fp32 is None:
        assert origin.fp32 is None
        return
    assert origin.fp32 is not None
    assert origin.fp32.finite
    assert same(origin.fp32.output_max, case.fp32)
    if case.zeros:
        assert origin.fp32.input_zeros == 0
        assert origin.fp32.input_min == origin.fp32.input_max
        assert origin.operation.input_min is None


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_names_the_line_of_the_forward(name: str) -> None:
    case = BACKWARD[name]
    origin = found(case)
    check(case, origin)
    assert origin is not None
    if case.fp32 is not None:
        assert origin.fp32 is not None
        assert origin.fp32.finite
        assert origin.fp32.output_max == pytest.approx(case.fp32, rel=1e-3)


@pytest.mark.parametrize(("scale", "overflows"), [(63.0, False), (64.0, True)])
def test_backward_overflow_begins_where_half_ends(scale: float, overflows: bool) -> None:
    case = BACKWARD["divides"]
    case = Case(case.make, case.x, case.op, case.module, case.line, loss=summed, scale=scale)
    assert (found(case) is not None) == overflows


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom:UserWarning")
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", SHARED)
def test_fault_that_fp32_shares(name: str, precision: Any) -> None:
    case = SHARED[name]
    case = Case(**{**vars(case), "precision": precision})
    if precision == "fp32" or name == "half":
        case.inputs = case.inputs or None
    origin = found(case)
    check(case, origin)
    assert origin is not None
    assert case.fp32 is not None
    if precision == "fp32":
        assert origin.fp32 is None
    else:
        assert origin.fp32 is not None
        assert not origin.fp32.finite
        assert same(origin.fp32.output_max, case.fp32)
        # Asked only for what 16 bits do, a fault that fp32 has too is none.
        assert found(case, only_in_16=True) is None


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("x", [100.0, 1e-3])
def test_healthy_model_has_no_origin(precision: Any, x: float) -> None:
    case = Case(lambda: faults.InForward("bmm"), ones(2, 2, value=x), "", "", None, scale=1.0, precision=precision)
    assert found(case) is None


def test_mask_of_infinity_is_not_named() -> None:
    case = Case(lambda: faults.Masked(overflows=False), X300, "", "", None, scale=1.0)
    assert found(case, only_in_16=True) is None
    overflowing = found(FORWARD["masked"], only_in_16=True)
    check(FORWARD["masked"], overflowing)


def test_views_of_a_mask_are_not_origins() -> None:
    # -inf reshaped, detached, copied is -inf still: the fault of fp32 is the log that comes later.
    class Model(faults.LogOfZero):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.zeros_like(x).masked_fill(x > 0, -INF)
            mask = mask.view(-1).detach().clone().reshape(x.shape).unsqueeze(0)[0] + 0
            assert bool(torch.isinf(mask).all())
            return super().forward(x)

    case = Case(Model, ones(1, 2), "aten.log", "", "log_of_zero", precision="fp32")
    check(case, found(case))


def test_everything_is_as_before() -> None:
    model = faults.Stateful()
    model.drop.register_forward_hook(lambda *_: None)
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    gradients = [p.grad for p in model.parameters()]
    hooks = [dict(m._forward_hooks) for m in model.modules()]
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    x = ones(4, 2, value=200.0)
    with replayed(model, faults.total, (x,), (torch.zeros(1),), "fp16") as replay:
        # The step runs; what it changes is the present state, and comes back after each replay.
        with replay.precision("fp16"):
            model(x)
        before = {n: t.clone() for n, t in model.state_dict().items()}
        drawn = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        # From the state before the step: 60000. From the present one it would be 120000, and infinite.
        assert trace(replay, "fp16", scale=1.0) is None
        after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        assert after[:2] == drawn[:2]
        assert torch.equal(after[2], drawn[2])
        replay.learn.pred = "kept"
        replay.buffers["count"] = torch.full((1,), 2.0)
        second = trace(replay, "fp16", scale=1.0)
        assert replay.learn.pred == "kept"
    assert second is not None
    at(second.place, "stateful")
    assert second.fp32 is not None
    assert second.fp32.output_max == 120000
    assert {n: t.tolist() for n, t in model.state_dict().items()} == {n: t.tolist() for n, t in before.items()}
    assert [p.grad for p in model.parameters()] == gradients
    assert all(bool((g == 7).all()) for g in gradients if g is not None)
    assert [dict(m._forward_hooks) for m in model.modules()] == hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_hooks


def test_state_comes_back_after_an_exception() -> None:
    def broken(pred: Tensor, _target: Tensor) -> Tensor:
        raise ValueError("no loss")

    model = faults.Stateful()
    with replayed(model, broken, (ones(4, 2),), (torch.zeros(1),), "fp16") as replay:
        before = random.getstate()
        with pytest.raises(ValueError, match="no loss"):
            trace(replay, "fp16")
        assert float(model.count) == 1
        assert random.getstate() == before
        assert not torch.is_autocast_enabled("cpu")
    assert not torch.nn.modules.module._global_forward_hooks


def test_two_passes_are_enough_however_many_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[str] = []
    watch = origin_module.watch

    def counting(replay: Any, precision: Any, *args: Any) -> Any:
        passes.append(precision)
        return watch(replay, precision, *args)

    monkeypatch.setattr(origin_module, "watch", counting)
    model = nn.Sequential(*[faults.Masked(overflows=False) for _ in range(6)])
    assert found(Case(lambda: model, X300, "", "", None), only_in_16=True) is None
    assert passes == ["fp16", "fp32"]


def test_callback_that_changes_the_prediction_is_part_of_the_replay() -> None:
    class Doubles(Callback):
        def after_pred(self) -> None:
            self.learn.pred = self.pred * 2

    class Twofold(Doubles):
        order = 5

    model = nn.Sequential(faults.square(2, 0.5), faults.square(2, 0.5))
    x = ones(2, 2, value=40000.0)
    for callbacks, names in (([], False), ([Twofold()], True)):
        learn = faults.learner(model, faults.total, cbs=callbacks)
        learn.xb, learn.yb = (x,), (torch.zeros(1),)
        with computing(learn, Setting("fp16")):
            origin = trace(origin_module.Replay.capture(learn), "fp16")
        assert (origin is not None) == names
    assert origin is not None
    assert origin.place.file is not None
    assert Path(origin.place.file).resolve() == Path(__file__).resolve()
    assert origin.place.source == "self.learn.pred = self.pred * 2"
    assert origin.fp32 is not None
    assert origin.fp32.output_max == 80000


def test_loss_in_fp32_has_no_overflow() -> None:
    case = LOSS["loss_function"]
    with replayed(case.make(), case.loss, (case.x,), (case.y,), "fp16", loss_fp32=True) as replay:
        assert trace(replay, "fp16") is None


def test_hidden_value_is_found_behind_a_finite_loss() -> None:
    case = FORWARD["absorbed"]
    learn = faults.learner(case.make(), case.loss)
    good, bad = ((ones(2, 2),), (case.y,)), ((case.x,), (case.y,))
    with computing(learn, Setting("fp16")):
        hidden = find_hidden(learn, [good, bad], Setting("fp16"))
        nothing = find_hidden(learn, [good, good], Setting("fp16"))
    check(case, hidden.origin)
    assert hidden.batches == 2
    assert nothing.origin is None


def test_place_of_an_exception_is_the_users_innermost_line() -> None:
    def fails() -> None:
        nn.Linear(2, 2)(torch.zeros(1, 3))  # raises deep inside torch

    with pytest.raises(RuntimeError) as caught:
        fails()
    place = place_of_exception(caught.value)
    assert place.file is not None
    assert Path(place.file).resolve() == Path(__file__).resolve()
    assert place.source == "nn.Linear(2, 2)(torch.zeros(1, 3))  # raises deep inside torch"
    assert place.function == "fails"


def test_line_of_a_notebook_cell_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    import linecache

    source = "def product(pred, target):\n    return (pred @ target.t()).mean()\n"
    name = "<ipython-input-7-abcdef>"
    monkeypatch.setitem(linecache.cache, name, (len(source), None, source.splitlines(keepends=True), name))
    space: dict[str, Any] = {}
    exec(compile(source, name, "exec"), space)
    case = LOSS["loss_function"]
    with replayed(case.make(), space["product"], (case.x,), (case.y,), "fp16") as replay:
        origin = trace(replay, "fp16")
    assert origin is not None
    assert origin.place == Place(file=name, line=2, source="return (pred @ target.t()).mean()", function="product")
