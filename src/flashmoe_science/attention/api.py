"""The public functions of attention: contract, validation, and the way from a call to its prepared launch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, UnsupportedError
from ..gpu.device import gpu_of_device
from ..gpu.specs import GpuSpec
from . import reference
from .plan import ForwardConfig, HopperConfig, Plan, plan_attention
from .problem import AttentionProblem, canonical_strides, output_strides

_DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}

# What a call with the same key does, prepared. A key holds everything that decides plan, kernel and grid.
_prepared: dict[tuple[Any, ...], Callable[..., Any]] = {}
_last_call: tuple[tuple[Any, ...], Callable[..., Any]] = ((), lambda: None)
_MAX_PREPARED = 8192  # entries, about 2 KiB each

# Absent from CPU builds of torch.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001 - what torch.compile's code calls
_current_device = getattr(torch._C, "_cuda_getDevice", None)  # noqa: SLF001 - what torch.cuda.current_device calls
# What Inductor's generated code allocates with; torch.empty_like takes half as long again (lab/launch_path.txt).
_empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined] # noqa: SLF001
_is_compiling = torch.compiler.is_compiling
_forward_ad = torch.autograd.forward_ad


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Any:
    """Attend every query to the keys it may see.

    o[b, h, m] = sum_n softmax_n(softmax_scale * q[b, h, m] . k[b, h // G, n]) v[b, h // G, n], with G = H / HK.

    Args:
        q: ``[B, H, Sq, D]`` fp16, bf16 or fp32, any strides; D from 1 to 256 on a GPU.
        k: ``[B, HK, Sk, D]``, dtype and device of q; H is a multiple of HK (GQA, MQA).
        v: ``[B, HK, Sk, DV]``, dtype and device of q; DV from 1 to 256 on a GPU.
        causal: row m sees keys up to m + Sk - Sq (aligned bottom-right). A row that sees no key gives 0 and LSE -inf.
        softmax_scale: multiplies the scores before the softmax; of any sign, and finite in fp32 when multiplied by
            log2(e). Default ``D ** -0.5``.
        return_lse: return the log-sum-exp of every row too.
        kernel: ``"auto"``, or one name to force (``explain`` lists them); a forced kernel never falls back.

    Returns:
        o ``[B, H, Sq, DV]`` in the dtype of q; rows lie in memory in the order of q's where that is dense. With
        ``return_lse`` the pair of o and lse ``[B, H, Sq]`` fp32, natural logarithm.

    Raises:
        InputError: a shape, dtype, device or value breaks the contract above.
        UnsupportedError: no kernel, or not the kernel forced, serves this call; or an input requires grad while
            gradients are recorded (there is no backward yet).

    Numerics: fp32 scores, softmax and accumulators; P is rounded to the dtype of v. Error within twice that of the
    eager run in the same dtype, against fp64. Run-to-run bitwise equal. On Hopper P may be up to 2**10 times what the
    softmax gives before it is divided: V beyond 2**100 may overflow. CPU tensors run ``reference.attention``.
    Beyond 2**24 in size, scaled scores of fp32 are more than 1 apart: rows that have such are not accurate, and may be
    0 or NaN.
    """
    if _is_compiling() or type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor:
        return _call_operator(q, k, v, causal, softmax_scale, return_lse, kernel)
    if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
        _refuse_grad(q, k, v)
    if _forward_ad._current_level >= 0:  # noqa: SLF001 - the public way asks tensor by tensor
        _refuse_tangents(q, k, v)
    # Equal keys must mean equal calls: True == 1, and a tensor equals itself after its value has changed.
    if type(causal) is not bool or (softmax_scale is not None and type(softmax_scale) is not float):  # type: ignore[redundant-expr]
        softmax_scale = _check_options(causal, softmax_scale)
    pq, pk, pv = q.data_ptr(), k.data_ptr(), v.data_ptr()
    dq, dk, dv = q.get_device(), k.get_device(), v.get_device()  # -1: no CUDA device
    contiguous = q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    key = (
        q.shape, k.shape, v.shape, contiguous or _describe_layout(q, k, v), q.dtype, k.dtype, v.dtype,
        dq, dk, dv, (pq | pk | pv) & 15, causal, softmax_scale, return_lse, kernel,
    )  # fmt: skip
    last = _last_call
    if key == last[0] and dq >= 0:  # the layers of a model repeat one call: comparing is cheaper than hashing
        return last[1](q, k, v, pq, pk, pv)
    return _find_call(key, q, k, v)(q, k, v, pq, pk, pv)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Plan:
    """Return the plan that would serve ``flash_attention`` with the same arguments; nothing is launched.

    ``print`` shows it as text, ``.as_dict()`` gives it as data. Nothing is compiled either, so the launches' shared
    memory is None; ``flashmoe explain`` compiles and prints it. Arguments and errors are those of ``flash_attention``,
    but inputs may require grad.
    """
    problem = problem_of(q, k, v, causal=causal, softmax_scale=softmax_scale, return_lse=return_lse)
    return plan_attention(problem, _gpu_of(q), kernel)


def problem_of(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float | None, return_lse: bool
) -> AttentionProblem:
    """Check three tensors against the contract of ``flash_attention`` and describe the call.

    Raises:
        InputError: with the argument's name, what was expected and what was got.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise InputError(f"{name} must have 4 dimensions [B, H, S, D], got shape {list(tensor.shape)}")
        if tensor.dtype not in _DTYPE_NAMES:
            raise InputError(f"{name} must be float16, bfloat16 or float32, got {tensor.dtype}")
        if tensor.dtype != q.dtype:
            raise InputError(f"{name} must have the dtype of q, {q.dtype}, got {tensor.dtype}")
        if tensor.is_neg():
            raise InputError(f"{name} must not be a negative view, got one (is_neg()): call resolve_neg()")
        if tensor.device != q.device:
            raise InputError(f"{name} must be on the device of q, {q.device}, got {tensor.device}")
    if q.device.type not in ("cpu", "cuda"):
        raise InputError(f"q must be on a CUDA device or the CPU, got {q.device}")
    batch, heads, _, head_dim = q.shape
    heads_kv, seqlen_k = k.shape[1], k.shape[2]
    _check_shape("k", k, (batch, heads_kv, seqlen_k, head_dim), "B, HK, Sk, D")
    _check_shape("v", v, (batch, heads_kv, seqlen_k, v.shape[3]), "B, HK, Sk, DV")
    softmax_scale = _check_options(causal, softmax_scale)
    return AttentionProblem(
        batch=batch,
        heads=heads,
        heads_kv=heads_kv,
        seqlen_q=q.shape[2],
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=v.shape[3],
        dtype=_DTYPE_NAMES[q.dtype],
        causal=causal,
        softmax_scale=softmax_scale,
        return_lse=return_lse,
        q_strides=canonical_strides(q.shape, q.stride()),
        k_strides=canonical_strides(k.shape, k.stride()),
        v_strides=canonical_strides(v.shape, v.stride()),
        pointer_alignment=_pointer_alignment(q, k, v),
    )


def _check_options(causal: object, softmax_scale: object) -> float | None:
    """Return the scale as a float, or None. Raises ``InputError``."""
    if not isinstance(causal, bool):
        raise InputError(f"causal must be True or False, got {causal!r}")
    if softmax_scale is None:
        return None
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float)):
        raise InputError(f"softmax_scale must be a number or None, got {type(softmax_scale).__name__}")
    try:
        return float(softmax_scale)  # AttentionProblem says how large it may be
    except OverflowError:
        raise InputError("softmax_scale must be finite in fp32, got an integer beyond fp64") from None


