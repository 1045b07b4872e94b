"""The policy: what autoprec may change, in which order, and from which number on it calls something a fault.

The policy is the only place where failure modes and remedies meet, and the only place with thresholds:
each field says its unit and why it has the value it has. A policy is read from YAML and is strict; an
unknown key or an impossible value is refused with its line and a suggestion (see `load_policy`).

Pure: imports no torch, no fastai.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from autoprec.errors import PolicyError
from autoprec.evidence import Precision
from autoprec.policy_words import closest, listed, refusals
from autoprec.policy_yaml import Document, Fault, Node, in_order, open_document, shipped, spelled_out, written

__all__ = [
    "FAILURE_MODES",
    "REMEDIES",
    "AuditSettings",
    "Bf16",
    "CarryScale",
    "ClipGradients",
    "Fp32",
    "InitScale",
    "KeepModulesFp32",
    "Ladder",
    "Limits",
    "LossFp32",
    "LowerLr",
    "MasterWeights",
    "NormalizeInputs",
    "OnePrecisionCallback",
    "Policy",
    "PrecisionSettings",
    "ProbeSettings",
    "Remedies",
    "RemedySettings",
    "ReplaceCallback",
    "ResetBuffers",
    "Rung",
    "SkipNonfiniteBatches",
    "load_policy",
    "policy_to_yaml",
    "shipped_policies",
]

FAILURE_MODES: tuple[str, ...] = (
    "nonfinite_data",
    "unnormalized_inputs",
    "invalid_targets",
    "nonfinite_parameters",
    "no_gradient",
    "fails_in_fp32",
    "lr_divergence",
    "gradient_explosion",
    "forward_overflow",
    "forward_underflow",
    "loss_overflow",
    "loss_underflow",
    "precision_loss",
    "poisoned_buffers",
    "gradient_overflow",
    "gradient_spike",
    "gradient_underflow",
    "skipped_steps",
    "plateau",
    "precision_unavailable",
    "duplicate_precision_callbacks",
    "half_precision_weights",
    "autocast_dtype_error",
    "scaler_misuse",
    "nonfinite_metric",
)
"""What a ladder can be for. A new failure mode gets its name here and a ladder in every shipped policy."""


# ---- the schema ----


class Section(BaseModel):
    """A strict, frozen part of the policy."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


# Strict, so that neither "1" nor true passes for a number, nor 1 for true.
Flag = Annotated[bool, Strict()]
Whole = Annotated[int, Strict()]
Real = Annotated[float, Strict()]
Share = Annotated[Real, Field(ge=0, le=1)]


class PrecisionSettings(Section):
    """Which precision is tried."""

    prefer: Precision = "fp16"
    """Tried where the learner carries no precision callback of its own and a 16-bit precision is available."""


class ProbeSettings(Section):
    """How long the short runs are from which the evidence comes."""

    steps: Annotated[Whole, Field(ge=4, le=10_000)] = 40
    """Optimizer steps of a leg; a shorter fit is probed whole. 40: the scaler needs up to 16 to settle from 2**16,
    and a quarter of the rest is a mean that one batch does not decide."""
    validation_batches: Annotated[Whole, Field(ge=0, le=1_000)] = 8
    """Validation batches after a leg, always the first ones. 8: enough to see poisoned statistics, and cheap beside
    40 steps."""
    data_batches: Annotated[Whole, Field(ge=1, le=10_000)] = 40
    """Training batches whose inputs and targets are measured. 40: the batches that the probe trains on."""
    late_failures: Annotated[Whole, Field(ge=0, le=10)] = 2
    """How often a fit that fails after the probe's last step is probed again up to the failing step and repaired.
    2: a second cause behind the first; beyond that the fit is restarted more often than it is trained."""
    necessity_probes: Annotated[Whole, Field(ge=0, le=32)] = 4
    """Probes spent on taking kept remedies back one by one, to see that each is needed. 4: few repairs are longer."""
    noise_legs: Annotated[Whole, Field(ge=1, le=16)] = 3
    """Pairs of perturbed legs (fp32 and 16 bits) at most that tell what difference is noise. 3: the best of four
    against the worst of four; a clear case ends after the first pair."""


