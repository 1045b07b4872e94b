"""CUDA's autocast op lists laid over the CPU, in real 16-bit arithmetic.

`torch.autocast` decides per device which ops run in half and which in fp32, and the two lists differ: on the
CPU most of softmax, exp, sum and the norms stay in half, so a fault seen there may not exist on a GPU, and
its 16-bit kernels are 10 to 40 times slower than fp32. Inside `emulate_cuda()` the dispatcher's AutocastCPU
key answers as AutocastCUDA would, and an op of the low-precision list is computed on a fast detour:

    round the operands to half  ->  compute in fp32  ->  round the result to half

which is what a tensor core does (half operands, fp32 accumulator, half result): beyond 65504 a result is
Inf, and below 6e-8 it is 0. Every rounding is a differentiable cast, so the backward pass rounds gradients
where CUDA does: the gradient of a half operand is half, also the sum of the gradients of a weight that is
used twice under autocast's weight cache, which is kept here too.

Looks like   `with emulate_cuda(), torch.autocast("cpu", dtype=torch.float16): loss = model(x)`
Not this     a way to train faster (fp32 is), nor a bit-exact GPU: sums run in another order.

Limits:
    * Inside one call of an LSTM, GRU or RNN (and its cells) states between time steps and gates stay fp32;
      cuDNN stores each state in half. Inputs, initial states, weights and results are half.
    * Attention (`scaled_dot_product_attention`) is CUDA's fused kernel: scores never leave fp32. `bilinear`
      and `scatter_add` are rounded once at their end. Sums of products are fp32; cuBLAS may add parts in half.
    * Ops on no list run the stock CPU kernel in the dtype they are given, as on CUDA. FFTs of a half tensor
      raise; CUDA computes those of a power-of-two length.
    * Tensors on other devices, float64 and integers are left alone. `torch.compile` and named tensors are not
      supported.
"""

# The dispatcher has no public door: registrations, key guards and schemas all start with an underscore.
# ruff: noqa: SLF001
from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

__all__ = ["CUDA_OP_POLICY", "NOT_OVERRIDDEN", "current_op", "emulate_cuda", "is_emulating"]

# The lists of torch 2.6 to 2.14. A test compares them with the header and the dispatcher of the installed torch;
# what that torch does not have, or has no rule for, is left out when the overrides go in.
_LISTS: Mapping[str, str] = {
    "low_precision": """
        _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose
        prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul
        linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell
        rnn_relu_cell _cudnn_rnn _scaled_dot_product_flash_attention scaled_dot_product_attention
    """,
    "fp32": """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
        pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus
        layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
        cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
        kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss
        soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
        dist pdist cdist renorm logsumexp linalg_matrix_sqrth
        upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
        upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
        _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
    """,
    "fp32_set_dtype": """
        prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
        linalg_matrix_norm.str_ord sum sum.dim_IntList
        prod.dim_Dimname softmax.Dimname log_softmax.Dimname cumprod.dimname cumsum.dimname sum.dim_DimnameList
    """,
    "append_dtype": "norm.Scalar norm.ScalarOpt_dim norm.names_ScalarOpt_dim",
    "promote": """
        addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
    """,
    "banned": "binary_cross_entropy",
}

CUDA_OP_POLICY: Mapping[str, str] = MappingProxyType(
    {f"aten::{op}": policy for policy, ops in _LISTS.items() for op in ops.split()}
)
"""Op with its overload ("aten::softmax.int") -> what autocast does with it on CUDA.

"low_precision": floating operands become half. "fp32": they become fp32. "fp32_set_dtype": `dtype=float32`
is filled in where the caller gave none. "append_dtype": the same, by way of the overload that has a dtype.
"promote": fp32 if one operand is fp32, else half. "banned": raises. Float64 operands never change.
"""

