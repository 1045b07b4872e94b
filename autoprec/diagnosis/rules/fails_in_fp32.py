"""The model or the loss fails in fp32 too, and no smaller learning rate helps: precision is not the cause.

Looks like   NaN in every precision on the same batch: log(0), 0/0, the deviation of one sample, a root of zero in the
             backward pass. fp16 often survives it longer, as its scaler skips the step.
Not this     bad data (`nonfinite_data`, `invalid_targets`), or an lr that is too high (`lr_divergence`).
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Finding, Rule
from autoprec.diagnosis.fp32 import CLIP, LOWER_LR, at, certain, fp32_fails, may_be_lr
from autoprec.evidence import Evidence
from autoprec.policy import Limits
from autoprec.verify import trains

_ADVICE = (
    ("softmax", "every position of a row is masked (or infinite): leave such rows out, or mask with a finite number"),
    ("log", "log of zero: use logsumexp in place of log(sum(exp)), or an epsilon inside the log"),
    ("sqrt", "root of zero (its gradient is infinite): put an epsilon inside the root"),
    ("vector_norm", "the gradient of a norm at zero is not defined: put an epsilon inside"),
    ("std", "deviation of a single value: use drop_last=True, or skip it for one sample"),
    ("var", "variance of a single value: use drop_last=True, or skip it for one sample"),
    ("div", "division by zero: put an epsilon in the denominator"),
    ("exp", "exp overflows: subtract the maximum first"),
    ("pow", "a power overflows or divides by zero: check the base"),
)


def same_in_fp32(evidence: Evidence) -> bool:
    """Whether the batch on which 16 bits fail is not finite in fp32 either, from the very same weights."""
    main = evidence.main
    if main is None or main.failure is None or main.spec.precision == "fp32" or main.origin is None:
        return False
    return main.origin.fp32 is not None and not main.origin.fp32.finite


def relevant(evidence: Evidence, limits: Limits) -> bool:
    """fp32 fails, or nobody knows."""
    return evidence.twin is None or fp32_fails(evidence, limits) or same_in_fp32(evidence) or certain(evidence)


def legs(evidence: Evidence, limits: Limits) -> tuple[str, ...]:
    """The twin, unless the batch itself has shown it; the legs at a smaller lr, where one could matter."""
    if certain(evidence):
        return ()
    wanted = fp32_fails(evidence, limits) and may_be_lr(evidence)
    return ("leg:fp32", *(f"leg:{name}" for name, _ in LOWER_LR if wanted))


def check(evidence: Evidence, limits: Limits) -> Finding | None:
    """fp32 fails, and neither a smaller lr nor anything known about the data explains it."""
    twin, main = evidence.twin, evidence.main
    if main is None or (twin is None and not certain(evidence)):
        return None
    cures = [*(name for name, _ in LOWER_LR), CLIP]
    if any((leg := evidence.legs.get(name)) is not None and trains(leg, limits) for name in cures):
        return None
    if certain(evidence):
        leg, how = main, f"{at(main)}, and in fp32 that batch is not finite even before the first step is taken"
    elif twin is not None and fp32_fails(evidence, limits):
        leg, how = twin, f"fp32 fails as well: {at(twin)}"
    elif same_in_fp32(evidence):
        leg, how = main, f"{at(main)}, and from the same weights fp32 is not finite on that batch either"
    else:
        return None
    origin, failure = leg.origin, leg.failure
    op = origin.operation.op if origin else None
    tried = [name for name, _ in LOWER_LR if name in evidence.legs]
    made = f": {op} makes the first non-finite value" if op else ""
    return Finding(
        mode=RULE.mode,
        because=f"{how}{made}",
        where=origin.place if origin else (failure.place if failure else None),
        op=op,
        ruled_out=("16-bit arithmetic: fp32 is not finite either",)
        + ((f"the lr: {' and '.join(tried)} fail too",) if tried else ())
        + (("the lr: no step matters",) if certain(evidence) else ()),
        suggestion=next((text for part, text in _ADVICE if op and part in op), None),
        evidence={"step": failure.step if failure else None},
        repairable=False,
    )


RULE = Rule(
    mode="fails_in_fp32",
    needs=("leg:main",),
    check=check,
    doc=__doc__ or "",
    relevant=relevant,
    more=legs,
)
