"""Which precision a learner carries, what this device can do, and fastai's MixedPrecision on any device.

fastai's own `MixedPrecision` says `autocast('cuda')` and `GradScaler('cuda')`, so away from CUDA it warns
and does nothing. `DevicePrecision` is the same callback bound to another device type. It lives in a learner
only while a leg or a guarded fit runs; what the user gets back is fastai's own class, always.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from fastai.callback.core import Callback, CancelBatchException
from fastai.callback.fp16 import AMPMode, MixedPrecision, NonNativeMixedPrecision
from fastai.torch_core import to_float
from fastcore.foundation import L

from autoprec import emulation
from autoprec.evidence import Precision
from autoprec.islands import Island, entered
from autoprec.observe.tensors import all_finite

if TYPE_CHECKING:
    from fastai.learner import Learner

__all__ = [
    "DTYPES",
    "Availability",
    "DevicePrecision",
    "Setting",
    "attached",
    "availability",
    "carried",
    "computing",
    "device_type",
    "stock_callback",
]

DTYPES: Mapping[Precision, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class DevicePrecision(MixedPrecision):
    """fastai's MixedPrecision with the device type as an argument; everything after `before_fit` is fastai's."""

    name = "mixed_precision"

    def __init__(self, precision: Precision, device_type: str, **kwargs: Any) -> None:
        super().__init__(amp_mode=AMPMode(precision), **kwargs)
        self.device_type = device_type

    def before_fit(self) -> None:
        """Build autocast and scaler for the device."""
        dtype = DTYPES[self.amp_mode.value]
        self.kwargs["enabled"] = dtype == torch.float16
        self.autocast = torch.autocast(self.device_type, dtype=dtype)
        self.learn.scaler = torch.amp.GradScaler(self.device_type, **self.kwargs)
        self.scales = L()


@dataclass(frozen=True)
class Setting:
    """The precision of a leg or a fit.

    Attributes:
        precision: "fp16", "bf16" or "fp32".
        scaler_kwargs: arguments of GradScaler (init_scale, growth_interval, …); ignored but for fp16.
        islands: parts of the model that stay in fp32; ignored for fp32.
        loss_fp32: the loss function runs outside autocast; ignored for fp32.
        skip_nonfinite: batches whose inputs or targets are not finite are left out, in any precision.
    """

    precision: Precision
    scaler_kwargs: Mapping[str, Any] = field(default_factory=dict)
    islands: tuple[Island, ...] = ()
    loss_fp32: bool = False
    skip_nonfinite: bool = False

    @property
    def stock(self) -> bool:
        """Whether fastai's own callback does all of it."""
        return self.precision == "fp32" or not (self.islands or self.loss_fp32)


@dataclass(frozen=True)
class Availability:
    """What 16-bit arithmetic a device offers.

    Attributes:
        fp16: fp16 autocast with a scaler does something here.
        bf16: bf16 autocast does something here.
        bf16_native: the device computes bf16 itself rather than through fp32.
        reason: why something is missing; None where nothing is.
    """

    fp16: bool
    bf16: bool
    bf16_native: bool
    reason: str | None = None


def device_type(learn: Learner) -> str:
    """Device type that the learner trains on ("cpu", "cuda", …): the loaders' device if they have one.

    fastai moves the model to `dls.device` in `before_fit`, so the model's present place does not count.
    """
    device = getattr(learn.dls, "device", None)
    if device is None:
        device = next(learn.model.parameters()).device
    return torch.device(device).type


def availability(device: str, *, emulate_cuda: bool) -> Availability:
    """Ask the device; never trust that a missing precision raises (away from CUDA fastai only warns)."""
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        native = torch.cuda.is_bf16_supported(including_emulation=False) and major >= 8
        reason = None if native else f"compute capability {major}.{minor} has no bf16 units (8.0 has)"
        return Availability(fp16=True, bf16=native or torch.cuda.is_bf16_supported(), bf16_native=native, reason=reason)
    if device == "cpu" and emulate_cuda:
        return Availability(fp16=True, bf16=True, bf16_native=True)
    hint = "; emulate_cuda=True computes real 16-bit arithmetic on the CPU" if device == "cpu" else ""
    reason = f"the learner is on {device!r}, where fastai's MixedPrecision does nothing{hint}"
    return Availability(fp16=False, bf16=False, bf16_native=False, reason=reason)


def carried(learn: Learner) -> tuple[list[Any], Setting | None]:
    """The learner's precision callbacks in their order, and what the last added of them asks for.

    Returns:
        (callbacks, setting); setting is None where there is no callback.
    """
    callbacks = [cb for cb in learn.cbs if isinstance(cb, (MixedPrecision, NonNativeMixedPrecision))]
    if not callbacks:
        return [], None
    last = callbacks[-1]
    if not isinstance(last, MixedPrecision):
        return callbacks, Setting("fp16")
    kwargs = {k: v for k, v in last.kwargs.items() if k != "enabled"}  # before_fit writes "enabled" itself
    return callbacks, Setting(AMPMode(last.amp_mode).value, kwargs)


