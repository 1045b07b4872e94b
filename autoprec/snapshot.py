"""Everything a fit can change in a Learner, kept aside and put back into the same objects.

The idea   A Learner is a graph of Python objects, and a fit changes it in two ways: it rebinds what an object holds,
           or it writes into a tensor, an array or a random generator. A snapshot walks that graph once and notes, for
           every object that can change, its shallow content (an attribute dictionary, the items of a list) and, for
           every storage of numbers, one copy of its bytes. Restoring writes each content back into the object it came
           from. Nothing is ever copied as an object, so Parameters, the optimizer and callbacks keep their identity,
           tied weights stay tied, and a snapshot can be restored any number of times.
Captured   weights, buffers, gradients, `requires_grad`, train/eval modes, hooks and plain attributes of every module;
           the optimizer's state, hypers and `frozen_idx`, or that there is no optimizer yet; the loss scaler; the
           python, numpy, torch and CUDA generators and those of the loaders; the list of callbacks and their state;
           metrics, recorder, loss function, transforms, loaders; the attributes of the Learner; autocast, its cache of
           half weights, and the grad mode of this thread.
By name    a dataset, a function, a lock, a file, another Learner, and any object of an unknown class that holds one
           that is none of these (a socket, a generator, a logger's client): the reference is put back, not the inside.
Not held   files (`SaveModelCallback` writes one), the position inside an epoch, what a closure or a global variable
           remembers, objects that keep their state in `__slots__`, lazy parameters that the fit materialised,
           tensors without a storage of their own (wrapper subclasses such as DTensor), and the world outside.

A `Fingerprint` names the same state part by part in short digests; two of them say what differs. It is how the
package proves that a probe left nothing behind.
"""

from __future__ import annotations

import hashlib
import random
import types
import weakref
from collections import OrderedDict, deque
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders, Pipeline, Transform
from fastai.data.load import DataLoader
from fastai.learner import Learner, Metric, Recorder
from fastai.losses import BaseLoss
from fastai.optimizer import Optimizer, OptimWrapper
from fastcore.foundation import L
from torch import nn

from autoprec.errors import RestoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

__all__ = ["SECTIONS", "Fingerprint", "Snapshot", "fingerprint", "preserved", "release_autocast"]

SECTIONS = ("model", "optimizer", "scaler", "callbacks", "metrics", "loss", "data", "learner", "thread")
"""The parts that `Snapshot.restore` can be limited to. An object belongs to the first one that reaches it."""

# Values that cannot change: holding the reference is holding the value.
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis)})
_PYTHON_ATOMS = (str, bytes, int, float, complex, Enum, PurePath, frozenset, date, timedelta, Decimal)
_NUMBER_ATOMS = (np.generic, np.dtype, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_ATOM_BASES = (*_PYTHON_ATOMS, *_NUMBER_ATOMS)
# Values that may change inside and are none of our business: only the reference is put back.
_CALLABLES = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, partial, np.ufunc)
_HANDLES = (*_CALLABLES, types.ModuleType, types.CodeType, np.memmap, weakref.ref, torch.utils.data.Dataset)
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
# Classes written in C that hide nothing from us, and the flag of those that are not statically in C.
_TRANSPARENT = frozenset({object, types.SimpleNamespace, dict, list, tuple, set, deque, np.ndarray})
_HEAP_TYPE = 1 << 9
_LOADERS = (DataLoader, torch.utils.data.DataLoader)
# Classes whose instances are always looked into, whatever else they hold.
_OF_FASTAI = (L, Callback, Metric, Transform, Pipeline, DataLoaders, BaseLoss, Optimizer, OptimWrapper)
_OF_TORCH = (nn.Module, torch.optim.Optimizer, torch.amp.GradScaler)
_KNOWN = (*_LOADERS, *_OF_FASTAI, *_OF_TORCH)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_STAGES = ("after_item", "before_batch", "after_batch")
_LOADER_NAMES = ("train", "valid")
# An unknown object from which more than this many others are reached is an application, not state.
_LARGEST_PLAIN = 5000
_DEVICES = ("cpu", "cuda", "mps", "xpu")


# ------------------------------------------------------------------------------------------ what can change


def _is_atom(value: object) -> bool:
    return type(value) in _ATOMS or isinstance(value, _ATOM_BASES)


def _is_array(value: object) -> bool:
    # A read-only array cannot change, and a memory map is a file.
    return isinstance(value, np.ndarray) and value.flags.writeable and not isinstance(value, np.memmap)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not nn.parameter.is_lazy(value)


