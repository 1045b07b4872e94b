"""The judge: closed forms, then a table of legs with the verdict and its reason."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
from made_evidence import leg

from autoprec.evidence import Comparison, Configuration, Evidence, Failure, Leg, LegSpec
from autoprec.policy import Limits
from autoprec.verify import close_call, compare, describe_failure, diverged, excess, judge, trains, worse

LIMITS = Limits()
NAN, INF = math.nan, math.inf


# ---- excess ----


@pytest.mark.parametrize(
    ("loss", "twin", "start", "expected"),
    [
        (1.1, 1.0, 2.0, 0.1),  # relative to the twin's loss
        (0.9, 1.0, 2.0, -0.1),
        (0.30, 0.20, 2.20, 0.05),  # relative to how far the twin has come
        (1e-6, 1e-9, 2.0, (1e-6 - 1e-9) / (2.0 - 1e-9)),  # a loss near zero is not a hundred times worse
        (-0.9, -1.0, 1.0, 0.05),  # a negative loss
        (-1.1, -1.0, 1.0, -0.05),
        (-1.0, -1.0, -1.0, 0.0),
        (0.5, 0.0, 1.0, 0.5),
        (0.0, 0.0, 0.0, 0.0),
        (0.1, 0.0, 0.0, INF),
        (-0.1, 0.0, 0.0, -INF),
        (INF, 1.0, 2.0, INF),
        (NAN, 1.0, 2.0, NAN),
        (1.0, NAN, 2.0, NAN),
        (1.0, 0.5, NAN, NAN),
        (NAN, 0.0, 0.0, NAN),
        (-NAN, 0.0, 0.0, NAN),  # inf - inf has its sign bit set on x86
    ],
)
def test_excess(loss: float, twin: float, start: float, expected: float) -> None:
    assert excess(loss, twin, start) == pytest.approx(expected, nan_ok=True)


# ---- compare ----


def with_validation(*losses: float, **rest: Any) -> Leg:
    return leg(validation=losses, **rest)


def test_compare() -> None:
    # Final losses (mean of the last quarter, here of 2 steps) 1.1 beside 1.0, from 2.0: 10 %.
    main = with_validation(1.5, 1.7, ledger=".*8", loss=[2.0, 1.1, 1.1, 1.1, 1.1, 1.1, 1.0, 1.2])
    twin = with_validation(1.6, 1.4, ledger=".*8", loss=[2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.1, 0.9])
    near = with_validation(1.53, ledger=".*8", loss=[2.0, *[0.97] * 7])
    far = leg(ledger=".*8", loss=[2.0, *[1.02] * 7])
    result = compare(main, twin, [near, far], same_steps=False)
    assert result.excess == pytest.approx(0.1)
    assert result.excess_validation == pytest.approx(0.1 / 1.5)
    assert result.spread == pytest.approx(0.03)  # a smaller loss is as much noise as a larger one
    assert result.spread_validation == pytest.approx(0.02)
    assert result.same_steps is False


def test_the_best_of_16_bits_against_the_worst_of_fp32() -> None:
    def ends(loss: float) -> Any:
        return leg(".*8", loss=[1.0] * 4 + [loss] * 4)

    clear = compare(ends(0.9), ends(0.5), [ends(0.55)], [ends(0.8)])
    assert clear.least == pytest.approx((0.8 - 0.55) / 0.55)
    assert worse(clear, LIMITS)
    by_chance = compare(ends(0.9), ends(0.5), [ends(0.55)], [ends(0.56)])
    assert by_chance.least == pytest.approx((0.56 - 0.55) / 0.55)
    assert worse(by_chance, LIMITS) is None  # 2 % above, inside the floor
    assert worse(compare(ends(0.9), ends(0.5), [ends(0.55)]), LIMITS)  # which fp32's spread alone does not tell
    assert compare(ends(0.9), ends(0.5), [ends(0.55)], [leg("")]).least == pytest.approx((0.9 - 0.55) / 0.55)


def test_weights_that_stand_still_are_worse_whatever_the_loss() -> None:
    still, moves = leg().model_copy(update={"param_change": 0.0}), leg().model_copy(update={"param_change": 1e-4})
    assert worse(compare(still, moves), LIMITS) == "no weight moves, and the fp32 twin's do"
    assert worse(compare(still, still), LIMITS) is None  # nor do fp32's: another fault, or a frozen model
    assert worse(compare(moves, moves), LIMITS) is None
    assert worse(compare(leg(), moves), LIMITS) is None  # not measured


def test_a_close_call_is_above_what_is_allowed_and_below_three_times_that() -> None:
    def case(value: float) -> Comparison:
        return Comparison(excess=value, spread=0.05)

    assert [close_call(case(v), LIMITS) for v in (0.09, 0.11, 0.29, 0.31)] == [False, True, True, False]


def test_compare_without_perturbed_legs_or_validation() -> None:
    result = compare(leg(), leg())
    assert result == Comparison(excess=0.0)
    assert compare(with_validation(1.0), leg()).excess_validation is None
    assert compare(leg(), with_validation(1.0)).excess_validation is None


def test_compare_with_a_leg_that_never_began() -> None:
    assert math.isnan(compare(leg(""), leg()).excess)
    assert math.isnan(compare(leg(), leg("")).excess)


def test_a_perturbed_leg_that_got_nowhere_tells_nothing() -> None:
    twin, off, nowhere = leg(loss=1.0), leg(loss=1.1), leg("")
    for perturbed in ([off, nowhere], [nowhere, off]):
        assert compare(twin, twin, perturbed).spread == pytest.approx(0.1)
    assert compare(twin, twin, [nowhere]).spread is None


# ---- worse ----


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"excess": 0.0}, None),
        ({"excess": -0.5}, None),
        ({"excess": 0.03}, None),  # the floor itself
        ({"excess": 0.031}, "the training loss is 3.1% above the fp32 twin's (noise allows 3.0%)"),
        ({"excess": 0.031, "spread": 0.0}, "the training loss is 3.1% above the fp32 twin's (noise allows 3.0%)"),
        ({"excess": 0.09, "spread": 0.05}, None),  # twice the spread
        ({"excess": 0.11, "spread": 0.05}, "the training loss is 11.0% above the fp32 twin's (noise allows 10.0%)"),
        ({"excess": 0.02, "excess_validation": 0.2}, "the validation loss is 20.0% above the fp32 twin's"),
        ({"excess": 0.02, "excess_validation": 0.2, "spread": 0.2}, "the validation loss is 20.0% above"),
        ({"excess": 0.02, "excess_validation": 0.2, "spread_validation": 0.1}, None),
        ({"excess": 0.2, "excess_validation": 0.2}, "the training loss"),
        ({"excess": NAN}, "the training loss is nan% above"),
        ({"excess": 0.0, "excess_validation": NAN}, "the validation loss is nan% above"),
        ({"excess": INF}, "the training loss is inf% above"),
    ],
)
def test_worse(values: dict[str, float], reason: str | None) -> None:
    said = worse(Comparison(**values), LIMITS)
    if reason is None:
        assert said is None
    else:
        assert said is not None
        assert said.startswith(reason)


def test_worse_follows_the_limits() -> None:
    assert worse(Comparison(excess=0.04), Limits(worse_floor=0.05)) is None
    assert worse(Comparison(excess=0.11, spread=0.05), Limits(worse_spread=3.0)) is None


# ---- diverged, trains ----


@pytest.mark.parametrize(
    ("loss", "expected_diverged", "expected_trains"),
    [
        ((2.0, 1.0), False, True),
        ((2.0, 2.0), False, False),
        ((2.0, 1.97), False, False),  # 1.5 % at most: no progress
        ([100.0, *[98.0] * 7], False, True),  # exactly the 2 % asked for
        ([2.0, *[6.0] * 7], False, False),  # three times the first loss, exactly
        ([2.0, *[6.01] * 7], True, False),
        ([1.0, 99.0, 99.0, 99.0, 99.0, 99.0, 0.5, 0.5], False, True),  # a peak on the way is the warm-up's
        ([-1.0, *[-2.0] * 7], False, True),  # a negative loss may fall
        ([-1.0, *[0.9] * 7], False, False),
        ([-1.0, *[1.1] * 7], True, False),
        ([0.0, *[-0.1] * 7], False, True),
        ([0.0] * 8, False, False),
        ([2.0, *[INF] * 7], True, False),
        ([2.0, *[NAN] * 7], False, False),
    ],
)
def test_diverged_and_trains(loss: Any, expected_diverged: bool, expected_trains: bool) -> None:
    one = leg(".*8", loss=loss)
    assert diverged(one, LIMITS) is expected_diverged
    assert trains(one, LIMITS) is expected_trains


def test_a_leg_without_steps_or_with_a_failure_does_not_train() -> None:
    assert not diverged(leg(""), LIMITS)
    assert not trains(leg(""), LIMITS)
    assert not trains(leg(failure={"step": 39, "where": "validation"}), LIMITS)


def test_diverged_and_trains_follow_the_limits() -> None:
    assert diverged(leg(".*8", loss=[2.0, *[4.2] * 7]), Limits(divergence=2.0))
    assert not trains(leg(".*8", loss=[2.0, *[1.9] * 7]), Limits(progress=0.1))


# ---- describe_failure ----


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (None, "nothing failed"),
        (Failure(step=3, where="loss"), "the loss is not finite at step 3"),
        (Failure(step=0, where="weight", names=("a", "b", "c", "d")), "the weight (a, b, c) is not finite at step 0"),
        (Failure(step=1, where="exception", error="ValueError: no"), "step 1 raised ValueError: no"),
    ],
)
def test_describe_failure(failure: Failure | None, words: str) -> None:
    assert describe_failure(leg(failure=failure)) == words


# ---- judge ----


class Case(NamedTuple):
    what: str
    main: Leg | None
    reason: str
    healthy: bool = False
    comparison: Comparison | None = None
    planned: int = 400
    limits: Limits = LIMITS


FP16 = {"scale": 2.0**16}
BETTER, FAR_WORSE = Comparison(excess=-0.01), Comparison(excess=0.5)
RAISED = Failure(step=0, where="exception", error="KeyError: 1")
CASES = [
    Case("fp16 finds its scale", leg("S*4 .*36", **FP16), "36 of 40 steps taken, all finite, loss 1.3", healthy=True),
    Case("fp32", leg(), "40 of 40 steps taken, all finite", healthy=True),
    Case("beside the twin", leg(), "loss -1.0% beside the fp32 twin's", healthy=True, comparison=BETTER),
    Case("no leg", None, "no step was made"),
    Case("no step", leg(""), "no step was made"),
    Case("fails at once", leg("", failure={"step": 0, "where": "loss"}), "the loss is not finite at step 0"),
    Case("raises", leg("", failure=RAISED), "step 0 raised KeyError: 1"),
    Case("finite but for validation", leg(failure={"step": 39, "where": "validation"}), "the validation is not finite"),
    Case("a failure before skips", leg("S*40", failure={"step": 9, "where": "weight"}, **FP16), "the weight is not"),
    Case("poisoned", leg(poisoned_buffers=("a", "b", "c", "d")), "buffers are not finite: a, b, c"),
    Case("every step skipped", leg("S*40", **FP16), "40 of 40 steps were skipped and the loss scale ended at 5.96"),
    Case("late skips", leg(".*20 SSSSS .*14 S", **FP16), "6 of 40 steps were skipped (6 of the last 20) and the loss"),
    Case("most of a short fit", leg("S*12 .*8", **FP16), "12 of 20 steps were skipped", planned=20),
    Case("half of a short fit", leg("S*10 .*10", **FP16), "10 of 20 steps taken", healthy=True, planned=20),
    Case("the same in a long fit", leg("S*12 .*8", **FP16), "8 of 20 steps taken", healthy=True),
    Case("not one step taken", leg("S*8", **FP16), "none of 8 steps was taken"),
    Case("not one step taken, no scaler", leg("SSSS"), "none of 4 steps was taken", planned=4),
    Case("a callback takes every fourth step", leg("SSS. SSS. SSS."), "3 of 12 steps taken", healthy=True, planned=12),
    Case("diverged", leg(loss=(1.0, 9.0)), "the loss rose from 1 to 8.077"),
    Case("worse", leg(), "the training loss is 50.0% above", comparison=FAR_WORSE),
    Case("divergence comes first", leg(loss=(1.0, 9.0)), "the loss rose", comparison=FAR_WORSE),
    Case(
        "worse within the limits", leg(), "loss +50.0% beside", healthy=True, comparison=FAR_WORSE,
        limits=Limits(worse_floor=0.6),
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what.replace(" ", "_"))
def test_judge(case: Case) -> None:
    evidence = Evidence(
        configuration=Configuration(device="cpu", requested="fp16", planned_steps=case.planned),
        legs={} if case.main is None else {"main": case.main},
        comparison=case.comparison,
    )
    verdict = judge(evidence, case.limits)
    assert verdict.healthy is case.healthy, verdict.reason
    assert case.reason in verdict.reason
    assert verdict.excess == (case.comparison.excess if case.comparison and case.main is not None else None)


def test_the_made_legs_are_what_they_say() -> None:
    assert leg().spec == LegSpec(precision="fp32")
    assert leg(**FP16).spec == LegSpec(precision="fp16")
    assert [s.skipped for s in leg("S.").steps] == [True, False]
