"""The emulator against CUDA's own autocast rules (on fake CUDA tensors) and against float64 arithmetic.

Fake CUDA tensors run the AutocastCUDA kernels of this very torch without a GPU, so the dtypes expected here
are not written down by hand. Values are compared with float64 on operands that half can hold.
"""

from __future__ import annotations

import re
import threading
import warnings
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import checkpoint

from autoprec import emulation
from autoprec.emulation import CUDA_OP_POLICY, NOT_OVERRIDDEN, current_op, emulate_cuda, is_emulating

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
    on_cuda = set(registrations("AutocastCUDA"))
    ours = {op: p for op, p in CUDA_OP_POLICY.items() if op in on_cuda and op not in OUTSIDE_THE_HEADER}
    assert ours == header_lists()


def test_every_registration_on_cuda_is_accounted_for():
    on_cuda = {op for op in registrations("AutocastCUDA") if op.startswith("aten::")}
    unknown = on_cuda - set(CUDA_OP_POLICY)
    assert not unknown, f"torch {torch.__version__} has new rules; add them to autoprec/emulation.py: {unknown}"
    assert set(NOT_OVERRIDDEN) <= set(CUDA_OP_POLICY)
    assert {op: CUDA_OP_POLICY[op] for op in OUTSIDE_THE_HEADER} == OUTSIDE_THE_HEADER


def test_what_is_not_overridden_has_a_reason_and_no_cpu_kernel():
    for op, reason in NOT_OVERRIDDEN.items():
        assert reason
        if op in registrations("AutocastCUDA") and "name" not in op.partition(".")[2].lower():
            assert not torch._C._dispatch_has_kernel_for_dispatch_key(op, "CPU"), op


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


