"""The report for a terminal: made to be read at 80 columns, from top to bottom, the answer first.

Plain ASCII but for what the run itself brought along, so that it survives pipes, logs and old terminals. Whatever
comes from the run is shown as text, never read as rich's markup.
"""

from __future__ import annotations

import math
from datetime import datetime
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoprec.verify import describe_failure
from autoprec.words import count, duration, number, scale, setting, share

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from autoprec.audit.events import LegFinished
    from autoprec.audit.report import Report
    from autoprec.diagnosis.finding import Finding
    from autoprec.evidence import Leg
    from autoprec.outcome import Attempt

__all__ = ["render"]

_STYLES = {
    "healthy": "bold green",
    "repaired": "bold green",
    "inconclusive": "bold yellow",
    "unrepaired": "bold red",
    "failed": "bold red",
    "unfinished": "bold yellow",
}
_LABEL = 10
_BLANK = Text()
_VERSIONS = ("autoprec", "torch", "fastai", "python")

Row = tuple[str, str | Text]


def render(report: Report, file: Path | None = None) -> RenderableType:
    """Lay the report out.

    Args:
        report: what `fold` made.
        file: where the events came from, named at the end; None: the path that the run itself recorded.
    """
    if not report.run_id:
        return Text("No events: nothing was written to this audit file yet.")
    sections: Iterable[tuple[str, list[RenderableType]]] = (
        ("What was wrong", list(_wrong(report))),
        ("How we know", list(_known(report))),
        ("What was tried", list(_tried(report))),
        ("What was changed", list(_changed(report))),
        ("Result", list(_result(report))),
        ("What did not run", list(_not_run(report))),
        ("Notes", [Text(note) for note in report.notes]),
        ("Where", list(_where(report, file))),
    )
    parts: list[RenderableType] = [_head(report)]
    for title, body in sections:
        if body:
            parts += [_BLANK, Text(title, style="bold")]
            parts += [part if part is _BLANK else Padding(part, (0, 0, 0, 2), expand=False) for part in body]
    return Group(*parts)


def _head(report: Report) -> RenderableType:
    word, said = _verdict(report)
    text = Text()
    text.append(word, style=_STYLES[word.split()[0]])
    if said:
        text.append(f": {said}")
    return Group(text, *(Text(line, style="dim") for line in _circumstances(report)))


def _verdict(report: Report) -> tuple[str, str]:
    """The run's result in a word or two, and what else is to be said about it."""
    if report.outcome is not None:
        where = f" in {report.outcome.precision}" if report.outcome.precision else ""
        return f"{report.outcome.result}{where}", report.outcome.detail
    if report.error is not None:
        return "failed", report.error
    return "unfinished", (
        f"the file ends {_end(report)}. The run is still going on, or it was killed. What follows is all that it wrote."
    )


def _end(report: Report) -> str:
    if report.trying is not None:
        return f"while {report.trying.remedy} was being tried"
    if report.fit is not None and report.fitted is None:
        return "during the fit"
    return {
        "leg_finished": "after a probe",
        "diagnosed": "after the diagnosis",
        "attempt_finished": "after an attempt",
        "fit_finished": "after the fit",
    }.get(report.last_event, "at the beginning of the run")


def _circumstances(report: Report) -> Iterator[str]:
    begin, end = _when(report.started), _when(report.last)
    parts = [f"{begin:%Y-%m-%d %H:%M} UTC, took {duration((end - begin).total_seconds())}"]
    if report.configuration is not None:
        emulated = ", 16 bits emulated" if report.configuration.emulated else ""
        parts.append(f"on {report.configuration.device}{emulated}")
    if report.policy:
        parts.append(f"policy {report.policy}")
    yield "; ".join(parts)
    if report.plan is not None:
        plan = report.plan
        lr = "" if plan.lr is None else f", lr {setting(plan.lr)}"
        yield f"asked for: {plan.schedule}, {count(plan.epochs, 'epoch')}, {count(plan.steps, 'step')}{lr}"


def _wrong(report: Report) -> Iterator[RenderableType]:
    if report.diagnosis is None:
        yield Text("The run did not come to a diagnosis.")
        return
    if report.diagnosis.primary is None:
        yield Text("Nothing was found.")
        return
    for index, finding in enumerate(report.diagnosis.findings):
        if index:
            yield _BLANK
        yield from _finding(finding, primary=index == 0)


