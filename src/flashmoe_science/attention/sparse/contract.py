"""The contract of ``sparse_mla``: what its tensors may be, and what lies in them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import InputError, UnsupportedError, shown
from ...gpu.checks import check_memory, check_storages, check_tensor
from ..checks import DTYPE_NAMES, check_shape
from ..inputs import pointer_alignment
from ..problem import LARGEST_SCALE, canonical_strides
from .problem import FP8_COLUMNS, FP8_ROW_BYTES, ROTATED_COLUMNS, ROW_ALIGNMENT, SparseProblem

FP8_ROWS = torch.uint8  # the dtype of a cache in fp8: its rows are bytes of three dtypes


class SparseOptions(NamedTuple):
    """What a call asks for besides its tensors."""

    head_dim_v: int = 512
    softmax_scale: float | None = None
    num_splits: int = 0
    batch_invariant: bool = False
    return_lse: bool = False
    kernel: str = "auto"


class SparseCallOf(NamedTuple):
    """One call of ``sparse_mla``. ``describe_sparse_call`` makes it."""

    tensors: Mapping[str, Tensor]  # those that are given
    options: SparseOptions


def describe_sparse_call(given: Mapping[str, Any], options: SparseOptions) -> SparseCallOf:
    """Return what the caller passed as a call; ``None`` is left out.

    Raises:
        InputError: it is no tensor, or an option has the wrong type.
        UnsupportedError: gradients would be recorded.
    """
    tensors = {
        name: value for name, value in given.items() if value is not None or name in ("q", "kv_cache", "indices")
    }
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    wanted = [name for name, tensor in tensors.items() if tensor.requires_grad] if torch.is_grad_enabled() else []
    if wanted:
        raise UnsupportedError(
            f"there is no backward of sparse_mla, and gradients are required of {', '.join(wanted)}",
            hint="call it under torch.no_grad(), or pass detached tensors",
        )
    return SparseCallOf(tensors, _check_types(options))


def _check_types(options: SparseOptions) -> SparseOptions:
    """Return options in their types: True == 1 == 1.0, and equal keys must mean equal calls. Raises ``InputError``."""
    for name in ("head_dim_v", "num_splits"):
        value = getattr(options, name)
        if type(value) is not int or abs(value) >= 2**31:
            raise InputError(f"{name} must be an integer, got {shown(value)}")
    for name in ("batch_invariant", "return_lse"):
        if type(getattr(options, name)) is not bool:
            raise InputError(f"{name} must be True or False, got {shown(getattr(options, name))}")
    if type(options.kernel) is not str:
        raise InputError(f"kernel must be the name of a kernel, got {shown(options.kernel)}")
    scale = options.softmax_scale
    if scale is None:
        return options
    if not isinstance(scale, (int, float)) or type(scale) is bool:  # type: ignore[redundant-expr] # callers may pass what types rule out
        raise InputError(f"softmax_scale must be a number, got {shown(scale)}")
    if isinstance(scale, int) and abs(scale) > LARGEST_SCALE:  # perhaps too large for a float
        raise InputError(f"softmax_scale must be at most {LARGEST_SCALE:.3g} in size, got a larger integer")
    return options._replace(softmax_scale=float(scale))


def sparse_problem_of(call: SparseCallOf) -> SparseProblem:
    """Check a call against the contract of ``sparse_mla``, and describe its problem.

    Raises:
        InputError: with the argument's name, what was expected and what was got.
    """
    tensors, options = call
    _check_tensors(tensors)
    q, cache, indices = tensors["q"], tensors["kv_cache"], tensors["indices"]
    batch, heads, seqlen_q, head_dim = q.shape
    pages, length = cache.shape[:2]
    is_fp8 = cache.dtype == FP8_ROWS
    if is_fp8:
        _check_fp8(q, cache, options.head_dim_v)
    else:
        check_shape("kv_cache", cache, (pages, length, 1, head_dim), "pages or B, positions, 1, D")
    check_shape("indices", indices, (batch, seqlen_q, indices.shape[2]), "B, Sq, K")
    table, sinks = tensors.get("page_table"), tensors.get("sinks")
    if table is None and pages != batch:
        raise InputError(
            f"kv_cache must have one row for each of {batch} sequences, got {pages}",
            hint="a pool that indices name rows of is passed as pool.view(1, -1, 1, D).expand(B, -1, -1, -1)",
        )
    if table is not None:
        if table.dim() != 2 or table.shape[0] != batch:
            raise InputError(f"page_table must have shape [B, P] = [{batch}, P], got {list(table.shape)}")
        if not length:
            raise InputError("kv_cache must have pages of at least 1 position, got 0")
    if sinks is not None:
        if sinks.dtype not in DTYPE_NAMES:
            raise InputError(f"sinks must be float16, bfloat16 or float32, got {sinks.dtype}")
        check_shape("sinks", sinks, (heads,), "H")
    page, row, _, _ = canonical_strides(cache.shape, cache.stride())
    sequence, query, _ = (step if n > 1 else 0 for n, step in zip(indices.shape, indices.stride(), strict=True))
    return SparseProblem(
        batch=batch,
        heads=heads,
        seqlen_q=seqlen_q,
        capacity=length if table is None else length * table.shape[1],
        top_k=indices.shape[2],
        head_dim=head_dim,
        head_dim_v=options.head_dim_v,
        dtype=DTYPE_NAMES[q.dtype],
        page_size=0 if table is None else length,
        pages=pages,
        is_fp8=is_fp8,
        sinks="" if sinks is None else DTYPE_NAMES[sinks.dtype],
        softmax_scale=options.softmax_scale,
        num_splits=options.num_splits,
        batch_invariant=options.batch_invariant,
        return_lse=options.return_lse,
        q_strides=canonical_strides(q.shape, q.stride()),
        kv_strides=(page, row),
        table_stride=0 if table is None else table.stride(0),
        index_strides=(sequence, query),
        pointer_alignment=pointer_alignment(q, cache),
    )


def _check_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Check device, dtype, axes and last stride of every tensor. Raises ``InputError``."""
    q = tensors["q"]
    if q.device.type not in ("cpu", "cuda"):
        raise InputError(f"q must be on a CUDA device or the CPU, got {q.device}")
    if q.dtype not in DTYPE_NAMES:
        raise InputError(f"q must be float16, bfloat16 or float32, got {q.dtype}")
    cache = tensors["kv_cache"]
    if cache.dtype not in (q.dtype, FP8_ROWS):
        raise InputError(
            f"kv_cache must be {q.dtype}, or {FP8_ROWS} for rows in fp8, got {cache.dtype}",
            hint="pack_mla_rows makes rows in fp8; of another dtype, .view(torch.uint8) is their bytes",
        )
    axes = {"q": "B, H, Sq, D", "kv_cache": "pages or B, positions, 1, D", "indices": "B, Sq, K"}
    dtypes = {"indices": torch.int32, "page_table": torch.int32}
    for name, tensor in tensors.items():
        check_memory(name, tensor)
        if tensor.device != q.device:
            raise InputError(f"{name} must be on the device of q, {q.device}, got {tensor.device}")
        letters = axes.get(name)
        if letters is not None and tensor.dim() != letters.count(",") + 1:
            expected = f"{letters.count(',') + 1} dimensions [{letters}]"
            raise InputError(f"{name} must have {expected}, got shape {list(tensor.shape)}")
        if name in dtypes and tensor.dtype != dtypes[name]:
            raise InputError(f"{name} must be {dtypes[name]}, got {tensor.dtype}")
        if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise InputError(
                f"{name} must be contiguous along its last axis, got strides {list(tensor.stride())}",
                hint=".contiguous() makes a copy that is",
            )


