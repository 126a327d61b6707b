"""Prepared calls of packed sequences. What is launched depends on their lengths, which the host does not know."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .calls import Call, allocate_lse, allocate_output, prepare_call
from .features_plan import FEATURES_KERNEL
from .tiles import Plan

# Numbers of tokens whose launches are kept. TMA is told of them, and the layers of a model repeat them; a new one takes
# the host half a millisecond (lab/hopper/14_packed_sequences.txt), in which both kernels are prepared anew.
_MAX_TOKENS = 64
_FEWEST_POINTERS = 4  # that ``prepare_launch`` writes
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001 - as in ``calls``


def prepare_packed_call(plan: Plan, q: Tensor) -> Call:
    """Compile and load the kernels of ``plan``, and return its call for tensors like ``q``, of any number of tokens."""
    if plan.kernel != FEATURES_KERNEL or not plan.launches:
        return prepare_call(plan, q)
    call = _ordered_call(plan, q.device.index)
    if torch.cuda.device_count() == 1:
        return call

    def call_on_device(q: Tensor, *arguments: Any) -> Any:
        with torch.cuda.device(q.device):
            return call(q, *arguments)

    return call_on_device


def _ordered_call(plan: Plan, device: int) -> Call:
    """Return the call that has the sequences ordered, and then attended."""
    from ..gpu.counters import counters_of
    from ..gpu.launch import current_context, prepare_launch
    from .features_prepare import prepare_features

    problem, stream_of, counter = plan.problem, _raw_stream, counters_of(device).address
    assert stream_of is not None
    has_sinks = bool(problem.sinks)
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
            lengths, stream = addresses[has_sinks:], stream_of(device)
            sequences = torch.empty(8 * problem.batch, dtype=torch.int32, device=q.device)
            order(stream, sequences.data_ptr(), *lengths, *[0] * (_FEWEST_POINTERS - 1 - len(lengths)))
            lse_at = 0 if lse is None else lse.data_ptr()
            own = (o.data_ptr(), sequences.data_ptr(), counter(stream))
            attend(stream, pq, pk, pv, o.data_ptr(), lse_at, *addresses[:has_sinks], *own)
        return o if lse is None else (o, lse)

    return call
