"""The planner: which attempt comes next, from names and settings alone."""

from __future__ import annotations

from typing import Any

import pytest

from autoprec.diagnosis import Finding
from autoprec.planner import PlannedAttempt, attempts, next_attempt
from autoprec.policy import FAILURE_MODES, REMEDIES, Bf16, InitScale, LowerLr, Policy, load_policy, shipped_policies

MODE = "forward_overflow"
FINDING = Finding(mode=MODE, because="a product of 1e5")


def policy(*rungs: Any, remedies: dict[str, Any] | None = None) -> Policy:
    ladder = list(rungs) if rungs else {"rungs": [], "why": "nothing helps"}
    return load_policy({"extends": "default", "ladders": {MODE: ladder}, "remedies": remedies or {}})


def walked(p: Policy, known: Any = REMEDIES) -> list[tuple[str, dict[str, Any]]]:
    """The whole ladder as it is walked, each attempt failing."""
    tried: list[PlannedAttempt] = []
    while (step := next_attempt(FINDING, p, tried, known)) is not None:
        assert step.mode == MODE
        tried.append(step)
    return [(step.remedy, step.settings) for step in tried]


@pytest.mark.parametrize(
    ("rungs", "remedies", "expected"),
    [
        pytest.param(["bf16", "fp32"], {}, [("bf16", {}), ("fp32", {})], id="in order"),
        pytest.param(["fp32", "bf16"], {}, [("fp32", {}), ("bf16", {})], id="in the policy's order"),
        pytest.param([], {}, [], id="empty"),
        pytest.param(
            ["lower_lr"], {}, [("lower_lr", {"factors": (f,)}) for f in (0.3, 0.1, 0.03, 0.01)],
            id="one per factor",
        ),
        pytest.param(
            [{"lower_lr": {"factors": [0.5]}}, "fp32"], {}, [("lower_lr", {"factors": (0.5,)}), ("fp32", {})],
            id="the rung's own factors",
        ),
        pytest.param(["lower_lr"], {"lower_lr": {"factors": [0.3]}}, [("lower_lr", {})], id="the policy's one factor"),
        pytest.param(
            [{"lower_lr": {"factors": [0.1, 0.01]}}], {"lower_lr": {"factors": [0.3]}},
            [("lower_lr", {"factors": (0.1,)}), ("lower_lr", {"factors": (0.01,)})], id="back to the default factors",
        ),
        pytest.param(
            [{"bf16": {"native_only": True}}], {"bf16": {"native_only": False}}, [("bf16", {"native_only": True})],
            id="back to a default that the policy left",
        ),
        pytest.param([{"bf16": {"native_only": True}}], {}, [("bf16", {})], id="stated twice is no difference"),
        pytest.param(["init_scale"], {}, [("init_scale", {})], id="no factors: as the evidence has it"),
        pytest.param(
            [{"init_scale": {"factors": [2.0, 0.5]}}], {},
            [("init_scale", {"factors": (2.0,)}), ("init_scale", {"factors": (0.5,)})], id="factors of the scale",
        ),
        pytest.param(["bf16", "fp32"], {"bf16": {"allow": False}}, [("fp32", {})], id="a remedy that is not allowed"),
        pytest.param(["bf16", "fp32"], {"bf16": {"allow": False}, "fp32": {"allow": False}}, [], id="none is allowed"),
        pytest.param(
            [{"bf16": {"allow": False}}, "fp32"], {}, [("fp32", {})], id="a remedy that is not allowed on this rung"
        ),
        pytest.param(
            [{"bf16": {"allow": True}}], {"bf16": {"allow": False}}, [("bf16", {"allow": True})],
            id="a remedy that is allowed on this rung only",
        ),
        pytest.param(["bf16", "bf16", "fp32"], {}, [("bf16", {}), ("fp32", {})], id="twice is once"),
        pytest.param(
            ["bf16", {"bf16": {"native_only": False}}], {}, [("bf16", {}), ("bf16", {"native_only": False})],
            id="twice with other settings",
        ),
    ],
)  # fmt: skip
def test_the_ladder_is_walked(rungs: list[Any], remedies: dict[str, Any], expected: list[Any]) -> None:
    assert walked(policy(*rungs, remedies=remedies)) == expected


def test_a_remedy_that_does_not_exist_here_is_passed_over() -> None:
    assert walked(policy("keep_modules_fp32", "bf16"), known={"bf16"}) == [("bf16", {})]
    assert walked(policy("keep_modules_fp32"), known=set()) == []


def test_a_ladder_belongs_to_its_mode() -> None:
    p = policy("fp32")
    tried = [PlannedAttempt(remedy="fp32", mode="plateau", settings={})]
    step = next_attempt(FINDING, p, tried, REMEDIES)
    assert step == PlannedAttempt(remedy="fp32", mode=MODE, settings={})


def test_a_mode_without_a_ladder_has_no_attempts() -> None:
    p = Policy(name="bare", ladders={})
    assert list(attempts(MODE, p, REMEDIES)) == []
    assert next_attempt(FINDING, p, [], REMEDIES) is None


@pytest.mark.parametrize(
    ("rung", "remedies", "expected"),
    [
        ("bf16", {"bf16": {"native_only": False}}, Bf16(native_only=False)),
        ({"bf16": {"native_only": True}}, {"bf16": {"native_only": False}}, Bf16(native_only=True)),
        ({"lower_lr": {"factors": [0.2]}}, {"lower_lr": {"floor": 1e-5}}, LowerLr(factors=(0.2,), floor=1e-5)),
        ({"init_scale": {"max": 256.0}}, {"init_scale": {"min": 2.0}}, InitScale(min=2.0, max=256.0)),
    ],
)
def test_resolving_gives_the_full_settings(rung: Any, remedies: dict[str, Any], expected: Any) -> None:
    p = policy(rung, remedies=remedies)
    step = next_attempt(FINDING, p, [], REMEDIES)
    assert step is not None
    assert step.resolve(p) == expected


@pytest.mark.parametrize("name", shipped_policies())
def test_every_shipped_ladder_can_be_walked(name: str) -> None:
    p = load_policy(name)
    for mode in FAILURE_MODES:
        planned = list(attempts(mode, p, REMEDIES))
        assert len({step.model_dump_json() for step in planned}) == len(planned), "an attempt is planned twice"
        for step in planned:
            settings = step.resolve(p)
            assert settings.allow
            assert len(settings.variants()) == 1, "an attempt has one setting"
        assert bool(planned) is any(getattr(p.remedies, r.remedy).allow for r in p.ladder(mode).rungs)
