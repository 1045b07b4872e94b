"""The emulator against CUDA's own autocast rules (on fake CUDA tensors) and against float64 arithmetic.

Fake CUDA tensors run the AutocastCUDA kernels of this very torch without a GPU, so the dtypes expected here
are not written down by hand. Values are compared with float64 on operands that half can hold.
"""

from __future__ import annotations

import re
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import checkpoint

from autoprec import emulation
from autoprec.emulation import CUDA_ONLY, CUDA_OP_POLICY, current_op, emulate_cuda, is_emulating

HALF, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
HALF_MAX = 65504.0
HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
MACROS = {
    "AT_FORALL_LOWER_PRECISION_FP": "low_precision",
    "AT_FORALL_FP32": "fp32",
    "AT_FORALL_FP32_SET_OPT_DTYPE": "fp32_set_dtype",
    "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE": "append_dtype",
    "AT_FORALL_PROMOTE": "promote",
}
# Registered on CUDA outside the header's lists, in the C++ source, with the policy that it was seen to have.
OUTSIDE_THE_HEADER = {
    "aten::_cudnn_rnn": "low_precision",
    "aten::cudnn_convolution": "low_precision",
    "aten::cudnn_convolution_transpose": "low_precision",
    "aten::linalg_matrix_sqrth": "fp32",
    "aten::binary_cross_entropy": "banned",
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated:UserWarning"),
    # torch's own way of finding out that a fake tensor holds no data
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning"),
]


@contextmanager
def emulated(dtype: torch.dtype = HALF, **kwargs: Any) -> Iterator[None]:
    with emulate_cuda(), torch.autocast("cpu", dtype=dtype, **kwargs):
        yield


def registrations(key: str) -> list[str]:
    return sorted(torch._C._dispatch_get_registrations_for_dispatch_key(key))


# --- The lists -----------------------------------------------------------------------------------------------


def header_lists() -> dict[str, str]:
    text = HEADER.read_text().replace("\\\n", " ")
    found = {}
    for macro, policy in MACROS.items():
        body = re.search(rf"#define {macro}\(_\)(.*)", text)
        assert body, macro
        if policy == "append_dtype":
            names = re.findall(r'"([\w.]+)"', body[1])
        else:
            names = [".".join(p.strip() for p in op.split(",")) for op in re.findall(r"_\(([^()]*)\)", body[1])]
        found |= {f"aten::{name}": policy for name in names}
    return found


@pytest.mark.skipif(not HEADER.exists(), reason="this torch ships no header")
def test_the_lists_are_those_of_the_header():
    ours = {op: policy for op, policy in CUDA_OP_POLICY.items() if op not in OUTSIDE_THE_HEADER}
    if torch.__version__.startswith("2.14."):
        assert ours == header_lists()
    else:  # an op may come or go between versions, but must not change its list
        theirs = header_lists()
        assert {op: p for op, p in theirs.items() if op in ours} == {op: p for op, p in ours.items() if op in theirs}


def test_every_registration_on_cuda_is_accounted_for():
    on_cuda = {op for op in registrations("AutocastCUDA") if op.startswith("aten::")}
    unknown = on_cuda - set(CUDA_OP_POLICY)
    assert not unknown, f"torch {torch.__version__} has new rules; add them to autoprec/emulation.py: {unknown}"
    assert set(CUDA_ONLY) <= set(CUDA_OP_POLICY)
    assert {op: CUDA_OP_POLICY[op] for op in OUTSIDE_THE_HEADER} == OUTSIDE_THE_HEADER


def test_what_is_cuda_only_has_no_cpu_kernel():
    for op, reason in CUDA_ONLY.items():
        if op in registrations("AutocastCUDA"):
            assert not torch._C._dispatch_has_kernel_for_dispatch_key(op, "CPU"), op
        assert reason


def test_every_other_rule_of_the_cpu_is_gone():
    x = torch.randn(2, 8, 8, dtype=HALF)
    with torch.autocast("cpu", dtype=HALF):
        assert F.pad(x, (1, 1, 1, 1), mode="reflect").dtype == FP32  # the CPU's rule
        assert torch.trace(x[0]).dtype == FP32
    with emulated():
        assert F.pad(x, (1, 1, 1, 1), mode="reflect").dtype == HALF
        assert torch.trace(x[0]).dtype == HALF


