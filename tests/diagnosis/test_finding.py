"""A diagnosis in words, as a terminal and a notebook show it."""

from __future__ import annotations

import pytest

from autoprec.diagnosis import Diagnosis, Finding, NotRun
from autoprec.evidence import Place

OVERFLOW = Finding(
    mode="forward_overflow",
    because="aten.bmm gives 2.1e+05",
    where=Place(module="attention", file="model.py", line=41, source="scores = q @ k", function="forward"),
    ruled_out=("the data: fp32 is finite", "a value handed on"),
    suggestion="scale before the product",
)
FOLLOWS = Finding(mode="plateau", because="worse by half", consequence_of="forward_overflow")
ADVICE = Finding(mode="nonfinite_metric", because="dice is nan", advisory=True)
GAP = NotRun(mode="plateau", why="no evidence: leg:fp32")
NEEDLESS = NotRun(mode="plateau", why="not needed: forward_overflow was found first")


@pytest.mark.parametrize(
    ("diagnosis", "lines"),
    [
        (Diagnosis(), ["nothing is wrong with the training"]),
        (
            Diagnosis(not_run=(GAP,)),
            [
                "nothing was found, but not every check could run",
                "not run: plateau (no evidence: leg:fp32)",
            ],
        ),
        (
            Diagnosis(findings=(OVERFLOW, FOLLOWS), not_run=(NEEDLESS,)),
            [
                "forward_overflow: aten.bmm gives 2.1e+05",
                "    at         model.py:41 in forward (module attention)",
                "               scores = q @ k",
                "    ruled out  the data: fp32 is finite",
                "    ruled out  a value handed on",
                "    in code    scale before the product",
                "plateau (a consequence of forward_overflow): worse by half",
            ],
        ),
    ],
)
def test_explain(diagnosis: Diagnosis, lines: list[str]) -> None:
    assert diagnosis.explain().splitlines() == lines
    assert str(diagnosis) == diagnosis.explain()
    assert diagnosis._repr_markdown_() == f"```text\n{diagnosis.explain()}\n```"


def test_the_primary_finding_is_the_first_that_harms_the_training() -> None:
    assert Diagnosis().primary is None
    assert Diagnosis(findings=(ADVICE,)).primary is None
    assert Diagnosis(findings=(ADVICE, OVERFLOW, FOLLOWS)).primary is OVERFLOW
