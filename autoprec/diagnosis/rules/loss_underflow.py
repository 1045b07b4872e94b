"""A small value becomes zero inside the loss function, and a division, root or logarithm follows.

Looks like   a finite prediction and a non-finite loss; an epsilon of 1e-8 in a denominator, or a clamp at 1 - 1e-4
             that rounds to 1 in half, so that log(1 - p) is log(0).
Not this     a sum that grew too large (`loss_overflow`), or log(0) in fp32 as well (`fails_in_fp32`).
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Rule
from autoprec.diagnosis.ranges import hidden_if_behind, range_check
from autoprec.diagnosis.rules.forward_underflow import SUGGESTIONS

RULE = Rule(
    mode="loss_underflow",
    needs=("leg:main", "leg:fp32"),
    check=range_check("loss_underflow", "loss", "underflow", SUGGESTIONS),
    doc=__doc__ or "",
    more=hidden_if_behind,
)
