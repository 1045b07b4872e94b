"""Cast half-precision weights up to fp32 and let autocast do the casting.

Cures        `model.half()` under `to_fp16()`: the scaler can unscale fp32 gradients only, and small updates survive.
Costs        the memory of fp32 weights (which mixed precision always has).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from autoprec.outcome import Change
from autoprec.policy import MasterWeights as Settings
from autoprec.remedies.base import Remedy, Subject

if TYPE_CHECKING:
    from autoprec.evidence import Evidence

__all__ = ["MasterWeights"]

_HALF = (torch.float16, torch.bfloat16)


class MasterWeights(Remedy[Settings]):
    """Parameters, buffers and optimizer state in 16 bits become fp32, in place (the same Parameter objects)."""

    name = "master_weights"

    def obstacle(self, subject: Subject, evidence: Evidence, settings: Settings) -> str | None:
        return None if _half_tensors(subject) else "no weight is stored in 16 bits"

    def apply(self, subject: Subject, evidence: Evidence, settings: Settings) -> Change:
        named = _half_tensors(subject)
        state = _half_state(subject)
        subject.hold(self.name, [(t, t.dtype) for _, t in named])
        subject.hold(f"{self.name}/state", [(s, k, s[k]) for s, k in state])
        dtypes = sorted({str(t.dtype).removeprefix("torch.") for _, t in named})
        for _, t in named:
            t.data = t.data.float()
        for s, k in state:
            s[k] = s[k].float()
        return Change(
            remedy=self.name,
            what=f"dtype of {len(named)} weights and buffers",
            before=", ".join(dtypes),
            after="float32",
        )

    def undo(self, subject: Subject, change: Change) -> None:
        # Exact: no step has been taken since, so every value still has a 16-bit form.
        for t, dtype in subject.release(self.name):
            t.data = t.data.to(dtype)
            if t.grad is not None:
                t.grad = None
        for s, k, value in subject.release(f"{self.name}/state"):
            s[k] = value


def _half_tensors(subject: Subject) -> list[tuple[str, torch.Tensor]]:
    model = subject.learn.model
    return [(n, t) for n, t in (*model.named_parameters(), *model.named_buffers()) if t.dtype in _HALF]


def _half_state(subject: Subject) -> list[tuple[dict[str, Any], str]]:
    opt = subject.learn.opt
    states = list(getattr(opt, "state", {}).values()) if opt is not None else []
    return [(s, k) for s in states for k, v in s.items() if isinstance(v, torch.Tensor) and v.dtype in _HALF]