_NAMED = "named tensors, a prototype that later torch dropped; a kernel in Python cannot take them"
NOT_OVERRIDDEN: Mapping[str, str] = MappingProxyType(
    {
        "aten::_cudnn_rnn": "cuDNN's; on a CPU a layer goes through lstm, gru and rnn_*, which are overridden instead",
        "aten::cudnn_convolution": "cuDNN's; nothing reaches it on a CPU",
        "aten::cudnn_convolution_transpose": "cuDNN's; nothing reaches it on a CPU",
        "aten::_scaled_dot_product_flash_attention": "has a CUDA kernel only; its caller is overridden",
        "aten::_thnn_fused_lstm_cell": "has a CUDA kernel only; lstm_cell is overridden",
        "aten::_thnn_fused_gru_cell": "has a CUDA kernel only; gru_cell is overridden",
        **{op: _NAMED for op in CUDA_OP_POLICY if "name" in op.partition(".")[2].lower()},
    }
)
"""Ops of `CUDA_OP_POLICY` that have no override of their own on the CPU, each with its reason."""

# On CUDA these reach `_cudnn_rnn`, which is half in, half out. Here they have to be caught one level higher.
_RECURRENT = tuple(f"{net}.{kind}" for net in ("lstm", "gru", "rnn_tanh", "rnn_relu") for kind in ("input", "data"))
# On no list, so half in, half out; but the CPU (of some torch) has no half kernel, or adds in half.
_NO_GOOD_HALF_KERNEL = ("adaptive_avg_pool3d", "avg_pool3d", "polygamma", "round.decimals", "rrelu", "trace")
# Several products in a row: on CUDA each intermediate result is a half tensor, and may overflow as one.
_CHAINS = frozenset({"aten::einsum", "aten::chain_matmul", "aten::linalg_multi_dot"})
# CUDA adds into half memory, one rounding per addition; so does the stock CPU kernel (that of scatter_add does not).
_ADDS_IN_HALF = frozenset({"aten::index_put"})

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_NOTHING = _AUTOCAST - _AUTOCAST
_Kernel = Callable[..., Any]


class _PerThread(threading.local):
    op: str | None = None
    in_chain: bool = False


_here = _PerThread()
_lock = threading.Lock()
_users = 0
_installed = ExitStack()


def is_emulating() -> bool:
    """Whether CUDA's op lists are in force on the CPU now (in any thread; the dispatcher is the process's)."""
    return _users > 0


def current_op() -> str | None:
    """The listed op that this thread is computing now, such as "aten::bmm"; None outside one.

    An observer below autocast (a `TorchDispatchMode`) sees casts and fp32 kernels; this names the op they
    belong to, the outermost one where an op is made of others.
    """
    return _here.op


@contextmanager
def emulate_cuda() -> Iterator[None]:
    """Let `torch.autocast("cpu", ...)` behave as `torch.autocast("cuda", ...)` inside the block.

    Blocks may nest and run in several threads; the op lists are in force for the whole process from the first
    entry to the last exit, and then the dispatcher is as it was. Outside autocast ops are stock throughout,
    except that the fused inference path of `nn.TransformerEncoder` is off, as autocast on CUDA has it.
    """
    global _users, _installed  # noqa: PLW0603  # one dispatcher per process, so one counter
    with _lock:
        if _users == 0:
            _installed = _install()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _installed.close()


# --- Casts ---------------------------------------------------------------------------------------------------


def _eligible(value: Any) -> bool:
    """What autocast casts: floating point, not double, on its device."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64 and value.is_cpu


def _each(cast: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a cast to an eligible tensor, or inside a list of tensors; leave anything else."""
    if isinstance(value, Tensor):
        return cast(value) if _eligible(value) else value
    # Lists of sizes are common and never hold tensors: look at the ends only (an index list may start with None).
    if type(value) in (list, tuple) and value and (isinstance(value[0], Tensor) or isinstance(value[-1], Tensor)):
        return [_each(cast, v) for v in value]
    return value


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) in (list, tuple):
            found += [v for v in value if isinstance(v, Tensor)]
    return found


