"""Runs made by hand, event by event, as a runner would write them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from autoprec.audit.events import (
    AttemptStarted,
    Event,
    FitFinished,
    FitStarted,
    LegFinished,
    Note,
    Plan,
    RunStarted,
    plain,
)
from autoprec.diagnosis.finding import Diagnosis, Finding, NotRun
from autoprec.evidence import (
    Configuration,
    Failure,
    Fp32Value,
    Leg,
    LegSpec,
    Operation,
    Origin,
    Place,
    ScaleSearch,
    Step,
)
from autoprec.outcome import Attempt, Change, Outcome, Price, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autoprec.noun import Noun

RUN = "20260314T150926535Z-0a1b2c"
PLACE = Place(
    module="encoder.attention",
    module_class="Attention",
    file="model.py",
    line=41,
    source="scores = q @ k.transpose(-2, -1)",
    function="forward",
)
OVERFLOW = Finding(
    mode="forward_overflow",
    because="aten.bmm makes 131769 from inputs up to 363, and float16 ends at 65504; fp32 trains on these batches.",
    where=PLACE,
    op="aten.bmm",
    ruled_out=(
        "The data: every sampled input is finite and below 3.1.",
        "The learning rate: fp32 takes the same 40 steps and its loss falls from 2.31 to 0.534.",
    ),
    evidence={"input max": 363.0, "fp32 output max": 131769.0, "float16 max": 65504},
)
SIDE = Finding(
    mode="gradient_overflow",
    because="16 of the first 24 steps were skipped and the loss scale fell from 2^16 to 2^0.",
    confidence=0.8,
    consequence_of="forward_overflow",
)
NOT_RUN = (
    NotRun(mode="gradient_underflow", why="the gradients of the first batch are not finite in fp16"),
    NotRun(mode="precision_loss", why="the gradients of the first batch are not finite in fp16"),
    NotRun(mode="poisoned_buffers", why="the learner has no validation set"),
)


def steps(n: int, first: float, last: float, scale: float | None = None) -> tuple[Step, ...]:
    return tuple(
        Step(
            step=i,
            loss=first + (last - first) * i / max(1, n - 1),
            lr=0.01,
            grad_norm=1.0,
            scale_before=scale,
            scale_after=scale,
        )
        for i in range(n)
    )


def healthy_leg(precision: str, last: float, n: int = 40) -> Leg:
    return Leg(
        spec=LegSpec(precision=precision),  # type: ignore[arg-type]
        steps=steps(n, 2.31, last, 65536.0 if precision == "fp16" else None),
        planned_steps=n,
        validation=(last * 1.1, last * 1.2),
    )


def failing_leg() -> Leg:
    skipped = tuple(
        Step(step=i, loss=2.31, lr=0.01, scale_before=2.0 ** (16 - i), scale_after=2.0 ** (15 - i), skipped=True)
        for i in range(16)
    )
    rest = tuple(
        Step(step=i, loss=math.nan if i == 23 else 2.2, lr=0.01, scale_before=1.0, scale_after=1.0)
        for i in range(16, 24)
    )
    return Leg(
        spec=LegSpec(precision="fp16"),
        steps=skipped + rest,
        planned_steps=40,
        failure=Failure(step=23, where="loss"),
        origin=Origin(
            phase="forward",
            place=PLACE,
            operation=Operation(op="aten.bmm", input_max=363.0, output_max=math.inf),
            fp32=Fp32Value(input_max=363.0, output_max=131769.0),
        ),
    )


def events(*written: tuple[str, Noun], run_id: str = RUN) -> list[Event]:
    return [
        Event(
            run_id=run_id,
            sequence=i,
            time=f"2026-03-14T15:09:{i:02d}.535897Z",
            event=name,
            payload=plain(body.model_dump()),
        )
        for i, (name, body) in enumerate(written)
    ]


def beginning() -> Iterator[tuple[str, Noun]]:
    environment = {
        "autoprec": "0.1.0",
        "torch": "2.14.1",
        "fastai": "2.8.12",
        "python": "3.11.7",
        "platform": "Linux-6.1-x86_64",
        "device": "NVIDIA A100",
    }
    plan = Plan(schedule="one_cycle", epochs=5, lr=0.01, steps=400)
    yield "run_started", RunStarted(environment=environment, policy="default", plan=plan)
    yield "configuration", Configuration(device="cuda", requested="fp16", asked_by_user=True)


def healthy() -> list[Event]:
    fit = steps(400, 2.31, 0.21, 65536.0)
    final = {"train_loss": 0.2104, "valid_loss": 0.2533, "accuracy": 0.9312}
    return events(
        *beginning(),
        ("leg_finished", LegFinished.of("main", healthy_leg("fp16", 0.531))),
        ("leg_finished", LegFinished.of("fp32", healthy_leg("fp32", 0.534))),
        ("diagnosed", Diagnosis()),
        ("fit_started", FitStarted(precision="fp16", steps=400, schedule="one_cycle")),
        (
            "fit_finished",
            FitFinished.of(fit, seconds=41.7, healthy=True, reason="every loss is finite", final=final),
        ),
        (
            "run_finished",
            Outcome(result="healthy", precision="fp16", price=Price(legs=2, steps=80, seconds=7.9), run_id=RUN),
        ),
    )


def _broken() -> Iterator[tuple[str, Noun]]:
    yield from beginning()
    yield "leg_finished", LegFinished.of("main", failing_leg())
    yield "leg_finished", LegFinished.of("fp32", healthy_leg("fp32", 0.534))
    yield "leg_finished", LegFinished.of("bf16", healthy_leg("bf16", 0.541))
    yield "scale_search", ScaleSearch(largest_finite=None, smallest_tried=1.0, batches=4)
    yield "diagnosed", Diagnosis(findings=(OVERFLOW, SIDE), not_run=NOT_RUN)


INIT_SCALE = Attempt(
    remedy="init_scale",
    mode="forward_overflow",
    applicable=True,
    reason="the loss is not finite at step 3",
    change=Change(remedy="init_scale", what="loss scale", before=65536.0, after=256.0),
    verdict=Verdict(healthy=False, reason="the loss is not finite at step 3"),
)
CHANGE = Change(remedy="bf16", what="precision", before="fp16", after="bf16", why="bf16 holds values up to 3.4e38")
BF16 = Attempt(
    remedy="bf16",
    mode="forward_overflow",
    applicable=True,
    reason="40 steps taken, none skipped, loss +1.3 % beside the fp32 twin's",
    change=CHANGE,
    verdict=Verdict(healthy=True, reason="40 steps taken", excess=0.013),
    kept=True,
)


def killed() -> list[Event]:
    return events(
        *_broken(),
        ("attempt_started", AttemptStarted(mode="forward_overflow", remedy="init_scale", parameters={"scale": 256.0})),
    )


def repaired() -> list[Event]:
    fit = steps(400, 2.31, 0.22)
    final = {"train_loss": 0.2204, "valid_loss": 0.2601, "accuracy": 0.9287}
    return events(
        *_broken(),
        ("attempt_started", AttemptStarted(mode="forward_overflow", remedy="init_scale", parameters={"scale": 256.0})),
        ("leg_finished", LegFinished.of("main", failing_leg())),
        ("attempt_finished", INIT_SCALE),
        ("attempt_started", AttemptStarted(mode="forward_overflow", remedy="bf16")),
        ("leg_finished", LegFinished.of("main", healthy_leg("bf16", 0.541))),
        ("attempt_finished", BF16),
        ("note", Note(text="without bf16 the fault returns: the loss is not finite at step 23")),
        ("fit_started", FitStarted(precision="bf16", steps=400, schedule="one_cycle")),
        (
            "fit_finished",
            FitFinished.of(
                fit, seconds=201.2, healthy=True, reason="every loss and weight is finite, 400 steps taken", final=final
            ),
        ),
        (
            "run_finished",
            Outcome(
                result="repaired",
                precision="bf16",
                diagnosis=Diagnosis(findings=(OVERFLOW, SIDE), not_run=NOT_RUN),
                attempts=(INIT_SCALE, BF16),
                changes=(CHANGE,),
                price=Price(legs=5, steps=168, seconds=21.3, fit_seconds=201.2),
                checks_not_run=NOT_RUN,
                audit_path="/home/someone/projects/retina/models/autoprec/20260314T150926535Z-0a1b2c.jsonl",
                run_id=RUN,
                detail="forward_overflow in encoder.attention is gone in bf16",
            ),
        ),
    )


def unrepaired() -> list[Event]:
    finding = Finding(
        mode="nonfinite_data",
        because="3 of 640 sampled rows hold NaN, all in input 0, column 3 (age).",
        evidence={"rows": 3, "sampled": 640},
        suggestion="Fill the rows: df['age'] = df['age'].fillna(df['age'].median()), or add fastai's FillMissing.",
        repairable=False,
    )
    nan = Leg(
        spec=LegSpec(precision="fp16"),
        steps=(Step(step=0, loss=math.nan, lr=0.01, scale_before=65536.0, scale_after=65536.0),),
        planned_steps=40,
        failure=Failure(step=0, where="input", names=("input 0",)),
    )
    fp32 = nan.model_copy(update={"spec": LegSpec(precision="fp32"), "steps": (Step(step=0, loss=math.nan, lr=0.01),)})
    attempt = Attempt(
        remedy="normalize_inputs",
        mode="nonfinite_data",
        applicable=False,
        reason="the inputs' mean is NaN [column 3], so there is nothing to normalize by",
    )
    return events(
        *beginning(),
        ("leg_finished", LegFinished.of("main", nan)),
        ("leg_finished", LegFinished.of("fp32", fp32)),
        ("diagnosed", Diagnosis(findings=(finding,))),
        ("attempt_started", AttemptStarted(mode="nonfinite_data", remedy="normalize_inputs")),
        ("attempt_finished", attempt),
        (
            "run_finished",
            Outcome(
                result="unrepaired",
                diagnosis=Diagnosis(findings=(finding,)),
                attempts=(attempt,),
                price=Price(legs=2, steps=2, seconds=0.4),
                run_id=RUN,
                detail="NaN in the data passes through every precision",
                next_step="Clean the three rows and run again.",
            ),
        ),
    )