def _finding(finding: Finding, *, primary: bool) -> Iterator[RenderableType]:
    title = Text(finding.mode, style="bold red" if primary else "bold")
    if finding.consequence_of:
        title.append(f"  a consequence of {finding.consequence_of}", style="dim")
    elif not primary:
        title.append("  also found", style="dim")
    if finding.confidence < 1:
        title.append(f"  ({share(finding.confidence)} sure)", style="dim")
    yield title
    yield Text(finding.because)
    rows: list[Row] = []
    if finding.where is not None:
        place = Text(str(finding.where))
        if finding.where.source:
            place.append(f"\n{finding.where.source}", style="cyan")
        rows.append(("at", place))
    if finding.op:
        rows.append(("op", finding.op))
    if primary:
        rows += [("ruled out", text) for text in finding.ruled_out]
    if finding.suggestion:
        rows.append(("in code", finding.suggestion))
    yield from _rows(rows)


def _known(report: Report) -> Iterator[RenderableType]:
    legs = [(leg.name, leg) for leg in report.legs]
    for index, tried in sorted(report.trials.items()):
        remedy = report.attempts[index].remedy if index < len(report.attempts) else ""
        remedy = remedy or (report.trying.remedy if report.trying else "")
        legs += [(f"with {remedy}" + ("" if leg.name == "main" else f": {leg.name}"), leg) for leg in tried]
    if legs:
        yield _legs(legs)
    rows: list[Row] = [(leg.name, failed) for leg in report.legs if (failed := _failure(leg.leg))]
    if rows:
        yield _BLANK
        yield from _rows(rows, width=max(len(name) for name, _ in rows))
    numbers = list(_numbers(report))
    if numbers:
        yield _BLANK
        yield from _rows(numbers)


def _legs(legs: list[tuple[str, LegFinished]]) -> Table:
    validated = any(leg.leg.validation for _, leg in legs)
    scaled = any(leg.totals.first_scale is not None for _, leg in legs)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", show_edge=False)
    table.add_column("probe", overflow="fold", min_width=8)
    table.add_column("in", no_wrap=True)
    for title in ("steps", "skip", "loss", "end"):
        table.add_column(title, justify="right", no_wrap=True)
    if validated:
        table.add_column("valid", justify="right", no_wrap=True)
    if scaled:
        table.add_column("loss scale", no_wrap=True)
    for name, event in legs:
        leg, totals = event.leg, event.totals
        cut = totals.attempted < leg.planned_steps
        cells = [
            Text(name),
            Text(leg.spec.precision),
            Text(f"{totals.attempted}/{leg.planned_steps}" if cut else str(totals.attempted)),
            Text(str(totals.skipped) if totals.first_scale is not None else "-"),
            _loss(totals.first_loss),
            # The mean over the last steps hides the value at which a leg stopped.
            _loss(leg.steps[-1].loss if leg.failure and leg.steps else totals.final_loss),
        ]
        if validated:
            cells.append(_loss(leg.validation_loss))
        if scaled:
            moved = f"{scale(totals.first_scale)} -> {scale(totals.last_scale)}"
            cells.append(Text(moved if totals.first_scale is not None else "-"))
        table.add_row(*cells)
    return table


def _loss(value: float | None) -> Text:
    # Narrow where it is very large or small, as seven columns have to share the line.
    odd = value is not None and math.isfinite(value) and value != 0 and not 1e-4 <= abs(value) < 1e5
    text = f"{value:.2g}" if odd else number(value)
    return Text(text, style="red" if text in ("NaN", "inf", "-inf") else "")


def _failure(leg: Leg) -> str:
    if leg.failure is None:
        return ""
    text = describe_failure(leg)
    if leg.origin is not None:
        origin = leg.origin
        text += f"; it began in {origin.operation.op} at {origin.place}"
        if origin.operation.input_max is not None:
            text += f", inputs up to {number(origin.operation.input_max)}"
        if origin.fp32 is not None and origin.fp32.output_max is not None:
            text += f", where fp32 gives up to {number(origin.fp32.output_max)}"
    return text


def _numbers(report: Report) -> Iterator[Row]:
    primary = report.diagnosis.primary if report.diagnosis else None
    if primary is not None and primary.evidence:
        yield "numbers", ", ".join(f"{name} {setting(value)}" for name, value in primary.evidence.items())
    if report.scale_search is not None:
        search = report.scale_search
        if search.largest_finite is None:
            yield "scales", f"gradients are not finite at any loss scale down to {scale(search.smallest_tried)}"
        else:
            yield "scales", f"gradients are finite up to a loss scale of {scale(search.largest_finite)}"
    if report.fidelity is not None:
        fidelity = report.fidelity
        worst = max(fidelity.parameters, key=lambda p: p.flushed, default=None)
        if worst is not None:
            yield (
                "gradients",
                f"{share(worst.flushed)} of {worst.name} flushed to zero at scale {scale(fidelity.scale)}",
            )


