"""The stages meet here: repair, then fit, then say what happened.

    observe -> diagnose -> plan -> apply -> verify   (repair.py, until the probe is healthy)
    -> fit -> judge                                  (here; a fit that fails later than the probe is probed again)

Whatever ends it early, the learner is as it was before the call; in the fit itself, at a healthy state.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from autoprec.audit.events import Failed, FitFinished, FitStarted, Note, Plan, RunStarted
from autoprec.diagnosis.finding import Diagnosis, Finding
from autoprec.doctor import environment
from autoprec.errors import RestoreError
from autoprec.evidence import Failure, Leg
from autoprec.observe.fit import FitLog, FitWatch
from autoprec.observe.gather import Gatherer
from autoprec.observe.origin import place_of_exception
from autoprec.observe.tensors import nonfinite_names
from autoprec.outcome import Outcome, Price, Verdict
from autoprec.precision import Setting, attached, carried, stock_callback
from autoprec.snapshot import Snapshot, fingerprint, release_autocast
from autoprec.verify import judge

if TYPE_CHECKING:
    from autoprec.audit.journal import Journal
    from autoprec.policy import Policy
    from autoprec.remedies import Subject
    from autoprec.repair import Repair

__all__ = ["Runner"]


@dataclass
class Runner:
    """One run: a repair, and the fit that it prepares."""

    repair: Repair
    raised: Exception | None = None

    @property
    def subject(self) -> Subject:
        """Learner, planned fit and precision."""
        return self.repair.subject

    @property
    def policy(self) -> Policy:
        """What is allowed."""
        return self.repair.policy

    @property
    def journal(self) -> Journal:
        """Where everything is written down."""
        return self.repair.journal

    # ---------------------------------------------------------------- fit

    def fit(self) -> tuple[Leg, Verdict, float]:
        """Make the real fit and judge it."""
        s = self.subject
        learn, log = s.learn, FitLog()
        steps = sum(s.plan.stages(learn))
        self.journal.write(
            "fit_started",
            FitStarted(
                precision=s.setting.precision,
                islands=tuple(map(str, s.setting.islands)),
                steps=steps,
                schedule=s.plan.schedule,
            ),
        )
        started = time.perf_counter()
        release_autocast()
        with attached(learn, s.setting) as left_out:
            try:
                s.plan.run(learn, [FitWatch(log)])
            except Exception as e:
                if not self._worth_a_look(e, log):
                    raise
                self.raised = e
                error = f"{type(e).__name__}: {' '.join(str(e).split())}"[:500]
                place = place_of_exception(e)
                log.failure = Failure(step=len(log.steps), where="exception", error=error, place=place, phase=log.phase)
                release_autocast()
        if left_out:
            some = ", ".join(left_out[:20]) + (", …" if len(left_out) > 20 else "")
            self.journal.write("note", Note(text=f"{len(left_out)} batches were left out as not finite: {some}"))
        seconds = time.perf_counter() - started
        leg = log.leg(learn, s.setting.precision, steps)
        seen = Gatherer(s, self.policy, self.journal).begin()
        evidence = seen.model_copy(update={"legs": {"main": leg}})
        verdict = judge(evidence, self.policy.limits)
        self.journal.write(
            "fit_finished",
            FitFinished.of(
                leg.steps,
                seconds=seconds,
                healthy=verdict.healthy,
                reason=verdict.reason,
                final=log.final_values(learn),
                rows=self.policy.audit.ledger_rows,
            ),
        )
        return leg, verdict, seconds

    def _worth_a_look(self, error: Exception, log: FitLog) -> bool:
        """Whether the model or the loss raised it, later than the probe had come: then a longer probe may explain it.

        What a callback raises is its own way of ending the fit, and goes on to the caller.
        """
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or log.phase is None:
            return False
        probed = self.repair.probe_steps or self.policy.probe.steps
        return not str(error).startswith("Exception occured in `") and len(log.steps) >= probed

    def install(self) -> None:
        """Leave the learner with fastai's own callback for the precision that it was trained in.

        What needed more than that callback (islands, the loss in fp32) comes back without one: so `validate`,
        `get_preds` and an export compute in fp32, which is right, rather than in bare 16 bits, which is not.
        """
        learn, setting = self.subject.learn, self.subject.setting
        if not setting.stock:
            setting = Setting("fp32")
        setting = replace(setting, skip_nonfinite=False)  # nothing that a callback carries
        callbacks, now = carried(learn)
        if (len(callbacks) == 1 and now == setting) or (not callbacks and setting.precision == "fp32"):
            return
        for cb in callbacks:
            learn.remove_cb(cb)
        stock = stock_callback(setting)
        if stock is not None:
            learn.add_cb(stock)

    # ---------------------------------------------------------------- the whole

    def run(self) -> Outcome:
        """Probe, repair, fit; see `autoprec.run`."""
        started = time.perf_counter()
        s, learn = self.subject, self.subject.learn
        self._announce()
        before = Snapshot.capture(learn)
        plan, setting = s.plan, s.setting
        with self._giving_back(before):
            for attempt in range(self.policy.probe.late_failures + 1):
                _, found, why_not = self.repair.run()
                if why_not is not None:
                    break
                spent = time.perf_counter() - started
                start = Snapshot.capture(learn)
                leg, verdict, seconds = self._guarded_fit(start)
                if verdict.healthy:
                    self.install()
                    return self._finish(
                        self._result(found),
                        verdict.reason,
                        self.repair.price(spent, seconds),
                    )
                start.restore(learn)
                failed_at = leg.failure.step if leg.failure else len(leg.steps)
                why_not = f"the fit failed: {verdict.reason}"
                if attempt == self.policy.probe.late_failures or failed_at < (self.repair.probe_steps or 0):
                    break
                # The probe ended before the fault: look again, as far as it.
                self.repair.probe_steps = failed_at + max(4, self.policy.probe.steps // 4)
                self.repair.reference = None
                self.repair.first = None if not self.repair.kept else self.repair.first
                self.journal.write("note", Note(text=f"{why_not}; probing again up to step {self.repair.probe_steps}"))
            self.repair.undo_all()
            s.plan, s.setting = plan, setting
            before.restore(learn)
            differences = before.fingerprint.differences(fingerprint(learn))
            if differences:
                raise RestoreError(f"the learner could not be put back: {', '.join(differences[:8])} differ")
            if self.raised is not None and (self.repair.last is None or self.repair.last.primary is None):
                raise self.raised
        price = self.repair.price(time.perf_counter() - started)
        return self._finish("unrepaired", why_not or "", price)

    def remediate(self) -> Outcome:
        """Probe and repair without fitting; the accepted changes stay in the learner."""
        started = time.perf_counter()
        self._announce()
        before = Snapshot.capture(self.subject.learn)
        with self._giving_back(before):
            _, found, why_not = self.repair.run()
            price = self.repair.price(time.perf_counter() - started)
            if why_not is None:
                self.install()
                return self._finish(self._result(found), "ready to be trained", price)
            self.repair.undo_all()
            before.restore(self.subject.learn)
        return self._finish("unrepaired", why_not, price)

    def _result(self, found: Diagnosis) -> Any:
        if self.repair.kept:
            return "repaired"
        return "inconclusive" if found.not_run else "healthy"

    def _guarded_fit(self, start: Snapshot) -> tuple[Leg, Verdict, float]:
        """The fit; interrupted, it leaves the learner at its present state if that is healthy, else at the start."""
        learn = self.subject.learn
        try:
            return self.fit()
        except BaseException as e:
            release_autocast()
            named = [*learn.model.named_parameters(), *learn.model.named_buffers()]
            if nonfinite_names(named, 1):
                start.restore(learn)
                where = "the state before the fit"
            else:
                where = "the state at the interruption, which is finite"
            self.journal.write("failed", Failed(error=type(e).__name__, message=f"{e} (the learner is at {where})"))
            raise _Interrupted from e

    @contextmanager
    def _giving_back(self, before: Snapshot) -> Iterator[None]:
        """Whatever escapes: the learner as it was, and the journal says so. An interrupted fit has been seen to."""
        try:
            yield
        except _Interrupted as e:
            cause = e.__cause__
            if cause is None:
                raise
            raise cause from None
        except BaseException as e:
            if not isinstance(e, RestoreError):
                self.repair.undo_all()
                before.restore(self.subject.learn)
            self.journal.write("failed", Failed(error=type(e).__name__, message=str(e)))
            raise

    def _announce(self) -> None:
        s = self.subject
        lr = s.plan.lr if isinstance(s.plan.lr, (float, int)) or s.plan.lr is None else str(s.plan.lr)
        self.journal.write(
            "run_started",
            RunStarted(
                environment=environment() | {"model": type(s.learn.model).__name__},
                policy=self.policy.name,
                policy_content=self.policy.model_dump(mode="json"),
                plan=Plan(schedule=s.plan.schedule, epochs=s.plan.epochs, lr=lr, steps=sum(s.plan.stages(s.learn))),
            ),
        )

    def _finish(self, result: Any, detail: str, price: Price) -> Outcome:
        trained = result != "unrepaired"
        diagnosis = self.repair.first or Diagnosis()
        primary = diagnosis.primary
        # What the first look left out was made up for by the last, unless that ended at a fault.
        not_run = self.repair.last.not_run if trained and self.repair.last is not None else diagnosis.not_run
        outcome = Outcome(
            result=result,
            precision=self.subject.setting.precision if trained else None,
            diagnosis=diagnosis,
            attempts=tuple(self.repair.attempts),
            islands=tuple(map(str, self.subject.setting.islands)) if trained else (),
            changes=tuple(self.repair.changes()),
            price=price,
            checks_not_run=tuple(not_run),
            audit_path=str(self.journal.path),
            run_id=self.journal.run_id,
            detail=detail,
            next_step=_next_step(result, primary, self.policy),
        )
        self.journal.write("run_finished", outcome)
        return outcome.with_learner(self.subject.learn)


class _Interrupted(BaseException):
    """Carries an exception out of the fit past the hands that would put the learner back."""


def _next_step(result: str, primary: Finding | None, policy: Policy) -> str:
    if result == "healthy":
        return ""
    if result == "repaired":
        return "keep the changes in your own code, so that the next run needs no repair"
    if result == "inconclusive":
        return "see the checks that did not run before you trust the result"
    if primary is None:
        return "look at the audit file; the fault shows only in the full fit"
    if primary.suggestion:
        return primary.suggestion
    return policy.ladder(primary.mode).why or f"allow another remedy for {primary.mode} in the policy"
