"""The model holds NaN or infinity before the first step.

Looks like   NaN from the first batch on in every precision, with clean inputs: a checkpoint saved after a failed
             run, an initialization that divides by zero.
Not this     weights that become NaN while training (see `lr_divergence`, `fails_in_fp32`).
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Finding, Rule
from autoprec.evidence import Evidence
from autoprec.policy import Limits


def check(evidence: Evidence, _limits: Limits) -> Finding | None:
    """Any parameter or buffer that is not finite at the start."""
    names = evidence.configuration.nonfinite_parameters
    if not names:
        return None
    statistics = [n for n in names if n.rpartition(".")[2] in ("running_mean", "running_var")]
    return Finding(
        mode=RULE.mode,
        because=f"before the first step these parameters or buffers hold NaN or infinity: {', '.join(names)}",
        ruled_out=("made by this run: no step had been taken",),
        suggestion="load weights from before the failure, or initialize these anew",
        evidence={"nonfinite": len(names)},
        # Statistics can be estimated anew; weights cannot.
        repairable=len(statistics) == len(names),
    )


RULE = Rule(mode="nonfinite_parameters", needs=("configuration",), check=check, doc=__doc__ or "")
