"""Leave out batches whose inputs or targets are not finite.

Cures        a few bad rows in data that cannot be mended before the fit.
Costs        the batches themselves. Each is counted and named in the audit; off unless the policy allows it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autoprec.outcome import Change
from autoprec.policy import SkipNonfiniteBatches as Settings
from autoprec.remedies.base import Remedy, Subject

if TYPE_CHECKING:
    from autoprec.evidence import Evidence

__all__ = ["SkipNonfiniteBatches"]


class SkipNonfiniteBatches(Remedy[Settings]):
    """Cancel such a batch before the model sees it."""

    name = "skip_nonfinite_batches"
    new_twin = True

    def obstacle(self, subject: Subject, evidence: Evidence, settings: Settings) -> str | None:
        if subject.setting.skip_nonfinite:
            return "such batches are left out already"
        data = evidence.data
        if data is None or not data.batches:
            return "no batch was sampled"
        bad = {batch for batch, _ in (*data.nonfinite_rows, *data.nonfinite_target_rows)}
        share = len(bad) / data.batches
        if share > settings.max_share:
            return f"{share:.0%} of the sampled batches hold such a value, above the policy's {settings.max_share:.0%}"
        return None

    def apply(self, subject: Subject, evidence: Evidence, settings: Settings) -> Change:
        subject.hold(self.name, subject.setting)
        subject.setting = replace(subject.setting, skip_nonfinite=True)
        return Change(remedy=self.name, what="batches that are not finite", before="trained on", after="left out")

    def undo(self, subject: Subject, change: Change) -> None:
        subject.setting = subject.release(self.name)
