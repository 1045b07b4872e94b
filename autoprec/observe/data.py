"""Inputs and targets of the batches that a leg trains on, as ranges per column or channel.

Measured on what the model and the loss really get (after every transform and callback), in float64, over a
bounded number of batches. Costs one pass over these batches' elements; reads no batch of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoprec.evidence import DataSample, Feature, Target
from autoprec.observe.tensors import tensors

if TYPE_CHECKING:
    from fastai.learner import Learner

__all__ = ["DataCollector", "ignore_index", "is_class_loss"]

_MAX_FEATURES = 512
_MAX_ROWS = 16


@dataclass
class _Running:
    """Streaming range, mean and deviation of one feature."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # of the differences from the mean: seconds since 1970 would lose theirs in a sum of squares
    low: float = math.inf
    high: float = -math.inf
    whole: bool = True
    bad: int = 0
    sizes: list[float] = field(default_factory=list)

    def add(self, x: Tensor) -> None:
        rows = x.reshape(len(x), -1)
        self.sizes += rows.square().mean(1).sqrt().nan_to_num(math.inf).tolist()
        finite = x[torch.isfinite(x)]
        self.bad += x.numel() - finite.numel()
        if not finite.numel():
            return
        n, mean = finite.numel(), float(finite.mean())
        step = mean - self.mean
        self.squares += float((finite - mean).square().sum()) + step * step * self.count * n / (self.count + n)
        self.mean += step * n / (self.count + n)
        self.count += n
        self.low = min(self.low, float(finite.min()))
        self.high = max(self.high, float(finite.max()))
        self.whole = self.whole and bool((finite == finite.round()).all())

    def feature(self, name: str) -> Feature:
        low, high = (self.low, self.high) if self.count else (math.nan, math.nan)
        return Feature(
            name=name,
            typical=sorted(self.sizes)[len(self.sizes) // 2],
            min=low,
            max=high,
            mean=self.mean if self.count else math.nan,
            std=math.sqrt(self.squares / self.count) if self.count else math.nan,
            integer_like=self.whole and self.count > 0,
            nonfinite=self.bad,
        )


@dataclass
class _RunningTarget:
    dtype: str
    low: float = math.inf
    high: float = -math.inf
    bad: int = 0
    ignored: list[int] = field(default_factory=list)
    out_of_range: int = 0
    classes: int | None = None


@dataclass
class DataCollector:
    """Gathers a `DataSample` while a leg runs.

    Class labels are checked in every batch, as one that no class answers to must not reach the loss.

    Args:
        limit: training batches to look at.
        names: column names of a two-dimensional floating input, if the loaders know them.
    """

    limit: int
    names: tuple[str, ...] = ()
    batches: int = 0
    offered: int = 0
    sizes: list[int] = field(default_factory=list)
    bad_rows: list[tuple[int, int]] = field(default_factory=list)
    bad_target_rows: list[tuple[int, int]] = field(default_factory=list)
    _features: dict[str, _Running] = field(default_factory=dict)
    _targets: dict[str, _RunningTarget] = field(default_factory=dict)

    @classmethod
    def of(cls, learn: Learner, limit: int) -> DataCollector:
        """A collector that knows the learner's column names."""
        names = getattr(getattr(learn.dls, "train_ds", None), "cont_names", None) or getattr(
            learn.dls, "cont_names", None
        )
        return cls(limit, tuple(map(str, names or ())))

    def inputs(self, xb: Any) -> None:
        """Look at the inputs of one training batch; batches past the limit are let through."""
        self.offered += 1
        if self.offered > self.limit:
            return
        found = list(tensors(xb))
        self.sizes.append(len(found[0]) if found and found[0].ndim else 1)
        for i, t in enumerate(found):
            if not t.is_floating_point() or not t.numel():
                continue
            x = t.detach().double()
            self._note_rows(x, self.bad_rows, self.offered - 1)
            for name, column in self._columns(x, f"input {i}" if len(found) > 1 else "input"):
                self._features.setdefault(name, _Running()).add(column)
        self.batches += 1

    def _columns(self, x: Tensor, name: str) -> list[tuple[str, Tensor]]:
        if x.ndim == 2 and x.shape[1] <= _MAX_FEATURES:
            names = self.names if len(self.names) == x.shape[1] else ()
            return [(f"column {names[j]!r}" if names else f"{name}, column {j}", x[:, j]) for j in range(x.shape[1])]
        if x.ndim == 4 and x.shape[1] <= 64:
            return [(f"{name}, channel {j}", x[:, j]) for j in range(x.shape[1])]
        return [(name, x if x.ndim else x[None])]

    @staticmethod
    def _note_rows(x: Tensor, rows: list[tuple[int, int]], batch: int) -> None:
        bad = ~torch.isfinite(x)
        if not bool(bad.any()):
            return
        per_row = bad.flatten(1).any(1) if x.ndim > 1 else bad.reshape(-1)
        found = per_row.nonzero().flatten().tolist()[: _MAX_ROWS - len(rows)]
        rows.extend((batch, row) for row in found)

    def targets(self, learn: Learner) -> str | None:
        """Look at the targets of one training batch, after the prediction is known.

        Returns:
            The name of a target with class labels that no class answers to, or None. On CUDA the loss would end
            the process' context with such a label, so the caller must not go on to it.
        """
        refused = None
        batch = self.offered - 1
        found = list(tensors(learn.yb))
        for i, t in enumerate(found):
            name = f"target {i}" if len(found) > 1 else "target"
            if not t.numel():
                continue
            mine = self._targets.setdefault(name, _RunningTarget(str(t.dtype).removeprefix("torch.")))
            if t.is_floating_point() and batch < self.limit:
                y = t.detach().double()
                finite = y[torch.isfinite(y)]
                mine.bad += y.numel() - finite.numel()
                if finite.numel():
                    mine.low, mine.high = min(mine.low, float(finite.min())), max(mine.high, float(finite.max()))
                self._note_rows(y, self.bad_target_rows, batch)
            elif not t.is_floating_point() and t.dtype != torch.bool:
                mine.low, mine.high = min(mine.low, float(t.min())), max(mine.high, float(t.max()))
                if is_class_loss(learn.loss_func):
                    refused = self._labels(learn, t, mine, name, batch) or refused
        return refused

    def _labels(self, learn: Learner, t: Tensor, mine: _RunningTarget, name: str, batch: int) -> str | None:
        ignore = ignore_index(learn.loss_func)
        mine.classes = _classes(learn.pred)
        counted = t[t != ignore]
        if not counted.numel():
            mine.ignored.append(batch)
            return None
        if mine.classes is None:
            return None
        wrong = int(((counted < 0) | (counted >= mine.classes)).sum())
        mine.out_of_range += wrong
        return name if wrong else None

    def sample(self) -> DataSample:
        """What was seen."""
        return DataSample(
            batches=self.batches,
            features=tuple(r.feature(n) for n, r in self._features.items()),
            targets=tuple(
                Target(
                    name=n,
                    dtype=t.dtype,
                    min=t.low if t.low <= t.high else math.nan,
                    max=t.high if t.low <= t.high else math.nan,
                    nonfinite=t.bad,
                    all_ignored_batches=tuple(t.ignored[:_MAX_ROWS]),
                    out_of_range=t.out_of_range,
                    classes=t.classes,
                )
                for n, t in self._targets.items()
            ),
            nonfinite_rows=tuple(self.bad_rows),
            nonfinite_target_rows=tuple(self.bad_target_rows),
            batch_sizes=tuple(sorted(set(self.sizes))),
        )


def is_class_loss(loss: Any) -> bool:
    """Whether a loss reads integer targets as class labels (torch's and fastai's cross entropies)."""
    inner = getattr(loss, "func", loss)
    made_by = inner if hasattr(inner, "__name__") else type(inner)
    if made_by.__module__.partition(".")[0] not in ("torch", "fastai"):
        return False  # a user's own may give its labels any meaning
    name = made_by.__name__.lower()
    return (
        any(part in name for part in ("crossentropy", "cross_entropy", "nllloss", "nll_loss")) and "binary" not in name
    )


def ignore_index(loss: Any) -> int:
    """The label that the loss leaves out; torch's default is -100."""
    inner = getattr(loss, "func", loss)
    keywords = getattr(loss, "keywords", None) or {}
    return int(keywords.get("ignore_index", getattr(inner, "ignore_index", -100)))


def _classes(pred: Any) -> int | None:
    found = [t for t in tensors(pred) if t.is_floating_point() and t.ndim >= 2]
    # fastai's CrossEntropyLossFlat takes classes from the last axis by default, torch's from the second; for the
    # two-dimensional prediction of a classifier these are the same, and only there is the count certain.
    return found[0].shape[1] if found and found[0].ndim == 2 else None
