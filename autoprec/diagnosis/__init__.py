"""Evidence in, ranked findings out.

The registry `rules.RULES` is in causal order: data and configuration before the model, the model before
precision, an op before what follows from it. So the first finding is the cause; later ones that its failure
explains are kept as its consequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autoprec.diagnosis.finding import Diagnosis, Finding, NotRun, Rule
from autoprec.diagnosis.rules import RULES

if TYPE_CHECKING:
    from autoprec.evidence import Evidence
    from autoprec.policy import Limits

__all__ = ["RULES", "Diagnosis", "Finding", "NotRun", "Rule", "diagnose"]


def diagnose(evidence: Evidence, limits: Limits, rules: Sequence[Rule] = RULES) -> Diagnosis:
    """Run every relevant rule.

    A rule whose evidence is missing is not satisfied but *not run*, and listed with what it lacked, or with the
    earlier finding that made it unnecessary to gather more.
    """
    findings: list[Finding] = []
    not_run: list[NotRun] = []
    for rule in rules:
        if not rule.relevant(evidence, limits):
            continue
        first = next((f.mode for f in findings if not f.advisory), None)
        lacking = rule.missing(evidence, limits)
        if lacking:
            why = f"not needed: {first} was found first" if first else f"no evidence: {', '.join(lacking)}"
            not_run.append(NotRun(mode=rule.mode, why=why))
            continue
        finding = rule.check(evidence, limits)
        if finding is not None:
            findings.append(
                finding if first is None or finding.advisory else finding.model_copy(update={"consequence_of": first})
            )
    return Diagnosis(findings=tuple(findings), not_run=tuple(not_run))
