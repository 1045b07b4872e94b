"""What autoprec says while it works: one line per decision, rendered from the events of the audit.

Quiet until asked: `autoprec.enable_logging()` shows the lines; a program that handles loguru itself calls
`logger.enable("autoprec")` and gets them in its own sinks, with the event's name and run id bound to each.
"""

from __future__ import annotations

import contextlib
import math
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TextIO

from loguru import logger

from autoprec.words import count, duration, number, scale, setting, share, spec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from autoprec.audit.events import (
        AttemptStarted,
        Event,
        Failed,
        FitFinished,
        FitStarted,
        LegFinished,
        Note,
        RunStarted,
    )
    from autoprec.diagnosis.finding import Diagnosis
    from autoprec.evidence import Comparison, Configuration, DataSample, Drift, Fidelity, Headroom, Hidden, ScaleSearch
    from autoprec.outcome import Attempt, Outcome

__all__ = ["disable_logging", "enable_logging", "line", "say", "warn"]

logger.disable("autoprec")

_ours: list[int] = []


def enable_logging(level: str = "INFO", sink: TextIO | Path | str | Callable[[str], None] | None = None) -> int:
    """Show what autoprec does, one line per decision.

    Calling it again replaces the sink of the call before, so that running a notebook cell twice does not double the
    lines.

    Args:
        level: "DEBUG" adds what was read rather than decided; "WARNING" leaves only what needs attention.
        sink: whatever loguru takes: a stream, a path, a function. None: standard error.

    Returns:
        loguru's id of the sink, for `logger.remove(id)`.
    """
    _drop_ours()
    logger.enable("autoprec")
    with contextlib.suppress(ValueError):
        # loguru's own first sink, where the program still has it, would show each line a second time. It is put
        # back as it was for everybody else's messages.
        logger.remove(0)
        logger.add(sys.stderr, filter={"autoprec": False})
    handler = logger.add(
        sys.stderr if sink is None else sink, level=level, format="{message}", filter="autoprec", colorize=False
    )
    _ours.append(handler)
    return handler


def disable_logging() -> None:
    """Be quiet again."""
    _drop_ours()
    logger.disable("autoprec")


def _drop_ours() -> None:
    while _ours:
        with contextlib.suppress(ValueError):  # the user removed it already
            logger.remove(_ours.pop())


def say(event: Event) -> None:
    """Log an event, if there is anything to say about it."""
    text = line(event)
    if text is not None:
        logger.bind(event=event.event, run_id=event.run_id).log(_level(event), text)


def warn(text: str) -> None:
    """Log what no event can carry: that the audit itself cannot be written."""
    logger.warning(text)


def line(event: Event) -> str | None:
    """The line for an event; None where there is nothing to say (an unknown event, data without a flaw)."""
    render = _LINES.get(event.event)
    return " ".join(text.split()) if render and (text := render(event.body())) else None


def _level(event: Event) -> str:
    if event.event == "failed" or (event.event == "run_finished" and event.payload["result"] == "unrepaired"):
        return "WARNING"
    return (
        "DEBUG"
        if event.event
        in ("configuration", "data", "scale_search", "fidelity", "headroom", "hidden", "drift", "comparison")
        else "INFO"
    )


def _run_started(body: RunStarted) -> str:
    plan = body.plan
    lr = "" if plan.lr is None else f", lr {setting(plan.lr)}"
    epochs, steps = count(plan.epochs, "epoch"), count(plan.steps, "step")
    return f"run: {plan.schedule}, {epochs}, {steps}{lr}, policy {body.policy}"


def _configuration(body: Configuration) -> str:
    who = "asked for by the learner" if body.asked_by_user else "preferred by the policy"
    text = f"on {body.device}{' (16 bits emulated)' if body.emulated else ''}: {body.requested}, {who}"
    return f"{text}; {body.unavailable_reason}" if body.unavailable_reason else text


def _data(body: DataSample) -> str | None:
    bad = [f.name for f in body.features if f.nonfinite] + [t.name for t in body.targets if t.nonfinite]
    return f"data: not finite in {', '.join(bad)} ({count(body.batches, 'batch', 'batches')} seen)" if bad else None


