"""Every kind of fault at drawn places: it bites without this package; with it cause, line and end are right.

What is drawn, and how a kind is made, is `benchmarks/faults.py`, whose table shows more draws.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FILE = Path(__file__).parents[2] / "benchmarks" / "faults.py"

pytestmark = pytest.mark.filterwarnings("ignore")  # fastai and torch on a CPU, many and not ours


def loaded() -> ModuleType:
    if "faults_benchmark" not in sys.modules:
        spec = importlib.util.spec_from_file_location("faults_benchmark", FILE)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return sys.modules["faults_benchmark"]


faults = loaded()

FAST = {  # kind: a draw that bites
    "module_overflow": 0,
    "epsilon_underflow": 1,
    "loss_overflow": 0,
    "static_scale": 0,
    "nan_rows": 1,
    "mask_fill": 0,
}


def biting(kind: str, numbers: range) -> dict[str, Any]:
    """The first of these draws whose fault bites, with what was made of it."""
    for number in numbers:
        row = faults.one((kind, number))
        if row["not_biting"] is None:
            return row
    pytest.fail(f"none of the draws {numbers} of {kind} bites")


def assert_right(row: dict[str, Any]) -> None:
    assert row["not_biting"] is None, row
    assert row["mode_ok"], row
    assert row["place_ok"] is not False, row
    assert row["end_ok"], row


def test_a_draw_is_always_the_same() -> None:
    assert faults.drawn("hand_norm", 3) == faults.drawn("hand_norm", 3)
    assert faults.drawn("hand_norm", 3) != faults.drawn("hand_norm", 4)


def test_every_line_is_marked_once_or_once_per_way() -> None:
    text = FILE.read_text()
    for name, kind in faults.KINDS.items():
        assert kind.line == (f"# fault: {name}\n" in text), name


@pytest.mark.parametrize(("kind", "number"), FAST.items())
def test_one_of_each_group(kind: str, number: int) -> None:
    assert_right(faults.one((kind, number)))


@pytest.mark.long
@pytest.mark.parametrize("kind", list(faults.KINDS))
@settings(max_examples=4, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(start=st.integers(10, 10_000))
def test_drawn_elsewhere(kind: str, start: int) -> None:
    assert_right(biting(kind, range(start, start + 8)))
