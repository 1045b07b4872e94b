"""What several rules ask of an origin: is it a fault of 16 bits, and did a value grow too large or vanish?"""

from __future__ import annotations

import math
import re

from autoprec.evidence import Evidence, Origin

__all__ = ["HALF_MAX", "kind", "numbers", "precision_fault"]

HALF_MAX = 65504.0
"""Largest finite float16."""

_SINGULAR = re.compile(r"aten\.(div|true_divide|log|log2|log10|log1p|rsqrt|reciprocal|pow|sqrt|logit|atanh|xlogy)")


def precision_fault(evidence: Evidence) -> Origin | None:
    """The op at which the main leg left the range of 16 bits, if fp32 is finite there; None otherwise.

    Either the leg failed there and fp32 goes on for longer, or nothing failed and the value was absorbed.
    """
    main, twin = evidence.main, evidence.legs.get("fp32")
    if main is None or main.spec.precision == "fp32" or twin is None:
        return None
    if main.failure is None:
        return evidence.hidden.origin if evidence.hidden is not None else None
    if main.origin is None or (twin.failure is not None and twin.failure.step <= main.failure.step):
        return None
    if main.origin.fp32 is not None and not main.origin.fp32.finite:
        return None
    return main.origin


def kind(origin: Origin) -> str:
    """Say "overflow" or "underflow".

    Underflow: an op that is singular at zero got a zero where fp32 has none. Everything else that is finite in
    fp32 left the range of half.
    """
    op, twin = origin.operation, origin.fp32
    if twin is not None and twin.output_max is not None and twin.output_max > HALF_MAX:
        return "overflow"
    if (
        twin is not None
        and _SINGULAR.match(op.op)
        and op.input_zeros > twin.input_zeros
        and (op.input_max or 0.0) <= HALF_MAX
    ):
        return "underflow"
    return "overflow"


def numbers(origin: Origin) -> str:
    """The figures of an origin as a clause for a sentence."""
    op, twin = origin.operation, origin.fp32
    if twin is None and op.input_max is not None and op.input_max > HALF_MAX:
        return f"the input of {op.op} reaches {op.input_max:.4g}, above half's largest number {HALF_MAX:g}"
    if kind(origin) == "underflow" and twin is not None:
        small = f"{twin.input_min:.3g}" if twin.input_min is not None else "a small number"
        return f"{op.op} gets {op.input_zeros} zeros where fp32 has {small} at the least"
    if twin is not None and twin.output_max is not None and math.isfinite(twin.output_max):
        return (
            f"{op.op} gives {twin.output_max:.4g} in fp32, above half's largest number {HALF_MAX:g}"
            if (twin.output_max > HALF_MAX)
            else f"{op.op} is finite in fp32 ({twin.output_max:.4g}) and not in 16 bits"
        )
    return (
        f"{op.op} makes the first non-finite value (inputs up to {op.input_max:.4g})"
        if (op.input_max is not None)
        else f"{op.op} makes the first non-finite value"
    )