class Limits(Section):
    """Where a number becomes a fault."""

    settling_skips: Annotated[Whole, Field(ge=0, le=64)] = 16
    """Consecutive skipped steps at the start that are normal while the scaler halves its way down. 16: from 2**16
    to 1."""
    skip_rate: Share = 0.2
    """Share of skipped steps after settling that is still normal. A scale in balance skips once per growth interval
    (a few percent at the shortest usual ones); a fifth of the batches lost costs more than any remedy here."""
    run_skip_rate: Share = 0.5
    """Share of a whole short run that may be spent finding the scale: above half, the run has mostly not trained."""
    scale_floor: Annotated[Real, Field(gt=0, le=65536)] = 1.0
    """Loss scale below which the scaler has given up scaling: it then shrinks gradients instead of lifting them."""
    worse_floor: Share = 0.03
    """Relative excess over the fp32 twin's loss that is never called worse. 3 %: two seeds differ by as much."""
    worse_spread: Annotated[Real, Field(ge=0, le=100)] = 2.0
    """Excess over the twin is called worse beyond this many times the spread of the perturbed fp32 legs."""
    flushed_share: Share = 0.05
    """Share of a parameter's gradient elements that become zero in 16 bits from which on underflow is suspected;
    a trained layer loses well under 1 % at a working scale."""
    gradient_cosine: Annotated[Real, Field(ge=-1, le=1)] = 0.99
    """Cosine between the 16-bit and the fp32 gradient below which they no longer point the same way. Rounding alone
    (2**-11 per element) leaves it above 0.9999."""
    drift: Annotated[Real, Field(gt=0)] = 0.1
    """Share of a value's standard deviation by which 16 bits may differ from fp32 before its signal counts as lost;
    a tenth is a signal-to-noise ratio of 20 dB, where rounding alone (2**-11 of the size) leaves 60."""
    raw_input_size: Annotated[Real, Field(gt=0)] = 10.0
    """Magnitude of an input column's values from which on it counts as not normalized; standardized data stays
    below 10 deviations."""
    progress: Share = 0.02
    """Relative fall of the training loss over a probe below which a run at a smaller lr is not called training."""
    divergence: Annotated[Real, Field(gt=1)] = 3.0
    """Ratio of a leg's final to its first loss from which on it has diverged, though finite; a noisy batch or the
    warm-up's peak stays below 3."""
    explosion_ratio: Annotated[Real, Field(gt=1)] = 100.0
    """Gradient norm over the running median from which on it is called an explosion rather than a large batch."""


class RemedySettings(Section):
    """Base of what every remedy can be told."""

    allow: Flag = True
    """False: never used, whatever a ladder says."""

    def variants(self) -> tuple[Self, ...]:
        """The settings one by one, where several are to be tried in order; by default just these."""
        return (self,)


class NormalizeInputs(RemedySettings):
    """Normalize the inputs by statistics of the training set."""

    mode: Literal["check", "fix"] = "fix"
    """check: only report; fix: put the transform in."""
    batches: Annotated[Whole, Field(gt=0)] = 64
    """Training batches from which mean and deviation are taken; 64 batches of 16 give them to about 3 %."""


class ClipGradients(RemedySettings):
    """Clip the total gradient norm with fastai's GradientClip."""

    max_norm: Annotated[Real, Field(gt=0)] | None = None
    """Total L2 norm; None takes `quantile` of the norms seen in the probe."""
    quantile: Share = 0.5
    """Quantile of the finite norms seen that becomes the limit: the median leaves half of the steps untouched."""


class LowerLr(RemedySettings):
    """Lower the learning rate."""

    factors: Annotated[tuple[Annotated[Real, Field(gt=0, lt=1)], ...], Field(min_length=1)] = (0.3, 0.1, 0.03, 0.01)
    """Tried in this order, each times the planned lr (discriminative lrs keep their ratios). Half decades down to a
    hundredth: the first that trains as well as fp32 was seen to is kept."""
    floor: Annotated[Real, Field(ge=0)] = 1e-8
    """No lr below this is tried."""

    def variants(self) -> tuple[Self, ...]:
        """One per factor."""
        return tuple(self.model_copy(update={"factors": (f,)}) for f in self.factors)


