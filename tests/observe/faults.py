"""Models whose first non-finite value is made at a known op, at a marked line, with a known value.

A line that makes one ends in `# here: NAME`; `line_of` finds it. Weights are constants, so every value is a closed
form. `replayed` puts a batch into a learner as a leg does, without training.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fastai's own imports
    import fastai.callback.fp16  # noqa: F401
    from fastai.callback.progress import ProgressCallback
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner

from autoprec.evidence import Precision
from autoprec.observe.origin import Replay
from autoprec.precision import Setting, computing

HERE = Path(__file__).resolve()
_MARK = re.compile(r"# here: (\w+)$")


def line_of(name: str) -> int:
    """The line marked with `name`, which must be one."""
    found = [i for i, text in enumerate(HERE.read_text().splitlines(), 1) if (m := _MARK.search(text)) and m[1] == name]
    assert len(found) == 1, f"{name} is marked on lines {found}"
    return found[0]


def say_nothing(*_args: object) -> None:
    """In place of fastai's logger."""


def learner(model: nn.Module, loss: Callable[..., Tensor], **kwargs: Any) -> Learner:
    """A learner over one row of nothing: what it computes is given as a batch."""
    nothing = TensorDataset(torch.zeros(2, 1), torch.zeros(2, 1))
    dls = DataLoaders(DataLoader(nothing, bs=2), DataLoader(nothing, bs=2))
    dls.device = torch.device("cpu")
    learn = Learner(dls, model, loss_func=loss, **kwargs)
    learn.remove_cb(ProgressCallback)
    learn.logger, learn.create_mbar = say_nothing, False
    learn.training, learn.pred = True, None
    model.train()
    return learn


@contextmanager
def replayed(
    model: nn.Module,
    loss: Callable[..., Tensor],
    xb: tuple[Any, ...],
    yb: tuple[Any, ...],
    precision: Precision,
    *,
    loss_fp32: bool = False,
) -> Iterator[Replay]:
    """The batch as a leg holds it, within what the precision needs."""
    learn = learner(model, loss)
    learn.xb, learn.yb = xb, yb
    with computing(learn, Setting(precision)):
        yield Replay.capture(learn, loss_fp32=loss_fp32)


# ---- pieces ---------------------------------------------------------------------------------------------------


def constant(module: nn.Module, value: float) -> Any:
    """All weights `value`, all biases 0."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.fill_(0.0 if name.endswith("bias") else value)
    return module


def square(width: int, value: float) -> nn.Linear:
    """A linear layer that takes the sum of its inputs times `value`."""
    return constant(nn.Linear(width, width), value)


def total(pred: Any, _target: Tensor) -> Tensor:
    """A loss that overflows nowhere: the mean of a float32 prediction over 1000."""
    return pred.float().mean() / 1000


def ones(*shape: int, value: float = 1.0) -> Tensor:
    return torch.full(shape, value)


# ---- forward --------------------------------------------------------------------------------------------------


def stock_linear() -> nn.Module:
    """2 x 100 x 200 = 40000, then 2 x 40000 x 1 = 80000 in the layer 1.0."""
    return nn.Sequential(square(2, 200.0), nn.Sequential(square(2, 1.0), nn.ReLU()))


def stock_conv() -> nn.Module:
    """9 pixels of 10 x 1000 = 90000."""
    return nn.Sequential(nn.Identity(), constant(nn.Conv2d(1, 1, 3), 1000.0))


class CallsLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small, self.big = square(2, 1.0), square(2, 300.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.small(x)
        return self.big(x)  # here: calls_linear


class SquareNorm(nn.Module):
    """Divides by the square root of the mean square, which it takes in the input's own dtype."""

    def forward(self, x: Tensor) -> Tensor:
        squares = x * x  # here: norm
        return x / squares.mean(-1, keepdim=True).sqrt()


def norm() -> nn.Module:
    return nn.Sequential(square(2, 1.0), nn.Sequential(SquareNorm(), nn.Linear(2, 1)))


