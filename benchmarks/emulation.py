"""What CUDA's 16-bit rules cost on a CPU: one training step of ResNet-18, 32 images of 32 by 32 pixels.

    python benchmarks/emulation.py [--steps 7] [--stock]

All rows are measured in turn in one process (one step of each, again and again), so that a busy machine slows
them alike; a row is the median. `--stock` adds torch's own CPU autocast in fp16: some 14 s a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn
from torchvision.models import resnet18

from autoprec.emulation import emulate_cuda

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BATCH, PIXELS, CLASSES = 32, 32, 10


@contextmanager
def emulated(dtype: torch.dtype) -> Iterator[None]:
    with emulate_cuda(), torch.autocast("cpu", dtype=dtype):
        yield


ROWS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "fp32": nullcontext,
    "fp16, emulated": lambda: emulated(torch.float16),
    "bf16, emulated": lambda: emulated(torch.bfloat16),
}


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor, precision: AbstractContextManager[object]) -> float:
    """Seconds of one forward and backward pass."""
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    with precision:
        loss = nn.functional.cross_entropy(model(x), y)
    (loss * 128).backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=7, help="measured steps of each row (default 7)")
    parser.add_argument("--stock", action="store_true", help="one step of torch's own CPU fp16 too (14 s)")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = resnet18(num_classes=CLASSES)
    x, y = torch.randn(BATCH, 3, PIXELS, PIXELS), torch.randint(CLASSES, (BATCH,))
    seconds: dict[str, list[float]] = {row: [] for row in ROWS}
    for i in range(args.steps + 1):
        for row, precision in ROWS.items():
            taken = step(model, x, y, precision())
            if i:  # the first round allocates
                seconds[row].append(taken)
    if args.stock:
        seconds["fp16, stock CPU kernels"] = [step(model, x, y, torch.autocast("cpu", dtype=torch.float16))]
    base = statistics.median(seconds["fp32"])
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), medians of {args.steps} steps")
    print(f"{'precision':<26}{'s/step':>8}{'x fp32':>8}")
    for row, times in seconds.items():
        median = statistics.median(times)
        print(f"{row:<26}{median:>8.3f}{median / base:>8.2f}")


if __name__ == "__main__":
    main()
