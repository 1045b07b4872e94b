"""The report: a run's events folded into what a person asks - what was wrong, how we know, what was changed.

`fold` needs nothing but the events, so the same report can be made on another machine, a year later, or from the
file of a run that was killed (`Report.complete` is then False, and everything up to the kill is there).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from autoprec.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from autoprec.audit.events import (
        AttemptStarted,
        Event,
        Failed,
        FitFinished,
        FitStarted,
        LegFinished,
        Note,
        Plan,
        RunStarted,
    )
    from autoprec.diagnosis.finding import Diagnosis, NotRun
    from autoprec.evidence import Comparison, Configuration, DataSample, Drift, Fidelity, Headroom, Hidden, ScaleSearch
    from autoprec.outcome import Attempt, Change, Outcome, Price

__all__ = ["Report", "fold"]


@dataclass
class Report:
    """What an audit says about one run. A part that the run did not come to is None or empty.

    Attributes:
        run_id: the run; "" if there were no events.
        started: time of the first event, UTC.
        last: time of the last event.
        last_event: name of the last event.
        complete: whether the run came to its end (`run_finished`, or `failed`).
        environment: versions, platform, device.
        policy: name of the policy.
        plan: the fit that was asked for.
        configuration: what was attached to the learner.
        data: inputs and targets that were sampled.
        legs: the probes of the diagnosis, in order; those that tried a remedy are in `trials`.
        trials: per attempt (its index in `attempts`, or one more for one that was cut off), the probes it ran.
        scale_search: which loss scales give finite gradients.
        fidelity: gradients in 16 bits beside fp32.
        headroom: room below float16's largest number, per module.
        hidden: a non-finite value that was made and absorbed.
        drift: where finite 16-bit values leave fp32's.
        comparison: the main leg's losses beside the twin's.
        diagnosis: ranked findings of the run; None if it did not come to a diagnosis.
        attempts: remedies tried, in order.
        trying: the remedy that was being tried when the file ended.
        fit: the real fit's beginning.
        fitted: the real fit's end.
        outcome: the outcome; None for a run that did not finish.
        error: the exception that ended the run, as `Type: message`.
        notes: in order.
        unknown: how many events this version does not know.
        missing: how many events could not be written.
    """

    run_id: str = ""
    started: str = ""
    last: str = ""
    last_event: str = ""
    complete: bool = False
    environment: dict[str, Any] = field(default_factory=dict)
    policy: str = ""
    plan: Plan | None = None
    configuration: Configuration | None = None
    data: DataSample | None = None
    legs: list[LegFinished] = field(default_factory=list)
    trials: dict[int, list[LegFinished]] = field(default_factory=dict)
    scale_search: ScaleSearch | None = None
    fidelity: Fidelity | None = None
    headroom: Headroom | None = None
    hidden: Hidden | None = None
    drift: Drift | None = None
    comparison: Comparison | None = None
    diagnosis: Diagnosis | None = None
    attempts: list[Attempt] = field(default_factory=list)
    trying: AttemptStarted | None = None
    fit: FitStarted | None = None
    fitted: FitFinished | None = None
    outcome: Outcome | None = None
    error: str | None = None
    notes: list[str] = field(default_factory=list)
    unknown: int = 0
    missing: int = 0

    @property
    def changes(self) -> tuple[Change, ...]:
        """What was changed and kept: the outcome's word where there is one, else what the attempts kept so far."""
        if self.outcome is not None:
            return self.outcome.changes
        return tuple(a.change for a in self.attempts if a.kept and a.change is not None)

    @property
    def checks_not_run(self) -> tuple[NotRun, ...]:
        """Checks that could not be made."""
        if self.outcome is not None:
            return self.outcome.checks_not_run
        return self.diagnosis.not_run if self.diagnosis is not None else ()

    @property
    def price(self) -> Price | None:
        """What finding and repairing cost; None before the run finished."""
        return self.outcome.price if self.outcome is not None else None


def fold(events: Iterable[Event]) -> Report:
    """Fold the events of one run into its report.

    Args:
        events: of one run, in their order; `Audit.of(run_id)` gives them. None at all gives an empty report.

    Raises:
        InputError: the events are of more than one run.
    """
    report = Report()
    sequence = -1
    for event in events:
        if report.run_id and event.run_id != report.run_id:
            raise InputError(
                f"events of the runs {report.run_id} and {event.run_id}; a report is about one. "
                "Choose one with Audit.of(run_id)."
            )
        report.run_id = event.run_id
        report.started = report.started or event.time
        report.last, report.last_event = event.time, event.event
        report.missing += max(0, event.sequence - sequence - 1)
        sequence = event.sequence
        step = _STEPS.get(event.event)
        if step is None:
            report.unknown += 1
        else:
            step(report, event.body())
    return report


def _run_started(report: Report, body: RunStarted) -> None:
    report.environment = body.environment
    report.policy = body.policy
    report.plan = body.plan


def _configuration(report: Report, body: Configuration) -> None:
    report.configuration = body


def _data(report: Report, body: DataSample) -> None:
    report.data = body


def _leg_finished(report: Report, body: LegFinished) -> None:
    if report.trying is not None:
        report.trials.setdefault(len(report.attempts), []).append(body)
    else:
        report.legs.append(body)


def _of_the_run(part: str) -> Callable[[Report, Any], None]:
    """A fold that keeps what was measured of the run as it came, not what was measured while a remedy was tried."""

    def step(report: Report, body: Any) -> None:
        if report.trying is None:
            setattr(report, part, body)

    return step


def _diagnosed(report: Report, body: Diagnosis) -> None:
    # The first is the run as it came; later ones look at what a remedy left over.
    if report.diagnosis is None:
        report.diagnosis = body


def _attempt_started(report: Report, body: AttemptStarted) -> None:
    report.trying = body


def _attempt_finished(report: Report, body: Attempt) -> None:
    report.attempts.append(body)
    report.trying = None


def _fit_started(report: Report, body: FitStarted) -> None:
    report.fit, report.fitted = body, None


def _fit_finished(report: Report, body: FitFinished) -> None:
    report.fitted = body


def _note(report: Report, body: Note) -> None:
    report.notes.append(body.text)


def _failed(report: Report, body: Failed) -> None:
    report.error = f"{body.error}: {body.message}"
    report.complete = True


def _run_finished(report: Report, body: Outcome) -> None:
    report.outcome = body
    report.diagnosis = body.diagnosis
    report.complete = True


_STEPS: MappingProxyType[str, Callable[[Report, Any], None]] = MappingProxyType(
    {
        "run_started": _run_started,
        "configuration": _configuration,
        "data": _data,
        "leg_finished": _leg_finished,
        "scale_search": _of_the_run("scale_search"),
        "fidelity": _of_the_run("fidelity"),
        "headroom": _of_the_run("headroom"),
        "hidden": _of_the_run("hidden"),
        "drift": _of_the_run("drift"),
        "comparison": _of_the_run("comparison"),
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
