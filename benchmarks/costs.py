"""What looking costs, in fp32 steps' worth of time.

    python benchmarks/costs.py FOLDER [NAME ...] [--reps 5] [--seed 0] [--resnet-steps 8] [--json out.json]

FOLDER holds cases as for `cases.py`; `--resnet-steps 0` leaves out the two ResNet-18 at 32 by 32 pixels, one healthy
and one with a convolution that overflows. Everything runs on one core, in turn: in each repetition a plain fp32 fit, a
plain fp16 fit and a diagnosis of each case. Times are CPU time of the process, so that others on the machine count for
little. A figure is a ratio within one repetition; the tables give medians over repetitions.

Three costs, each with its limit:
  probe      a healthy learner: the 16-bit leg and its fp32 twin, snapshots and restores included, per probe step;
             and the whole diagnosis of a healthy learner, per probe step
  origin     tracing one failing batch to its op
  diagnosis  everything that `autoprec.diagnose` does on a failing learner, at worst

16-bit arithmetic is emulated here, and a step of it costs more than one in fp32. So each cost is given twice: in fp32
steps, emulation and all; and net of it, with the time of 16-bit legs and of tracing counted in plain steps of the
emulated fp16 (as on hardware, where such a step costs no more than an fp32 step), the rest in fp32 steps. Exits with 1
if a limit does not hold net of emulation.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

from cases import fresh, load, read_yaml

PROBE, ORIGIN, DIAGNOSIS = 5.0, 10.0, 400.0


@dataclass
class Clocks:
    """Seconds, by what they were spent on."""

    traces: list[float] = field(default_factory=list)
    legs: list[tuple[str, int, float]] = field(default_factory=list)
    """Precision, steps, seconds without tracing."""
    total: float = 0.0


@contextmanager
def clocks() -> Iterator[Clocks]:
    """Time every leg (with its snapshot) and every trace that a diagnosis makes."""
    from autoprec.observe import gather, gradients, leg, origin

    seen = Clocks()
    original, original_leg = origin.trace, gather.Gatherer._leg

    def trace(*args: Any, **kwargs: Any) -> Any:
        started = time.process_time()
        try:
            return original(*args, **kwargs)
        finally:
            seen.traces.append(time.process_time() - started)

    def timed_leg(self: Any, spec: Any, *args: Any, **kwargs: Any) -> Any:
        started, before = time.process_time(), sum(seen.traces)
        result = original_leg(self, spec, *args, **kwargs)
        seconds = time.process_time() - started - (sum(seen.traces) - before)
        seen.legs.append((spec.precision, len(result.steps), seconds))
        return result

    with (
        mock.patch.object(leg, "trace", trace),
        mock.patch.object(gradients, "trace", trace),
        mock.patch.object(gather.Gatherer, "_leg", timed_leg),
    ):
        started = time.process_time()
        yield seen
        seen.total = time.process_time() - started


def step_seconds(learn: Any, precision: str, case: Any) -> float:
    """Mean seconds from one batch to the next in a plain fit, the first left out."""
    from fastai.callback.core import Callback

    from autoprec.precision import Setting, attached
    from autoprec.snapshot import release_autocast

    ends: list[float] = []

    class Ticks(Callback):  # type: ignore[misc]
        order = 1000

        def after_batch(self) -> None:
            if self.training:
                ends.append(time.process_time())

    setting = Setting(precision, getattr(case, "SCALER_KW", {}))
    try:
        with attached(learn, setting):
            learn.fit(1, case.LR, cbs=Ticks())
    finally:
        release_autocast()
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def measure(case: Any, seed: int) -> dict[str, Any]:
    """One repetition of one case."""
    import autoprec

    gc.collect()
    steps: dict[str, float] = {}
    for precision in ("fp32", "fp16"):
        try:
            steps[precision] = step_seconds(fresh(case, seed), precision, case)
        except Exception:  # noqa: BLE001, PERF203  # raises in this precision: its cured form takes the same time
            steps[precision] = step_seconds(fresh(case, seed, fixed=True), precision, case)
    learn = fresh(case, seed)
    learn.to_fp16(**getattr(case, "SCALER_KW", {}))
    with clocks() as seen:
        found = autoprec.diagnose(learn, case.EPOCHS, case.LR, schedule="fit", emulate_cuda=True)
    fp32, fp16 = steps["fp32"], steps["fp16"]
    half = sum(s for p, _, s in seen.legs if p != "fp32") + sum(seen.traces)
    main = next((leg for leg in seen.legs if leg[0] == "fp16"), None)
    twin = next((leg for leg in seen.legs if leg[0] == "fp32"), None)
    row: dict[str, Any] = {
        "mode": found.primary.mode if found.primary else None,
        "fp32_ms": fp32 * 1e3,
        "fp16_ms": fp16 * 1e3,
        "legs": len(seen.legs),
        "leg_steps": sum(n for _, n, _ in seen.legs),
        "diagnosis": seen.total / fp32,
        "diagnosis_net": half / fp16 + (seen.total - half) / fp32,
    }
    if found.primary is None and main and twin and main[1]:
        row["probe"] = (main[2] + twin[2]) / main[1] / fp32
        row["probe_net"] = (main[2] / fp16 + twin[2] / fp32) / main[1]
        row["look"] = row["diagnosis"] / main[1]
        row["look_net"] = row["diagnosis_net"] / main[1]
    if seen.traces:
        row["origin"] = max(seen.traces) / fp32
        row["origin_net"] = max(seen.traces) / fp16
    return row


def resnet(steps: int, *, overflowing: bool) -> Any:
    """ResNet-18 as a case: random images, 32 a batch; overflowing, one convolution of its third stage gives 1e6."""

    def make_learner(seed: int, **_: Any) -> Any:
        import torch
        from fastai.data.core import DataLoaders
        from fastai.data.load import DataLoader
        from fastai.learner import Learner
        from fastai.losses import CrossEntropyLossFlat
        from torch.utils.data import TensorDataset
        from torchvision.models import resnet18

        torch.manual_seed(seed)
        x, y = torch.randn(32 * (steps + 1), 3, 32, 32), torch.randint(10, (32 * (steps + 1),))
        x += y[:, None, None, None] / 10
        loaders = [DataLoader(TensorDataset(a, b), bs=32) for a, b in ((x[:-32], y[:-32]), (x[-32:], y[-32:]))]
        model = resnet18(num_classes=10)
        if overflowing:
            with torch.no_grad():
                model.layer3[0].conv1.weight.mul_(1e6)
        return Learner(DataLoaders(*loaders), model, loss_func=CrossEntropyLossFlat())

    return SimpleNamespace(make_learner=make_learner, LR=1e-3, EPOCHS=1)


def table(rows: dict[str, dict[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    out = Table(box=None, pad_edge=False, header_style="bold", title="In fp32 steps' worth of time / net of emulation")
    words, numbers = ("learner", "found"), ("fp32 ms", "fp16 ms", "legs", "steps")
    for name in (*words, *numbers, "probe", "whole look", "origin", "diagnosis"):
        out.add_column(name, justify="left" if name in words else "right", no_wrap=True)

    def both(r: dict[str, float], key: str) -> str:
        return f"{r[key]:.1f} / {r[key + '_net']:.1f}" if key in r else "-"

    for name, r in rows.items():
        out.add_row(
            name, r["mode"] or "nothing", f"{r['fp32_ms']:.2f}", f"{r['fp16_ms']:.2f}", f"{r['legs']:.0f}",
            f"{r['leg_steps']:.0f}", both(r, "probe"), both(r, "look"), both(r, "origin"), both(r, "diagnosis"),
        )  # fmt: skip
    Console(width=180).print(out)


def limits(rows: dict[str, dict[str, float]]) -> bool:
    """Print each cost beside its limit; do they all hold, net of emulation?"""
    from rich.console import Console
    from rich.table import Table

    out = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("cost", "over", "limit", "fp32 steps", "holds", "net of emulation", "holds "):
        out.add_column(name, no_wrap=True)
    holds = True

    def line(cost: str, key: str, limit: float, take: Any, names: list[str], over: str) -> None:
        nonlocal holds
        values = [(rows[n][key], rows[n][f"{key}_net"]) for n in names if key in rows[n]]
        if not values:
            return
        gross, net = take(g for g, _ in values), take(n for _, n in values)
        holds = holds and net <= limit
        out.add_row(
            cost, over.format(len(values)), f"{limit:g}", f"{gross:.1f}", "yes" if gross <= limit else "NO",
            f"{net:.1f}", "yes" if net <= limit else "NO",
        )  # fmt: skip

    small = [n for n in rows if not n.startswith("ResNet")]
    big = [n for n in rows if n.startswith("ResNet")]
    for names, what in ((small, "cases"), (big, "ResNet-18")):
        middle, worst = f"median of {{}} {what}", f"worst of {{}} {what}"
        line("healthy probe with twin, per step", "probe", PROBE, statistics.median, names, middle)
        line("whole look at a healthy learner, per step", "look", PROBE, statistics.median, names, middle)
        line("origin of one failing batch", "origin", ORIGIN, statistics.median, names, middle)
        line("origin, at worst", "origin", ORIGIN, max, names, worst)
        line("whole diagnosis, at worst", "diagnosis", DIAGNOSIS, max, names, worst)
    print()
    Console(width=180).print(out)
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="only cases whose name contains one of these")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resnet-steps", type=int, default=8, help="steps of a ResNet-18 fit; 0: none")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    wanted = read_yaml(args.folder / "expected.yaml")
    paths = [p for p in sorted(args.folder.glob("*.py")) if p.stem in wanted]
    if args.names:
        paths = [p for p in paths if any(n in p.stem for n in args.names)]
    subjects: dict[str, Any] = {p.stem: load(p) for p in paths}
    if args.resnet_steps:
        make = partial(resnet, args.resnet_steps)
        subjects |= {"ResNet-18": make(overflowing=False), "ResNet-18, overflowing": make(overflowing=True)}
    seen: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for rep in range(args.reps + 1):
        for name, case in subjects.items():
            row = measure(case, args.seed)
            if rep or args.reps == 0:  # the first time round warms caches and imports
                seen[name].append(row)
    rows = {n: _median(rs) for n, rs in seen.items()}
    table(rows)
    well = limits(rows)
    if args.json:
        args.json.write_text(json.dumps({"median": rows, "all": seen}, indent=1))
    return 0 if well else 1


def _median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    keys = [k for k in rows[0] if k != "mode" and all(k in r for r in rows)]
    return {"mode": rows[0]["mode"], **{k: statistics.median(r[k] for r in rows) for k in keys}}


if __name__ == "__main__":
    sys.exit(main())