# --- One call for every listed op ----------------------------------------------------------------------------


class Draw:
    """Reproducible float64 tensors whose values are exact in half; ints and constants are passed as they are."""

    def __init__(self, seed: str) -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))

    def __call__(self, *shape: int, lo: float = -1, hi: float = 1) -> Tensor:
        x = torch.rand(shape, generator=self.generator, dtype=FP64) * (hi - lo) + lo
        return x.half().double()


def classes(*values: int) -> Tensor:
    return torch.tensor(values)


CONV = ((1,), (0,), (1,))
LISTED: dict[str, Callable[[Draw], tuple[Any, ...]]] = {
    # low precision
    "_convolution": lambda d: (
        *(d(2, 3, 9), d(4, 3, 3), d(4)), (1,), (0,), (1,), False, (0,), 1, False, False, True, True,
    ),
    "_convolution.deprecated": lambda d: (
        *(d(2, 3, 9), d(4, 3, 3), d(4)), (1,), (0,), (1,), False, (0,), 1, False, False, True,
    ),
    "convolution": lambda d: (d(2, 3, 9), d(4, 3, 3), d(4), (1,), (0,), (1,), False, (0,), 1),
    "conv1d": lambda d: (d(2, 3, 9), d(4, 3, 3), d(4)),
    "conv2d": lambda d: (d(2, 3, 6, 6), d(4, 3, 3, 3), d(4), (2, 2), (1, 1)),
    "conv3d": lambda d: (d(1, 2, 5, 5, 5), d(3, 2, 3, 3, 3), d(3)),
    "conv_tbc": lambda d: (d(9, 2, 3), d(3, 3, 4), d(4)),
    "conv_transpose1d": lambda d: (d(2, 3, 9), d(3, 4, 3), d(4)),
    "conv_transpose2d.input": lambda d: (d(2, 3, 6, 6), d(3, 4, 3, 3), d(4)),
    "conv_transpose3d.input": lambda d: (d(1, 2, 4, 4, 4), d(2, 3, 3, 3, 3), d(3)),
    "prelu": lambda d: (d(2, 3, 5), d(3)),
    "addmm": lambda d: (d(3, 5), d(3, 4), d(4, 5)),
    "addmv": lambda d: (d(3), d(3, 4), d(4)),
    "addr": lambda d: (d(3, 4), d(3), d(4)),
    "matmul": lambda d: (d(2, 3, 4), d(4, 5)),
    "einsum": lambda d: ("bij,bjk->bik", [d(2, 3, 4), d(2, 4, 5)]),
    "mm": lambda d: (d(3, 40), d(40, 5)),
    "mv": lambda d: (d(3, 4), d(4)),
    "linalg_vecdot": lambda d: (d(3, 4), d(3, 4)),
    "linear": lambda d: (d(6, 30), d(5, 30), d(5)),
    "addbmm": lambda d: (d(3, 5), d(2, 3, 4), d(2, 4, 5)),
    "baddbmm": lambda d: (d(2, 3, 5), d(2, 3, 4), d(2, 4, 5)),
    "bmm": lambda d: (d(2, 3, 4), d(2, 4, 5)),
    "chain_matmul": lambda d: ([d(3, 4), d(4, 5)],),
    "linalg_multi_dot": lambda d: ([d(3, 4), d(4, 5)],),
    "lstm_cell": lambda d: (d(2, 4), [d(2, 3), d(2, 3)], d(12, 4), d(12, 3), d(12), d(12)),
    "gru_cell": lambda d: (d(2, 4), d(2, 3), d(9, 4), d(9, 3), d(9), d(9)),
    "rnn_tanh_cell": lambda d: (d(2, 4), d(2, 3), d(3, 4), d(3, 3), d(3), d(3)),
    "rnn_relu_cell": lambda d: (d(2, 4), d(2, 3), d(3, 4), d(3, 3), d(3), d(3)),
    "scaled_dot_product_attention": lambda d: (d(1, 2, 5, 4), d(1, 2, 6, 4), d(1, 2, 6, 4)),
    # fp32
    "acos": lambda d: (d(9, lo=-0.9, hi=0.9),),
    "asin": lambda d: (d(9, lo=-0.9, hi=0.9),),
    "erfinv": lambda d: (d(9, lo=-0.9, hi=0.9),),
    **{op: lambda d: (d(9),) for op in ("cosh", "exp", "expm1", "sinh", "tan", "softplus")},
    **{
        op: lambda d: (d(9, lo=0.1, hi=2),)
        for op in ("log", "log10", "log2", "log1p", "reciprocal", "rsqrt")
    },
    "pow.Tensor_Scalar": lambda d: (d(9, lo=0.1, hi=2), 3),
    "pow.Tensor_Tensor": lambda d: (d(9, lo=0.1, hi=2), d(9)),
    "pow.Scalar": lambda d: (3, d(9)),
    "layer_norm": lambda d: (d(3, 8), (8,), d(8), d(8)),
    "native_layer_norm": lambda d: (d(3, 8), (8,), d(8), d(8), 1e-5),
    "rms_norm": lambda d: (d(3, 8), (8,), d(8), 1e-5),
    "group_norm": lambda d: (d(3, 8, 4), 2, d(8), d(8)),
    "frobenius_norm.dim": lambda d: (d(3, 8), (1,)),
    "nuclear_norm": lambda d: (d(4, 3),),
    "nuclear_norm.dim": lambda d: (d(2, 4, 3), (1, 2)),
    "cosine_similarity": lambda d: (d(3, 8), d(3, 8)),
    "poisson_nll_loss": lambda d: (d(3, 8), d(3, 8, lo=0, hi=2), True, False, 1e-8, 1),
    "cosine_embedding_loss": lambda d: (d(3, 8), d(3, 8), classes(1, -1, 1)),
    "nll_loss": lambda d: (d(3, 8), classes(1, 7, 0)),
    "nll_loss2d": lambda d: (d(1, 8, 2, 2), classes(1, 7, 0, 3).view(1, 2, 2)),
    "hinge_embedding_loss": lambda d: (d(3), classes(1, -1, 1)),
    "margin_ranking_loss": lambda d: (d(3), d(3), classes(1, -1, 1)),
    "multilabel_margin_loss": lambda d: (d(1, 3), classes(1, -1, 1).view(1, 3)),
    "soft_margin_loss": lambda d: (d(3), d(3)),
    "multi_margin_loss": lambda d: (d(3, 4), classes(1, 3, 0)),
    "triplet_margin_loss": lambda d: (d(3, 8), d(3, 8), d(3, 8)),
    "binary_cross_entropy_with_logits": lambda d: (d(3, 8), d(3, 8, lo=0, hi=1)),
    **{op: lambda d: (d(3, 8), d(3, 8)) for op in ("l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "kl_div")},
    "dist": lambda d: (d(3, 8), d(3, 8)),
    "pdist": lambda d: (d(3, 8),),
    "cdist": lambda d: (d(3, 8), d(4, 8)),
    "renorm": lambda d: (d(3, 8), 2, 0, 1.0),
    "logsumexp": lambda d: (d(3, 8), (1,)),
    "linalg_matrix_sqrth": lambda d: (d(3, 3) * 0 + torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=FP64)),),
    **{op: lambda d: (d(1, 2, 4), (7,)) for op in ("upsample_nearest1d", "_upsample_nearest_exact1d")},
    **{op: lambda d: (d(1, 2, 4, 4), (7, 7)) for op in ("upsample_nearest2d", "_upsample_nearest_exact2d")},
    **{op: lambda d: (d(1, 2, 3, 3, 3), (5, 5, 5)) for op in ("upsample_nearest3d", "_upsample_nearest_exact3d")},
    "upsample_linear1d": lambda d: (d(1, 2, 4), (7,), False),
    "upsample_trilinear3d": lambda d: (d(1, 2, 3, 3, 3), (5, 5, 5), False),
    **{
        op: lambda d: (d(1, 2, 4, 4), (7, 7), False)
        for op in ("upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_bicubic2d", "_upsample_bicubic2d_aa")
    },
    # fp32, by way of a dtype argument
    "prod": lambda d: (d(5, lo=0.5, hi=2),),
    "prod.dim_int": lambda d: (d(3, 5, lo=0.5, hi=2), 1),
    **{op: lambda d: (d(3, 5), 1) for op in ("softmax.int", "log_softmax.int", "cumsum")},
    "cumprod": lambda d: (d(3, 5, lo=0.5, hi=2), 1),
    "linalg_vector_norm": lambda d: (d(3, 5),),
    "linalg_matrix_norm": lambda d: (d(3, 5), 1),
    "linalg_matrix_norm.str_ord": lambda d: (d(3, 5),),
    "sum": lambda d: (d(3, 5),),
    "sum.dim_IntList": lambda d: (d(3, 5), (1,)),
    "norm.Scalar": lambda d: (d(3, 5),),
    "norm.ScalarOpt_dim": lambda d: (d(3, 5), 2, (1,)),
    # promote
    "addcdiv": lambda d: (d(3, 5), d(3, 5), d(3, 5, lo=0.5, hi=2)),
    "addcmul": lambda d: (d(3, 5), d(3, 5), d(3, 5)),
    "atan2": lambda d: (d(3, 5), d(3, 5, lo=0.5, hi=2)),
    "bilinear": lambda d: (d(3, 4), d(3, 5), d(6, 4, 5), d(6)),
    "cross": lambda d: (d(4, 3), d(4, 3), 1),
    "dot": lambda d: (d(9), d(9)),
    "vdot": lambda d: (d(9), d(9)),
    "grid_sampler": lambda d: (d(1, 2, 6, 6), d(1, 3, 3, 2), 0, 0, False),
    "index_put": lambda d: (d(4, 3), [None, classes(0, 2)], d(4, 2), True),
    "tensordot": lambda d: (d(3, 4), d(4, 5), (1,), (0,)),
    "scatter_add": lambda d: (d(3, 4), 1, classes(0, 2, 1).view(3, 1), d(3, 1)),
}

