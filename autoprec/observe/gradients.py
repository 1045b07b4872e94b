"""Gradients in 16 bits beside fp32: which loss scales work, and what is lost at one of them.

Both measure kept training batches from the weights as they are, without stepping and without touching `.grad`.
`search_scale` costs one forward and about six backward passes per batch; `fidelity` two of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from autoprec.evidence import Fidelity, Headroom, Hidden, ModuleHeadroom, ParameterFidelity, Precision, ScaleSearch
from autoprec.observe.origin import Replay, trace, watch
from autoprec.observe.tensors import all_finite, floating, largest

if TYPE_CHECKING:
    from fastai.learner import Learner

    from autoprec.precision import Setting

__all__ = ["Batch", "fidelity", "find_hidden", "measure_headroom", "replay_of", "search_scale"]

Batch = tuple[tuple[Any, ...], tuple[Any, ...]]

_FLUSHED = -25
"""Exponent at and below which a magnitude rounds to zero in half (its smallest number is 2**-24)."""

_HIGHEST, _LOWEST = 24, -14
"""Exponents of the scales tried: fastai's own ceiling for dynamic scales, and half's smallest normal number."""


def replay_of(learn: Learner, batch: Batch, *, loss_fp32: bool) -> Replay:
    """A kept batch as a replay, from the learner's present state."""
    learn.xb, learn.yb, learn.pred = batch[0], batch[1], None
    return Replay.capture(learn, loss_fp32=loss_fp32)


def _loss(replay: Replay, precision: Precision) -> Tensor:
    with replay.precision(precision):
        return replay.loss(replay.predict())


def _gradients(loss: Tensor, params: list[Tensor], scale: float, *, retain: bool) -> list[Tensor | None]:
    # Not autograd.grad: a reentrant checkpoint allows only backward().
    kept = [p.grad for p in params]
    for p in params:
        p.grad = None
    try:
        (loss * scale).backward(retain_graph=retain)
        return [p.grad for p in params]
    finally:
        for p, grad in zip(params, kept, strict=True):
            p.grad = grad


def search_scale(learn: Learner, batches: Sequence[Batch], setting: Setting, flushed_share: float) -> ScaleSearch:
    """Find the window of loss scales that neither overflow nor flush the gradients of the batches.

    Args:
        learn: the learner, in training mode, with its loss function.
        batches: (inputs, targets) pairs as the model got them.
        setting: precision (with a loss scale: fp16) and what of it the loss needs.
        flushed_share: share of a parameter's gradient that may become zero.

    Returns:
        The search: the upper end by bisection over every batch, the lower one predicted from the first batch's fp32
        gradients. `largest_finite` is None where even 2**-14 overflows (or the loss itself is not finite).
    """
    params = [p for p in learn.model.parameters() if p.requires_grad]
    best: int | None = _HIGHEST
    origin = lower = None
    for i, batch in enumerate(batches):
        replay = replay_of(learn, batch, loss_fp32=setting.loss_fp32)
        if i == 0:
            lower = _smallest_unflushed(replay, params, flushed_share)
        with replay.again():
            best = _bisect(_loss(replay, setting.precision), params, best)
        if best is None:
            origin = trace(replay, setting.precision, scale=2.0**_LOWEST)
            break
    return ScaleSearch(
        largest_finite=None if best is None else 2.0**best,
        smallest_tried=2.0**_LOWEST,
        batches=len(batches),
        smallest_unflushed=lower,
        origin=origin,
    )


def _smallest_unflushed(replay: Replay, params: list[Tensor], share: float) -> float | None:
    """From the fp32 gradients: an element times the scale below 2**-25 rounds to zero in half."""
    with replay.again():
        gradients = [g for g in _gradients(_loss(replay, "fp32"), params, 1.0, retain=False) if g is not None]
    for exponent in range(_LOWEST, _HIGHEST + 1):
        limit = 2.0 ** (_FLUSHED - exponent)
        if all(_share_below(g, limit) <= share for g in gradients):
            return 2.0**exponent
    return None


