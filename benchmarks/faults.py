"""Faults of every kind, placed elsewhere each time: is the cause found, at its line, and is the end right?

    python benchmarks/faults.py [--n 100] [--kinds log_of_zero …] [--start 0] [--jobs 2] [--json out.json]

A draw says how deep and wide the net is, after which block the fault sits, batch size, learning rate, optimizer,
precision, the step from which the fault can bite, and the seed. A fault's line ends in `# fault: KIND`.

A draw counts only if its fault is seen to bite without this package: stock fastai fails in the learner's precision, and
fp32 (or fp32 at a smaller lr) is healthy or fails, as the kind claims. The learner that comes back is judged as the
stock runs are, by the benchmark's own callbacks.
"""

# ruff: noqa: D101, D102  # the nets are named after what is wrong in them

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fastai's own imports
    from fastai.callback.core import Callback
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner
    from fastai.losses import CrossEntropyLossFlat
    from fastai.optimizer import SGD, Adam

sys.path.insert(0, str(Path(__file__).parent))
import cases

CLASSES, VALID = 4, 32
RESULTS = {"settings": ("repaired",), "user": ("unrepaired",)}


@dataclass(frozen=True)
class Draw:
    """One place for a fault."""

    kind: str
    number: int
    seed: int
    depth: int
    place: int
    width: int
    inputs: int
    bs: int
    steps: int
    at: int
    lr: float
    optimizer: str
    precision: str
    size: float

    @property
    def rows(self) -> int:
        return self.bs * self.steps


@dataclass
class Fault:
    """What a kind makes of a draw: a learner that fails, and what is right to find."""

    learner: Callable[[], Learner]
    lr: float
    scaler: dict[str, float] = field(default_factory=dict)
    says: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kind:
    """A kind of fault: how it is made, and what is true of it."""

    make: Callable[[Draw], Fault]
    modes: tuple[str, ...]
    repair: str = "settings"
    fp32: str = "healthy"
    """What an fp32 run does: "healthy", "fails", or "heals" (fails, and trains at a smaller lr)."""
    line: bool = True
    precisions: tuple[str, ...] = ("fp16",)
    late: bool = True
    """Whether it may bite later than a probe is long."""


def drawn(kind: str, number: int) -> Draw:
    """The draw with this number; always the same."""
    rng = random.Random(f"{kind} {number}")
    depth = rng.randint(1, 4)
    optimizer = rng.choice(("adam", "sgd"))
    lr = (2e-3 if optimizer == "adam" else 5e-3) * 10 ** rng.uniform(0, 1 if optimizer == "sgd" else 0.7)
    late = KINDS[kind].late and rng.random() < 0.15
    steps = rng.randint(60, 75) if late else rng.randint(34, 60)
    return Draw(
        kind=kind, number=number, seed=rng.randrange(10_000), depth=depth, place=rng.randint(0, depth),
        width=rng.choice((16, 24, 32, 48)), inputs=rng.choice((8, 12, 16)), bs=rng.choice((8, 16, 32)),
        steps=steps, at=rng.randint(44, 56) if late else rng.randint(0, 30),
        lr=lr, optimizer=optimizer, precision=rng.choice(KINDS[kind].precisions), size=rng.uniform(1.0, 4.0),
    )  # fmt: skip


# ---- what they share --------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.lin = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.lin(self.norm(h)).relu()