def _attributes(value: object) -> dict[str, Any] | None:
    """The instance dictionary itself (not a copy), or None: some classes have none, some compute it."""
    found = getattr(value, "__dict__", None)
    return found if type(found) is dict else None


def _elements(value: object) -> list[Any] | None:
    """What a container holds, or None when `value` is no container."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, deque)):
        return list(value)
    if isinstance(value, np.ndarray) and value.dtype == object:
        return list(value.flat)
    return None


def _is_python(value: object) -> bool:
    """Whether all of `value` is visible: no class of its own written in C, which could hide a file or a socket."""
    if isinstance(value, _WEAK):
        return False
    for base in type(value).__mro__:
        if base in _TRANSPARENT:
            return True
        maker = vars(base).get("__new__")
        if not base.__flags__ & _HEAP_TYPE or isinstance(maker, types.BuiltinFunctionType):
            return False
    return False


class _Scope:
    """Says which objects of one Learner's graph are state, and what each of them holds."""

    def __init__(self, learn: Any) -> None:
        self.learn = learn
        # Transforms and collections point at the dataset too: it is recognised by identity, whatever its class.
        self._datasets = {id(dataset) for dataset in map(_dataset, _loaders(learn)) if dataset is not None}
        self._plain: dict[int, bool] = {}

    def is_handle(self, value: object) -> bool:
        if isinstance(value, _HANDLES) or id(value) in self._datasets:
            return True
        if isinstance(value, Learner):
            return value is not self.learn
        # functools' cache and plum's dispatch tables remember results, not state.
        return type(value).__module__.partition(".")[0] in {"functools", "plum", "inspect"}

    def children(self, value: object) -> Iterable[Any]:
        """What `value` holds and a fit could change; empty for atoms, handles, and objects of no known shape."""
        if _is_atom(value) or self.is_handle(value) or isinstance(value, (torch.Tensor, *_GENERATORS)):
            return ()
        held = _elements(value) or []
        if all(type(child) in _ATOMS for child in held):  # such as a loader's indices: nothing to visit in there
            held = []
        if self.is_state(value):
            held += [child for key, child in (_attributes(value) or {}).items() if not _is_dataset(value, key)]
        if isinstance(value, nn.Module):  # a scripted module has its tensors outside its dictionary
            held += [*value.parameters(recurse=False), *value.buffers(recurse=False)]
        return held

    def is_state(self, value: object) -> bool:
        """Whether the attributes of `value` are captured, not only the reference to it."""
        if _attributes(value) is None or _is_atom(value) or self.is_handle(value):
            return False
        if isinstance(value, _KNOWN) or value is self.learn:
            return True
        if id(value) not in self._plain:
            self._judge(value)
        return self._plain[id(value)]

    def _judge(self, root: object) -> None:
        """An object of an unknown class is state when everything reached from it is of a kind that we know."""
        seen: dict[int, object] = {id(root): root}
        waiting: list[Any] = [root]
        while waiting:
            value = waiting.pop()
            attributes = _attributes(value)
            elements = _elements(value)
            if not _is_python(value) or (attributes is None and elements is None) or len(seen) > _LARGEST_PLAIN:
                self._plain[id(root)] = False
                return
            for child in [*(elements or ()), *(attributes or {}).values()]:
                if not self._is_familiar(child) and id(child) not in seen:
                    seen[id(child)] = child
                    waiting.append(child)
        self._plain.update(dict.fromkeys(seen, True))

    def _is_familiar(self, value: object) -> bool:
        return (
            _is_atom(value)
            or value is self.learn
            or isinstance(value, (torch.Tensor, *_GENERATORS, *_KNOWN))
            or (isinstance(value, np.ndarray) and value.dtype != object)
            or self.is_handle(value)
        )


def _loaders(learn: Any) -> list[Any]:
    dls = vars(learn).get("dls")
    loaders = vars(dls).get("loaders", []) if isinstance(dls, DataLoaders) else []
    return list(loaders)


def _dataset(loader: object) -> object:
    return (_attributes(loader) or {}).get("dataset")


def _is_dataset(holder: object, key: str) -> bool:
    return key == "dataset" and isinstance(holder, _LOADERS)


# ------------------------------------------------------------------------------------------ put back


def _refill_dict(target: dict[Any, Any], saved: dict[Any, Any]) -> None:
    # Clear and update, not only update: the order of a module's parameters is the order of its dictionary. The
    # methods of the base class, because a subclass may have its own ideas about setting an item.
    base = OrderedDict if isinstance(target, OrderedDict) else dict
    base.clear(target)
    base.update(target, saved)


