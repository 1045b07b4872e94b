"""Outcome: the closed result of a run, with its explanation and the next step to take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PrivateAttr

from autoprec.diagnosis.finding import Diagnosis, Finding, NotRun
from autoprec.evidence import Precision
from autoprec.noun import Noun

if TYPE_CHECKING:
    from fastai.learner import Learner

__all__ = ["Attempt", "Change", "Outcome", "Price", "Result", "Verdict"]

Result = Literal["healthy", "repaired", "unrepaired", "inconclusive"]


class Change(Noun):
    """What a remedy changed: from what, to what. Enough to say it to a person and to do it again."""

    remedy: str
    what: str
    """The setting, as in `learning rate` or `precision`."""
    before: Any = None
    after: Any = None
    why: str = ""
    needed: str | None = None
    """What the same probe shows without the change; None where that was not probed."""
    data: dict[str, Any] = {}
    """What `undo` needs besides; JSON-able."""


class Verdict(Noun):
    """Whether a leg is healthy, and the reason in a sentence with numbers."""

    healthy: bool
    reason: str
    excess: float | None = None
    """Relative excess of the loss over the fp32 twin's; None if it was not compared."""


class Attempt(Noun):
    """One remedy that was tried."""

    remedy: str
    mode: str
    """Failure mode whose ladder asked for it."""
    applicable: bool
    reason: str
    """Why it does not apply, or what the verdict was."""
    change: Change | None = None
    verdict: Verdict | None = None
    kept: bool = False


class Price(Noun):
    """What finding and repairing cost."""

    legs: int = 0
    steps: int = 0
    """Optimizer steps made in probes."""
    seconds: float = 0.0
    """Wall time before the fit."""
    fit_seconds: float | None = None
    steps_per_second: dict[str, float] = {}
    """Of the probes, on this device: "fp32", the stock 16-bit run under its precision's name, "repaired"."""
    peak_memory: dict[str, int] = {}
    """Bytes on the accelerator, likewise; empty on a CPU."""
    fp32_share: float | None = None
    """Share of the forward pass' FLOPs that islands take; None without islands."""


class Outcome(Noun):
    """What `autoprec.run` returns.

    `outcome.learner` is the learner itself; it is not part of the JSON form.
    """

    result: Result
    precision: Precision | None = None
    """What the fit really ran in; None if nothing was trained."""
    islands: tuple[str, ...] = ()
    """Paths of modules kept in fp32."""
    diagnosis: Diagnosis = Diagnosis()
    attempts: tuple[Attempt, ...] = ()
    changes: tuple[Change, ...] = ()
    price: Price = Price()
    checks_not_run: tuple[NotRun, ...] = ()
    audit_path: str | None = None
    run_id: str = ""
    detail: str = ""
    """One sentence on the result itself (why inconclusive, why not repaired)."""
    next_step: str = ""
    _learner: Any = PrivateAttr(default=None)

    @property
    def learner(self) -> Learner:
        """The learner that was passed in: trained, or as it was where the result is "unrepaired"."""
        return self._learner

    def with_learner(self, learn: Learner) -> Outcome:
        """The same outcome, holding the learner."""
        self._learner = learn
        return self

    def explain(self) -> str:
        """A few lines for people: the result, the cause, the changes, what to do next."""
        return "\n".join(_explain(self))

    __str__ = explain

    def _repr_markdown_(self) -> str:
        """What a notebook shows."""
        return "```text\n" + self.explain() + "\n```"


def _said(value: Any) -> str:
    """A setting as one says it: a list without brackets, nothing for None."""
    if value is None:
        return "nothing"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _cause(primary: Finding) -> Iterable[str]:
    yield f"  found    {primary.mode}: {primary.because}"
    if primary.where is not None:
        yield f"  at       {primary.where}"
        if primary.where.source:
            yield f"           {primary.where.source}"
    if primary.suggestion:
        yield f"  in code  {primary.suggestion}"


def _explain(outcome: Outcome) -> Iterable[str]:
    where = f" in {outcome.precision}" if outcome.precision else ""
    yield f"{outcome.result}{where}{': ' + outcome.detail if outcome.detail else ''}"
    if outcome.diagnosis.primary is not None:
        yield from _cause(outcome.diagnosis.primary)
    for change in outcome.changes:
        yield f"  changed  {change.what}: {_said(change.before)} -> {_said(change.after)}"
        if change.needed:
            yield f"  needed   {change.needed}"
    for check in outcome.checks_not_run:
        if check.why.startswith("not needed"):
            continue
        yield f"  not run  {check.mode}: {check.why}"
    if outcome.next_step:
        yield f"  next     {outcome.next_step}"
    if outcome.audit_path:
        yield f"  audit    {outcome.audit_path}"