class _WeightCache:
    """Autocast's cache of cast weights, as torch keeps it in C++ (and shows no way into).

    It is more than speed: a weight used twice collects its gradient in half, because both uses hang on one
    cast. Like torch's it holds fp32 leaves that require grad, until the outermost autocast region ends.
    """

    def __init__(self) -> None:
        self._casts: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if tensor.dtype == dtype:
            return tensor
        # Under no_grad a cast has no history: kept, it would cut the weight's gradient in later uses.
        cacheable = (
            tensor.requires_grad
            and tensor.is_leaf
            and tensor.dtype == torch.float32
            and torch.is_grad_enabled()
            and torch.is_autocast_cache_enabled()
            and not tensor._is_view()
        )
        if not cacheable:
            return tensor.to(dtype)
        key = (id(tensor), dtype)
        found = self._casts.get(key)
        if found is None:
            # The tensor itself is kept beside its cast, so that its id cannot pass to another one.
            found = self._casts[key] = (tensor, tensor.to(dtype))
        return found[1]

    def clear(self) -> None:
        self._casts.clear()

    @contextmanager
    def following_torch(self) -> Iterator[None]:
        """Be cleared whenever torch clears its own cache: at the end of autocast, or when a user asks."""
        stock = torch.clear_autocast_cache

        def clear_autocast_cache() -> None:
            stock()
            self.clear()

        torch.clear_autocast_cache = clear_autocast_cache
        try:
            yield
        finally:
            torch.clear_autocast_cache = stock
            self.clear()


_weights = _WeightCache()


# --- One kernel per policy -----------------------------------------------------------------------------------


def _rounded(op: _Kernel, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Compute in fp32 on operands rounded to `dtype`, and round what comes out."""
    if any(t.dtype == torch.float64 for t in _tensors(args, kwargs)):
        # Autocast leaves float64 alone: all-double works, a mixture raises its usual error.
        args, kwargs = _cast_all(lambda t: _weights.cast(t, dtype), args, kwargs)
        return op(*args, **kwargs)
    args, kwargs = _cast_all(lambda t: _weights.cast(t, dtype).float(), args, kwargs)
    out = op(*args, **kwargs)
    if isinstance(out, Tensor):
        return out.to(dtype) if _eligible(out) else out
    return tuple(_each(lambda t: t.to(dtype), value) for value in out)


def _cast_all(
    cast: Callable[[Tensor], Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    return [_each(cast, a) for a in args], {k: _each(cast, v) for k, v in kwargs.items()}


def _low_precision(op: Any) -> _Kernel:
    def run(*args: Any, **kwargs: Any) -> Any:
        return _rounded(op, args, kwargs, torch.get_autocast_dtype("cpu"))

    return run


def _chain(op: Any) -> _Kernel:
    """Half all along: the products inside come back to our kernels, everything else runs as it is."""

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")
        args, kwargs = _cast_all(lambda t: _weights.cast(t, dtype), args, kwargs)  # type: ignore[assignment]
        _here.in_chain = True
        return op.decompose(*args, **kwargs)

    return run


def _fp32(op: Any) -> _Kernel:
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cast_all(lambda t: t.float(), args, kwargs)  # type: ignore[assignment]
        return op(*args, **kwargs)

    return run


def _fp32_set_dtype(op: Any) -> _Kernel:
    place = [a.name for a in op._schema.arguments].index("dtype")

    def run(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("dtype") if len(args) <= place else args[place]
        if given is None and _eligible(args[0]):
            args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
        return op(*args, **kwargs)

    return run


def _append_dtype(op: Any) -> _Kernel:
    has_dims = op._overloadname.endswith("dim")
    with_dtype = torch.ops.aten.norm.ScalarOpt_dim_dtype if has_dims else torch.ops.aten.norm.ScalarOpt_dtype

    def run(tensor: Tensor, p: Any = 2, *args: Any) -> Any:
        dtype = torch.float32 if _eligible(tensor) else tensor.dtype
        if has_dims and len(args) == 1:
            args = (*args, False)  # keepdim: the dispatcher drops trailing defaults
        return with_dtype(tensor, p, *args, dtype=dtype)

    return run


def _promote(op: Any) -> _Kernel:
    def run(*args: Any, **kwargs: Any) -> Any:
        half = torch.get_autocast_dtype("cpu")
        dtypes = {t.dtype for t in _tensors(args, kwargs) if _eligible(t)}
        if not dtypes <= {half, torch.float32}:
            raise RuntimeError(
                f"Unexpected floating ScalarType in autocast: {op.name()} got {sorted(map(str, dtypes))} "
                f"under autocast to {half}, which promotes among {half}, float32 and float64 only"
            )
        if dtypes == {half} and op.name() not in _ADDS_IN_HALF:
            return _rounded(op, args, kwargs, half)
        to = torch.float32 if torch.float32 in dtypes else half
        args, kwargs = _cast_all(lambda t: t.to(to), args, kwargs)  # type: ignore[assignment]
        return op(*args, **kwargs)

    return run


def _banned(op: Any) -> _Kernel:
    def run(*args: Any, **kwargs: Any) -> Any:
        # CUDA's own kernel raises before it looks at a tensor, in the words that users search for.
        op._op_dk(torch._C.DispatchKey.AutocastCUDA, *args, **kwargs)
        raise RuntimeError(f"{op.name()} is unsafe to autocast")

    return run


def _half_where_given(op: Any) -> _Kernel:
    """In the dtype of its input, as any op on no list, where the CPU lacks a good half kernel."""

    def run(*args: Any, **kwargs: Any) -> Any:
        (dtype,) = {t.dtype for t in _tensors(args, kwargs)}
        if dtype in (torch.float16, torch.bfloat16):
            return _rounded(op, args, kwargs, dtype)
        return op(*args, **kwargs)

    return run


_BODIES: Mapping[str, Callable[[Any], _Kernel]] = {
    "low_precision": _low_precision,
    "fp32": _fp32,
    "fp32_set_dtype": _fp32_set_dtype,
    "append_dtype": _append_dtype,
    "promote": _promote,
    "banned": _banned,
}


def _kernel(op: Any, make: Callable[[Any], _Kernel]) -> _Kernel:
    """What the dispatcher calls: autocast off below (but not below a chain), the op's name known to observers."""
    name, body = op.name(), make(op)
    below = _NOTHING if make is _chain else _AUTOCAST

    def kernel(*args: Any, **kwargs: Any) -> Any:
        outer, in_chain = _here.op, _here.in_chain
        run = op if in_chain and make is not _low_precision else body
        _here.op, _here.in_chain = outer or name, False
        try:
            # A subclass was asked (or not) on the way in; what we do inside is not its business.
            with torch._C._ExcludeDispatchKeyGuard(below), torch._C.DisableTorchFunctionSubclass():
                return run(*args, **kwargs)
        finally:
            _here.op, _here.in_chain = outer, in_chain

    return kernel


# --- Installing ----------------------------------------------------------------------------------------------


def _find(name: str) -> Any | None:
    """The op of a qualified name, or None where this torch has none."""
    base, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, base, None), overload or "default", None)


