"""A metric of the user's turns NaN or infinite in 16 bits while the training is fine.

Looks like   finite losses and a metric column of nan or inf: a sum over many elements, a ratio whose denominator
             rounds to zero, computed on 16-bit tensors. Nothing is trained on it, so nothing is changed.
Not this     a metric that is not finite in fp32 either, or one of a run whose loss is not finite.
"""

from __future__ import annotations

import math

from autoprec.diagnosis.finding import Finding, Rule
from autoprec.diagnosis.plain import comparable
from autoprec.evidence import Evidence
from autoprec.policy import Limits


def check(evidence: Evidence, _limits: Limits) -> Finding | None:
    """A metric that is finite in the fp32 twin and not in the main leg."""
    main, twin = evidence.main, evidence.legs.get("fp32")
    if main is None or twin is None:
        return None
    bad = [n for n, v in main.metrics.items() if not math.isfinite(v) and math.isfinite(twin.metrics.get(n, math.nan))]
    if not bad:
        return None
    first = bad[0]
    return Finding(
        mode=RULE.mode,
        because=f"the metric {first} is {main.metrics[first]:g} in {main.spec.precision} and {twin.metrics[first]:.4g} "
        f"in fp32{f'; so are {len(bad) - 1} more' if len(bad) > 1 else ''}; the losses are finite",
        ruled_out=("the training: every loss, weight and validation loss is finite",),
        suggestion="compute the metric in fp32: pred.float()",
        evidence={"metric": first, "fp32": twin.metrics[first]},
        advisory=True,
    )


RULE = Rule(
    mode="nonfinite_metric", needs=("leg:main", "leg:fp32"), check=check, doc=__doc__ or "", relevant=comparable
)
