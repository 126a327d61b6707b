"""From a described call to its launch. Prepared calls have plan, kernels, grid and scalars settled.

A prepared call takes q, k and v, their addresses, and the other tensors in the order of ``problem.extras``. It
allocates its outputs and launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...gpu.checks import check_storages
from ...gpu.device import gpu_at
from .. import reference
from ..inputs import AttentionCall, batched_problem, layouts_of
from ..masks.dense import with_dense_mask
from ..mixed.plan import MIXED_KERNEL
from ..packed import check_values, planned_lengths, problem_of_packed
from ..problem import AttentionProblem
from ..tiles import ForwardConfig, HopperConfig, Plan
from .plan import plan_attention
from .variants_plan import FEATURES_KERNEL

Call = Callable[..., Any]

_prepared: dict[tuple[Any, ...], Call] = {}
MAX_PREPARED = 8192  # entries, about 2 KiB each
# Launches are kept for so many numbers of tokens: tensor maps hold the number, and the layers of a model repeat it. A
# new one takes the host half a millisecond (lab/hopper/14_packed_sequences.txt), as both kernels are prepared anew.
_MAX_TOKENS = 64
_FEWEST_POINTERS = 4  # that ``prepare_launch`` writes

# Absent from CPU builds of torch.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001 - what torch.compile's code calls
_current_device = getattr(torch._C, "_cuda_getDevice", None)  # noqa: SLF001 - what torch.cuda.current_device calls
# What Inductor's generated code allocates with; torch.empty_like takes half as long again (lab/launch_path.txt).
_empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined] # noqa: SLF001


def run(call: AttentionCall) -> Any:
    """Make a call, prepared once for all that have its options and layouts. Return o, or the pair of o and the LSE."""
    tensors, options = call.tensors, call.options
    packed = options.max_seqlens is not None
    key: tuple[Any, ...] = (options, *tensors, *layouts_of(tensors, packed=packed))
    if options.max_seqlens is not None:
        lengths = planned_lengths(*options.max_seqlens, tensors.get("bias"))
        key = (*options[:4], lengths, *options[5:], *key[1:])
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = remember(_prepared, key, prepare(call))
    if packed:
        check_values(tensors, options)
    q, k, v, *extras = tensors.values()
    return prepared(q, k, v, q.data_ptr(), k.data_ptr(), v.data_ptr(), *extras)


def prepare(call: AttentionCall) -> Call:
    """Check the tensors of a call, plan it, compile and load its kernels, and return the prepared call."""
    packed = call.options.max_seqlens is not None
    problem = (problem_of_packed if packed else batched_problem)(call.tensors, call.options)
    q = call.tensors["q"]
    return prepare_call(plan_attention(problem, gpu_at(q.device), call.options.kernel), q.device, q.dtype)


def remember(prepared: dict[tuple[Any, ...], Any], key: tuple[Any, ...], call: Any) -> Any:
    """Keep a prepared call for its key, and return it."""
    if len(prepared) >= MAX_PREPARED:
        prepared.clear()
    prepared[key] = call
    return call


def prepare_call(plan: Plan, device: torch.device, dtype: torch.dtype) -> Call:
    """Compile and load the kernels of ``plan``, and return its call."""
    if plan.kernel == "reference":
        return _reference_call(plan.problem)
    if device.type == "cpu":
        return _interpreter_call(plan)
    index = device.index
    if plan.kernel == MIXED_KERNEL and plan.launches:
        call = _mixed_call(plan, index)
    elif plan.problem.packed and plan.kernel == FEATURES_KERNEL and plan.launches:
        call = _ordered_call(plan, index)
    else:
        call = _cuda_call(plan, index, dtype)
    if torch.cuda.device_count() == 1:
        return call

    def call_on_device(q: Tensor, k: Tensor, v: Tensor, pq: int, pk: int, pv: int, *extras: Tensor) -> Any:
        if _current_device() == index:  # type: ignore[misc]
            return call(q, k, v, pq, pk, pv, *extras)
        with torch.cuda.device(index):
            return call(q, k, v, pq, pk, pv, *extras)

    return call_on_device


def _reference_call(problem: AttentionProblem) -> Call:
    names = problem.extras
    attend: Any = reference.attention_varlen if problem.packed else reference.attention
    options: dict[str, Any] = {
        "causal": problem.causal,
        "softmax_scale": problem.softmax_scale,
        "window": problem.window,
        "softcap": problem.softcap,
        "dropout_p": problem.dropout_p,
    }

    def call(q: Tensor, k: Tensor, v: Tensor, _pq: int, _pk: int, _pv: int, *extras: Tensor) -> Any:
        check_storages({"q": q, "k": k, "v": v, **dict(zip(names, extras, strict=True))})
        given = with_dense_mask(problem, dict(zip(names, extras, strict=True)))
        exact, exact_lse = attend(q, k, v, **options, **given)
        o = allocate_output(problem, q).copy_(exact)
        return (o, allocate_lse(problem, q).copy_(exact_lse)) if problem.return_lse else o

    return call


def allocate_output(problem: AttentionProblem, q: Tensor) -> Tensor:
    """Return the output, not written yet."""
    if problem.packed:
        return torch.empty((*q.shape[:2], problem.head_dim_v), dtype=q.dtype, device=q.device)
    shape = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim_v)
    return torch.empty(shape, dtype=q.dtype, device=q.device).as_strided(shape, problem.output_strides)


def allocate_lse(problem: AttentionProblem, q: Tensor) -> Tensor:
    """Return the LSE, not written yet."""
    if problem.packed:  # rows of tokens, so that no stride depends on their number
        return torch.empty(q.shape[:2], dtype=torch.float32, device=q.device).t()
    return torch.empty((problem.batch, problem.heads, problem.seqlen_q), dtype=torch.float32, device=q.device)


def _mixed_call(plan: Plan, device: int) -> Call:
    from ..mixed.calls import cuda_call

    return cuda_call(plan, device)


def _interpreter_call(plan: Plan) -> Call:
    from .prepare import interpret, prepare_kernels

    if plan.kernel == MIXED_KERNEL and plan.problem.rows:
        from ..mixed.calls import interpreted_call

        return interpreted_call(plan)
    problem = plan.problem
    if problem.dtype == "bf16":
        raise UnsupportedError(
            "Triton's interpreter multiplies bf16 wrongly", hint="use fp16 or fp32 with TRITON_INTERPRET=1"
        )
    kernels = prepare_kernels(plan)

    def call(q: Tensor, k: Tensor, v: Tensor, _pq: int, _pk: int, _pv: int, *extras: Tensor) -> Any:
        o, lse = allocate_output(problem, q), allocate_lse(problem, q)
        if problem.rows:
            for kernel in kernels:
                interpret(kernel, (q, k, v, o, lse, *extras))
        return (o, lse) if problem.return_lse else o

    return call


def _cuda_call(plan: Plan, device: int, dtype: torch.dtype) -> Call:
    """Return the call that allocates the outputs, and the partials where keys are split, and launches."""
    from ...gpu.launch import prepare_launch
    from .prepare import prepare_kernels

    launches = [
        prepare_launch(kernel.source, plan.arch, device, kernel.grid, kernel.scalars, kernel.tensor_maps)
        for kernel in prepare_kernels(plan)
    ]
    if plan.problem.features:
        return _featured_call(plan, device, launches)
    return _plain_call(plan, device, dtype, launches)


def _plain_call(plan: Plan, device: int, dtype: torch.dtype, launches: Sequence[Callable[..., None]]) -> Call:
    """Return the call of a problem without features, with as little as possible between it and its launch."""
    from ...gpu.counters import counters_of

    problem = plan.problem
    shape = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim_v)
    strides, rows = problem.output_strides, shape[:3]
    rows_strides = (rows[1] * rows[2], rows[2], 1)
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

    return call


def _featured_call(plan: Plan, device: int, launches: Sequence[Callable[..., None]]) -> Call:
    """Return the call that gives the kernel the addresses of more tensors."""
    problem, stream_of = plan.problem, _raw_stream
    assert stream_of is not None
    return_lse = problem.return_lse

    def call(q: Tensor, _k: Tensor, _v: Tensor, pq: int, pk: int, pv: int, *extras: Tensor) -> Any:
        o = allocate_output(problem, q)
        lse = allocate_lse(problem, q) if return_lse else None
        lse_at = 0 if lse is None else lse.data_ptr()
        addresses = [tensor.data_ptr() for tensor in extras]
        stream = stream_of(device)
        if len(launches) == 1:
            launches[0](stream, pq, pk, pv, o.data_ptr(), lse_at, *addresses)
        elif launches:
            assert isinstance(plan.config, ForwardConfig)
            lse_part = torch.empty(plan.config.num_splits * problem.rows, dtype=torch.float32, device=q.device)
            o_part = torch.empty(lse_part.numel() * problem.head_dim_v, dtype=torch.float32, device=q.device)
            forward, merge = launches
            forward(stream, pq, pk, pv, o_part.data_ptr(), lse_part.data_ptr(), *addresses)
            merge(stream, o_part.data_ptr(), lse_part.data_ptr(), o.data_ptr(), lse_at)
        return o if lse is None else (o, lse)

    return call


def _ordered_call(plan: Plan, device: int) -> Call:
    """Return the call of packed sequences on Hopper: one kernel orders the sequences, the next attends to them."""
    from ...gpu.counters import counters_of
    from ...gpu.launch import current_context, prepare_launch
    from .variants_prepare import prepare_features

    problem, stream_of, counter = plan.problem, _raw_stream, counters_of(device).address
    assert stream_of is not None
    of_heads = bool(problem.sinks) + bool(problem.alibi)  # extras that the first kernel does not read
    width = max(problem.head_dim, problem.head_dim_v)

    @functools.lru_cache(maxsize=_MAX_TOKENS)
    def launches_of(tokens_q: int, tokens_k: int) -> tuple[Callable[..., None], ...]:
        with current_context(device):  # the thread that calls may not have used the GPU yet
            return tuple(
                prepare_launch(kernel.source, plan.arch, device, kernel.grid, kernel.scalars, kernel.tensor_maps)
                for kernel in prepare_features(plan, (tokens_q, tokens_k))
            )

    def call(q: Tensor, k: Tensor, _v: Tensor, pq: int, pk: int, pv: int, *extras: Tensor) -> Any:
        o = allocate_output(problem, q)
        lse = allocate_lse(problem, q) if problem.return_lse else None
        if q.shape[0]:
            order, attend = launches_of(q.shape[0], k.shape[0])
            if not k.shape[0]:  # TMA reads from somewhere; what it reads is masked
                nothing = torch.empty(problem.heads_kv * width, dtype=q.dtype, device=q.device)
                pk = pv = nothing.data_ptr()
            addresses = [tensor.data_ptr() for tensor in extras]
            lengths, stream = addresses[of_heads:], stream_of(device)
            sequences = torch.empty(8 * problem.batch, dtype=torch.int32, device=q.device)
            order(stream, sequences.data_ptr(), *lengths, *[0] * (_FEWEST_POINTERS - 1 - len(lengths)))
            lse_at = 0 if lse is None else lse.data_ptr()
            own = (o.data_ptr(), sequences.data_ptr(), counter(stream))
            attend(stream, pq, pk, pv, o.data_ptr(), lse_at, *addresses[:of_heads], *own)
        return o if lse is None else (o, lse)

    return call
