"""Small learners with known answers: what goes wrong in each, and what is right to do about it.

Plain tensors through fastai's loaders, a fit of well under a second. Weights and data are chosen so that the fault
happens at a known op; `Kind` says what autoprec must find and do. Model and loss classes stand at the top level, so
that an export can be loaded where only this file is importable.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fastai's own imports
    import fastai.callback.fp16
    import fastai.callback.schedule
    from fastai.callback.core import Callback
    from fastai.callback.progress import ProgressCallback
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner
    from fastai.losses import CrossEntropyLossFlat
    from fastai.metrics import accuracy
    from fastai.optimizer import SGD, Adam

BS = 16

FASTAI_WARNINGS = [
    # fastai 2.8 on torch 2.14, without an accelerator
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),
]


@pytest.fixture(autouse=True)
def thread_left_alone() -> Iterator[None]:
    """Fails a test that leaves something switched on in this thread, and switches it off for the next."""
    from autoprec.emulation import is_emulating
    from autoprec.snapshot import release_autocast

    found = thread_state()
    yield
    left = {"emulating": is_emulating(), **thread_state()}
    release_autocast()
    torch.set_autocast_dtype("cpu", found["dtype"])
    torch.set_grad_enabled(True)
    assert left == {"emulating": False, **found}


def thread_state() -> dict[str, Any]:
    """What a fit may leave switched on in this thread."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return {
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_autocast_dtype("cpu"),
        "nesting": nesting,
        "grad": torch.is_grad_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
    }


def seed_all(seed: int = 0) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Rows(TensorDataset):
    """Rows of tensors that `Learner.export` can empty."""

    def new_empty(self) -> Rows:
        return Rows(*[t[:0] for t in self.tensors])


def loaders(*tensors: torch.Tensor, bs: int = BS, valid: int = 32, shuffle: bool = False) -> DataLoaders:
    """Loaders over plain tensors; the last `valid` rows are the validation set."""
    train, held = Rows(*[t[:-valid] for t in tensors]), Rows(*[t[-valid:] for t in tensors])
    dls = DataLoaders(DataLoader(train, bs=bs, shuffle=shuffle), DataLoader(held, bs=bs))
    dls.device = torch.device("cpu")
    return dls


def say_nothing(*_args: object) -> None:
    """In place of fastai's logger."""


def quiet(dls: DataLoaders, model: nn.Module, loss_func: Any = None, **kwargs: Any) -> Learner:
    learn = Learner(dls, model, loss_func=loss_func or CrossEntropyLossFlat(), **kwargs)
    learn.remove_cb(ProgressCallback)
    learn.logger, learn.create_mbar = say_nothing, False
    return learn


