"""Is the emulation right? Stock fastai on CUDA beside the emulation on the CPU, over a folder of cases.

    python benchmarks/gpu.py --verdicts FOLDER [--names ...] [--seed 0] [--jobs 4] [--json out.json] [--dry-run]

Every case (any file with `make_learner(seed)`, see `cases.py`) trains four times: fp16 and bf16, each in stock
fastai on CUDA and under the emulation. A cell says `same` and the value, or both numbers, CUDA's first. Numbers of
one run differ by rounding alone: losses count as the same within 5 %, counts of steps within 2.

Needs a CUDA device; without one it exits with 2. `--dry-run` compares stock CPU autocast instead of CUDA, whose op
lists are not CUDA's: it tests this script, not the emulation.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from cases import Seen, fresh, load, spies, truth

NUMBERS = ("last", "valid", "nonfinite", "skipped", "scale")


def side(path: Path, seed: int, precision: Any, where: str) -> dict[str, Any]:
    """One run: `where` is "cuda" (fastai's own MixedPrecision), "cpu" (stock CPU autocast) or "emulation"."""
    import torch

    from autoprec.precision import DevicePrecision, Setting, attached
    from autoprec.snapshot import release_autocast

    torch.set_num_threads(1)
    case = load(path)
    learn, seen, error = fresh(case, seed), Seen(), None
    learn.dls.device = torch.device("cuda" if where == "cuda" else "cpu")
    kwargs = getattr(case, "SCALER_KW", {}) if precision == "fp16" else {}
    started = time.perf_counter()
    try:
        if where == "cpu":
            learn.add_cb(DevicePrecision(precision, "cpu", **kwargs)).fit(case.EPOCHS, case.LR, cbs=spies(seen))
        else:
            with attached(learn, Setting(precision, kwargs)):
                learn.fit(case.EPOCHS, case.LR, cbs=spies(seen))
    except Exception as e:  # noqa: BLE001  # an op that refuses is a verdict too
        error = f"{type(e).__name__}: {e}".splitlines()[0][:120]
    finally:
        release_autocast()
    return {
        **truth(learn, case, seen, error),
        "nonfinite": next((i for i, loss in enumerate(seen.losses) if not math.isfinite(loss)), None),
        "skipped": len(seen.losses) - seen.taken,
        "scale": seen.scale,
        "error": error,
        "seconds": time.perf_counter() - started,
    }


def pair(path: Path, seed: int, precision: str, first: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    sides = [side(path, seed, precision, where) for where in (first, "emulation")]
    return {"case": path.stem, "precision": precision, first: sides[0], "emulation": sides[1]}


def alike(name: str, a: float | None, b: float | None) -> bool:
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return str(a) == str(b)
    if name in ("nonfinite", "skipped"):
        return abs(a - b) <= 2
    return math.isclose(a, b, rel_tol=0.05, abs_tol=1e-3)


def cell(name: str, a: float | None, b: float | None) -> str:
    said = ["-" if v is None else f"{v:.4g}" for v in (a, b)]
    return f"same {said[0]}" if alike(name, a, b) else " | ".join(said)


def table(rows: list[dict[str, Any]], first: str) -> int:
    """Print rows and totals; return how many verdicts are the same."""
    from rich.console import Console
    from rich.table import Table

    out = Table(box=None, pad_edge=False, header_style="bold", title=f"{first} | emulation", title_justify="left")
    for name in ("case", "in", "verdict", "last loss", "valid loss", "non-finite at", "skipped", "final scale"):
        out.add_column(name, no_wrap=True)
    same = numbers = 0
    notes = []
    for row in rows:
        a, b = row[first], row["emulation"]
        words = ["error" if s["error"] else "healthy" if s["healthy"] else "fails" for s in (a, b)]
        agree = words[0] == words[1]
        same += agree
        numbers += agree and all(alike(n, a[n], b[n]) for n in NUMBERS)
        verdict = f"same {words[0]}" if agree else f"[bold red]{words[0]} | {words[1]}[/]"
        out.add_row(row["case"], row["precision"], verdict, *(cell(n, a[n], b[n]) for n in NUMBERS))
        notes += [f"{row['case']} {row['precision']} {w}: {row[w]['error']}" for w in row if w in (first, "emulation")
                  and row[w]["error"]]  # fmt: skip
    Console(width=150).print(out)
    print("\n" + "\n".join(notes) if notes else "")
    seconds = {w: sum(r[w]["seconds"] for r in rows) for w in (first, "emulation")}
    print(f"{len(rows)} runs: same verdict {same}, of these the same in all numbers {numbers}; "
          + ", ".join(f"{w} {s:.0f} s" for w, s in seconds.items()))  # fmt: skip
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verdicts", type=Path, metavar="FOLDER", required=True)
    parser.add_argument("--names", nargs="*", help="only cases whose name contains one of these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="stock CPU autocast in place of CUDA")
    args = parser.parse_args()
    paths = [p for p in sorted(args.verdicts.glob("*.py")) if "def make_learner" in p.read_text()]
    paths = [p for p in paths if not args.names or any(n in p.stem for n in args.names)]
    if not paths:
        parser.error(f"no case in {args.verdicts}: a case is a python file with make_learner(seed)")
    first = "cpu" if args.dry_run else "cuda"
    if not args.dry_run:
        import torch

        if not torch.cuda.is_available():
            print(
                "No CUDA device here, so there is nothing to compare the emulation with (--dry-run tests the script)."
            )
            return 2
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    jobs = [(p, args.seed, precision, first) for p in paths for precision in ("fp16", "bf16")]
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        rows = list(pool.map(pair, *zip(*jobs, strict=True)))
    table(rows, first)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
