"""A value passes the largest 16-bit number inside the model.

Looks like   a finite batch and finite weights, and one op whose result in fp32 is above 65504: an attention product
             scaled too late, a feed-forward sum, squares in a hand-written norm. The loss is NaN in fp16 and fine in
             fp32 and, as its range is fp32's, in bf16.
Not this     large inputs (`unnormalized_inputs`), the loss function (`loss_overflow`), gradients only
             (`gradient_overflow`), or a fault that fp32 has too (`fails_in_fp32`).
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Rule
from autoprec.diagnosis.ranges import hidden_if_behind, range_check

RULE = Rule(
    mode="forward_overflow",
    needs=("leg:main", "leg:fp32"),
    check=range_check(
        "forward_overflow",
        "forward",
        "overflow",
        (
            ("bmm", "scale before the product ((q * s) @ k) rather than after it"),
            ("masked_fill", "use torch.finfo(x.dtype).min as the mask value"),
            ("pow", "square in fp32: x.float().pow(2)"),
            ("mul", "multiply in fp32: x.float() * y"),
        ),
    ),
    doc=__doc__ or "",
    more=hidden_if_behind,
)
