"""What a run writes down: an `Event` per decision, each with a payload of a known shape.

`EVENTS` maps every name to the class of its payload. Names and shapes are frozen for a schema version: a
reader finds in a file of version 1 exactly what stands here. Pure: imports no torch, no fastai.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

from pydantic import Field

from autoprec.diagnosis.finding import Diagnosis
from autoprec.evidence import (
    Comparison,
    Configuration,
    DataSample,
    Drift,
    Fidelity,
    Headroom,
    Hidden,
    Leg,
    Precision,
    ScaleSearch,
    Step,
)
from autoprec.noun import Noun
from autoprec.outcome import Attempt, Outcome

__all__ = [
    "EVENTS",
    "SCHEMA_VERSION",
    "AttemptStarted",
    "Event",
    "Failed",
    "FitFinished",
    "FitStarted",
    "LegFinished",
    "Note",
    "Plan",
    "RunStarted",
    "Totals",
    "plain",
    "thin",
    "utc_now",
]

SCHEMA_VERSION = 1


class Plan(Noun):
    """The fit that was asked for."""

    schedule: str
    epochs: int
    lr: float | tuple[float, ...] | str | None = None
    """As it was given: one number, one per parameter group, or the text of a slice; None: the learner's own."""
    steps: int
    """Optimizer steps of the whole fit."""


class RunStarted(Noun):
    """The first event of a run."""

    environment: dict[str, Any] = Field(default_factory=dict)
    """Versions, platform, device: what one needs to judge whether another machine would do the same."""
    policy: str
    policy_content: dict[str, Any] = Field(default_factory=dict)
    """The whole policy, defaults included."""
    plan: Plan


class Totals(Noun):
    """Sums over all attempted steps, taken before the ledger was thinned."""

    attempted: int = 0
    skipped: int = 0
    first_loss: float | None = None
    final_loss: float | None = None
    """Mean loss over the last quarter of the steps."""
    first_nonfinite: int | None = None
    """First step whose loss is NaN or infinite."""
    first_scale: float | None = None
    last_scale: float | None = None

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Totals:
        """Sum up; all None for no steps."""
        if not steps:
            return cls()
        return cls(
            attempted=len(steps),
            skipped=sum(s.skipped for s in steps),
            first_loss=steps[0].loss,
            final_loss=_tail_mean([s.loss for s in steps]),
            first_nonfinite=next((s.step for s in steps if not math.isfinite(s.loss)), None),
            first_scale=steps[0].scale_before,
            last_scale=steps[-1].scale_after,
        )


def _tail_mean(losses: Sequence[float]) -> float:
    tail = losses[-max(1, len(losses) // 4) :]
    return sum(tail) / len(tail)


def thin(steps: Sequence[Step], rows: int) -> tuple[Step, ...]:
    """At most `rows` of the steps: every n-th from the first on, and the very last one."""
    if len(steps) <= rows:
        return tuple(steps)
    if rows < 2:
        return (steps[-1],)
    stride = math.ceil((len(steps) - 1) / (rows - 1))
    return (*steps[:-1:stride], steps[-1])


class LegFinished(Noun):
    """A probe ran; make it with `of`."""

    name: str
    """As in `Evidence.legs`."""
    leg: Leg
    """Its ledger is thinned."""
    totals: Totals

    @classmethod
    def of(cls, name: str, leg: Leg, rows: int = 1_000) -> LegFinished:
        """The event for a leg, with at most `rows` rows of its ledger (`policy.audit.ledger_rows`)."""
        return cls(
            name=name,
            leg=leg.model_copy(update={"steps": thin(leg.steps, rows)}),
            totals=Totals.of(leg.steps),
        )


class AttemptStarted(Noun):
    """A remedy is about to be tried."""

    mode: str
    """Failure mode whose ladder asks for it."""
    remedy: str
    parameters: dict[str, Any] = Field(default_factory=dict)


class FitStarted(Noun):
    """The real fit begins."""

    precision: Precision
    islands: tuple[str, ...] = ()
    steps: int
    schedule: str


class FitFinished(Noun):
    """The real fit ended; make it with `of`."""

    seconds: float
    steps: int
    """Attempted optimizer steps."""
    skipped: int
    final: dict[str, float] = Field(default_factory=dict)
    """Last value of each of the recorder's columns, by name."""
    healthy: bool
    reason: str
    """The verdict in a sentence."""
    ledger: tuple[Step, ...] = ()
    """Thinned."""

    @classmethod
    def of(
        cls,
        steps: Sequence[Step],
        *,
        seconds: float,
        healthy: bool,
        reason: str,
        final: Mapping[str, float] | None = None,
        rows: int = 1_000,
    ) -> FitFinished:
        """The event for a fit, with at most `rows` rows of its ledger (`policy.audit.ledger_rows`)."""
        return cls(
            seconds=seconds,
            steps=len(steps),
            skipped=sum(s.skipped for s in steps),
            final=dict(final or {}),
            healthy=healthy,
            reason=reason,
            ledger=thin(steps, rows),
        )


class Note(Noun):
    """Something worth knowing that decides nothing."""

    text: str


class Failed(Noun):
    """An exception ends the run."""

    error: str
    """Name of its type."""
    message: str


EVENTS: Mapping[str, type[Noun]] = MappingProxyType(
    {
        "run_started": RunStarted,
        "configuration": Configuration,
        "data": DataSample,
        "leg_finished": LegFinished,
        "scale_search": ScaleSearch,
        "fidelity": Fidelity,
        "headroom": Headroom,
        "hidden": Hidden,
        "drift": Drift,
        "comparison": Comparison,
        "diagnosed": Diagnosis,
        "attempt_started": AttemptStarted,
        "attempt_finished": Attempt,
        "fit_started": FitStarted,
        "fit_finished": FitFinished,
        "note": Note,
        "failed": Failed,
        "run_finished": Outcome,
    }
)


class Event(Noun):
    """One line of an audit file."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    sequence: int = Field(ge=0)
    """Counts the events of a run from 0, those that could not be written included."""
    time: str = Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$")
    """UTC, ISO 8601 with microseconds."""
    event: str
    """One of `EVENTS`; any other name is kept as it is, for a later version may know more."""
    payload: dict[str, Any]
    """JSON values only; NaN and infinities are the strings `NaN`, `Infinity`, `-Infinity`."""

    @property
    def known(self) -> bool:
        """Whether this version knows the event's name."""
        return self.event in EVENTS

    def body(self) -> Noun | None:
        """The payload as the class that `EVENTS` names, numbers restored; None for an unknown event.

        Raises:
            pydantic.ValidationError: the payload does not have the shape of its event.
        """
        model = EVENTS.get(self.event)
        return model.model_validate(self.payload) if model is not None else None

    @property
    def when(self) -> datetime:
        """The time as an aware datetime."""
        return datetime.strptime(self.time, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=timezone.utc)


def utc_now() -> str:
    """The present time as events write it."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def plain(value: Any) -> Any:
    """The same value in strict JSON's types.

    NaN and infinities become strings (strict JSON has neither), tuples lists, keys strings; whatever JSON cannot
    hold becomes its `repr`, as a remedy of the user's own must not be able to break the journal.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):  # numpy's numbers are neither int nor float, but they are these
        return int(value)
    if isinstance(value, Real):
        return _plain_float(float(value))
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else repr(value)


def _plain_float(value: float) -> float | str:
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
