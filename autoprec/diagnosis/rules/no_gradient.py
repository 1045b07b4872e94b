"""No trainable parameter receives a gradient.

Looks like   a loss that never moves, in every precision: everything frozen, or a `detach()` / `no_grad` between the
             parameters and the loss.
Not this     gradients that are too small for 16 bits (see `gradient_underflow`): there fp32 has gradients.
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Finding, Rule
from autoprec.diagnosis.fp32 import certain
from autoprec.evidence import Evidence
from autoprec.policy import Limits


def check(evidence: Evidence, _limits: Limits) -> Finding | None:
    """Nothing trainable, or a gradient of exactly zero at every fp32 step."""
    if evidence.configuration.trainable_parameters == 0:
        return Finding(
            mode=RULE.mode,
            because="no parameter has requires_grad=True",
            suggestion="call learn.unfreeze(), or check what your splitter and freeze_to leave trainable",
            repairable=False,
        )
    twin = evidence.twin
    error = twin.failure.error or "" if twin and twin.failure else ""
    if "does not require grad" in error:
        return Finding(
            mode=RULE.mode,
            because=f"in fp32 the backward pass raises {error}",
            suggestion="look for detach(), .data, torch.no_grad() or numpy between the parameters and the loss",
            repairable=False,
        )
    norms = [s.grad_norm for s in twin.steps] if twin else []
    if not norms or any(n != 0.0 for n in norms):
        return None
    return Finding(
        mode=RULE.mode,
        because=f"in fp32 the gradient is exactly zero at each of {len(norms)} steps",
        ruled_out=("underflow: fp32 has no gradient either",),
        suggestion="look for detach(), a saturated activation or a loss that does not depend on the prediction",
        evidence={"steps": len(norms)},
        repairable=False,
    )


RULE = Rule(
    mode="no_gradient",
    needs=("configuration", "leg:fp32"),
    check=check,
    doc=__doc__ or "",
    # A batch that fails in fp32 from the start has shown that it is another fault.
    relevant=lambda e, _limits: not certain(e),
)
