"""Gradients flush to zero at this loss scale.

Looks like   a finite loss that moves less than fp32's; many gradient elements are exactly zero in 16 bits that are not
             in fp32. A fixed or too low loss scale, or a loss averaged over very many elements.
Not this     a learning rate that is too low: then fp32 is as slow.
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Finding, Rule
from autoprec.diagnosis.plain import behind_twin
from autoprec.evidence import Evidence
from autoprec.policy import Limits
from autoprec.verify import worse


def check(evidence: Evidence, limits: Limits) -> Finding | None:
    """Worse than the twin, and gradient elements vanish."""
    main, fidelity, comparison = evidence.main, evidence.fidelity, evidence.comparison
    if main is None or fidelity is None or comparison is None or main.failure is not None:
        return None
    reason = worse(comparison, limits)
    flushed = [p for p in fidelity.parameters if p.flushed > limits.flushed_share]
    bent = [p for p in flushed if not p.cosine >= limits.gradient_cosine]
    if reason is None or not bent:
        return None
    top = max(bent, key=lambda p: p.flushed)
    best = evidence.best_fidelity
    there = {p.name: p for p in best.parameters}.get(top.name) if best else None
    if there is not None and there.flushed > top.flushed / 2:
        return None  # zero at any scale: the value was lost in the forward pass, not in the gradient
    return Finding(
        mode=RULE.mode,
        because=f"at loss scale {fidelity.scale:g}, {top.flushed:.0%} of the gradient of {top.name} is zero in 16 bits "
        f"and not in fp32 (cosine {top.cosine:.3f}); {reason}",
        ruled_out=("slow learning: fp32 learns faster from the same batches", "an overflow: every value is finite"),
        suggestion="raise the loss scale (leave it dynamic), or average the loss over fewer elements",
        evidence={"scale": fidelity.scale, "flushed": top.flushed, "cosine": top.cosine, "parameters": len(bent)},
    )


RULE = Rule(
    mode="gradient_underflow",
    needs=("leg:main", "leg:fp32", "comparison", "scale_search", "fidelity", "best_fidelity"),
    check=check,
    doc=__doc__ or "",
    relevant=lambda e, limits: e.configuration.requested == "fp16" and behind_twin(e, limits),
)