LISTED: dict[str, Callable[[Draw], tuple[Any, ...]]] = {
    # low precision
    "_convolution": lambda d: (
        *(d(2, 3, 9), d(4, 3, 3), d(4)),
        (1,),
        (0,),
        (1,),
        False,
        (0,),
        1,
        False,
        False,
        True,
        True,
    ),
    "_convolution.deprecated": lambda d: (
        *(d(2, 3, 9), d(4, 3, 3), d(4)),
        (1,),
        (0,),
        (1,),
        False,
        (0,),
        1,
        False,
        False,
        True,
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
    **{op: lambda d: (d(9, lo=0.1, hi=2),) for op in ("log", "log10", "log2", "log1p", "reciprocal", "rsqrt")},
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
    "soft_margin_loss": lambda d: (d(3), classes(1, -1, 1)),
    "multi_margin_loss": lambda d: (d(3, 4), classes(1, 3, 0)),
    "triplet_margin_loss": lambda d: (d(3, 8), d(3, 8), d(3, 8)),
    "binary_cross_entropy_with_logits": lambda d: (d(3, 8), d(3, 8, lo=0, hi=1)),
    **{op: lambda d: (d(3, 8), d(3, 8)) for op in ("l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss")},
    "kl_div": lambda d: (d(3, 8), d(3, 8, lo=0.1, hi=1)),
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
        for op in (
            "relu",
            "gelu",
            "silu",
            "sigmoid",
            "tanh",
            "leaky_relu",
            "elu",
            "hardswish",
            "mish",
            "mean",
            "sin",
            "erf",
            "log_sigmoid",
            "abs",
            "neg",
            "clone",
        )
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
    """Dtypes of the result, or None where even the fake kernel asks for a driver (which ones: a matter of version)."""
    torch.set_autocast_dtype("cuda", dtype)
    fake = tree_map(lambda x: torch.empty(x.shape, dtype=x.dtype, device="cuda") if isinstance(x, Tensor) else x, args)
    try:
        return [t.dtype for t in tensors(op(*fake))]
    except (RuntimeError, NotImplementedError) as error:
        asks = re.search("NVIDIA driver|CUDA error|CUDA driver", str(error))
        return None if asks else type(error).__name__


def emulated_dtypes(op: Any, args: Any, dtype: torch.dtype) -> Any:
    with emulated(dtype):
        return outcome(lambda: op(*args))


def test_the_table_has_every_listed_op():
    callable_on_a_cpu = {op for op, policy in CUDA_OP_POLICY.items() if op not in NOT_OVERRIDDEN and policy != "banned"}
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
    policy = CUDA_OP_POLICY.get(f"aten::{name}")
    for (dtype, args), theirs in zip(calls, expected, strict=True):
        ours = emulated_dtypes(op, args, dtype)
        assert ours == theirs or theirs is None
        assert ours == [dtype] * len(ours) or policy != "low_precision"
        # Only ops that promote refuse anything, and only the stray dtype.
        stray = dtype == BF16 and all(t.dtype == HALF for t in floats(args))
        assert (ours == "RuntimeError") == (stray and policy == "promote")


# --- Values --------------------------------------------------------------------------------------------------

HALF_ULP = 2.0**-11
LOW = [op for op in LISTED if CUDA_OP_POLICY[f"aten::{op}"] == "low_precision"]
PROMOTE = [op for op in LISTED if CUDA_OP_POLICY[f"aten::{op}"] == "promote"]
IN_FP32 = [op for op in LISTED if op not in LOW and op not in PROMOTE]
# Each addition rounds, in half memory: on CUDA too.
SEQUENTIAL = {"index_put"}


def error(value: Tensor, exact: Tensor) -> float:
    return ((value.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def exact_in_half(value: float) -> Tensor:
    return torch.tensor([[value]], dtype=HALF).float()


def gradients(out: list[Tensor], args: Any, cotangents: list[Tensor]) -> list[Tensor]:
    """Of the floating operands, where there is one."""
    pairs = [(o, c.to(o.dtype)) for o, c in zip(out, cotangents, strict=True) if o.requires_grad]
    if not pairs:
        return []
    leaves = [t for t in floats(args) if t.requires_grad]
    grads = torch.autograd.grad([o for o, _ in pairs], leaves, [c for _, c in pairs], allow_unused=True)
    return [g for g in grads if g is not None]


class Compared:
    """One listed op on half operands, emulated, and the same in float64."""

    def __init__(self, name: str) -> None:
        if f"aten::{name}" not in registrations("AutocastCUDA"):
            pytest.skip(f"torch {torch.__version__} has no rule for {name}")
        self.op, self.drawn = find(name), LISTED[name](Draw(name))
        draw, args = Draw(name + " cotangent"), in_dtypes(self.drawn, [FP64], grad=True)
        self.exact = floats(self.op(*args))
        self.cotangents = [draw(*o.shape) for o in self.exact]
        self.exact_grads = gradients(self.exact, args, self.cotangents)
        args = in_dtypes(self.drawn, [HALF], grad=True)
        with emulated():
            out = floats(self.op(*args))
        self.grads = gradients(out, args, self.cotangents)
        self.forward = [error(o, e) for o, e in zip(out, self.exact, strict=True)]
        self.backward = [error(g, e) for g, e in zip(self.grads, self.exact_grads, strict=True)]

    def stock(self) -> list[float] | None:
        """Errors of torch's own half kernels, forward and backward; None where it has none."""
        args = in_dtypes(self.drawn, [HALF], grad=True)
        try:
            out = floats(self.op(*args))
            grads = gradients(out, args, self.cotangents)
        except RuntimeError:
            return None
        pairs = zip([*out, *grads], [*self.exact, *self.exact_grads], strict=True)
        return [error(value, exact) for value, exact in pairs]


@pytest.mark.parametrize("name", LOW)
def test_low_precision_is_within_half_an_ulp_of_float64(name):
    it = Compared(name)
    assert max(it.forward) <= HALF_ULP
    assert max(it.backward) <= HALF_ULP
    assert all(g.dtype == HALF for g in it.grads)
    stock = it.stock()
    if stock is not None:
        # Rounding what is nearly exact cannot be beaten, except by luck in the last digit of fp32.
        luck = 1e-3 * HALF_ULP
        assert all(ours <= theirs + luck for ours, theirs in zip(it.forward + it.backward, stock, strict=True))


@pytest.mark.parametrize("name", PROMOTE)
def test_promoting_ops_stay_half_on_half_operands(name):
    it = Compared(name)
    assert max(it.forward + it.backward) <= (2 * HALF_ULP if name in SEQUENTIAL else HALF_ULP)


@pytest.mark.parametrize("name", IN_FP32)
def test_fp32_ops_keep_fp32_and_round_only_gradients(name):
    it = Compared(name)
    assert max(it.forward) <= 2.0**-20
    assert max(it.backward, default=0.0) <= HALF_ULP
    assert all(g.dtype == HALF for g in it.grads)


# The largest result each op can have is small, whatever its operands.
BOUNDED = {"lstm_cell", "gru_cell", "rnn_tanh_cell", "scaled_dot_product_attention"}


@pytest.mark.parametrize("name", LOW)
def test_beyond_half_is_infinite_and_within_is_finite(name):
    op, drawn = find(name), LISTED[name](Draw(name))
    scaled = tree_map(lambda x: (x * 700).half().double() if isinstance(x, Tensor) else x, drawn)
    if name == "prelu":
        scaled[0].mul_(-8)
    exact = floats(op(*in_dtypes(scaled, [FP64])))
    with emulated():
        out = floats(op(*in_dtypes(scaled, [FP32])))
    for value, truth in zip(out, exact, strict=True):
        beyond, within = truth.abs() >= 1.01 * HALF_MAX, truth.abs() <= 0.99 * HALF_MAX
        assert bool(beyond.any()) == (name not in BOUNDED)
        assert torch.equal(value[beyond].double(), torch.sign(truth[beyond]) * torch.inf)
        assert value[within].isfinite().all()


def test_opposite_infinities_make_nan():
    big = torch.full((2, 2), 300.0)
    with emulated():
        assert (torch.mm(big, big) - torch.mm(big, big)).isnan().all()
        overflowed = torch.tensor([[1e5, -1e5]])  # Inf once it is rounded to half
        assert torch.mm(overflowed, torch.ones(2, 1)).isnan().all()
        # An intermediate product of a chain is a half tensor of its own.
        assert torch.linalg.multi_dot([big, big, torch.full((2, 2), 1e-4)]).isinf().all()
        assert torch.einsum("ij,jk,kl->il", big, big, torch.full((2, 2), 1e-4)).isinf().all()
    assert torch.linalg.multi_dot([big, big, torch.full((2, 2), 1e-4)]).isfinite().all()


def test_a_chain_is_half_all_along():
    x = torch.full((2, 4), 60000.0)
    with emulated():
        summed = torch.einsum("ij->i", x)  # inside einsum the list that puts sums into fp32 does not apply
    with autocast_on_fake_cuda():
        assert on_cuda(torch.ops.aten.einsum.default, ("ij->i", [x]), HALF) == [HALF]
    assert summed.dtype == HALF
    assert summed.isinf().all()


def test_accumulating_index_put_rounds_every_addition():
    small, zeros = torch.full((4,), 2.0**-12, dtype=HALF), torch.zeros(4, dtype=torch.int64)
    one = torch.ones(1, dtype=HALF)
    with emulated():
        assert one.index_put((zeros,), small, accumulate=True).item() == 1.0
        assert (one + small.sum()).item() == 1 + 2.0**-10


def test_what_is_too_small_for_half_is_zero():
    with emulated():
        assert torch.mm(torch.full((1, 1), 1e-4), torch.full((1, 1), 1e-4)).item() == 0
        assert torch.mm(torch.full((1, 1), 1e-8), torch.ones(1, 1)).item() == 0
    with emulated(BF16):
        assert torch.mm(torch.full((1, 1), 1e-4), torch.full((1, 1), 1e-4)).item() > 0


@pytest.mark.parametrize(("scale", "expected"), [(1.0, 60000.0), (2.0, torch.inf)])
def test_the_gradient_of_an_fp32_leaf_passes_through_half(scale, expected):
    x = torch.ones(1, 1, requires_grad=True)
    with emulated():
        y = F.linear(x, torch.full((1, 1), 60000.0))
    y.backward(torch.full((1, 1), scale, dtype=HALF))
    assert x.grad.dtype == FP32
    assert x.grad.item() == expected


def test_gradients_flush_to_zero_in_half():
    x = torch.ones(1, 1, requires_grad=True)
    with emulated():
        y = F.linear(x, exact_in_half(1e-4))
    y.backward(torch.full((1, 1), 1e-4, dtype=HALF))
    assert x.grad.item() == 0


def test_mean_and_pooling_do_not_overflow_inside():
    big = torch.full((1, 1, 8, 8, 8), 60000.0, dtype=HALF)
    with emulated():
        for pooled in (big.mean(), F.adaptive_avg_pool3d(big, 1), F.avg_pool3d(big, 4), F.avg_pool2d(big[0], 4)):
            assert (pooled == 60000).all()


# --- Weights -------------------------------------------------------------------------------------------------


def used_twice(**autocast: Any) -> float:
    """The gradient of a weight that gets 1 from one use and 2^-12 from another."""
    weight = torch.ones(1, 1, requires_grad=True)
    with torch.autocast("cpu", dtype=HALF, **autocast):
        y = F.linear(torch.ones(1, 1), weight) + F.linear(exact_in_half(2.0**-12), weight)
    y.backward()
    return weight.grad.item()


@pytest.mark.parametrize("cache", [True, False])
def test_a_weight_used_twice_adds_its_gradients_as_under_stock_autocast(cache):
    stock = used_twice(cache_enabled=cache)
    with emulate_cuda():
        assert used_twice(cache_enabled=cache) == stock == (1.0 if cache else 1 + 2.0**-12)


def test_the_weight_cache_ends_with_autocast_or_when_cleared():
    weight, x = nn.Parameter(torch.ones(1, 1)), torch.ones(1, 1)
    with emulate_cuda():
        for clear in (False, True):
            with torch.autocast("cpu", dtype=HALF):
                before = F.linear(x, weight).item()
                with torch.no_grad():
                    weight += 1
                if clear:
                    torch.clear_autocast_cache()
                after = F.linear(x, weight).item()
            assert (after == before) is not clear  # a stale weight, as torch's own cache would use
        with torch.autocast("cpu", dtype=HALF):
            assert F.linear(x, weight).item() == 3
    assert not emulation._weights._casts


def test_a_cast_under_no_grad_does_not_cut_the_gradient():
    weight = nn.Parameter(torch.ones(1, 1))
    with emulated():
        with torch.no_grad():
            F.linear(torch.ones(1, 1), weight)
        F.linear(torch.ones(1, 1), weight).sum().backward()
    assert weight.grad.item() == 1


# --- Entering and leaving ------------------------------------------------------------------------------------


def behaviour() -> list[Any]:
    """Dtypes and bits of a sample of ops under stock autocast."""
    seen = []
    for name in ("mm", "softmax.int", "exp", "sum", "layer_norm", "trace", "cat", "binary_cross_entropy_with_logits"):
        args = in_dtypes({**LISTED, **UNLISTED}[name](Draw(name)), [FP32])
        with torch.autocast("cpu", dtype=BF16):
            seen += [(name, t.dtype, t.tolist()) for t in tensors(emulation._find(name)(*args))]
    return seen


def trace_of_us() -> list[Any]:
    return [
        registrations("AutocastCPU"),
        torch._C._dispatch_dump("aten::mm"),
        torch._C._dispatch_dump("aten::exp"),
        set(torch.library._impls),
        torch.clear_autocast_cache,
        torch.backends.mha.get_fastpath_enabled(),
        behaviour(),
    ]


def test_it_leaves_no_trace():
    before = trace_of_us()
    assert not is_emulating()
    with emulate_cuda():
        assert is_emulating()
        assert trace_of_us() != before
        with emulate_cuda():
            inner = behaviour()
        assert is_emulating()
        assert behaviour() == inner  # leaving an inner block changes nothing
    assert not is_emulating()
    assert trace_of_us() == before


def test_it_leaves_no_trace_after_an_exception():
    before = trace_of_us()
    with pytest.raises(ZeroDivisionError), emulated():
        _ = torch.ones(2, 2) @ torch.ones(2, 2), 1 / 0
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), emulated():
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    assert current_op() is None
    assert trace_of_us() == before


def test_a_failing_entry_leaves_no_trace(monkeypatch):
    before = trace_of_us()
    monkeypatch.setattr(emulation, "_kernels", lambda: {"aten::mm": len, "aten::exp": "not a kernel"})
    with pytest.raises(TypeError, match="callable"), emulate_cuda():
        pytest.fail("entered")
    assert not is_emulating()
    assert trace_of_us() == before


def test_threads_share_one_installation():
    before, barrier, failures = trace_of_us(), threading.Barrier(4), []

    def work() -> None:
        try:
            for _ in range(5):
                barrier.wait()
                with emulated():
                    assert is_emulating()
                    assert torch.ones(2, 2).half().exp().dtype == FP32
                    assert current_op() is None
        except BaseException as error:  # noqa: BLE001  # handed to the main thread
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert trace_of_us() == before


def test_entering_warns_of_nothing():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with emulate_cuda():
            pass
    assert not caught


# --- Where it does nothing -----------------------------------------------------------------------------------


def test_outside_autocast_nothing_changes():
    def run() -> list[Any]:
        return [find(n)(*in_dtypes(LISTED[n](Draw(n)), [FP32])) for n in ("mm", "softmax.int", "layer_norm", "conv2d")]

    stock = run()
    with emulate_cuda():
        assert all(torch.equal(a, b) for a, b in zip(run(), stock, strict=True))
        assert torch.ones(3, dtype=HALF).exp().dtype == HALF
        assert F.binary_cross_entropy(torch.tensor([0.5]), torch.tensor([1.0])).isfinite()


def test_a_disabled_region_is_fp32():
    x = torch.full((2, 2), 300.0)
    with emulated():
        assert torch.mm(x, x).isinf().all()
        with torch.autocast("cpu", enabled=False):
            y = torch.mm(x, x)
        assert torch.mm(x, x).isinf().all()
    assert y.dtype == FP32
    assert (y == 180000).all()


@pytest.mark.parametrize("name", [*LOW, *IN_FP32, *PROMOTE])
def test_float64_is_untouched(name):
    op, args = find(name), in_dtypes(LISTED[name](Draw(name)), [FP64])
    stock = tensors(op(*args))
    with emulated():
        ours = tensors(op(*args))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, stock, strict=True))


def test_integers_are_untouched():
    x = torch.arange(6).view(2, 3)
    with emulated():
        assert torch.mm(x, x.T).dtype == torch.int64
        assert x.sum().dtype == torch.int64
        assert torch.softmax(x, -1, dtype=FP64).dtype == FP64
        assert torch.bmm(x[None], x.T[None]).tolist() == [[[5, 14], [14, 50]]]


def test_a_dtype_that_the_caller_gives_stands():
    x = torch.ones(2, 3, dtype=HALF)
    with emulated():
        assert torch.softmax(x, -1, dtype=HALF).dtype == HALF
        assert x.sum(dtype=FP64).dtype == FP64
        assert x.sum(1, dtype=HALF).dtype == HALF


def test_float64_beside_float32_raises_as_in_half():
    with emulated(), pytest.raises(RuntimeError, match="dtype"):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2, dtype=FP64))


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func.name(), current_op()))
        return func(*args, **(kwargs or {}))


