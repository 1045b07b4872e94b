"""`autoprec demo`: a run that fails in fp16, found out, repaired, trained; before and after side by side.

Scikit-learn's digits as grey values of 0 to 255, and a small attention net that is given them as they are. Fp32
trains; in fp16 the products of queries and keys leave half's range. Three runs from the same weights on the same
batches: stock fp16, fp32, autoprec. On a CPU the 16-bit arithmetic is real and follows CUDA's op lists.
"""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

if TYPE_CHECKING:
    from fastai.learner import Learner

    from autoprec.evidence import Precision
    from autoprec.outcome import Outcome

__all__ = ["PatchAttention", "main"]

_EPOCHS, _LR = 8, 4e-3
_TOLERANCE = 0.01  # of accuracy: one point, which is four of the 360 validation images
_WIDEST = 100


class PatchAttention(nn.Module):
    """One attention layer over patches of 2 by 2 pixels; a user's model, so findings name its lines."""

    def __init__(self, dim: int = 96) -> None:
        super().__init__()
        self.patches = nn.Unfold(2, stride=2)
        self.embed = nn.Linear(4, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Sequential(nn.Linear(16 * dim, 64), nn.GELU(), nn.Linear(64, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Class scores `[N, 10]` of images `[N, 1, 8, 8]`."""
        x = self.embed(self.patches(images).transpose(1, 2))
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        x = self.norm(x + scores.softmax(dim=-1) @ v)
        classes: Tensor = self.head(x.flatten(1))
        return classes


@dataclass(frozen=True)
class _Run:
    """One column of the table."""

    name: str
    precision: str
    loss: float
    accuracy: float
    attempted: int
    skipped: int
    seconds: float
    probing: float = 0.0

    @property
    def fails(self) -> bool:
        return not math.isfinite(self.loss)


def main() -> int:
    """Run the demo and print it.

    Returns:
        0 if the run was repaired and is as accurate as fp32 within one percentage point, else 1.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices as small as these take longer on two threads, much longer on a busy machine
    try:
        return _show()
    finally:
        torch.set_num_threads(threads)


def _show() -> int:
    console = Console(highlight=False)
    console.width = min(console.width, _WIDEST)
    cuda = torch.cuda.is_available()
    where = "on this GPU" if cuda else "on this CPU, 16 bits emulated: real rounding and overflow, CUDA's op lists"
    console.print("[bold]autoprec demo[/]: digits of 8 x 8 pixels, a small attention net")
    console.print(f"[dim]{where}[/]\n")
    with warnings.catch_warnings():
        # fastai's imports call what torch has deprecated, and it pins memory also where no accelerator reads it
        warnings.filterwarnings("ignore", message=".*(torch.jit|pin_memory).*")
        stock = _told(console, "stock fp16", lambda: _plain("stock fp16", "fp16"))
        fp32 = _told(console, "fp32", lambda: _plain("fp32", "fp32"))
        audit = Path(tempfile.mkdtemp(prefix="autoprec-demo-")) / "audit.jsonl"
        outcomes: list[Outcome] = []
        repaired = _told(console, "autoprec", lambda: _repaired(audit, outcomes))
    outcome = outcomes[0]
    console.print()
    console.print(_table(stock, fp32, repaired))
    console.print()
    console.print(_why(outcome, audit))
    good = outcome.result == "repaired" and stock.fails and repaired.accuracy >= fp32.accuracy - _TOLERANCE
    if not good:
        console.print("\n[bold red]The demo did not go as it should[/]; please report it with the audit file.")
    return 0 if good else 1


def _told(console: Console, name: str, work: Callable[[], _Run]) -> _Run:
    """Do the work and say on one line how it went."""
    with console.status(f"{name} ..."):
        run = work()
    end = "[red]the validation loss is nan[/]" if run.fails else f"[green]accuracy {run.accuracy:.1%}[/]"
    console.print(f"  {name:<12}{end} [dim]after {run.seconds + run.probing:.0f} s[/]")
    return run


def _learner() -> Learner:
    """The same learner every time: data, weights, and the order of the batches to come."""
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.losses import CrossEntropyLossFlat
    from fastai.metrics import accuracy
    from fastai.torch_core import set_seed
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch.utils.data import TensorDataset

    set_seed(0)
    digits = load_digits()
    grey = torch.tensor(digits.images * 255 / 16).float()[:, None]  # as an image file has them; never normalized
    x, x_valid, y, y_valid = train_test_split(grey, torch.tensor(digits.target), test_size=0.2, random_state=0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dls = DataLoaders.from_dsets(TensorDataset(x, y), TensorDataset(x_valid, y_valid), bs=64, device=device)
    return Learner(dls, PatchAttention(), CrossEntropyLossFlat(), metrics=accuracy)


def _plain(name: str, precision: Precision) -> _Run:
    """Stock fastai, without autoprec; away from CUDA its MixedPrecision is only bound to the device."""
    from autoprec.precision import Setting, attached

    learn = _learner()

    def fit(steps: Any) -> None:
        with attached(learn, Setting(precision)):
            learn.fit_one_cycle(_EPOCHS, _LR, cbs=[steps])

    return _measured(name, precision, learn, fit)


def _repaired(audit: Path, outcomes: list[Outcome]) -> _Run:
    """What a user would write: `to_fp16()`, and `fit_safely` in place of `fit_one_cycle`."""
    import fastai.callback.fp16  # noqa: F401  # gives Learner its to_fp16

    import autoprec

    learn = _learner().to_fp16()

    def fit(steps: Any) -> None:
        autoprec.fit_safely(
            learn, _EPOCHS, _LR, emulate_cuda=True, audit=audit, on_failure="return", seed=0, cbs=[steps]
        )

    run = _measured("autoprec", "", learn, fit)
    outcome: Outcome = learn.autoprec
    outcomes.append(outcome)
    price = outcome.price
    return _Run(
        name=run.name,
        precision=outcome.precision or "-",
        loss=run.loss,
        accuracy=run.accuracy,
        attempted=run.attempted,
        skipped=run.skipped,
        seconds=price.fit_seconds or 0.0,
        probing=price.seconds,
    )


def _measured(name: str, precision: str, learn: Learner, fit: Callable[[Any], None]) -> _Run:
    import fastai.callback.schedule  # noqa: F401  # gives Learner its fit_one_cycle

    steps = _steps()
    started = time.perf_counter()
    with learn.no_bar(), learn.no_logging():
        fit(steps)
    seconds = time.perf_counter() - started
    values = getattr(learn.recorder, "values", None)
    _, loss, accuracy = values[-1] if values else (math.nan,) * 3
    return _Run(name, precision, loss, accuracy, steps.attempted, steps.attempted - steps.taken, seconds)


def _steps() -> Any:
    from fastai.callback.core import Callback

    class Steps(Callback):  # type: ignore[misc]  # fastai ships no types
        """Counts the steps of the last fit; order 11 is reached only by those that the scaler lets through."""

        order = 11

        def before_fit(self) -> None:
            self.attempted = self.taken = 0

        def before_backward(self) -> None:
            self.attempted += 1

        def before_step(self) -> None:
            self.taken += 1

    return Steps()


def _table(*runs: _Run) -> Table:
    """The runs side by side."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 2), header_style="bold")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")

    def row(name: str, value: Callable[[_Run], str]) -> None:
        table.add_row(name, *(Text(value(run), style="red" if run.fails else "") for run in runs))

    row("precision", lambda r: r.precision)
    row("validation loss", lambda r: f"{r.loss:.3f}")
    row("accuracy", lambda r: f"{r.accuracy:.1%}")
    row("steps skipped", lambda r: f"{r.skipped} of {r.attempted}")
    row("seconds to fit", lambda r: f"{r.seconds:.1f}")
    row("seconds to probe", lambda r: f"{r.probing:.1f}" if r.probing else "-")
    return table


def _why(outcome: Outcome, audit: Path) -> Table:
    """What was wrong, where, and what was done; two columns, so that sentences wrap in the second."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    primary = outcome.diagnosis.primary
    if primary is not None:
        table.add_row("  found", Text(f"{primary.mode}: {primary.because}"))
        if primary.where is not None:
            table.add_row("  at", Text(str(primary.where)))
            table.add_row("", Text(primary.where.source or "", style="cyan"))
        if primary.suggestion:
            table.add_row("  in code", Text(primary.suggestion))
    for change in outcome.changes:
        table.add_row("  changed", Text(f"{change.what}: {change.before} -> {change.after}"))
    if outcome.result != "repaired":
        table.add_row("  result", Text(f"{outcome.result}: {outcome.detail}"))
    table.add_row("  audit", Text(str(audit), overflow="fold"))
    table.add_row("  read it", Text(f"{_command()} report {audit}", overflow="fold"))
    return table


def _command() -> str:
    """The command line as it can be typed here."""
    if shutil.which("autoprec"):
        return "autoprec"
    script = Path(sys.executable).parent / "autoprec"
    return str(script.relative_to(Path.cwd())) if script.is_relative_to(Path.cwd()) else str(script)
