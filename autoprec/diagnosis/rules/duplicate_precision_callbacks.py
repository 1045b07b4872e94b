"""Two precision callbacks are attached, one inside the other.

Looks like   `to_fp16()` called twice, or `to_fp16()` and then `to_bf16()` or `to_channelslast()`: `add_cb` never
             removes an earlier callback of the same kind. The loss is scaled twice, gradients are unscaled once.
Not this     one precision callback and a loss scale that is too high (see `gradient_overflow`).
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Finding, Rule
from autoprec.evidence import Evidence
from autoprec.policy import Limits


def check(evidence: Evidence, _limits: Limits) -> Finding | None:
    """More than one precision callback."""
    found = evidence.configuration.precision_callbacks
    # to_non_native_fp16 adds one callback that counts here; ModelToHalf is its helper and is not counted.
    if len(found) < 2:
        return None
    return Finding(
        mode=RULE.mode,
        because=f"the learner carries {len(found)} precision callbacks ({', '.join(found)}); each scales the loss",
        suggestion="call to_fp16() or to_bf16() once, or learn.to_fp32() before the second call",
        evidence={"callbacks": len(found)},
    )


RULE = Rule(mode="duplicate_precision_callbacks", needs=("configuration",), check=check, doc=__doc__ or "")
