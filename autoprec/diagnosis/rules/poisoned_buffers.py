"""Running statistics took in a non-finite batch: training looks fine, validation is NaN.

Looks like   finite training losses, a skipped step, and from then on NaN in every validation: the scaler protects the
             weights from a bad batch, but BatchNorm's running mean and variance have already taken it in.
Not this     buffers that were not finite from the start (`nonfinite_parameters`).
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Finding, Rule
from autoprec.evidence import Evidence
from autoprec.policy import Limits


def check(evidence: Evidence, _limits: Limits) -> Finding | None:
    """Buffers that became non-finite in 16 bits and not in fp32."""
    main, twin = evidence.main, evidence.legs.get("fp32")
    if main is None or twin is None or twin.poisoned_buffers or main.spec.precision == "fp32":
        return None
    names = main.poisoned_buffers
    if not names:
        return None
    step = main.failure.step if main.failure else len(main.steps)
    origin = main.origin
    return Finding(
        mode=RULE.mode,
        because=f"at step {step} these buffers became NaN or infinite: {', '.join(names[:4])}; "
        "in fp32 they stay finite",
        where=origin.place if origin else None,
        op=origin.operation.op if origin else None,
        ruled_out=("the data alone: fp32 takes the same batch without harm",),
        suggestion="clip outliers in the inputs, or keep what feeds the normalization in fp32",
        evidence={"step": step, "buffers": len(names)},
    )


RULE = Rule(mode="poisoned_buffers", needs=("leg:main", "leg:fp32"), check=check, doc=__doc__ or "")