def _refill_object(target: object, kind: type, saved: dict[str, Any]) -> None:
    if type(target) is not kind:  # torch's parametrizations give a module a class of its own
        object.__setattr__(target, "__class__", kind)
    _refill_dict(vars(target), saved)


def _refill_list(target: list[Any], saved: list[Any]) -> None:
    list.__setitem__(target, slice(None), saved)


def _refill_set(target: set[Any], saved: set[Any]) -> None:
    set.clear(target)
    set.update(target, saved)


def _refill_deque(target: deque[Any], saved: list[Any]) -> None:
    deque.clear(target)
    deque.extend(target, saved)


def _refill_array(target: np.ndarray[Any, Any], saved: np.ndarray[Any, Any]) -> None:
    target[...] = saved


def _generator_state(generator: Any) -> Any:
    """The state of any of the four kinds of generator, as a value of its own."""
    if isinstance(generator, random.Random):
        # SystemRandom has no state: the operating system's noise cannot be replayed.
        return None if isinstance(generator, random.SystemRandom) else generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _set_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        if state is not None:
            generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Storages:
    """One copy of the bytes of each distinct storage, of the range that the captured tensors look at."""

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._ranges: dict[tuple[str, int], tuple[torch.UntypedStorage, int, int, str]] = {}

    def add(self, tensor: torch.Tensor, storage: torch.UntypedStorage, section: str) -> None:
        if not tensor.numel():
            return
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        low = int(tensor.storage_offset()) * tensor.element_size()
        high = low + int(reach + 1) * tensor.element_size()
        key = (str(storage.device), storage.data_ptr())
        if key in self._ranges:
            storage, old_low, old_high, section = self._ranges[key]
            low, high = min(low, old_low), max(high, old_high)
        self._ranges[key] = (storage, low, high, section)

    def thunks(self) -> Iterator[tuple[str, Callable[[], None]]]:
        for storage, low, high, section in self._ranges.values():
            part = _bytes_of(storage)[low:high]
            copy = part.clone() if self._device is None else part.to(self._device, copy=True)
            yield section, partial(self._put_back, storage, storage.nbytes(), low, copy)

    @staticmethod
    def _put_back(storage: torch.UntypedStorage, size: int, low: int, copy: torch.Tensor) -> None:
        if storage.nbytes() != size:
            storage.resize_(size)
        # A fresh tensor of bytes over the storage: no autograd, no version counter, and the exact bits of any dtype.
        _bytes_of(storage)[low : low + len(copy)].copy_(copy)


@dataclass(frozen=True)
class _TensorShell:
    """What a tensor is besides its numbers: where it looks, whether it wants a gradient, which one it has."""

    tensor: torch.Tensor
    storage: torch.UntypedStorage | None
    dense: torch.Tensor | None  # a copy of the values, for tensors without a storage of their own
    geometry: tuple[int, torch.Size, tuple[int, ...]]
    dtype: torch.dtype
    is_leaf: bool
    requires_grad: bool
    grad: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _TensorShell:
        is_strided = tensor.layout is torch.strided and tensor.device.type != "meta"
        geometry = (
            (int(tensor.storage_offset()), tensor.shape, tensor.stride()) if is_strided else (0, tensor.shape, ())
        )
        return cls(
            tensor,
            tensor.untyped_storage() if is_strided else None,
            None if is_strided else tensor.detach().clone(),
            geometry,
            tensor.dtype,
            tensor.is_leaf,
            tensor.requires_grad,
            tensor.grad if tensor.is_leaf else None,  # reading it elsewhere warns
        )

    def put_back(self) -> None:
        tensor = self.tensor
        if self.dense is not None:
            tensor.data = self.dense.clone()
        elif self.storage is not None and self._has_moved(self.storage):
            fresh = torch.empty(0, dtype=self.dtype, device=self.storage.device)
            tensor.data = fresh.set_(self.storage, *self.geometry)
        if not self.is_leaf:
            return
        if not tensor.is_leaf:  # the fit wrote into it with a graph attached
            tensor.detach_()
        if tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)
        if tensor.grad is not self.grad:
            tensor.grad = self.grad

    def _has_moved(self, storage: torch.UntypedStorage) -> bool:
        now = self.tensor
        return (
            now.dtype != self.dtype
            or now.device != storage.device
            or now.untyped_storage().data_ptr() != storage.data_ptr()
            or (now.storage_offset(), now.shape, now.stride()) != self.geometry
        )


