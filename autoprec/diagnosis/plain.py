"""When nothing failed: is the main leg behind its fp32 twin, so that a quieter fault is worth looking for?"""

from __future__ import annotations

from autoprec.evidence import Evidence
from autoprec.policy import Limits
from autoprec.verify import worse

__all__ = ["behind_twin", "comparable"]


def comparable(evidence: Evidence, _limits: Limits) -> bool:
    """Both legs came through, and the main one is in 16 bits."""
    main, twin = evidence.main, evidence.legs.get("fp32")
    if main is None or not main.steps or main.failure is not None or main.spec.precision == "fp32":
        return False
    return twin is None or twin.failure is None


def behind_twin(evidence: Evidence, limits: Limits) -> bool:
    """The comparison, as far as it was made, is worse than the limits allow."""
    if not comparable(evidence, limits):
        return False
    return evidence.comparison is not None and worse(evidence.comparison, limits) is not None
