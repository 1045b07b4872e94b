from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest
from loguru import logger
from sample_runs import BF16, INIT_SCALE, OVERFLOW, SIDE, beginning, events, failing_leg, healthy_leg

from autoprec.audit.events import EVENTS, AttemptStarted, Failed, FitFinished, FitStarted, LegFinished, Note
from autoprec.diagnosis.finding import Diagnosis, NotRun
from autoprec.evidence import (
    Comparison,
    Configuration,
    DataSample,
    Drift,
    Failure,
    Feature,
    Fidelity,
    Headroom,
    Hidden,
    Leg,
    LegSpec,
    ModuleHeadroom,
    ParameterFidelity,
    Place,
    ScaleSearch,
)
from autoprec.logs import _LINES, disable_logging, enable_logging, line, say
from autoprec.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autoprec.noun import Noun

BAD = Feature(name="input 0, column 3", min=0, max=1, mean=0, std=1, nonfinite=2)
GRADIENTS = Fidelity(
    scale=1024.0,
    parameters=(
        ParameterFidelity(name="a", flushed=0.0, cosine=1.0, relative_error=0.0),
        ParameterFidelity(name="head.weight", flushed=0.123, cosine=0.9, relative_error=0.1),
    ),
    loss_16=1.5,
    loss_32=1.25,
)
RAISED = Leg(
    spec=LegSpec(precision="fp32", lr_factor=0.1),
    planned_steps=40,
    failure=Failure(step=0, where="exception", error="ValueError: no"),
)

LINES: list[tuple[str, Noun, str | None]] = [
    (*next(beginning()), "run: one_cycle, 5 epochs, 400 steps, lr 0.01, policy default"),
    (
        "configuration",
        Configuration(device="cpu", requested="fp16", unavailable_reason="nothing there"),
        "on cpu: fp16, preferred by the policy; nothing there",
    ),
    (
        "configuration",
        Configuration(device="cpu", requested="bf16", emulated=True, asked_by_user=True),
        "on cpu (16 bits emulated): bf16, asked for by the learner",
    ),
    ("data", DataSample(batches=4), None),
    ("data", DataSample(batches=1, features=(BAD,)), "data: not finite in input 0, column 3 (1 batch seen)"),
    (
        "leg_finished",
        LegFinished.of("main", failing_leg()),
        "probe main (fp16): 24 of 40 steps, 16 skipped, loss 2.31 -> NaN at step 23 (loss)",
    ),
    (
        "leg_finished",
        LegFinished.of("fp32", healthy_leg("fp32", 0.31)),
        "probe fp32 (fp32): 40 steps, loss 2.31 -> 0.5408",
    ),
    (
        "leg_finished",
        LegFinished.of("fp32 lr/10", RAISED),
        "probe fp32 lr/10 (fp32, lr x 0.1): 0 of 40 steps at step 0 (ValueError: no)",
    ),
    (
        "scale_search",
        ScaleSearch(largest_finite=256.0, smallest_tried=1.0, batches=4),
        "loss scale: gradients are finite up to 2^8 (4 batches)",
    ),
    (
        "scale_search",
        ScaleSearch(largest_finite=None, smallest_tried=1.0, batches=1),
        "loss scale: gradients are not finite at any scale down to 2^0 (1 batch)",
    ),
    (
        "fidelity",
        GRADIENTS,
        "gradients: loss 1.5 beside 1.25 in fp32; 12.3 % of head.weight flushed to zero at scale 2^10",
    ),
    (
        "headroom",
        Headroom(scale=1.0, modules=(ModuleHeadroom(name="body.0", forward=-1.5, backward=3.0),)),
        "headroom: body.0 is -1.5 doublings below float16's largest number",
    ),
    ("hidden", Hidden(batches=2), None),
    (
        "drift",
        Drift(op="aten.mm", place=Place(file="a.py", line=3), error=0.5, largest=0.5, ops_compared=4),
        "drift: aten.mm misses 50 % of its variation at a.py:3",
    ),
    ("comparison", Comparison(excess=0.25, spread=0.01), "beside the fp32 twin: training loss +25.0%, noise 1 %"),
    ("diagnosed", Diagnosis(), "found nothing wrong"),
    ("diagnosed", Diagnosis(not_run=(NotRun(mode="a", why="b"),)), "found nothing wrong (1 check could not run)"),
    (
        "diagnosed",
        Diagnosis(findings=(OVERFLOW, SIDE)),
        f"found forward_overflow: {OVERFLOW.because} (also gradient_overflow)",
    ),
    (
        "attempt_started",
        AttemptStarted(mode="gradient_overflow", remedy="init_scale", parameters={"scale": 256.0}),
        "try init_scale (scale=256) against gradient_overflow",
    ),
    ("attempt_finished", INIT_SCALE, "init_scale taken back: the loss is not finite at step 3"),
    ("attempt_finished", BF16, f"bf16 accepted: {BF16.reason}"),
    (
        "attempt_finished",
        BF16.model_copy(update={"applicable": False, "kept": False, "reason": "not native here"}),
        "bf16 does not apply: not native here",
    ),
    (
        "fit_started",
        FitStarted(precision="fp16", islands=("head",), steps=1200, schedule="fit"),
        "fit in fp16 with 1 island in fp32: fit, 1,200 steps",
    ),
    (
        "fit_finished",
        FitFinished.of(failing_leg().steps, seconds=61.0, healthy=False, reason="a loss is NaN"),
        "fit not healthy after 24 steps, 16 skipped, 1 min 1 s: a loss is NaN",
    ),
    ("note", Note(text="two\n  lines {and} [braces]"), "two lines {and} [braces]"),
    ("failed", Failed(error="ValueError", message="no"), "failed: ValueError: no"),
    ("run_finished", Outcome(result="repaired", precision="bf16", detail="all well"), "repaired in bf16: all well"),
]


