"""The policy: what autoprec may change, in which order, and from which number on it calls something a fault.

The policy is the only place where failure modes and remedies meet, and the only place with thresholds:
each field says its unit and why it has the value it has. A policy is read from YAML and is strict; an
unknown key or an impossible value is refused with its line and a suggestion (see `load_policy`).

Pure: imports no torch, no fastai.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from autoprec.evidence import Precision

__all__ = [
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
    "RemedySettings",
    "Remedies",
    "Rung",
]


class Section(BaseModel):
    """A strict, frozen part of the policy."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, use_attribute_docstrings=True)


Share = Annotated[float, Field(ge=0, le=1)]


class PrecisionSettings(Section):
    """Which precision is tried."""

    prefer: Precision = "fp16"
    """Tried where the learner carries no precision callback of its own and a 16-bit precision is available."""


class ProbeSettings(Section):
    """How long the short runs are from which the evidence comes."""

    steps: Annotated[int, Field(ge=4, le=10_000)] = 40
    """Optimizer steps of a leg; a shorter fit is probed whole. 40: the scaler needs up to 16 to settle from 2**16,
    and a quarter of the rest is a mean that one batch does not decide."""
    validation_batches: Annotated[int, Field(ge=0, le=1_000)] = 8
    """Validation batches after a leg, always the first ones. 8: enough to see poisoned statistics, cheap beside 40 steps."""
    data_batches: Annotated[int, Field(ge=1, le=10_000)] = 40
    """Training batches whose inputs and targets are measured. 40: the batches that the probe trains on."""
    noise_legs: Annotated[int, Field(ge=1, le=16)] = 2
    """Perturbed fp32 legs that tell what difference is noise. 2: the spread of three runs, for the price of two."""


class Limits(Section):
    """Where a number becomes a fault."""

    settling_skips: Annotated[int, Field(ge=0, le=64)] = 16
    """Consecutive skipped steps at the start that are normal while the scaler halves its way down. 16: from 2**16 to 1."""
    skip_rate: Share = 0.2
    """Share of skipped steps after settling that is still normal. A scale in balance skips once per growth interval
    (a few percent at the shortest usual ones); a fifth of the batches lost costs more than any remedy here."""
    run_skip_rate: Share = 0.5
    """Share of a whole short run that may be spent finding the scale: above half, the run has mostly not trained."""
    scale_floor: Annotated[float, Field(gt=0, le=65536)] = 1.0
    """Loss scale below which the scaler has given up scaling: it then shrinks gradients instead of lifting them."""
    worse_floor: Share = 0.03
    """Relative excess over the fp32 twin's loss that is never called worse. 3 %: two seeds differ by as much."""
    worse_spread: Annotated[float, Field(ge=0, le=100)] = 2.0
    """Excess over the twin is called worse beyond this many times the spread of the perturbed fp32 legs."""
    flushed_share: Share = 0.05
    """Share of a parameter's gradient elements that become zero in 16 bits from which on underflow is suspected;
    a trained layer loses well under 1 % at a working scale."""
    gradient_cosine: Annotated[float, Field(ge=-1, le=1)] = 0.99
    """Cosine between the 16-bit and the fp32 gradient below which they no longer point the same way. Rounding alone
    (2**-11 per element) leaves it above 0.9999."""
    raw_input_size: Annotated[float, Field(gt=0)] = 10.0
    """Magnitude of an input column's values from which on it counts as not normalized; standardized data stays
    below 10 deviations."""
    huge_input: Annotated[float, Field(gt=0)] = 2048.0
    """Magnitude from which on fp16 cannot hold every whole number (11 bits of mantissa): timestamps, counters."""
    progress: Share = 0.02
    """Relative fall of the training loss over a probe below which a run at a smaller lr is not called training."""
    divergence: Annotated[float, Field(gt=1)] = 3.0
    """Ratio of a leg's final to its first loss from which on it has diverged, though finite; a noisy batch or the
    warm-up's peak stays below 3."""
    explosion_ratio: Annotated[float, Field(gt=1)] = 100.0
    """Gradient norm over the running median from which on it is called an explosion rather than a large batch."""


