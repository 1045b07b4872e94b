"""Where finite values part ways: rounding that takes the signal, in closed form, and what is no drift."""

from __future__ import annotations

from typing import Any

import faults
import pytest
import torch
from torch import Tensor, nn

from autoprec.evidence import Drift
from autoprec.observe.drift import find_drift
from autoprec.observe.gradients import replay_of
from autoprec.precision import Setting, computing

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def drift(model: nn.Module, x: Tensor, precision: Any = "fp16", limit: float = 0.05, loss: Any = faults.total) -> Drift:
    learn = faults.learner(model, loss)
    with computing(learn, Setting(precision)):
        return find_drift(replay_of(learn, ((x,), (torch.zeros(1),)), loss_fp32=False), precision, limit)


class Angles(nn.Module):
    """Sums x with a zero of a linear layer, then takes the sine on a marked line."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = faults.constant(nn.Linear(1, 1), 1.0), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head(h.sin())


def rounding_error(x: Tensor, precision: str) -> float:
    """Root mean square of what rounding changes, over the deviation of what is rounded; in float64."""
    exact = x.double()
    change = exact.to(DTYPES[precision]).double() - exact
    return float(change.square().mean().sqrt() / (exact - exact.mean(0)).square().mean().sqrt())


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("offset", [0.0, 300.0, 3000.0])
def test_error_is_that_of_rounding(precision: str, offset: float) -> None:
    x = offset + 6 * torch.rand(64, 1, generator=torch.Generator().manual_seed(0))
    wanted = rounding_error(x, precision)
    found = drift(Angles(), x, precision, limit=wanted * 0.99)
    assert found.op == "aten.addmm"
    assert found.place is not None
    assert found.place.module == "first"
    assert found.place.source == "h = self.first(x)"
    assert found.error == pytest.approx(wanted, rel=1e-4)
    assert found.size == pytest.approx(float(x.mean()), rel=1e-5)
    assert found.variation == pytest.approx(float(x.double().std(correction=0)), rel=1e-4)
    assert found.largest >= found.error
    # Just above it the op passes, and what it led to is found or nothing is.
    above = drift(Angles(), x, precision, limit=wanted * 1.01)
    assert above.op != "aten.addmm"


def test_uniform_rounding_has_its_known_size() -> None:
    # Between 2048 and 4096 half's numbers are 2 apart: the error is uniform on [-1, 1], its root mean square 1/sqrt(3);
    # values uniform over 6 deviate by 6/sqrt(12). The ratio is 1/3.
    x = 3000 + 6 * (torch.arange(64.0)[:, None] + 0.5) / 64
    assert drift(Angles(), x, limit=0.3).error == pytest.approx(1 / 3, rel=0.05)


def test_healthy_model_has_none() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    found = drift(model, torch.randn(32, 8), limit=0.02)
    assert (found.place, found.op, found.error) == (None, None, None)
    assert 0 < found.largest < 0.02
    assert found.ops_compared >= 4  # two linear layers, the norm, the relu


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_constant_has_no_signal_to_lose(precision: str) -> None:
    # 3001 rounds to 3000 or 3008: a large difference, and the same for every sample.
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = faults.constant(nn.Linear(1, 1), 0.0)
            with torch.no_grad():
                self.first.bias.fill_(3001.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x)

    found = drift(Constant(), torch.rand(16, 1), precision, limit=0.01)
    assert found.place is None
    assert found.largest < 0.01


def test_what_is_the_same_for_every_sample_is_no_drift() -> None:
    # One table for all samples, added by broadcasting: its own rounding is no difference between samples.
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.first = nn.Parameter(3000 + torch.rand(1, 4)), faults.constant(nn.Linear(4, 4), 0.0)

        def forward(self, x: Tensor) -> Tensor:
            return (self.first(x) + self.table.expand(len(x), 4)).mul(1e-3)

    assert drift(Table(), torch.rand(16, 4), limit=0.01).place is None


def test_non_finite_values_are_no_drift_of_nan() -> None:
    # An overflow is found as an origin; the drift stays a number.
    found = drift(faults.CallsLinear(), faults.ones(4, 2, value=100.0) * torch.arange(4.0)[:, None], limit=0.5)
    assert found.largest == found.largest  # not NaN


def test_rounding_inside_the_loss_is_placed_there() -> None:
    def product(pred: Tensor, _target: Tensor) -> Tensor:
        return (pred @ torch.ones(1, 1)).mean()

    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.unused.weight.detach().sign().abs()

    x = 3000 + 6 * torch.rand(64, 1, generator=torch.Generator().manual_seed(0))
    found = drift(Passes(), x, loss=product)
    assert found.place is not None
    assert (found.place.module, found.place.function, found.op) == (None, "product", "aten.mm")
    assert found.error == pytest.approx(rounding_error(x, "fp16"), rel=1e-4)
