"""What islands cost: their share of the forward pass' floating-point operations.

Counted with torch's own FLOP formulas (products and convolutions; the rest counts nothing there), so the figure is the
same on every machine and under emulation, where a measured time would say nothing about a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from autoprec import emulation
from autoprec.evidence import Precision
from autoprec.observe.origin import Replay
from autoprec.observe.tensors import floating

__all__ = ["fp32_share"]


class _Counter(TorchDispatchMode):
    """Adds up FLOPs, those on fp32 operands apart."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.fp32 = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            flops = int(formula(*args, **kwargs, out_val=out))
            self.total += flops
            # Emulated half arithmetic has fp32 operands, and an op of autocast's list around it.
            if emulation.current_op() is None and all(t.dtype == torch.float32 for t in floating(args)):
                self.fp32 += flops
        return out


def fp32_share(replay: Replay, precision: Precision) -> float:
    """Share of one batch's forward FLOPs that are computed in fp32 in a 16-bit run; 0 where nothing is counted."""
    counter = _Counter()
    with replay.again(), torch.no_grad(), replay.precision(precision), counter:
        replay.predict()
    return counter.fp32 / counter.total if counter.total else 0.0
