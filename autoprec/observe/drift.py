"""Where 16 bits and fp32 part ways although every value is finite.

The same batch, from the same state, is computed in fp32 and in 16 bits; op by op the outputs are compared. The
difference is measured against how much the fp32 value *varies* from sample to sample, not against its size: 3001
rounded to 3000 is a relative error of 3e-4, and all of the signal where the values are 3000 +- 1.

Costs two instrumented forward passes; keeps at most 64 x 64 elements per op.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from autoprec.evidence import Drift, ModuleDrift, Precision
from autoprec.observe.origin import Replay, watch
from autoprec.observe.tensors import floating

__all__ = ["find_drift"]

_KEPT = 64
_MODULES = 64
_LEAST_VARIATION = 1e-12
"""Relative to its size: a constant has no signal to lose."""


def _sample(out: Any) -> Tensor | None:
    """At most 64 x 64 elements of an output in float64, its first axis (of a batch: the samples) kept as rows."""
    found = floating(out)
    if not found or found[0].numel() < 2:
        return None
    t = found[0]
    rows = t.reshape(len(t), -1) if t.ndim > 1 and len(t) > 1 else t.reshape(-1, 1)
    return rows[:: max(1, rows.shape[0] // _KEPT), :: max(1, rows.shape[1] // _KEPT)][:_KEPT, :_KEPT].double()


def _variation(reference: Tensor) -> float:
    """Root mean square deviation from the mean over the samples, each element for itself."""
    return float((reference - reference.mean(0, keepdim=True)).square().mean().sqrt())


def find_drift(replay: Replay, precision: Precision, limit: float) -> Drift:
    """Find the first op whose output differs from fp32's by more than `limit` of its variation.

    Args:
        replay: the batch and the state before it.
        precision: "fp16" or "bf16".
        limit: root mean square of the difference over the fp32 value's standard deviation.

    Returns:
        The drift: its place is None if no op passes the limit; `largest` says how far the worst one went.
    """
    exact = {key: (seen, sample) for key, seen, sample in _outputs(replay, "fp32")}
    first: tuple[Any, float, Tensor] | None = None
    worst: dict[str, float] = {}
    # A rounding that follows an op under emulation has the op's own key: the last sighting counts.
    rounded = {key: sample for key, _, sample in _outputs(replay, precision)}
    watched = 0
    for key, sample in rounded.items():
        if key not in exact or exact[key][1].shape != sample.shape:
            continue
        watched += 1
        seen, reference = exact[key]
        error = _error(sample, reference)
        module = "(loss)" if seen.phase == "loss" else seen.place.module or ""
        worst[module] = max(worst.get(module, 0.0), error)
        if error > limit and first is None:
            first = (seen, error, reference)
    largest = max(worst.values(), default=0.0)
    ranked = sorted(worst.items(), key=lambda item: -item[1])[:_MODULES]
    modules = tuple(ModuleDrift(name=name, error=error) for name, error in ranked)
    if first is None:
        return Drift(largest=largest, ops_compared=watched, modules=modules)
    seen, error, reference = first
    return Drift(
        place=seen.place,
        op=seen.op,
        error=error,
        size=float(reference.abs().mean()),
        variation=_variation(reference),
        largest=largest,
        ops_compared=watched,
        modules=modules,
    )


def _error(sample: Tensor, reference: Tensor) -> float:
    variation = _variation(reference)
    if not variation > _LEAST_VARIATION * max(float(reference.abs().max()), 1e-300):
        return 0.0
    error = float((sample - reference).square().mean().sqrt()) / variation
    return 0.0 if math.isnan(error) else error


def _outputs(replay: Replay, precision: Precision) -> list[tuple[Any, Any, Tensor]]:
    found: list[tuple[Any, Any, Tensor]] = []

    def note(seen: Any, out: Any) -> None:
        sample = _sample(out)
        if sample is not None:
            found.append((seen.key, seen.without_tensors(), sample))

    with torch.no_grad():
        watch(replay, precision, None, None, note)
    return found
