"""Run `autoprec.run` over a folder of failing learners and print what was found beside what should be.

    python benchmarks/cases.py FOLDER [NAME ...] [--seeds 0 1] [--policy default] [--jobs 2] [--json out.json]
                               [--init-scale 16777216] [--check-claims] [--controls] [--distance]

A case is a Python file with `make_learner(seed)`; it may set LR, EPOCHS, SCALER_KW (arguments of to_fp16),
HEALTHY_BELOW (the mean training loss of the last quarter of the steps below which a run counts as trained) and
MAX_SKIP (the largest share of skipped steps). With HAS_FIX, `make_learner(seed, fixed=True)` is the cured one, run in
FIX_MODE at FIX_LR with FIX_SCALER_KW. `expected.yaml` in the folder gives, per case: `modes` (right primary findings;
empty: none), `repair` ("settings", "user", "none") and `keeps16`; `case_lines.yaml` beside this file gives the true
line. Everything runs in real 16-bit arithmetic under CUDA's op lists.

The returned learner is scored by itself, whatever the outcome says of it: weights, buffers and validation loss finite,
last losses below the case's limit, steps taken, and the precision of every forward pass as the fit was seen to run.

--check-claims  also makes the stock runs, and scores a seed only if the fault bites there and the case can be cured
--controls      also runs what a user can do without this package, judged in the same way (implies --check-claims)
--distance      for repairs that keep parts in fp32: how far the weights end from those of an fp32 run, beside bf16's
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import linecache
import math
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

RESULTS = {"settings": ("repaired",), "user": ("unrepaired",), "none": ("healthy",)}
# On top of each other, as people try them; the last two replace the precision.
LADDER = ("stock", "normalize inputs", "clip 1.0", "lr / 10", "init_scale 2**8", "bf16", "fp32")
CONTROLS = ("stock fp16", "always bf16", "always fp32", "ladder, until the loss is finite", "autoprec, documented")


# ---- a case -----------------------------------------------------------------------------------------------------


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"case_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no python file")
    module = importlib.util.module_from_spec(spec)
    # Classes and functions of a case are looked up by module name when a learner is pickled.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def fresh(case: Any, seed: int, *, fixed: bool = False) -> Any:
    """The case's learner on the CPU, silent; the loaders' own generators are seeded too."""
    import fastai.callback.fp16  # noqa: F401  # patches to_fp16 onto Learner
    import torch
    from fastai.torch_core import set_seed

    set_seed(seed)
    learn = case.make_learner(seed, fixed=True) if fixed else case.make_learner(seed)
    learn.dls.device = torch.device("cpu")
    learn.logger, learn.create_mbar = _silent, False
    for cb in [c for c in learn.cbs if type(c).__name__ == "ProgressCallback"]:
        learn.remove_cb(cb)
    return learn


def _silent(*_args: object) -> None:
    """In place of fastai's logger."""


# ---- what really happened ---------------------------------------------------------------------------------------


@dataclass
class Seen:
    """The last fit as callbacks of the benchmark's own saw it; `batches` counts the training batches of all fits."""

    losses: list[float] = field(default_factory=list)
    taken: int = 0
    precisions: set[str] = field(default_factory=set)
    scale: float | None = None
    batches: int = 0

    def begin(self) -> None:
        """A fit begins: only the last one is kept."""
        self.losses, self.taken, self.precisions, self.scale = [], 0, set(), None


def spies(seen: Seen) -> list[Any]:
    """Callbacks that write into `seen`, which they hold in a closure: putting a learner back does not touch it."""
    import torch
    from fastai.callback.core import Callback

    from autoprec.emulation import is_emulating

    class First(Callback):  # type: ignore[misc]
        order = 9  # before MixedPrecision (10), and before the loss may be taken out of autocast

        def before_fit(self) -> None:
            seen.begin()

        def before_batch(self) -> None:
            seen.batches += self.training

        def after_pred(self) -> None:
            if self.training:
                dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
                name = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
                seen.precisions.add(name if is_emulating() or name == "fp32" else f"{name} without CUDA's lists")

    class Last(Callback):  # type: ignore[misc]
        order = 70

        def before_step(self) -> None:
            seen.taken += 1  # a step that the scaler skips does not come this far

        def after_batch(self) -> None:
            if self.training:
                seen.losses.append(float(self.loss.detach().float().mean()))
                scaler = getattr(self.learn, "scaler", None)
                if scaler is not None and scaler.is_enabled():
                    seen.scale = float(scaler.get_scale())

    return [First(), Last()]