def _refill_hooks(tensor: torch.Tensor, name: str, saved: dict[int, Any] | None) -> None:
    now = getattr(tensor, name, None)
    if now is not None:  # torch keeps calling the dictionary that it was given: change that one
        _refill_dict(now, saved or {})


# ------------------------------------------------------------------------------------------ autocast


@dataclass(frozen=True)
class _Thread:
    """Modes and generators that belong to the thread or the process, not to any object of the Learner."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_caches: bool
    nesting: int
    grad: bool
    python_state: Any
    numpy_state: Any
    torch_state: torch.Tensor
    cuda_state: tuple[torch.Tensor, ...]

    @classmethod
    def now(cls) -> _Thread:
        nesting = torch.autocast_increment_nesting() - 1  # there is no way to only read it
        torch.autocast_decrement_nesting()
        return cls(
            tuple((dev, torch.is_autocast_enabled(dev), torch.get_autocast_dtype(dev)) for dev in _autocast_devices()),
            torch.is_autocast_cache_enabled(),
            nesting,
            torch.is_grad_enabled(),
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
            tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else (),
        )

    def put_back(self) -> None:
        for device, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.autocast_caches)
        _set_nesting(self.nesting)
        torch.set_grad_enabled(self.grad)
        random.setstate(self.python_state)
        np.random.set_state(self.numpy_state)
        torch.set_rng_state(self.torch_state)
        if self.cuda_state:
            torch.cuda.set_rng_state_all(self.cuda_state)


def _autocast_devices() -> list[str]:
    return [device for device in _DEVICES if torch.amp.is_autocast_available(device)]


def _set_nesting(wanted: int) -> None:
    depth = torch.autocast_increment_nesting()
    while depth > wanted:
        depth = torch.autocast_decrement_nesting()
    while depth < wanted:
        depth = torch.autocast_increment_nesting()
    # Autocast keeps half copies of the weights and finds them by identity, so a copy of other numbers would be used.
    torch.clear_autocast_cache()


def release_autocast() -> None:
    """Switch autocast off on this thread, however deep it was entered, and forget its cache of half weights.

    fastai enters autocast in `before_batch` and leaves it in `after_loss`; what escapes in between leaves it on for
    the whole thread. Not to be called inside a `with torch.autocast(...)` block that will still be left, unless a
    snapshot taken inside that block is restored first.
    """
    for device in _autocast_devices():
        torch.set_autocast_enabled(device, False)  # noqa: FBT003 - torch takes no keyword here
    _set_nesting(0)


# ------------------------------------------------------------------------------------------ snapshot


class Snapshot:
    """The state of a Learner at one moment; see the module's text for what that includes.

    Holds one copy of every distinct storage, and references to the objects that were part of the Learner, which
    therefore live as long as the snapshot does.
    """

    def __init__(self, learn: Any, device: str | None) -> None:
        self._learn = learn
        self._scope = _Scope(learn)
        self._seen: dict[int, object] = {}
        self._thunks: list[tuple[str, Callable[[], None]]] = []
        self._storages = _Storages(device)
        self._callbacks = list(learn.cbs)
        self._fingerprint: Fingerprint | None = None

    @classmethod
    def capture(cls, learn: Any, *, device: str | None = None, with_fingerprint: bool = True) -> Snapshot:
        """Take a snapshot; changes nothing, draws no random number.

        Args:
            learn: the fastai Learner, with or without an optimizer, inside or outside a fit.
            device: where the copies of tensors are kept, such as "cpu"; None leaves each on its own device.
            with_fingerprint: whether to take the fingerprint too. It costs a pass over all bytes on the host; leave it
                out where snapshots are taken often and only restored.
        """
        snapshot = cls(learn, device)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            snapshot._walk()
            # Storages first: the shells that are put back after them look into storages of the right size.
            snapshot._thunks = [*snapshot._storages.thunks(), *snapshot._thunks]
        # The modes of the thread are read outside the two contexts above, which change them.
        snapshot._thunks.append(("thread", _Thread.now().put_back))
        if with_fingerprint:
            snapshot._fingerprint = fingerprint(learn)
        return snapshot

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the Learner at the time of the capture.

        Raises:
            ValueError: the snapshot was captured with `with_fingerprint=False`.
        """
        if self._fingerprint is None:
            raise ValueError("this snapshot has no fingerprint: it was captured with with_fingerprint=False")
        return self._fingerprint

    def restore(self, learn: Any, *, only: Collection[str] | None = None) -> None:
        """Put everything back, in place; can be called any number of times.

        Args:
            learn: the Learner that was captured.
            only: names out of `SECTIONS`, to put back no more than these; None restores all. Inside a running fit,
                `only={"model", "optimizer", "scaler"}` rolls back the training and lets the schedule go on.

        Raises:
            RestoreError: `learn` is not the Learner that was captured.
            ValueError: `only` names an unknown section.
        """
        if learn is not self._learn:
            raise RestoreError("the snapshot was taken from another Learner; restore it into the one it came from")
        unknown = sorted(set(only or ()) - set(SECTIONS))
        if unknown:
            raise ValueError(f"unknown sections {unknown}: choose from {', '.join(SECTIONS)}")
        wanted = frozenset(SECTIONS if only is None else only)
        if "learner" in wanted:
            self._detach_new_callbacks()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for section, put_back in self._thunks:
                if section in wanted and section != "thread":
                    put_back()
        # Outside the contexts, whose exit would set the grad mode once more.
        for section, put_back in self._thunks:
            if section in wanted and section == "thread":
                put_back()
        torch.clear_autocast_cache()

    def _detach_new_callbacks(self) -> None:
        known = set(map(id, self._callbacks))
        for callback in self._learn.cbs:
            if id(callback) not in known:  # not setattr: fastai's warns about shadowed names
                vars(callback)["learn"] = None

    def _walk(self) -> None:
        for section, root in _roots(self._learn):
            waiting: list[Any] = [root]
            while waiting:
                value = waiting.pop()
                # The Learner is visited as a root only: whoever points at it does not own what it holds.
                if id(value) in self._seen or _is_atom(value) or (value is self._learn and section != "learner"):
                    continue
                self._seen[id(value)] = value  # kept alive, so that the id stays its own
                if _is_tensor(value):
                    self._note_tensor(value, section)
                    waiting.extend((_attributes(value) or {}).values())
                else:
                    self._note(value, section)
                    waiting.extend(self._scope.children(value))
        # What can be put back is kept by its thunk; the ids are needed no more.
        self._seen.clear()

    def _note(self, value: Any, section: str) -> None:
        """Remember how to put back the content of one object that is not a tensor."""
        if self._scope.is_handle(value):
            return
        refill: Callable[[], None] | None = None
        if isinstance(value, dict):
            refill = partial(_refill_dict, value, dict(value))
        elif isinstance(value, list):
            refill = partial(_refill_list, value, list(value))
        elif isinstance(value, set):
            refill = partial(_refill_set, value, set(value))
        elif isinstance(value, deque):
            refill = partial(_refill_deque, value, list(value))
        elif _is_array(value):
            refill = partial(_refill_array, value, value.copy())
        elif isinstance(value, _GENERATORS):
            refill = partial(_set_generator, value, _generator_state(value))
        if refill is not None:
            self._thunks.append((section, refill))
        attributes = _attributes(value)
        if attributes is not None and self._scope.is_state(value):
            self._thunks.append((section, partial(_refill_object, value, type(value), dict(attributes))))

    def _note_tensor(self, tensor: torch.Tensor, section: str) -> None:
        shell = _TensorShell.of(tensor)
        # The gradient before its owner: the owner takes it back only when both have their old shape again.
        if shell.grad is not None and id(shell.grad) not in self._seen:
            self._seen[id(shell.grad)] = shell.grad
            self._note_tensor(shell.grad, section)
        if shell.storage is not None:
            self._storages.add(tensor, shell.storage, section)
        self._thunks.append((section, shell.put_back))
        attributes = _attributes(tensor)
        if attributes is not None:
            self._thunks.append((section, partial(_refill_dict, attributes, dict(attributes))))
        if shell.is_leaf:
            for name, hooks in _tensor_hooks(tensor).items():
                self._thunks.append((section, partial(_refill_hooks, tensor, name, dict(hooks or {}))))


