"""Checks that a rule or a remedy of your own can run on itself.

    from autoprec.testing import check_remedy, check_rule

    def test_my_rule():
        check_rule(RULE)

    def test_my_remedy():
        check_remedy(MyRemedy(), make_learner)

Each raises AssertionError with what was expected, what was seen and what to change. autoprec's own registries are
held to the same checks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autoprec.diagnosis import diagnose
from autoprec.diagnosis.finding import Rule
from autoprec.evidence import Configuration, Evidence
from autoprec.policy import Limits, RemedySettings

if TYPE_CHECKING:
    from fastai.learner import Learner

    from autoprec.remedies import Remedy

__all__ = ["check_remedy", "check_rule"]


def check_rule(rule: Rule) -> None:
    """A rule must be documented, pure, and *not run* rather than satisfied when its evidence is missing.

    Raises:
        AssertionError: what is wrong with it.
    """
    _expect("Looks like" in rule.doc and "Not this" in rule.doc, f"{rule.mode}: the rule's doc says what it looks like "
            "('Looks like') and what it is not ('Not this'); pass doc=__doc__")  # fmt: skip
    _expect(bool(rule.needs), f"{rule.mode}: needs is empty; name the evidence that check() reads")
    bare = Evidence(configuration=Configuration(device="cpu", requested="fp16"))
    always = Rule(rule.mode, rule.needs, rule.check, rule.doc)
    found = diagnose(bare, Limits(), [always])
    lacks = always.missing(bare, Limits())
    _expect(not lacks or not found.findings, f"{rule.mode}: fires without its evidence ({', '.join(lacks)})")
    _expect(not lacks or [n.mode for n in found.not_run] == [rule.mode], f"{rule.mode}: is silent without its evidence")
    dumped = bare.model_dump_json()
    rule.relevant(bare, Limits())
    _expect(bare.model_dump_json() == dumped, f"{rule.mode}: relevant() changed the evidence")


def check_remedy(
    remedy: Remedy[Any],
    make_learner: Callable[[], Learner],
    *,
    evidence: Evidence | None = None,
    settings: RemedySettings | None = None,
    place: Any = None,
) -> None:
    """A remedy must undo itself exactly and describe its change as JSON.

    Args:
        remedy: the remedy.
        make_learner: makes a learner to which it applies.
        evidence: what `obstacle` and `apply` are given; None: a probe of one epoch is made.
        settings: the remedy's settings; None: the policy's defaults.
        place: where the finding has its place, for a remedy that needs one.

    Raises:
        AssertionError: what is wrong with it.
    """
    from autoprec.api import examine
    from autoprec.policy import Remedies
    from autoprec.precision import Setting
    from autoprec.remedies import Subject
    from autoprec.schedule import FitPlan
    from autoprec.snapshot import fingerprint

    learn = make_learner()
    emulate = str(getattr(learn.dls, "device", "cpu")) == "cpu"
    evidence = evidence or examine(learn, 1, schedule="fit", emulate_cuda=emulate)[0]
    settings = settings or getattr(Remedies(), remedy.name, RemedySettings())
    setting = Setting(evidence.configuration.requested, evidence.configuration.scaler_kwargs)
    subject = Subject(learn, FitPlan.checked(learn, 1, None, "fit", {}), setting, emulate, place=place)
    plan, before = subject.plan, fingerprint(learn)
    obstacle = remedy.obstacle(subject, evidence, settings)
    _expect(obstacle is None, f"{remedy.name}: does not apply to the learner given: {obstacle}")
    _expect(not before.differences(fingerprint(learn)), f"{remedy.name}: obstacle() changed the learner")
    change = remedy.apply(subject, evidence, settings)
    _expect(change.remedy == remedy.name, f"{remedy.name}: its change says {change.remedy!r}")
    _expect(json.loads(change.model_dump_json()) is not None, f"{remedy.name}: its change is no JSON")
    done = subject.plan != plan or subject.setting != setting or bool(before.differences(fingerprint(learn)))
    _expect(done, f"{remedy.name}: apply() changed nothing")
    remedy.undo(subject, change)
    left = before.differences(fingerprint(learn))
    _expect(not left, f"{remedy.name}: after undo() the learner differs in {', '.join(left[:6])}")
    _expect(
        subject.plan == plan and subject.setting == setting, f"{remedy.name}: undo() left the plan or the precision"
    )
    _expect(not subject.held, f"{remedy.name}: undo() left {list(subject.held)} in subject.held")


def _expect(holds: bool, otherwise: str) -> None:  # noqa: FBT001  # reads as the assertion that it is
    if not holds:
        raise AssertionError(otherwise)
