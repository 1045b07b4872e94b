"""Loss scales and flushed gradients of models whose gradient is known, against half's own limits.

Half's largest number is 65504, and 65520 is the first that rounds to infinity. Its smallest is 2^-24, and 2^-25 is
the last that rounds to zero (a tie goes to the even neighbour).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import faults
import numpy as np
import pytest
import torch
from faults import line_of, ones
from torch import Tensor, nn

from autoprec.evidence import Fidelity, Headroom, ScaleSearch
from autoprec.observe.gradients import Batch, fidelity, measure_headroom, search_scale
from autoprec.precision import Setting, computing

FP16 = Setting("fp16")
NOTHING = torch.zeros(1)


def row(*values: float) -> nn.Linear:
    """One output, no bias: the gradient of its weight is the input times what comes in."""
    layer = nn.Linear(len(values), 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([values]))
    return layer


def times(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss whose gradient in each prediction is `factor`."""
    return lambda pred, _target: pred.float().sum() * factor


def search(
    model: nn.Module, loss: Any, *inputs: Tensor, setting: Setting = FP16, share: float = 0.5
) -> tuple[ScaleSearch, nn.Module]:
    learn = faults.learner(model, loss)
    batches: list[Batch] = [((x,), (NOTHING,)) for x in inputs]
    with computing(learn, setting):
        return search_scale(learn, batches, setting, share), model


@pytest.mark.parametrize(
    ("factor", "x", "largest"),
    [
        # The gradient of the prediction is scale times factor: 2^15 is the last power of two below 65504.
        (1.0, 1.0, 2.0**15),
        (2.0**-6, 1.0, 2.0**21),
        # 65519 rounds down to 65504, and 65520 up to infinity.
        (65519 / 65536, 1.0, 2.0**16),
        (65520 / 65536, 1.0, 2.0**15),
        # The gradient of the weight is x times that.
        (1.0, 8.0, 2.0**12),
        # ... after x itself was rounded: 7.998 to 65504 / 2^13, and a little more to 8.
        (1.0, 65519 / 2**13, 2.0**13),
        (1.0, 65520 / 2**13, 2.0**12),
        # The ends of the search.
        (2.0**-9, 1.0, 2.0**24),
        (2.0**-30, 1.0, 2.0**24),
        (2.0**29, 1.0, 2.0**-14),
        (2.0**30, 1.0, None),
    ],
)
def test_largest_finite_scale_is_where_half_ends(factor: float, x: float, largest: float | None) -> None:
    found, model = search(row(1.0), times(factor), ones(1, 1, value=x))
    assert found.largest_finite == largest
    assert found.smallest_tried == 2.0**-14
    assert found.batches == 1
    assert (found.origin is None) == (largest is not None)
    if found.origin is not None:
        assert found.origin.phase == "backward"
    assert all(p.grad is None for p in model.parameters())


def test_the_worst_batch_decides() -> None:
    small, large = ones(1, 1), ones(1, 1, value=64.0)
    for batches in ((small, large), (large, small)):
        found, _ = search(row(1.0), times(1.0), *batches)
        assert found.largest_finite == 2.0**9  # 64 x 2^10 is 65536
        assert found.batches == 2


def test_loss_that_is_not_finite_works_at_no_scale() -> None:
    found, _ = search(faults.CallsLinear(), faults.total, ones(1, 2, value=100.0))
    assert found.largest_finite is None
    assert found.origin is not None
    assert found.origin.phase == "forward"
    assert found.origin.place.line == line_of("calls_linear")


def test_overflow_in_the_backward_is_named_at_the_smallest_scale() -> None:
    found, _ = search(faults.DividesBy(2.0**-31), lambda p, _: p.float().sum(), ones(1, 2, value=2.0**-30))
    assert found.largest_finite is None
    assert found.origin is not None
    assert found.origin.phase == "backward"
    assert found.origin.place.line == line_of("divides")
    assert found.origin.fp32 is not None
    assert found.origin.fp32.output_max == 2.0**17


