"""Evidence on demand: one need at a time, each from the learner's present state, which is put back.

`provide` answers a need that a rule named. What several needs share is measured once: the main leg also
measures the data it trains on and keeps its first batches for the gradient measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autoprec.audit.events import LegFinished
from autoprec.diagnosis.fp32 import AGAIN, CLIP, LOWER_LR
from autoprec.evidence import DataSample, Evidence, Leg, LegSpec, Precision
from autoprec.observe.configuration import read_configuration
from autoprec.observe.cost import fp32_share
from autoprec.observe.data import DataCollector
from autoprec.observe.drift import find_drift
from autoprec.observe.gradients import Batch, fidelity, find_hidden, measure_headroom, replay_of, search_scale
from autoprec.observe.leg import LegRun, quotas, run_leg
from autoprec.precision import computing
from autoprec.remedies.clip_gradients import clip_norm
from autoprec.snapshot import preserved, release_autocast
from autoprec.verify import close_call, compare, worse

if TYPE_CHECKING:
    from autoprec.audit.journal import Journal
    from autoprec.policy import Policy
    from autoprec.remedies import Subject

__all__ = ["Gatherer"]

_KEPT_BATCHES = 2


@dataclass
class Gatherer:
    """Gathers evidence about one subject in its present configuration.

    Attributes:
        subject: what is observed.
        policy: lengths and limits.
        journal: every leg and measurement is written down as it ends.
        reference: an fp32 twin of the user's own settings that came through; later twins are not needed then.
        data: what was measured beside that twin.
        legs, steps: how much was run, over the gatherer's life.
    """

    subject: Subject
    policy: Policy
    journal: Journal
    reference: Leg | None = None
    data: DataSample | None = None
    probe_steps: int | None = None
    legs: int = 0
    steps: int = 0
    batches: list[Batch] = field(default_factory=list)

    def begin(self) -> Evidence:
        """Evidence with the configuration alone."""
        s = self.subject
        configuration = read_configuration(
            s.learn, s.setting.precision, emulate_cuda=s.emulate_cuda, planned_steps=sum(s.plan.stages(s.learn))
        )
        self.batches = []
        self.journal.write("configuration", configuration)
        return Evidence(configuration=configuration)

    def provide(self, need: str, evidence: Evidence) -> Evidence:
        """The evidence with what `need` names added, as far as it can be had."""
        if need in ("data", "leg:main"):
            return self._main(evidence)
        if need.startswith("leg:"):
            name = need.removeprefix("leg:")
            leg = (
                self.reference
                if name == "fp32" and self.reference is not None
                else self._leg(self._spec(name, evidence), name)
            )
            return evidence.model_copy(update={"legs": {**evidence.legs, name: leg}})
        provider: dict[str, Callable[[Evidence], Evidence]] = {
            "scale_search": self._scale_search,
            "fidelity": self._fidelity,
            "best_fidelity": self._best_fidelity,
            "hidden": self._hidden,
            "drift": self._drift,
            "headroom": self._headroom,
            "fp32_share": self._fp32_share,
            "comparison": self._comparison,
        }
        return provider[need](evidence)

    def _spec(self, name: str, evidence: Evidence) -> LegSpec:
        if name == CLIP:
            return LegSpec(precision="fp32", clip=clip_norm(evidence, self.policy.remedies.clip_gradients))
        if name == AGAIN:
            return LegSpec(precision=self.subject.setting.precision)
        if name in ("fp32", "bf16"):
            precision: Precision = "fp32" if name == "fp32" else "bf16"
            return LegSpec(precision=precision)
        return LegSpec(precision="fp32", lr_factor=dict(LOWER_LR)[name])

    def _main(self, evidence: Evidence) -> Evidence:
        if self.subject.setting.precision == "fp32" and self.reference is not None:
            # The twin of the user's own settings is this very leg.
            legs = {**evidence.legs, "main": self.reference}
            return evidence.model_copy(update={"legs": legs, "data": self.data})
        # A probe made longer to reach a late fault must see the data as far as that.
        seen = max(self.policy.probe.data_batches, self.probe_steps or 0)
        collector = DataCollector.of(self.subject.learn, seen)
        leg = self._leg(LegSpec(precision=self.subject.setting.precision), "main", collector, _KEPT_BATCHES)
        data = collector.sample()
        self.journal.write("data", data)
        return evidence.model_copy(update={"legs": {**evidence.legs, "main": leg}, "data": data})

    def _leg(self, spec: LegSpec, name: str, data: DataCollector | None = None, keep: int = 0) -> Leg:
        s, probe = self.subject, self.policy.probe
        stages = s.plan.stages(s.learn)
        run = LegRun(
            spec=spec,
            quotas=quotas(stages, min(self.probe_steps or probe.steps, sum(stages))),
            validation_batches=probe.validation_batches if len(s.learn.dls.loaders) > 1 else 0,
            data=data,
            # Only these are asked where they failed; the others are compared.
            origins=name in ("main", "fp32"),
            trace_scale=self.policy.limits.scale_floor,
            keep=keep,
        )
        with preserved(s.learn):
            release_autocast()
            leg = run_leg(s.learn, s.plan, s.setting, run)
        self.legs += 1
        self.steps += len(leg.steps)
        if keep:
            self.batches = run.batches
        self.journal.write("leg_finished", LegFinished.of(name, leg, self.policy.audit.ledger_rows))
        return leg

    def _measuring(self, stack: ExitStack) -> None:
        learn = self.subject.learn
        stack.enter_context(preserved(learn))
        release_autocast()
        stack.enter_context(computing(learn, self.subject.setting))
        learn.model.train()
        learn.training = True

    def _scale_search(self, evidence: Evidence) -> Evidence:
        share = self.policy.limits.flushed_share
        with ExitStack() as stack:
            self._measuring(stack)
            found = search_scale(self.subject.learn, self.batches, self.subject.setting, share)
        self.journal.write("scale_search", found)
        return evidence.model_copy(update={"scale_search": found})

    def _fidelity(self, evidence: Evidence) -> Evidence:
        return self._fidelity_at(self._last_scale(evidence), "fidelity", evidence)

    def _best_fidelity(self, evidence: Evidence) -> Evidence:
        search = evidence.scale_search
        scale = search.largest_finite if search else None
        return self._fidelity_at(scale or self._last_scale(evidence), "best_fidelity", evidence)

    @staticmethod
    def _last_scale(evidence: Evidence) -> float:
        scales = [s.scale_after for s in (evidence.main.steps if evidence.main else ()) if s.scale_after]
        return scales[-1] if scales else 1.0

    def _fidelity_at(self, scale: float, name: str, evidence: Evidence) -> Evidence:
        precision = self.subject.setting.precision
        if not self.batches or precision == "fp32":
            return evidence
        with ExitStack() as stack:
            self._measuring(stack)
            found = fidelity(self.subject.learn, self.batches[0], self.subject.setting, scale)
        self.journal.write("fidelity", found)
        return evidence.model_copy(update={name: found})

    def _hidden(self, evidence: Evidence) -> Evidence:
        precision = self.subject.setting.precision
        if not self.batches or precision == "fp32":
            return evidence
        with ExitStack() as stack:
            self._measuring(stack)
            found = find_hidden(self.subject.learn, self.batches, self.subject.setting)
        self.journal.write("hidden", found)
        return evidence.model_copy(update={"hidden": found})

    def _headroom(self, evidence: Evidence) -> Evidence:
        if not self.batches:
            return evidence
        with ExitStack() as stack:
            self._measuring(stack)
            found = measure_headroom(self.subject.learn, self.batches[0], self._last_scale(evidence))
        self.journal.write("headroom", found)
        return evidence.model_copy(update={"headroom": found})

    def _fp32_share(self, evidence: Evidence) -> Evidence:
        if not self.batches:
            return evidence
        with ExitStack() as stack:
            self._measuring(stack)
            setting = self.subject.setting
            replay = replay_of(self.subject.learn, self.batches[0], loss_fp32=setting.loss_fp32)
            found = fp32_share(replay, setting.precision)
        return evidence.model_copy(update={"fp32_share": found})

    def _drift(self, evidence: Evidence) -> Evidence:
        precision, learn = self.subject.setting.precision, self.subject.learn
        if not self.batches or precision == "fp32":
            return evidence
        with ExitStack() as stack:
            self._measuring(stack)
            replay = replay_of(learn, self.batches[0], loss_fp32=self.subject.setting.loss_fp32)
            found = find_drift(replay, precision, self.policy.limits.drift)
        self.journal.write("drift", found)
        return evidence.model_copy(update={"drift": found})

    def _comparison(self, evidence: Evidence) -> Evidence:
        main, twin, limits = evidence.main, evidence.legs["fp32"], self.policy.limits
        if main is None:
            return evidence
        legs = dict(evidence.legs)
        skipped = tuple(s.step for s in main.steps if s.skipped)
        found = compare(main, twin, same_steps=not skipped)
        if skipped and worse(found, limits):
            twin = self._leg(LegSpec(precision="fp32", skip_steps=skipped), "fp32 same steps")
            legs["fp32 same steps"] = twin
            found = compare(main, twin)
        scattered: list[tuple[Leg, Leg]] = []
        while worse(found, limits) and len(scattered) < self.policy.probe.noise_legs:
            pair = []
            for precision, kind in ((main.spec.precision, "main perturbed"), ("fp32", "fp32 perturbed")):
                spec = LegSpec(
                    precision=precision,
                    skip_steps=skipped if precision == "fp32" else (),
                    perturb_seed=len(scattered),
                    reseed=main.drawn != twin.drawn,
                )
                name = f"{kind} {len(scattered)}"
                legs[name] = self._leg(spec, name)
                pair.append(legs[name])
            scattered.append((pair[0], pair[1]))
            found = compare(
                main, twin, [p[1] for p in scattered], [p[0] for p in scattered], same_steps=found.same_steps
            )
            if not close_call(found, limits):
                break
        self.journal.write("comparison", found)
        return evidence.model_copy(update={"legs": legs, "comparison": found})