def truth(learn: Any, case: Any, seen: Seen, error: str | None = None) -> dict[str, Any]:
    """Is the learner trained, by the case's own limits?"""
    import torch

    losses = seen.losses
    tail = losses[-max(1, len(losses) // 4) :]
    last = sum(tail) / len(tail) if tail else math.nan
    state = [*learn.model.parameters(), *learn.model.buffers()]
    finite = all(bool(torch.isfinite(t).all()) for t in state if t.is_floating_point())
    values = getattr(learn.recorder, "values", None)
    valid = float(values[-1][1]) if values and len(values[-1]) > 1 else math.nan
    skipped = 1 - seen.taken / len(losses) if losses else math.nan
    trained = last <= getattr(case, "HEALTHY_BELOW", math.inf) and skipped <= getattr(case, "MAX_SKIP", 0.5)
    return {
        "last": last,
        "valid": valid,
        "finite": finite,
        "skipped": skipped,
        "ran_in": "+".join(sorted(seen.precisions)),
        "healthy": bool(error is None and finite and math.isfinite(last) and math.isfinite(valid) and trained),
        "weights": _digest(learn),
    }


def _digest(learn: Any) -> str:
    import hashlib

    sha = hashlib.sha256()
    for t in learn.model.state_dict().values():
        sha.update(t.detach().cpu().numpy().tobytes())
    return sha.hexdigest()[:16]


# ---- runs without this package ----------------------------------------------------------------------------------


def stock(
    case: Any,
    seed: int,
    precision: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    lr: float | None = None,
    cbs: tuple[Any, ...] = (),
    fixed: bool = False,
    setting: Any = None,
) -> dict[str, Any]:
    """One plain fastai fit in one precision; `finite` losses are what a user would see."""
    from autoprec.precision import Setting, attached
    from autoprec.snapshot import release_autocast

    learn, seen, error = fresh(case, seed, fixed=fixed), Seen(), None
    scaler = dict(getattr(case, "SCALER_KW", {}) if kwargs is None else kwargs)
    start = _weights(learn)
    try:
        with attached(learn, setting or Setting(precision, scaler)):
            learn.fit(case.EPOCHS, lr or case.LR, cbs=[*spies(seen), *cbs])
    except Exception as e:  # noqa: BLE001  # what a case raises is its result
        error = f"{type(e).__name__}: {e}"
    finally:
        release_autocast()
    return {
        **truth(learn, case, seen, error),
        "error": error,
        "called_fine": error is None and bool(seen.losses) and math.isfinite(seen.losses[-1]),
        "runs": seen.batches / (case.EPOCHS * len(learn.dls.train)),
        "start": start,
        "end": _weights(learn),
        "taken": seen.taken,
        "attempted": len(seen.losses),
    }


def _weights(learn: Any) -> Any:
    import torch

    return torch.cat([p.detach().double().flatten() for p in learn.model.parameters()])


def fix(case: Any, seed: int) -> dict[str, Any]:
    """The case's own cure."""
    kwargs = {} if getattr(case, "FIX_RESETS_SCALER", False) else dict(getattr(case, "SCALER_KW", {}))
    kwargs.update(getattr(case, "FIX_SCALER_KW", {}))
    mode, lr = getattr(case, "FIX_MODE", "fp16"), getattr(case, "FIX_LR", None)
    return stock(case, seed, mode, kwargs=kwargs, lr=lr, fixed=True)


def claims(case: Any, seed: int, repair: str) -> tuple[bool, dict[str, dict[str, Any]]]:
    """Whether what the case says of itself holds for a seed, and the stock runs that were made to see it.

    `settings`: stock fp16 fails, and fp32 or the case's own fix is healthy. `user`: fp16 and fp32 fail. `none`: stock
    fp16 is healthy.
    """
    runs = {"fp16": stock(case, seed, "fp16")}
    if repair == "none":
        return runs["fp16"]["healthy"], runs
    runs["fp32"] = stock(case, seed, "fp32")
    if runs["fp16"]["healthy"]:
        return False, runs
    if repair == "user":
        return not runs["fp32"]["healthy"], runs
    if not runs["fp32"]["healthy"] and getattr(case, "HAS_FIX", False):
        runs["fix"] = fix(case, seed)
    return runs["fp32"]["healthy"] or runs.get("fix", {}).get("healthy", False), runs


def ladder(case: Any, seed: int, first: dict[str, Any]) -> dict[str, Any]:
    """The documented ladder, one full run per rung, until the last loss is finite. Nobody looks any further."""
    from fastai.callback.training import GradientClip

    last, runs, rung = first, first["runs"], 0
    while not last["called_fine"] and rung + 1 < len(LADDER):
        rung += 1
        cbs = [_normalizing(case, seed)] + ([GradientClip(1.0)] if rung >= 2 else [])
        scaler = {**getattr(case, "SCALER_KW", {}), **({"init_scale": 2.0**8} if rung >= 4 else {})}
        precision = {5: "bf16", 6: "fp32"}.get(rung, "fp16")
        last = stock(
            case, seed, precision, kwargs=scaler, lr=case.LR / 10 if rung >= 3 else None, cbs=tuple(cbs)
        )  # fmt: skip
        runs += last["runs"]
    return {**last, "runs": runs, "changed": rung > 0, "stopped_at": LADDER[rung]}


def _normalizing(case: Any, seed: int) -> Any:
    """A callback that normalizes floating inputs by the training set's statistics, per channel (images) or column."""
    import torch
    from fastai.callback.core import Callback

    batches = [b[:-1] for b in fresh(case, seed).dls.train]  # fastai's rule for plain tensors: the last is the target
    moments: list[tuple[Any, Any] | None] = []
    for column in zip(*batches, strict=True):
        x = torch.cat(list(column))
        if not x.is_floating_point():
            moments.append(None)
            continue
        axes = [d for d in range(x.dim()) if d != (1 if x.dim() == 4 else x.dim() - 1)]
        moments.append((x.mean(axes, keepdim=True), x.std(axes, keepdim=True).clamp(min=1e-7)))

    class Normalizing(Callback):  # type: ignore[misc]
        order = 5

        def before_batch(self) -> None:
            self.learn.xb = tuple(x if m is None else (x - m[0]) / m[1] for x, m in zip(self.xb, moments, strict=True))

    return Normalizing()


# ---- runs with this package -------------------------------------------------------------------------------------


def repaired(path: Path, case: Any, seed: int, policy: str) -> tuple[dict[str, Any], Any]:
    """One `autoprec.run`, scored; and its outcome (None if it crashed)."""
    import autoprec

    learn, seen = fresh(case, seed), Seen()
    learn.to_fp16(**getattr(case, "SCALER_KW", {}))
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = autoprec.run(
                learn, case.EPOCHS, case.LR, schedule="fit", emulate_cuda=True, policy=policy,
                audit=Path(folder) / "audit.jsonl", cbs=spies(seen),
            )  # fmt: skip
        except Exception as e:  # noqa: BLE001  # the table shows which case crashed, and the others go on
            error = f"{type(e).__name__}: {e}"
            return {"case": path.stem, "seed": seed, "error": error, "trace": traceback.format_exc()}, None
    primary = outcome.diagnosis.primary
    batches = len(learn.dls.train)
    trained = outcome.result != "unrepaired"
    return {
        "case": path.stem,
        "seed": seed,
        "mode": primary.mode if primary else None,
        "because": primary.because if primary else outcome.detail,
        "where": str(primary.where) if primary and primary.where else None,
        "module": primary.where.module if primary and primary.where else None,
        "line": _line(primary),
        "op": primary.op if primary else None,
        "findings": [f"{f.mode}: {f.because}" for f in outcome.diagnosis.findings],
        "result": outcome.result,
        "detail": outcome.detail,
        "precision": outcome.precision,
        "islands": list(outcome.islands),
        "changes": [f"{c.what}: {c.before} -> {c.after}" for c in outcome.changes],
        "needed": [c.needed for c in outcome.changes],
        "attempts": [f"{a.remedy}: {'kept' if a.kept else a.reason}" for a in outcome.attempts],
        "legs": outcome.price.legs,
        "steps": outcome.price.steps,
        # Counted by the spies: every batch that a probe trained on, the failing one too.
        "probe_epochs": (seen.batches - (len(seen.losses) if trained else 0)) / batches,
        "seconds": time.perf_counter() - started,
        **truth(learn, case, seen),
        "trained": trained,
        "called_fine": trained,
        "changed": outcome.result != "healthy" or bool(outcome.changes),
        "runs": seen.batches / (case.EPOCHS * batches),
        "scale": seen.scale,
    }, outcome


def _line(primary: Any) -> str | None:
    """The source line that a finding points at, read from the file and not from the finding."""
    where = primary.where if primary else None
    if where is None or where.file is None or where.line is None:
        return None
    return linecache.getline(where.file, where.line).strip()


def distance(case: Any, seed: int, row: dict[str, Any], outcome: Any) -> dict[str, Any] | None:
    """How far a repair that keeps parts in fp32 ends from an fp32 run of as many steps, beside bf16.

    The 16-bit run starts at the scale where the fit ended, halved until no step is skipped. None: another repair.
    """
    from autoprec.islands import Island
    from autoprec.precision import Setting

    islands, loss_fp32 = (), False
    for change in outcome.changes:
        if change.remedy == "keep_modules_fp32":
            islands = tuple(Island(**i) for i in change.data["islands"])
        elif change.remedy == "loss_fp32":
            loss_fp32 = True
        elif change.remedy not in ("carry_scale", "init_scale"):
            return None
    if not (islands or loss_fp32) or outcome.precision != "fp16":
        return None
    fp32, scale = stock(case, seed, "fp32"), row["scale"] or 1.0
    while True:
        kwargs = {"init_scale": scale, "growth_interval": 10**9}
        ours = stock(case, seed, "fp16", setting=Setting("fp16", kwargs, islands=islands, loss_fp32=loss_fp32))
        if ours["taken"] == ours["attempted"] or scale < 2.0**-20:
            break
        scale /= 2
    bf16 = stock(case, seed, "bf16")
    goal, way = fp32["end"], float((fp32["end"] - fp32["start"]).norm())

    def far(run: dict[str, Any]) -> float:
        return float((run["end"] - goal).norm()) if run["error"] is None else math.inf

    return {
        "scale": scale,
        "steps": [ours["taken"], fp32["taken"]],
        "ours": far(ours) / float(goal.norm()),
        "bf16": far(bf16) / float(goal.norm()),
        "ours_of_way": far(ours) / way,
        "bf16_of_way": far(bf16) / way,
    }


# ---- one job ----------------------------------------------------------------------------------------------------


def one(job: tuple[Path, int, str, str, bool, bool, bool, float | None]) -> dict[str, Any]:
    """Everything that was asked for on one case and seed."""
    path, seed, policy, repair, check, controls, distances, init_scale = job
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    case = load(path)
    if init_scale is not None:
        case.SCALER_KW = {**getattr(case, "SCALER_KW", {}), "init_scale": init_scale}
    row, outcome = repaired(path, case, seed, policy)
    known: dict[str, dict[str, Any]] = {}
    if check:
        row["counts"], known = claims(case, seed, repair)
        row["claims"] = {k: {n: v for n, v in r.items() if n not in ("start", "end")} for k, r in known.items()}
        row["as_stock"] = row.get("weights") == known["fp16"]["weights"]
    if distances and outcome is not None:
        row["distance"] = distance(case, seed, row, outcome)
    if controls:
        runs = {
            "stock fp16": {**known["fp16"], "changed": False},
            "always bf16": {**stock(case, seed, "bf16"), "changed": True},
            "always fp32": {**(known.get("fp32") or stock(case, seed, "fp32")), "changed": True},
            "ladder, until the loss is finite": ladder(case, seed, known["fp16"]),
            "autoprec, documented": repaired(path, case, seed, "documented")[0],
        }
        drop = ("start", "end", "findings", "trace")
        row["controls"] = {k: {n: v for n, v in r.items() if n not in drop} for k, r in runs.items()}
    return row


# ---- scores -----------------------------------------------------------------------------------------------------


def read_yaml(file: Path) -> dict[str, Any]:
    import yaml

    return (yaml.safe_load(file.read_text()) or {}) if file.exists() else {}


def right_place(row: dict[str, Any], true: Any) -> bool | None:
    """Does the finding point at the true place? None: the case has none."""
    if true is None:
        return None
    if isinstance(true, dict) and "module" in true:
        return row.get("module") == true["module"]
    if isinstance(true, dict):
        return all(text in (row.get("because") or "") for text in true["says"])
    texts = [true] if isinstance(true, str) else true
    return any(text in (row.get("line") or "") for text in texts)


def score(row: dict[str, Any], want: dict[str, Any]) -> tuple[bool, bool]:
    """Is the mode right, and is the end right (by the learner's own numbers and precision where it was trained)?"""
    if "error" in row:
        return False, False
    end = row["result"] in RESULTS[want["repair"]]
    if want["repair"] != "user":
        end = end and row["healthy"] and row["ran_in"] == row["precision"]
    if want["repair"] == "none":
        end = end and not row["changes"] and row.get("as_stock", True)
    return row["mode"] in (want.get("modes") or [None]), end


def _mark(ok: bool | None) -> str:  # noqa: FBT001
    return {None: "-", True: "ok", False: "NO"}[ok]


def _table(*columns: str) -> Any:
    from rich.table import Table

    out = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        out.add_column(name, overflow="fold", no_wrap=name in ("case", "found", "line ok", "mode", "end"))
    return out


def _show(table: Any) -> None:
    from rich.console import Console

    Console(width=220).print(table)


def summary(rows: list[dict[str, Any]], wanted: dict[str, Any], lines: dict[str, Any]) -> None:
    out = _table(
        "case", "seed", "expected", "found", "result", "says", "ran in", "changes", "legs", "epochs", "s", "mode",
        "line ok", "end", "counts",
    )  # fmt: skip
    n = dict.fromkeys(("runs", "mode", "line", "lines", "end", "all", "16", "16 wanted", "user", "quick"), 0)
    for row in rows:
        want = wanted[row["case"]]
        mode, end = score(row, want)
        place = right_place(row, lines.get(row["case"])) if "error" not in row else None
        counts = row.get("counts", True)
        if counts:
            keeps = want.get("keeps16") and want["repair"] == "settings"
            n["runs"] += 1
            n["mode"] += mode
            n["end"] += end
            n["all"] += mode and end and place is not False
            n["lines"] += place is not None
            n["line"] += bool(place)
            n["16 wanted"] += bool(keeps)
            n["16"] += bool(keeps and end and row.get("ran_in") in ("fp16", "bf16"))
            n["user"] += want["repair"] == "user"
            n["quick"] += want["repair"] == "user" and row.get("probe_epochs", 9.0) < 1
        if "error" in row:
            out.add_row(row["case"], str(row["seed"]), "", "CRASH", row["error"][:90])
            continue
        out.add_row(
            row["case"], str(row["seed"]), ", ".join(want.get("modes") or ["nothing"]), row["mode"] or "nothing",
            row["result"], row["precision"] or "-", row["ran_in"] if row["trained"] else "-",
            "; ".join(_short(c) for c in row["changes"]) or "-",
            str(row["legs"]), f"{row['probe_epochs']:.2f}", f"{row['seconds']:.1f}",
            _mark(mode), _mark(place), _mark(end), _mark(counts),
        )  # fmt: skip
    _show(out)
    print(
        f"\n{n['runs']} of {len(rows)} runs count: mode right {n['mode']}, line right {n['line']} of {n['lines']}, "
        f"end right {n['end']}, all of it {n['all']}; repaired within 16 bits {n['16']} of {n['16 wanted']}; "
        f"incurable in less than an epoch of probe batches {n['quick']} of {n['user']}\n"
        f"{sum(r.get('legs', 0) for r in rows)} legs, {sum(r.get('steps', 0) for r in rows)} probe steps, "
        f"{sum(r.get('seconds', 0.0) for r in rows):.0f} s"
    )


def _short(change: str) -> str:
    """A change without the folders of the files in it."""
    return " ".join(w if "/" not in w else w[: w.find("/")] + w[w.rfind("/") + 1 :] for w in change.split(" "))


def against_controls(rows: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    rows = [r for r in rows if r.get("counts") and "controls" in r and "error" not in r]
    curable = [r for r in rows if wanted[r["case"]]["repair"] == "settings"]
    healthy = [r for r in rows if wanted[r["case"]]["repair"] == "none"]
    incurable = [r for r in rows if wanted[r["case"]]["repair"] == "user"]
    out = _table(
        "what a user can do", f"truly healthy of {len(curable)} curable", "of these in 16 bits",
        f"left alone of {len(healthy)} healthy", f"truly healthy of {len(healthy)} healthy",
        f"called fine of {len(incurable)} incurable", "called fine, and are not", "full runs per case", "crashed",
    )  # fmt: skip

    def line(name: str, pick: Any) -> None:
        well = [pick(r) for r in curable if pick(r).get("healthy") and pick(r).get("called_fine")]
        wrong = [r for r in rows if pick(r).get("called_fine") and not pick(r).get("healthy")]
        out.add_row(
            name,
            str(len(well)),
            str(sum(r["ran_in"] in ("fp16", "bf16") for r in well)),
            str(sum(not pick(r).get("changed", True) for r in healthy)),
            str(sum(pick(r).get("healthy", False) for r in healthy)),
            str(sum(pick(r).get("called_fine", False) for r in incurable)),
            str(len(wrong)),
            f"{statistics.mean(pick(r)['runs'] for r in rows if 'runs' in pick(r)):.2f}",
            str(sum("runs" not in pick(r) for r in rows)),
        )

    for name in CONTROLS:
        line(name, lambda r, name=name: r["controls"][name])
    line("autoprec", lambda r: r)
    print()
    _show(out)


def distances(rows: list[dict[str, Any]]) -> None:
    found = [(r, r["distance"]) for r in rows if r.get("distance") and r.get("counts", True)]
    if not found:
        return
    out = _table("case", "seed", "scale", "steps taken", "repaired", "bf16", "repaired, of the way", "bf16, of the way")
    for r, d in found:
        out.add_row(
            r["case"], str(r["seed"]), f"{d['scale']:g}", " / ".join(map(str, d["steps"])),
            *(f"{d[k]:.2e}" for k in ("ours", "bf16", "ours_of_way", "bf16_of_way")),
        )  # fmt: skip
    by_case: dict[str, list[dict[str, Any]]] = {}
    for r, d in found:
        by_case.setdefault(r["case"], []).append(d)
    keys = ("ours", "bf16", "ours_of_way", "bf16_of_way")
    per_case = {k: [statistics.median(d[k] for d in ds) for ds in by_case.values()] for k in keys}
    medians = [f"{statistics.median(per_case[k]):.2e}" for k in keys]
    out.add_row(f"median over {len(by_case)} cases", "", "", "", *medians)
    print("\nDistance of the final weights from an fp32 run's: relative to its weights, and to the way they went\n")
    _show(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="only cases whose name contains one of these")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--policy", default="default")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lines", type=Path, default=Path(__file__).with_name("case_lines.yaml"), help="true lines")
    parser.add_argument("--init-scale", type=float, help="the loss scale that each run begins with")
    parser.add_argument("--check-claims", action="store_true", help="score only seeds on which the case's claim holds")
    parser.add_argument("--controls", action="store_true", help="compare with what a user can do without autoprec")
    parser.add_argument("--distance", action="store_true", help="distance of the weights from an fp32 run's")
    parser.add_argument("--at-least", type=int, help="exit 1 unless so many runs are right in mode, line and end")
    args = parser.parse_args()
    wanted = read_yaml(args.folder / "expected.yaml")
    lines = read_yaml(args.lines)
    paths = [p for p in sorted(args.folder.glob("*.py")) if p.stem in wanted]
    if args.names:
        paths = [p for p in paths if any(n in p.stem for n in args.names)]
    check = args.check_claims or args.controls
    jobs = [
        (p, s, args.policy, wanted[p.stem]["repair"], check, args.controls, args.distance, args.init_scale)
        for p in paths
        for s in args.seeds
    ]
    with ProcessPoolExecutor(args.jobs) as pool:
        rows = list(pool.map(one, jobs))
    summary(rows, wanted, lines)
    if args.controls:
        against_controls(rows, wanted)
    if args.distance:
        distances(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    counting = [r for r in rows if r.get("counts", True)]
    good = [all(score(r, wanted[r["case"]])) and right_place(r, lines.get(r["case"])) is not False for r in counting]
    return 0 if args.at_least is None or sum(good) >= args.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
