"""Ranges of inputs and targets beside numpy's in float64, and what is said of labels."""

from __future__ import annotations

import math
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fastai's own imports
    from fastai.losses import BCEWithLogitsLossFlat, CrossEntropyLossFlat, LabelSmoothingCrossEntropy, MSELossFlat
    from fastai.torch_core import TensorImage

from autoprec.evidence import DataSample, Feature, Target
from autoprec.observe.data import DataCollector, ignore_index, is_class_loss

NAN, INF = math.nan, math.inf


def collected(*batches: Any, limit: int = 100, names: tuple[str, ...] = ()) -> DataSample:
    """What is said of inputs, each batch a tensor or a tuple of them."""
    collector = DataCollector(limit, names)
    for xb in batches:
        collector.inputs(xb if isinstance(xb, tuple) else (xb,))
    return collector.sample()


def targets(*batches: tuple[Any, Any], loss: Any, limit: int = 100) -> tuple[DataSample, list[str | None]]:
    """What is said of (prediction, target) pairs, and which batches are refused."""
    collector, refused = DataCollector(limit), []
    for pred, target in batches:
        collector.inputs((torch.zeros(1),))
        yb = target if isinstance(target, tuple) else (target,)
        refused.append(collector.targets(SimpleNamespace(pred=pred, yb=yb, loss_func=loss)))  # type: ignore[arg-type]
    return collector.sample(), refused


def beside_numpy(feature: Feature, x: np.ndarray) -> None:
    """`x` is [samples, values]; all of it finite."""
    assert feature.min == x.min()
    assert feature.max == x.max()
    assert feature.mean == pytest.approx(x.mean(), rel=1e-12)
    assert feature.std == pytest.approx(x.std(), rel=1e-9)
    assert feature.nonfinite == 0
    size = np.sqrt((x**2).mean(1))
    assert feature.typical == pytest.approx(np.quantile(size, 0.5, method="higher"), rel=1e-12)


def batches_of(*shape: int, count: int = 3, scale: float = 1.0, offset: float = 0.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) * scale + offset for _ in range(count)]


def as_numpy(batches: list[Tensor]) -> np.ndarray:
    return np.concatenate([b.double().numpy() for b in batches])


@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (1e-6, 0.0), (1e6, -5e6), (30.0, 1e5)])
def test_columns_are_those_of_numpy(scale: float, offset: float) -> None:
    batches = batches_of(5, 3, scale=scale, offset=offset)
    found = collected(*batches, names=("age", "income", "time"))
    assert [f.name for f in found.features] == ["column 'age'", "column 'income'", "column 'time'"]
    for j, feature in enumerate(found.features):
        beside_numpy(feature, as_numpy(batches)[:, j : j + 1])
    assert found.batches == 3
    assert found.batch_sizes == (5,)


def test_columns_without_names_have_numbers() -> None:
    assert [f.name for f in collected(torch.zeros(2, 2)).features] == ["input, column 0", "input, column 1"]
    # The names are of another tensor.
    assert [f.name for f in collected(torch.zeros(2, 2), names=("a", "b", "c")).features] == [
        "input, column 0",
        "input, column 1",
    ]
    # A tabular batch: categories as whole numbers first, then the named columns.
    found = collected((torch.zeros(2, 4, dtype=torch.long), torch.ones(2, 2)), names=("a", "b"))
    assert [f.name for f in found.features] == ["column 'a'", "column 'b'"]
    assert [f.name for f in collected((torch.zeros(2, 1), torch.ones(2, 1))).features] == [
        "input 0, column 0",
        "input 1, column 0",
    ]


def test_names_come_from_the_loaders() -> None:
    dls = SimpleNamespace(train_ds=SimpleNamespace(cont_names=["a", "b"]))
    assert DataCollector.of(SimpleNamespace(dls=dls), 4).names == ("a", "b")  # type: ignore[arg-type]
    assert DataCollector.of(SimpleNamespace(dls=SimpleNamespace()), 4).names == ()  # type: ignore[arg-type]


def test_channels_of_images_are_those_of_numpy() -> None:
    batches = batches_of(3, 2, 4, 5, scale=40.0, offset=120.0)
    found = collected(*[TensorImage(b) for b in batches])
    assert [f.name for f in found.features] == ["input, channel 0", "input, channel 1"]
    for j, feature in enumerate(found.features):
        beside_numpy(feature, as_numpy(batches)[:, j].reshape(9, -1))


@pytest.mark.parametrize("shape", [(5, 4, 3), (5,), (3, 2, 2, 2, 2), (2, 600), (2, 65, 2, 2)])
def test_other_shapes_are_taken_whole(shape: tuple[int, ...]) -> None:
    batches = batches_of(*shape)
    (feature,) = collected(*batches).features
    assert feature.name == "input"
    beside_numpy(feature, as_numpy(batches).reshape(3 * shape[0], -1))