class InitScale(RemedySettings):
    """Start the loss scaler from another scale."""

    factors: tuple[Annotated[Real, Field(gt=0)], ...] = ()
    """Fixed factors to try instead of the scale that the evidence points to; empty: use the evidence."""
    min: Annotated[Real, Field(gt=0)] = 1.0
    """Smallest loss scale to start from; below 1 it shrinks gradients instead of lifting them."""
    max: Annotated[Real, Field(gt=0)] = 2.0**24
    """Largest loss scale to start from; fp32 gradients above 2**24 times their size lose whole mantissa steps to
    Inf."""

    @model_validator(mode="after")
    def _min_is_below_max(self) -> Self:
        if self.min > self.max:
            seen = f"min {self.min:g}, max {self.max:g}"
            raise _refusal(seen, "a min that is not above max", at=("min",))
        return self

    def variants(self) -> tuple[Self, ...]:
        """One per factor, or the one that the evidence points to."""
        return tuple(self.model_copy(update={"factors": (f,)}) for f in self.factors) or (self,)


class CarryScale(RemedySettings):
    """Start the fit from the scale on which the probe settled."""


class Bf16(RemedySettings):
    """bfloat16 with the same autocast lists: fp32's range, 8 bits of mantissa."""

    native_only: Flag = True
    """Only where the device computes bf16 itself (compute capability 8.0); emulated bf16 is slower than fp32."""


class Fp32(RemedySettings):
    """Full precision: no autocast, no scaler."""


class KeepModulesFp32(RemedySettings):
    """Keep single modules in fp32 (islands) inside a 16-bit run."""

    max_share: Share = 0.5
    """Share of the forward's time that islands may take; beyond it a 16-bit run has no point."""
    max_islands: Annotated[Whole, Field(ge=1, le=100)] = 8
    """How often the set of islands may grow in one repair. 8: a fault in every layer is better met by bf16."""


class LossFp32(RemedySettings):
    """Compute the loss function outside autocast."""


class OnePrecisionCallback(RemedySettings):
    """Keep one precision callback of several."""


class MasterWeights(RemedySettings):
    """Cast half-precision weights up to fp32 and let autocast do the casting."""


class ResetBuffers(RemedySettings):
    """Reset BatchNorm statistics that are not finite and estimate them anew."""

    batches: Annotated[Whole, Field(ge=1, le=10_000)] = 32
    """Training batches from which the statistics are estimated; 32 batches of 16 give a mean to about 5 %."""


class SkipNonfiniteBatches(RemedySettings):
    """Leave out batches whose inputs or targets are not finite."""

    allow: Flag = False
    """Off unless you say so: leaving data out is a decision about the data."""
    max_share: Share = 0.1
    """Share of the sampled batches that may be left out; a tenth missing is a broken source, not a few bad rows."""


class ReplaceCallback(RemedySettings):
    """Take out a callback that misuses the scaler; where it was seen to clip, fastai's GradientClip takes its place."""

    allow: Flag = False
    """Off unless you say so: the callback is yours and may do more than what was seen."""


class Remedies(Section):
    """Settings of each remedy, by its name."""

    normalize_inputs: NormalizeInputs = NormalizeInputs()
    clip_gradients: ClipGradients = ClipGradients()
    lower_lr: LowerLr = LowerLr()
    init_scale: InitScale = InitScale()
    carry_scale: CarryScale = CarryScale()
    keep_modules_fp32: KeepModulesFp32 = KeepModulesFp32()
    loss_fp32: LossFp32 = LossFp32()
    one_precision_callback: OnePrecisionCallback = OnePrecisionCallback()
    master_weights: MasterWeights = MasterWeights()
    reset_buffers: ResetBuffers = ResetBuffers()
    skip_nonfinite_batches: SkipNonfiniteBatches = SkipNonfiniteBatches()
    replace_callback: ReplaceCallback = ReplaceCallback()
    bf16: Bf16 = Bf16()
    fp32: Fp32 = Fp32()


