"""The precision asked for does nothing on this device.

Looks like   `to_fp16()` on a CPU: fastai's callback warns and trains in fp32. `to_bf16()` on a GPU older than
             compute capability 8.0: bf16 runs, emulated, slower than fp32.
Not this     16-bit training that fails: there the precision is really used.
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Finding, Rule
from autoprec.evidence import Evidence
from autoprec.policy import Limits


def check(evidence: Evidence, _limits: Limits) -> Finding | None:
    """The learner asked for a 16-bit precision that the device does not have."""
    c = evidence.configuration
    available = {"fp16": c.fp16_available, "bf16": c.bf16_available and c.bf16_native, "fp32": True}
    if not c.asked_by_user or available[c.requested]:
        return None
    return Finding(
        mode=RULE.mode,
        because=f"the learner asks for {c.requested}, but {c.unavailable_reason or f'{c.device} does not offer it'}",
        suggestion="train on a CUDA GPU, or in fp32",
        evidence={"device": c.device, "requested": c.requested},
    )


RULE = Rule(mode="precision_unavailable", needs=("configuration",), check=check, doc=__doc__ or "")