def _check_fp8(q: Tensor, cache: Tensor, head_dim_v: int) -> None:
    """Check a cache whose rows are bytes, and that q has the columns of such rows. Raises ``InputError``."""
    check_shape("kv_cache", cache, (*cache.shape[:2], 1, FP8_ROW_BYTES), "pages or B, positions, 1, bytes of a row")
    columns = FP8_COLUMNS + ROTATED_COLUMNS
    if q.shape[3] != columns:
        raise InputError(f"q must have D = {columns} with a cache in fp8, got {q.shape[3]}")
    if head_dim_v != FP8_COLUMNS:
        raise InputError(f"head_dim_v must be {FP8_COLUMNS} with a cache in fp8, got {head_dim_v}")
    steps = canonical_strides(cache.shape, cache.stride())[:2]
    if pointer_alignment(cache) < ROW_ALIGNMENT or any(step % ROW_ALIGNMENT for step in steps):
        found = f"an address that is one of {pointer_alignment(cache)}, and strides {list(cache.stride())}"
        raise InputError(
            f"kv_cache must have rows that start at multiples of {ROW_ALIGNMENT} bytes, got {found}",
            hint=".clone() makes a copy whose rows do",
        )


def check_indices(tensors: Mapping[str, Tensor]) -> None:
    """Check at each call that indices and pages lie inside: with ``FLASHMOE_CHECK=1``, and of CPU tensors always.

    Raises:
        InputError: with the place, what was expected and what was got.
        UnsupportedError: a CUDA graph is being captured, which cannot wait.
    """
    indices, cache, table = tensors["indices"], tensors["kv_cache"], tensors.get("page_table")
    if os.environ.get("FLASHMOE_CHECK") != "1" and indices.is_cuda:
        return
    check_storages(tensors)
    if indices.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "FLASHMOE_CHECK=1 reads indices, and a graph is being captured", hint="capture without FLASHMOE_CHECK=1"
        )
    pages, length = cache.shape[:2]
    capacity = length if table is None else length * table.shape[1]
    outside = ((indices < -1) | (indices >= capacity)).nonzero()
    if len(outside):
        place = outside[0].tolist()
        raise InputError(
            f"indices{place} must be from 0 to {capacity - 1}, or -1 for none, got {int(indices[tuple(place)])}"
        )
    if table is None or not indices.numel():
        return
    sequences = torch.arange(len(indices), device=indices.device)[:, None, None].expand_as(indices)
    used = torch.zeros_like(table, dtype=torch.bool)
    used[sequences[indices >= 0], indices[indices >= 0].long() // length] = True
    wrong = (used & ((table < 0) | (table >= pages))).nonzero()
    if len(wrong):
        b, i = wrong[0].tolist()
        raise InputError(f"page_table[{b}, {i}] must be from 0 to {pages - 1}, got {int(table[b, i])}")