def rows(n: int, width: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`n` rows of noise and the class that a fixed linear map gives them."""
    x = torch.randn(n, width)
    return x, (x @ torch.randn(width, classes)).argmax(1)


# ---- healthy --------------------------------------------------------------------------------------------------


def mlp(*, batches: int = 20, shuffle: bool = False, dropout: float = 0.0, **kwargs: Any) -> Learner:
    x, y = rows(batches * BS + 32, 8, 3)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 3))
    return quiet(loaders(x, y, shuffle=shuffle), model, metrics=accuracy, splitter=halves, **kwargs)


def halves(model: nn.Module) -> list[list[nn.Parameter]]:
    parameters = list(model.parameters())
    return [parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]]


def conv() -> Learner:
    x = torch.randn(24 * BS + 32, 1, 8, 8)
    y = (x[:, 0, :, :4].mean((1, 2)) > x[:, 0, :, 4:].mean((1, 2))).long()
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 2))
    return quiet(loaders(x, y), model)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x, src_key_padding_mask=pad).mean(1))


def transformer() -> Learner:
    x = torch.randn(40 * BS + 32, 6, 16)
    pad = torch.rand(len(x), 6) < 0.2
    pad[:, 0] = False
    return quiet(loaders(x, pad, (x.mean(1) @ torch.randn(16, 3)).argmax(1)), Encoder())


# ---- faults of 16 bits ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    """The product of queries and keys is scaled after it was made: about 8e4 before, in the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 3)
        with torch.no_grad():
            self.q.weight.mul_(80)
            self.k.weight.copy_(self.q.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        a = (q @ k.transpose(1, 2)) * 64**-0.5
        return self.head((x + self.norm(a.softmax(-1) @ v)).mean(1))


def attention() -> Learner:
    x = torch.randn(30 * BS + 32, 6, 64)
    return quiet(loaders(x, (x.mean(1) @ torch.randn(64, 3)).argmax(1)), Attention())


class FeedForward(nn.Module):
    """A hidden sum that an outlier row lifts above 65504, in the submodule `out`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(16, 64), nn.Linear(64, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)
        with torch.no_grad():
            self.inner.weight.mul_(20)
            self.out.weight.mul_(60)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.out(self.inner(x).relu())))


def feed_forward(*, first: int = 12, batches: int = 40) -> Learner:
    x, y = rows(batches * BS + 32, 16, 4)
    x[first * BS : -32 : 8] *= 1000  # an outlier in every training batch from `first` on
    return quiet(loaders(x, y), FeedForward())


class Gram(nn.Module):
    """A product over 1024 pixels, divided by their number too late."""

    def gram(self, f: torch.Tensor) -> torch.Tensor:
        f = f.flatten(2)
        return f @ f.transpose(1, 2) / (f.shape[1] * f.shape[2])

    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.l1_loss(self.gram(out), self.gram(target)) / 100


def gram() -> Learner:
    x = torch.rand(30 * 4 + 4, 3, 32, 32) * 20
    model = nn.Conv2d(3, 6, 3, padding=1)
    return quiet(loaders(x, torch.cat([x * 2, x.flip(1)], 1), bs=4, valid=4), model, Gram())


class TinyEpsilon(nn.Module):
    """Cosine similarity by hand: autocast makes the product of norms half, where its epsilon of 1e-8 is 0."""

    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        a, b = out[:, :, None], target[:, None]
        size = (a.transpose(1, 2) @ a * (b @ b.transpose(1, 2)) + 1e-9).flatten()
        dot = (b @ a).flatten()
        return 1 - (dot / size.sqrt()).mean()


def tiny_epsilon() -> Learner:
    x = torch.randn(30 * BS + 32, 8)
    y = x @ torch.randn(8, 4)
    y[::7] = 0  # a target of nothing: 0 / sqrt(0 + 1e-9) is 0, 0 / sqrt(0) is NaN
    return quiet(loaders(x, y), nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)), TinyEpsilon())


class HandNorm(nn.Module):
    """x / std over values of 1e-4: the gradient of the division passes 65504 at every loss scale."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(1, keepdim=True)
        return x / (x.std(1, keepdim=True) + 1e-6)


def hand_norm() -> Learner:
    x, y = rows(40 * BS + 32, 16, 3)
    first = nn.Linear(16, 32)
    with torch.no_grad():
        first.weight.mul_(2e-5)
        first.bias.zero_()
    return quiet(loaders(x, y), nn.Sequential(first, HandNorm(), nn.Linear(32, 3)), opt_func=partial(Adam, eps=1e-8))


class SummedLoss(nn.Module):
    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(out, target, reduction="sum")


def summed_loss() -> Learner:
    x = torch.randn(16 * BS + 32, 16)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64))
    return quiet(loaders(x, x @ torch.randn(16, 64) * 3), model, SummedLoss())


class MeanLoss(nn.Module):
    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(out, target)


def static_scale() -> Learner:
    """A gradient of some 1e-8 per pixel, at a loss scale fixed at 1: zero in half."""
    x = torch.randn(30 * 4 + 4, 1, 160, 160)
    model = nn.Conv2d(1, 1, 3, padding=1)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    y = 2e-4 * F.avg_pool2d(x, 3, 1, 1)
    return quiet(loaders(x, y, bs=4, valid=4), model, MeanLoss(), opt_func=partial(Adam, eps=1e-14))


