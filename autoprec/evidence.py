"""Evidence: what was observed, in numbers. Never a tensor, never a judgement.

`observe/` fills these records, `diagnosis/` reads them, `audit/` writes them down. A part that is `None`
was not gathered, and a rule that needs it is *inconclusive*, never satisfied. Losses and norms keep NaN
and infinity as they were: a non-finite number here is an observation, not an error.
"""

from __future__ import annotations

import math
from typing import Literal

from autoprec.noun import Noun

__all__ = [
    "Comparison",
    "Configuration",
    "DataSample",
    "Drift",
    "Evidence",
    "Failure",
    "Feature",
    "Fidelity",
    "Fp32Value",
    "Headroom",
    "Hidden",
    "Leg",
    "LegSpec",
    "Misuse",
    "ModuleDrift",
    "ModuleHeadroom",
    "Operation",
    "Origin",
    "ParameterFidelity",
    "Place",
    "Precision",
    "ScaleSearch",
    "Step",
    "Target",
    "Where",
]

Precision = Literal["fp16", "bf16", "fp32"]
Where = Literal["input", "target", "prediction", "loss", "gradient", "weight", "buffer", "validation", "metric"]


class LegSpec(Noun):
    """What a leg runs: everything that may differ from the user's own settings."""

    precision: Precision
    lr_factor: float = 1.0
    """The planned learning rate times this."""
    clip: float | None = None
    """Gradients are clipped to this total norm (after unscaling); None leaves them alone."""
    init_scale: float | None = None
    """Loss scale at the first step; None keeps the user's."""
    skip_steps: tuple[int, ...] = ()
    """Steps whose update is left out on purpose, so that an fp32 twin takes the very steps that a 16-bit leg took."""
    perturb_seed: int | None = None
    """Weights start perturbed by a relative 2**-11 drawn with this seed: the noise that rounding alone makes."""
    reseed: bool = False
    """torch's generator starts from `perturb_seed` too: where 16 bits draw other dropout masks than fp32, that is noise
    as well."""


class Step(Noun):
    """One attempted optimizer step. Batches that only accumulate gradients are not steps."""

    step: int
    """Counts attempted steps of the leg from 0."""
    loss: float
    """Training loss of the batch, unscaled."""
    lr: float
    """Learning rate of the last parameter group."""
    grad_norm: float | None = None
    """Total L2 norm of the unscaled gradients before any clipping; None if it was not measured."""
    scale_before: float | None = None
    scale_after: float | None = None
    """Loss scale around the step; None where there is no scaler."""
    skipped: bool = False
    """True if the optimizer did not move, as the scaler found a non-finite gradient."""


class Operation(Noun):
    """An op as the dispatcher saw it, with the sizes of what went in and came out."""

    op: str
    """Name as in `aten.bmm` (of the op that was called, not of the casts around it)."""
    inputs: tuple[str, ...] = ()
    """Shape and dtype per tensor argument, as in `float16[16, 6, 64]`."""
    input_max: float | None = None
    """Largest finite magnitude over all floating inputs."""
    input_min: float | None = None
    """Smallest magnitude in the op's critical input (a divisor, else all inputs), zeros left out."""
    input_zeros: int = 0
    """How many elements of the critical input are exactly zero."""
    output_max: float | None = None
    """Largest magnitude of the output; infinite or NaN where it is."""


class Fp32Value(Noun):
    """What the fp32 twin computes at the same op, on the same batch with the same weights."""

    input_max: float | None = None
    input_min: float | None = None
    input_zeros: int = 0
    output_max: float | None = None
    finite: bool = True


class Place(Noun):
    """A place in the user's own code."""

    module: str | None = None
    """Dotted path in the model, None in the loss; "" is the model itself."""
    module_class: str | None = None
    file: str | None = None
    line: int | None = None
    source: str | None = None
    """The source line, stripped."""
    function: str | None = None

    def __str__(self) -> str:
        """`file.py:12 in forward (layers.0)`, as much of it as is known."""
        text = f"{self.file}:{self.line}" if self.file and self.line else ""
        if self.function:
            text += f" in {self.function}"
        if self.module:
            text += f" (module {self.module})"
        return text.strip() or "an unknown place"


class Origin(Noun):
    """Where the first non-finite value of a failing step was made."""

    phase: Literal["forward", "loss", "backward"]
    place: Place
    operation: Operation
    fp32: Fp32Value | None = None
    """None: the twin has no op at the same place, or was not run."""
    ops_watched: int = 0
    fails_from_start: bool | None = None
    """In fp32, from the weights that the leg started with, the same batch is not finite either; None: not tried."""


class Misuse(Noun):
    """A callback of the user's that touches gradients or scaler where it must not."""

    callback: str
    """Class name."""
    what: Literal["unscales", "changes scaled gradients"]
    place: Place
    ratio: float | None = None
    """Gradient norm after over before; None for a call that changes none."""
    clips_to: float | None = None
    """Norm of the unscaled gradients to which it was seen to clip; None if it was not."""


