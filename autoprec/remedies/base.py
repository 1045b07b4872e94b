"""What a remedy is: one change, made and unmade on a subject.

A remedy never judges whether it helped: the detector that found the fault does, on a new probe. It says
whether it applies, makes its change, and can take it back exactly. Values (weights, buffers, generators) are
not its business; `Snapshot` puts these back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from autoprec.outcome import Change
from autoprec.policy import RemedySettings

if TYPE_CHECKING:
    from fastai.learner import Learner

    from autoprec.evidence import Evidence, Place
    from autoprec.precision import Setting
    from autoprec.schedule import FitPlan

__all__ = ["Remedy", "S", "Subject", "put_callbacks_back"]

S = TypeVar("S", bound=RemedySettings)


@dataclass
class Subject:
    """What remedies work on.

    Attributes:
        learn: the user's learner.
        plan: the fit that is to be made.
        setting: the precision it is to be made in.
        emulate_cuda: 16-bit arithmetic is emulated on a CPU.
        place: where the finding at hand has its place in the model.
        held: per remedy, objects that its undo needs and that are no JSON.
    """

    learn: Learner
    plan: FitPlan
    setting: Setting
    emulate_cuda: bool = False
    place: Place | None = None
    held: dict[str, list[Any]] = field(default_factory=dict)

    def hold(self, remedy: str, value: Any) -> None:
        """Keep what an undo will need; the last held comes back first, as a remedy may be applied more than once."""
        self.held.setdefault(remedy, []).append(value)

    def release(self, remedy: str) -> Any:
        """What was held last for a remedy."""
        values = self.held[remedy]
        value = values.pop()
        if not values:
            del self.held[remedy]
        return value


def put_callbacks_back(learn: Learner, callbacks: list[Any], attributes: dict[str, Any]) -> None:
    """Make `callbacks` the learner's list again, with the attributes (`learn.<callback name>`) that went with them."""
    for cb in [c for c in learn.cbs if c not in callbacks]:
        learn.remove_cb(cb)
    learn.cbs[:] = callbacks
    for cb in callbacks:
        cb.learn = learn
    for name, value in attributes.items():
        setattr(learn, name, value)


class Remedy(ABC, Generic[S]):
    """One rung of a ladder."""

    name: ClassVar[str]
    """As in the policy's `remedies` section."""

    needs: ClassVar[tuple[str, ...]] = ()
    """Evidence that it reads and that is gathered before `obstacle` is asked, as in `Rule.needs`."""

    new_twin: ClassVar[bool] = False
    """True: what is learned from changes, so that the fp32 twin of the user's own settings is no measure any more."""

    for_modes: ClassVar[tuple[str, ...]] = ()
    """Only for a remedy from outside (`extra_remedies=`): the failure modes it is tried for, before the policy's
    ladder. A remedy of the registry has its places in the policies."""

    grows: ClassVar[bool] = False
    """True: where the fault moves on to another place, it may be applied again on top of itself."""

    @abstractmethod
    def obstacle(self, subject: Subject, evidence: Evidence, settings: S) -> str | None:
        """Why the remedy cannot be used here, in a sentence; None if it can."""

    @abstractmethod
    def apply(self, subject: Subject, evidence: Evidence, settings: S) -> Change:
        """Make the change. Called only where `obstacle` returned None; twice on top of itself only where it `grows`."""

    @abstractmethod
    def undo(self, subject: Subject, change: Change) -> None:
        """Take the change back: everything but values is as it was before `apply`."""
