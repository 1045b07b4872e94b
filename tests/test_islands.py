"""Islands: what they compute in, what crosses their borders, and that nothing of them stays."""

from __future__ import annotations

import inspect
from collections import OrderedDict, namedtuple

import learners  # first: it silences fastai's import
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.emulation import emulate_cuda
from autoprec.evidence import Place
from autoprec.islands import Island, entered, obstacle

thread_left_alone = learners.thread_left_alone
pytestmark = learners.FASTAI_WARNINGS
HALF, FP32 = torch.float16, torch.float32


class Holder:
    """The part of a learner that islands look at."""

    def __init__(self, model):
        self.model = model


class Operands(TorchDispatchMode):
    """The dtypes of the operands of every op, by the op's name."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        dtypes = [a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
        self.seen.setdefault(func.overloadpacket.__name__, []).append(tuple(dtypes))
        return func(*args, **(kwargs or {}))


class Notes(nn.Module):
    """Passes on what it gets; notes its dtype and whether autocast is on."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
        return x


def run(model, islands, *args, dtype=HALF, **kwargs):
    with emulate_cuda(), torch.autocast("cpu", dtype=dtype), entered(Holder(model), islands, "cpu"):
        out = model(*args, **kwargs)
        assert torch.is_autocast_enabled("cpu")
        return out


def hooks(model):
    return [h for m in model.modules() for h in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())]


# ---- modules --------------------------------------------------------------------------------------------------


def test_a_module_island_computes_in_fp32_and_its_neighbours_do_not():
    inside, outside = Notes(), Notes()
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), inside), nn.Linear(4, 4), outside)
    out = run(model, [Island(module="1")], torch.randn(2, 4))
    assert inside.seen == [(FP32, False)]
    assert outside.seen == [(HALF, True)]
    assert out.dtype == HALF


def test_operands_inside_are_really_fp32():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 7))
    with emulate_cuda(), torch.autocast("cpu", dtype=HALF), entered(Holder(model), [Island(module="1")], "cpu"):
        x = model[0](torch.randn(2, 4))
        assert x.dtype == HALF
        with Operands() as ops:
            y = model[1](x)
    assert y.dtype == FP32
    assert {d for seen in ops.seen["addmm"] for d in seen} == {FP32}
    exact = x.float() @ model[1].weight.T + model[1].bias
    assert torch.equal(y, F.linear(x.float(), model[1].weight, model[1].bias))
    assert torch.allclose(y, exact, atol=1e-6)
    assert not torch.equal(y, y.half().float())  # and its last bits are there


def test_an_island_keeps_what_half_cannot_hold():
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.LayerNorm(1))
    with torch.no_grad():
        model[0].weight.fill_(1e5)
    x = torch.ones(1, 1)
    assert torch.isnan(run(model, [], x)).all()
    assert torch.isfinite(run(model, [Island(module="0")], x)).all()


def test_the_whole_model_may_be_an_island():
    assert run(nn.Sequential(nn.Linear(4, 4)), [Island(module="")], torch.randn(2, 4)).dtype == FP32


Pair = namedtuple("Pair", "left right")


class Many(nn.Module):
    """Takes and gives tensors in every container."""

    def forward(self, x, extra, *, scale, label="none"):
        self.got = (x.dtype, [t.dtype for t in extra["a"]], extra["n"], scale.dtype, label)
        return {"x": x * scale, "list": [x, (x, 3)], "none": None}


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Many()

    def forward(self, x):
        h = x.half()
        return self.inner(h, {"a": [h, h.bfloat16()], "n": 7}, scale=h, label="kept")


def test_containers_and_keyword_arguments_cross_the_border():
    model = Around()
    out = run(model, [Island(module="inner")], torch.ones(2))
    assert model.inner.got == (FP32, [FP32, FP32], 7, FP32, "kept")
    assert out["x"].dtype == FP32
    assert out["list"][1][1] == 3
    assert out["none"] is None


@pytest.mark.parametrize(
    ("value", "check"),
    [
        (Pair(torch.ones(1).half(), 2), lambda v: isinstance(v, Pair) and v.left.dtype == FP32 and v.right == 2),
        (OrderedDict(a=torch.ones(1).half()), lambda v: isinstance(v, OrderedDict) and v["a"].dtype == FP32),
        ([torch.ones(1).half()], lambda v: isinstance(v, list) and v[0].dtype == FP32),
        ((torch.ones(1).int(), "text"), lambda v: v[0].dtype == torch.int32 and v[1] == "text"),
        (torch.ones(1).double(), lambda v: v.dtype == torch.float64),
    ],
)
def test_what_comes_in_keeps_its_container(value, check):
    class Takes(nn.Module):
        def forward(self, value):
            self.got = value
            return 0

    model = Takes()
    run(model, [Island(module="")], value)
    assert check(model.got)


def test_a_shared_module_is_an_island_wherever_it_is_called():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.notes = Notes()
            self.first = nn.Sequential(nn.Linear(4, 4), self.notes)
            self.second = self.first

        def forward(self, x):
            return self.second(self.first(x).half())

    model = Shared()
    run(model, [Island(module="first")], torch.randn(2, 4))
    assert model.notes.seen == [(FP32, False), (FP32, False)]


