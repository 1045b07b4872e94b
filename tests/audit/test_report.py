from __future__ import annotations

import pytest
from rich.console import Console
from sample_runs import RUN, beginning, events, healthy, healthy_leg, killed, repaired, unrepaired

from autoprec.audit.events import EVENTS, Event, Failed, FitStarted, LegFinished, Note
from autoprec.audit.report import _STEPS, fold
from autoprec.audit.terminal import render
from autoprec.errors import InputError


def shown(run: list[Event], width: int = 80) -> str:
    console = Console(width=width, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(render(fold(run)))
    return capture.get()


def sections(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith(" ")][2:]


def test_every_event_has_a_place_in_the_report() -> None:
    assert set(_STEPS) == set(EVENTS), "give a new event its fold in `report._STEPS`"


def test_folding_a_repaired_run() -> None:
    report = fold(repaired())
    assert report.complete
    assert report.run_id == RUN
    assert [leg.name for leg in report.legs] == ["main", "fp32", "bf16"]
    assert {i: len(legs) for i, legs in report.trials.items()} == {0: 1, 1: 1}
    assert [a.remedy for a in report.attempts] == ["init_scale", "bf16"]
    assert report.trying is None
    assert [c.what for c in report.changes] == ["precision"]
    assert report.fitted is not None
    assert report.fitted.steps == 400
    assert report.missing == report.unknown == 0


def test_folding_every_beginning_of_a_run() -> None:
    run = repaired()
    for n in range(len(run) + 1):
        report = fold(run[:n])
        assert report.complete == (n == len(run))
        shown(run[:n])


def test_runs_are_not_mixed() -> None:
    other = events(("note", Note(text="x")), run_id="other")
    with pytest.raises(InputError, match=f"events of the runs {RUN} and other"):
        fold([*healthy(), *other])


def test_gaps_and_unknown_events_are_counted() -> None:
    run = healthy()
    run[3] = run[3].model_copy(update={"event": "verse"})
    report = fold(run[:1] + run[3:])
    assert (report.missing, report.unknown) == (2, 1)
    text = shown(run[:1] + run[3:])
    assert "2 events could not be written" in text
    assert "1 event of a kind that this version does not know" in text


@pytest.mark.parametrize(
    ("run", "titles", "fragments"),
    [
        (
            healthy(),
            ["How we know", "What was changed", "Result", "Where"],
            ["healthy in fp16", "Nothing was found.", "2^16 -> 2^16", "accuracy 0.9312", "2 probes, 80 steps"],
        ),
        (
            repaired(),
            ["How we know", "What was tried", "What was changed", "Result", "What did not run", "Notes", "Where"],
            [
                "repaired in bf16: forward_overflow in encoder.attention is gone",
                "model.py:41 in forward (module encoder.attention)",
                "scores = q @ k.transpose(-2, -1)",
                "a consequence of forward_overflow  (80 % sure)",
                "main             fp16  24/40    16  2.31     NaN",
                "with bf16        bf16     40",
                "taken back: the loss is not finite at step 3",
                "accepted: 40 steps taken",
                "precision: fp16 -> bf16  (bf16 holds",
                "400 steps, none skipped, 3 min 21 s",
                "gradient_underflow, precision_loss: the gradients",
            ],
        ),
        (
            unrepaired(),
            ["How we know", "What was tried", "What was changed", "Result", "Where"],
            [
                "unrepaired: NaN in the data",
                "[column 3]",
                "Nothing. The learner is as it was.",
                "none was made",
                "next",
            ],
        ),
        (
            killed(),
            ["How we know", "What was tried", "What did not run", "Where"],
            ["unfinished: the file ends while init_scale was being tried.", "being tried when the file ended"],
        ),
    ],
    ids=["healthy", "repaired", "unrepaired", "killed"],
)
def test_what_the_report_says(run: list[Event], titles: list[str], fragments: list[str]) -> None:
    text = shown(run)
    assert [t for t in sections(text) if t in titles] == titles
    for fragment in fragments:
        assert fragment in text


@pytest.mark.parametrize("run", [healthy(), repaired(), unrepaired(), killed()])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(run: list[Event], width: int) -> None:
    assert max(map(len, shown(run, width).splitlines())) <= width


def test_a_kill_during_the_fit() -> None:
    text = shown(events(*beginning(), ("fit_started", FitStarted(precision="fp16", steps=400, schedule="one_cycle"))))
    assert "the file ends during the fit" in text
    assert "did not come to its end" in text
    assert "The run did not come to a diagnosis." in text


def test_a_run_that_raised() -> None:
    report = events(*beginning(), ("failed", Failed(error="KeyboardInterrupt", message="")))
    assert shown(report).startswith("failed: KeyboardInterrupt")


def test_an_empty_file() -> None:
    assert "No events" in shown([])


def test_long_names_leave_the_numbers_alone() -> None:
    run = events(
        *beginning(), ("leg_finished", LegFinished.of("fp32 perturbed with a long name", healthy_leg("fp16", 0.5)))
    )
    row = next(line for line in shown(run).splitlines() if "fp16     40" in line)
    assert row.rstrip().endswith("2^16 -> 2^16")
