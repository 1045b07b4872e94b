"""Inputs or targets hold NaN or infinity.

Looks like   a non-finite loss in every precision, in the batches that hold the bad rows; fp32 loses its weights,
             fp16's scaler skips the step and goes on, which is why mixed precision is blamed first.
Not this     finite data that overflows on the way (see `unnormalized_inputs`, `forward_overflow`).
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Finding, Rule
from autoprec.evidence import Evidence
from autoprec.policy import Limits


def check(evidence: Evidence, _limits: Limits) -> Finding | None:
    """Any non-finite element in the sampled batches."""
    data = evidence.data
    if data is None:
        return None
    features = [f for f in data.features if f.nonfinite]
    targets = [t for t in data.targets if t.nonfinite]
    if not features and not targets:
        return None
    total = sum(f.nonfinite for f in features) + sum(t.nonfinite for t in targets)
    names = [f.name for f in features] + [t.name for t in targets]
    rows = data.nonfinite_rows or data.nonfinite_target_rows
    first = f"; first in batch {rows[0][0]}, row {rows[0][1]}" if rows else ""
    return Finding(
        mode=RULE.mode,
        because=f"{total} values in {data.batches} batches are NaN or infinite, in {', '.join(names[:4])}"
        f"{' …' if len(names) > 4 else ''}{first}",
        ruled_out=("made by 16-bit arithmetic: the loader delivers them",),
        suggestion="remove or impute these rows (tabular: FillMissing), or fix the transform that makes them",
        evidence={"values": total, "batches": data.batches, "rows": str(rows[:8])},
    )


RULE = Rule(mode="nonfinite_data", needs=("data",), check=check, doc=__doc__ or "")
