"""The size of the inputs is what overflows.

Looks like   raw pixels, unscaled columns, timestamps: most samples are far from size 1, the first layers overflow in
             16 bits, and the same net with inputs of size 1 would have room.
Not this     a few outlier rows (see `forward_overflow`): there most samples are of ordinary size.
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Finding, Rule
from autoprec.diagnosis.sixteen_bit import HALF_MAX, precision_fault
from autoprec.evidence import Evidence
from autoprec.policy import Limits


def check(evidence: Evidence, limits: Limits) -> Finding | None:
    """A forward overflow that inputs of size 1 would not have, as sizes pass through a net about linearly."""
    main = evidence.main
    fault = precision_fault(evidence)
    if main is None or fault is None or evidence.data is None or fault.phase != "forward":
        return None
    large = [f for f in evidence.data.features if f.typical > limits.raw_input_size]
    if not large:
        return None
    large.sort(key=lambda f: -f.typical)  # the culprit is named first
    top = large[0]
    peak = max(fault.fp32.output_max or 0.0 if fault.fp32 else 0.0, fault.operation.input_max or 0.0)
    if peak / top.typical > HALF_MAX:
        return None
    others = f", {len(large) - 1} more are above {limits.raw_input_size:g}" if len(large) > 1 else ""
    return Finding(
        mode=RULE.mode,
        because=f"most samples of {top.name} are of size {top.typical:.3g} (range {top.min:.4g} to {top.max:.4g})"
        f"{others}; with that {fault.operation.op} reaches {peak:.3g}, above half's {HALF_MAX:g}",
        where=fault.place,
        op=fault.operation.op,
        ruled_out=(f"the layer: with inputs of size 1 it would reach about {peak / top.typical:.3g}",),
        suggestion="normalize the inputs (Normalize.from_stats for images, the Normalize proc for tables)",
        evidence={"typical": top.typical, "max": top.max, "peak": peak, "features": len(large)},
        confidence=0.9,
    )


RULE = Rule(mode="unnormalized_inputs", needs=("data", "leg:main", "leg:fp32"), check=check, doc=__doc__ or "")
