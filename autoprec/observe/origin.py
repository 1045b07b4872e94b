"""Where the first non-finite value of a step was made: the op, its module, the user's line.

The failing batch is run once more from the state before it (weights have not moved yet; buffers and random
generators are put back) under a dispatch mode that looks at what every op returns. The first op that gets
finite values and returns a non-finite one is a *candidate*, and so is one that makes NaN of infinities. An
attention mask of -inf is a candidate too, and is meant: so the same batch runs in fp32, and the origin is the
first candidate that is finite there. A fault that fp32 shares has no such candidate; then it is the first that
is not a plain fill with infinity.

Costs one instrumented step per precision, when something has already failed; nothing before.

What it cannot see: inside one fused kernel (an LSTM, a flash attention), and code that runs in C++ threads
of its own. The place is then the call of the kernel.
"""

from __future__ import annotations

import linecache
import math
import os
import random
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import fastai
import fastcore
import numpy as np
import torch
from fastai.callback.fp16 import MixedPrecision
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec import emulation
from autoprec.evidence import Fp32Value, Operation, Origin, Place, Precision
from autoprec.observe.tensors import all_finite, floating
from autoprec.precision import DTYPES

if TYPE_CHECKING:
    from fastai.learner import Learner

__all__ = ["Replay", "fails_from", "place_at", "place_of_exception", "trace", "watch"]

_HERE = str(Path(__file__).resolve().parent.parent)
_DEMO = str(Path(_HERE) / "demo.py")  # its model stands for a user's
_LIBRARIES = tuple(
    str(Path(p).resolve()) + os.sep for p in (*torch.__path__, *fastai.__path__, *fastcore.__path__, _HERE)
)
# They return what they are given, or memory that nobody has written yet.
_NOT_MAKERS = re.compile(r"aten\.(empty|new_empty|resize|set_|_efficientzerotensor)")
_FILLS = re.compile(
    r"aten\.(masked_fill|fill|full|new_full|where|scalar_tensor|full_like|lift_fresh|scatter|index_put|index_fill|"
    r"constant_pad_nd)"
)
_CASTS = re.compile(
    r"aten\.(_to_copy|to|copy_|clone|detach|t|view|_unsafe_view|reshape|expand|permute|transpose|"
    r"unsqueeze|squeeze|alias|as_strided|slice|select)\b"
)
# They write without reading what was there.
_OVERWRITES = re.compile(r"aten\.(copy_|fill_|zero_|uniform_|normal_|bernoulli_|random_|exponential_)$")
_DIVISIONS = {"aten.div", "aten.div_", "aten.true_divide"}
# They update running statistics in place, which their schema does not say.
_STATISTICS = re.compile(r"aten\.\w*batch_norm(?!\w*backward)")
_RUNNING = {"running_mean", "running_var"}
_MOST_CANDIDATES = 64


