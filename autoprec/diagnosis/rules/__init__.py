"""The registry of rules, in causal order: what stands earlier explains what stands later.

To add a failure mode: write `rules/<mode>.py` with a `RULE`, put it into `RULES` at the place of its cause,
and give it a ladder in the policies.
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Rule
from autoprec.diagnosis.rules import (
    autocast_dtype_error,
    duplicate_precision_callbacks,
    fails_in_fp32,
    forward_overflow,
    forward_underflow,
    gradient_explosion,
    gradient_overflow,
    gradient_spike,
    gradient_underflow,
    half_precision_weights,
    invalid_targets,
    loss_overflow,
    loss_underflow,
    lr_divergence,
    no_gradient,
    nonfinite_data,
    nonfinite_metric,
    nonfinite_parameters,
    plateau,
    poisoned_buffers,
    precision_loss,
    precision_unavailable,
    scaler_misuse,
    skipped_steps,
    unnormalized_inputs,
)

__all__ = ["RULES"]

RULES: tuple[Rule, ...] = (
    # configuration and data, seen before a step is made
    duplicate_precision_callbacks.RULE,
    half_precision_weights.RULE,
    precision_unavailable.RULE,
    nonfinite_parameters.RULE,
    nonfinite_data.RULE,
    invalid_targets.RULE,
    # the model and its training settings, whatever the precision
    no_gradient.RULE,
    lr_divergence.RULE,
    gradient_explosion.RULE,
    fails_in_fp32.RULE,
    # 16 bits: the op first, what follows from it after
    autocast_dtype_error.RULE,
    unnormalized_inputs.RULE,
    forward_underflow.RULE,
    forward_overflow.RULE,
    loss_underflow.RULE,
    loss_overflow.RULE,
    poisoned_buffers.RULE,
    gradient_overflow.RULE,
    gradient_spike.RULE,
    skipped_steps.RULE,
    scaler_misuse.RULE,
    gradient_underflow.RULE,
    precision_loss.RULE,
    plateau.RULE,
    nonfinite_metric.RULE,
)
