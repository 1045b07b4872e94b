from __future__ import annotations

import json
import math

import numpy as np
import pytest
from pydantic import ValidationError

from autoprec.audit.events import EVENTS, SCHEMA_VERSION, Event, LegFinished, Note, Totals, plain, thin
from autoprec.evidence import Leg, LegSpec, Step

FROZEN = {
    "run_started": "RunStarted",
    "configuration": "Configuration",
    "data": "DataSample",
    "leg_finished": "LegFinished",
    "scale_search": "ScaleSearch",
    "fidelity": "Fidelity",
    "headroom": "Headroom",
    "hidden": "Hidden",
    "drift": "Drift",
    "comparison": "Comparison",
    "diagnosed": "Diagnosis",
    "attempt_started": "AttemptStarted",
    "attempt_finished": "Attempt",
    "fit_started": "FitStarted",
    "fit_finished": "FitFinished",
    "note": "Note",
    "failed": "Failed",
    "run_finished": "Outcome",
}


def test_the_event_names_are_frozen() -> None:
    assert {name: model.__name__ for name, model in EVENTS.items()} == FROZEN, (
        "The events are what old audit files are read by. If you add a name: add it here, to `logs._LINES`, to "
        "`report._STEPS` and to the sample runs. If you rename one, drop one or change a payload so that an old line "
        "no longer fits: raise SCHEMA_VERSION and teach `read_audit` to read the version before."
    )
    assert SCHEMA_VERSION == 1


def test_the_registry_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        EVENTS["more"] = Note  # type: ignore[index]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, "NaN"),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
        (1.5, 1.5),
        (True, True),
        (None, None),
        ((1, [2.0, math.nan]), [1, [2.0, "NaN"]]),
        ({1: math.inf}, {"1": "Infinity"}),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (slice(1, 2), "slice(1, 2, None)"),
    ],
)
def test_plain_makes_strict_json(value: object, expected: object) -> None:
    assert plain(value) == expected
    json.dumps(plain(value), allow_nan=False)


@pytest.mark.parametrize(("n", "rows"), [(0, 5), (5, 5), (6, 5), (1_000, 7), (999, 1), (12, 11)])
def test_a_thinned_ledger_is_bounded_and_keeps_both_ends(n: int, rows: int) -> None:
    steps = [Step(step=i, loss=0.0, lr=0.1) for i in range(n)]
    kept = [s.step for s in thin(steps, rows)]
    assert len(kept) <= max(rows, 1)
    assert kept == sorted(set(kept))
    if n:
        assert kept[-1] == n - 1
        assert kept[0] == 0 or rows == 1


def test_totals_are_of_the_whole_ledger() -> None:
    steps = tuple(
        Step(step=i, loss=math.nan if i == 61 else 100.0 - i, lr=0.1, scale_before=4.0, scale_after=2.0, skipped=i < 3)
        for i in range(100)
    )
    leg = Leg(spec=LegSpec(precision="fp16"), steps=steps)
    event = LegFinished.of("main", leg, rows=10)
    assert len(event.leg.steps) <= 10
    assert event.totals == Totals(
        attempted=100,
        skipped=3,
        first_loss=100.0,
        final_loss=leg.final_loss,
        first_nonfinite=61,
        first_scale=4.0,
        last_scale=2.0,
    )
    assert Totals.of(()) == Totals()


@pytest.mark.parametrize("time", ["2026-03-14", "2026-03-14T15:09:26Z", "2026-03-14T15:09:26.535897+00:00"])
def test_a_time_is_utc_with_microseconds(time: str) -> None:
    with pytest.raises(ValidationError):
        Event(run_id="r", sequence=0, time=time, event="note", payload={})
