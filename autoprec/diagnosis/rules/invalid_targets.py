"""The targets cannot be what the loss expects.

Looks like   class labels out of range (an index error on a CPU, a lost context on CUDA), or batches in which every
             label is the loss's `ignore_index`: the mean over nothing is NaN, in every precision.
Not this     a finite loss on valid labels that overflows (see `loss_overflow`).
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Finding, Rule
from autoprec.evidence import Evidence
from autoprec.policy import Limits


def check(evidence: Evidence, _limits: Limits) -> Finding | None:
    """Labels outside the classes, or a failing batch without any counted label."""
    data, main = evidence.data, evidence.main
    if data is None or main is None:
        return None
    ctc = _ctc(evidence)
    if ctc is not None:
        return ctc
    for t in data.targets:
        if t.out_of_range:
            return Finding(
                mode=RULE.mode,
                because=f"{t.out_of_range} labels of {t.name} lie outside 0 to {(t.classes or 0) - 1} "
                f"(seen: {t.min:g} to {t.max:g}), the model predicts {t.classes} classes",
                suggestion="map the labels to 0 … n_classes - 1, or give the model one output per class",
                evidence={"min": t.min, "max": t.max, "classes": t.classes},
                repairable=False,
            )
        if t.all_ignored_batches and main.failure is not None:
            return Finding(
                mode=RULE.mode,
                because=f"in batch {t.all_ignored_batches[0]} every label is the loss's ignore_index: the mean over "
                "no label is NaN by design",
                ruled_out=("16-bit arithmetic: the same batch gives NaN in fp32",),
                suggestion="drop samples without labels, or divide the summed loss by max(1, number of labels)",
                evidence={"batches": str(t.all_ignored_batches)},
                repairable=False,
            )
    return None


def _ctc(evidence: Evidence) -> Finding | None:
    """CTC's loss is infinite exactly where no alignment exists: the target does not fit into the input's length."""
    main = evidence.main
    origin = main.origin if main else None
    if main is None or main.failure is None or origin is None or "ctc_loss" not in origin.operation.op:
        return None
    if origin.fp32 is not None and origin.fp32.finite:
        return None
    return Finding(
        mode=RULE.mode,
        because=f"at step {main.failure.step} the CTC loss has no alignment: a target is longer than its input allows "
        "(each repeated label needs a blank between)",
        where=origin.place,
        op=origin.operation.op,
        ruled_out=("16-bit arithmetic: fp32 gives infinity too",),
        suggestion="leave these samples out, downsample the inputs less, or set zero_infinity=True",
        evidence={"step": main.failure.step},
        repairable=False,
    )


RULE = Rule(mode="invalid_targets", needs=("data", "leg:main"), check=check, doc=__doc__ or "")
