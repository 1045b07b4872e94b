"""Take out a callback that misuses the scaler; where it was seen to clip, fastai's GradientClip takes its place.

Cures        `scaler.unscale_(learn.opt)` in a callback, and clipping before the gradients are unscaled.
Does not     keep whatever else the callback did: hence off unless the policy allows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastai.callback.training import GradientClip

from autoprec.outcome import Change
from autoprec.policy import ReplaceCallback as Settings
from autoprec.remedies.base import Remedy, Subject, put_callbacks_back

if TYPE_CHECKING:
    from autoprec.evidence import Evidence, Misuse

__all__ = ["ReplaceCallback"]


class ReplaceCallback(Remedy[Settings]):
    """Remove the callbacks that were caught, and clip where they clipped."""

    name = "replace_callback"

    def obstacle(self, subject: Subject, evidence: Evidence, settings: Settings) -> str | None:
        if not _misuses(evidence):
            return "no callback was seen to misuse the scaler"
        return None if _caught(subject, evidence) else "the callback that was caught is not in the learner"

    def apply(self, subject: Subject, evidence: Evidence, settings: Settings) -> Change:
        learn = subject.learn
        caught = _caught(subject, evidence)
        subject.hold(self.name, (list(learn.cbs), {cb.name: getattr(learn, cb.name, None) for cb in caught}))
        for cb in caught:
            learn.remove_cb(cb)
        norms = [m.clips_to for m in _misuses(evidence) if m.clips_to is not None]
        after: list[str] = []
        if norms and not any(isinstance(cb, GradientClip) for cb in learn.cbs):
            norm = float(f"{min(norms):.3g}")
            learn.add_cb(GradientClip(norm))
            after = [f"GradientClip({norm:g})"]
        return Change(
            remedy=self.name, what="callbacks", before=[type(cb).__name__ for cb in caught], after=after or None
        )

    def undo(self, subject: Subject, change: Change) -> None:
        put_callbacks_back(subject.learn, *subject.release(self.name))


def _misuses(evidence: Evidence) -> tuple[Misuse, ...]:
    return evidence.main.misuses if evidence.main else ()


def _caught(subject: Subject, evidence: Evidence) -> list[Any]:
    names = {m.callback for m in _misuses(evidence)}
    return [cb for cb in subject.learn.cbs if type(cb).__name__ in names]
