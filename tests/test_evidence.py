"""Evidence: nothing is lost on the way through JSON, and what is computed from it has its closed form."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from made_evidence import evidence, leg
from pydantic import ValidationError

from autoprec import evidence as module
from autoprec.evidence import (
    Comparison,
    Configuration,
    DataSample,
    Drift,
    Evidence,
    Failure,
    Feature,
    Fidelity,
    Fp32Value,
    Headroom,
    Hidden,
    Leg,
    LegSpec,
    Misuse,
    ModuleDrift,
    ModuleHeadroom,
    Operation,
    Origin,
    ParameterFidelity,
    Place,
    ScaleSearch,
    Step,
    Target,
)
from autoprec.noun import Noun

if TYPE_CHECKING:
    from collections.abc import Iterator

NAN, INF = math.nan, math.inf
PLACE = Place(module="", module_class="Net", file="net.py", line=3, source="x / y", function="forward")
ORIGIN = Origin(
    phase="backward",
    place=PLACE,
    operation=Operation(
        op="aten.div", inputs=("float16[16, 6]", "float16[16, 1]"), input_max=65504.0, input_min=5.960464477539063e-08,
        input_zeros=3, output_max=INF,
    ),
    fp32=Fp32Value(input_max=1e300, input_min=1e-300, input_zeros=0, output_max=NAN, finite=False),
    ops_watched=211,
)  # fmt: skip
FIDELITY = Fidelity(
    scale=2.0**16,
    parameters=(ParameterFidelity(name="w", flushed=0.1 + 0.2, cosine=NAN, relative_error=INF),),
    loss_16=-INF,
    loss_32=1 / 3,
)
LEG = Leg(
    spec=LegSpec(precision="fp16", lr_factor=0.1, clip=1.0, init_scale=8.0, skip_steps=(0, 1), perturb_seed=7),
    steps=(
        Step(step=0, loss=NAN, lr=1e-3, grad_norm=INF, scale_before=65536.0, scale_after=32768.0, skipped=True),
        Step(step=1, loss=-INF, lr=1e-3),
    ),
    planned_steps=40,
    failure=Failure(step=1, where="exception", names=("w",), error="ValueError: no", place=PLACE),
    origin=ORIGIN,
    validation=(1.5, NAN, INF),
    metrics={"accuracy": NAN, "error": 0.5},
    poisoned_buffers=("bn.running_var",),
    misuses=(Misuse(callback="Clip", what="unscales", place=PLACE, ratio=NAN),),
    param_change=INF,
    seconds=0.1,
    peak_memory=2**40,
)
FULL = Evidence(
    configuration=Configuration(
        device="cuda",
        requested="fp16",
        scaler_kwargs={"init_scale": 65536.0},
        half_parameters=("a",),
        unavailable_reason="x",
    ),
    data=DataSample(
        batches=3,
        features=(Feature(name="input 0", min=-INF, max=INF, mean=NAN, std=NAN, typical=1.0, nonfinite=3),),
        targets=(Target(name="target 0", dtype="float32", min=NAN, max=INF, all_ignored_batches=(2,)),),
        nonfinite_rows=((0, 1), (2, 3)),
        batch_sizes=(16, 16, 3),
    ),
    legs={"main": LEG, "fp32": leg(".*3", loss=[1.0, 0.1, NAN])},
    scale_search=ScaleSearch(largest_finite=None, smallest_tried=2.0**-24, batches=2, origin=ORIGIN),
    fidelity=FIDELITY,
    best_fidelity=FIDELITY,
    hidden=Hidden(batches=2, origin=ORIGIN),
    fp32_share=NAN,
    drift=Drift(
        place=PLACE,
        op="aten.sub",
        error=NAN,
        size=INF,
        variation=0.0,
        largest=INF,
        ops_compared=9,
        modules=(ModuleDrift(name="a.b", error=INF),),
    ),
    headroom=Headroom(scale=1024.0, modules=(ModuleHeadroom(name="", forward=-INF, backward=NAN),)),
    comparison=Comparison(excess=INF, excess_validation=NAN, spread=0.0, spread_validation=-INF, same_steps=False),
)


def nouns(value: Any) -> Iterator[Noun]:
    if isinstance(value, Noun):
        yield value
        for name in type(value).model_fields:
            yield from nouns(getattr(value, name))
    elif isinstance(value, dict | tuple | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from nouns(one)


def test_the_full_evidence_is_full() -> None:
    kinds = {kind for name in module.__all__ if isinstance(kind := getattr(module, name), type)}
    assert {type(noun) for noun in nouns(FULL)} == kinds, "put every noun of evidence.py into FULL, for its JSON form"
    assert all(getattr(FULL, name) is not None for name in Evidence.model_fields)


def test_json_and_back() -> None:
    again = Evidence.model_validate_json(FULL.model_dump_json())
    # By repr, which tells NaN, infinities and the last bit of a float; NaN equals nothing.
    assert repr(again) == repr(FULL)
    assert again.model_dump_json() == FULL.model_dump_json()


def test_json_says_nan_in_words() -> None:
    text = FULL.model_dump_json()
    assert '"excess":"Infinity"' in text
    assert '"excess_validation":"NaN"' in text
    assert '"spread_validation":"-Infinity"' in text


def test_a_noun_is_frozen_and_knows_its_fields() -> None:
    step = Step(step=0, loss=1.0, lr=0.1)
    with pytest.raises(ValidationError, match="frozen"):
        step.loss = 2.0
    with pytest.raises(ValidationError, match="Extra"):
        Step(step=0, loss=1.0, lr=0.1, momentum=0.9)


# ---- closed forms ----


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([], NAN),
        ([3.0], 3.0),
        ([3.0, 1.0, 2.0], 2.0),  # fewer than four: the last
        ([9.0, 9.0, 9.0, 1.0], 1.0),
        ([9.0] * 6 + [1.0, 3.0], 2.0),  # a quarter of eight
        ([9.0] * 9 + [1.0, 3.0], 2.0),  # of eleven: rounded down
        ([1.0] * 7 + [NAN], NAN),
        ([NAN] + [1.0] * 7, 1.0),
        ([1.0] * 7 + [INF], INF),
    ],
)
def test_final_loss(losses: list[float], expected: float) -> None:
    one = Leg(spec=LegSpec(precision="fp32"), steps=tuple(Step(step=i, loss=x, lr=0.1) for i, x in enumerate(losses)))
    assert one.losses == losses
    assert one.final_loss == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("losses", "expected"), [((), None), ((2.0,), 2.0), ((1.0, 2.0, 6.0), 3.0), ((1.0, NAN), NAN), ((1.0, INF), INF)]
)
def test_validation_loss(losses: tuple[float, ...], expected: float | None) -> None:
    assert leg(validation=losses).validation_loss == pytest.approx(expected, nan_ok=True)


def test_taken() -> None:
    assert [s.step for s in leg("S.S..").taken] == [1, 3, 4]


@pytest.mark.parametrize(("shares", "expected"), [([], 0.0), ([0.2], 0.2), ([0.1, 0.7, 0.3], 0.7)])
def test_flushed(shares: list[float], expected: float) -> None:
    parameters = tuple(ParameterFidelity(name="w", flushed=s, cosine=1.0, relative_error=0.0) for s in shares)
    assert Fidelity(scale=1.0, parameters=parameters, loss_16=1.0, loss_32=1.0).flushed == expected


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (Place(), "an unknown place"),
        (PLACE, "net.py:3 in forward"),
        (Place(file="net.py", line=3, function="forward", module="layers.0"), "net.py:3 in forward (module layers.0)"),
        (Place(file="net.py"), "an unknown place"),  # a file without a line is no place to look at
        (Place(module="layers.0"), "(module layers.0)"),
    ],
)
def test_a_place_in_words(place: Place, text: str) -> None:
    assert str(place) == text


# ---- which evidence is there ----


@pytest.mark.parametrize("part", sorted({*Evidence.model_fields} - {"configuration", "legs"}))
def test_has_a_part(part: str) -> None:
    assert FULL.has(part)
    assert not FULL.model_copy(update={part: None}).has(part)


def test_has_a_leg() -> None:
    assert FULL.has("configuration")
    assert FULL.has("leg:main")
    assert FULL.has("leg:fp32")
    assert not FULL.has("leg:fp32 lr/10")
    assert not FULL.has("leg:")


@pytest.mark.parametrize(
    ("requested", "legs", "has_twin"),
    [
        ("fp16", ["main"], False),
        ("fp16", ["fp32"], True),
        ("bf16", ["main", "fp32"], True),
        ("fp32", ["main"], True),  # a run in fp32 is its own twin
        ("fp32", ["fp32"], False),
        ("fp32", [], False),
    ],
)
def test_the_twin(requested: str, legs: list[str], has_twin: bool) -> None:
    words = {
        "configuration": {"device": "cpu", "requested": requested},
        "legs": {n: {"precision": "fp32"} for n in legs},
    }
    one = evidence(words)
    assert one.has("leg:fp32") is has_twin
    assert (one.twin is not None) is has_twin
    if has_twin:
        assert one.twin is one.legs["main" if requested == "fp32" else "fp32"]
    assert (one.main is not None) is ("main" in legs)
