"""What to try next: (diagnosis, policy, tried) -> the next attempt, or none.

Pure: it knows names and settings, not what a remedy does. The ladder of the primary finding's mode is walked from
its first rung; a rung with several settings (`lower_lr: {factors: [0.1, 0.01]}`) is several attempts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from autoprec.noun import Noun
from autoprec.policy import Policy, RemedySettings

if TYPE_CHECKING:
    from autoprec.diagnosis.finding import Finding

__all__ = ["PlannedAttempt", "attempts", "next_attempt"]


class PlannedAttempt(Noun):
    """A remedy with the settings it is to be tried with."""

    remedy: str
    mode: str
    """The failure mode whose ladder asks for it."""
    settings: dict[str, Any]
    """The settings that differ from the policy's `remedies` section."""

    def resolve(self, policy: Policy) -> RemedySettings:
        """The full settings."""
        base: RemedySettings = getattr(policy.remedies, self.remedy, RemedySettings())
        return type(base).model_validate({**base.model_dump(), **self.settings})


def attempts(
    mode: str, policy: Policy, known: Collection[str], extra: Mapping[str, Collection[str]] = MappingProxyType({})
) -> Iterator[PlannedAttempt]:
    """All attempts for a mode, in order.

    Args:
        mode: failure mode.
        policy: its ladder gives the order; what it does not allow is left out.
        known: names of the remedies that there are.
        extra: remedies from outside the policy, and the modes that each is for; they come first.
    """
    for name, modes in extra.items():
        if mode in modes:
            yield PlannedAttempt(remedy=name, mode=mode, settings={})
    for rung in policy.ladder(mode).rungs:
        base: RemedySettings = getattr(policy.remedies, rung.remedy)
        settings = policy.settings(rung)
        if not settings.allow or rung.remedy not in known:
            continue
        for variant in settings.variants():
            chosen = {k: v for k, v in variant.model_dump().items() if v != getattr(base, k)}
            yield PlannedAttempt(remedy=rung.remedy, mode=mode, settings=chosen)


def next_attempt(
    finding: Finding,
    policy: Policy,
    tried: Collection[PlannedAttempt],
    known: Collection[str],
    extra: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> PlannedAttempt | None:
    """The first attempt of the finding's ladder that was not tried; None if there is none left."""
    return next((a for a in attempts(finding.mode, policy, known, extra) if a not in tried), None)
