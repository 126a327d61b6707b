"""Packed sequences: what callers pass, checked against the contract, and described as a problem."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, UnsupportedError, shown
from .inputs import (
    DTYPE_NAMES,
    check_dropout_seed,
    check_place,
    check_shape,
    check_tensors,
    describe_bias,
    describe_heads,
    layout_of,
    pointer_alignment,
)
from .problem import AttentionProblem


def planned_length(name: str, length: object) -> int:
    """Round a longest length up, so that few plans serve all batches: to a power of two, or a multiple of 128.

    Programs behind the end of a sequence leave at once, and no loop is bounded by it. A symbol of a graph that is being
    compiled stays one: ``packed_problem`` rounds what it stands for. Raises ``InputError``.
    """
    if isinstance(length, torch.SymInt):
        return length  # type: ignore[return-value]
    if type(length) is not int or not 0 <= length < 2**31:
        raise InputError(f"{name} must be an integer from 0 to 2**31 - 1, got {shown(length)}")
    if length <= 128 or name == "max_seqlen_k":
        return min(1 << (length - 1).bit_length(), 2**31 - 1) if length > 1 else length
    return min(-(-length // 128) * 128, 2**31 - 1)


def planned_lengths(max_seqlen_q: Any, max_seqlen_k: Any, bias: Tensor | None) -> tuple[int, int]:
    """Return the longest lengths as they are planned for: rounded up, or those that a bias has rows and columns for.

    So biases that are padded to the same sizes share plans. Raises ``InputError``.
    """
    planned = planned_length("max_seqlen_q", max_seqlen_q), planned_length("max_seqlen_k", max_seqlen_k)
    if bias is None:
        return planned
    if bias.dim() != 4:
        raise InputError(f"bias must have 4 dimensions [B or 1, H or 1, rows, columns], got shape {list(bias.shape)}")
    rows, columns = bias.shape[2:]
    if rows < max_seqlen_q or columns < max_seqlen_k:
        raise InputError(
            f"bias must have at least max_seqlen_q = {max_seqlen_q} rows and max_seqlen_k = {max_seqlen_k} columns, "
            f"got shape {list(bias.shape)}"
        )
    if max(rows, columns) >= 2**31:
        raise InputError(f"bias must have fewer than 2**31 rows and columns, got shape {list(bias.shape)}")
    return rows, columns


def packed_problem(
    tensors: dict[str, Any], lengths: tuple[int, int], *, return_lse: bool, **options: Any
) -> AttentionProblem:
    """Check the tensors against the contract and describe the call. Raises ``InputError``.

    A bias and a page table may be left out of ``tensors``; ``lengths`` may be those that ``planned_lengths`` gives.
    """
    lengths = planned_lengths(*lengths, tensors.get("bias"))
    q, k, v = (tensors[name] for name in "qkv")
    page_table = tensors.get("page_table")
    if page_table is None:
        check_tensors({"q": q, "k": k, "v": v}, "T, H, D")
        tokens, letters = k.shape[:1], "Tk"
    else:
        tokens, letters = _check_pages(q, k, v), "pages, page_size"
    (_, heads, head_dim), heads_kv, head_dim_v = q.shape, k.shape[-2], v.shape[-1]
    check_shape("k", k, (*tokens, heads_kv, head_dim), f"{letters}, HK, D")
    check_shape("v", v, (*tokens, heads_kv, head_dim_v), f"{letters}, HK, DV")
    batch = _check_integers("cu_seqlens_q", tensors["cu_seqlens_q"], q) - 1
    if batch < 0:
        raise InputError("cu_seqlens_q must have shape [B + 1], so at least one element, got []")
    for name, size in (("cu_seqlens_k", batch + 1), ("seqused_q", batch), ("seqused_k", batch)):
        tensor = tensors[name]
        if (tensor is not None or name == "cu_seqlens_k") and _check_integers(name, tensor, q) != size:
            letters = "B + 1" if name == "cu_seqlens_k" else "B"
            raise InputError(f"{name} must have shape [{letters}] = [{size}], got {list(tensor.shape)}")
    check_dropout_seed(tensors["dropout_seed"], q)
    pages: dict[str, Any] = {} if page_table is None else _describe_table(page_table, q, batch, tokens[1])
    if (bias := tensors.get("bias")) is not None:
        options |= describe_bias(q, bias, (batch, heads, *lengths), "rows, columns")
    return AttentionProblem(
        batch=batch,
        heads=heads,
        heads_kv=heads_kv,
        seqlen_q=lengths[0],
        seqlen_k=lengths[1],
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=DTYPE_NAMES[q.dtype],
        return_lse=return_lse,
        q_strides=_packed_strides(q),
        k_strides=_packed_strides(k),
        v_strides=_packed_strides(v),
        pointer_alignment=pointer_alignment(q, k, v),
        packed=True,
        seqused="".join(side for side in "qk" if tensors[f"seqused_{side}"] is not None),
        **pages,
        **options,
        **describe_heads(q, batch, heads, sinks=tensors["sinks"], alibi=tensors["alibi"]),
    )


def _packed_strides(tensor: Tensor) -> tuple[int, int, int, int]:
    """Return the strides of ``[B, H, S, D]``, with pages in the place of B.

    That of tokens or pages also where there is one: their number decides nothing.
    """
    *page, token, head, column = tensor.stride()
    if page and tensor.shape[1] == 1:
        token = 0
    return page[0] if page else 0, head if tensor.shape[-2] > 1 else 0, token, column if tensor.shape[-1] > 1 else 1


def _check_pages(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    """Check what of a paged cache is no matter of sizes, and return its pages and their positions."""
    caches: dict[str, Any] = {"k": k, "v": v}
    for name, tensor in caches.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            axes = "4 dimensions [pages, page_size, HK, D] with a page_table"
            raise InputError(f"{name} must have {axes}, got shape {list(tensor.shape)}")
        if tensor.shape[1] == 0:
            raise InputError(f"{name} must have pages of at least 1 position, got shape {list(tensor.shape)}")
        _check_columns(name, tensor)
    # The first position of every page has the axes of q.
    check_tensors({"q": q, **{name: tensor[:, 0] for name, tensor in caches.items()}}, "T, H, D")
    return k.shape[0], k.shape[1]


def _check_columns(name: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise InputError(f"{name} must be contiguous along its last axis, got strides {list(tensor.stride())}")


def _describe_table(page_table: Tensor, q: Tensor, batch: int, page_size: int) -> dict[str, int]:
    """Check a page table, and return what a problem says of it."""
    if page_table.dtype != torch.int32:
        raise InputError(f"page_table must be int32, got {page_table.dtype}")
    if page_table.dim() != 2 or page_table.shape[0] != batch:
        raise InputError(f"page_table must have shape [B, P] = [{batch}, P], got {list(page_table.shape)}")
    _check_columns("page_table", page_table)
    check_place("page_table", page_table, q)
    return {"page_size": page_size, "table_stride": page_table.stride(0) if batch > 1 else 0}


def refuse_dropout_of_pages(page_table: Tensor | None, dropout_p: float) -> None:
    """Raise ``UnsupportedError`` for what is not served together; before a seed is drawn."""
    if page_table is not None and dropout_p:
        raise UnsupportedError(f"dropout_p must be 0 with a page_table, which is for inference, got {dropout_p}")


def check_room(page_table: Tensor, k: Tensor, max_seqlen_k: int) -> None:
    """Raise ``InputError`` where the pages of a sequence hold fewer keys than the longest one has."""
    room = page_table.shape[1] * k.shape[1]
    if room < max_seqlen_k:
        raise InputError(
            f"page_table must have pages for max_seqlen_k = {max_seqlen_k} keys, got {page_table.shape[1]} "
            f"of {k.shape[1]} positions, which hold {room}"
        )


def _check_integers(name: str, tensor: Any, q: Tensor) -> int:
    """Check a vector of lengths and return its size."""
    if not isinstance(tensor, Tensor):
        raise InputError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype != torch.int32:
        raise InputError(f"{name} must be int32, got {tensor.dtype}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise InputError(
            f"{name} must have 1 dimension and be contiguous, got shape {list(tensor.shape)}, "
            f"strides {list(tensor.stride())}"
        )
    check_place(name, tensor, q)
    return tensor.shape[0]


def check_lengths(
    side: str, tokens: int | None, cu_seqlens: Tensor, longest: int, seqused: Tensor | None
) -> list[tuple[int, int]]:
    """Read the lengths of one side, ``q`` or ``k``, and raise ``InputError`` where they contradict one another.

    ``tokens`` is None where pages hold them. Returned is where each sequence starts, and where what is used of it ends.
    """
    starts = cu_seqlens.tolist()
    name = f"cu_seqlens_{side}"
    places = []
    if tokens is not None and (starts[0] < 0 or starts[-1] > tokens):
        raise InputError(f"{name} must be from 0 to {tokens}, the tokens of {side}, got {starts[0]} to {starts[-1]}")
    used = [None] * (len(starts) - 1) if seqused is None else seqused.tolist()
    for b, (start, end, length) in enumerate(zip(starts, starts[1:], used, strict=False)):
        if end < start:
            raise InputError(f"{name} must not decrease, got {start} and then {end} at index {b + 1}")
        if length is not None and not 0 <= length <= end - start:
            raise InputError(f"seqused_{side} must be from 0 to {end - start} at index {b}, got {length}")
        # Rows behind seqused_q are in the grid too: they are set to 0.
        asked = length if length is not None and side == "k" else end - start
        if asked > longest:
            raise InputError(f"max_seqlen_{side} must be at least {asked}, the length of sequence {b}, got {longest}")
        places.append((start, end if length is None else start + length))
    return places


def layout_of_tokens(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return ``layout_of`` but for the number of tokens, or pages, which decides nothing."""
    layout = layout_of(tensor)
    return layout and (layout[0][1:], len(layout[0]), *layout[1:])


def layout_of_table(page_table: Tensor | None) -> tuple[Any, ...] | None:
    """Return ``layout_of`` but for how many pages a sequence may have, which decides nothing."""
    layout = layout_of(page_table)
    return layout and (layout[0][:1], len(layout[0]), *layout[1:])