def test_deviation_of_a_timestamp_is_not_lost() -> None:
    # 1.6e9 +- 1 s: the squares are 2.6e18, of which float64 holds 16 digits.
    exact = np.array([[1.6e9 + k % 3 - 1] for k in range(300)])
    batches = [torch.tensor(exact[k : k + 100]) for k in range(0, 300, 100)]
    (feature,) = collected(*batches).features
    assert feature.std == pytest.approx(math.sqrt(2 / 3), rel=1e-9)
    assert feature.integer_like
    beside_numpy(feature, exact)


@pytest.mark.parametrize("value", [0.1, 1e9, -7.0, 0.0])
def test_constant_column_has_no_deviation(value: float) -> None:
    (feature,) = collected(*[torch.full((7, 1), value)] * 3).features
    assert feature.std == 0.0
    assert feature.min == feature.max == feature.mean == torch.tensor(value).double().item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_input_in_any_floating_type(dtype: torch.dtype) -> None:
    # The square of 300 is no float16: it is taken in float64.
    (feature,) = collected(torch.tensor([[300.0], [-300.0]], dtype=dtype)).features
    assert (feature.typical, feature.std, feature.max) == (300.0, 300.0, 300.0)


def test_typical_size_is_the_median_of_the_samples() -> None:
    # One sample of 1e6 among seven of 3 and 4: the mean square is 3.5e5, the median root mean square 5/sqrt(2).
    x = torch.tensor([[3.0, 4.0]] * 7 + [[1e6, 1e6]])[:, None]
    (feature,) = collected(x[:5], x[5:]).features
    assert feature.typical == pytest.approx(math.sqrt(12.5), rel=1e-12)
    assert feature.max == 1e6


def test_integer_like() -> None:
    x = torch.tensor([[1.0, 1.5, -2.0, NAN], [3.0, 2.0, 0.0, 4.0]])
    assert [f.integer_like for f in collected(x).features] == [True, False, True, True]
    assert not collected(torch.full((2, 1), NAN)).features[0].integer_like


def test_nonfinite_rows_by_batch_and_row() -> None:
    first, second, third = torch.zeros(4, 2), torch.zeros(4, 2), torch.zeros(4, 2)
    first[2, 1] = NAN
    third[0, 0], third[3, 0], third[3, 1] = INF, -INF, NAN
    found = collected(first, second, third)
    assert found.nonfinite_rows == ((0, 2), (2, 0), (2, 3))
    assert [f.nonfinite for f in found.features] == [2, 2]
    assert [(f.min, f.max, f.mean, f.std) for f in found.features] == [(0.0, 0.0, 0.0, 0.0)] * 2
    (image,) = collected(torch.tensor([[[[0.0, NAN]]], [[[0.0, 1.0]]]])).features
    assert (image.nonfinite, image.max) == (1, 1.0)


def test_column_of_nothing_but_nan() -> None:
    (feature,) = collected(torch.full((3, 1), NAN), torch.full((2, 1), INF)).features
    assert feature.nonfinite == 5
    assert all(math.isnan(v) for v in (feature.min, feature.max, feature.mean, feature.std))


def test_rows_that_are_listed_are_few() -> None:
    found = collected(*[torch.full((10, 1), NAN)] * 3)
    assert len(found.nonfinite_rows) == 16
    assert found.nonfinite_rows[-1] == (1, 5)
    assert found.features[0].nonfinite == 30


def test_batches_past_the_limit_are_let_through() -> None:
    found = collected(torch.zeros(4, 1), torch.zeros(3, 1), torch.full((2, 1), NAN), limit=2)
    assert found.batches == 2
    assert found.batch_sizes == (3, 4)
    assert (found.features[0].nonfinite, found.nonfinite_rows) == (0, ())


def test_inputs_that_are_no_floating_tensor() -> None:
    found = collected((torch.arange(6).reshape(3, 2), torch.ones(3) > 0))
    assert (found.features, found.batches, found.batch_sizes) == ((), 1, (3,))
    (scalar,) = collected(torch.tensor(3.0)).features
    assert (scalar.mean, scalar.typical) == (3.0, 3.0)


# ---- targets --------------------------------------------------------------------------------------------------

PRED = torch.zeros(4, 3)


def one(sample: DataSample) -> Target:
    (target,) = sample.targets
    return target


def labels(*values: int) -> Tensor:
    return torch.tensor(values)


CLASS_LOSSES = {
    "fastai": CrossEntropyLossFlat(),
    "module": nn.CrossEntropyLoss(),
    "nll": nn.NLLLoss(),
    "function": F.cross_entropy,
    "partial": partial(F.nll_loss, reduction="mean"),
    "smoothed": LabelSmoothingCrossEntropy(),
}


class MyCrossEntropy(nn.Module):
    """A user's own, in which -1 means padding."""

    ignore_index = -1


def my_cross_entropy(pred: Tensor, target: Tensor) -> Tensor:
    return pred.mean()


