"""Normalize the inputs by statistics of the training set.

Cures        raw pixels, unscaled columns and timestamps, whose size is what overflows.
How          images get fastai's `Normalize` transform per channel, tables its `Normalize` proc (test data included),
             plain tensors a batch transform per column or channel; validation and test loaders use the
             training statistics. A constant column is only centred.
Does not     cure an overflow made inside the model from inputs of ordinary size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from fastai.data.core import TfmdDL
from fastai.data.transforms import Normalize
from fastai.torch_core import TensorImage

from autoprec.outcome import Change
from autoprec.policy import NormalizeInputs as Settings
from autoprec.remedies._normalize import batch_normalizer, batch_transform
from autoprec.remedies.base import Remedy, Subject
from autoprec.snapshot import preserved

if TYPE_CHECKING:
    from fastai.learner import Learner

    from autoprec.evidence import Evidence

__all__ = ["NormalizeInputs"]

_LEAST_STD = 1e-7
"""Deviation below which a column counts as constant; fastai's own epsilon for Normalize."""


class NormalizeInputs(Remedy[Settings]):
    """Put a normalizing transform into every loader."""

    name = "normalize_inputs"
    new_twin = True

    def obstacle(self, subject: Subject, evidence: Evidence, settings: Settings) -> str | None:
        if settings.mode == "check":
            return "the policy only checks (mode: check); normalize the inputs in your data pipeline"
        if evidence.configuration.normalized:
            return "the loaders normalize already"
        if not evidence.data or not evidence.data.features:
            return "there is no floating-point input"
        return None

    def apply(self, subject: Subject, evidence: Evidence, settings: Settings) -> Change:
        learn = subject.learn
        if hasattr(learn.dls.train.dataset, "procs"):
            return self._table(subject)
        mean, std, first = _statistics(learn, settings.batches)
        kind = "fastai Normalize" if isinstance(first, TensorImage) else "batch transform"
        undo: list[tuple[Any, str, Any]] = []
        for dl in learn.dls.loaders:
            if isinstance(dl, TfmdDL):
                undo.append((dl.after_batch, "fs", dl.after_batch.fs))
                # A pipeline keeps its transforms sorted by their order (Normalize: 99, after augmentation).
                mine = Normalize(mean, std) if isinstance(first, TensorImage) else batch_transform(mean, std)
                tfms = [*dl.after_batch.fs, mine]
                dl.after_batch.fs = type(dl.after_batch.fs)(sorted(tfms, key=lambda t: t.order))
            else:
                undo.append((dl, "after_batch", dl.__dict__.get("after_batch")))
                dl.after_batch = batch_normalizer(mean, std, dl.after_batch)
        subject.hold(self.name, undo)
        return Change(
            remedy=self.name,
            what=f"inputs ({kind})",
            before="as the loader gives them",
            after="(x - mean) / std of the training set",
            data={"mean": _listed(mean), "std": _listed(std)},
        )

    def undo(self, subject: Subject, change: Change) -> None:
        for owner, name, value in subject.release(self.name):
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

    def _table(self, subject: Subject) -> Change:
        from fastai.tabular.core import Normalize as TabularNormalize

        loaders = subject.learn.dls.loaders
        procs = loaders[0].dataset.procs
        undo: list[tuple[Any, str, Any]] = [(dl.dataset, "items", dl.dataset.items) for dl in loaders]
        undo += [(dl.dataset.procs, "fs", dl.dataset.procs.fs) for dl in loaders]
        proc = TabularNormalize()
        for dl in loaders:
            dl.dataset.items = dl.dataset.items.astype(dict.fromkeys(dl.dataset.cont_names, "float64"))
        proc.setup(loaders[0].dataset)  # training rows: statistics and transform
        for dl in loaders[1:]:
            proc(dl.dataset)
        for dl in loaders:
            dl.dataset.items = dl.dataset.items.astype(dict.fromkeys(dl.dataset.cont_names, "float32"))
        # One pipeline may serve all loaders; test_dl processes new rows through it.
        for pipeline in {id(dl.dataset.procs): dl.dataset.procs for dl in loaders}.values():
            pipeline.fs = type(procs.fs)([*pipeline.fs, proc])
        subject.hold(self.name, undo)
        return Change(
            remedy=self.name,
            what="inputs (fastai tabular Normalize)",
            before="as the table gives them",
            after="(x - mean) / std of the training rows",
            data={
                "mean": {k: float(v) for k, v in proc.means.items()},
                "std": {k: float(v) for k, v in proc.stds.items()},
            },
        )


def _statistics(learn: Learner, batches: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Mean and deviation per column or channel of the first floating input, in float64; nothing is left behind."""
    count: Any = 0
    total = squares = first = None
    with preserved(learn):
        for i, batch in enumerate(learn.dls.train):
            if i >= batches:
                break
            x = next(t for t in batch if torch.is_tensor(t) and t.is_floating_point())
            first = x if first is None else first
            v = x.detach().as_subclass(torch.Tensor).double()
            axes = [a for a in range(v.ndim) if a != 1] if v.ndim > 1 else [0]
            # A row that is not finite must not decide the statistics of the rest.
            v = torch.where(torch.isfinite(v), v, torch.nan)
            total = v.nansum(axes, keepdim=True) + (0 if total is None else total)
            squares = v.square().nansum(axes, keepdim=True) + (0 if squares is None else squares)
            count = torch.isfinite(v).sum(axes, keepdim=True) + count
    if total is None or squares is None:
        raise ValueError("the training loader gave no batch")
    mean = total / count
    std = (squares / count - mean.square()).clamp(min=0).sqrt()
    std = torch.where(std < _LEAST_STD * mean.abs().clamp(min=1), torch.ones_like(std), std)
    return mean.float(), std.float(), first


def _listed(t: torch.Tensor) -> list[float]:
    return [float(f"{v:.6g}") for v in t.flatten()[:512].tolist()]