def _kernels() -> dict[str, _Kernel]:
    """Every override of this torch: CUDA's rules where it has them, nothing where only the CPU has one."""
    on_cuda = set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"))
    on_cpu = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    bodies = {
        name: _chain if name in _CHAINS else _BODIES[policy]
        for name, policy in CUDA_OP_POLICY.items()
        if name in on_cuda and name not in NOT_OVERRIDDEN
    }
    bodies |= {f"aten::{name}": _low_precision for name in _RECURRENT}
    bodies |= {f"aten::{name}": _half_where_given for name in _NO_GOOD_HALF_KERNEL}
    # A library such as torchvision brings rules of its own, the same for both devices.
    stock = [name for name in on_cpu if name.startswith("aten::")]
    kernels: dict[str, _Kernel] = dict.fromkeys(stock, torch.library.fallthrough_kernel)
    for name, make in bodies.items():
        op = _find(name)
        if op is not None:
            kernels[name] = _kernel(op, make)
    return kernels


def _install() -> ExitStack:
    """Put the overrides in force; closing what is returned takes them out again."""
    with ExitStack() as stack:
        library = torch.library.Library("aten", "IMPL")
        stack.callback(library._destroy)
        with warnings.catch_warnings():
            # "Overriding a previously registered kernel": that is the point.
            warnings.simplefilter("ignore")
            for name, kernel in _kernels().items():
                library.impl(name.removeprefix("aten::"), kernel, "AutocastCPU")
        stack.enter_context(_weights.following_torch())
        # torch skips the fused encoder under CUDA's autocast, but does not ask about the CPU's.
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        return stack.pop_all()
    raise AssertionError("unreachable: an ExitStack without exits swallows nothing")
