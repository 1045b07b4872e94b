"""The model's weights themselves are in half precision.

Looks like   `model.half()` or a checkpoint loaded in fp16: the scaler refuses ("Attempting to unscale FP16
             gradients"), plain fp32 raises a dtype error, and in bf16 small updates round away.
Not this     fp16 *autocast*, which keeps fp32 weights and casts them for each op.
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Finding, Rule
from autoprec.evidence import Evidence
from autoprec.policy import Limits


def check(evidence: Evidence, _limits: Limits) -> Finding | None:
    """Any parameter in float16 or bfloat16."""
    half = evidence.configuration.half_parameters
    if not half:
        return None
    return Finding(
        mode=RULE.mode,
        because=f"parameters are stored in 16 bits ({', '.join(half[:3])}{', …' if len(half) > 3 else ''}); "
        "mixed precision needs fp32 weights, which autocast casts for each op",
        ruled_out=("an overflow: the weights have this dtype before the first step",),
        suggestion="load the model in fp32, or call model.float(), and let to_fp16() do the casting",
        evidence={"half_parameters": len(half)},
    )


RULE = Rule(mode="half_precision_weights", needs=("configuration",), check=check, doc=__doc__ or "")