@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_labels_in_range(name: str) -> None:
    found, refused = targets((PRED, labels(0, 1, 2, 2)), (PRED, labels(1, 1, -100, 2)), loss=CLASS_LOSSES[name])
    assert refused == [None, None]
    target = one(found)
    assert (target.out_of_range, target.classes, target.dtype, target.name) == (0, 3, "int64", "target")
    assert (target.min, target.max) == (-100.0, 2.0)
    assert target.all_ignored_batches == ()


@pytest.mark.parametrize("name", CLASS_LOSSES)
@pytest.mark.parametrize(("bad", "count"), [((0, 3, 1, 1), 1), ((-1, 0, 7, 1), 2)])
def test_labels_out_of_range_are_refused(name: str, bad: tuple[int, ...], count: int) -> None:
    found, refused = targets((PRED, labels(0, 1, 2, 2)), (PRED, labels(*bad)), loss=CLASS_LOSSES[name])
    assert refused == [None, "target"]
    assert one(found).out_of_range == count
    assert (one(found).min, one(found).max) == (min(0, *bad), max(2, *bad))


def test_labels_past_the_limit_are_refused_too() -> None:
    batches = [(PRED, labels(0, 1, 2, 2))] * 3 + [(PRED, labels(3, 1, 1, 1))]
    found, refused = targets(*batches, loss=CrossEntropyLossFlat(), limit=2)
    assert refused == [None, None, None, "target"]
    assert found.batches == 2
    assert one(found).out_of_range == 1


@pytest.mark.parametrize("ignore", [-100, 255, 0])
def test_ignored_labels(ignore: int) -> None:
    loss = CrossEntropyLossFlat(ignore_index=ignore)
    every, some = torch.full((4,), ignore), torch.tensor([ignore, 1, 2, ignore])
    found, refused = targets((PRED, some), (PRED, every), (PRED, some), (PRED, every), loss=loss)
    assert refused == [None] * 4
    assert one(found).all_ignored_batches == (1, 3)
    assert one(found).out_of_range == 0


def test_ignored_batches_past_the_limit_keep_their_number() -> None:
    every, some = torch.full((4,), -100), labels(0, 1, 2, 2)
    found, _ = targets(
        *[(PRED, y) for y in (some, some, some, every, some, every)], loss=CrossEntropyLossFlat(), limit=2
    )
    assert one(found).all_ignored_batches == (3, 5)


def test_dense_labels_have_no_certain_number_of_classes() -> None:
    # [N, C, H, W] or [N, L, C]: nobody knows which axis the classes are on.
    found, refused = targets((torch.zeros(2, 3, 4, 4), torch.full((2, 4, 4), 7)), loss=CrossEntropyLossFlat(axis=1))
    assert refused == [None]
    assert (one(found).classes, one(found).out_of_range) == (None, 0)


def test_several_targets_have_numbers() -> None:
    found, refused = targets((PRED, (labels(0, 1, 2, 9), torch.ones(4))), loss=nn.CrossEntropyLoss())
    assert [t.name for t in found.targets] == ["target 0", "target 1"]
    assert refused == ["target 0"]


@pytest.mark.parametrize("loss", [MSELossFlat(), BCEWithLogitsLossFlat(), MyCrossEntropy(), my_cross_entropy])
def test_whole_numbers_of_other_losses_are_no_labels(loss: Any) -> None:
    found, refused = targets((PRED, labels(-1, 900, 1, 1)), loss=loss)
    assert refused == [None]
    assert (one(found).out_of_range, one(found).min, one(found).max) == (0, -1.0, 900.0)


def test_floating_targets() -> None:
    first, second = torch.tensor([1.0, NAN, 3.0]), torch.tensor([-5.0, INF, -INF])
    past = torch.tensor([1e9, NAN, NAN])
    found, _ = targets((PRED, first), (PRED, second), (PRED, past), loss=MSELossFlat(), limit=2)
    target = one(found)
    assert (target.nonfinite, target.min, target.max, target.dtype) == (3, -5.0, 3.0, "float32")
    assert found.nonfinite_target_rows == ((0, 1), (1, 1), (1, 2))
    empty = one(targets((PRED, torch.full((2,), NAN)), loss=MSELossFlat())[0])
    assert math.isnan(empty.min)
    assert math.isnan(empty.max)


def test_targets_that_are_true_or_false() -> None:
    assert math.isnan(one(targets((PRED, torch.ones(4) > 0), loss=MSELossFlat())[0]).min)


@pytest.mark.parametrize(
    ("loss", "label", "is_class"),
    [
        (nn.CrossEntropyLoss(ignore_index=7), 7, True),
        (CrossEntropyLossFlat(ignore_index=7), 7, True),
        (CrossEntropyLossFlat(), -100, True),
        (partial(F.cross_entropy, ignore_index=7), 7, True),
        (F.nll_loss, -100, True),
        (F.binary_cross_entropy, -100, False),
        (nn.MSELoss(), -100, False),
        (MyCrossEntropy(), -1, False),
        (my_cross_entropy, -100, False),
    ],
)
def test_what_a_loss_reads(loss: Any, label: int, is_class: bool) -> None:
    assert ignore_index(loss) == label
    assert is_class_loss(loss) == is_class
