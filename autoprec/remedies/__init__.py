"""The registry of remedies.

To add one: write `remedies/<name>.py`, put it into `REMEDIES`, give it settings in `policy.Remedies` and a
place in the ladders of the policies.
"""

from __future__ import annotations

from typing import Any

from autoprec.remedies.base import Remedy, Subject
from autoprec.remedies.bf16 import Bf16
from autoprec.remedies.carry_scale import CarryScale
from autoprec.remedies.clip_gradients import ClipGradients
from autoprec.remedies.fp32 import Fp32
from autoprec.remedies.init_scale import InitScale
from autoprec.remedies.keep_modules_fp32 import KeepModulesFp32
from autoprec.remedies.loss_fp32 import LossFp32
from autoprec.remedies.lower_lr import LowerLr
from autoprec.remedies.master_weights import MasterWeights
from autoprec.remedies.normalize_inputs import NormalizeInputs
from autoprec.remedies.one_precision_callback import OnePrecisionCallback
from autoprec.remedies.replace_callback import ReplaceCallback
from autoprec.remedies.reset_buffers import ResetBuffers
from autoprec.remedies.skip_nonfinite_batches import SkipNonfiniteBatches

__all__ = ["REMEDIES", "Remedy", "Subject"]

REMEDIES: dict[str, Remedy[Any]] = {
    r.name: r
    for r in (
        OnePrecisionCallback(),
        MasterWeights(),
        ReplaceCallback(),
        ResetBuffers(),
        SkipNonfiniteBatches(),
        NormalizeInputs(),
        KeepModulesFp32(),
        LossFp32(),
        ClipGradients(),
        LowerLr(),
        CarryScale(),
        InitScale(),
        Bf16(),
        Fp32(),
    )
}
