"""A value passes the largest 16-bit number inside the loss function.

Looks like   a finite prediction and a non-finite loss: fastai casts the prediction to fp32, but the loss runs inside
             autocast, so a matmul, einsum or bmm in it is a 16-bit product (Gram matrix, dice sum, similarities).
Not this     a prediction that is not finite already (`forward_overflow`).
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Rule
from autoprec.diagnosis.ranges import hidden_if_behind, range_check

RULE = Rule(
    mode="loss_overflow",
    needs=("leg:main", "leg:fp32"),
    check=range_check(
        "loss_overflow",
        "loss",
        "overflow",
        (
            ("mm", "divide before the product, or compute it under torch.autocast(..., enabled=False) in fp32"),
            ("exp", "use logsumexp, or subtract the row maximum first"),
            ("dot", "write the sum of products as (a.float() * b.float()).sum()"),
        ),
    ),
    doc=__doc__ or "",
    more=hidden_if_behind,
)
