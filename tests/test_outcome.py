"""What an outcome tells a person, for each of the four results."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest

from autoprec.diagnosis import Diagnosis, Finding, NotRun
from autoprec.errors import UnrepairedError
from autoprec.evidence import Place
from autoprec.outcome import Attempt, Change, Outcome, Price, Result, Verdict

PLACE = Place(module="attention", file="model.py", line=41, source="scores = q @ k", function="forward")
OVERFLOW = Finding(
    mode="forward_overflow", because="aten.bmm gives 2.1e+05", where=PLACE, suggestion="scale before the product"
)
HEALTHY = Outcome(result="healthy", precision="fp16", detail="400 of 404 steps taken", audit_path="/tmp/a.jsonl")
REPAIRED = Outcome(
    result="repaired",
    precision="bf16",
    detail="404 of 404 steps taken",
    diagnosis=Diagnosis(findings=(OVERFLOW, Finding(mode="plateau", because="", consequence_of="forward_overflow"))),
    attempts=(
        Attempt(remedy="init_scale", mode="forward_overflow", applicable=False, reason="no scale helps"),
        Attempt(
            remedy="bf16", mode="forward_overflow", applicable=True, reason="well", kept=True,
            verdict=Verdict(healthy=True, reason="well", excess=math.nan),
        ),
    ),
    changes=(
        Change(remedy="bf16", what="precision", before="fp16", after="bf16"),
        Change(remedy="lower_lr", what="learning rate", before=0.1, after=0.01),
    ),
    price=Price(legs=3, steps=90, seconds=1.5),
    next_step="keep the changes",
    audit_path="/tmp/a.jsonl",
    run_id="r",
)  # fmt: skip
UNREPAIRED = Outcome(
    result="unrepaired",
    detail="no setting can cure nonfinite_data",
    diagnosis=Diagnosis(findings=(Finding(mode="nonfinite_data", because="2 values are NaN", repairable=False),)),
    next_step="remove these rows",
)
INCONCLUSIVE = Outcome(
    result="inconclusive",
    precision="fp16",
    checks_not_run=(
        NotRun(mode="plateau", why="no evidence: leg:fp32"),
        NotRun(mode="gradient_underflow", why="not needed: plateau was found first"),
    ),
    next_step="see the checks that did not run",
)
TOLD = {
    "healthy": (HEALTHY, ["healthy in fp16: 400 of 404 steps taken", "  audit    /tmp/a.jsonl"]),
    "repaired": (
        REPAIRED,
        [
            "repaired in bf16: 404 of 404 steps taken",
            "  found    forward_overflow: aten.bmm gives 2.1e+05",
            "  at       model.py:41 in forward (module attention)",
            "           scores = q @ k",
            "  in code  scale before the product",
            "  changed  precision: fp16 -> bf16",
            "  changed  learning rate: 0.1 -> 0.01",
            "  next     keep the changes",
            "  audit    /tmp/a.jsonl",
        ],
    ),
    "unrepaired": (
        UNREPAIRED,
        [
            "unrepaired: no setting can cure nonfinite_data",
            "  found    nonfinite_data: 2 values are NaN",
            "  next     remove these rows",
        ],
    ),
    "inconclusive": (
        INCONCLUSIVE,
        [
            "inconclusive in fp16",
            "  not run  plateau: no evidence: leg:fp32",  # what was not needed is no gap
            "  next     see the checks that did not run",
        ],
    ),
}


def test_every_result_is_told() -> None:
    assert set(TOLD) == set(get_args(Result)), "a new result needs its explanation here"


@pytest.mark.parametrize("result", TOLD)
def test_explain(result: str) -> None:
    outcome, lines = TOLD[result]
    assert outcome.result == result
    assert outcome.explain().splitlines() == lines


@pytest.mark.parametrize("result", TOLD)
def test_json_and_back(result: str) -> None:
    outcome, _ = TOLD[result]
    assert repr(Outcome.model_validate_json(outcome.model_dump_json())) == repr(outcome)


def test_the_learner_is_held_and_stays_out_of_json() -> None:
    learner: Any = object()
    outcome = HEALTHY.model_copy().with_learner(learner)
    assert outcome.learner is learner
    assert outcome.model_dump_json() == HEALTHY.model_dump_json()
    assert Outcome.model_validate_json(outcome.model_dump_json()).learner is None


def test_the_primary_finding() -> None:
    assert HEALTHY.diagnosis.primary is None
    assert REPAIRED.diagnosis.primary == OVERFLOW


def test_the_error_tells_what_the_outcome_tells() -> None:
    error = UnrepairedError(UNREPAIRED)
    assert isinstance(error, RuntimeError)
    assert str(error) == UNREPAIRED.explain()
    assert error.outcome is UNREPAIRED
