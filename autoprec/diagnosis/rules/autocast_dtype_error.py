"""An op refuses the dtypes or values that autocast hands it.

Looks like   an exception in the first batch in 16 bits and none in fp32: `masked_fill` with -1e9, `BCELoss`,
             tensors of two dtypes in one op, `index_put` into the other dtype.
Not this     an exception that fp32 raises too (see `fails_in_fp32`), or half weights (see `half_precision_weights`).
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Finding, Rule
from autoprec.diagnosis.fp32 import AGAIN
from autoprec.evidence import Evidence
from autoprec.policy import Limits

_ADVICE = (
    ("binary_cross_entropy", "leave out the sigmoid and use BCEWithLogitsLoss"),
    ("without overflow", "use torch.finfo(x.dtype).min as the mask value"),
    ("same dtype", "cast one of the operands: x.to(y.dtype)"),
    ("expected", "cast one of the operands: x.to(y.dtype)"),
    ("dtype", "cast one of the operands: x.to(y.dtype)"),
)


def check(evidence: Evidence, _limits: Limits) -> Finding | None:
    """An exception in 16 bits on a batch that fp32 survives."""
    main, twin = evidence.main, evidence.legs.get("fp32")
    failure = main.failure if main else None
    if main is None or failure is None or failure.where != "exception" or main.spec.precision == "fp32":
        return None
    again = evidence.legs.get(AGAIN)
    if again is None or again.failure is None or again.failure.error != failure.error:
        return None
    if twin is None or (twin.failure is not None and twin.failure.step <= failure.step):
        return None
    error = failure.error or ""
    return Finding(
        mode=RULE.mode,
        because=f"step {failure.step} in {main.spec.precision} raises {error}; fp32 does not",
        where=failure.place,
        ruled_out=(f"the model or the data: fp32 made {len(twin.steps)} steps on the same batches",),
        suggestion=next((advice for sign, advice in _ADVICE if sign in error), None),
        evidence={"step": failure.step},
    )


def once_more(evidence: Evidence, _limits: Limits) -> tuple[str, ...]:
    """An exception is only a fault of the precision if it comes again."""
    main = evidence.main
    raised = main is not None and main.failure is not None and main.failure.where == "exception"
    return (f"leg:{AGAIN}",) if raised and evidence.configuration.requested != "fp32" else ()


RULE = Rule(mode="autocast_dtype_error", needs=("leg:main", "leg:fp32"), check=check, doc=__doc__ or "", more=once_more)