class Tower(nn.Module):
    """Residual blocks, a part of the fault's after `place` of them, a norm and a head."""

    def __init__(self, d: Draw, part: nn.Module | None = None, outputs: int = CLASSES) -> None:
        super().__init__()
        self.first, self.place = nn.Linear(d.inputs, d.width), d.place
        self.blocks = nn.ModuleList(Block(d.width) for _ in range(d.depth))
        self.part = nn.Identity() if part is None else part
        self.norm, self.head = nn.LayerNorm(d.width), nn.Linear(d.width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for i, block in enumerate(self.blocks):
            h = block(self.part(h) if i == self.place else h)
        if self.place == len(self.blocks):
            h = self.part(h)
        return self.head(self.norm(h))


def rows(d: Draw, *shape: int) -> tuple[Tensor, Tensor]:
    """Inputs and the classes that a linear map gives them; the last are for validation."""
    torch.manual_seed(d.seed)
    x = torch.randn(d.rows + VALID, *(shape or (d.inputs,)))
    flat = x if x.ndim == 2 else x.mean(1)
    return x, (flat @ torch.randn(flat.shape[1], CLASSES)).argmax(1)


def outliers(d: Draw, x: Tensor, factor: float, every: int = 7) -> Tensor:
    """Rows that are `factor` times as large, from the draw's step on."""
    x[d.at * d.bs : d.rows : every] *= factor
    return x


def learner(d: Draw, model: nn.Module, *columns: Tensor, loss: Any = None, **kwargs: Any) -> Learner:
    parts = [DataLoader(TensorDataset(*(c[a:b] for c in columns)), bs=d.bs) for a, b in ((0, d.rows), (d.rows, None))]
    opt = {"adam": Adam, "sgd": partial(SGD, mom=0.9)}[d.optimizer]
    return Learner(DataLoaders(*parts), model, loss_func=loss or CrossEntropyLossFlat(), **{"opt_func": opt, **kwargs})


# ---- forward ----------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """A product that passes 65504 for outlier rows, and a norm that makes NaN of infinity."""

    def __init__(self, d: Draw) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(d.width, d.width), nn.LayerNorm(d.width)
        with torch.no_grad():
            self.up.weight.mul_(500 * d.size)

    def forward(self, h: Tensor) -> Tensor:
        wide = self.up(h)  # fault: module_overflow
        return self.norm(wide)


def module_overflow(d: Draw) -> Fault:
    def make() -> Learner:
        x, y = rows(d)
        return learner(d, Tower(d, Wide(d)), outliers(d, x, 1500.0), y)

    return Fault(make, d.lr)


class Big(nn.Module):
    """A net whose whole forward is one function, as people write them; its energies overflow on the way."""

    def __init__(self, d: Draw) -> None:
        super().__init__()
        self.stem, self.mix = nn.Linear(d.inputs, d.width), nn.Linear(d.width, d.width)
        self.head = nn.Linear(d.width, CLASSES)
        self.norm, self.way = nn.LayerNorm(d.width), d.number % 3

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        gate = self.mix(h).sigmoid()
        if self.way == 0:
            energy = h * h  # fault: function_overflow
            h = energy / (energy.amax(1, keepdim=True) + 1) + h / 100
        elif self.way == 1:
            energy = torch.einsum("bi,bi->b", h, h)  # fault: function_overflow
            h = h / (energy[:, None] + 1).sqrt()
        else:
            energy = torch.bmm(h[:, :, None], h[:, None])  # fault: function_overflow
            h = energy.mean(1) / (energy.amax((1, 2))[:, None] + 1) + h / 100
        h = self.norm(h) * gate
        return self.head(h)


def function_overflow(d: Draw) -> Fault:
    def make() -> Learner:
        x, y = rows(d)
        return learner(d, Big(d), outliers(d, x, 1500.0 * d.size), y)

    return Fault(make, d.lr)


class Attends(nn.Module):
    """Attention whose product is scaled only afterwards."""

    def __init__(self, d: Draw) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(d.inputs, d.width), nn.ModuleList(Block(d.width) for _ in range(d.place))
        self.q, self.k, self.v = (nn.Linear(d.width, d.width) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(d.width), nn.Linear(d.width, CLASSES)
        with torch.no_grad():
            self.q.weight.mul_(10 * d.size)
            self.k.weight.copy_(self.q.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        q, k, v = self.q(h), self.k(h), self.v(h)
        scores = q @ k.transpose(1, 2)  # fault: attention_overflow
        a = (scores * h.shape[-1] ** -0.5).softmax(-1)
        return self.head(self.norm(h + a @ v).mean(1))


def attention_overflow(d: Draw) -> Fault:
    def make() -> Learner:
        x, y = rows(d, 6, d.inputs)
        return learner(d, Attends(d), outliers(d, x, 40.0), y)

    return Fault(make, d.lr)


class RMS(nn.Module):
    """A root-mean-square norm in the input's own dtype: infinity in the denominator makes zeros of everything."""

    def __init__(self, d: Draw) -> None:
        super().__init__()
        self.lin = nn.Linear(d.width, d.width)
        with torch.no_grad():
            self.lin.weight.mul_(1500 * d.size)

    def forward(self, h: Tensor) -> Tensor:
        h = self.lin(h)
        squares = h * h  # fault: rms_collapse
        return h / torch.sqrt(squares.mean(-1, keepdim=True) + 1e-5)


def rms_collapse(d: Draw) -> Fault:
    def make() -> Learner:
        x, y = rows(d)
        return learner(d, Tower(d, RMS(d)), x, y)

    return Fault(make, d.lr)


class MinMax(nn.Module):
    """Scaled to 0 .. 1 with an epsilon that is 0 in half: a row of equal values is 0 / 0."""

    def forward(self, h: Tensor) -> Tensor:
        low, high = h.amin(1, keepdim=True), h.amax(1, keepdim=True)
        return (h - low) / (high - low + 1e-8)  # fault: epsilon_underflow


class Peak(nn.Module):
    """Divided by its largest magnitude, with the same epsilon."""

    def forward(self, h: Tensor) -> Tensor:
        return h / (h.abs().amax(1, keepdim=True) + 1e-8)  # fault: epsilon_underflow


class Blank(nn.Module):
    """Nothing of a row whose input is zero, then the part."""

    def __init__(self, d: Draw, part: nn.Module) -> None:
        super().__init__()
        self.tower, self.part = Tower(d, outputs=d.width), part
        self.norm, self.head = nn.LayerNorm(d.width), nn.Linear(d.width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tower(x) * (x.abs().sum(1, keepdim=True) > 0)
        return self.head(self.norm(self.part(h)))


def epsilon_underflow(d: Draw) -> Fault:
    def make() -> Learner:
        x, y = rows(d)
        return learner(d, Blank(d, MinMax() if d.number % 2 else Peak()), outliers(d, x, 0.0), y)

    return Fault(make, d.lr)


class SmallVariance(nn.Module):
    """A norm by hand over values of 1e-5: their squares are 0 in half, and the epsilon is too."""

    def __init__(self, d: Draw) -> None:
        super().__init__()
        self.shrink = nn.Linear(d.width, d.width)
        with torch.no_grad():
            self.shrink.weight.mul_(1e-5 * d.size)
            self.shrink.bias.zero_()

    def forward(self, h: Tensor) -> Tensor:
        h = self.shrink(h)
        h = h - h.mean(1, keepdim=True)
        spread = (h * h).mean(1, keepdim=True) + 1e-16
        return h / spread.sqrt()  # fault: variance_underflow


def variance_underflow(d: Draw) -> Fault:
    def make() -> Learner:
        x, y = rows(d)
        return learner(d, Tower(d, SmallVariance(d)), x, y, opt_func=partial(Adam, eps=1e-8))

    return Fault(make, min(d.lr, 5e-3))


# ---- loss -------------------------------------------------------------------------------------------------------


def gram_loss(pred: Tensor, target: Tensor, style: Tensor) -> Tensor:
    """A product of features over the batch, divided only afterwards."""
    theirs = style.t() @ style / len(style)  # fault: loss_overflow
    ours = pred.t() @ pred / len(pred)
    return F.mse_loss(pred, target) + 0.01 * F.l1_loss(ours, theirs / (theirs.abs().mean() + 1))


def loss_overflow(d: Draw) -> Fault:
    def make() -> Learner:
        x, _ = rows(d)
        y = (x @ torch.randn(d.inputs, CLASSES)).tanh()
        style = outliers(d, torch.randn(len(x), CLASSES) * 4, 100 * d.size)
        learn = learner(d, Tower(d), x, y, style, loss=gram_loss)
        learn.dls.n_inp = 1
        return learn

    return Fault(make, d.lr)


def ranking_loss(out: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Scores by a product, scaled to 0 .. 1 with an epsilon that is 0 in half."""
    query, items = out
    scores = torch.einsum("bd,bkd->bk", query, items)
    low, high = scores.amin(1, keepdim=True), scores.amax(1, keepdim=True)
    scaled = (scores - low) / (high - low + 1e-8)  # fault: loss_underflow
    return F.cross_entropy(scaled * 8, target)


class Ranks(nn.Module):
    def __init__(self, d: Draw) -> None:
        super().__init__()
        self.tower, self.items = Tower(d, outputs=8), nn.Parameter(torch.randn(CLASSES, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.tower(x) * (x.abs().sum(1, keepdim=True) > 0), self.items.expand(len(x), -1, -1)


def loss_underflow(d: Draw) -> Fault:
    def make() -> Learner:
        x, y = rows(d)
        return learner(d, Ranks(d), outliers(d, x, 0.0), y, loss=ranking_loss)

    return Fault(make, d.lr)


class Focal(nn.Module):
    """The loss in the model, on 16-bit probabilities: clamping to 1 - 1e-5 does nothing there."""

    def __init__(self, d: Draw) -> None:
        super().__init__()
        self.tower, self.size = Tower(d), 8 * d.size

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        p = (self.tower(x) * self.size).sigmoid().clamp(1e-5, 1 - 1e-5)
        wrong = (1 - t) * torch.log(1 - p)  # fault: next_to_one
        return -(t * torch.log(p) + wrong).mean()


def given(out: Tensor, _target: Tensor) -> Tensor:
    return out


def next_to_one(d: Draw) -> Fault:
    def make() -> Learner:
        x, y = rows(d)
        t = F.one_hot(y, CLASSES).float()
        return learner(d, Focal(d), x, t, t, loss=given)

    return Fault(make, d.lr)


# ---- gradients --------------------------------------------------------------------------------------------------


class HandNorm(nn.Module):
    """Features of 1e-4 and less divided by their deviation: the gradient overflows at every loss scale."""

    def __init__(self, d: Draw) -> None:
        super().__init__()
        self.shrink = nn.Linear(d.width, d.width)
        with torch.no_grad():
            self.shrink.weight.mul_(1e-5 * d.size)
            self.shrink.bias.zero_()

    def forward(self, h: Tensor) -> Tensor:
        h = self.shrink(h)
        h = h - h.mean(1, keepdim=True)
        spread = h.std(1, keepdim=True) + 1e-6
        return h / spread  # fault: hand_norm


def hand_norm(d: Draw) -> Fault:
    def make() -> Learner:
        x, y = rows(d)
        return learner(d, Tower(d, HandNorm(d)), x, y, opt_func=partial(Adam, eps=1e-8))

    return Fault(make, min(d.lr, 3e-3))


class Scaled:
    """Mean squares times a small constant."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, pred: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(pred, target) * self.factor


def static_scale(d: Draw) -> Fault:
    def make() -> Learner:
        x, _ = rows(d)
        y = (x @ torch.randn(d.inputs, CLASSES)).tanh()
        loss = Scaled(10 ** -(5.5 + d.size / 2))
        return learner(d, Tower(d), x, y, loss=loss, opt_func=partial(Adam, eps=1e-14))

    return Fault(make, 3e-3, {"init_scale": 2.0 ** (d.number % 3), "growth_interval": 10**9})


class Summed:
    """Squares summed over everything, times a constant."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, pred: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(pred, target, reduction="sum") * self.factor


def short_run(d: Draw) -> Fault:
    def make() -> Learner:
        x, _ = rows(d)
        y = (x @ torch.randn(d.inputs, 16)).tanh() * 4
        return learner(d, Tower(d, outputs=16), x, y, loss=Summed(2.0 ** (2 + round(d.size))), opt_func=Adam)

    d = replace(d, steps=16 + d.number % 9)
    return Fault(make, 1e-2)


def lr_too_high(d: Draw) -> Fault:
    def make() -> Learner:
        x, _ = rows(d)
        y = (2 * x @ torch.randn(d.inputs, CLASSES) / 3).tanh()
        layers: list[nn.Module] = [nn.Linear(d.inputs, d.width), nn.ReLU()]
        for _ in range(d.depth):
            layers += [nn.Linear(d.width, d.width), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Linear(d.width, CLASSES))
        return learner(d, model, 2 * x, y, loss=nn.MSELoss(), opt_func=partial(SGD, mom=0.9))

    return Fault(make, 2.0 * d.size)


# ---- data -------------------------------------------------------------------------------------------------------


def nan_rows(d: Draw) -> Fault:
    row = d.at * d.bs + d.number % d.bs

    def make() -> Learner:
        x, y = rows(d)
        x[row, d.number % d.inputs] = math.nan if d.number % 2 else math.inf
        return learner(d, Tower(d), x, y)

    return Fault(make, d.lr, says=(f"batch {d.at}", f"row {d.number % d.bs}", f"column {d.number % d.inputs}"))


def ignored_targets(d: Draw) -> Fault:
    def make() -> Learner:
        x, y = rows(d)
        y[d.at * d.bs : (d.at + 1) * d.bs] = -100
        return learner(d, Tower(d), x, y)

    return Fault(make, d.lr, says=(f"batch {d.at}",))


def label_out_of_range(d: Draw) -> Fault:
    def make() -> Learner:
        x, y = rows(d)
        y[d.at * d.bs + d.number % d.bs] = CLASSES + d.number % 3
        return learner(d, Tower(d), x, y)

    return Fault(make, d.lr, says=(str(CLASSES),))


# ---- faults of fp32 itself --------------------------------------------------------------------------------------


def plain_nll(pred: Tensor, target: Tensor) -> Tensor:
    p = pred.softmax(1)
    right = torch.log(p)  # fault: log_of_zero
    return F.nll_loss(right, target)


class Loud(nn.Module):
    """Outputs as large as the inputs, so that softmax gives a true 0."""

    def __init__(self, d: Draw) -> None:
        super().__init__()
        self.tower = Tower(d)

    def forward(self, x: Tensor) -> Tensor:
        return self.tower(x) * (1 + x.abs().amax(1, keepdim=True))


def log_of_zero(d: Draw) -> Fault:
    def make() -> Learner:
        x, y = rows(d)
        return learner(d, Loud(d), outliers(d, x, 1000 * d.size, every=3), y, loss=plain_nll)

    return Fault(make, d.lr)


class BatchSpread(nn.Module):
    """A feature of the whole batch: its deviation, which one sample does not have."""

    def __init__(self, d: Draw) -> None:
        super().__init__()
        self.tower, self.head = Tower(d, outputs=d.width), nn.Linear(d.width + 1, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tower(x).relu()
        spread = h.std(0)  # fault: std_of_one
        return self.head(torch.cat([h, spread.mean().expand(len(h), 1).to(h.dtype)], 1))


def std_of_one(d: Draw) -> Fault:
    def make() -> Learner:
        x, y = rows(d)
        learn = learner(d, BatchSpread(d), x, y)
        kept = d.bs * max(d.at, 8) + 1
        train = DataLoader(TensorDataset(x[:kept], y[:kept]), bs=d.bs)
        learn.dls = DataLoaders(train, learn.dls.valid)
        return learn

    return Fault(make, d.lr)


# ---- configuration ----------------------------------------------------------------------------------------------


def half_weights(d: Draw) -> Fault:
    def make() -> Learner:
        x, y = rows(d)
        model = Tower(d)
        whole = d.number % 2 == 0
        (model if whole else model.blocks[0].lin).half()
        return learner(d, model, x, y)

    return Fault(make, d.lr)


class Masked(nn.Module):
    """Scores filled with a constant that half does not have."""

    def __init__(self, d: Draw) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(d.inputs, d.width), nn.ModuleList(Block(d.width) for _ in range(d.place))
        self.qk, self.norm = nn.Linear(d.width, 2 * d.width), nn.LayerNorm(d.width)
        self.head = nn.Linear(d.width, CLASSES)
        self.fill = (-1e9, -1e5, -1e38)[d.number % 3]

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        q, k = self.qk(self.norm(h)).chunk(2, -1)
        scores = torch.bmm(q, k.transpose(1, 2)) / 8
        scores = scores.masked_fill(pad[:, None], self.fill)  # fault: mask_fill
        return self.head(self.norm(h + scores.softmax(-1) @ h).mean(1))


def mask_fill(d: Draw) -> Fault:
    def make() -> Learner:
        x, y = rows(d, 6, d.inputs)
        pad = torch.rand(len(x), 6) < 0.3
        pad[:, 0] = False
        return learner(d, Masked(d), x, pad, y)

    return Fault(make, d.lr)


def probabilities(pred: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy(pred.sigmoid(), target)  # fault: bce


def bce(d: Draw) -> Fault:
    def make() -> Learner:
        x, y = rows(d)
        return learner(d, Tower(d), x, F.one_hot(y, CLASSES).float(), loss=probabilities)

    return Fault(make, d.lr)


class Unscales(Callback):
    """Clips in its own way."""

    order = 5

    def before_step(self) -> None:
        scaler = getattr(self.learn, "scaler", None)
        if scaler is not None and scaler.is_enabled():
            scaler.unscale_(self.opt)  # fault: double_unscale
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


def double_unscale(d: Draw) -> Fault:
    def make() -> Learner:
        x, y = rows(d)
        opt = partial(Adam, eps=1e-5) if d.optimizer == "adam" else partial(SGD, mom=0.9)
        return learner(d, Tower(d), x, y, opt_func=opt, cbs=[Unscales()])

    return Fault(make, d.lr)


# ---- lost bits --------------------------------------------------------------------------------------------------


class Waves(nn.Module):
    """Sines of a position, by a product in 16 bits."""

    def __init__(self, d: Draw) -> None:
        super().__init__()
        self.register_buffer("freq", torch.linspace(0.5, 4, 16)[None])
        self.tower = Tower(replace(d, inputs=32))

    def forward(self, x: Tensor) -> Tensor:
        a = x @ self.freq  # fault: offset_inputs
        return self.tower(torch.cat([a.sin(), a.cos()], 1))


def offset_inputs(d: Draw) -> Fault:
    offset = 2500 * d.size

    def make() -> Learner:
        torch.manual_seed(d.seed)
        x = offset + torch.rand(d.rows + VALID, 1) * 6
        y = ((x[:, 0] - offset) % 3).long().clamp(max=2)
        return learner(d, Waves(d), x, y)

    d = replace(d, steps=90, bs=max(d.bs, 16))
    return Fault(make, d.lr)


BOTH = ("fp16", "bf16")
KINDS = {
    "module_overflow": Kind(module_overflow, ("forward_overflow",)),
    "function_overflow": Kind(function_overflow, ("forward_overflow",)),
    "attention_overflow": Kind(attention_overflow, ("forward_overflow",)),
    "rms_collapse": Kind(rms_collapse, ("forward_overflow",), late=False),
    "epsilon_underflow": Kind(epsilon_underflow, ("forward_underflow",)),
    "variance_underflow": Kind(variance_underflow, ("forward_underflow",), late=False),
    "loss_overflow": Kind(loss_overflow, ("loss_overflow",)),
    "loss_underflow": Kind(loss_underflow, ("loss_underflow",)),
    "next_to_one": Kind(next_to_one, ("forward_underflow", "forward_overflow", "precision_loss"), precisions=BOTH),
    "hand_norm": Kind(hand_norm, ("gradient_overflow",), late=False),
    "static_scale": Kind(static_scale, ("gradient_underflow",), line=False, late=False),
    "short_run": Kind(short_run, ("skipped_steps",), line=False, late=False),
    "lr_too_high": Kind(lr_too_high, ("lr_divergence",), fp32="heals", line=False, precisions=BOTH, late=False),
    "nan_rows": Kind(nan_rows, ("nonfinite_data",), "user", "fails", line=False, precisions=BOTH),
    "ignored_targets": Kind(ignored_targets, ("invalid_targets",), "user", "fails", line=False, precisions=BOTH),
    "label_out_of_range": Kind(label_out_of_range, ("invalid_targets",), "user", "fails", line=False, precisions=BOTH),
    "log_of_zero": Kind(log_of_zero, ("fails_in_fp32",), "user", "fails", precisions=BOTH),
    "std_of_one": Kind(std_of_one, ("fails_in_fp32",), "user", "fails", precisions=BOTH),
    "half_weights": Kind(half_weights, ("half_precision_weights",), fp32="any", line=False, late=False),
    "mask_fill": Kind(mask_fill, ("autocast_dtype_error",), late=False),
    "bce": Kind(bce, ("autocast_dtype_error",), precisions=BOTH, late=False),
    "double_unscale": Kind(double_unscale, ("scaler_misuse",), late=False),
    "offset_inputs": Kind(offset_inputs, ("precision_loss", "plateau"), precisions=BOTH, late=False),
}


# ---- a draw's runs ----------------------------------------------------------------------------------------------


def built(fault: Fault, d: Draw) -> Learner:
    """The learner, silent, on the CPU."""
    holder = SimpleNamespace(make_learner=lambda _seed: fault.learner())
    return cases.fresh(holder, d.seed)


def stock(fault: Fault, d: Draw, precision: str, lr: float | None = None) -> dict[str, Any]:
    """One plain fastai fit; `first` is the first loss."""
    from autoprec.precision import Setting, attached
    from autoprec.snapshot import release_autocast

    learn, seen, error = built(fault, d), cases.Seen(), None
    try:
        with attached(learn, Setting(precision, fault.scaler if precision == "fp16" else {})):  # type: ignore[arg-type]
            learn.fit(1, lr or fault.lr, cbs=cases.spies(seen))
    except Exception as e:  # noqa: BLE001  # what the fault raises is its result
        error = f"{type(e).__name__}: {e}"
    finally:
        release_autocast()
    found = cases.truth(learn, SimpleNamespace(), seen, error)
    first = seen.losses[0] if seen.losses else math.nan
    finite = all(map(math.isfinite, seen.losses))
    return {**found, "healthy": found["healthy"] and finite, "first": first, "error": error}


def trained(run: dict[str, Any], limit: float) -> bool:
    """Finite in every way, enough steps taken, and the loss at or below the limit."""
    return bool(run["healthy"] and run["last"] <= limit)


def bites(kind: Kind, fault: Fault, d: Draw) -> tuple[str | None, float]:
    """Why the draw does not count (None: it does), and the loss up to which a run counts as trained."""
    exact = stock(fault, d, "fp32")
    best = exact
    if kind.fp32 == "heals":
        smaller = [stock(fault, d, "fp32", fault.lr * f) for f in (0.1, 0.01)]
        best = min(smaller, key=lambda r: (not r["healthy"], r["last"]))
    limit = best["last"] + 0.3 * (best["first"] - best["last"])
    learns = best["healthy"] and best["last"] < 0.85 * best["first"]
    if kind.fp32 in ("healthy", "heals") and not learns:
        return f"fp32 does not train it ({best['first']:.3g} to {best['last']:.3g}, {best['error']})", limit
    # A loss that stands still is no divergence.
    if kind.fp32 in ("fails", "heals") and trained(exact, math.inf if kind.fp32 == "fails" else 3 * exact["first"]):
        return "fp32 does not fail", limit
    if kind.fp32 == "any":
        limit = math.inf
    if trained(stock(fault, d, d.precision), math.inf if math.isnan(limit) else limit):
        return f"{d.precision} does not fail", limit
    return None, limit


def one(job: tuple[str, int]) -> dict[str, Any]:
    """A draw: does it bite, what was found, what came of it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    d = drawn(*job)
    kind = KINDS[d.kind]
    fault = kind.make(d)
    row: dict[str, Any] = {"kind": d.kind, "number": d.number, "draw": asdict(d)}
    row["not_biting"], limit = bites(kind, fault, d)
    if row["not_biting"] is not None:
        return row
    return {**row, **answer(kind, fault, d, limit)}


def answer(kind: Kind, fault: Fault, d: Draw, limit: float) -> dict[str, Any]:
    """What autoprec makes of it, scored."""
    import autoprec

    learn, seen = built(fault, d), cases.Seen()
    if d.precision == "bf16":
        learn.to_bf16()
    else:
        learn.to_fp16(**fault.scaler)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = autoprec.run(
                learn, 1, fault.lr, schedule="fit", emulate_cuda=True, audit=Path(folder) / "audit.jsonl",
                cbs=cases.spies(seen),
            )  # fmt: skip
        except Exception:  # noqa: BLE001  # shown in the table
            return {"crash": traceback.format_exc(), "ok": False}
    primary = outcome.diagnosis.primary
    line = cases._line(primary)
    truth = cases.truth(learn, SimpleNamespace(), seen)
    truth["healthy"] = truth["healthy"] and all(map(math.isfinite, seen.losses))
    well = outcome.result == "unrepaired" or trained(truth, math.inf if math.isnan(limit) else limit)
    mode = primary is not None and primary.mode in kind.modes
    place = None
    if kind.line:
        place = bool(line and f"# fault: {d.kind}" in line)
    elif fault.says:
        place = primary is not None and all(text in primary.because for text in fault.says)
    end = outcome.result in RESULTS[kind.repair] and well
    return {
        "mode": primary.mode if primary else None,
        "because": primary.because if primary else outcome.detail,
        "line": line,
        "where": str(primary.where) if primary and primary.where else None,
        "op": primary.op if primary else None,
        "evidence": dict(primary.evidence) if primary else {},
        "findings": [f"{f.mode}: {f.because}" for f in outcome.diagnosis.findings],
        "result": outcome.result,
        "precision": outcome.precision,
        "detail": outcome.detail,
        "changes": [f"{c.remedy}: {c.before} -> {c.after}" for c in outcome.changes],
        "attempts": [f"{a.remedy}: {'kept' if a.kept else a.reason}" for a in outcome.attempts],
        "last": truth["last"],
        "limit": limit,
        "skipped": truth["skipped"],
        "legs": outcome.price.legs,
        "mode_ok": mode,
        "place_ok": place,
        "end_ok": end,
        "ok": mode and end and place is not False,
        "seconds": time.perf_counter() - started,
    }


def table(found: list[dict[str, Any]]) -> None:
    """Shares per kind, then every draw that is not right."""
    out = cases._table("kind", "draws", "bite", "mode", "place", "end", "all", "in 16 bits", "found instead")
    total = [0] * 6
    for name in KINDS:
        mine = [r for r in found if r["kind"] == name]
        if not mine:
            continue
        hits = [r for r in mine if r["not_biting"] is None]
        counts = [
            len(mine), len(hits), sum(r.get("mode_ok", False) for r in hits),
            sum(r.get("place_ok") is True for r in hits), sum(r.get("end_ok", False) for r in hits),
            sum(r["ok"] for r in hits),
        ]  # fmt: skip
        total = [a + b for a, b in zip(total, counts, strict=True)]
        placed = sum(r.get("place_ok") is not None for r in hits)
        others = sorted({str(r.get("mode", "crash")) for r in hits if not r.get("mode_ok")})
        in16 = sum(r.get("precision") in ("fp16", "bf16") for r in hits if r.get("end_ok"))
        out.add_row(
            name, str(counts[0]), str(counts[1]), str(counts[2]), f"{counts[3]} of {placed}" if placed else "-",
            str(counts[4]), str(counts[5]), str(in16), ", ".join(others) or "-",
        )  # fmt: skip
    placed = sum(r.get("place_ok") is not None for r in found)
    out.add_row("all", *map(str, total[:3]), f"{total[3]} of {placed}", *map(str, total[4:]), "", "")
    cases._show(out)
    for r in found:
        if r["not_biting"] is None and not r["ok"]:
            wrong = ", ".join(n for n in ("mode", "place", "end") if r.get(f"{n}_ok") is False) or "crash"
            print(f"\n{r['kind']} {r['number']}: wrong {wrong}; {r.get('result')}, {r.get('mode')}: {r.get('because')}")
            print(f"    at {r.get('where')}: {r.get('line')}")
            print(f"    {r.get('changes')}, loss {r.get('last')}, limit {r.get('limit')}, {r.get('skipped')} skipped")
            print(f"    {r['draw']}")
            if "crash" in r:
                print(r["crash"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=100, help="draws in all, spread over the kinds")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--start", type=int, default=0, help="number of the first draw of each kind")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    each = math.ceil(args.n / len(args.kinds))
    jobs = [(k, args.start + i) for i in range(each) for k in args.kinds][: args.n]
    with ProcessPoolExecutor(args.jobs) as pool:
        found = list(pool.map(one, jobs))
    table(found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