def _tensor_hooks(tensor: torch.Tensor) -> dict[str, dict[int, Any] | None]:
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return {name: getattr(tensor, name, None) for name in names}


def _roots(learn: Any) -> Iterator[tuple[str, Any]]:
    attributes = vars(learn)
    yield "model", attributes.get("model")
    yield "optimizer", attributes.get("opt")
    yield "scaler", attributes.get("scaler")
    yield "metrics", attributes.get("_metrics")
    yield "loss", attributes.get("loss_func")
    yield "data", attributes.get("dls")
    yield "callbacks", attributes.get("cbs")
    yield "learner", learn


# ------------------------------------------------------------------------------------------ fingerprint


@dataclass(frozen=True)
class Fingerprint:
    """Short digests of every part of a Learner's state, by the name of the part.

    Exact to the bit: -0.0 is not 0.0, and NaNs with different payloads differ. Parts that are only held by reference
    (functions, datasets) are told apart by identity, so fingerprints compare within one process.

    Attributes:
        parts: from names such as "weights/0.weight", "optimizer/hypers" or "rng/dl/train" to hexadecimal digests.
    """

    parts: Mapping[str, str]

    def __hash__(self) -> int:
        return hash(frozenset(self.parts.items()))

    def differences(self, other: Fingerprint) -> tuple[str, ...]:
        """Names of the parts that differ, or that only one of the two has, in alphabetical order."""
        names = self.parts.keys() | other.parts.keys()
        return tuple(sorted(name for name in names if self.parts.get(name) != other.parts.get(name)))