def _describe_layout(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Return what tensors that are not contiguous may differ in: strides, and a sign that is still to be applied."""
    return q.stride(), k.stride(), v.stride(), q.is_neg(), k.is_neg(), v.is_neg()


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...], letters: str) -> None:
    if tuple(tensor.shape) != expected:
        raise InputError(f"{name} must have shape [{letters}] = {list(expected)}, got {list(tensor.shape)}")


def _pointer_alignment(*tensors: Tensor) -> int:
    if any(type(tensor) is not Tensor for tensor in tensors):  # fake tensors have no address
        return 16
    return math.gcd(16, *(tensor.data_ptr() for tensor in tensors))


def _gpu_of(q: Tensor) -> GpuSpec | None:
    return gpu_of_device(q.device.index) if q.device.type == "cuda" else None


def _refuse_grad(q: Tensor, k: Tensor, v: Tensor) -> None:
    names = [name for name, tensor in (("q", q), ("k", k), ("v", v)) if tensor.requires_grad]
    raise UnsupportedError(
        f"{', '.join(names)} require grad, and there is no backward yet",
        hint="call it under torch.no_grad(), or pass detached tensors",
    )


def _find_call(key: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> Callable[..., Any]:
    """Return the prepared call of ``key``, and remember it as the last one."""
    global _last_call  # noqa: PLW0603 - one tuple, replaced as a whole, so threads see an old pair or a new one
    if key[7] < 0:  # CPU and meta tensors have the same device index
        key = (*key[:7], q.device.type, k.device.type, v.device.type, *key[10:])
    call = _prepared.get(key)
    if call is None:
        call = _prepare(q, k, v, *key[-4:])
        if len(_prepared) >= _MAX_PREPARED:
            _prepared.clear()
        _prepared[key] = call
    _last_call = (key, call)
    return call


def _refuse_tangents(*tensors: Tensor) -> None:
    tangents = [_forward_ad.unpack_dual(tensor).tangent for tensor in tensors]  # type: ignore[no-untyped-call]
    if any(tangent is not None for tangent in tangents):
        raise UnsupportedError("q, k or v has a forward-mode tangent, and there is no forward-mode derivative")


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None, return_lse: bool, kernel: str
) -> Callable[..., Any]:
    """Validate one call, plan it, compile and load its kernels, and return ``call(q, k, v, pq, pk, pv)``."""
    problem = problem_of(q, k, v, causal=causal, softmax_scale=softmax_scale, return_lse=return_lse)
    plan = plan_attention(problem, _gpu_of(q), kernel)
    if plan.kernel == "reference":
        return _reference_call(problem)
    if q.device.type == "cpu":
        return _interpreter_call(plan)
    return _cuda_call(plan, q.device.index, q.dtype)


def _reference_call(problem: AttentionProblem) -> Callable[..., Any]:
    def call(q: Tensor, k: Tensor, v: Tensor, *_pointers: int) -> Any:
        o, lse = reference.attention(q, k, v, causal=problem.causal, softmax_scale=problem.softmax_scale)
        o = torch.empty_strided(o.shape, problem.output_strides, dtype=q.dtype, device=q.device).copy_(o)
        return (o, lse.float()) if problem.return_lse else o

    return call


def _interpreter_call(plan: Plan) -> Callable[..., Any]:
    from .prepare import DTYPES, interpret, prepare_kernels

    problem = plan.problem
    if problem.dtype == "bf16":
        raise UnsupportedError(
            "Triton's interpreter multiplies bf16 wrongly", hint="use fp16 or fp32 with TRITON_INTERPRET=1"
        )
    kernels = prepare_kernels(plan)
    shape = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim_v)

    def call(q: Tensor, k: Tensor, v: Tensor, *_pointers: int) -> Any:
        o = torch.empty(shape, dtype=DTYPES[problem.dtype]).as_strided(shape, problem.output_strides)
        lse = torch.empty(shape[:3], dtype=torch.float32)
        if o.numel():
            for kernel in kernels:
                interpret(kernel, (q, k, v, o, lse))
        return (o, lse) if problem.return_lse else o

    return call


def _cuda_call(plan: Plan, device: int, dtype: torch.dtype) -> Callable[..., Any]:
    """Return the call that allocates the outputs, and the partials where keys are split, and launches."""
    from ..gpu.counters import counters_of
    from ..gpu.launch import prepare_launch
    from .prepare import prepare_kernels

    problem = plan.problem
    shape = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim_v)
    strides, rows = problem.output_strides, shape[:3]
    rows_strides = (rows[1] * rows[2], rows[2], 1)
    launches = [
        prepare_launch(kernel.source, plan.arch, device, kernel.grid, kernel.scalars, kernel.tensor_maps)
        for kernel in prepare_kernels(plan)
    ]
    empty, stream_of, return_lse = _empty_strided_cuda, _raw_stream, problem.return_lse
    assert stream_of is not None

    if not launches:  # an empty output

        def call(_q: Tensor, _k: Tensor, _v: Tensor, pq: int, pk: int, pv: int) -> Any:  # noqa: ARG001 - no launch
            o = empty(shape, strides, dtype)
            return (o, empty(rows, rows_strides, torch.float32)) if return_lse else o

    elif isinstance(plan.config, HopperConfig):
        (launch,) = launches
        counter = counters_of(device).address

        def call(_q: Tensor, _k: Tensor, _v: Tensor, pq: int, pk: int, pv: int) -> Any:
            o = empty(shape, strides, dtype)
            lse = empty(rows, rows_strides, torch.float32) if return_lse else None
            stream = stream_of(device)
            lse_at = 0 if lse is None else lse.data_ptr()
            launch(stream, pq, pk, pv, o.data_ptr(), lse_at, counter(stream))
            return o if lse is None else (o, lse)

    elif len(launches) == 1:
        (launch,) = launches

        def call(_q: Tensor, _k: Tensor, _v: Tensor, pq: int, pk: int, pv: int) -> Any:
            o = empty(shape, strides, dtype)
            if return_lse:
                lse = empty(rows, rows_strides, torch.float32)
                launch(stream_of(device), pq, pk, pv, o.data_ptr(), lse.data_ptr())
                return o, lse
            launch(stream_of(device), pq, pk, pv, o.data_ptr())
            return o

    else:
        assert isinstance(plan.config, ForwardConfig)
        lse_size = plan.config.num_splits * problem.rows
        partial_size = lse_size * problem.head_dim_v
        forward, merge = launches

        def call(_q: Tensor, _k: Tensor, _v: Tensor, pq: int, pk: int, pv: int) -> Any:
            o = empty(shape, strides, dtype)
            lse = empty(rows, rows_strides, torch.float32) if return_lse else None
            o_part = empty((partial_size,), (1,), torch.float32)
            lse_part = empty((lse_size,), (1,), torch.float32)
            stream = stream_of(device)
            forward(stream, pq, pk, pv, o_part.data_ptr(), lse_part.data_ptr())
            merge(stream, o_part.data_ptr(), lse_part.data_ptr(), o.data_ptr(), 0 if lse is None else lse.data_ptr())
            return o if lse is None else (o, lse)

    if torch.cuda.device_count() == 1:
        return call

    def call_on_device(q: Tensor, k: Tensor, v: Tensor, pq: int, pk: int, pv: int) -> Any:
        if _current_device() == device:  # type: ignore[misc]
            return call(q, k, v, pq, pk, pv)
        with torch.cuda.device(device):
            return call(q, k, v, pq, pk, pv)

    return call_on_device


# Graphs that torch traces hold the operators below, and tensor subclasses come by them; the eager call never does.


@torch.library.custom_op("flashmoe_science::attention_forward", mutates_args=())
def _attention_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None, kernel: str
) -> Tensor:
    q, k, v = q.detach(), k.detach(), v.detach()
    o: Tensor = flash_attention(q, k, v, causal=causal, softmax_scale=softmax_scale, kernel=kernel)
    return o


@torch.library.custom_op("flashmoe_science::attention_forward_lse", mutates_args=())
def _attention_forward_lse(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None, kernel: str
) -> tuple[Tensor, Tensor]:
    q, k, v = q.detach(), k.detach(), v.detach()
    o: Tensor
    lse: Tensor
    o, lse = flash_attention(q, k, v, causal=causal, softmax_scale=softmax_scale, return_lse=True, kernel=kernel)
    return o, lse


@_attention_forward.register_fake
def _fake_forward(q: Tensor, _k: Tensor, v: Tensor, *_options: object) -> Tensor:
    return _fake_outputs(q, v)[0]


@_attention_forward_lse.register_fake
def _fake_forward_lse(q: Tensor, _k: Tensor, v: Tensor, *_options: object) -> tuple[Tensor, Tensor]:
    return _fake_outputs(q, v)


def _fake_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs without data, in the memory order of the real ones."""
    batch, heads, seqlen_q, _ = q.shape
    strides = output_strides(batch, heads, seqlen_q, v.shape[3], canonical_strides(q.shape, q.stride()))
    o = torch.empty_strided((batch, heads, seqlen_q, v.shape[3]), strides, dtype=q.dtype, device=q.device)
    return o, torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device)


def _call_operator(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None, return_lse: bool, kernel: str
) -> Any:
    for tensor in (q, k, v):
        if not isinstance(tensor, Tensor):
            raise InputError(f"q, k and v must be torch.Tensors, got {type(tensor).__name__}")
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        _refuse_grad(q, k, v)
    operator = _attention_forward_lse if return_lse else _attention_forward
    return operator(q, k, v, causal, softmax_scale, kernel)
