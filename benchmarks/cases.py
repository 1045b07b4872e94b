"""Run `autoprec.run` over a folder of failing learners and print what was found beside what should be.

    python benchmarks/cases.py FOLDER [NAME ...] [--seeds 0 1] [--policy default] [--jobs 2] [--json out.json]

A case is a Python file with `make_learner(seed)`; it may set LR, EPOCHS, SCALER_KW (arguments of to_fp16) and
HEALTHY_BELOW (the mean training loss of the last quarter of the steps below which a run counts as trained).
`expected.yaml` in the folder gives, per case: `modes` (right primary findings; empty: none), `repair`
("settings", "user", "none") and `keeps16`. Everything runs in real 16-bit arithmetic under CUDA's op lists.

The returned learner is scored by itself, not by what the outcome says of it: weights, buffers and validation loss
finite, last losses below the case's limit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

RESULTS = {"settings": ("repaired",), "user": ("unrepaired",), "none": ("healthy",)}


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"case_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no python file")
    module = importlib.util.module_from_spec(spec)
    # Classes and functions of a case are looked up by module name when a learner is pickled.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def one(path: Path, seed: int, policy: str) -> dict[str, Any]:
    """Run one case and score it."""
    warnings.simplefilter("ignore")
    import fastai.callback.fp16  # noqa: F401  # patches to_fp16 onto Learner
    import torch

    import autoprec

    torch.set_num_threads(1)

    case = load(path)
    learn = case.make_learner(seed)
    learn.dls.device = torch.device("cpu")
    learn.logger, learn.create_mbar = _silent, False
    for cb in [c for c in learn.cbs if type(c).__name__ == "ProgressCallback"]:
        learn.remove_cb(cb)
    learn.to_fp16(**getattr(case, "SCALER_KW", {}))
    losses: list[float] = []
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = autoprec.run(
                learn, case.EPOCHS, case.LR, schedule="fit", emulate_cuda=True, policy=policy,
                audit=Path(folder) / "audit.jsonl", cbs=[_recording(losses)],
            )  # fmt: skip
        except Exception as e:  # noqa: BLE001  # the table shows which case crashed, and the others go on
            import traceback

            return {
                "case": path.stem,
                "seed": seed,
                "error": f"{type(e).__name__}: {e}",
                "trace": traceback.format_exc(),
            }
    primary = outcome.diagnosis.primary
    return {
        "case": path.stem,
        "seed": seed,
        "mode": primary.mode if primary else None,
        "because": primary.because if primary else outcome.detail,
        "where": str(primary.where) if primary and primary.where else None,
        "op": primary.op if primary else None,
        "all_modes": [f.mode for f in outcome.diagnosis.findings],
        "result": outcome.result,
        "detail": outcome.detail,
        "precision": outcome.precision,
        "changes": [f"{c.what}: {c.before} -> {c.after}" for c in outcome.changes],
        "attempts": [f"{a.remedy}: {'kept' if a.kept else a.reason}" for a in outcome.attempts],
        "legs": outcome.price.legs,
        "steps": outcome.price.steps,
        "seconds": time.perf_counter() - started,
        **_truth(learn, case, losses),
    }


def _silent(*_args: object) -> None:
    """In place of fastai's logger."""


def _recording(losses: list[float]) -> Any:
    from fastai.callback.core import Callback

    class Losses(Callback):  # type: ignore[misc]
        order = 70

        def before_fit(self) -> None:
            losses.clear()

        def after_batch(self) -> None:
            if self.training:
                losses.append(float(self.loss))

    return Losses()


def _truth(learn: Any, case: Any, losses: list[float]) -> dict[str, Any]:
    import torch

    tail = losses[-max(1, len(losses) // 4) :]
    last = sum(tail) / len(tail) if tail else math.nan
    state = [*learn.model.parameters(), *learn.model.buffers()]
    finite = all(bool(torch.isfinite(t).all()) for t in state if t.is_floating_point())
    values = getattr(learn.recorder, "values", None)
    valid = float(values[-1][1]) if values and len(values[-1]) > 1 else math.nan
    below = getattr(case, "HEALTHY_BELOW", math.inf)
    return {"last": last, "valid": valid, "healthy": bool(finite and math.isfinite(valid) and last <= below)}


def expectations(folder: Path) -> dict[str, Any]:
    import yaml

    file = folder / "expected.yaml"
    return yaml.safe_load(file.read_text()) if file.exists() else {}


def score(row: dict[str, Any], want: dict[str, Any]) -> tuple[bool, bool]:
    """Is the mode right, and is the result right (in the learner's own numbers where it was trained)?"""
    if "error" in row:
        return False, False
    modes = want.get("modes") or [None]
    result = row["result"] in RESULTS[want["repair"]]
    trained = row["healthy"] if want["repair"] != "user" else True
    return row["mode"] in modes, result and trained


def table(rows: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    out = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("case", "seed", "expected", "found", "result", "in", "changes", "legs", "steps", "s", "mode", "end"):
        out.add_column(name, overflow="fold", no_wrap=name in ("case", "found"))
    totals = {"mode": 0, "result": 0, "both": 0, "16": 0, "16 wanted": 0}
    for row in rows:
        want = wanted[row["case"]]
        mode, end = score(row, want)
        keeps = want.get("keeps16") and want["repair"] == "settings"
        totals["mode"] += mode
        totals["result"] += end
        totals["both"] += mode and end
        totals["16 wanted"] += bool(keeps)
        totals["16"] += bool(keeps and end and row.get("precision") in ("fp16", "bf16"))
        if "error" in row:
            out.add_row(row["case"], str(row["seed"]), "", "CRASH", row["error"][:60])
            continue
        out.add_row(
            row["case"], str(row["seed"]), ", ".join(want.get("modes") or ["nothing"]), row["mode"] or "nothing",
            row["result"], row["precision"] or "-", "; ".join(row["changes"]) or "-", str(row["legs"]),
            str(row["steps"]), f"{row['seconds']:.1f}", "ok" if mode else "NO", "ok" if end else "NO",
        )  # fmt: skip
    Console(width=200).print(out)
    n = len(rows)
    print(
        f"\n{n} runs: mode right {totals['mode']}, result right {totals['result']}, both {totals['both']}; "
        f"repaired within 16 bits {totals['16']} of {totals['16 wanted']}; "
        f"{sum(r.get('legs', 0) for r in rows)} legs, {sum(r.get('steps', 0) for r in rows)} probe steps, "
        f"{sum(r.get('seconds', 0.0) for r in rows):.0f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="only cases whose name contains one of these")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--policy", default="default")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--at-least", type=int, help="exit 1 unless so many runs are right in both mode and result")
    args = parser.parse_args()
    wanted = expectations(args.folder)
    paths = [p for p in sorted(args.folder.glob("*.py")) if p.stem in wanted]
    if args.names:
        paths = [p for p in paths if any(n in p.stem for n in args.names)]
    jobs = [(p, s) for p in paths for s in args.seeds]
    with ProcessPoolExecutor(args.jobs) as pool:
        rows = list(pool.map(one, *zip(*[(p, s, args.policy) for p, s in jobs], strict=True)))
    table(rows, wanted)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    both = sum(all(score(r, wanted[r["case"]])) for r in rows)
    return 0 if args.at_least is None or both >= args.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
