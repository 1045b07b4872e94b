"""Small questions to tensors, with the answers known."""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from autoprec.observe.tensors import all_finite, floating, largest, nonfinite_names, tensors, total_norm

ONE, TWO, THREE = torch.ones(1), torch.full((2,), 2.0), torch.full((3,), 3.0)
INF, NAN = math.inf, math.nan
Pair = namedtuple("Pair", "a b")


@dataclass
class Output:
    logits: Any
    rest: Any = None


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (ONE, [ONE]),
        ([ONE, (TWO, [THREE])], [ONE, TWO, THREE]),
        ({"a": ONE, "b": {"c": TWO}}, [ONE, TWO]),
        (OrderedDict(a=ONE), [ONE]),
        (Pair(ONE, TWO), [ONE, TWO]),
        (Output(ONE, {"x": [TWO, None, "text", 3]}), [ONE, TWO]),
        (Output, []),
        (None, []),
        ("text", []),
        (3.0, []),
    ],
)
def test_tensors_finds_each_in_order(value: Any, found: list[torch.Tensor]) -> None:
    assert [id(t) for t in tensors(value)] == [id(t) for t in found]


def test_floating_leaves_out_whole_numbers_and_nothing() -> None:
    grown = torch.ones(2, requires_grad=True)
    found = floating([torch.arange(3), torch.zeros(0), torch.ones(2) > 0, grown, torch.ones(1).half()])
    assert [t.dtype for t in found] == [torch.float32, torch.float16]
    assert not found[0].requires_grad


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_finite_sees_infinity_and_nan(bad: float, dtype: torch.dtype) -> None:
    good = torch.full((3,), 6e4, dtype=dtype)
    assert all_finite([good, {"a": torch.arange(3)}])
    assert not all_finite([good, {"a": torch.tensor([1.0, bad], dtype=dtype)}])


def test_a_tensor_without_elements_has_no_size() -> None:
    assert largest([torch.ones(0), ONE]) == 1.0
    assert largest([torch.ones(0)]) == 0.0
    assert total_norm([torch.ones(0), TWO]) == pytest.approx(math.sqrt(8))


def test_nonfinite_names_are_in_order_and_few() -> None:
    named = [(str(i), torch.tensor([INF if i % 2 else 1.0])) for i in range(10)]
    named += [("none", None), ("whole", torch.arange(2))]
    assert nonfinite_names(named) == ("1", "3", "5", "7", "9")
    assert nonfinite_names(named, 2) == ("1", "3")
    assert nonfinite_names([]) == ()


@pytest.mark.parametrize(
    ("values", "peak", "norm"),
    [
        ([], 0.0, 0.0),
        ([torch.zeros(3)], 0.0, 0.0),
        ([torch.tensor([3.0]), torch.tensor([-4.0])], 4.0, 5.0),
        ([torch.tensor([3.0, NAN])], NAN, NAN),
        ([torch.tensor([3.0]), torch.tensor([-INF])], INF, INF),
        # The square of 3e30 is no float32; the norm is.
        ([torch.tensor([3e30]), torch.tensor([4e30])], 4e30, 5e30),
        # Nor is the square of 400 a float16.
        ([torch.tensor([300.0, 400.0]).half()], 400.0, 500.0),
    ],
)
def test_largest_and_total_norm(values: list[torch.Tensor], peak: float, norm: float) -> None:
    assert largest(values) == pytest.approx(peak, nan_ok=True)
    assert total_norm(values) == pytest.approx(norm, rel=1e-6, nan_ok=True)


def test_total_norm_is_that_of_float64() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(5, 7) * 10**k for k in range(-3, 4)]
    exact = math.sqrt(sum(float(p.double().square().sum()) for p in parts))
    assert total_norm(parts) == pytest.approx(exact, rel=1e-6)
