"""A small value becomes zero inside the model, and a division, root or logarithm follows.

Looks like   an epsilon of 1e-8 (half's smallest number is 6e-8), a variance or probability that rounds to zero,
             or 1 - p that rounds to zero: then 0/0, log(0), 1/sqrt(0). fp32 has a small number there.
Not this     a value that grew too large (`forward_overflow`), or a zero that fp32 has too (`fails_in_fp32`).
"""

from __future__ import annotations

from autoprec.diagnosis.finding import Rule
from autoprec.diagnosis.ranges import hidden_if_behind, range_check

SUGGESTIONS = (
    ("log", "compute in fp32 (x.float()), or use a with-logits form / logsumexp"),
    ("div", "compute the denominator in fp32, or use an epsilon that half can hold (1e-4)"),
    ("sqrt", "add the epsilon inside the root, in fp32"),
    ("pow", "compute in fp32 (x.float())"),
    ("reciprocal", "compute in fp32 (x.float())"),
)

RULE = Rule(
    mode="forward_underflow",
    needs=("leg:main", "leg:fp32"),
    check=range_check("forward_underflow", "forward", "underflow", SUGGESTIONS),
    doc=__doc__ or "",
    more=hidden_if_behind,
)