# --- Losses, recurrent nets, attention -----------------------------------------------------------------------


def test_binary_cross_entropy_is_banned_in_cuda_s_words():
    p, t = torch.tensor([0.3, 0.6]), torch.tensor([0.0, 1.0])
    with emulated():
        with pytest.raises(
            RuntimeError, match=r"torch\.nn\.functional\.binary_cross_entropy and torch\.nn\.BCELoss are unsafe"
        ):
            nn.BCELoss()(p, t)
        assert nn.BCEWithLogitsLoss()(p.half(), t).dtype == FP32


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_half_in_half_out_and_train(kind, layers):
    torch.manual_seed(0)
    net, x = kind(4, 3, layers, batch_first=True, bidirectional=True), torch.randn(2, 5, 4)
    exact = kind(4, 3, layers, batch_first=True, bidirectional=True).double()
    exact.load_state_dict(net.half().state_dict())
    net.float()
    with emulated():
        out, state = net(x)
        loss = (out.float() ** 2).sum()
    loss.backward()
    assert out.dtype == HALF
    assert all(s.dtype == HALF for s in floats(state))
    truth = exact(x.half().double())[0]
    assert error(out.detach(), truth) <= HALF_ULP
    assert all(p.grad is not None and p.grad.dtype == FP32 and p.grad.abs().sum() > 0 for p in net.parameters())