REMEDIES: tuple[str, ...] = tuple(Remedies.model_fields)
_SETTINGS: dict[str, type[RemedySettings]] = {name: type(settings) for name, settings in Remedies()}


def _refusal(seen: str, allowed: str, options: tuple[str, ...] = (), at: tuple[str, ...] = ()) -> PydanticCustomError:
    """A refusal that `policy_yaml.refusals` can tell in words: what was seen, what is allowed, what may be meant."""
    told = {"seen": seen, "allowed": allowed, "options": options, "at": at}
    return PydanticCustomError("policy", "value seen {seen}; allowed: {allowed}", told)


def _refused_inside(errors: list[Any], model: type[BaseModel]) -> PydanticCustomError:
    """Refusals of a part that was checked by a model of its own; their places are counted from here."""
    text = "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in errors)
    return PydanticCustomError("parameters", "{text}", {"text": text, "errors": errors, "model": model})


def _known_remedy(name: str) -> str:
    if name not in REMEDIES:
        raise _refusal(repr(name), f"a remedy: {', '.join(REMEDIES)}", REMEDIES)
    return name


def _known_mode(name: str) -> str:
    if name not in FAILURE_MODES:
        raise _refusal(repr(name), f"a failure mode: {listed(FAILURE_MODES, name)}", FAILURE_MODES)
    return name


