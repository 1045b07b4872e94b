"""Reset BatchNorm statistics that are not finite, and estimate them anew from training batches.

Cures        a learner whose validation is NaN because an earlier run poisoned its running statistics.
How          the layers' statistics are reset; the model then sees training batches in training mode, without a step. A
             batch that gives non-finite statistics is left out.
Does not     cure weights that are not finite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from autoprec.observe.tensors import all_finite
from autoprec.outcome import Change
from autoprec.policy import ResetBuffers as Settings
from autoprec.remedies.base import Remedy, Subject
from autoprec.snapshot import preserved

if TYPE_CHECKING:
    from fastai.learner import Learner

    from autoprec.evidence import Evidence

__all__ = ["ResetBuffers"]

_Norm = nn.modules.batchnorm._BatchNorm


class ResetBuffers(Remedy[Settings]):
    """Reset and re-estimate."""

    name = "reset_buffers"

    def obstacle(self, subject: Subject, evidence: Evidence, settings: Settings) -> str | None:
        return None if _poisoned(subject.learn) else "no BatchNorm statistic is non-finite"

    def apply(self, subject: Subject, evidence: Evidence, settings: Settings) -> Change:
        learn = subject.learn
        layers = _poisoned(learn)
        subject.hold(self.name, [(b, b.clone()) for m in layers.values() for b in m.buffers()])
        used = _estimate(learn, list(layers.values()), settings.batches)
        return Change(
            remedy=self.name,
            what=f"running statistics of {', '.join(list(layers)[:4])}",
            before="not finite",
            after=f"estimated from {used} training batches",
        )

    def undo(self, subject: Subject, change: Change) -> None:
        with torch.no_grad():
            for buffer, value in subject.release(self.name):
                buffer.copy_(value)


def _poisoned(learn: Learner) -> dict[str, _Norm]:
    return {n: m for n, m in learn.model.named_modules() if isinstance(m, _Norm) and not all_finite(list(m.buffers()))}


def _estimate(learn: Learner, layers: list[_Norm], batches: int) -> int:
    """Average the batch statistics of the layers over training batches; everything else is put back."""
    sums: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(layers)
    used = 0
    with preserved(learn), torch.no_grad():
        learn.model.train()
        for i, batch in enumerate(learn.dls.train):
            if i >= batches:
                break
            for m in layers:
                m.reset_running_stats()
                m.momentum = None  # a plain average: after one batch, that batch's own statistics
            n_inp = getattr(learn.dls, "n_inp", len(batch) - 1)
            learn.model(*batch[:n_inp])
            if not all_finite([b for m in layers for b in m.buffers()]):
                continue
            used += 1
            for j, m in enumerate(layers):
                mean, var = _statistics(m)
                before = sums[j]
                sums[j] = (mean, var) if before is None else (before[0] + mean, before[1] + var)
    with torch.no_grad():
        for m, total in zip(layers, sums, strict=True):
            m.reset_running_stats()
            if total is not None and m.running_mean is not None and m.running_var is not None:
                m.running_mean.copy_(total[0] / used)
                m.running_var.copy_(total[1] / used)
    return used


def _statistics(m: _Norm) -> tuple[torch.Tensor, torch.Tensor]:
    if m.running_mean is None or m.running_var is None:
        raise ValueError("a BatchNorm layer without running statistics cannot be poisoned")
    return m.running_mean.double(), m.running_var.double()
