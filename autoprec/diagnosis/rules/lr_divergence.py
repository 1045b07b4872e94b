"""The learning rate is too high, in every precision.

Looks like   the loss grows from step to step until it is NaN, in fp32 as well; a tenth or a hundredth of the lr trains.
Not this     a fault at the very first step or in the data (no lr helps), or one that only 16 bits have.
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Finding, Rule
from autoprec.diagnosis.fp32 import LOWER_LR, at, fp32_fails, may_be_lr
from autoprec.evidence import Evidence
from autoprec.policy import Limits
from autoprec.verify import trains


def check(evidence: Evidence, limits: Limits) -> Finding | None:
    """fp32 fails at this lr and trains at a smaller one."""
    twin = evidence.twin
    if twin is None:
        return None
    helps = [(f, leg) for name, f in LOWER_LR if (leg := evidence.legs.get(name)) is not None and trains(leg, limits)]
    if not helps:
        return None
    factor, leg = helps[0]
    lr = max((s.lr for s in twin.steps), default=0.0)
    return Finding(
        mode=RULE.mode,
        because=f"fp32 fails too ({at(twin)}); at {factor:g} of the lr it trains: loss {leg.steps[0].loss:.4g} to "
        f"{leg.final_loss:.4g} in {len(leg.steps)} steps",
        ruled_out=("16-bit arithmetic: fp32 diverges on the same batches", "the data: it is finite"),
        suggestion=f"use an lr of about {lr * factor:.3g}; learn.lr_find() suggests one",
        evidence={"lr": lr, "factor": factor, "step": len(twin.steps)},
    )


RULE = Rule(
    mode="lr_divergence",
    needs=("leg:main", "leg:fp32", *(f"leg:{name}" for name, _ in LOWER_LR)),
    check=check,
    doc=__doc__ or "",
    relevant=lambda e, limits: fp32_fails(e, limits) and may_be_lr(e),
)
