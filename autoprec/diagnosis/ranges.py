"""The four rules of leaving half's range differ in phase and direction only; this is what they share."""

from __future__ import annotations

from collections.abc import Callable

from autoprec.diagnosis.finding import Finding
from autoprec.diagnosis.plain import behind_twin
from autoprec.diagnosis.sixteen_bit import kind, numbers, precision_fault
from autoprec.evidence import Evidence
from autoprec.policy import Limits
from autoprec.verify import describe_failure

__all__ = ["hidden_if_behind", "range_check"]


def hidden_if_behind(evidence: Evidence, limits: Limits) -> tuple[str, ...]:
    """A leg that failed has shown its origin; one that is only worse than its twin is searched for a hidden one."""
    return ("hidden",) if behind_twin(evidence, limits) else ()


def range_check(
    mode: str, phase: str, direction: str, suggestions: tuple[tuple[str, str], ...]
) -> Callable[[Evidence, Limits], Finding | None]:
    """A check for an origin in `phase` whose value went in `direction`.

    Args:
        mode: failure mode of the finding.
        phase: "forward" or "loss".
        direction: "overflow" or "underflow".
        suggestions: (part of the op's name, what to write instead), the first that matches is given.
    """

    def check(evidence: Evidence, _limits: Limits) -> Finding | None:
        origin, main, twin = precision_fault(evidence), evidence.main, evidence.legs.get("fp32")
        if main is None or twin is None:
            return None
        if origin is None and direction == "overflow" and main.origin is None:
            return _unnamed(mode, phase, evidence)
        if origin is None or origin.phase != phase or kind(origin) != direction:
            return None
        step = main.failure.step if main.failure else 0
        op = origin.operation
        absorbed = "" if main.failure else "; what follows absorbs it (x / inf is 0), so that no loss shows it"
        return Finding(
            mode=mode,
            because=f"at step {step} {numbers(origin)}{absorbed}",
            where=origin.place,
            op=op.op,
            ruled_out=(
                f"the model or the data: fp32 is finite on the same batch and made {len(twin.steps)} steps",
                f"a value handed on: the op's inputs are finite ({op.input_max:.4g} at most)"
                if op.input_max is not None
                else "a value handed on: the op's inputs are finite",
            ),
            suggestion=next((text for part, text in suggestions if part in op.op), None),
            evidence={
                "step": step,
                "input_max": op.input_max,
                "fp32_output_max": origin.fp32.output_max if origin.fp32 else None,
                "input_zeros": op.input_zeros,
                "fp32_input_min": origin.fp32.input_min if origin.fp32 else None,
            },
            confidence=1.0 if origin.fp32 is not None else 0.7,
        )

    return check


_PHASES = {"loss": "loss", "prediction": "forward", "validation": "forward", "buffer": "forward"}


def _unnamed(mode: str, phase: str, evidence: Evidence) -> Finding | None:
    """A failure in 16 bits that fp32 does not have, where computing the batch again did not show the op."""
    main, twin = evidence.main, evidence.legs.get("fp32")
    if main is None or main.failure is None or main.spec.precision == "fp32" or twin is None:
        return None
    if twin.failure is not None or _PHASES.get(main.failure.where) != phase or main.poisoned_buffers:
        return None
    return Finding(
        mode=mode,
        because=f"{describe_failure(main)} in {main.spec.precision}, and finite in fp32; the op could not be named",
        ruled_out=(f"the model or the data: fp32 is finite on the same batches and made {len(twin.steps)} steps",),
        evidence={"step": main.failure.step},
        confidence=0.5,
    )
