"""Callbacks of the user's that touch gradients or scaler while the gradients are scaled.

fastai unscales in `before_step` at order 10. What runs before that, and every `after_backward`, sees gradients times
the loss scale: clipping them there clips at a 65536th, and `scaler.unscale_(learn.opt)` unscales what MixedPrecision
will unscale again, since it steps the scaler with itself as the optimizer.

Each callback that could do so is watched from both sides, by two callbacks of ours at its own place in the order; so
the one that did it is named. Costs two gradient norms per step for each such callback, and nothing where there is none.
"""

from __future__ import annotations

import inspect
import math
import re
from typing import TYPE_CHECKING, Any

from fastai.callback.core import Callback
from fastai.callback.fp16 import MixedPrecision

from autoprec.evidence import Misuse, Place
from autoprec.observe.origin import place_at
from autoprec.observe.tensors import total_norm

if TYPE_CHECKING:
    from fastai.learner import Learner

__all__ = ["watch_callbacks"]

_SAME = 1e-3
"""Relative change of a gradient norm below which nothing was changed; rounding of a norm in fp32 is 1e-6."""
_DOES = {"unscales": re.compile(r"\bunscale_\("), "changes scaled gradients": re.compile(r"clip_grad|\.grad\b")}


def watch_callbacks(learn: Learner, found: list[Misuse]) -> None:
    """Put a watcher on both sides of each callback that may see scaled gradients; what they see goes into `found`.

    The watchers stay in the learner's list until its snapshot is restored.
    """
    for cb in list(learn.cbs):
        if type(cb).__module__.split(".")[0] in ("fastai", "autoprec") or isinstance(cb, MixedPrecision):
            continue
        events = [e for e in ("after_backward", "before_step") if getattr(cb, e, None) is not None]
        if "before_step" in events and cb.order >= MixedPrecision.order:
            events.remove("before_step")
        if not events:
            continue
        seen: dict[str, Any] = {}
        before, after = _Before(cb, events, seen), _After(cb, events, seen, found)
        for watcher, offset in ((before, 0), (after, 1)):
            learn.add_cb(watcher)
            learn.cbs.remove(watcher)
            learn.cbs.insert(learn.cbs.index(cb) + offset, watcher)


class _Side(Callback):
    def __init__(self, watched_cb: Any, watched_events: list[str], side_seen: dict[str, Any]) -> None:
        self.watched_cb, self.watched_events, self.side_seen = watched_cb, watched_events, side_seen
        self.order = watched_cb.order

    def look(self, event: str) -> tuple[float, bool] | None:
        """(norm of the scaled gradients, the user's optimizer is unscaled); None where there is no scaler."""
        scaler = getattr(self.learn, "scaler", None)
        if event not in self.watched_events or scaler is None or not scaler.is_enabled():
            return None
        norm = total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        # fastai steps the scaler with its callback as the optimizer: an entry of the learner's own is the user's.
        states = scaler._per_optimizer_states
        return norm, id(self.opt) in states and bool(states[id(self.opt)]["found_inf_per_device"])


class _Before(_Side):
    def after_backward(self) -> None:
        self.side_seen["after_backward"] = self.look("after_backward")

    def before_step(self) -> None:
        self.side_seen["before_step"] = self.look("before_step")


class _After(_Side):
    def __init__(self, cb: Any, events: list[str], side_seen: dict[str, Any], side_found: list[Misuse]) -> None:
        super().__init__(cb, events, side_seen)
        self.side_found = side_found

    def after_backward(self) -> None:
        self.compare("after_backward")

    def before_step(self) -> None:
        self.compare("before_step")

    def compare(self, event: str) -> None:
        """Note what the callback did: once, but for the norm it clips to, of which the last sight counts."""
        before, after = self.side_seen.get(event), self.look(event)
        name = type(self.watched_cb).__name__
        if before is None or after is None:
            return
        ratio = after[0] / before[0] if before[0] else 1.0
        unscales = after[1] and not before[1]
        if not unscales and not (math.isfinite(ratio) and abs(ratio - 1) > _SAME):
            return
        # What it left, in unscaled terms: shorter than what unscaling alone leaves, it was clipped to that.
        left = ratio * float(self.learn.scaler.get_scale()) if unscales else ratio
        clips_to = after[0] if math.isfinite(after[0]) and left < 1 - _SAME else None
        there = next((i for i, m in enumerate(self.side_found) if m.callback == name), None)
        if there is not None:
            if clips_to is not None:
                self.side_found[there] = self.side_found[there].model_copy(update={"clips_to": clips_to})
            return
        what: Any = "unscales" if unscales else "changes scaled gradients"
        place = _place(getattr(self.watched_cb, event), what)
        self.side_found.append(Misuse(callback=name, what=what, place=place, ratio=_finite(ratio), clips_to=clips_to))


def _finite(ratio: float) -> float | None:
    return ratio if math.isfinite(ratio) else None


def _place(method: Any, what: str) -> Place:
    """The line of the method that does it, by its text; the method's own line where none shows it."""
    try:
        file, (lines, first) = inspect.getsourcefile(method) or "", inspect.getsourcelines(method)
    except (OSError, TypeError):  # built in an interactive session, or not a python function
        return Place(function=getattr(method, "__qualname__", None))
    line = next((first + i for i, text in enumerate(lines) if _DOES[what].search(text)), first)
    return place_at(file, line, method.__qualname__)
