"""Each rule against the table of its failure mode, `rules/<mode>.yaml`.

A row changes a few words of `healthy.yaml`. `fires`: the rule finds its mode and says why. `quiet`: a look-alike, with
everything gathered, which another rule (`instead`) finds or none does; `consequence: true` where the mode is found
too, as what follows from the other. `inconclusive`: without some evidence it says what it lacks, or (`needless`) which
earlier finding made that needless.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from made_evidence import evidence, merged

from autoprec.diagnosis import RULES, Diagnosis, Finding, diagnose
from autoprec.evidence import Evidence
from autoprec.policy import Limits

HERE = Path(__file__).parent
HEALTHY: dict[str, Any] = yaml.safe_load((HERE / "healthy.yaml").read_text(encoding="utf-8"))
TABLES: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted((HERE / "rules").glob("*.yaml"))
}
RANKING: list[dict[str, Any]] = yaml.safe_load((HERE / "ranking.yaml").read_text(encoding="utf-8"))
BY_MODE = {rule.mode: rule for rule in RULES}
KEYS = {
    "fires": {"what", "evidence", "limits", "because", "where", "op", "suggestion", "ruled_out", "repairable",
              "confidence", "numbers", "advisory"},
    "quiet": {"what", "evidence", "limits", "instead", "consequence"},
    "inconclusive": {"what", "evidence", "limits", "without", "lacks", "needless"},
}  # fmt: skip
# Look-alikes that people mistake for each other: each table shows the other one, and stays quiet.
PAIRS = [
    ("forward_overflow", "nonfinite_data"),
    ("forward_overflow", "loss_overflow"),
    ("gradient_overflow", "lr_divergence"),
    ("gradient_overflow", "skipped_steps"),
    ("forward_overflow", "forward_underflow"),
]


def seen(row: dict[str, Any]) -> Evidence:
    return lacking(evidence(merged(HEALTHY, row.get("evidence", {}))), row.get("without", []))


def lacking(whole: Evidence, needs: list[str]) -> Evidence:
    """The evidence as if `needs` had not been gathered."""
    legs = {name: leg for name, leg in whole.legs.items() if f"leg:{name}" not in needs}
    parts = {need: None for need in needs if not need.startswith("leg:")}
    return whole.model_copy(update={"legs": legs, **parts})


def answer(row: dict[str, Any]) -> Diagnosis:
    return diagnose(seen(row), Limits(**row.get("limits", {})))


def found(diagnosis: Diagnosis, mode: str) -> Finding | None:
    return next((f for f in diagnosis.findings if f.mode == mode), None)


def rows(kind: str) -> list[Any]:
    return [
        pytest.param(mode, row, id=f"{mode}-{row['what'].replace(' ', '_')}")
        for mode, table in TABLES.items()
        for row in table.get(kind, [])
    ]


@pytest.mark.parametrize(("mode", "row"), rows("fires"))
def test_fires(mode: str, row: dict[str, Any]) -> None:
    diagnosis = answer(row)
    advisory = row.get("advisory", False)
    finding = found(diagnosis, mode) if advisory else diagnosis.primary
    assert finding is not None, "nothing was found"
    assert finding.advisory is advisory
    assert finding.mode == mode, f"instead: {finding.because}"
    assert finding.consequence_of is None
    for fragment in row["because"]:
        assert fragment in finding.because
    assert (str(finding.where) if finding.where else None) == row.get("where")
    assert finding.op == row.get("op")
    assert finding.repairable is row.get("repairable", True)
    if "confidence" in row:
        assert finding.confidence == row["confidence"]
    for key in ("suggestion", "ruled_out"):
        if key in row:
            said = getattr(finding, key)
            text = "; ".join(said) if isinstance(said, tuple) else said
            assert row[key] in text if row[key] else text is None
    for name, value in row.get("numbers", {}).items():
        assert finding.evidence[name] == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize(("mode", "row"), rows("fires"))
def test_a_finding_survives_json(mode: str, row: dict[str, Any]) -> None:
    finding = found(answer(row), mode)
    assert finding is not None
    again = Finding.model_validate_json(finding.model_dump_json())
    # By repr, as NaN equals nothing.
    assert repr(again) == repr(finding)


@pytest.mark.parametrize(("mode", "row"), rows("fires"))
def test_a_fault_is_never_taken_for_health_where_evidence_is_missing(mode: str, row: dict[str, Any]) -> None:
    whole = seen(row)
    limits = Limits(**row.get("limits", {}))
    rule = BY_MODE[mode]
    twin = "leg:main" if whole.configuration.requested == "fp32" else "leg:fp32"
    for need in {*rule.needs, *rule.more(whole, limits)} - {"configuration"}:
        diagnosis = diagnose(lacking(whole, [twin if need == "leg:fp32" else need]), limits)
        assert found(diagnosis, mode) is None, f"found without {need}, which the rule says it needs"
        assert diagnosis.findings or diagnosis.not_run, f"healthy without {need}"


@pytest.mark.parametrize(("mode", "row"), rows("quiet"))
def test_stays_quiet(mode: str, row: dict[str, Any]) -> None:
    diagnosis = answer(row)
    primary = diagnosis.primary
    assert (primary.mode if primary else None) == row["instead"]
    finding = found(diagnosis, mode)
    if row.get("consequence", False):
        assert finding is not None
        assert finding.consequence_of == row["instead"]
    else:
        assert finding is None, finding.because
        assert mode not in {check.mode for check in diagnosis.not_run}, "it is quiet for want of evidence only"


@pytest.mark.parametrize(("mode", "row"), rows("inconclusive"))
def test_says_what_it_lacks(mode: str, row: dict[str, Any]) -> None:
    diagnosis = answer(row)
    assert found(diagnosis, mode) is None
    why = {check.mode: check.why for check in diagnosis.not_run}
    assert mode in why, "the rule says nothing of what is missing"
    if "needless" in row:
        assert why[mode] == f"not needed: {row['needless']} was found first"
    else:
        assert why[mode] == f"no evidence: {', '.join(row['lacks'])}"


@pytest.mark.parametrize("row", RANKING, ids=lambda row: row["what"].replace(" ", "_"))
def test_the_cause_comes_first(row: dict[str, Any]) -> None:
    diagnosis = answer(row)
    cause, *rest = row["order"]
    assert [f.mode for f in diagnosis.findings] == row["order"]
    assert [f.consequence_of for f in diagnosis.findings] == [None, *[cause] * len(rest)]


def test_nothing_is_wrong_with_a_healthy_run() -> None:
    assert diagnose(evidence(HEALTHY), Limits()) == Diagnosis()


def test_nothing_gathered_is_not_healthy() -> None:
    nothing = evidence({"configuration": HEALTHY["configuration"]})
    diagnosis = diagnose(nothing, Limits())
    assert diagnosis.primary is None
    assert {check.mode for check in diagnosis.not_run} >= {"nonfinite_data", "forward_overflow", "autocast_dtype_error"}


def test_rules_are_asked_in_the_order_given() -> None:
    row = {"evidence": {"configuration": {"half_parameters": ["w"], "nonfinite_parameters": ["w"]}}}
    pair = [BY_MODE["half_precision_weights"], BY_MODE["nonfinite_parameters"]]
    for rules in (pair, pair[::-1]):
        diagnosis = diagnose(seen(row), Limits(), rules)
        assert [f.mode for f in diagnosis.findings] == [rule.mode for rule in rules]


def test_advice_is_no_cause() -> None:
    words = {
        "legs": {"main": {"metrics": {"dice": math.nan}}, "fp32": {"metrics": {"dice": 0.5}}},
        "comparison": {"excess": 0.5},
    }
    advice = BY_MODE["nonfinite_metric"]
    behind = diagnose(seen({"evidence": words}), Limits(), [advice, BY_MODE["plateau"]])
    assert [(f.mode, f.consequence_of) for f in behind.findings] == [("nonfinite_metric", None), ("plateau", None)]
    assert behind.primary is behind.findings[1]
    gap = diagnose(seen({"evidence": words, "without": ["comparison"]}), Limits(), [advice, BY_MODE["plateau"]])
    assert gap.primary is None
    assert [check.why for check in gap.not_run] == ["no evidence: comparison"]


# ---- the tables themselves ----


def test_every_rule_has_a_table() -> None:
    assert set(TABLES) == set(BY_MODE), (
        "A new rule needs tests/diagnosis/rules/<mode>.yaml: a row that fires, two look-alikes, one without evidence"
    )


@pytest.mark.parametrize("mode", TABLES)
def test_every_table_is_complete(mode: str) -> None:
    table = TABLES[mode]
    assert set(table) <= set(KEYS), f"a table has the parts {sorted(KEYS)}"
    for kind, part in table.items():
        for row in part:
            assert set(row) <= KEYS[kind], f"{row['what']}: a row of {kind} has the keys {sorted(KEYS[kind])}"
    assert len(table["fires"]) >= 1
    assert all(row["because"] for row in table["fires"])
    assert len(table["quiet"]) >= 2
    configuration_only = BY_MODE[mode].needs == ("configuration",)  # that is always known
    assert bool(table.get("inconclusive")) is not configuration_only


def test_look_alikes_are_told_apart_both_ways() -> None:
    shown = {(mode, row["instead"]) for mode, table in TABLES.items() for row in table["quiet"]}
    both = {pair for a, b in PAIRS for pair in ((a, b), (b, a))}
    both |= {("gradient_underflow", None), ("plateau", None)}  # slow learning is no fault
    assert both <= shown, f"no row shows {both - shown}"