class Failure(Noun):
    """The first thing in a leg that was not finite, or an exception."""

    step: int
    """Attempted step at which it was seen (a batch inside validation counts the last training step)."""
    where: Where | Literal["exception"]
    names: tuple[str, ...] = ()
    """Parameters, buffers, inputs or metrics that are not finite (the first few)."""
    error: str | None = None
    """`TypeName: message` of an exception."""
    place: Place | None = None
    """For an exception: the innermost frame that is not of torch, fastai or autoprec."""
    phase: Literal["forward", "loss", "backward"] | None = None
    """For an exception: what was being computed."""


class Leg(Noun):
    """One probe in one precision."""

    spec: LegSpec
    steps: tuple[Step, ...] = ()
    planned_steps: int = 0
    """Steps that the leg would have made had nothing stopped it."""
    failure: Failure | None = None
    """None: every loss, prediction, weight and buffer stayed finite and nothing was raised."""
    origin: Origin | None = None
    validation: tuple[float, ...] = ()
    """Loss of each validation batch after the last step, in order."""
    metrics: dict[str, float] = {}
    """The user's metrics on these batches."""
    poisoned_buffers: tuple[str, ...] = ()
    misuses: tuple[Misuse, ...] = ()
    drawn: str | None = None
    """Digest of torch's generator after the last training step: legs that drew the same numbers agree in it."""
    param_change: float | None = None
    """Relative L2 distance that the weights moved, ||w1 - w0|| / ||w0||."""
    seconds: float = 0.0
    peak_memory: int | None = None
    """Bytes on the accelerator; None on a CPU."""

    @property
    def losses(self) -> list[float]:
        """Training losses in order."""
        return [s.loss for s in self.steps]

    @property
    def taken(self) -> list[Step]:
        """Steps that moved the optimizer."""
        return [s for s in self.steps if not s.skipped]

    @property
    def final_loss(self) -> float:
        """Mean training loss of the last quarter of the attempted steps; NaN if there are none."""
        tail = self.losses[-max(1, len(self.steps) // 4) :]
        return sum(tail) / len(tail) if tail else math.nan

    @property
    def validation_loss(self) -> float | None:
        """Mean over the validation batches; None if there were none."""
        return sum(self.validation) / len(self.validation) if self.validation else None


class Feature(Noun):
    """One input column or channel over the sampled batches."""

    name: str
    """As in `input 0, column 3`, with the user's column name where the loader has one."""
    min: float
    max: float
    mean: float
    std: float
    """Over finite values; NaN if there are none."""
    typical: float = 0.0
    """Median over samples of the root mean square of the sample's values: the size that most samples have."""
    integer_like: bool = False
    """Every sampled value is a whole number."""
    nonfinite: int = 0


class Target(Noun):
    """One target tensor over the sampled batches."""

    name: str
    dtype: str
    min: float
    max: float
    nonfinite: int = 0
    all_ignored_batches: tuple[int, ...] = ()
    """Batches in which every target is the loss's ignore_index."""
    out_of_range: int = 0
    """Class labels below 0 (other than ignore_index) or at or above the number of predicted classes."""
    classes: int | None = None


class DataSample(Noun):
    """Inputs and targets of a bounded number of training batches."""

    batches: int
    features: tuple[Feature, ...] = ()
    targets: tuple[Target, ...] = ()
    nonfinite_rows: tuple[tuple[int, int], ...] = ()
    """(batch, row) of the first non-finite inputs."""
    nonfinite_target_rows: tuple[tuple[int, int], ...] = ()
    batch_sizes: tuple[int, ...] = ()


class Configuration(Noun):
    """What is attached to the learner and what this machine can do; read, not run."""

    device: str
    emulated: bool = False
    requested: Precision
    """Precision asked for: what the learner carries, else the policy's preference."""
    asked_by_user: bool = False
    precision_callbacks: tuple[str, ...] = ()
    scaler_kwargs: dict[str, float] = {}
    half_parameters: tuple[str, ...] = ()
    nonfinite_parameters: tuple[str, ...] = ()
    trainable_parameters: int = 0
    fp16_available: bool = True
    bf16_available: bool = True
    bf16_native: bool = True
    unavailable_reason: str | None = None
    loss: str = ""
    batch_norm: tuple[str, ...] = ()
    loader_steps: int = 0
    planned_steps: int = 0
    has_validation: bool = True
    normalized: bool = False
    """A fastai Normalize transform (or a normalizing first layer) is in the pipeline."""


class ScaleSearch(Noun):
    """Which loss scales give finite gradients on the first batches, from the starting weights."""

    largest_finite: float | None
    """Largest power of two tried whose gradients were finite on every batch; None if none down to `smallest_tried`."""
    smallest_tried: float
    batches: int
    smallest_unflushed: float | None = None
    """Smallest power of two at which no parameter is predicted to lose more than the policy's share of its gradient
    to zero, from the fp32 gradient's magnitudes; None if there is none. What is lost inside the network is not seen."""
    origin: Origin | None = None
    """Where the gradient overflows at the smallest scale tried."""


class ModuleHeadroom(Noun):
    """How many doublings remain below half's largest number, in one module."""

    name: str
    """Dotted path; "" is the model itself, "(loss)" the loss function."""
    forward: float | None = None
    """log2(65504 / largest fp32 output of its ops); negative beyond. None: no floating output."""
    backward: float | None = None
    """The same for the gradients of its ops at `Headroom.scale`."""


class Headroom(Noun):
    """Room below 65504 on one batch, measured on fp32 values; sorted, the tightest first."""

    scale: float
    modules: tuple[ModuleHeadroom, ...]


class ParameterFidelity(Noun):
    """How one parameter's gradient survives 16 bits on one batch."""

    name: str
    flushed: float
    """Share of elements that are zero in 16 bits and not in fp32, at the current scale."""
    cosine: float
    relative_error: float
    """||g16 - g32|| / ||g32||; NaN where g32 is zero."""


class Fidelity(Noun):
    """Gradients of one batch in 16 bits beside fp32, from the same weights."""

    scale: float
    parameters: tuple[ParameterFidelity, ...]
    loss_16: float
    loss_32: float

    @property
    def flushed(self) -> float:
        """Largest share of flushed elements over the parameters; 0 if there are none."""
        return max((p.flushed for p in self.parameters), default=0.0)


class Hidden(Noun):
    """Was a non-finite value made, and absorbed again, in a batch whose loss is finite (x / inf is 0)?"""

    batches: int
    origin: Origin | None = None
    """None: every value of the forward pass and the loss was finite wherever fp32's is."""


class ModuleDrift(Noun):
    """How far one module's values are from fp32's."""

    name: str
    """Dotted path; "" is the model itself, "(loss)" the loss function."""
    error: float
    """Largest error over the module's own ops, in units of the value's deviation from sample to sample."""


class Drift(Noun):
    """Where finite 16-bit values first leave fp32's by more than a share of their variation."""

    place: Place | None = None
    """None: no op passed the limit."""
    op: str | None = None
    error: float | None = None
    """Root mean square of the difference at that op, over the standard deviation of fp32's value."""
    size: float | None = None
    """Mean magnitude of fp32's value there."""
    variation: float | None = None
    """Standard deviation of fp32's value there."""
    largest: float
    """Largest such error over all ops."""
    ops_compared: int
    modules: tuple[ModuleDrift, ...] = ()
    """The worst first."""


class Comparison(Noun):
    """The main leg's losses beside the fp32 twin's.

    An excess is (main - twin) / max(|twin|, |twin's first loss - twin|): relative to the loss itself or to how far
    the twin has come, whichever is larger, so that losses near zero or below it compare sensibly.
    """

    excess: float
    """Of the mean training loss over the last quarter of the steps."""
    excess_validation: float | None = None
    spread: float | None = None
    """Largest magnitude of the same excess over the perturbed fp32 legs; None if they were not needed."""
    spread_validation: float | None = None
    least: float | None = None
    """The same excess of the best of the perturbed 16-bit legs over the worst of the perturbed fp32 legs (each with the
    unperturbed one): what is left when chance has favoured fp32. None if they were not needed."""
    least_validation: float | None = None
    stuck: bool = False
    """No weight of the main leg moved, and the twin's did."""
    same_steps: bool = True
    """The twin took the very steps that the main leg took (it left out the skipped ones)."""


class Evidence(Noun):
    """All that is known about one learner, one planned fit. Missing parts are None or absent."""

    configuration: Configuration
    data: DataSample | None = None
    legs: dict[str, Leg] = {}
    """By name: "main" (the requested precision), "fp32", "bf16", "fp32 lr/10", "fp32 clip", "fp32 perturbed 0", …"""
    scale_search: ScaleSearch | None = None
    fidelity: Fidelity | None = None
    """At the scale that the main leg ended with."""
    best_fidelity: Fidelity | None = None
    """At the largest scale that keeps the gradients finite; what a better scale could do at most."""
    hidden: Hidden | None = None
    drift: Drift | None = None
    headroom: Headroom | None = None
    fp32_share: float | None = None
    """Share of the forward pass' FLOPs that are computed in fp32 in a 16-bit run; None if not measured."""
    comparison: Comparison | None = None

    @property
    def main(self) -> Leg | None:
        """The leg in the requested precision."""
        return self.legs.get("main")

    @property
    def twin(self) -> Leg | None:
        """The fp32 twin of the main leg (the main leg itself if that is fp32)."""
        if self.configuration.requested == "fp32":
            return self.main
        return self.legs.get("fp32")

    def has(self, need: str) -> bool:
        """Whether the evidence named `need` was gathered ("leg:<name>", or the name of a field)."""
        if need == "leg:fp32" and self.configuration.requested == "fp32":
            need = "leg:main"
        if need.startswith("leg:"):
            return need[4:] in self.legs
        return getattr(self, need) is not None