@dataclass
class Replay:
    """One batch and the state before its forward pass, so that it can be computed again.

    Attributes:
        learn: the learner, inside its fit.
        xb, yb: the batch as the model and the loss got it.
        generators: states of torch's (CPU, CUDA), python's and numpy's generators before the forward pass.
        buffers: copies of the model's buffers before the forward pass.
        loss_fp32: the loss runs outside autocast.
    """

    learn: Learner
    xb: tuple[Any, ...]
    yb: tuple[Any, ...]
    generators: tuple[Tensor, list[Tensor], Any, Any]
    buffers: dict[str, Tensor]
    loss_fp32: bool = False

    @classmethod
    def capture(cls, learn: Learner, *, loss_fp32: bool = False) -> Replay:
        """Keep what the coming forward pass will change; cheap (buffers and generator states)."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        buffers = {n: b.detach().clone() for n, b in learn.model.named_buffers()}
        generators = (torch.get_rng_state(), cuda, random.getstate(), np.random.get_state())
        return cls(learn, tuple(learn.xb), tuple(learn.yb), generators, buffers, loss_fp32)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run the block from the state before the forward pass; the present state comes back afterwards."""
        now = Replay.capture(self.learn)
        pred = self.learn.pred
        self._put_back()
        try:
            yield
        finally:
            now._put_back()
            self.learn.pred = pred

    def _put_back(self) -> None:
        torch.set_rng_state(self.generators[0])
        if self.generators[1]:
            torch.cuda.set_rng_state_all(self.generators[1])
        random.setstate(self.generators[2])
        np.random.set_state(self.generators[3])
        with torch.no_grad():
            for name, buffer in self.learn.model.named_buffers():
                if name in self.buffers:
                    buffer.copy_(self.buffers[name])

    def predict(self) -> Any:
        """The forward pass with what the user's callbacks do to the prediction."""
        learn = self.learn
        learn.pred = learn.model(*self.xb)
        for cb in learn.cbs.sorted("order"):
            if not isinstance(cb, MixedPrecision) and not type(cb).__module__.startswith("autoprec."):
                cb("after_pred")
        # As MixedPrecision does. Without it nothing is cast, nor is an output object turned into a plain dictionary.
        if torch.is_autocast_enabled(self._device()):
            learn.pred = _to_float(learn.pred)
        return learn.pred

    def loss(self, pred: Any) -> Tensor:
        """The loss of a prediction of `predict`."""
        if self.loss_fp32:
            with self.precision("fp32"):
                outside: Tensor = self.learn.loss_func(pred, *self.yb)
            return outside
        loss: Tensor = self.learn.loss_func(pred, *self.yb)
        return loss

    def precision(self, precision: Precision) -> torch.autocast:
        """Autocast for the replay, off for fp32."""
        on = precision != "fp32"
        return torch.autocast(self._device(), dtype=DTYPES[precision] if on else None, enabled=on)

    def _device(self) -> str:
        device: torch.device = next(self.learn.model.parameters()).device
        return device.type


def _to_float(value: Any) -> Any:
    from fastai.torch_core import to_float

    plain = is_dataclass(value) and not isinstance(value, Mapping)  # fastai knows no such output
    return value if plain else to_float(value)


@dataclass
class _Seen:
    """One op that was watched: where, what, and its sizes if they were worth reading."""

    key: tuple[Any, ...]
    phase: str
    place: Place
    op: str
    args: Any = None
    out: Any = None
    fills: bool = False
    half: str | None = None
    called: str | None = None
    sizes: Operation | None = None

    def measured(self) -> _Seen:
        """Read the sizes now: an op in place may overwrite them later."""
        self.sizes = self.operation()
        self.args = self.out = None
        return self

    def copy(self) -> _Seen:
        """Another record of the same op, so that the tensors of one can be let go."""
        return replace(self)

    def without_tensors(self) -> _Seen:
        """Key, place and op alone."""
        return _Seen(self.key, self.phase, self.place, self.op)

    def operation(self) -> Operation:
        if self.sizes is not None:
            return self.sizes
        ins = floating(self.args)
        critical = floating(self.args[0][1:2]) if self.op in _DIVISIONS else ins
        return Operation(
            op=self.op,
            inputs=tuple(f"{self._dtype(t)}{list(t.shape)}" for t in ins),
            input_max=max((float(f.max()) for f in map(_finite_sizes, ins) if f.numel()), default=None),
            input_min=min((float(f[f > 0].min()) for f in map(_finite_sizes, critical) if (f > 0).any()), default=None),
            input_zeros=sum(int((t == 0).sum()) for t in critical),
            output_max=_peak(self.out),
        )

    def _dtype(self, t: Tensor) -> str:
        # Emulated half arithmetic computes in fp32 on operands that were rounded to half: to the user they are half.
        return self.half if self.half and t.dtype == torch.float32 else str(t.dtype).removeprefix("torch.")


def _finite_sizes(t: Tensor) -> Tensor:
    size = t.abs()
    return size[torch.isfinite(size)]