class InForward(nn.Module):
    """One of several ways to make 90000 from 300, in a forward of its own that no submodule covers."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first = way, square(2, 0.5)

    def forward(self, x: Tensor) -> Tensor:  # noqa: C901, PLR0912  # a table of ways
        h = self.first(x)
        if self.way == "bmm":
            h = torch.bmm(h[:, None], h[:, :, None])  # here: bmm
        elif self.way == "einsum":
            h = torch.einsum("bi,bi->b", h, h)  # here: einsum
        elif self.way == "method":
            h = h.matmul(h.t())  # here: method
        elif self.way == "operator_matmul":
            h = h @ h.t()  # here: operator_matmul
        elif self.way == "in_place":
            h.mul_(300)  # here: in_place
        elif self.way == "operator_mul":
            h = h * h  # here: operator_mul
        elif self.way == "operator_pow":
            h = (h**2).to(h.dtype)  # here: operator_pow
        elif self.way == "operator_iadd":
            h = h * 200
            h += h  # here: operator_iadd
        elif self.way == "functional_linear":
            h = F.linear(h, self.first.weight * 600)  # here: functional_linear
        elif self.way == "functional_conv":
            h = F.conv1d(h[:, None], torch.full((1, 1, 2), 150.0))  # here: functional_conv
        elif self.way == "function":
            h = power(h)
        elif self.way == "two_lines":
            h = torch.bmm(  # here: two_lines
                h[:, None],
                h[:, :, None],
            )
        elif self.way == "half":
            h = (h.float() * 300).half()  # here: half
        elif self.way == "comprehension":
            h = torch.stack([row * 300 for row in h])  # here: comprehension
        return h


def power(h: Tensor) -> Tensor:
    return h * h  # here: function


class Loop(nn.Module):
    """One line over and over: 300 doubled eight times is 76800."""

    def __init__(self) -> None:
        super().__init__()
        self.first = square(2, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(10):
            h = h + h  # here: loop
        return h


class Listed(nn.Module):
    """Ten layers on one line, each doubling: 300 is 76800 after the eighth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(square(2, 1.0) for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)  # here: listed
        return x


class Attends(nn.Module):
    """torch's attention: queries and keys of 800, whose product over two channels is 2 x 800 x 800 / sqrt(2)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = constant(nn.MultiheadAttention(4, 2, batch_first=True), 10.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=True)[0]  # here: attends


class Encodes(nn.Module):
    """torch's encoder with a padding mask, which becomes -inf; its second layer overflows in `linear2`."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2)
        constant(self.encoder.layers[1].linear1, 0.0).bias.data.fill_(1.0)
        constant(self.encoder.layers[1].linear2, 1e4)

    def forward(self, x: Tensor) -> Tensor:
        pad = torch.zeros(x.shape[:2], dtype=torch.bool)
        pad[:, -1] = True
        return self.encoder(x, src_key_padding_mask=pad)  # here: encodes


class Operand(nn.Module):
    """A constant of 1e6, which is no half, made on the line that uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = square(2, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return torch.matmul(h, torch.full((2, 2), 1e6))  # here: operand


def hooked() -> nn.Module:
    """A hook of the user's: its op belongs to the module around."""
    layer = square(2, 0.5)
    layer.register_forward_hook(lambda _module, _args, out: out * 300)  # here: hook
    return nn.Sequential(layer)