# On no list: what CUDA does follows from the dtypes given.
UNLISTED: dict[str, Callable[[Draw], tuple[Any, ...]]] = {
    "cat": lambda d: ([d(2, 3), d(2, 3)],),
    "stack": lambda d: ([d(2, 3), d(2, 3)],),
    "add.Tensor": lambda d: (d(2, 3), d(2, 3)),
    "mul.Tensor": lambda d: (d(2, 3), d(2, 3)),
    "div.Tensor": lambda d: (d(2, 3), d(2, 3, lo=0.5, hi=2)),
    "where.self": lambda d: (torch.tensor([True, False, True]), d(3), d(3)),
    **{
        op: lambda d: (d(2, 3, 4),)
        for op in ("relu", "gelu", "silu", "sigmoid", "tanh", "leaky_relu", "elu", "hardswish", "mish", "mean", "sin",
                   "erf", "log_sigmoid", "abs", "neg", "clone")
    },
    "sqrt": lambda d: (d(2, 3, lo=0.1, hi=2),),
    "mean.dim": lambda d: (d(2, 3), (1,)),
    "amax": lambda d: (d(2, 3), (1,)),
    "var.correction": lambda d: (d(2, 3), (1,)),
    "max.dim": lambda d: (d(2, 3), 1),
    "embedding": lambda d: (d(5, 3), classes(0, 4, 0)),
    "index_select": lambda d: (d(5, 3), 0, classes(0, 4, 0)),
    "batch_norm": lambda d: (d(4, 3, 5), d(3), d(3), None, None, True, 0.1, 1e-5, False),
    "instance_norm": lambda d: (d(2, 3, 8), d(3), d(3), None, None, True, 0.1, 1e-5, False),
    "max_pool1d": lambda d: (d(2, 3, 4), (2,)),
    "max_pool2d": lambda d: (d(2, 3, 4, 4), (2, 2)),
    "max_pool3d": lambda d: (d(1, 2, 4, 4, 4), (2, 2, 2)),
    "avg_pool1d": lambda d: (d(2, 3, 4), (2,)),
    "avg_pool2d": lambda d: (d(2, 3, 4, 4), (2, 2)),
    "avg_pool3d": lambda d: (d(1, 2, 4, 4, 4), (2, 2, 2)),
    "adaptive_avg_pool2d": lambda d: (d(2, 3, 5, 5), (2, 2)),
    "adaptive_avg_pool3d": lambda d: (d(1, 2, 5, 5, 5), (2, 2, 2)),
    "adaptive_max_pool2d": lambda d: (d(2, 3, 5, 5), (2, 2)),
    "reflection_pad2d": lambda d: (d(2, 3, 5, 5), (1, 1, 1, 1)),
    "replication_pad1d": lambda d: (d(2, 3, 5), (1, 1)),
    "constant_pad_nd": lambda d: (d(2, 3, 5), (1, 1)),
    "pixel_shuffle": lambda d: (d(1, 4, 3, 3), 2),
    "trace": lambda d: (d(4, 4),),
    "conv1d.padding": lambda d: (d(2, 3, 9), d(4, 3, 3), d(4), (1,), "same"),
    "conv2d.padding": lambda d: (d(2, 3, 6, 6), d(4, 3, 3, 3), d(4), (1, 1), "same"),
    "cross_entropy_loss": lambda d: (d(3, 8), classes(1, 7, 0)),
    "rrelu": lambda d: (d(3, 8),),
    "polygamma": lambda d: (1, d(3, 8, lo=0.5, hi=2)),
}


