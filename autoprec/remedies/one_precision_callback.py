"""Keep one precision callback of several: the one that was added last.

Cures        `to_fp16()` called twice, or `to_fp16().to_bf16()`, which nests two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoprec.outcome import Change
from autoprec.policy import OnePrecisionCallback as Settings
from autoprec.precision import carried
from autoprec.remedies.base import Remedy, Subject, put_callbacks_back

if TYPE_CHECKING:
    from autoprec.evidence import Evidence

__all__ = ["OnePrecisionCallback"]


class OnePrecisionCallback(Remedy[Settings]):
    """Remove all precision callbacks but the last."""

    name = "one_precision_callback"

    def obstacle(self, subject: Subject, evidence: Evidence, settings: Settings) -> str | None:
        return None if len(carried(subject.learn)[0]) > 1 else "there is at most one precision callback"

    def apply(self, subject: Subject, evidence: Evidence, settings: Settings) -> Change:
        learn = subject.learn
        callbacks, _ = carried(learn)
        subject.hold(self.name, (list(learn.cbs), {cb.name: getattr(learn, cb.name) for cb in callbacks}))
        last = callbacks[-1]
        for cb in callbacks:
            learn.remove_cb(cb)
        learn.add_cb(last)
        names = [type(cb).__name__ for cb in callbacks]
        return Change(remedy=self.name, what="precision callbacks", before=names, after=names[-1:])

    def undo(self, subject: Subject, change: Change) -> None:
        put_callbacks_back(subject.learn, *subject.release(self.name))