def test_packed_sequences_and_given_states():
    net, x = nn.LSTM(4, 3), nn.utils.rnn.pack_sequence([torch.randn(5, 4), torch.randn(3, 4)])
    with emulated():
        out, (h, c) = net(x, (torch.zeros(1, 2, 3), torch.zeros(1, 2, 3)))
    assert {out.data.dtype, h.dtype, c.dtype} == {HALF}


def test_attention_scores_may_exceed_half_but_a_mask_may_not():
    q = torch.full((1, 1, 2, 4), 200.0)
    with emulated():
        assert F.scaled_dot_product_attention(q, q, q).isfinite().all()
        assert torch.matmul(q, q.mT).isinf().all()
        hidden = F.scaled_dot_product_attention(q, q, q, attn_mask=torch.full((2, 2), -7e4))
    # In half the mask is -Inf: rows without any key. In fp32 it would cancel out.
    no_key = F.scaled_dot_product_attention(q, q, q, attn_mask=torch.full((2, 2), -torch.inf))
    assert torch.equal(hidden.float().nan_to_num(-1), no_key.nan_to_num(-1))


def test_attention_in_evaluation_takes_the_path_it_takes_on_cuda():
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 3, 8)
    with torch.no_grad(), emulated(), Watch() as watch:
        assert layer(x).dtype == FP32  # its last op is a layer norm
        assert layer.self_attn(x, x, x)[0].dtype == HALF
        layer.linear1.bias.fill_(1e5)
        assert layer(x).isnan().any()  # half overflows inside
    assert not {"aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention"} & {
        op for op, _ in watch.seen
    }