def fingerprint(learn: Any) -> Fingerprint:
    """Digest the state of a fastai Learner, part by part; changes nothing, draws no random number."""
    thread = _Thread.now()
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return Fingerprint(MappingProxyType(_Digester(learn, thread).parts))


class _Digester:
    """Walks the graph that `Snapshot` walks and gives every part of it a name.

    An object that is reached a second time is digested as the name under which it was first seen, which is how
    sharing (tied weights, a parameter in the optimizer) becomes part of the fingerprint. So specific parts come first.
    """

    def __init__(self, learn: Any, thread: _Thread) -> None:
        self.parts: dict[str, str] = {}
        self._scope = _Scope(learn)
        self._learn = learn
        self._names: dict[int, str] = {id(learn): "learner"}
        self._keep: list[object] = []  # bound methods are made anew when read: without this, ids would be reused
        self._thread(thread)
        self._model(vars(learn).get("model"))
        self._optimizer(vars(learn).get("opt"))
        self._part("scaler", vars(learn).get("scaler"))
        self._metrics(vars(learn).get("_metrics"))
        self._part("loss", vars(learn).get("loss_func"))
        for index, loader in enumerate(_loaders(learn)):
            self._loader(_LOADER_NAMES[index] if index < len(_LOADER_NAMES) else str(index), loader)
        self._part("dls", vars(learn).get("dls"))
        self._callbacks(list(learn.cbs))
        for name, value in vars(learn).items():
            self._part(f"learner/{name}", value)

    # -- parts

    def _part(self, name: str, value: object) -> None:
        digest = hashlib.sha256()
        self._feed(digest, value, name)
        self.parts[name] = digest.hexdigest()[:20]

    def _thread(self, thread: _Thread) -> None:
        self._part("autocast", (thread.autocast, thread.autocast_caches, thread.nesting))
        self._part("grad_mode", thread.grad)
        self._part("rng/python", thread.python_state)
        self._part("rng/numpy", thread.numpy_state)
        self._part("rng/torch", thread.torch_state)
        if thread.cuda_state:
            self._part("rng/cuda", thread.cuda_state)

    def _model(self, model: Any) -> None:
        if not isinstance(model, nn.Module):
            self._part("model", model)
            return
        modes: list[tuple[str, bool]] = []
        flags: list[tuple[str, bool]] = []
        structure: list[tuple[Any, ...]] = []
        waiting: list[tuple[str, nn.Module]] = [("", model)]
        while waiting:
            path, module = waiting.pop()
            if id(module) in self._names:
                structure.append((path, self._names[id(module)]))
                continue
            self._names[id(module)] = f"model/{path}"
            prefix = f"{path}." if path else ""
            children = [(prefix + name, child) for name, child in vars(module)["_modules"].items()]
            waiting.extend((name, child) for name, child in reversed(children) if child is not None)
            names = (tuple(vars(module)[kind]) for kind in ("_modules", "_parameters", "_buffers"))
            structure.append((path, type(module), *names))
            modes.append((path, module.training))
            flags += self._tensors_of(prefix, module)
            self._module_attributes(path or "(model)", module)
        self._part("modules", structure)
        self._part("modes", modes)
        self._part("requires_grad", flags)

    def _tensors_of(self, prefix: str, module: nn.Module) -> list[tuple[str, bool]]:
        flags = []
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        for kind, named in (("weights", parameters), ("buffers", buffers)):
            for name, tensor in named:
                flags.append((prefix + name, tensor.requires_grad))
                first = id(tensor) not in self._names
                digest = hashlib.sha256()
                if first and _is_tensor(tensor):
                    self._names[id(tensor)] = f"{kind}/{prefix}{name}"
                    self._feed_values(digest, tensor)
                    self._tensor_extras(prefix + name, tensor)
                else:
                    self._feed(digest, tensor, f"{kind}/{prefix}{name}")
                self.parts[f"{kind}/{prefix}{name}"] = digest.hexdigest()[:20]
        return flags

    def _tensor_extras(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.is_leaf and tensor.grad is not None:
            self._part(f"gradients/{name}", tensor.grad)
        if _attributes(tensor):
            self._part(f"attributes/{name}", dict(vars(tensor)))
        hooks = [list(hooks.items()) for hooks in _tensor_hooks(tensor).values() if hooks]
        if hooks:
            self._part(f"hooks/{name}", hooks)

    def _module_attributes(self, name: str, module: nn.Module) -> None:
        told_elsewhere = {"training", "_parameters", "_buffers", "_modules"}
        rest = {key: value for key, value in vars(module).items() if key not in told_elsewhere}
        hooks = {key: rest.pop(key) for key in list(rest) if "hooks" in key}
        if any(hooks.values()):
            self._part(f"hooks/{name}", {key: value for key, value in hooks.items() if value})
        self._part(f"attributes/{name}", dict(sorted(rest.items())))

    def _optimizer(self, optimizer: Any) -> None:
        if optimizer is None:
            self._part("optimizer", None)
            return
        self._names[id(optimizer)] = "optimizer"
        self._part("optimizer", type(optimizer))
        for name, value in vars(optimizer).items():
            if name == "state" and isinstance(value, dict):
                self._optimizer_state(value)
            elif name == "opt" and isinstance(value, torch.optim.Optimizer):
                self._torch_optimizer(value)
            else:
                self._part(f"optimizer/{'groups' if name == 'param_lists' else name}", value)

    def _torch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._names[id(optimizer)] = "optimizer/opt"
        for name, value in vars(optimizer).items():
            if name == "state":
                self._optimizer_state(value)
            elif name == "param_groups":
                self._part("optimizer/hypers", [{k: v for k, v in g.items() if k != "params"} for g in value])
                self._part("optimizer/groups", [group["params"] for group in value])
            else:
                self._part(f"optimizer/opt/{name}", value)

    def _optimizer_state(self, state: dict[Any, Any]) -> None:
        self._names.setdefault(id(state), "optimizer/state")
        for index, (key, value) in enumerate(state.items()):
            name = self._names.get(id(key), str(index)).removeprefix("weights/")
            self._part(f"optimizer/state/{name}", value)

    def _metrics(self, metrics: Any) -> None:
        for index, metric in enumerate(metrics or ()):
            self._part(f"metrics/{index}", metric)

    def _loader(self, name: str, loader: Any) -> None:
        attributes = _attributes(loader)
        if id(loader) in self._names or attributes is None:
            self._part(f"dls/{name}", loader)
            return
        self._names[id(loader)] = f"dls/{name}"
        for stage in _STAGES:
            pipeline = attributes.get(stage)
            for index, transform in enumerate(getattr(pipeline, "fs", ()) if isinstance(pipeline, Pipeline) else ()):
                self._part(f"transforms/{name}/{stage}/{index}.{type(transform).__name__}", transform)
            self._part(f"transforms/{name}/{stage}", pipeline)
        self._part(f"rng/dl/{name}", attributes.get("rng"))
        for key, value in attributes.items():
            if key not in {"rng", *_STAGES}:
                self._part(f"dls/{name}/{key}", _Named(value) if _is_dataset(loader, key) else value)

    def _callbacks(self, callbacks: list[Any]) -> None:
        self._part("callbacks/list", [(type(callback), id(callback)) for callback in callbacks])
        labels: list[str] = []
        for callback in callbacks:
            label = "recorder" if isinstance(callback, Recorder) else f"callbacks/{callback.name}"
            labels.append(label)
            label += f"#{labels.count(label)}" if labels.count(label) > 1 else ""
            self._names.setdefault(id(callback), label)
            for name, value in vars(callback).items():
                self._part(f"{label}/{name}", value)

    # -- values

    def _feed(self, digest: Any, value: Any, name: str) -> None:
        """Add `value` to the digest; `name` is what later references to it will say."""
        if isinstance(value, _Named):
            _say(digest, f"{_kind(value.value)}@{id(value.value)}")
        elif _is_atom(value):
            _say(digest, f"{_kind(value)}={value!r}")
        elif id(value) in self._names:
            _say(digest, f"see {self._names[id(value)]}")
        elif isinstance(value, types.MethodType):
            _say(digest, f"method {value.__func__.__qualname__} of {self._reference(value.__self__)}")
        elif isinstance(value, partial):  # fastai makes new ones for every optimizer, of the same steps
            _say(digest, "partial")
            self._feed_each(digest, (value.func, *value.args, *value.keywords, *value.keywords.values()), name)
        elif self._scope.is_handle(value):
            _say(digest, f"{_kind(value)}@{id(value)}")
        else:
            self._keep.append(value)
            self._names[id(value)] = name
            _say(digest, _kind(value))
            if _is_tensor(value):
                self._feed_tensor(digest, value, name)
            elif isinstance(value, np.ndarray) and value.dtype != object:
                _say(digest, f"{value.dtype} {value.shape}")
                digest.update(np.ascontiguousarray(value).tobytes())
            elif isinstance(value, _GENERATORS):
                self._feed(digest, _generator_state(value), f"{name}.state")
            else:
                self._feed_content(digest, value, name)

    def _feed_content(self, digest: Any, value: Any, name: str) -> None:
        elements = _elements(value)
        if isinstance(value, set):
            _say(digest, str(sorted(repr(item) if _is_atom(item) else self._reference(item) for item in value)))
        elif elements is not None:
            _say(digest, str(len(elements)))
            if all(type(element) in _ATOMS for element in elements):
                _say(digest, repr(elements))
            else:
                self._feed_each(digest, elements, name)
        if self._scope.is_state(value):
            for key, child in sorted((_attributes(value) or {}).items()):
                _say(digest, key)
                self._feed(digest, _Named(child) if _is_dataset(value, key) else child, f"{name}.{key}")
        elif elements is None:
            _say(digest, f"@{id(value)}")

    def _feed_each(self, digest: Any, values: Iterable[Any], name: str) -> None:
        for index, value in enumerate(values):
            self._feed(digest, value, f"{name}[{index}]")

    def _feed_tensor(self, digest: Any, tensor: torch.Tensor, name: str) -> None:
        self._feed_values(digest, tensor)
        if tensor.is_leaf:
            _say(digest, f"requires_grad={tensor.requires_grad}")
            self._feed(digest, tensor.grad, f"{name}.grad")
        if _attributes(tensor):
            self._feed(digest, dict(vars(tensor)), f"{name}.__dict__")

    @staticmethod
    def _feed_values(digest: Any, tensor: torch.Tensor) -> None:
        _say(digest, f"{tensor.dtype} {tensor.device} {tuple(tensor.shape)} {tensor.layout}")
        if tensor.device.type == "meta":
            return
        if tensor.layout is torch.strided:
            _say(digest, f"{tensor.stride()}")
        else:
            tensor = tensor.to_dense()
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)

    def _reference(self, value: object) -> str:
        return self._names.get(id(value)) or f"{_kind(value)}@{id(value)}"