class Offset(nn.Module):
    """Sine and cosine of angles in the thousands, whose fraction 11 bits of mantissa cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequency", torch.linspace(0.5, 4, 16)[None])
        self.head = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = x @ self.frequency
        return self.head(torch.cat([a.sin(), a.cos()], 1))


def offset() -> Learner:
    x = 3000 + torch.rand(80 * BS + 32, 1) * 6
    return quiet(loaders(x, ((x[:, 0] - 3000) % 2 > 1).long()), Offset())


def raw_inputs() -> Learner:
    """Columns of size 1e5: the first layer overflows, and one of size 1 would not."""
    x, y = rows(30 * BS + 32, 8, 3)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    return quiet(loaders(x * 3e5 + 1e5, y), model)


# ---- configuration --------------------------------------------------------------------------------------------


def half_model() -> Learner:
    learn = mlp()
    learn.model.half()
    return learn


def two_callbacks() -> Learner:
    learn = mlp()
    learn.to_fp16()
    return learn


class Masked(nn.Module):
    """A mask of -1e9, which has no half."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.v, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        scores = (self.qk(x) @ x.transpose(1, 2)).masked_fill(pad[:, None], -1e9)
        return self.head((x + scores.softmax(-1) @ self.v(x)).mean(1))


def masked() -> Learner:
    x = torch.randn(30 * BS + 32, 6, 16)
    pad = torch.rand(len(x), 6) < 0.3
    pad[:, 0] = False
    return quiet(loaders(x, pad, (x.mean(1) @ torch.randn(16, 3)).argmax(1)), Masked())


class UnscalesTwice(Callback):
    """Unscales before fastai's scaler does it again: gradients 65536 times too small."""

    order = 5

    def before_step(self) -> None:
        scaler = getattr(self.learn, "scaler", None)
        if scaler is not None and scaler.is_enabled():
            scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


def double_unscale() -> Learner:
    x, y = rows(50 * BS + 32, 8, 3)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    return quiet(loaders(x, y), model, opt_func=partial(Adam, eps=1e-5), cbs=[UnscalesTwice()])


# ---- faults that fp32 has too ---------------------------------------------------------------------------------


def nan_rows() -> Learner:
    x, y = rows(30 * BS + 32, 8, 3)
    x[9 * BS :: 37, 2] = float("nan")
    return quiet(loaders(x, y), nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)))


def ignored_targets() -> Learner:
    x, y = rows(30 * BS + 32, 8, 3)
    y[12 * BS : 13 * BS] = -100
    return quiet(loaders(x, y), nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)))


def high_lr() -> Learner:
    x = torch.randn(40 * BS + 32, 16) * 2
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    dls = loaders(x, (x @ torch.randn(16, 4)).tanh())
    return quiet(dls, model, MeanLoss(), opt_func=partial(SGD, mom=0.9))


class LogOfZero(nn.Module):
    """log(p) of a probability that a clamp made 0, in every precision."""

    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        p = out.softmax(-1).gather(1, target[:, None])[:, 0]
        return -torch.log(p - p.detach().min()).mean()


def log_of_zero() -> Learner:
    x, y = rows(20 * BS + 32, 8, 3)
    return quiet(loaders(x, y), nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)), LogOfZero())


# ---- models for the tests of islands ---------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """The block runs again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(8, 32), nn.ReLU()), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False))