class Statistics(nn.Module):
    """A variance past float32: the output is finite, and the running variance infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(2), square(2, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))  # here: statistics


class Twice(nn.Module):
    """One module used twice: 2 x 50 x 30 = 3000, then 2 x 3000 x 30 = 180000."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = square(2, 30.0)
        self.again = self.shared

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        return self.again(x)  # here: twice


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.block, self.head = square(2, 0.5), Block(), square(2, 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.block, self.first(x), use_reentrant=self.use_reentrant)
        return self.head(h)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = square(2, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x * x  # here: block


class FillsIt(nn.Module):
    """Infinity where none is meant, with nothing else wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.first = square(2, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return h.masked_fill(h > 0, torch.inf)  # here: fills


class Masked(nn.Module):
    """-inf on purpose, then an overflow; or with no overflow at all."""

    def __init__(self, *, overflows: bool) -> None:
        super().__init__()
        self.first, self.factor = square(2, 0.5), 300.0 if overflows else 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        mask = torch.tensor([False, True]).expand_as(h)
        scores = h.masked_fill(mask, -torch.inf)
        scores = torch.where(mask, torch.tensor(-torch.inf), scores)
        bias = torch.zeros_like(h, dtype=torch.float32).masked_fill_(mask, float("-inf"))
        weights = (scores + bias).softmax(-1)
        return weights * (h * self.factor)  # here: masked


class FullyMasked(nn.Module):
    """Softmax over a row in which everything is masked is 0 / 0, in every precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first = square(2, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h.masked_fill(torch.ones_like(h, dtype=torch.bool), -torch.inf)
        return h.softmax(-1)  # here: fully_masked


class Absorbed(nn.Module):
    """1 / (h * h): 1 / inf is 0, and nothing shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = square(2, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return 1 / (h * h)  # here: absorbed


class Times300(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 300  # here: custom_forward

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 300


class ThroughFunction(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.function = square(2, 0.5), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self.first(x))


@dataclass
class Output:
    logits: Tensor
    extra: dict[str, list[Tensor]] = field(default_factory=dict)


class Structured(nn.Module):
    """An output that is no tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first = kind, square(2, 0.5)

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        big = h * 300  # here: structured
        if self.kind == "dict":
            return {"logits": h, "extra": [big]}
        if self.kind == "nested":
            return h, (h, [{"extra": big}])
        return Output(h, {"extra": [big]})


def structured_loss(pred: Any, _target: Tensor) -> Tensor:
    big = pred["extra"][0] if isinstance(pred, dict) else pred[1][1][0]["extra"] if isinstance(pred, tuple) else None
    big = pred.extra["extra"][0] if big is None else big
    return big.float().mean()


class Cancels(nn.Module):
    """1 / (h - offset), where h is offset + 0.5 and the 16-bit mantissa rounds the half away."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.first, self.offset = constant(nn.Linear(1, 1), 1.0), offset

    def forward(self, x: Tensor) -> Tensor:
        distance = self.first(x) - self.offset
        return 1 / distance  # here: cancels


class LogOfSmall(nn.Module):
    """log(p) of a probability of 1e-9 that half cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first = constant(nn.Linear(1, 1), 1e-9)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self.first(x))  # here: log_of_small


# ---- loss -----------------------------------------------------------------------------------------------------


def product_loss(pred: Tensor, target: Tensor) -> Tensor:
    return (pred @ target.t()).mean()  # here: loss_function


class ProductLoss(nn.Module):
    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        return self.product(pred, target).mean()

    def product(self, pred: Tensor, target: Tensor) -> Tensor:
        return torch.bmm(pred[:, None], target[:, :, None])  # here: loss_module


# ---- backward -------------------------------------------------------------------------------------------------


class DividesBy(nn.Module):
    """y = h / c: the gradient of h is the gradient of y over c."""

    def __init__(self, divisor: float) -> None:
        super().__init__()
        self.first, self.divisor = square(2, 0.5), divisor

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return h / self.divisor  # here: divides


class Grows(nn.Module):
    """The gradient of the last output is 64 x 1000; of its input 2 x 4 times that, of its weight the half of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = square(2, 1.0), square(2, 4.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = self.last(h)  # here: grows
        return h * 1000


class Scales(nn.Module):
    """x times a constant that is learnt, so that a gradient comes this far."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,->bi", x, self.factor)


class HandNorm(nn.Module):
    """x / std by hand, over small values."""

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        return centred / (centred.std(1, keepdim=True) + 1e-6)  # here: hand_norm


class RootAtZero(nn.Module):
    """sqrt(relu(x)) at 0: its derivative is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.first = square(2, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        return h.sqrt()  # here: root


class GrowsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1000  # here: custom_backward


# ---- faults that fp32 has too ---------------------------------------------------------------------------------


class LogOfZero(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = square(2, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        p = h - h.detach()
        return p.log()  # here: log_of_zero


class ZeroByZero(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = square(2, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return h / h.sum(1, keepdim=True)  # here: zero_by_zero


class StdOfOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = square(2, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return h / h.std(0)  # here: std_of_one


# ---- state that a replay must put back ------------------------------------------------------------------------


class Stateful(nn.Module):
    """Buffers and draws from three generators: 200 x 300 x count is 60000 in the first step, 120000 in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = square(2, 0.5), nn.BatchNorm1d(2), nn.Dropout(0.5)
        self.register_buffer("count", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.drop(self.norm(h))
        random.random()
        np.random.rand()
        h = h * (300 * float(self.count))  # here: stateful
        self.count += 1
        return h
