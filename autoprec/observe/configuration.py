"""What is attached to a learner and what the machine can do. Read, not run; costs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from autoprec.evidence import Configuration, Precision
from autoprec.observe.tensors import nonfinite_names
from autoprec.precision import availability, carried, device_type

if TYPE_CHECKING:
    from fastai.learner import Learner

__all__ = ["read_configuration"]

_MANY = 8


def read_configuration(
    learn: Learner, requested: Precision, *, emulate_cuda: bool, planned_steps: int
) -> Configuration:
    """Read the configuration.

    Args:
        learn: the learner.
        requested: the precision that the run is to be made in.
        emulate_cuda: whether 16-bit arithmetic is emulated on a CPU.
        planned_steps: training batches of the whole planned fit.
    """
    device = device_type(learn)
    can = availability(device, emulate_cuda=emulate_cuda)
    callbacks, setting = carried(learn)
    params = list(learn.model.named_parameters())
    half = [n for n, p in params if p.dtype in (torch.float16, torch.bfloat16)]
    norms = (nn.modules.batchnorm._BatchNorm,)
    loss = getattr(learn.loss_func, "func", learn.loss_func)
    return Configuration(
        device=device,
        emulated=device == "cpu" and emulate_cuda,
        requested=requested,
        asked_by_user=bool(callbacks),
        precision_callbacks=tuple(type(cb).__name__ for cb in callbacks),
        scaler_kwargs={k: float(v) for k, v in (setting.scaler_kwargs if setting else {}).items()},
        half_parameters=tuple(half[:_MANY]),
        nonfinite_parameters=nonfinite_names([*params, *learn.model.named_buffers()], _MANY),
        trainable_parameters=sum(p.requires_grad for _, p in params),
        fp16_available=can.fp16,
        bf16_available=can.bf16,
        bf16_native=can.bf16_native,
        unavailable_reason=can.reason,
        loss=getattr(loss, "__name__", type(loss).__name__),
        batch_norm=tuple(n for n, m in learn.model.named_modules() if isinstance(m, norms))[:_MANY],
        loader_steps=len(learn.dls.train),
        planned_steps=planned_steps,
        has_validation=len(learn.dls.loaders) > 1 and len(learn.dls.valid) > 0,
        normalized=any(
            type(t).__name__ == "Normalize" for t in getattr(getattr(learn.dls.train, "after_batch", None), "fs", ())
        ),
    )
