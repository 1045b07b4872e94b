"""Islands: parts of a model that compute in fp32 inside a 16-bit run.

A *module* island turns autocast off around one module's forward pass and casts what comes in up to fp32. A
*region* island does the same for the torch functions that one function (or one line) of the user's own code
calls directly, where the op belongs to no module of its own: a product inside a big `forward`, a mask. What comes
out stays fp32: casting it down at the border would bring back the very overflow; the next op on autocast's
16-bit list casts it anyway.

Both live in torch's hooks only while `entered` is active; the model object itself is not changed.

Not covered: a function that `torch.utils.checkpoint` runs again outside its module's forward, compiled modules and
DataParallel (refused, see `obstacle`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from autoprec.evidence import Place
from autoprec.noun import Noun

if TYPE_CHECKING:
    from fastai.learner import Learner

__all__ = ["Island", "entered", "obstacle"]

_TORCH = tuple(str(Path(p).resolve()) for p in torch.__path__)
_CALLS = {"_call_impl", "_wrapped_call_impl"}
_HALF = (torch.float16, torch.bfloat16)


class Island(Noun):
    """What is kept in fp32.

    A module, if `function` is None; else the torch functions called directly in `function` of `file` while `module`
    runs, or, with `line`, those called from that line alone.
    """

    module: str
    """Dotted path in the model; "" is the model itself."""
    file: str | None = None
    function: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        """The module's path, or the function or line as `file.py:12 in forward`."""
        if self.function is None:
            return self.module or "(the whole model)"
        where = f"{self.file}:{self.line}" if self.line else f"{self.file}"
        return f"{where} in {self.function}" + (f" ({self.module})" if self.module else "")

    @classmethod
    def at(cls, place: Place) -> list[Island]:
        """The islands around a place, from the smallest on: its line, its function, its module."""
        module = place.module or ""
        found = []
        # A torch module of its own (a Linear, a LayerNorm) is smaller than anything that could be said of its caller.
        leaf = place.module_class is not None and getattr(nn, place.module_class, None) is not None
        if place.function and not leaf:
            found.append(cls(module=module, file=place.file, function=place.function, line=place.line))
            found.append(cls(module=module, file=place.file, function=place.function))
        if module:
            found.append(cls(module=module))
        return found


def obstacle(learn: Learner, island: Island) -> str | None:
    """Why an island cannot be made there, in a sentence; None if it can."""
    model = learn.model
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return f"islands inside {type(model).__name__} are not supported yet"
    modules = dict(model.named_modules())
    if island.module not in modules and not _compiled(model):
        return f"the model has no module {island.module!r}"
    parts = island.module.split(".")
    around = [modules.get(".".join(parts[:i])) for i in range(len(parts) + 1)]
    if any(m is not None and _compiled(m) for m in around):
        return "islands inside a compiled model are not supported yet; compile after the repair"
    return None


def _compiled(module: nn.Module) -> bool:
    """Whether a module was compiled, by `torch.compile(module)` or in place by `module.compile()`."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


@contextmanager
def entered(learn: Learner, islands: Sequence[Island], device: str) -> Iterator[None]:
    """Keep the islands in fp32 for the block. Leaves no hook behind, whatever happens inside."""
    modules = dict(learn.model.named_modules())
    with ExitStack() as stack:
        for island in islands:
            module = modules[island.module]
            guard = _Module(device) if island.function is None else _Region(island, device)
            # First in and last out among the module's hooks: the user's own hooks see what the module sees.
            stack.callback(module.register_forward_pre_hook(guard.enter, with_kwargs=True, prepend=True).remove)
            stack.callback(module.register_forward_hook(guard.leave, always_call=True).remove)
            stack.callback(guard.close)
        yield


def _up(value: Any) -> Any:
    """Half tensors cast up, through lists, tuples and mappings; anything else as it is."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALF else value
    if isinstance(value, Mapping):
        up = {k: _up(v) for k, v in value.items()}
        return up if type(value) is dict else type(value)(up)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_up, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(_up, value))
    return value


class _Module:
    """Autocast off around one module; a stack, as a shared module may be entered again from inside itself."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.open: list[torch.autocast] = []

    def enter(self, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        off = torch.autocast(self.device, enabled=False)
        off.__enter__()
        self.open.append(off)
        return _up(args), _up(kwargs)

    def leave(self, _module: nn.Module, _args: Any, _out: Any) -> None:
        if self.open:
            self.open.pop().__exit__(None, None, None)

    def close(self) -> None:
        while self.open:
            self.open.pop().__exit__(None, None, None)


class _Region:
    """The mode of one region, on while its module's forward runs."""

    def __init__(self, island: Island, device: str) -> None:
        self.island, self.device = island, device
        self.open: list[_RegionMode] = []

    def enter(self, _module: nn.Module, _args: Any, _kwargs: Any) -> None:
        mode = _RegionMode(self.island, self.device)
        mode.__enter__()
        self.open.append(mode)

    def leave(self, _module: nn.Module, _args: Any, _out: Any) -> None:
        if self.open:
            self.open.pop().__exit__(None, None, None)

    def close(self) -> None:
        while self.open:
            self.open.pop().__exit__(None, None, None)


class _RegionMode(TorchFunctionMode):
    """Runs the torch functions that the region calls directly with autocast off, on operands cast up."""

    def __init__(self, island: Island, device: str) -> None:
        super().__init__()
        self.island, self.device = island, device
        self.file = str(Path(island.file or "").resolve())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.is_autocast_enabled(self.device) or not self._is_ours(sys._getframe(1)) or _asks(func):
            return func(*args, **kwargs)
        with torch.autocast(self.device, enabled=False):
            return func(*_up(args), **_up(kwargs))

    def _is_ours(self, frame: FrameType | None) -> bool:
        while frame is not None:
            code = frame.f_code
            # Our own frames: several regions of one module are modes on top of each other.
            if code.co_filename != __file__ and not code.co_filename.startswith(_TORCH):
                at_line = self.island.line is None or self._covers(frame)
                return code.co_name == self.island.function and at_line and self._same_file(code.co_filename)
            if code.co_name in _CALLS:
                return False  # called by a submodule, which is its own place
            frame = frame.f_back
        return False

    def _covers(self, frame: FrameType) -> bool:
        return frame.f_lineno == self.island.line

    def _same_file(self, name: str) -> bool:
        return name == self.file or str(Path(name).resolve()) == self.file


def _asks(func: Any) -> bool:
    """Whether a function only reads a property (shape, dtype, device): a cast would change the answer."""
    name = resolve_name(func) or ""
    return name.endswith((".__get__", ".size", ".dim", ".numel", ".type", ".is_floating_point", ".element_size"))
