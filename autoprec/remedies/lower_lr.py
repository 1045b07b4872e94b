"""Lower the learning rate.

Cures        a run that diverges in every precision.
Costs        progress per step; too low a rate undertrains without any error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoprec.outcome import Change
from autoprec.policy import LowerLr as Settings
from autoprec.remedies.base import Remedy, Subject

if TYPE_CHECKING:
    from autoprec.evidence import Evidence, Leg

__all__ = ["LowerLr"]


class LowerLr(Remedy[Settings]):
    """Multiply the planned lr by the (one) factor given; discriminative rates keep their ratios."""

    name = "lower_lr"
    new_twin = True

    def obstacle(self, subject: Subject, evidence: Evidence, settings: Settings) -> str | None:
        if not settings.factors:
            return "the policy gives no factors"
        lowest = self._peak(evidence) * settings.factors[0]
        if lowest < settings.floor:
            return f"the lr would be {lowest:.3g}, below the policy's floor of {settings.floor:g}"
        # fp32 has been run at some smaller rates already: what did not train there need not be tried.
        useless = [g.spec.lr_factor for g in evidence.legs.values() if g.spec.lr_factor < 1 and not _learned(g)]
        if useless and settings.factors[0] >= min(useless):
            return f"fp32 does not train at {min(useless):g} of the lr already"
        return None

    def apply(self, subject: Subject, evidence: Evidence, settings: Settings) -> Change:
        factor = settings.factors[0]
        subject.hold(self.name, subject.plan)
        peak = float(f"{self._peak(evidence):.6g}")
        subject.plan = subject.plan.scaled(factor)
        return Change(
            remedy=self.name,
            what="learning rate (peak)",
            before=peak,
            after=float(f"{peak * factor:.6g}"),
            data={"factor": factor},
        )

    def undo(self, subject: Subject, change: Change) -> None:
        subject.plan = subject.release(self.name)

    @staticmethod
    def _peak(evidence: Evidence) -> float:
        leg = evidence.twin or evidence.main
        return max((s.lr for s in leg.steps), default=1.0) if leg else 1.0


def _learned(leg: Leg) -> bool:
    """Whether a leg stayed finite and its loss fell at all."""
    return leg.failure is None and bool(leg.steps) and leg.final_loss < leg.steps[0].loss
