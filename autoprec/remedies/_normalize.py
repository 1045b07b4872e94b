"""The batch transform of `normalize_inputs` for loaders of plain tensors.

It must survive `learn.export()` where autoprec is not installed: cloudpickle, with which fastai exports, stores a
nested function by value. So the transform is one, and reads nothing of this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["batch_normalizer", "batch_transform"]


def batch_normalizer(mean: Tensor, std: Tensor, before: Callable[..., Any]) -> Callable[..., Any]:
    """A loader's `after_batch` that normalizes the first floating input after what the loader did `before`.

    Args:
        mean: per column or channel, `[C]` in any shape.
        std: likewise.
        before: the loader's own `after_batch`.
    """
    # A bound no-op of the loader's class would drag the whole loader along into the export.
    inner = before if before is not _whole and not _is_noop(before) else None

    def normalized(x: Any) -> Any:
        shape = [1] * x.ndim
        if x.ndim > 1:
            shape[1] = -1
        m, s = (t.to(x.device).double().view(shape) for t in (mean, std))
        return ((x.double() - m) / s).to(x.dtype)

    def floating(x: Any) -> bool:
        return hasattr(x, "is_floating_point") and bool(x.is_floating_point())

    def after_batch(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if inner is not None:
            batch = inner(batch, *args, **kwargs)
        if floating(batch):  # inputs alone, as in a test loader
            return normalized(batch)
        first = next((i for i, x in enumerate(batch) if floating(x)), None)
        return type(batch)([normalized(x) if i == first else x for i, x in enumerate(batch)])

    return after_batch


def _whole(batch: Any) -> Any:
    """Stands for a loader that did nothing."""
    return batch


def batch_transform(mean: Tensor, std: Tensor) -> Any:
    """The same as a transform for the pipeline of a `TfmdDL`, so that `dl.new` and `test_dl` keep it.

    A pipeline hands a plain function one element of the batch after the other; an `ItemTransform` gets the batch.
    """
    from fasttransform import ItemTransform

    normalize = batch_normalizer(mean, std, _whole)

    class NormalizeFirst(ItemTransform):
        order = 99  # fastai's Normalize: after augmentation

        def encodes(self, batch):  # type: ignore[no-untyped-def]  # it dispatches on annotations
            return normalize(batch)

    return NormalizeFirst()


def _is_noop(function: Callable[..., Any]) -> bool:
    from fastai.data.load import DataLoader

    return getattr(function, "__func__", None) is DataLoader.after_batch