def find(name: str) -> Any:
    op = emulation._find(name)
    if op is None:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    return op


def in_dtypes(args: Any, dtypes: list[torch.dtype], *, grad: bool = False) -> Any:
    """The drawn tensors in the given dtypes, in turn (the last one for all the rest); others untouched."""
    wanted = list(dtypes)

    def cast(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype != FP64:
            return x
        dtype = wanted.pop(0) if len(wanted) > 1 else wanted[0]
        return x.to(dtype).detach().clone().requires_grad_(grad)

    return tree_map(cast, args)


def tensors(values: Any) -> list[Tensor]:
    return [t for t in tree_flatten(values)[0] if isinstance(t, Tensor)]


def floats(values: Any) -> list[Tensor]:
    return [t for t in tensors(values) if t.is_floating_point()]


def outcome(call: Callable[[], Any]) -> Any:
    """Dtypes of what is returned, or the kind of exception."""
    try:
        return [t.dtype for t in tensors(call())]
    except (RuntimeError, NotImplementedError) as error:
        return type(error).__name__


@contextmanager
def autocast_on_fake_cuda() -> Iterator[None]:
    """`torch.autocast("cuda")` turns itself off without a GPU; the switch below it does not."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode():
            yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.clear_autocast_cache()


def on_cuda(op: Any, args: Any, dtype: torch.dtype) -> Any:
    if op.name() == "aten::gru_cell":  # it asks for a driver even for fake tensors
        return [dtype]
    torch.set_autocast_dtype("cuda", dtype)
    fake = tree_map(lambda x: torch.empty(x.shape, dtype=x.dtype, device="cuda") if isinstance(x, Tensor) else x, args)
    return outcome(lambda: op(*fake))


def emulated_dtypes(op: Any, args: Any, dtype: torch.dtype) -> Any:
    with emulated(dtype):
        return outcome(lambda: op(*args))


def test_the_table_has_every_listed_op():
    callable_on_a_cpu = {op for op, policy in CUDA_OP_POLICY.items() if op not in CUDA_ONLY and policy != "banned"}
    assert {f"aten::{op}" for op in LISTED} == callable_on_a_cpu


GIVEN = [
    (HALF, [HALF]),
    (HALF, [FP32]),
    (HALF, [HALF, FP32]),
    (HALF, [FP32, HALF]),
    (BF16, [FP32]),
    (BF16, [BF16, FP32]),
    (BF16, [HALF]),  # a half tensor that strays into a bf16 region
]
# Half weights beside an fp32 input: the fake kernel does not look, the real one raises as the CPU's does.
FAKE_IS_LAX = {"batch_norm", "instance_norm"}


@pytest.mark.parametrize("name", [*LISTED, *UNLISTED])
def test_result_dtypes_are_those_of_cuda(name):
    op, drawn = find(name), {**LISTED, **UNLISTED}[name](Draw(name))
    calls = [(dtype, in_dtypes(drawn, dtypes)) for dtype, dtypes in GIVEN]
    if name in FAKE_IS_LAX:
        calls = [(dtype, args) for dtype, args in calls if args[0].dtype != FP32 or args[1].dtype == FP32]
    with autocast_on_fake_cuda():
        expected = [on_cuda(op, args, dtype) for dtype, args in calls]
    assert [emulated_dtypes(op, args, dtype) for dtype, args in calls] == expected
    # Only ops that promote refuse anything, and only the stray dtype.
    refusals = expected.count("RuntimeError")
    assert refusals == (1 if CUDA_OP_POLICY.get(f"aten::{name}") == "promote" else 0)


# --- Values --------------------------------------------------------------------------------------------------

HALF_ULP = 2.0**-11
# Results whose rounding in fp32 already shows more (they are sums of many terms, or badly conditioned).
LOW = [op for op in LISTED if CUDA_OP_POLICY[f"aten::{op}"] == "low_precision"]
PROMOTE = [op for op in LISTED if CUDA_OP_POLICY[f"aten::{op}"] == "promote"]
IN_FP32 = [op for op in LISTED if op not in LOW and op not in PROMOTE]
# Each addition rounds, in half memory: on CUDA too.
SEQUENTIAL = {"index_put", "scatter_add"}


def error(value: Tensor, exact: Tensor) -> float:
    return ((value.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def forward_backward(op: Any, args: Any, cotangents: list[Tensor] | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Floating results, and the gradients of floating operands under given cotangents."""
    out = floats(op(*args))
    leaves = [t for t in floats(args) if t.requires_grad]
    differentiable = [(o, c) for o, c in zip(out, cotangents or out, strict=True) if o.requires_grad]
    if cotangents is None or not differentiable:
        return out, []
    grads = torch.autograd.grad(
        [o for o, _ in differentiable], leaves, [c.to(o.dtype) for o, c in differentiable], allow_unused=True
    )
    return out, [g for g in grads if g is not None]


def without_grad(name: str, args: Any) -> Any:
    """Operands torch cannot differentiate by."""
    for index in {"nll_loss": (), "multi_margin_loss": (), "binary_cross_entropy_with_logits": ()}.get(name, ()):
        args[index].requires_grad_(False)
    return args


def against_float64(name: str) -> tuple[list[float], list[float], Any, list[Tensor], list[Tensor], list[Tensor]]:
    op, drawn, draw = find(name), LISTED[name](Draw(name)), Draw(name + " cotangent")
    exact_args = in_dtypes(drawn, [FP64], grad=True)
    shapes = [o.shape for o in floats(op(*exact_args))]
    cotangents = [draw(*shape) for shape in shapes]
    exact, exact_grads = forward_backward(op, exact_args, cotangents)
    with emulated():
        out, grads = forward_backward(op, in_dtypes(drawn, [HALF], grad=True), cotangents)
    assert len(grads) == len(exact_grads)
    forward = [error(o, e) for o, e in zip(out, exact, strict=True)]
    backward = [error(g, e) for g, e in zip(grads, exact_grads, strict=True)]
    return forward, backward, (op, drawn, cotangents), exact, exact_grads, grads


@pytest.mark.parametrize("name", LOW)
def test_low_precision_is_within_half_an_ulp_of_float64(name):
    forward, backward, (op, drawn, cotangents), exact, exact_grads, grads = against_float64(name)
    assert max(forward) <= HALF_ULP
    assert max(backward) <= HALF_ULP
    assert all(g.dtype == HALF for g in grads)
    try:
        stock, stock_grads = forward_backward(op, in_dtypes(drawn, [HALF], grad=True), cotangents)
    except RuntimeError:
        return  # no stock half kernel
    # Rounding what is nearly exact cannot be beaten, except by luck in the last digit of fp32.
    luck = 1e-3 * HALF_ULP
    assert all(ours <= error(o, e) + luck for ours, o, e in zip(forward, stock, exact, strict=True))
    assert all(ours <= error(g, e) + luck for ours, g, e in zip(backward, stock_grads, exact_grads, strict=True))


@pytest.mark.parametrize("name", PROMOTE)
def test_promoting_ops_stay_half_on_half_operands(name):
    forward, backward, *_ = against_float64(name)
    limit = 2 * HALF_ULP if name in SEQUENTIAL else HALF_ULP
    assert max(forward) <= limit
    assert max(backward) <= limit


@pytest.mark.parametrize("name", IN_FP32)
def test_fp32_ops_keep_fp32_and_round_only_gradients(name):
    forward, backward, (op, drawn, _), *_, grads = against_float64(name)
    assert max(forward) <= 2.0**-18
    assert max(backward, default=0.0) <= HALF_ULP
    assert all(g.dtype == HALF for g in grads)