def _peak(out: Any) -> float | None:
    found = floating(out)
    if not found:
        return None
    peaks = [float(t.abs().max()) for t in found]
    return math.nan if any(math.isnan(p) for p in peaks) else max(peaks)


@dataclass
class _Watcher(TorchDispatchMode):
    """Looks at each op's result. `wanted` asks for the sizes at these keys instead of looking for trouble."""

    names: dict[int, str]
    classes: dict[int, str]
    wanted: frozenset[Any] | None = None
    note: Callable[[_Seen, Any], None] | None = None
    candidates: list[_Seen] = field(default_factory=list)
    found: dict[Any, _Seen] = field(default_factory=dict)
    watched: int = 0
    phase: Literal["forward", "loss", "backward"] = "forward"
    stack: list[int] = field(default_factory=list)
    counts: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    made_by: dict[int, Place] = field(default_factory=dict)
    recent: deque[_Seen] = field(default_factory=lambda: deque(maxlen=4))

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = f"aten.{func._overloadpacket.__name__}"
        read = _inputs(name, func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        self.watched += 1
        if _NOT_MAKERS.match(name):
            return out
        made = _made(name, args, out)
        seen = self._seen(name, read, made)
        if self.note is not None:
            self.note(seen, out)
        elif self.wanted is not None:
            if seen.key in self.wanted and seen.key not in self.found:
                self.found[seen.key] = seen.copy().measured()
        elif len(self.candidates) < _MOST_CANDIDATES and _makes(floating(read), floating(made)):
            seen.fills = bool(_FILLS.match(seen.op))
            self.candidates.append(seen.copy().measured())
        return out

    def _seen(self, name: str, args: Any, out: Any) -> _Seen:
        place, is_cast = self._place(), bool(_CASTS.match(name))
        op, called = name, emulation.current_op() if self.phase != "backward" else None
        if is_cast and (called is not None or self.phase == "backward"):
            # Emulated half arithmetic computes in fp32 and rounds: what overflows in the rounding is the op before.
            for before in reversed(self.recent):
                if (before.place, before.called) == (place, called) and _share_memory(args, before.out):
                    return _Seen(before.key, self.phase, place, before.op, before.args, out, half=before.half)
        if is_cast and called is not None:
            # The operand itself does not fit: named after the op that it was cast for.
            op = f"aten.{called.removeprefix('aten::').partition('.')[0]}"
        identity = (self.phase, place.file, place.line, place.module, op)
        if not is_cast:
            self.counts[identity] += 1
        seen = _Seen((*identity, self.counts[identity]), self.phase, place, op, args, out, called=called)
        if not is_cast:
            if emulation.CUDA_OP_POLICY.get(called or "") == "low_precision":
                seen.half = str(torch.get_autocast_dtype("cpu")).removeprefix("torch.")
            # Autograd's node of a linear layer makes three products before the first is rounded.
            self.recent.append(seen)
        return seen

    def _place(self) -> Place:
        where = _user_frame(sys._getframe(2))
        module = self.stack[-1] if self.stack else None
        if self.phase == "backward" and module is None:
            # The place of the forward op that made the node now running; the line itself, if python code runs in it.
            node = torch._C._current_autograd_node()
            made = self.made_by.get(node._sequence_nr(), Place()) if node is not None else Place()
            own = {} if where.file is None else where.model_dump(include={"file", "line", "source", "function"})
            return made.model_copy(update=own)
        path = self.names.get(module) if module is not None else None
        cls = self.classes.get(module) if module is not None else None
        where = where.model_copy(update={"module": path, "module_class": cls})
        # An op's node is made just before the op runs: it carries the number before the next one.
        self.made_by.setdefault(torch._C._autograd._get_sequence_nr() - 1, where)
        return where


def _inputs(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """The op's inputs as they are before it runs: what an op in place will overwrite is copied."""
    schema = func._schema  # noqa: SLF001  # torch shows it under no public name
    statistics = bool(_STATISTICS.match(name))
    if not schema.is_mutable and not statistics:
        return args, kwargs
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    written |= _RUNNING if statistics else set()
    targets = [a for a, spec in zip(args, schema.arguments, strict=False) if spec.name in written]
    memory = {t.data_ptr() for t in targets if isinstance(t, Tensor)}
    # Only an op on one tensor (h += h) reads the same memory as another argument of its own.
    overwritten = bool(_OVERWRITES.match(name))
    kept = [
        (None if overwritten else a.detach().clone()) if isinstance(a, Tensor) and a.data_ptr() in memory else a
        for a in args
    ]
    return kept, {k: v for k, v in kwargs.items() if k not in written}


def _made(name: str, args: Any, out: Any) -> Any:
    """The op's outputs, running statistics included."""
    return (out, args[3:5]) if _STATISTICS.match(name) else out


def _share_memory(a: Any, b: Any) -> bool:
    theirs = {t.data_ptr() for t in floating(b)}
    return any(t.data_ptr() in theirs for t in floating(a))


def _makes(read: list[Tensor], made: list[Tensor]) -> bool:
    """Whether a value that is not finite was made here: of finite ones, or NaN of infinities."""
    if all(bool(torch.isfinite(t).all()) for t in made):
        return False
    if all(bool(torch.isfinite(t).all()) for t in read):
        return True
    return any(bool(t.isnan().any()) for t in made) and not any(bool(t.isnan().any()) for t in read)


@lru_cache(maxsize=4096)
def _is_library(file: str) -> bool:
    """Whether a file is torch's, fastai's, ours, or no file at all; a notebook's cells have names of their own."""
    if file.startswith("<"):
        return not file.startswith("<ipython-input")
    resolved = str(Path(file).resolve())
    return resolved != _DEMO and (file.startswith(_LIBRARIES) or resolved.startswith(_LIBRARIES))


def _user_frame(frame: FrameType | None) -> Place:
    """The innermost frame that is not of torch, fastai or autoprec; nothing beyond the replay itself."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file == __file__ and frame.f_code.co_name in ("predict", "loss", "watch"):
            break
        if not _is_library(file):
            return place_at(file, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return Place()


def place_at(file: str, line: int, function: str) -> Place:
    """A line of the user's, its path shown from the working directory where it lies below it."""
    path = Path(file)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    source = linecache.getline(file, line).strip() or None
    return Place(file=str(shown), line=line, source=source, function=function)


def place_of_exception(error: BaseException) -> Place | None:
    """The innermost frame of an exception that is not of torch, fastai or autoprec; None if there is none."""
    place, tb = None, error.__traceback__
    while tb is not None:
        file = tb.tb_frame.f_code.co_filename
        if not _is_library(file):
            place = place_at(file, tb.tb_lineno, tb.tb_frame.f_code.co_name)
        tb = tb.tb_next
    return place


@contextmanager
def _module_stack(watcher: _Watcher) -> Iterator[None]:
    """Know which module runs, through torch's global hooks: the model itself is not touched."""
    known = watcher.names

    def enter(module: nn.Module, _args: Any) -> None:
        if id(module) in known:
            watcher.stack.append(id(module))

    def leave(module: nn.Module, _args: Any, _out: Any) -> None:
        if watcher.stack and watcher.stack[-1] == id(module):
            watcher.stack.pop()

    pre = nn.modules.module.register_module_forward_pre_hook(enter)
    post = nn.modules.module.register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        pre.remove()
        post.remove()


@contextmanager
def gradients_kept(model: nn.Module) -> Iterator[None]:
    """Run a backward pass in the block without leaving anything in the `.grad` fields."""
    params = list(model.parameters())
    kept = [p.grad for p in params]
    for p in params:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(params, kept, strict=True):
            p.grad = grad


def watch(
    replay: Replay,
    precision: Precision,
    scale: float | None,
    wanted: frozenset[Any] | None,
    note: Callable[[_Seen, Any], None] | None = None,
) -> _Watcher:
    """Run the batch once under a watcher.

    Args:
        replay: the batch and the state before it.
        precision: in which it is computed.
        scale: given, the backward pass too, from the loss times that.
        wanted: keys of the ops whose sizes are to be read; None looks for non-finite values.
        note: is called with every op and its output instead.
    """
    model = replay.learn.model
    named = list(model.named_modules())
    watcher = _Watcher({id(m): n for n, m in named}, {id(m): type(m).__name__ for _, m in named}, wanted, note)
    with ExitStack() as stack:
        stack.enter_context(replay.again())
        with replay.precision(precision), _module_stack(watcher), watcher:
            pred = replay.predict()
            watcher.phase = "loss"
            watcher.stack.clear()
            loss = replay.loss(pred)
        if scale is not None and loss.requires_grad:
            watcher.phase = "backward"
            with gradients_kept(model), _module_stack(watcher), watcher:
                # Not autograd.grad: a reentrant checkpoint allows only backward().
                (loss * scale).backward()
    return watcher


def trace(
    replay: Replay, precision: Precision, *, scale: float | None = None, only_in_16: bool = False
) -> Origin | None:
    """Find the op that made the first non-finite value of a batch.

    Args:
        replay: the batch and the state before it.
        precision: the precision in which it failed.
        scale: loss scale; given, the backward pass is run and watched too.
        only_in_16: None rather than an op that is not finite in fp32 either.

    Returns:
        The origin, or None if nothing is non-finite when the batch is computed again. Autograd's `.grad` fields,
        buffers and generators are as they were.
    """
    watcher = watch(replay, precision, scale, None)
    candidates = watcher.candidates
    if not candidates:
        return None
    # Filling with infinity is meant, as a mask: it is named only where there is nothing else.
    first = next((c for c in candidates if not c.fills), candidates[0])
    if precision == "fp32":
        return _origin(first, watcher, None)
    twins = watch(replay, "fp32", scale, frozenset(c.key for c in candidates)).found
    for seen in candidates:
        value = _value(twins.get(seen.key))
        if (value is None and not seen.fills) or (value is not None and value.finite):
            return _origin(seen, watcher, value)
    return None if only_in_16 else _origin(first, watcher, _value(twins.get(first.key)))


def fails_from(replay: Replay, weights: Sequence[Tensor], *, backward: bool) -> bool:
    """Whether the batch is not finite in fp32 from other weights (those that a leg started with).

    Then no step that was taken made it so: neither the lr nor the precision is the cause.

    Args:
        replay: the batch.
        weights: one tensor per floating parameter, in the model's order.
        backward: look at the gradients too.
    """
    params = [p for p in replay.learn.model.parameters() if p.is_floating_point()]
    now = [p.detach().clone() for p in params]
    try:
        with torch.no_grad():
            for p, w in zip(params, weights, strict=True):
                p.copy_(w)
        with replay.again(), gradients_kept(replay.learn.model):
            with replay.precision("fp32"):
                loss = replay.loss(replay.predict())
            if not all_finite(loss) or not backward or not loss.requires_grad:
                return not all_finite(loss)
            loss.mean().backward()
            return not all_finite([p.grad for p in params if p.grad is not None])
    finally:
        with torch.no_grad():
            for p, w in zip(params, now, strict=True):
                p.copy_(w)


def _value(seen: _Seen | None) -> Fp32Value | None:
    if seen is None:
        return None
    op = seen.operation()
    peak = op.output_max
    return Fp32Value(
        input_max=op.input_max,
        input_min=op.input_min,
        input_zeros=op.input_zeros,
        output_max=peak,
        finite=peak is None or math.isfinite(peak),
    )


def _origin(seen: _Seen, watcher: _Watcher, twin: Fp32Value | None) -> Origin:
    phase: Any = seen.phase
    return Origin(phase=phase, place=seen.place, operation=seen.operation(), fp32=twin, ops_watched=watcher.watched)