class RemedySettings(Section):
    """Base of what every remedy can be told."""

    allow: bool = True
    """False: never used, whatever a ladder says."""


class NormalizeInputs(RemedySettings):
    """Normalize the inputs by statistics of the training set."""

    mode: Literal["check", "fix"] = "fix"
    """check: only report; fix: put the transform in."""
    batches: PositiveInt = 64
    """Training batches from which mean and deviation are taken; 64 batches of 16 give them to about 3 %."""


class ClipGradients(RemedySettings):
    """Clip the total gradient norm with fastai's GradientClip."""

    max_norm: Annotated[float, Field(gt=0)] | None = None
    """Total L2 norm; None takes `quantile` of the norms seen in the probe."""
    quantile: Share = 0.5
    """Quantile of the finite norms seen that becomes the limit: the median leaves half of the steps untouched."""


class LowerLr(RemedySettings):
    """Lower the learning rate."""

    factors: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = (0.1, 0.01)
    """Tried in this order, each times the planned lr (discriminative lrs keep their ratios)."""
    floor: Annotated[float, Field(ge=0)] = 1e-8
    """No lr below this is tried."""


class InitScale(RemedySettings):
    """Start the loss scaler from another scale."""

    factors: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Fixed factors to try instead of the scale that the evidence points to; empty: use the evidence."""
    min: Annotated[float, Field(gt=0)] = 1.0
    max: Annotated[float, Field(gt=0)] = 2.0**24
    """Bounds of the scale; fp32 gradients above 2**24 times their size lose whole mantissa steps to Inf."""


class CarryScale(RemedySettings):
    """Start the fit from the scale on which the probe settled."""


class Bf16(RemedySettings):
    """bfloat16 with the same autocast lists: fp32's range, 8 bits of mantissa."""

    native_only: bool = True
    """Only where the device computes bf16 itself (compute capability 8.0); emulated bf16 is slower than fp32."""


class Fp32(RemedySettings):
    """Full precision: no autocast, no scaler."""


class KeepModulesFp32(RemedySettings):
    """Keep single modules in fp32 (islands) inside a 16-bit run."""

    max_share: Share = 0.5
    """Share of the forward's time that islands may take; beyond it a 16-bit run has no point."""


class LossFp32(RemedySettings):
    """Compute the loss function outside autocast."""


class OnePrecisionCallback(RemedySettings):
    """Keep one precision callback of several."""


class MasterWeights(RemedySettings):
    """Cast half-precision weights up to fp32 and let autocast do the casting."""


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
    bf16: Bf16 = Bf16()
    fp32: Fp32 = Fp32()


REMEDIES: tuple[str, ...] = tuple(Remedies.model_fields)


class Rung(Section):
    """One step of a ladder: a remedy, with parameters that differ here from the policy's `remedies` section."""

    remedy: str
    """Name of a remedy."""
    parameters: dict[str, object] = {}


class Ladder(Section):
    """The remedies for one failure mode, least change first."""

    rungs: tuple[Rung, ...] = ()
    why: str | None = None
    """Required where there are no rungs: why nothing of ours can help, said to the user."""


class AuditSettings(Section):
    """What the audit file holds."""

    ledger_rows: PositiveInt = 1_000
    """Ledger rows written per leg; beyond it only every n-th is kept."""


class Policy(Section):
    """A whole policy. Load one with `autoprec.load_policy`."""

    name: str
    description: str = ""
    schema_version: Literal[1] = 1
    precision: PrecisionSettings = PrecisionSettings()
    probe: ProbeSettings = ProbeSettings()
    limits: Limits = Limits()
    max_attempts: Annotated[int, Field(ge=0, le=100)] = 12
    """Remedies tried in one run before giving up."""
    remedies: Remedies = Remedies()
    ladders: dict[str, Ladder]
    """Per failure mode."""
    audit: AuditSettings = AuditSettings()

    def ladder(self, mode: str) -> Ladder:
        """The ladder of a failure mode; one without rungs, saying so, for a mode that the policy does not name."""
        return self.ladders.get(mode, Ladder(why=f"the policy {self.name!r} has no ladder for {mode}"))