def _leg_finished(body: LegFinished) -> str:
    leg, totals = body.leg, body.totals
    steps = count(totals.attempted, "step")
    if totals.attempted < leg.planned_steps:
        steps = f"{totals.attempted:,} of {count(leg.planned_steps, 'step')}"
    parts = [steps]
    if totals.skipped:
        parts.append(f"{totals.skipped:,} skipped")
    # The mean over the last steps hides where it went wrong, so a leg that failed shows the value that failed.
    last = leg.steps[-1].loss if leg.failure and leg.steps else totals.final_loss
    if last is not None:
        parts.append(f"loss {number(totals.first_loss)} -> {number(last)}")
    text = ", ".join(parts)
    if leg.failure is not None:
        failure = leg.failure
        what = failure.error or ", ".join((failure.where, *failure.names))
        text += f" at step {failure.step} ({what})"
    return f"probe {body.name} ({spec(leg.spec)}): {text}"


def _scale_search(body: ScaleSearch) -> str:
    batches = count(body.batches, "batch", "batches")
    if body.largest_finite is None:
        return f"loss scale: gradients are not finite at any scale down to {scale(body.smallest_tried)} ({batches})"
    return f"loss scale: gradients are finite up to {scale(body.largest_finite)} ({batches})"


def _fidelity(body: Fidelity) -> str:
    losses = f"loss {number(body.loss_16)} beside {number(body.loss_32)} in fp32"
    worst = max(body.parameters, key=lambda p: p.flushed, default=None)
    if worst is None or not worst.flushed > 0:
        return f"gradients: {losses}, none flushed to zero at scale {scale(body.scale)}"
    return f"gradients: {losses}; {share(worst.flushed)} of {worst.name} flushed to zero at scale {scale(body.scale)}"


def _headroom(body: Headroom) -> str | None:
    if not body.modules:
        return None
    tightest = body.modules[0]
    room = min(v for v in (tightest.forward, tightest.backward, math.inf) if v is not None)
    return f"headroom: {tightest.name or 'the model'} is {number(room)} doublings below float16's largest number"


def _hidden(body: Hidden) -> str | None:
    if body.origin is None:
        return None
    return f"hidden: {body.origin.operation.op} makes a value that is not finite, and what follows absorbs it"


def _drift(body: Drift) -> str | None:
    if body.place is None:
        return None
    return f"drift: {body.op} misses {share(body.error or 0.0)} of its variation at {body.place}"


def _comparison(body: Comparison) -> str:
    noise = f", noise {share(body.spread)}" if body.spread is not None else ""
    return f"beside the fp32 twin: training loss {body.excess:+.1%}{noise}"


def _diagnosed(body: Diagnosis) -> str:
    if body.primary is None:
        missing = f" ({count(len(body.not_run), 'check')} could not run)" if body.not_run else ""
        return f"found nothing wrong{missing}"
    also = f" (also {', '.join(f.mode for f in body.findings[1:])})" if len(body.findings) > 1 else ""
    return f"found {body.primary.mode}: {body.primary.because}{also}"


def _attempt_started(body: AttemptStarted) -> str:
    parameters = f" ({setting(body.parameters)})" if body.parameters else ""
    return f"try {body.remedy}{parameters} against {body.mode}"


def _attempt_finished(body: Attempt) -> str:
    what = "does not apply" if not body.applicable else "accepted" if body.kept else "taken back"
    return f"{body.remedy} {what}: {body.reason}"


def _fit_started(body: FitStarted) -> str:
    islands = f" with {count(len(body.islands), 'island')} in fp32" if body.islands else ""
    return f"fit in {body.precision}{islands}: {body.schedule}, {count(body.steps, 'step')}"


def _fit_finished(body: FitFinished) -> str:
    skipped = f", {body.skipped:,} skipped" if body.skipped else ""
    result = "healthy" if body.healthy else "not healthy"
    return f"fit {result} after {count(body.steps, 'step')}{skipped}, {duration(body.seconds)}: {body.reason}"


def _note(body: Note) -> str:
    return body.text


def _failed(body: Failed) -> str:
    return f"failed: {body.error}: {body.message}"


def _run_finished(body: Outcome) -> str:
    where = f" in {body.precision}" if body.precision else ""
    return f"{body.result}{where}{': ' + body.detail if body.detail else ''}"


_LINES: MappingProxyType[str, Callable[[Any], str | None]] = MappingProxyType(
    {
        "run_started": _run_started,
        "configuration": _configuration,
        "data": _data,
        "leg_finished": _leg_finished,
        "scale_search": _scale_search,
        "fidelity": _fidelity,
        "headroom": _headroom,
        "hidden": _hidden,
        "drift": _drift,
        "comparison": _comparison,
        "diagnosed": _diagnosed,
        "attempt_started": _attempt_started,
        "attempt_finished": _attempt_finished,
        "fit_started": _fit_started,
        "fit_finished": _fit_finished,
        "note": _note,
        "failed": _failed,
        "run_finished": _run_finished,
    }
)