def test_bf16_has_the_range_of_fp32() -> None:
    found, _ = search(row(1.0), times(1.0), ones(1, 1), setting=Setting("bf16"))
    assert found.largest_finite == 2.0**24


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_can_be_searched(use_reentrant: bool) -> None:
    x = ones(2, 2).requires_grad_()
    model = faults.Checkpointed(use_reentrant=use_reentrant)
    model.head = nn.Identity()
    found, _ = search(model, times(1.0), x)
    # d(h * h) is 2 h = 2 into the block, summed over two outputs of 0.5 each and two rows.
    assert found.largest_finite == 2.0**13
    learn = faults.learner(model, times(1.0))
    with computing(learn, FP16):
        measured = fidelity(learn, ((x,), (NOTHING,)), FP16, 2.0)
    assert [p.name for p in measured.parameters] == [
        "first.weight",
        "first.bias",
        "block.inner.weight",
        "block.inner.bias",
    ]
    assert all(p.cosine == pytest.approx(1.0) for p in measured.parameters)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("factor", "share", "smallest"),
    [
        # Gradients 2^-20 ... 2^-27 of eight weights. All survive from scale 4 on: 2^-25 itself becomes zero.
        (2.0**-20, 0.0, 2.0**3),
        (2.0**-20, 1 / 8, 2.0**2),
        (2.0**-20, 7 / 8, 2.0**-4),
        (2.0**-20, 1.0, 2.0**-14),
        (2.0**-60, 0.0, None),
    ],
)
def test_smallest_scale_that_flushes_no_more_than_the_share(
    factor: float, share: float, smallest: float | None
) -> None:
    x = 2.0 ** -torch.arange(8.0)[None]
    found, _ = search(row(*[1.0] * 8), times(factor), x, share=share)
    assert found.smallest_unflushed == smallest


# ---- fidelity -------------------------------------------------------------------------------------------------


def measure(model: nn.Module, loss: Any, x: Tensor, scale: float, setting: Setting = FP16) -> Fidelity:
    learn = faults.learner(model, loss)
    with computing(learn, setting):
        return fidelity(learn, ((x,), (NOTHING,)), setting, scale)


def flushed(gradients: np.ndarray, scale: float) -> float:
    """Share that rounds to zero in half, from its limit alone."""
    size = np.abs(gradients * scale)
    return float(((size <= 2.0**-25) & (size > 0)).mean())


@pytest.mark.parametrize("exponent", range(-6, 10))
def test_share_of_flushed_elements(exponent: int) -> None:
    x = torch.tensor([[2.0**-k * m for k in range(13) for m in (1.0, 1.5)]])
    factor, scale = 2.0**-16, 2.0**exponent
    (found,) = measure(row(*[1.0] * 26), times(factor), x, scale).parameters
    exact = x[0].double().numpy() * factor
    wanted = flushed(exact, scale)
    assert wanted == min(1.0, max(0, 2 * (3 - exponent + 1) - 1 if exponent <= 3 else 0) / 26)
    assert found.flushed == wanted
    assert found.name == "weight"


def test_share_of_flushed_elements_counts_no_zero_that_fp32_has() -> None:
    (found,) = measure(
        row(1.0, 1.0, 1.0, 1.0), times(2.0**-20), torch.tensor([[0.0, 0.0, 1.0, 2.0**-5]]), 1.0
    ).parameters
    assert found.flushed == 0.25


