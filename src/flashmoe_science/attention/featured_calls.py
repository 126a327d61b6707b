"""Prepared calls on a GPU of what is not plain: with features, or with keys that are split over blocks.

Fingerprints of plain calls do not follow this file: see ``fingerprints.NOT_FOLLOWED_OF_PLAIN``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .calls import Call, _empty_strided_cuda, _raw_stream, allocate_lse, allocate_output
from .tiles import ForwardConfig, Plan


def partial_sizes(plan: Plan) -> tuple[int, int]:
    """Return the elements of the partial outputs, and of their largest scores and sums."""
    assert isinstance(plan.config, ForwardConfig)
    rows = plan.config.num_splits * plan.problem.rows
    return rows * plan.problem.head_dim_v, 2 * rows


def featured_call(plan: Plan, device: int, dtype: torch.dtype, launches: Sequence[Callable[..., None]]) -> Call:
    """Return the call that gives kernels the addresses of more tensors, and merges shares where there are some."""
    return _split_call(plan, device, dtype, launches) if len(launches) > 1 else _whole_call(plan, device, launches)


def _whole_call(plan: Plan, device: int, launches: Sequence[Callable[..., None]]) -> Call:
    """Return the call of one kernel, or of none where the output is empty."""
    problem, stream_of = plan.problem, _raw_stream
    assert stream_of is not None
    return_lse = problem.return_lse

    def call(q: Tensor, _k: Tensor, _v: Tensor, pq: int, pk: int, pv: int, *extras: Tensor) -> Any:
        o = allocate_output(problem, q)
        lse = allocate_lse(problem, q) if return_lse else None
        for launch in launches:
            addresses = [tensor.data_ptr() for tensor in extras]
            launch(stream_of(device), pq, pk, pv, o.data_ptr(), 0 if lse is None else lse.data_ptr(), *addresses)
        return o if lse is None else (o, lse)

    return call


def _split_call(plan: Plan, device: int, dtype: torch.dtype, launches: Sequence[Callable[..., None]]) -> Call:
    """Return the call whose first kernel leaves partial results of shares of the keys, and whose second merges them."""
    problem = plan.problem
    shape = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim_v)
    strides, rows = problem.output_strides, shape[:3]
    rows_strides = (rows[1] * rows[2], rows[2], 1)
    empty, stream_of, return_lse = _empty_strided_cuda, _raw_stream, problem.return_lse
    assert stream_of is not None
    o_size, sums_size = partial_sizes(plan)
    forward, merge = launches

    def call(_q: Tensor, _k: Tensor, _v: Tensor, pq: int, pk: int, pv: int, *extras: Tensor) -> Any:
        o = empty(shape, strides, dtype)
        lse = empty(rows, rows_strides, torch.float32) if return_lse else None
        o_part = empty((o_size,), (1,), torch.float32)
        sums_part = empty((sums_size,), (1,), torch.float32)
        o_part_at, sums_part_at = o_part.data_ptr(), sums_part.data_ptr()
        stream = stream_of(device)
        forward(stream, pq, pk, pv, o_part_at, sums_part_at, *[tensor.data_ptr() for tensor in extras])
        merge(stream, o_part_at, sums_part_at, o.data_ptr(), 0 if lse is None else lse.data_ptr())
        return o if lse is None else (o, lse)

    return call
