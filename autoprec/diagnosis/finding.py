"""Finding, Diagnosis and Rule: the nouns of `diagnosis/`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator

from autoprec.evidence import Evidence, Place
from autoprec.noun import Noun

if TYPE_CHECKING:
    from autoprec.policy import Limits

__all__ = ["Diagnosis", "Finding", "NotRun", "Rule"]


_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _number(value: object) -> object:
    """JSON spells NaN and infinity as strings; beside `str` pydantic would leave them so."""
    return _NONFINITE.get(value, value) if isinstance(value, str) else value


class Finding(Noun):
    """A failure mode that a rule recognised, with the numbers it rests on."""

    mode: str
    because: str
    """One sentence with numbers."""
    where: Place | None = None
    op: str | None = None
    ruled_out: tuple[str, ...] = ()
    """What it would look like if it were something else, and that it does not."""
    suggestion: str | None = None
    """What to change in the user's own code or data, where only that helps."""
    evidence: dict[str, Annotated[float | int | str | None, BeforeValidator(_number)]] = {}
    """The numbers, by name."""
    confidence: float = 1.0
    """0 to 1: 1 where the evidence shows the fault itself, less where it was inferred."""
    advisory: bool = False
    """True: worth knowing, but the training is fine; never the primary finding."""
    repairable: bool = True
    """False: no setting can cure it; the ladder is not walked."""
    consequence_of: str | None = None
    """Mode of the primary finding that explains this one."""

    def lines(self) -> list[str]:
        """The finding as lines of text, the sentence first."""
        also = f" (a consequence of {self.consequence_of})" if self.consequence_of else ""
        out = [f"{self.mode}{also}: {self.because}"]
        if self.where is not None:
            out.append(f"    at         {self.where}")
            out += [f"               {self.where.source}"] if self.where.source else []
        out += [f"    ruled out  {text}" for text in self.ruled_out]
        out += [f"    in code    {self.suggestion}"] if self.suggestion else []
        return out


class NotRun(Noun):
    """A check that could not be made, and why."""

    mode: str
    why: str


class Diagnosis(Noun):
    """Ranked findings: the first is the cause, the rest are its consequences or stand beside it."""

    findings: tuple[Finding, ...] = ()
    not_run: tuple[NotRun, ...] = ()

    @property
    def primary(self) -> Finding | None:
        """The finding to act on; None if nothing was found that harms the training."""
        return next((f for f in self.findings if not f.advisory), None)

    def explain(self) -> str:
        """For people: each finding with its place, its numbers, what was ruled out and what to do."""
        lines = []
        if self.primary is None:
            lines.append(
                "nothing is wrong with the training"
                if not self.not_run
                else "nothing was found, but not every check could run"
            )
        for finding in self.findings:
            lines += finding.lines()
        for check in self.not_run:
            if not check.why.startswith("not needed"):
                lines.append(f"not run: {check.mode} ({check.why})")
        return "\n".join(lines)

    __str__ = explain

    def _repr_markdown_(self) -> str:
        """What a notebook shows."""
        return "```text\n" + self.explain() + "\n```"


@dataclass(frozen=True)
class Rule:
    """Evidence in, finding out.

    Args:
        mode: the failure mode it recognises.
        needs: evidence that it reads ("configuration", "data", "scale_search", "fidelity", "leg:main", "leg:fp32", …).
        check: returns a Finding, or None if the evidence speaks against the mode.
        relevant: whether the needed evidence is worth gathering, judged on what is there already; the runner
            calls it before it pays for a missing leg. Default: always.
        more: further needs that arise from what is known so far; default: none.
        doc: what `autoprec explain MODE` prints; the rule's module docstring.
    """

    mode: str
    needs: tuple[str, ...]
    check: Callable[[Evidence, Limits], Finding | None]
    doc: str
    relevant: Callable[[Evidence, Limits], bool] = lambda _evidence, _limits: True
    more: Callable[[Evidence, Limits], tuple[str, ...]] = lambda _evidence, _limits: ()

    def missing(self, evidence: Evidence, limits: Limits) -> tuple[str, ...]:
        """What the rule needs and the evidence does not hold."""
        return tuple(n for n in (*self.needs, *self.more(evidence, limits)) if not evidence.has(n))