class Rung(Section):
    """One step of a ladder: a remedy, with parameters that differ here from the policy's `remedies` section.

    In YAML `bf16`, or `lower_lr: {factors: [0.1]}`.
    """

    model_config = ConfigDict(json_schema_extra={"in_words": "a remedy, or one remedy with its parameters below it"})

    remedy: Annotated[str, AfterValidator(_known_remedy)]
    """Name of a remedy."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """JSON-able, by the names of that remedy's settings."""

    @field_validator("parameters")
    @classmethod
    def _parameters_are_settings(cls, parameters: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "remedy" not in info.data:  # refused already: nothing to measure the parameters by
            return parameters
        model = _SETTINGS[info.data["remedy"]]
        try:
            settings = model.model_validate(parameters)
        except ValidationError as error:
            # A refusal of the whole (no loc) is of parameters beside defaults, which is not how they will be used:
            # `Policy` judges them beside its own settings.
            errors = [refused for refused in error.errors() if refused["loc"]]
            if errors:
                raise _refused_inside(errors, model) from None
            return parameters
        return settings.model_dump(mode="json", include=set(parameters))


_LADDER_IN_WORDS = 'a list of remedies, or {rungs: [], why: "why nothing can help"}'


class Ladder(Section):
    """The remedies for one failure mode, least change first.

    In YAML `[lower_lr, bf16]`, or `{rungs: [], why: "..."}`.
    """

    model_config = ConfigDict(json_schema_extra={"in_words": _LADDER_IN_WORDS})

    rungs: tuple[Rung, ...] = ()
    why: str | None = None
    """Required where there are no rungs: why nothing of ours can help, said to the user."""

    @model_validator(mode="after")
    def _empty_says_why(self) -> Self:
        if not self.rungs and not (self.why or "").strip():
            raise _refusal("an empty ladder without a why", _LADDER_IN_WORDS)
        return self


class AuditSettings(Section):
    """What the audit file holds."""

    ledger_rows: Annotated[Whole, Field(gt=0)] = 1_000
    """Ledger rows written per leg; beyond it only every n-th is kept."""


def _with_extends(schema: dict[str, Any]) -> None:
    schema["properties"]["extends"] = {"type": "string"}  # `load_policy` resolves it; a Policy has it no more


class Policy(Section):
    """A whole policy. Load one with `autoprec.load_policy`."""

    model_config = ConfigDict(json_schema_extra=_with_extends)

    name: str
    """What the audit and messages call it; in a file, the file's name unless it is stated."""
    description: str = ""
    schema_version: Literal[1] = 1
    precision: PrecisionSettings = PrecisionSettings()
    probe: ProbeSettings = ProbeSettings()
    limits: Limits = Limits()
    max_attempts: Annotated[Whole, Field(ge=0, le=100)] = 12
    """Remedies tried in one run before giving up."""
    remedies: Remedies = Remedies()
    ladders: dict[Annotated[str, AfterValidator(_known_mode)], Ladder] = Field(
        json_schema_extra={"in_words": "a ladder per failure mode"}
    )
    """Per failure mode."""
    audit: AuditSettings = AuditSettings()

    @model_validator(mode="after")
    def _rungs_fit_their_remedies(self) -> Self:
        errors = [
            refused | {"loc": ("ladders", mode, "rungs", i, "parameters", *refused["loc"])}
            for mode, ladder in self.ladders.items()
            for i, rung in enumerate(ladder.rungs)
            for refused in self._refused(rung)
        ]
        if errors:
            raise _refused_inside(errors, Policy)
        return self

    def _refused(self, rung: Rung) -> list[dict[str, Any]]:
        try:
            self.settings(rung)
        except ValidationError as error:
            return [dict(refused) for refused in error.errors()]
        return []

    def ladder(self, mode: str) -> Ladder:
        """The ladder of a failure mode; one without rungs, saying so, for a mode that the policy does not name."""
        return self.ladders.get(mode, Ladder(why=f"the policy {self.name!r} has no ladder for {mode}"))

    def settings(self, rung: Rung) -> RemedySettings:
        """What a rung's remedy is told: the policy's settings of it, with the rung's own parameters over them."""
        general: RemedySettings = getattr(self.remedies, rung.remedy)
        return type(general).model_validate(general.model_dump() | rung.parameters)


# ---- loading and writing ----


def shipped_policies() -> tuple[str, ...]:
    """The names of the policies that come with autoprec, sorted."""
    return tuple(shipped())


def load_policy(source: str | os.PathLike[str] | Mapping[str, Any] | Policy) -> Policy:
    """Load a policy and check it whole.

    A policy may state `extends: NAME_OR_PATH` (a path counts from the file that says so) and then only what
    differs: sections are laid over the other's key by key, a ladder replaces the other's. Without `extends` every
    failure mode needs a ladder, or an empty one that says why.

    Args:
        source: the name of a shipped policy (`"never-fp32"`, or `"never_fp32"`), the path of a YAML file, a mapping
            of the same shape, or a `Policy`, which is returned as it is.

    Returns:
        The policy.

    Raises:
        PolicyError: it cannot be used. All faults are listed, each with its line, the value seen and what is allowed.
    """
    if isinstance(source, Policy):
        return source
    if not isinstance(source, str | os.PathLike | Mapping):
        raise PolicyError(
            f"cannot use the policy: value seen {source!r}; allowed: the name of a shipped policy "
            f"({', '.join(shipped())}), the path of a YAML file, a mapping, or a Policy"
        )
    document = open_document(source)
    root = spelled_out(document.root)
    faults = document.faults + _missing_ladders(root, document)
    try:
        policy = Policy.model_validate({"name": document.name, "ladders": {}} | root.plain())
    except ValidationError as error:
        faults += refusals(error, Policy, root)
    if faults:
        raise PolicyError(f"cannot use the policy {document.title}:\n  " + "\n  ".join(map(str, in_order(faults))))
    return policy


def _missing_ladders(root: Node, document: Document) -> list[Fault]:
    ladders, beyond = root.child(("ladders",))
    present = {} if beyond else ladders.value
    if not document.complete or not isinstance(present, dict):
        return []
    # A misspelt mode is a fault already; that the right one is missing would say the same again.
    meant = {near for name in present for near in closest(name, FAILURE_MODES)[:1]}
    missing = [mode for mode in FAILURE_MODES if mode not in present and mode not in meant]
    if not missing:
        return []
    names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    allowed = "a ladder for every failure mode, or `extends: default` and only what differs"
    return [ladders.fault(f"no ladder for {names}; allowed: {allowed}", beyond)]


def policy_to_yaml(policy: Policy) -> str:
    """A policy as YAML, every value written out, ladders in short form; loading it gives the same policy."""
    return written(policy.model_dump(mode="json"))