@dataclass(frozen=True)
class _Named:
    """A value that is digested by identity only, such as the dataset of a loader."""

    value: object


def _say(digest: Any, text: str) -> None:
    """Add text with its length, so that neighbours cannot be confused."""
    data = text.encode("utf-8", "surrogatepass")
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


# ------------------------------------------------------------------------------------------ with


@contextmanager
def preserved(learn: Any, *, device: str | None = None) -> Iterator[Snapshot]:
    """Leave a Learner exactly as it was, whatever happens inside the block.

    On the way out, normal or by any exception (Ctrl-C and fastai's cancels included), everything is put back and the
    fingerprint is compared with the one taken on entry.

    Args:
        learn: the fastai Learner.
        device: where the copies are kept, as for `Snapshot.capture`.

    Yields:
        The snapshot, which can be restored inside the block too.

    Raises:
        RestoreError: something could not be put back; its text names the parts. It has the exception that ended the
            block, if there was one, as its cause.
    """
    snapshot = Snapshot.capture(learn, device=device)
    try:
        yield snapshot
    except BaseException as error:
        _put_back(snapshot, learn, error)
        raise
    _put_back(snapshot, learn, None)


def _put_back(snapshot: Snapshot, learn: Any, cause: BaseException | None) -> None:
    try:
        snapshot.restore(learn)
    except KeyboardInterrupt:  # Ctrl-C while restoring must not leave half of it behind
        snapshot.restore(learn)
        raise
    differences = snapshot.fingerprint.differences(fingerprint(learn))
    if differences:
        shown = ", ".join(differences[:8]) + (f" and {len(differences) - 8} more" if len(differences) > 8 else "")
        raise RestoreError(
            f"the Learner is not as it was before the block: {shown}. Something outside its own objects may still be "
            "changing them; build the Learner anew to be safe."
        ) from cause