def stock_callback(setting: Setting) -> Any | None:
    """Fastai's own callback for a setting, as `to_fp16()` or `to_bf16()` would add it; None for fp32."""
    if setting.precision == "fp32":
        return None
    kwargs = setting.scaler_kwargs if setting.precision == "fp16" else {}
    return MixedPrecision(amp_mode=AMPMode(setting.precision), **kwargs)


@contextmanager
def computing(learn: Learner, setting: Setting) -> Iterator[list[str]]:
    """What a setting needs besides its callback: CUDA's op lists on a CPU, the islands, the loss in fp32.

    Yields:
        The batches that were left out, as they are.
    """
    device = device_type(learn)
    left_out: list[str] = []
    with ExitStack() as stack:
        if setting.skip_nonfinite:
            stack.enter_context(learn.added_cbs([_SkipNonfinite(left_out)]))
        if setting.precision != "fp32":
            if device == "cpu":
                stack.enter_context(emulation.emulate_cuda())
            stack.enter_context(entered(learn, setting.islands, device))
            if setting.loss_fp32:
                off = _LossOutside(device)
                cbs = [_BeforeLoss(off), _AfterLoss(off)]
                stack.enter_context(learn.added_cbs(cbs))
                stack.callback(off.leave)
        yield left_out


class _SkipNonfinite(Callback):
    """Before MixedPrecision (order 10) enters autocast: a batch that is cancelled later would leave it on."""

    order = 9.5

    def __init__(self, left_out: list[str]) -> None:
        self.left_out = left_out

    def before_batch(self) -> None:
        """Leave the batch out; without targets the Recorder does not count it either."""
        if not all_finite(self.xb) or not all_finite(self.yb):
            what = "training" if self.training else "validation"
            self.left_out.append(f"{what} batch {self.iter} of epoch {self.epoch}")
            self.learn.yb = ()
            raise CancelBatchException


class _LossOutside:
    """Autocast off from after the prediction until before MixedPrecision leaves autocast."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.open: torch.autocast | None = None

    def enter(self) -> None:
        self.open = torch.autocast(self.device, enabled=False)
        self.open.__enter__()

    def leave(self) -> None:
        if self.open is not None:
            self.open.__exit__(None, None, None)
            self.open = None


class _BeforeLoss(Callback):
    """After MixedPrecision (order 10) has cast the prediction up."""

    order = 10.2

    def __init__(self, off: _LossOutside) -> None:
        self.loss_outside = off

    def after_pred(self) -> None:
        """Leave autocast for the loss; targets in 16 bits are cast up too."""
        self.learn.yb = to_float(self.learn.yb) if any(is_half(t) for t in self.learn.yb) else self.learn.yb
        self.loss_outside.enter()


class _AfterLoss(Callback):
    """Before MixedPrecision (order 10), which leaves the outer autocast."""

    order = 9.9

    def __init__(self, off: _LossOutside) -> None:
        self.loss_outside = off

    def after_loss(self) -> None:
        """Back into autocast, for MixedPrecision to leave it."""
        self.loss_outside.leave()


def is_half(value: Any) -> bool:
    """Whether a value is a tensor in fp16 or bf16."""
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)


@contextmanager
def attached(learn: Learner, setting: Setting) -> Iterator[list[str]]:
    """Run the block with exactly one precision callback, working on the learner's device (none for fp32).

    The learner's own callbacks come back afterwards, in their places. Under emulation CUDA's op lists are in
    force for the block.

    Yields:
        The batches that were left out as not finite, as they are.
    """
    device = device_type(learn)
    theirs, _ = carried(learn)
    before = list(learn.cbs)
    # What escapes a batch skips the exit of the callback's autocast, which would put this back.
    dtype = torch.get_autocast_dtype(device)
    ours = None
    if setting.precision != "fp32":
        if device == "cuda":
            ours = stock_callback(setting)
        else:
            kwargs = setting.scaler_kwargs if setting.precision == "fp16" else {}
            ours = DevicePrecision(setting.precision, device, **kwargs)
    place = before.index(theirs[0]) if theirs else len(before)
    for cb in theirs:
        learn.remove_cb(cb)
    if ours is not None:
        learn.add_cb(ours)
        # Callbacks of one order run in the list's order: ours stands where theirs stood.
        learn.cbs.remove(ours)
        learn.cbs.insert(place, ours)
    try:
        with computing(learn, setting) as left_out:
            yield left_out
    finally:
        torch.set_autocast_dtype(device, dtype)
        if ours is not None and ours in learn.cbs:
            learn.remove_cb(ours)
        for cb in before:
            if cb in theirs:
                learn.add_cb(cb)
                learn.cbs.remove(cb)
                learn.cbs.insert(min(before.index(cb), len(learn.cbs)), cb)