@pytest.fixture
def quiet_again() -> Iterator[None]:
    yield
    disable_logging()


@pytest.mark.parametrize(("name", "body", "expected"), LINES, ids=[f"{i} {name}" for i, (name, *_) in enumerate(LINES)])
def test_the_line_of_an_event(name: str, body: Noun, expected: str | None) -> None:
    assert line(events((name, body))[0]) == expected


def test_every_event_has_a_line() -> None:
    assert set(_LINES) == set(EVENTS), "give a new event its line in `logs._LINES`"
    assert {name for name, *_ in LINES} == set(EVENTS), "and a row in this table"


def test_an_unknown_event_has_none() -> None:
    event = events(("note", Note(text="x")))[0].model_copy(update={"event": "verse"})
    assert line(event) is None


def test_quiet_until_asked(quiet_again: None) -> None:
    event = events(("note", Note(text="x {y}")))[0]
    everything = io.StringIO()
    mine = logger.add(everything, format="{message}")
    try:
        say(event)
        assert everything.getvalue() == ""
        sink = io.StringIO()
        enable_logging(sink=sink)
        say(event)
        assert sink.getvalue() == "x {y}\n"
        disable_logging()
        say(event)
        assert sink.getvalue() == "x {y}\n"
    finally:
        logger.remove(mine)


def test_asking_twice_does_not_double_the_lines(quiet_again: None) -> None:
    sink = io.StringIO()
    enable_logging(sink=sink)
    enable_logging(sink=sink)
    say(events(("note", Note(text="once")))[0])
    assert sink.getvalue() == "once\n"


def test_the_level_chooses(quiet_again: None) -> None:
    configuration = events(("configuration", Configuration(device="cpu", requested="fp16")))[0]
    failed = events(("failed", Failed(error="ValueError", message="no")))[0]
    for level, expected in (("INFO", 1), ("DEBUG", 2), ("WARNING", 1), ("ERROR", 0)):
        sink = io.StringIO()
        enable_logging(level, sink)
        say(configuration)
        say(failed)
        assert len(sink.getvalue().splitlines()) == expected, level


def test_other_peoples_messages_are_not_ours(quiet_again: None) -> None:
    sink = io.StringIO()
    enable_logging(sink=sink)
    logger.info("from a test")
    assert sink.getvalue() == ""