def test_a_module_that_calls_itself():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.seen = nn.Linear(4, 4), []

        def forward(self, x, again=True):
            if again:
                x = self(x, again=False)
            self.seen.append(torch.is_autocast_enabled("cpu"))
            return self.linear(x)

    model = Twice()
    assert run(model, [Island(module="")], torch.randn(2, 4)).dtype == FP32
    assert model.seen == [False, False]


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_checkpointing_recomputes_inside_the_island(dtype):
    torch.manual_seed(0)
    model = learners.Checkpointed()
    notes = Notes()
    model.block.insert(0, notes)
    x = torch.randn(3, 8)
    gradients = []
    for checkpointed in (True, False):
        model.zero_grad()
        notes.seen.clear()
        forward = model if checkpointed else lambda x: model.head(model.block(x))
        with emulate_cuda(), entered(Holder(model), [Island(module="block")], "cpu"):
            with torch.autocast("cpu", dtype=dtype):
                loss = forward(x).float().sum()
            loss.backward()
        assert [off for _, off in notes.seen] == [False] * (2 if checkpointed else 1)
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# ---- regions --------------------------------------------------------------------------------------------------


class Big(nn.Module):
    """Products in the model's own forward, in a helper and in a submodule."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        a = x @ x.T  # line one
        b = x @ x.T  # line two
        c = self.inner(x)
        d = self.helper(x)
        return a, b, c, d, torch.relu(self.inner(x) @ c.T)

    def helper(self, x):
        return F.linear(x, self.inner.weight)


def line_of(text, function=Big.forward):
    source, start = inspect.getsourcelines(function)
    return start + next(i for i, line in enumerate(source) if text in line)


def dtypes(out):
    return [t.dtype for t in out]


def test_without_islands_everything_is_half():
    assert dtypes(run(Big(), [], torch.randn(2, 4))) == [HALF] * 5


@pytest.mark.parametrize("by", ["absolute", "dotted"])
def test_a_line_island_is_that_line_alone(by, monkeypatch):
    file = __file__ if by == "absolute" else __file__.replace("/tests/", "/tests/../tests/")
    island = Island(module="", file=file, function="forward", line=line_of("line one"))
    assert dtypes(run(Big(), [island], torch.randn(2, 4))) == [FP32, HALF, HALF, HALF, HALF]


def test_a_function_island_is_what_the_function_itself_calls():
    island = Island(module="", file=__file__, function="forward")
    # Not the submodule, not the helper: these are places of their own.
    assert dtypes(run(Big(), [island], torch.randn(2, 4))) == [FP32, FP32, HALF, HALF, FP32]


def test_a_helper_is_an_island_by_its_own_name():
    island = Island(module="", file=__file__, function="helper")
    assert dtypes(run(Big(), [island], torch.randn(2, 4))) == [HALF, HALF, HALF, FP32, HALF]


def test_a_region_of_another_file_or_module_is_not_touched():
    model = nn.Sequential(Big())
    x = torch.randn(2, 4)
    assert dtypes(run(model, [Island(module="0", file=__file__, function="forward")], x))[0] == FP32
    assert dtypes(run(model, [Island(module="0", file="/elsewhere.py", function="forward")], x)) == [HALF] * 5


def test_several_islands_at_once():
    islands = [
        Island(module="", file=__file__, function="forward", line=line_of("line two")),
        Island(module="inner"),
        Island(module="", file=__file__, function="helper"),
    ]
    assert dtypes(run(Big(), islands, torch.randn(2, 4)))[:4] == [HALF, FP32, FP32, FP32]


class Multiline(nn.Module):
    def forward(self, q, k, v):
        a = torch.matmul(
            q,
            k,
        )
        b = F.scaled_dot_product_attention(q, k, v)
        return a, b, (q @ k).softmax(-1) @ v


def test_a_call_over_several_lines_is_an_island_by_its_first():
    q = torch.randn(1, 3, 3)
    island = Island(module="", file=__file__, function="forward", line=line_of("torch.matmul(", Multiline.forward))
    assert dtypes(run(Multiline(), [island], q, q, q)) == [FP32, HALF, HALF]


def test_a_question_about_a_tensor_is_answered_as_it_is():
    class Asks(nn.Module):
        def forward(self, x):
            h = x @ x
            return h.dtype, h.is_floating_point(), h.element_size(), h.shape, h @ h

    with emulate_cuda(), torch.autocast("cpu", dtype=HALF):
        h = torch.ones(2, 2) @ torch.ones(2, 2)

    class Asked(nn.Module):
        def forward(self, h):
            return h.dtype, h.is_floating_point(), h.element_size(), h.type(), h @ h

    asked = run(Asked(), [Island(module="", file=__file__, function="forward")], h)
    assert asked[:4] == (HALF, True, 2, "torch.HalfTensor")
    assert asked[4].dtype == FP32


def test_in_place_arithmetic_of_a_region_reaches_its_tensor():
    """`x += y` in half is the tensor itself: a cast copy would swallow the change."""

    class InPlace(nn.Module):
        def forward(self, x):
            h = x @ x
            h += 1
            h.mul_(2)
            return h

    x = torch.eye(2)
    want = (x @ x + 1) * 2
    for island in (Island(module="", file=__file__, function="forward"), Island(module="")):
        assert torch.equal(run(InPlace(), [island], x).float(), want)
    line = line_of("h += 1", InPlace.forward)
    got = run(InPlace(), [Island(module="", file=__file__, function="forward", line=line)], x)
    assert torch.equal(got.float(), want)


# ---- what stays -----------------------------------------------------------------------------------------------


def test_a_users_own_hooks_see_the_module_as_it_is():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    seen = []
    handles = [
        model[1].register_forward_pre_hook(lambda m, args: seen.append(("in", args[0].dtype))),
        model[1].register_forward_hook(lambda m, args, out: seen.append(("out", out.dtype))),
    ]
    run(model, [Island(module="1")], torch.randn(2, 4))
    assert seen == [("in", FP32), ("out", FP32)]
    assert len(hooks(model)) == 2
    for h in handles:
        h.remove()


ISLANDS = [
    [Island(module="0")],
    [Island(module="1", file=learners.__file__, function="forward")],
    [Island(module=""), Island(module="0"), Island(module="1", file=learners.__file__, function="forward", line=3)],
    [Island(module="0"), Island(module="")],
]


class Blows(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error


@pytest.mark.parametrize("islands", ISLANDS, ids=["module", "region", "three", "outer last"])
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), torch.OutOfMemoryError("full")])
@pytest.mark.parametrize("place", [0, 1])
def test_nothing_stays_after_an_exception(islands, error, place):
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)))
    model[place].append(Blows(error))
    before = learners.thread_state()
    with pytest.raises(type(error)):
        run(model, islands, torch.randn(2, 4))
    assert hooks(model) == []
    assert learners.thread_state() == before
    del model[place][1]
    assert model(torch.randn(2, 4)).dtype == FP32


@pytest.mark.parametrize("islands", ISLANDS, ids=["module", "region", "three", "outer last"])
def test_nothing_stays_after_a_forward(islands):
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)))
    names = [sorted(vars(m)) for m in model.modules()]
    before = learners.thread_state()
    run(model, islands, torch.randn(2, 4)).sum().backward()
    assert hooks(model) == []
    assert learners.thread_state() == before
    assert [sorted(vars(m)) for m in model.modules()] == names


def test_modules_inside_one_that_raised_and_was_caught_are_left_right():
    """The model itself catches what its island raises: autocast is on again behind it."""

    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.bad, self.good = Blows(ValueError("no")), Notes()

        def forward(self, x):
            try:
                x = self.bad(x)
            except ValueError:
                x = x @ x
            return self.good(x)

    model = Catches()
    run(model, [Island(module="bad")], torch.ones(2, 2))
    assert model.good.seen == [(HALF, True)]


# ---- where an island can be -----------------------------------------------------------------------------------


def test_the_islands_of_a_place_from_the_smallest_on():
    place = Place(module="a.b", module_class="Attention", file="f.py", line=3, function="forward")
    line, function, module = Island.at(place)
    assert (line.line, line.function, line.module) == (3, "forward", "a.b")
    assert (function.line, function.function) == (None, "forward")
    assert (module.function, module.module) == (None, "a.b")
    assert [str(i) for i in (line, function, module)] == ["f.py:3 in forward (a.b)", "f.py in forward (a.b)", "a.b"]


def test_a_torch_module_is_the_smallest_place_of_its_own():
    place = Place(module="a", module_class="Linear", file="f.py", line=3, function="forward")
    assert Island.at(place) == [Island(module="a")]


def test_the_whole_model_is_no_island_of_a_place():
    assert [i.function for i in Island.at(Place(module="", file="f.py", line=3, function="forward"))] == ["forward"] * 2
    assert Island.at(Place(module="")) == []


@pytest.mark.parametrize(
    ("wrap", "path", "words"),
    [
        (lambda m: m, "0", None),
        (lambda m: m, "nowhere", "no module 'nowhere'"),
        (nn.DataParallel, "module.0", "DataParallel"),
        (lambda m: torch.compile(m, backend="eager"), "_orig_mod.0", "compiled"),
    ],
)
def test_the_obstacle_says_why(wrap, path, words):
    found = obstacle(Holder(wrap(nn.Sequential(nn.Linear(2, 2)))), Island(module=path))
    assert (found is None) if words is None else (words in found)


def test_a_compiled_part_of_the_model_is_refused_too():
    model = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"), nn.Linear(2, 2))
    model.append(nn.Sequential(nn.Linear(2, 2)))
    model[2].compile(backend="eager")
    for inside in ("0", "0._orig_mod", "2", "2.0"):
        assert "compiled" in obstacle(Holder(model), Island(module=inside))
    for beside in ("", "1"):
        assert obstacle(Holder(model), Island(module=beside)) is None