# --- Observers, subclasses, checkpoints ----------------------------------------------------------------------


def test_an_observer_learns_which_op_the_inner_ones_belong_to():
    x = torch.ones(2, 2, requires_grad=True)
    with Watch() as watch, emulated():
        y = F.linear(x, x)
        z = F.relu(y)
        torch.einsum("ij,jk->ik", z, z)
        z.exp()
    owners = dict.fromkeys(owner for _, owner in watch.seen)
    assert list(owners) == ["aten::linear", None, "aten::einsum", "aten::exp"]
    assert ("aten::_to_copy", "aten::linear") in watch.seen
    assert ("aten::relu", None) in watch.seen
    assert ("aten::bmm", "aten::einsum") in watch.seen
    assert current_op() is None


class Image(Tensor):
    """As fastai's TensorImage: a subclass that survives every op."""


def test_a_subclass_is_not_asked_about_our_inner_ops():
    asked = []

    class Counting(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    # The backward pass calls the dispatcher from C++, past the hook that the subclass has in Python.
    x = torch.ones(2, 2, requires_grad=True)
    y = torch.mm(x, x)
    y.register_hook(lambda grad: grad.as_subclass(Counting))
    with emulated():
        y.sum().backward()
    assert asked == []


def test_subclasses_survive():
    x = torch.ones(1, 3, 8, 8).as_subclass(Image)
    with emulated():
        for y in (F.conv2d(x, torch.ones(2, 3, 3, 3)), x.exp(), x.half().softmax(1), F.interpolate(x, scale_factor=2)):
            assert type(y) is Image
    assert F.conv2d(x, torch.ones(2, 3, 3, 3)).dtype == FP32


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_compute_the_same(reentrant):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    x = torch.randn(3, 4, requires_grad=True)

    def grads(run: Callable[[], Tensor]) -> list[Tensor]:
        net.zero_grad()
        with emulated():
            loss = run().float().pow(2).sum()
            loss.backward()
        return [p.grad.clone() for p in net.parameters()]

    plain = grads(lambda: net(x))
    again = grads(lambda: checkpoint(net, x, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_backward_inside_autocast_and_twice():
    x = torch.tensor([[0.5]], requires_grad=True)
    with emulated():
        y = F.linear(x, torch.tensor([[3.0]])) ** 3
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        g.sum().backward()
    assert g.item() == pytest.approx(3 * 9 * 3 * 0.25, rel=2e-3)
    assert x.grad.item() == pytest.approx(6 * 27 * 0.5, rel=2e-3)


def test_a_small_net_trains_and_its_loss_scaler_skips_what_overflows():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    x, y = torch.randn(16, 1, 8, 8), torch.arange(16) % 2
    losses, scales = [], []
    for _ in range(30):
        optimizer.zero_grad()
        with emulated():
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    assert scales[0] == 2.0**23  # the first step overflowed
    assert scales[-1] == scales[-10]  # and then it found its scale
    assert losses[-1] < 0.5 * losses[0]
