"""The ledger: which skipped steps are a scaler at work, and which are a fault.

A row is a string of steps, S for skipped and a dot for taken. Scales come from the plain rule of GradScaler.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from made_evidence import line, scaled, spelled, steps

from autoprec.ledger import Skips
from autoprec.policy import Limits

LIMITS = Limits()


def counts(ledger: str, **kwargs) -> tuple[int, int, int, int, int]:
    s = Skips.of(steps(ledger, **kwargs))
    return s.attempted, s.skipped, s.leading, s.late, s.late_attempted


@pytest.mark.parametrize(
    ("ledger", "expected"),
    [
        ("", (0, 0, 0, 0, 0)),
        (".", (1, 0, 0, 0, 1)),
        ("S", (1, 1, 1, 0, 0)),
        ("SSSS....", (8, 4, 4, 0, 4)),
        ("SSSS....S...", (12, 5, 4, 1, 6)),
        ("....SSSS", (8, 4, 0, 4, 4)),
        ("SSSSSS..", (8, 6, 6, 0, 2)),  # the second half begins where the leading skips end
        ("SSSSS.SS", (8, 7, 5, 2, 3)),
        ("S.S.S.S.", (8, 4, 1, 2, 4)),
        ("...S...", (7, 1, 0, 1, 4)),  # of an odd number of steps the middle one is in the second half
        ("SSSS", (4, 4, 4, 0, 0)),
    ],
)
def test_counts(ledger: str, expected: tuple[int, ...]) -> None:
    assert counts(ledger) == expected


def test_late_rate_and_words() -> None:
    assert Skips.of(steps("....S.S.")).late_rate == 0.5
    assert Skips.of(steps("....S.S.")).late_words() == " (2 of the last 4)"
    assert Skips.of(steps("SSSS")).late_rate == 0.0
    assert Skips.of(steps("SSSS")).late_words() == ""
    assert Skips.of(()).late_rate == 0.0


def test_scales() -> None:
    skips = Skips.of(steps("SSS.....", scale=1024.0, interval=4))
    assert (skips.first_scale, skips.last_scale) == (1024.0, 256.0)
    assert Skips.of(steps("..", scale=None)).first_scale is None
    assert Skips.of(()).last_scale is None


def test_share_of_a_planned_fit() -> None:
    skips = Skips.of(steps("SSSS...."))
    assert skips.share_of(8) == 0.5
    assert skips.share_of(80) == 0.05
    assert skips.share_of(0) == 0.5  # a fit of unknown length: what was attempted
    assert Skips.of(()).share_of(0) == 0.0


class Run(NamedTuple):
    """A run under a scaler: its gradients overflow above the scale `works`."""

    what: str
    works: float
    n: int
    chronic: bool
    init: float = 2.0**16
    interval: int = 2000
    ledger: str | None = None


RUNS = [
    Run("nothing overflows", 2.0**30, 40, chronic=False, ledger=".*40"),
    Run("2**16 finds 2**10", 2.0**10, 40, chronic=False, ledger="S*6 .*34"),
    Run("2**16 finds 1", 1.0, 40, chronic=False, ledger="S*16 .*24"),
    Run("2**16 finds 1 and the leg ends there", 1.0, 17, chronic=False, ledger="S*16 ."),
    Run(
        "growth every 30 steps", 2.0**12, 100, chronic=False, init=2.0**21, interval=30, ledger="S*9 .*30 S .*30 S .*29"
    ),
    Run("growth every 5 steps", 2.0**12, 60, chronic=False, interval=5),
    Run("growth every 3 steps costs every fourth step", 2.0**12, 60, chronic=True, interval=3),
    Run("2**24 finds 1, with more to halve", 1.0, 40, chronic=False, init=2.0**24, ledger="S*24 .*16"),
    Run("no scale works", 0.0, 40, chronic=True, ledger="S*40"),
    Run("no scale works, and the leg is short", 0.0, 17, chronic=True, ledger="S*17"),
    Run("2**16 finds 1/2, too small to scale anything", 0.5, 40, chronic=True, ledger="S*17 .*23"),
    Run("from 8 down below 1", 0.25, 40, chronic=True, init=8.0, ledger="S*5 .*35"),
    Run("starts below the floor, by the user's wish", 2.0**30, 40, chronic=False, init=0.5, ledger=".*40"),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.what.replace(" ", "_"))
def test_runs_under_a_scaler(run: Run) -> None:
    rows = scaled(lambda _, scale: scale > run.works, run.n, init=run.init, interval=run.interval)
    ledger = "".join("S" if skipped else "." for *_, skipped in rows)
    if run.ledger is not None:
        assert ledger == spelled(run.ledger)
    made = steps(ledger, scale=run.init, interval=run.interval)
    assert [(s.scale_before, s.scale_after) for s in made] == [row[:2] for row in rows]
    assert Skips.of(made).chronic(LIMITS) is run.chronic


@pytest.mark.parametrize(
    ("ledger", "chronic"),
    [
        (".*20 S .*19", False),  # one late skip
        (".*20 S .*8 S .*10", False),  # two of twenty: 10 %
        (".*20 SSSS .*16", False),  # four of twenty: the 20 % allowed
        (".*20 SSSSS .*10 SSSSS", True),  # ten of twenty
        (".*20 SSSSS .*15", False),  # one late descent, and it has ended
        ("SSSSS .*35", False),  # the same number, early
        (".... S...", False),  # 25 % of a short leg, but one skip only
        (".... S.S.", True),  # 50 %
    ],
)
def test_late_skips(ledger: str, chronic: bool) -> None:
    skips = Skips.of(steps(ledger))
    assert not skips.collapsed(LIMITS)
    assert not skips.settling_overrun(LIMITS)
    assert skips.chronic(LIMITS) is chronic


def test_each_limit_counts() -> None:
    collapsed = Skips.of(steps("S*4 .*36", scale=8.0))
    assert collapsed.last_scale == 0.5
    assert collapsed.collapsed(LIMITS)
    assert not collapsed.collapsed(Limits(scale_floor=0.5))
    overrun = Skips.of(steps("S*17 .*23", scale=2.0**17))
    assert not overrun.settling_overrun(LIMITS)  # one more halving than from 2**16
    assert overrun.settling_overrun(Limits(settling_skips=15))
    late = Skips.of(steps(".*20 SSSS .*15 S"))
    assert late.chronic(LIMITS)
    assert not late.chronic(Limits(skip_rate=0.25))


def test_without_a_scaler_nothing_collapses() -> None:
    skips = Skips.of(steps("S*4 .*4", scale=None))
    assert not skips.collapsed(LIMITS)
    assert not skips.settling_overrun(LIMITS)


# ---- the reference itself ----


def test_the_reference_scaler() -> None:
    rows = scaled(lambda i, _: i in (0, 4), 9, init=8.0, interval=3)
    assert [after for _, after, _ in rows] == [4.0, 4.0, 4.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0]
    assert [skipped for *_, skipped in rows] == [True, *[False] * 3, True, *[False] * 4]


def test_spelling() -> None:
    assert spelled("S*3 . S .*2") == "SSS.S.."
    assert line((4.0, 1.0), 4) == [4.0, 3.0, 2.0, 1.0]
    assert line(5.0, 2) == [5.0, 5.0]
    with pytest.raises(AssertionError, match="written with S and dots"):
        spelled("XX")
    with pytest.raises(AssertionError, match="3 losses for 4 steps"):
        line((1.0, 2.0, 3.0), 4)
