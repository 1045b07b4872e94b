"""bfloat16: fp32's range with 8 bits of mantissa, no loss scaling.

Cures        overflow and underflow, in forward, loss and gradients.
Does not     cure lost mantissa bits: it has fewer than fp16. Slower than fp32 where the device only emulates it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoprec.outcome import Change
from autoprec.policy import Bf16 as Settings
from autoprec.precision import Setting
from autoprec.remedies.base import Remedy, Subject
from autoprec.remedies.fp32 import switch

if TYPE_CHECKING:
    from autoprec.evidence import Evidence

__all__ = ["Bf16"]


class Bf16(Remedy[Settings]):
    """Train in bf16 autocast."""

    name = "bf16"

    def obstacle(self, subject: Subject, evidence: Evidence, settings: Settings) -> str | None:
        c = evidence.configuration
        if subject.setting.precision != "fp16":
            return f"the run is in {subject.setting.precision}, bf16 would be no milder"
        if not c.bf16_available or (settings.native_only and not c.bf16_native):
            return f"bf16 is not native here: {c.unavailable_reason}"
        return None

    def apply(self, subject: Subject, evidence: Evidence, settings: Settings) -> Change:
        return switch(subject, self.name, Setting("bf16"))

    def undo(self, subject: Subject, change: Change) -> None:
        subject.setting = subject.release(self.name)
