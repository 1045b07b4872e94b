"""Keep single parts of the model in fp32 (islands) inside a 16-bit run.

Cures        a value that leaves half's range, or loses its last bits, at one op: everything else stays in 16 bits.
How          the smallest part first: the line that calls the op, then its function, then its module. Where the fault
             moves on to another op, that joins the island (the set grows by origin).
Costs        the time of these parts in fp32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autoprec.evidence import Place
from autoprec.islands import Island, obstacle
from autoprec.outcome import Change
from autoprec.policy import KeepModulesFp32 as Settings
from autoprec.remedies.base import Remedy, Subject

if TYPE_CHECKING:
    from autoprec.evidence import Evidence

__all__ = ["KeepModulesFp32"]


class KeepModulesFp32(Remedy[Settings]):
    """Put an island around the place of the finding."""

    name = "keep_modules_fp32"
    grows = True

    def obstacle(self, subject: Subject, evidence: Evidence, settings: Settings) -> str | None:
        if subject.setting.precision == "fp32":
            return "the run is in fp32 already"
        place = subject.place
        if place is None or (place.module is None and place.function is None):
            return "the evidence names no place in the model"
        candidates = self._new(subject, place)
        if not candidates:
            return f"{place} is an island already, and nothing smaller than the whole model is left"
        return obstacle(subject.learn, candidates[0])

    def apply(self, subject: Subject, evidence: Evidence, settings: Settings) -> Change:
        before = subject.setting
        subject.hold(self.name, before)
        place = subject.place or Place()
        new = self._new(subject, place)[0]
        # A larger island at the same place takes the smaller one's stead.
        islands = (*(i for i in before.islands if not _inside(i, new)), new)
        subject.setting = replace(before, islands=islands)
        return Change(
            remedy=self.name,
            what="kept in fp32",
            before=[str(i) for i in before.islands] or None,
            after=[str(i) for i in islands],
            data={"islands": [i.model_dump() for i in islands]},
        )

    def undo(self, subject: Subject, change: Change) -> None:
        subject.setting = subject.release(self.name)

    @staticmethod
    def _new(subject: Subject, place: Place) -> list[Island]:
        """Islands around the place, from the smallest on, that are not part of one there is."""
        there = subject.setting.islands
        return [i for i in Island.at(place) if not any(_inside(i, t) for t in there)]


def _inside(a: Island, b: Island) -> bool:
    """Whether island `a` is part of island `b`."""
    if b.function is None:
        return a.module == b.module or a.module.startswith(f"{b.module}.")
    same = (a.module, a.file, a.function) == (b.module, b.file, b.function)
    return same and (b.line is None or a.line == b.line)