def _share_below(gradient: Tensor, limit: float) -> float:
    size = gradient.abs().double()
    return float(((size <= limit) & (size > 0)).sum()) / max(1, size.numel())


def _bisect(loss: Tensor, params: list[Tensor], ceiling: int | None) -> int | None:
    if ceiling is None or not all_finite(loss):
        return None
    if not loss.requires_grad:
        return ceiling

    def finite(exponent: int) -> bool:
        return all_finite([g for g in _gradients(loss, params, 2.0**exponent, retain=True) if g is not None])

    low, high = _LOWEST, ceiling
    if finite(high):
        return high
    if not finite(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if finite(middle) else (low, middle)
    return low


def find_hidden(learn: Learner, batches: Sequence[Batch], setting: Setting) -> Hidden:
    """Look for a non-finite value that was made and absorbed, in the forward pass and the loss of kept batches.

    Costs two instrumented forward passes per batch, more only where something is found.
    """
    for batch in batches:
        origin = trace(replay_of(learn, batch, loss_fp32=setting.loss_fp32), setting.precision, only_in_16=True)
        if origin is not None:
            return Hidden(batches=len(batches), origin=origin)
    return Hidden(batches=len(batches))


def fidelity(learn: Learner, batch: Batch, setting: Setting, scale: float) -> Fidelity:
    """Compare each parameter's gradient in 16 bits (loss times `scale`, divided out again) with fp32's.

    A parameter without gradient in either is left out. NaN in a 16-bit gradient gives NaN figures.
    """
    named = [(n, p) for n, p in learn.model.named_parameters() if p.requires_grad]
    params = [p for _, p in named]
    replay = replay_of(learn, batch, loss_fp32=setting.loss_fp32)
    with replay.again():
        loss16 = _loss(replay, setting.precision)
        g16 = _gradients(loss16, params, scale, retain=False)
    with replay.again():
        loss32 = _loss(replay, "fp32")
        g32 = _gradients(loss32, params, 1.0, retain=False)
    rows = [
        _compare(name, a.double() / scale, b.double())
        for (name, _), a, b in zip(named, g16, g32, strict=True)
        if a is not None and b is not None
    ]
    return Fidelity(scale=scale, parameters=tuple(rows), loss_16=float(loss16.detach()), loss_32=float(loss32.detach()))


def _compare(name: str, a: Tensor, b: Tensor) -> ParameterFidelity:
    """`a` in 16 bits, `b` in fp32, both in float64."""
    size_a, size_b = float(a.norm()), float(b.norm())
    flushed = float(((a == 0) & (b != 0)).sum()) / a.numel() if a.numel() else 0.0
    cosine = float((a * b).sum()) / (size_a * size_b) if size_a and size_b else float(size_a == size_b)
    error = float((a - b).norm()) / size_b if size_b else math.nan
    return ParameterFidelity(name=name, flushed=flushed, cosine=cosine, relative_error=error)


def measure_headroom(learn: Learner, batch: Batch, scale: float) -> Headroom:
    """How far each module's values and scaled gradients stay below 65504, on fp32 values of one batch.

    Costs one instrumented forward and backward pass.
    """
    peaks: dict[tuple[str, str], float] = {}

    def note(seen: Any, out: Any) -> None:
        found = floating(out)
        if found:
            name = seen.place.module if seen.place.module is not None else "(loss)"
            key = ("backward" if seen.phase == "backward" else "forward", name)
            peaks[key] = max(peaks.get(key, 0.0), largest(found))

    watch(replay_of(learn, batch, loss_fp32=False), "fp32", scale, None, note)
    names = dict.fromkeys(name for _, name in peaks)
    rows = [
        ModuleHeadroom(name=n, forward=_room(peaks.get(("forward", n))), backward=_room(peaks.get(("backward", n))))
        for n in names
    ]
    rows.sort(key=lambda r: min(v for v in (r.forward, r.backward, math.inf) if v is not None))
    return Headroom(scale=scale, modules=tuple(rows))


def _room(peak: float | None) -> float | None:
    if peak is None or math.isnan(peak):
        return None
    return math.inf if peak == 0 else math.log2(65504 / peak) if math.isfinite(peak) else -math.inf
