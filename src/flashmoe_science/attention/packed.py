"""Packed sequences: the lengths that are planned for, the problem of a call, and what lies in its tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, shown
from ..gpu.checks import check_dense
from .checks import DTYPE_NAMES, check_attended_packed, check_pages
from .inputs import Options, check_all_options, check_kinds, describe_rest
from .problem import AttentionProblem, Strides
from .reference import keys_in_reach


def planned_length(name: str, length: object) -> int:
    """Round a longest length up, so that few plans serve all batches: to a power of two, or a multiple of 128.

    Programs behind the end of a sequence leave at once, and no loop is bounded by it. A symbol of a graph that is being
    compiled stays one: ``packed_problem`` rounds its value. Raises ``InputError``.
    """
    if isinstance(length, torch.SymInt):
        return length  # type: ignore[return-value]
    if type(length) is not int or not 0 <= length < 2**31:
        raise InputError(f"{name} must be an integer from 0 to 2**31 - 1, got {shown(length)}")
    if length <= 128 or name == "max_seqlen_k":
        return min(1 << (length - 1).bit_length(), 2**31 - 1) if length > 1 else length
    return min(-(-length // 128) * 128, 2**31 - 1)


def planned_lengths(max_seqlen_q: Any, max_seqlen_k: Any, bias: Tensor | None) -> tuple[int, int]:
    """Return the longest lengths that are planned for: rounded up, or the rows and columns of a bias.

    So biases that are padded to the same sizes share plans. Raises ``InputError``.
    """
    planned = planned_length("max_seqlen_q", max_seqlen_q), planned_length("max_seqlen_k", max_seqlen_k)
    if bias is None:
        return planned
    check_dense("bias", bias)
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
    tensors: Mapping[str, Any], lengths: tuple[int, int], *, return_lse: bool, **options: Any
) -> AttentionProblem:
    """Check the tensors of a call against the contract, and describe its problem. Raises ``InputError``.

    Args:
        tensors: the tensors by name; those that are None may be left out.
        lengths: max_seqlen_q and max_seqlen_k, or what ``planned_lengths`` returns for them.
        return_lse: whether the LSE is asked for.
        options: other fields of ``Options``.
    """
    asked = check_all_options(Options(**{"causal": False, **options}, max_seqlens=lengths, return_lse=return_lse))
    needed = {name: tensors.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    return problem_of_packed(check_kinds({**needed, **tensors}, asked), asked)


def problem_of_packed(tensors: Mapping[str, Tensor], options: Options) -> AttentionProblem:
    """Check tensors against the contract of ``flash_attention_varlen``, and describe the problem."""
    assert options.max_seqlens is not None
    lengths = planned_lengths(*options.max_seqlens, tensors.get("bias"))
    check_attended_packed(tensors, lengths)
    q, k, v, page_table = tensors["q"], tensors["k"], tensors["v"], tensors.get("page_table")
    _, heads, head_dim = q.shape
    batch = tensors["cu_seqlens_q"].shape[0] - 1
    pages: dict[str, int] = {}
    if page_table is not None:
        pages = {"page_size": k.shape[1], "table_stride": page_table.stride(0) if batch > 1 else 0}
    return AttentionProblem(
        batch=batch,
        heads=heads,
        heads_kv=k.shape[-2],
        seqlen_q=lengths[0],
        seqlen_k=lengths[1],
        head_dim=head_dim,
        head_dim_v=v.shape[-1],
        dtype=DTYPE_NAMES[q.dtype],
        q_strides=packed_strides(q),
        k_strides=packed_strides(k),
        v_strides=packed_strides(v),
        packed=True,
        seqused="".join(side for side in "qk" if f"seqused_{side}" in tensors),
        **pages,  # type: ignore[arg-type] # callers may pass what types rule out
        **describe_rest(tensors, options, batch),
    )


def packed_strides(tensor: Tensor) -> Strides:
    """Return the strides of ``[B, H, S, D]``, with pages in the place of B.

    The stride of tokens or pages stays also where there is one: their number decides nothing.
    """
    *page, token, head, column = tensor.stride()
    if page and tensor.shape[1] == 1:
        token = 0
    return page[0] if page else 0, head if tensor.shape[-2] > 1 else 0, token, column if tensor.shape[-1] > 1 else 1


def check_values(tensors: Mapping[str, Tensor], options: Options) -> None:
    """Check what a prepared call does not depend on: numbers of tokens, and lengths and pages where they are read."""
    assert options.max_seqlens is not None
    check_room(tensors, options.max_seqlens[1])
    if reads_lengths(tensors["q"].device):
        places = check_lengths(tensors, options.max_seqlens)
        if "page_table" in tensors:
            reached = [keys_in_reach(*place, options.window) for place in zip(*places, strict=True)]  # type: ignore[call-arg] # callers may pass what types rule out
            check_pages(tensors["page_table"], *tensors["k"].shape[:2], reached)  # type: ignore[call-arg] # callers may pass what types rule out


def reads_lengths(device: torch.device) -> bool:
    """Return whether the host reads lengths: it would wait for a GPU, which a capture does not allow."""
    if device.type != "cuda":
        return True
    return os.environ.get("FLASHMOE_CHECK") == "1" and not torch.cuda.is_current_stream_capturing()


def check_room(tensors: Mapping[str, Tensor], max_seqlen_k: int) -> None:
    """Raise ``InputError`` unless k and v have one number of tokens, and pages hold as many keys as the longest has."""
    k, v, page_table = tensors["k"], tensors["v"], tensors.get("page_table")
    if k.shape[0] != v.shape[0]:
        noun = "tokens" if page_table is None else "pages"
        raise InputError(f"v must have as many {noun} as k, {k.shape[0]}, got {v.shape[0]}")
    if page_table is not None and page_table.shape[1] * k.shape[1] < max_seqlen_k:
        raise InputError(
            f"page_table must have pages for max_seqlen_k = {max_seqlen_k} keys, got {page_table.shape[1]} "
            f"of {k.shape[1]} positions, which hold {page_table.shape[1] * k.shape[1]}"
        )


def check_lengths(tensors: Mapping[str, Tensor], longest: tuple[int, int]) -> list[list[tuple[int, int]]]:
    """Read the lengths of queries and keys, and raise ``InputError`` where they contradict one another.

    Returns:
        For q and for k: where each sequence starts, and where the used part of it ends.
    """
    tokens = tensors["q"].shape[0], None if "page_table" in tensors else tensors["k"].shape[0]
    return [
        _check_side(side, tokens_, tensors[f"cu_seqlens_{side}"], most, tensors.get(f"seqused_{side}"))
        for side, tokens_, most in zip("qk", tokens, longest, strict=True)
    ]


def _check_side(
    side: str, tokens: int | None, cu_seqlens: Tensor, longest: int, seqused: Tensor | None
) -> list[tuple[int, int]]:
    """Read the lengths of one side, ``q`` or ``k``; ``tokens`` is None where pages hold them."""
    starts = cu_seqlens.tolist()
    name = f"cu_seqlens_{side}"
    places = []
    if side == "k" and seqused is not None:
        return _check_used_keys(tokens, starts, longest, seqused.tolist())
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


def _check_used_keys(tokens: int | None, starts: list[int], longest: int, used: list[int]) -> list[tuple[int, int]]:
    """Check keys of which lengths say where they end: sequences lie in any order, and may share keys.

    In pages, where ``tokens`` is None, it counts for nothing where they start.
    """
    for b, (start, length) in enumerate(zip(starts, used, strict=False)):
        if tokens is not None and not 0 <= start <= tokens:
            raise InputError(f"cu_seqlens_k must be from 0 to {tokens}, the tokens of k, got {start} at index {b}")
        if length < 0 or (tokens is not None and length > tokens - start):
            most = "" if tokens is None else f" to {tokens - start}"
            raise InputError(f"seqused_k must be from 0{most} at index {b}, got {length}")
        if length > longest:
            raise InputError(f"max_seqlen_k must be at least {length}, the length of sequence {b}, got {longest}")
    return [(start, start + length) for start, length in zip(starts, used, strict=False)]


def check_own_keys(tensors: Mapping[str, Tensor]) -> None:
    """Raise ``InputError`` where gradients of k and v would be wrong: those of keys that are shared are not added up.

    Where the host does not read lengths, ``mark_shared_keys`` shows it.
    """
    if "seqused_k" not in tensors or not reads_lengths(tensors["q"].device):
        return
    starts, used = tensors["cu_seqlens_k"].tolist(), tensors["seqused_k"].tolist()
    for b, (start, after, length) in enumerate(zip(starts[:-1], starts[1:], used, strict=True)):
        if start + length > after:
            raise InputError(
                f"cu_seqlens_k must be at least {start + length} at index {b + 1} for gradients of k and v, "
                f"as sequence {b} uses {length} keys from {start}, got {after}",
                hint="gradients of keys that sequences share are not added up: give each its own, as in k[index]",
            )


def mark_shared_keys(lse: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the LSE for gradients, which makes all of them NaN where sequences have no keys of their own."""
    starts = tensors["cu_seqlens_k"]
    return lse.masked_fill((starts[:-1] + tensors["seqused_k"] > starts[1:]).any(), torch.nan)