@pytest.mark.parametrize("scale", [2.0**-4, 1.0, 2.0**6])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_cosine_and_error_are_those_of_float64(precision: Any, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 64, generator=generator)
    factor = 3e-6
    (found,) = measure(row(*[0.01] * 64), times(factor), x, scale, Setting(precision)).parameters
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16

    def rounded(t: Tensor) -> Tensor:
        return t.to(dtype).double()

    incoming = rounded(torch.tensor(factor, dtype=torch.float32) * scale)
    low = (rounded(rounded(x) * incoming) / scale).numpy()[0]
    exact = (x.double() * torch.tensor(factor, dtype=torch.float32).double()).numpy()[0]
    cosine = low @ exact / np.linalg.norm(low) / np.linalg.norm(exact)
    error = np.linalg.norm(low - exact) / np.linalg.norm(exact)
    assert found.cosine == pytest.approx(cosine, abs=1e-9)
    assert found.relative_error == pytest.approx(error, rel=1e-4)
    assert error > 1e-5


def test_figures_of_a_gradient_that_is_zero_nan_or_missing() -> None:
    zero = measure(row(1.0), times(0.0), ones(1, 1), 1.0).parameters[0]
    assert (zero.flushed, zero.cosine) == (0.0, 1.0)
    assert math.isnan(zero.relative_error)
    gone = measure(row(1.0), times(2.0**-30), ones(1, 1), 1.0)
    assert (gone.parameters[0].flushed, gone.parameters[0].cosine, gone.parameters[0].relative_error) == (1.0, 0.0, 1.0)
    assert gone.flushed == 1.0
    broken = measure(row(1.0), times(1.0), ones(1, 1), 2.0**17).parameters[0]
    assert not math.isfinite(broken.relative_error)

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = row(1.0), row(1.0), row(1.0)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.used(x))

    assert [p.name for p in measure(Unused(), times(1.0), ones(1, 1), 1.0).parameters] == ["used.weight"]


def test_losses_of_both_precisions() -> None:
    found = measure(row(1.0), times(1.0), ones(1, 1, value=2049.0), 8.0)
    assert (found.loss_16, found.loss_32, found.scale) == (2048.0, 2049.0, 8.0)


def test_gradients_and_state_are_left_alone() -> None:
    model = faults.Stateful()
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    kept = [p.grad for p in model.parameters()]
    learn = faults.learner(model, faults.total)
    batch: Batch = ((ones(4, 2),), (NOTHING,))
    generator = torch.get_rng_state()
    state = {n: t.tolist() for n, t in model.state_dict().items()}
    with computing(learn, FP16):
        search_scale(learn, [batch, batch], FP16, 0.5)
        fidelity(learn, batch, FP16, 8.0)
        measure_headroom(learn, batch, 8.0)
    assert [p.grad for p in model.parameters()] == kept
    assert all(bool((g == 7).all()) for g in kept if g is not None)
    assert {n: t.tolist() for n, t in model.state_dict().items()} == state
    assert torch.equal(torch.get_rng_state(), generator)


# ---- headroom -------------------------------------------------------------------------------------------------


def headroom(model: nn.Module, x: Tensor, scale: float) -> Headroom:
    learn = faults.learner(model, times(1.0))
    with computing(learn, FP16):
        return measure_headroom(learn, ((x,), (NOTHING,)), scale)


def test_doublings_that_remain_below_half() -> None:
    # Values 1024 and 4096; gradients of the prediction 16, of the layers' weights 16 x 1024 and 64 x 1.
    found = headroom(nn.Sequential(row(1024.0), row(4.0)), ones(1, 1), 16.0)
    rooms = {m.name: m for m in found.modules}
    assert rooms["0"].forward == pytest.approx(math.log2(65504 / 1024))
    assert rooms["1"].forward == pytest.approx(math.log2(65504 / 4096))
    assert rooms["1"].backward == pytest.approx(math.log2(65504 / (16 * 1024)))
    assert found.scale == 16.0
    # The tightest first.
    assert found.modules[0].name in ("1", "(loss)")


def test_headroom_of_what_overflows_is_negative() -> None:
    found = headroom(nn.Sequential(row(2.0**17)), ones(1, 1), 1.0)
    assert {m.name: m for m in found.modules}["0"].forward == pytest.approx(math.log2(65504 / 2**17))