def _tried(report: Report) -> Iterator[RenderableType]:
    rows: list[Row] = [(attempt.remedy, _attempt(attempt)) for attempt in report.attempts]
    if report.trying is not None:
        rows.append((report.trying.remedy, Text("being tried when the file ended", style="yellow")))
    if rows:
        yield from _rows(rows, width=max(len(name) for name, _ in rows))


def _attempt(attempt: Attempt) -> Text:
    if not attempt.applicable:
        text = Text("does not apply", style="dim")
    elif attempt.kept:
        text = Text("accepted", style="green")
    else:
        text = Text("taken back", style="yellow")
    text.append(f": {attempt.reason}", style="not bold default")
    return text


def _changed(report: Report) -> Iterator[RenderableType]:
    for change in report.changes:
        text = Text.assemble((change.what, "bold"), f": {setting(change.before)} -> {setting(change.after)}")
        if change.why:
            text.append(f"  ({change.why})", style="dim")
        yield text
    if report.changes:
        return
    if report.outcome is not None:
        yield Text("Nothing. The learner is as it was." if report.fit is None else "Nothing.")


def _result(report: Report) -> Iterator[RenderableType]:
    rows: list[Row] = []
    if report.fit is not None:
        fit, done = report.fit, report.fitted
        islands = f", {count(len(fit.islands), 'module')} in fp32: {', '.join(fit.islands)}" if fit.islands else ""
        rows.append(("fit", f"in {fit.precision}{islands}; {fit.schedule}, {count(fit.steps, 'step')}"))
        if done is None:
            rows.append(("", Text("did not come to its end", style="yellow")))
        else:
            skipped = f"{done.skipped:,} skipped" if done.skipped else "none skipped"
            rows.append(("made", f"{count(done.steps, 'step')}, {skipped}, {duration(done.seconds)}"))
            if done.final:
                rows.append(("ended at", ", ".join(f"{k} {number(v)}" for k, v in done.final.items())))
            judged = Text("healthy", style="green") if done.healthy else Text("not healthy", style="red")
            rows.append(("judged", judged.append(f": {done.reason}", style="default")))
    elif report.outcome is not None:
        rows.append(("fit", "none was made"))
    if report.price is not None and report.price.legs:
        price = report.price
        probes = f"{count(price.legs, 'probe')}, {count(price.steps, 'step')}, {duration(price.seconds)} before the fit"
        rows.append(("price", probes))
    if report.outcome is not None and report.outcome.next_step:
        rows.append(("next", Text(report.outcome.next_step, style="bold")))
    if report.missing:
        rows.append(("gaps", Text(f"{count(report.missing, 'event')} could not be written", style="yellow")))
    if report.unknown:
        rows.append(("unknown", f"{count(report.unknown, 'event')} of a kind that this version does not know"))
    yield from _rows(rows)


def _not_run(report: Report) -> Iterator[RenderableType]:
    # Several checks often lack the same thing: one line per reason is shorter and says more.
    reasons: dict[str, list[str]] = {}
    for check in report.checks_not_run:
        reasons.setdefault(check.why, []).append(check.mode)
    for why, modes in reasons.items():
        yield Text.assemble((", ".join(modes), "bold"), f": {why}")


def _where(report: Report, file: Path | None) -> Iterator[RenderableType]:
    rows: list[Row] = []
    path = str(file) if file is not None else report.outcome.audit_path if report.outcome else None
    if path:
        rows.append(("audit", path))
    rows.append(("run", report.run_id))
    versions = [f"{name} {report.environment[name]}" for name in _VERSIONS if name in report.environment]
    others = [f"{k} {setting(v)}" for k, v in report.environment.items() if k not in _VERSIONS]
    if versions or others:
        rows.append(("made with", ", ".join(versions + others)))
    yield from _rows(rows)


def _rows(rows: list[Row], width: int = 0) -> Iterator[RenderableType]:
    """Labels on the left, text on the right that wraps under itself."""
    if not rows:
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True, min_width=max(_LABEL, width))
    table.add_column(overflow="fold", ratio=1)
    for label, text in rows:
        table.add_row(Text(label), text if isinstance(text, Text) else Text(text))
    yield table


def _when(time: str) -> datetime:
    return datetime.strptime(time, "%Y-%m-%dT%H:%M:%S.%fZ")
