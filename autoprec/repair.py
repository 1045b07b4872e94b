"""From a fault to a healthy probe: observe -> diagnose -> plan -> apply -> verify, until nothing is left to find.

Evidence is gathered as rules need it, in their causal order, until the primary finding is certain; that mode's ladder
is walked, each attempt judged by the detector that found the fault; what was kept is then taken back once to see
whether it is needed. Values are put back after every probe; what stays are the kept changes alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from autoprec.audit.events import AttemptStarted, Note
from autoprec.diagnosis import RULES, diagnose
from autoprec.diagnosis.finding import Diagnosis, Finding
from autoprec.diagnosis.fp32 import LOWER_LR
from autoprec.errors import AutoprecError, RestoreError
from autoprec.evidence import DataSample, Evidence, Leg, Place
from autoprec.ledger import Skips
from autoprec.observe.gather import Gatherer
from autoprec.outcome import Attempt, Change, Price, Verdict
from autoprec.planner import PlannedAttempt, next_attempt
from autoprec.remedies import REMEDIES, Remedy, Subject
from autoprec.snapshot import fingerprint
from autoprec.verify import compare, describe_failure, diverged, judge, trains, worse

if TYPE_CHECKING:
    from autoprec.audit.journal import Journal
    from autoprec.diagnosis.finding import Rule
    from autoprec.policy import Policy

__all__ = ["Repair"]

# Found by being worse than the twin: a remedy that leaves (or makes) one of these has traded one fault for another.
_QUIET = {"plateau", "gradient_underflow", "precision_loss"}


@dataclass
class Kept:
    """A remedy that was applied and stays so far, with what it takes to apply it again."""

    remedy: Remedy[Any]
    change: Change
    mode: str
    evidence: Evidence
    settings: Any
    place: Place | None


@dataclass
class Repair:
    """The repair of one subject.

    Attributes:
        subject: learner, planned fit and precision; remedies change it.
        policy: what is allowed.
        journal: where everything is written down.
        rules: the rules, in causal order.
        extra_remedies: remedies from outside, each for its own `for_modes`.
        probe_steps: length of a probe where it is not the policy's.
        kept: remedies that were accepted so far.
        attempts: remedies tried so far.
        first, last: the diagnosis of the run as it came, and the latest.
        reference: an fp32 twin of the user's own settings that came through.
        yardstick: the best that fp32 was seen to do.
    """

    subject: Subject
    policy: Policy
    journal: Journal
    rules: Sequence[Rule] = RULES
    extra_remedies: Sequence[Remedy[Any]] = ()
    probe_steps: int | None = None
    kept: list[Kept] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)
    first: Diagnosis | None = None
    last: Diagnosis | None = None
    first_look: Evidence | None = None
    last_look: Evidence | None = None
    fp32_share: float | None = None
    reference: Leg | None = None
    yardstick: Leg | None = None
    data: DataSample | None = None
    gatherer: Gatherer = field(init=False)
    legs: int = 0
    steps: int = 0

    # ---------------------------------------------------------------- observe and diagnose

    def look(self, *, new_twin: bool = False) -> tuple[Evidence, Diagnosis]:
        """Gather evidence until the primary finding is certain, and diagnose."""
        reference = None if new_twin else self.reference
        self.gatherer = Gatherer(self.subject, self.policy, self.journal, reference, self.data, self.probe_steps)
        self.unavailable = {}
        evidence = self.gatherer.begin()
        while (need := self._next_need(evidence)) is not None:
            evidence = self._provide(need, evidence)
        found = diagnose(evidence, self.policy.limits, self.rules)
        self.journal.write("diagnosed", found)
        self.last, self.last_look = found, evidence
        self.first_look = self.first_look or evidence
        return evidence, found

    def _provide(self, need: str, evidence: Evidence) -> Evidence:
        legs, steps = self.gatherer.legs, self.gatherer.steps
        try:
            grown = self.gatherer.provide(need, evidence)
        except Exception as e:
            if need.startswith("leg:") or isinstance(e, (AutoprecError, MemoryError, torch.OutOfMemoryError)):
                raise
            # A measurement that this model does not allow is a check that did not run, not the end of the run.
            self.unavailable[need] = f"{need}: {type(e).__name__}: {e}"
            return evidence
        self.legs += self.gatherer.legs - legs
        self.steps += self.gatherer.steps - steps
        if not grown.has(need):
            self.unavailable[need] = f"{need} could not be measured here"
        return grown

    def _next_need(self, evidence: Evidence) -> str | None:
        """The first thing that a relevant rule lacks, up to the rule that finds the primary fault."""
        limits = self.policy.limits
        for rule in self.rules:
            if not rule.relevant(evidence, limits):
                continue
            missing = rule.missing(evidence, limits)
            lacking = [n for n in missing if n not in self.unavailable]
            if lacking:
                return lacking[0]
            found = None if missing else rule.check(evidence, limits)
            if found is not None and not found.advisory:
                return None
        return None

    # ---------------------------------------------------------------- plan, apply, verify

    def run(self) -> tuple[Evidence, Diagnosis, str | None]:
        """Repair what is found until nothing is, or nothing allowed is left to try.

        Returns:
            The last evidence and diagnosis, and why it could not be repaired (None: it is well, or inconclusive).
        """
        evidence, found = self.look()
        if found.primary is not None and self.subject.setting.precision == "fp16" and evidence.main is not None:
            # For the reader of the report: where room is short.
            evidence = self._provide("headroom", evidence)
            self.unavailable.pop("headroom", None)
        self.first = self.first or found
        self._remember_twin(evidence)
        tried: list[PlannedAttempt] = []
        seen: set[str] = set()
        while (primary := found.primary) is not None:
            seen.add(primary.mode)
            if not primary.repairable:
                return evidence, found, f"no setting can cure {primary.mode}"
            step = next_attempt(primary, self.policy, tried, self.remedies, self._extra)
            if step is None or len(self.attempts) >= self.policy.max_attempts:
                return evidence, found, self._why_stopped(primary, step)
            tried.append(step)
            after = self._attempt(step, primary, evidence, seen)
            if after is not None:
                evidence, found = after
        verdict = judge(evidence, self.policy.limits)
        if self.kept and verdict.healthy:
            self.prove_needed(evidence)
            # The last looks were at what happens without this remedy or that.
            self.last, self.last_look = found, evidence
            self._carry_scale(evidence)
        if not verdict.healthy and evidence.main is not None:
            return evidence, found, f"no rule explains it, but the probe is not healthy: {verdict.reason}"
        return evidence, found, None

    @property
    def remedies(self) -> dict[str, Remedy[Any]]:
        """The registry, and what came from outside."""
        return REMEDIES | {r.name: r for r in self.extra_remedies}

    @property
    def _extra(self) -> dict[str, tuple[str, ...]]:
        return {r.name: r.for_modes for r in self.extra_remedies}

    def _why_stopped(self, primary: Finding, step: PlannedAttempt | None) -> str:
        ladder = self.policy.ladder(primary.mode)
        if step is not None:
            return f"the policy allows {self.policy.max_attempts} attempts"
        if not any(a.mode == primary.mode and a.applicable for a in self.attempts):
            return ladder.why or f"the policy {self.policy.name!r} allows nothing for {primary.mode}"
        return f"no remedy that the policy {self.policy.name!r} allows for {primary.mode} made the run healthy"

    def _remember_twin(self, evidence: Evidence) -> None:
        """Keep the fp32 twin of the user's own settings if it came through, else the best one at a smaller lr."""
        limits = self.policy.limits
        twin = evidence.twin
        if twin is not None and twin.failure is None and not diverged(twin, limits):
            self.reference = self.yardstick = twin
            self.data = evidence.data
            return
        lower = [leg for name, _ in LOWER_LR if (leg := evidence.legs.get(name)) and trains(leg, limits)]
        if lower:
            self.yardstick = min(lower, key=lambda leg: leg.final_loss)

    def _attempt(
        self, step: PlannedAttempt, primary: Finding, evidence: Evidence, seen: set[str]
    ) -> tuple[Evidence, Diagnosis] | None:
        """Try one remedy; the new evidence and diagnosis if it is kept, None if it was taken back."""
        remedy, settings = self.remedies[step.remedy], step.resolve(self.policy)
        self.journal.write(
            "attempt_started", AttemptStarted(mode=step.mode, remedy=step.remedy, parameters=step.settings)
        )
        self.subject.place = primary.where
        for need in remedy.needs:
            if not evidence.has(need) and need not in self.unavailable:
                evidence = self._provide(need, evidence)
        obstacle = self._obstacle(remedy, evidence, settings)
        if obstacle is not None:
            self._note(Attempt(remedy=step.remedy, mode=step.mode, applicable=False, reason=obstacle))
            return None
        before = fingerprint(self.subject.learn)
        applied = [self._apply(remedy, step.mode, evidence, settings)]
        after, found = self.look(new_twin=remedy.new_twin)
        verdict = self._verdict(primary, after, found, seen)
        while not verdict.healthy and remedy.grows and len(applied) < getattr(settings, "max_islands", 1):
            # The same remedy on top of itself, where the fault has moved to.
            self.subject.place = found.primary.where if found.primary else None
            if remedy.obstacle(self.subject, after, settings) is not None:
                break
            applied.append(self._apply(remedy, step.mode, after, settings))
            after, found = self.look(new_twin=remedy.new_twin)
            verdict = self._verdict(primary, after, found, seen)
        verdict = self._affordable(verdict, after, settings)
        if verdict.healthy and remedy.grows:
            after, found, verdict = self._settled_sooner(primary, applied, seen, (after, found, verdict))
        attempt = Attempt(
            remedy=step.remedy,
            mode=step.mode,
            applicable=True,
            reason=verdict.reason,
            change=_merged([k.change for k in applied]),
            verdict=verdict,
            kept=verdict.healthy,
        )
        self._note(attempt)
        if verdict.healthy:
            self.kept += applied
            if remedy.new_twin or self.reference is None:
                self._remember_twin(after)
            return after, found
        for last in reversed(applied):
            remedy.undo(self.subject, last.change)
        self._same(before, f"after taking back {step.remedy}")
        return None

    def _apply(self, remedy: Remedy[Any], mode: str, evidence: Evidence, settings: Any) -> Kept:
        place = self.subject.place
        return Kept(remedy, remedy.apply(self.subject, evidence, settings), mode, evidence, settings, place)

    def _obstacle(self, remedy: Remedy[Any], evidence: Evidence, settings: Any) -> str | None:
        if any(k.remedy.name == remedy.name and k.settings == settings for k in self.kept) and not remedy.grows:
            return "it is in force already"
        return remedy.obstacle(self.subject, evidence, settings)

    def _settled_sooner(
        self, primary: Finding, applied: list[Kept], seen: set[str], now: tuple[Evidence, Diagnosis, Verdict]
    ) -> tuple[Evidence, Diagnosis, Verdict]:
        """Grow an accepted island while the run still skips many steps, as long as that makes it skip fewer.

        Too small an island leaves large gradients to its neighbours in 16 bits: the scale then falls until they fit.
        """
        last, tried = applied[-1], 0
        while self._many_skips(now[0]):
            self.subject.place = primary.where
            if last.remedy.obstacle(self.subject, now[0], last.settings) is not None:
                break
            applied.append(self._apply(last.remedy, last.mode, now[0], last.settings))
            tried += 1
            after, found = self.look(new_twin=last.remedy.new_twin)
            verdict = self._affordable(self._verdict(primary, after, found, seen), after, last.settings)
            if verdict.healthy and _skipped(after) < _skipped(now[0]):
                now, tried = (after, found, verdict), 0
        for _ in range(tried):  # larger, and no better
            last.remedy.undo(self.subject, applied.pop().change)
        return now

    def _many_skips(self, evidence: Evidence) -> bool:
        steps = evidence.main.steps if evidence.main else ()
        return Skips.of(steps).share_of(evidence.configuration.planned_steps) > self.policy.limits.skip_rate

    def _affordable(self, verdict: Verdict, after: Evidence, settings: Any) -> Verdict:
        """Refuse islands that take more of the forward pass than the policy allows."""
        most = getattr(settings, "max_share", None)
        if not verdict.healthy or most is None or not self.subject.setting.islands:
            return verdict
        share = self._provide("fp32_share", after).fp32_share
        self.fp32_share = share
        if share is None or share <= most:
            return verdict
        return Verdict(healthy=False, reason=f"the islands take {share:.0%} of the forward's FLOPs, above {most:.0%}")

    def _carry_scale(self, evidence: Evidence) -> None:
        """A repaired run that would spend many of its steps on finding its scale again starts from the settled one."""
        settings = self.policy.remedies.carry_scale
        if evidence.main is None or not settings.allow:
            return
        skips = Skips.of(evidence.main.steps)
        remedy = self.remedies["carry_scale"]
        if not self._many_skips(evidence) or remedy.obstacle(self.subject, evidence, settings) is not None:
            return
        mode = self.kept[-1].mode
        self.journal.write("attempt_started", AttemptStarted(mode=mode, remedy=remedy.name))
        before = (self.last, self.last_look)
        applied = self._apply(remedy, mode, evidence, settings)
        after, found = self.look()
        verdict = judge(after, self.policy.limits)
        fewer = after.main is not None and Skips.of(after.main.steps).skipped < skips.skipped
        kept = verdict.healthy and found.primary is None and fewer
        self._note(
            Attempt(
                remedy=remedy.name,
                mode=mode,
                applicable=True,
                reason=verdict.reason,
                change=applied.change,
                verdict=verdict,
                kept=kept,
            )
        )
        if not kept:
            remedy.undo(self.subject, applied.change)
            self.last, self.last_look = before
            return
        self.kept.append(applied)
        self._needed(len(self.kept) - 1, f"without it {skips.skipped} of {skips.attempted} steps are skipped")

    # ---------------------------------------------------------------- was it needed?

    def prove_needed(self, accepted: Evidence) -> None:
        """Take each kept remedy back once, from the same snapshot, to see the fault return; what isn't needed goes.

        A single remedy was proven by the very first probe: same state, same batches, without it.
        """
        if len(self.kept) == 1:
            first = self.first.primary if self.first else None
            self._needed(0, f"without it the first probe shows {first.mode}" if first else "")
            return
        for _ in range(min(self.policy.probe.necessity_probes, len(self.kept))):
            index = next((i for i, k in enumerate(self.kept) if not k.change.needed), None)
            if index is None:
                return
            everything = list(self.kept)
            self._rebuild([k for i, k in enumerate(everything) if i != index])
            evidence, found = self.look(new_twin=any(k.remedy.new_twin for k in self.kept))
            verdict = judge(evidence, self.policy.limits)
            name = everything[index].change
            settles_later = self._many_skips(evidence) and _skipped(evidence) > _skipped(accepted)
            if found.primary is None and verdict.healthy and not settles_later:
                text = f"{name.remedy} ({name.what}) is not needed: without it {verdict.reason}; it was taken back"
                self.journal.write("note", Note(text=text))
                continue
            self._rebuild(everything)
            why = found.primary.because if found.primary else verdict.reason
            self._needed(index, f"without it: {why}")

    def _needed(self, index: int, why: str) -> None:
        kept = self.kept[index]
        kept.change = kept.change.model_copy(update={"needed": why})
        self.journal.write("note", Note(text=f"{kept.change.remedy} is needed; {why}"))

    def _rebuild(self, wanted: list[Kept]) -> None:
        """Take every kept remedy back and apply the wanted ones again, in their order."""
        self.undo_all()
        for kept in wanted:
            self.subject.place = kept.place
            again = self._apply(kept.remedy, kept.mode, kept.evidence, kept.settings)
            again.change = again.change.model_copy(update={"needed": kept.change.needed})
            self.kept.append(again)

    def _verdict(self, primary: Finding, after: Evidence, found: Diagnosis, seen: set[str]) -> Verdict:
        """Accepted: the fault is gone and the run is healthy, or only a fault of another kind is left to repair."""
        verdict = judge(after, self.policy.limits)
        rest = found.primary
        if any(f.mode == primary.mode for f in found.findings):
            return Verdict(healthy=False, reason=f"{primary.mode} is still found: {verdict.reason}")
        if rest is None:
            return self._against_yardstick(verdict, after)
        if rest.mode in seen or rest.mode in _QUIET:
            return Verdict(healthy=False, reason=f"{primary.mode} became {rest.mode}: {rest.because}")
        behind = self._against_yardstick(Verdict(healthy=True, reason=""), after)
        if not behind.healthy:
            return behind
        return Verdict(healthy=True, reason=f"{primary.mode} is gone; next is {rest.mode}: {rest.because}")

    def _against_yardstick(self, verdict: Verdict, after: Evidence) -> Verdict:
        """Refuse a run that keeps up with its own twin, where that twin falls behind what fp32 was seen to reach.

        Such a remedy has mended the run at the cost of learning.
        """
        twin = after.twin
        if not verdict.healthy or twin is None or self.yardstick is None or twin is self.yardstick:
            return verdict
        if twin.failure is not None and self.yardstick.failure is None:
            return Verdict(healthy=False, reason=f"with it fp32 fails: {describe_failure(twin)}")
        comparison = compare(twin, self.yardstick)
        reason = worse(comparison, self.policy.limits)
        if reason is None:
            return verdict
        factor = self.yardstick.spec.lr_factor
        lr = f" at {factor:g} of the lr" if factor != 1 else ""
        return Verdict(healthy=False, reason=f"healthy, but with it {reason}{lr}", excess=comparison.excess)

    def _note(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)
        self.journal.write("attempt_finished", attempt)

    def _same(self, before: Any, when: str) -> None:
        differences = before.differences(fingerprint(self.subject.learn))
        if differences:
            raise RestoreError(f"{when} the learner differs from before in {', '.join(differences[:8])}")

    def changes(self) -> Iterator[Change]:
        """What is changed and kept, one change for each remedy."""
        for _, group in groupby(self.kept, key=lambda k: k.change.remedy):
            yield _merged([k.change for k in group])

    def undo_all(self) -> None:
        """Take every kept change back, the last one first."""
        while self.kept:
            last = self.kept.pop()
            last.remedy.undo(self.subject, last.change)

    def price(self, seconds: float, fit_seconds: float | None = None) -> Price:
        """What it has cost so far, and how fast the probes ran."""
        legs: dict[str, Leg] = {}
        if self.first_look is not None and self.first_look.main is not None:
            legs[self.first_look.main.spec.precision] = self.first_look.main
        if self.reference is not None:
            legs["fp32"] = self.reference
        last = self.last_look
        if self.kept and last is not None and last.main is not None:
            legs["repaired"] = last.main
        return Price(
            legs=self.legs,
            steps=self.steps,
            seconds=seconds,
            fit_seconds=fit_seconds,
            steps_per_second={n: round(len(g.steps) / g.seconds, 3) for n, g in legs.items() if g.steps and g.seconds},
            peak_memory={n: g.peak_memory for n, g in legs.items() if g.peak_memory is not None},
            fp32_share=self.fp32_share if self.subject.setting.islands else None,
        )


def _skipped(evidence: Evidence) -> int:
    return Skips.of(evidence.main.steps).skipped if evidence.main else 0


def _merged(changes: Sequence[Change]) -> Change:
    """One change for a remedy that was applied on top of itself."""
    needed = "; ".join(c.needed for c in changes if c.needed) or None
    return changes[-1].model_copy(update={"before": changes[0].before, "needed": needed})