# ---- the table -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A learner and what is right for it, trained by `fit` with `to_fp16(**scaler)` under CUDA's op lists.

    Attributes:
        make: builds the learner.
        mode: primary failure mode; None: nothing is wrong.
        result: result of the run.
        precision: what the fit must have run in.
        lr, epochs, scaler: how it is trained.
        below: mean training loss of the last quarter of the steps below which it counts as trained; found in fp32.
        remedies: what is kept, in order.
    """

    make: Callable[[], Learner]
    mode: str | None = None
    result: str = "healthy"
    precision: str | None = "fp16"
    lr: float = 0.01
    epochs: int = 1
    scaler: dict[str, Any] = field(default_factory=dict)
    below: float = float("inf")
    remedies: tuple[str, ...] = ()

    def learner(self, seed: int = 0) -> Learner:
        """The learner, built from a seed, asking for fp16."""
        seed_all(seed)
        return self.make().to_fp16(**self.scaler)


def _user(make: Callable[[], Learner], mode: str, lr: float = 0.01) -> Kind:
    return Kind(make, mode, "unrepaired", None, lr)


KINDS: dict[str, Kind] = {
    "mlp": Kind(mlp, below=0.7, epochs=2),
    "conv": Kind(conv, below=0.6, epochs=2),
    "transformer": Kind(transformer, below=0.95, lr=0.003),
    "attention": Kind(attention, "forward_overflow", "repaired", lr=0.003, below=1.0, remedies=("keep_modules_fp32",)),
    "feed_forward": Kind(feed_forward, "forward_overflow", "repaired", below=1.3, remedies=("keep_modules_fp32",)),
    "gram": Kind(gram, "loss_overflow", "repaired", lr=0.02, below=0.6, remedies=("loss_fp32",)),
    "tiny_epsilon": Kind(tiny_epsilon, "loss_underflow", "repaired", below=0.6, remedies=("loss_fp32",)),
    "hand_norm": Kind(
        hand_norm,
        "gradient_overflow",
        "repaired",
        lr=0.003,
        below=1.0,
        remedies=("keep_modules_fp32", "carry_scale"),
    ),
    "summed_loss": Kind(summed_loss, "skipped_steps", "repaired", lr=0.03, below=1.1e5, remedies=("carry_scale",)),
    "static_scale": Kind(
        static_scale,
        "gradient_underflow",
        "repaired",
        lr=2e-6,
        below=2e-9,
        remedies=("init_scale",),
        scaler={"init_scale": 1.0, "growth_interval": 1_000_000_000},
    ),
    "offset": Kind(offset, "precision_loss", "repaired", below=0.3, remedies=("keep_modules_fp32",)),
    "raw_inputs": Kind(raw_inputs, "unnormalized_inputs", "repaired", below=0.8, remedies=("normalize_inputs",)),
    "half_model": Kind(half_model, "half_precision_weights", "repaired", below=1.0, remedies=("master_weights",)),
    "two_callbacks": Kind(
        two_callbacks, "duplicate_precision_callbacks", "repaired", below=1.0, remedies=("one_precision_callback",)
    ),
    "masked": Kind(masked, "autocast_dtype_error", "repaired", below=1.0, remedies=("keep_modules_fp32",)),
    "double_unscale": Kind(
        double_unscale, "scaler_misuse", "repaired", "bf16", lr=0.003, below=0.9, remedies=("bf16",)
    ),
    "high_lr": Kind(high_lr, "lr_divergence", "repaired", lr=3.0, below=0.5, remedies=("lower_lr",)),
    "nan_rows": _user(nan_rows, "nonfinite_data"),
    "ignored_targets": _user(ignored_targets, "invalid_targets"),
    "log_of_zero": _user(log_of_zero, "fails_in_fp32"),
}


class Recording(Callback):
    """The training losses of the last fit, for a judgement of the tests' own."""

    order = 70

    def __init__(self) -> None:
        self.seen: list[float] = []

    def before_fit(self) -> None:
        self.seen.clear()

    def after_batch(self) -> None:
        if self.training:
            self.seen.append(float(self.learn.loss.detach()))

    @property
    def last(self) -> float:
        tail = self.seen[-max(1, len(self.seen) // 4) :]
        return sum(tail) / len(tail)


def finite(learn: Learner) -> bool:
    """Whether every weight and buffer is finite."""
    state = [*learn.model.parameters(), *learn.model.buffers()]
    return all(bool(torch.isfinite(t).all()) for t in state if t.is_floating_point())


def state_of(learn: Learner) -> dict[str, torch.Tensor]:
    """A copy of the weights and buffers."""
    return {k: v.detach().clone() for k, v in learn.model.state_dict().items()}


def same_state(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bits differ."""
    return [k for k in a if not torch.equal(a[k], b[k])] + sorted(set(a) ^ set(b))


@contextmanager
def stock_fp16_on_cpu() -> Any:
    """fastai's own MixedPrecision bound to the CPU's autocast and scaler, under CUDA's op lists."""
    from autoprec.emulation import emulate_cuda

    module = fastai.callback.fp16
    names = ("autocast", "GradScaler")
    before = [getattr(module, n) for n in names]

    def autocast(_device: str, **kwargs: Any) -> torch.autocast:
        return torch.autocast("cpu", **kwargs)

    def scaler(_device: str, **kwargs: Any) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", **kwargs)

    module.autocast, module.GradScaler = autocast, scaler
    try:
        with emulate_cuda():
            yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(module, name, value)
