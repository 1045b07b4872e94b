"""Evidence made by hand: steps from a string such as `S*4 .*36`, whole evidence from a few words of YAML.

The reference for a loss scaler is here too: the plain rule of `torch.amp.GradScaler`, written down a second time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoprec.evidence import Evidence, Leg, LegSpec, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PLACE = {"module": "layers.0", "file": "net.py", "line": 12, "function": "forward", "source": "x = q @ k"}
LOSS_PLACE = {"file": "loss.py", "line": 7, "function": "dice", "source": "p = x @ y"}
FEATURE = {"name": "input 0", "min": -2.1, "max": 2.6, "mean": 0.0, "std": 1.0, "typical": 1.0}
TARGET = {"name": "target 0", "dtype": "int64", "min": 0.0, "max": 9.0, "classes": 10}


# ---- steps ----


def spelled(ledger: str) -> str:
    """`S*3 .*2` is `SSS..`: S for a skipped step, a dot for one that was taken."""
    out = ""
    for word in ledger.split():
        what, star, times = word.partition("*")
        out += what * int(times) if star else what
    assert set(out) <= {"S", "."}, f"a ledger is written with S and dots, not as {ledger!r}"
    return out


def scaled(
    overflows: Callable[[int, float], bool], n: int, *, init: float = 2.0**16, interval: int = 2000
) -> list[tuple[float, float, bool]]:
    """(scale before, scale after, skipped) of n steps, as GradScaler has them with its factors 0.5 and 2.

    `overflows(i, scale)` says whether step i has a non-finite gradient at that scale.
    """
    rows, scale, clean = [], init, 0
    for i in range(n):
        before, skipped = scale, overflows(i, scale)
        clean = 0 if skipped else clean + 1
        if skipped:
            scale *= 0.5
        elif clean == interval:
            scale, clean = scale * 2, 0
        rows.append((before, scale, skipped))
    return rows


def line(loss: Sequence[float] | float, n: int) -> list[float]:
    """A straight line of n losses between two numbers; one number: all the same; n numbers: these."""
    values = [loss] if isinstance(loss, int | float) else list(loss)
    if len(values) == n and n != 2:
        return values
    assert len(values) in (1, 2), f"{len(values)} losses for {n} steps: give one, two, or one a step"
    first, last = values[0], values[-1]
    return [first + (last - first) * i / max(1, n - 1) for i in range(n)]


def steps(
    ledger: str,
    *,
    loss: Sequence[float] | float = (2.3, 1.2),
    lr: float = 1e-3,
    grad_norm: Sequence[float] | float | None = 1.0,
    scale: float | None = 2.0**16,
    interval: int = 2000,
) -> tuple[Step, ...]:
    """The steps of a leg; `scale` is the first loss scale, None for a leg without a scaler."""
    marks = spelled(ledger)
    n = len(marks)
    scales = scaled(lambda i, _: marks[i] == "S", n, init=scale or 1.0, interval=interval)
    losses = line(loss, n)
    norms = [None] * n if grad_norm is None else line(grad_norm, n)
    return tuple(
        Step(
            step=i,
            loss=losses[i],
            lr=lr,
            grad_norm=None if skipped and scale is not None else norms[i],
            scale_before=before if scale is not None else None,
            scale_after=after if scale is not None else None,
            skipped=skipped,
        )
        for i, (before, after, skipped) in enumerate(scales)
    )


def leg(ledger: str = ".*40", *, precision: Any = None, scale: float | None = None, **rest: Any) -> Leg:
    """A leg in fp32, or in fp16 where it starts with a loss scale; what is no field of a Leg goes to `steps`."""
    of_steps = {k: rest.pop(k) for k in ("loss", "lr", "grad_norm", "interval") if k in rest}
    spec = LegSpec(precision=precision or ("fp32" if scale is None else "fp16"))
    return Leg.model_validate({"spec": spec, "steps": steps(ledger, scale=scale, **of_steps), **rest})


# ---- evidence in a few words ----


def merged(base: Any, over: Any) -> Any:
    """Mappings are merged key by key, everything else is replaced."""
    if isinstance(base, dict) and isinstance(over, dict):
        return base | {k: merged(base.get(k), v) for k, v in over.items()}
    return over


def evidence(words: Mapping[str, Any]) -> Evidence:
    """Evidence from words.

    As `Evidence` reads it, but for: a leg is `{precision, ledger, scale, interval, loss, lr, grad_norm}` beside the
    fields of `Leg` and `LegSpec`, and its ledger ends at its failure; an origin is
    `{phase, op, fp32, place}` beside the fields of `Operation`; features and targets state only what is not ordinary.
    A main leg that raises does so again.
    """
    out: dict[str, Any] = dict(words)
    out["legs"] = {name: _leg(one) for name, one in words.get("legs", {}).items()}
    main = out["legs"].get("main", {})
    if (main.get("failure") or {}).get("where") == "exception":  # which comes again, unless the words say otherwise
        out["legs"].setdefault("main again", main)
    for part in ("scale_search", "hidden"):
        if out.get(part) and out[part].get("origin"):
            out[part] = out[part] | {"origin": _origin(out[part]["origin"])}
    if out.get("data"):
        data = out["data"]
        out["data"] = data | {
            "features": [FEATURE | f for f in data.get("features", [])],
            "targets": [TARGET | t for t in data.get("targets", [])],
        }
    return Evidence.model_validate(out)


def _leg(words: Mapping[str, Any]) -> dict[str, Any]:
    rest = dict(words)
    of_steps = {k: rest.pop(k) for k in ("ledger", "loss", "lr", "grad_norm", "scale", "interval") if k in rest}
    spec = {k: rest.pop(k) for k in LegSpec.model_fields if k in rest}
    rows = steps(of_steps.pop("ledger", ".*40"), **{"scale": None, **of_steps})
    planned, failure = len(rows), rest.get("failure")
    if failure is not None:  # what is not finite ends the leg before its step is made, a weight with the step
        rows = rows[: failure["step"] + (failure["where"] in ("weight", "validation"))]
    if rest.get("origin"):
        rest["origin"] = _origin(rest["origin"])
    return {"spec": spec, "steps": rows, "planned_steps": planned, **rest}


def _origin(words: Mapping[str, Any]) -> dict[str, Any]:
    rest = dict(words)
    phase = rest.pop("phase", "forward")
    place = rest.pop("place", LOSS_PLACE if phase == "loss" else PLACE)
    return {"phase": phase, "place": place, "fp32": rest.pop("fp32", None), "operation": rest}
