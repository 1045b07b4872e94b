"""Reading a ledger: which skipped steps are the scaler at work, and which are a fault.

A dynamic scaler starts high and halves its scale at every overflow, so the first skips of a run are how it
finds its scale, and one now and then is how it notices that it has grown too far. Chronic is different:
steps keep being skipped after the scale had time to settle, or the scale falls below the point where it
still scales anything up.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from autoprec.evidence import Step

if TYPE_CHECKING:
    from autoprec.policy import Limits

__all__ = ["Skips", "measured_norms", "spike"]


def spike(steps: Sequence[Step]) -> tuple[int, float, float]:
    """The gradient norm that stands out most from the steps before it.

    Later ones do not count, as after an explosion every norm is large.

    Returns:
        (index among the measured norms, median norm before it, norm), where that ratio is largest; (0, 0, 0) for
        fewer than two measured norms. A NaN norm counts as not measured.
    """
    norms = measured_norms(steps)
    jumps = [(i, statistics.median(norms[:i]), n) for i, n in enumerate(norms) if i]
    return max(jumps, key=lambda j: j[2] / j[1] if j[1] else 0.0, default=(0, 0.0, 0.0))


def measured_norms(steps: Sequence[Step]) -> list[float]:
    """The gradient norms in order, without those that are NaN or were not measured."""
    return [s.grad_norm for s in steps if s.grad_norm is not None and not math.isnan(s.grad_norm)]


def _one_descent(steps: Sequence[Step]) -> bool:
    rose = any((b.scale_before or 0) > (a.scale_before or 0) for a, b in pairwise(steps))
    return bool(steps) and not rose and not steps[-1].skipped


@dataclass(frozen=True)
class Skips:
    """Counts of skipped steps.

    Attributes:
        attempted: steps attempted.
        skipped: of these, skipped.
        leading: skipped before the first one taken.
        late: skipped in the second half of the steps, the leading ones left out.
        late_attempted: steps of the second half, the leading ones left out.
        one_descent: the scale never rose between the steps, and the last step was taken.
        settled: one descent, and nothing of the last quarter skipped.
        first_scale, last_scale: loss scale at the beginning and at the end; None without a scaler.
    """

    attempted: int
    skipped: int
    leading: int
    late: int
    late_attempted: int
    first_scale: float | None
    last_scale: float | None
    one_descent: bool = False
    settled: bool = False

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Skips:
        """Count."""
        n = len(steps)
        leading = next((i for i, s in enumerate(steps) if not s.skipped), n)
        late = steps[max(n // 2, leading) :]
        return cls(
            attempted=n,
            skipped=sum(s.skipped for s in steps),
            leading=leading,
            late=sum(s.skipped for s in late),
            late_attempted=len(late),
            first_scale=steps[0].scale_before if steps else None,
            last_scale=steps[-1].scale_after if steps else None,
            one_descent=_one_descent(steps),
            settled=_one_descent(steps) and not any(s.skipped for s in steps[n - max(1, n // 4) :]),
        )

    @property
    def late_rate(self) -> float:
        """Share of skipped steps after the first half; 0 if nothing was attempted there."""
        return self.late / self.late_attempted if self.late_attempted else 0.0

    def late_words(self) -> str:
        """` (3 of the last 20)`, or nothing where the leading skips fill the second half."""
        return f" ({self.late} of the last {self.late_attempted})" if self.late_attempted else ""

    def collapsed(self, limits: Limits) -> bool:
        """Whether the scale ended below the floor."""
        return self.skipped > 0 and self.last_scale is not None and self.last_scale < limits.scale_floor

    def settling_overrun(self, limits: Limits) -> bool:
        """Whether more steps were skipped at the start than halving from the first scale accounts for."""
        extra = math.log2(self.first_scale / 65536) if self.first_scale and self.first_scale > 65536 else 0
        return self.leading > limits.settling_skips + extra

    def chronic(self, limits: Limits) -> bool:
        """Whether steps keep being skipped, or the scale has collapsed.

        One late skip more than the rate allows is not enough in a short leg: at least two are needed. A late descent
        that has come to its end is how a scale follows gradients that grew: none of the last quarter is skipped then,
        and the scale never rose in between.
        """
        late = self.late >= 2 and self.late_rate > limits.skip_rate and not self.settled
        return late or self.collapsed(limits) or self.settling_overrun(limits)

    def share_of(self, planned: int) -> float:
        """Skipped steps as a share of the planned fit (of the attempted ones, where these are the whole fit)."""
        return self.skipped / max(planned, self.attempted, 1)
