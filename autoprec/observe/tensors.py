"""Small questions to tensors and nested containers of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

__all__ = ["all_finite", "floating", "largest", "nonfinite_names", "tensors", "total_norm"]


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in `value`, through lists, tuples, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from tensors(getattr(value, f.name))


def floating(value: Any) -> list[Tensor]:
    """The floating-point tensors in `value`, detached."""
    return [t.detach() for t in tensors(value) if t.is_floating_point() and t.numel()]


def all_finite(value: Any) -> bool:
    """Whether no floating tensor in `value` holds NaN or infinity (one host read)."""
    found = floating(value)
    return all(bool(torch.isfinite(t).all()) for t in found)


def nonfinite_names(named: Iterable[tuple[str, Tensor | None]], limit: int = 8) -> tuple[str, ...]:
    """Names of the floating tensors that hold NaN or infinity, at most `limit`."""
    names: list[str] = []
    for name, t in named:
        if t is not None and t.is_floating_point() and not all_finite(t):
            names.append(name)
            if len(names) == limit:
                break
    return tuple(names)


def largest(ts: list[Tensor]) -> float:
    """Largest magnitude over the tensors, NaN if any holds one, 0.0 if there are none."""
    ts = [t for t in ts if t.numel()]  # torch knows no infinity norm of an empty tensor, as of a norm over no columns
    if not ts:
        return 0.0
    return float(get_total_norm(ts, norm_type=math.inf, error_if_nonfinite=False))


def total_norm(ts: list[Tensor]) -> float:
    """L2 norm over all tensors together. NaN or infinity only if an element is, not from squaring a large one."""
    peak = largest(ts)
    if peak == 0.0 or not math.isfinite(peak):
        return peak
    norm = float(get_total_norm(ts, error_if_nonfinite=False))
    if math.isfinite(norm):
        return norm
    return peak * float(get_total_norm([t.float() / peak for t in ts], error_if_nonfinite=False))
