"""Checks of tensors against the contract of attention. Each function raises, or returns None and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from ..errors import InputError, UnsupportedError, shown
from ..gpu.checks import (
    check_dense,
    check_memory,
    check_not_negative,
    check_one_device,
    check_storages,
    check_tensor,
)
from ..gpu.memory_overlap import has_internal_overlap, meet

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def check_attended(tensors: Mapping[str, Tensor]) -> None:
    """Raise ``InputError`` where tensors of ``flash_attention`` break its contract."""
    check_tensors(tensors, "B, H, S, D")
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    batch, heads, seqlen_q, head_dim = q.shape
    heads_kv, seqlen_k = k.shape[1], k.shape[2]
    check_shape("k", k, (batch, heads_kv, seqlen_k, head_dim), "B, HK, Sk, D")
    check_shape("v", v, (batch, heads_kv, seqlen_k, v.shape[3]), "B, HK, Sk, DV")
    check_extras(tensors, (batch, heads, seqlen_q, seqlen_k), "Sq, Sk")


def check_attended_packed(tensors: Mapping[str, Tensor], lengths: tuple[int, int]) -> None:
    """Raise ``InputError`` where tensors of ``flash_attention_varlen`` break its contract.

    Args:
        tensors: the tensors of the call by name.
        lengths: the longest queries and keys that are planned for, which a bias has rows and columns for.
    """
    q, k, v, page_table = tensors["q"], tensors["k"], tensors["v"], tensors.get("page_table")
    if page_table is None:
        check_tensors(tensors, "T, H, D")
        tokens, letters = k.shape[:1], "Tk"
    else:
        _check_pages(tensors)
        tokens, letters = k.shape[:2], "pages, page_size"
    _, heads, head_dim = q.shape
    heads_kv, head_dim_v = k.shape[-2], v.shape[-1]
    check_shape("k", k, (*tokens, heads_kv, head_dim), f"{letters}, HK, D")
    check_shape("v", v, (*tokens, heads_kv, head_dim_v), f"{letters}, HK, DV")
    _check_integers("cu_seqlens_q", tensors["cu_seqlens_q"], q)
    batch = tensors["cu_seqlens_q"].shape[0] - 1
    if batch < 0:
        raise InputError("cu_seqlens_q must have shape [B + 1], so at least one element, got []")
    for name, size, letters in (
        ("cu_seqlens_k", batch + 1, "B + 1"), ("seqused_q", batch, "B"), ("seqused_k", batch, "B"),
    ):  # fmt: skip
        if name in tensors:
            _check_integers(name, tensors[name], q)
            check_shape(name, tensors[name], (size,), letters)
    if page_table is not None:
        _check_table(page_table, q, batch)
    check_extras(tensors, (batch, heads, *lengths), "rows, columns")


def check_tensors(tensors: Mapping[str, object], letters: str) -> None:
    """Check q, k and v: kind, axes (``letters``), dtype and device. Raises ``InputError``."""
    axes = letters.count(",") + 1
    q = tensors["q"]
    for name in ("q", "k", "v"):
        tensor = tensors[name]
        if not isinstance(tensor, Tensor) or not isinstance(q, Tensor):
            raise InputError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        check_place(name, tensor, q)
        if tensor.dim() != axes:
            raise InputError(f"{name} must have {axes} dimensions [{letters}], got shape {list(tensor.shape)}")
        if tensor.dtype not in DTYPE_NAMES:
            raise InputError(f"{name} must be float16, bfloat16 or float32, got {tensor.dtype}")
        if tensor.dtype != q.dtype:
            raise InputError(f"{name} must have the dtype of q, {q.dtype}, got {tensor.dtype}")
        if q.device.type not in ("cpu", "cuda"):
            raise InputError(f"q must be on a CUDA device or the CPU, got {q.device}")


def check_extras(tensors: Mapping[str, Tensor], sizes: tuple[int, int, int, int], letters: str) -> None:
    """Check sinks, slopes, bias and seed, where they are given. Raises ``InputError``.

    Args:
        tensors: the tensors of the call by name.
        sizes: B, H, and the rows and columns of a bias.
        letters: names of the rows and columns.
    """
    q, (batch, heads, *_) = tensors["q"], sizes
    sinks, alibi, bias, seed = (tensors.get(name) for name in ("sinks", "alibi", "bias", "dropout_seed"))
    if seed is not None:
        if seed.dtype != torch.int64:
            raise InputError(f"dropout_seed must be int64, got {seed.dtype}")
        check_shape("dropout_seed", seed, (2,), "seed, offset")
        if not seed.is_contiguous():
            raise InputError(f"dropout_seed must be contiguous, got strides {list(seed.stride())}")
        check_place("dropout_seed", seed, q)
    if sinks is not None:
        _check_heads("sinks", sinks, q)
        check_shape("sinks", sinks, (heads,), "H")
    if alibi is not None:
        _check_heads("alibi", alibi, q)
        if alibi.shape not in ((heads,), (batch, heads)):
            expected = f"[H] = {[heads]} or [B, H] = {[batch, heads]}"
            raise InputError(f"alibi must have shape {expected}, got {list(alibi.shape)}")
    if bias is not None:
        _check_dtype("bias", bias)
        check_place("bias", bias, q)
        fits = bias.dim() == 4 and tuple(bias.shape[2:]) == sizes[2:]
        if not fits or bias.shape[0] not in (1, batch) or bias.shape[1] not in (1, heads):
            expected = f"[B or 1, H or 1, {letters}] = [{batch} or 1, {heads} or 1, {sizes[2]}, {sizes[3]}]"
            raise InputError(f"bias must have shape {expected}, got {list(bias.shape)}")


def _check_heads(name: str, tensor: Tensor, q: Tensor) -> None:
    """Check a tensor with one number a head."""
    _check_dtype(name, tensor)
    check_place(name, tensor, q)
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise InputError(f"{name} must be contiguous along its last axis, got stride {tensor.stride(-1)}")


def _check_dtype(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in DTYPE_NAMES:
        raise InputError(f"{name} must be float16, bfloat16 or float32, got {tensor.dtype}")


def _check_integers(name: str, tensor: Tensor, q: Tensor) -> None:
    """Check a vector of lengths."""
    check_place(name, tensor, q)
    if tensor.dtype != torch.int32:
        raise InputError(f"{name} must be int32, got {tensor.dtype}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise InputError(
            f"{name} must have 1 dimension and be contiguous, got shape {list(tensor.shape)}, "
            f"strides {list(tensor.stride())}"
        )


def _check_pages(tensors: Mapping[str, Tensor]) -> None:
    """Check k and v as pages, but for the sizes of their axes."""
    pages = {name: tensors[name] for name in ("k", "v")}
    for name, tensor in pages.items():
        check_memory(name, tensor)
        if tensor.dim() != 4:
            axes = "4 dimensions [pages, page_size, HK, D] with a page_table"
            raise InputError(f"{name} must have {axes}, got shape {list(tensor.shape)}")
        if tensor.shape[1] == 0:
            raise InputError(f"{name} must have pages of at least 1 position, got shape {list(tensor.shape)}")
        _check_columns(name, tensor)
    # The first position of every page has the axes of q.
    check_tensors({"q": tensors["q"], **{name: tensor[:, 0] for name, tensor in pages.items()}}, "T, H, D")


def _check_table(page_table: Tensor, q: Tensor, batch: int) -> None:
    if page_table.dtype != torch.int32:
        raise InputError(f"page_table must be int32, got {page_table.dtype}")
    if page_table.dim() != 2 or page_table.shape[0] != batch:
        raise InputError(f"page_table must have shape [B, P] = [{batch}, P], got {list(page_table.shape)}")
    _check_columns("page_table", page_table)
    check_place("page_table", page_table, q)


def _check_columns(name: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise InputError(f"{name} must be contiguous along its last axis, got strides {list(tensor.stride())}")


def check_place(name: str, tensor: Tensor, q: Tensor) -> None:
    """Raise ``InputError`` unless a tensor is where q is, and its memory holds its elements and not their negatives."""
    check_memory(name, tensor)
    if tensor.device != q.device:
        raise InputError(f"{name} must be on the device of q, {q.device}, got {tensor.device}")


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...], letters: str) -> None:
    """Raise ``InputError`` unless ``tensor`` has the shape ``expected``."""
    if tuple(tensor.shape) != expected:
        raise InputError(f"{name} must have shape [{letters}] = {list(expected)}, got {list(tensor.shape)}")


def check_fake(q: Tensor, k: Tensor, v: Tensor, axes: tuple[int, int, int], others: Iterable[object]) -> None:
    """Check what the fake kernel of an operator is given: axes, and one device. Raises ``InputError``."""
    for name, tensor, expected in zip("qkv", (q, k, v), axes, strict=True):
        if tensor.dim() != expected:
            raise InputError(f"{name} must have {expected} dimensions, got shape {list(tensor.shape)}")
    check_one_device("q", q, (k, v, *others))


def refuse_without_memory(tensors: Mapping[str, Tensor]) -> NoReturn:
    """Explain why a tensor has no layout or no address. Raises ``InputError`` or ``UnsupportedError``."""
    for name, tensor in tensors.items():
        check_dense(name, tensor)
    raise UnsupportedError(
        "an input has no memory of its own: torch.vmap and other transforms of torch.func are not served here",
        hint="call it without them: a batch is an axis of its own",
    )


def check_pages(page_table: Tensor, pages: int, page_size: int, keys: Iterable[tuple[int, int]]) -> None:
    """Check on the host the pages that hold the keys [first, end) of each sequence. Raises ``InputError``."""
    tables = page_table.tolist()
    for b, (first, end) in enumerate(keys):
        for i in range(first // page_size, -(-end // page_size)) if first < end else ():
            if not 0 <= tables[b][i] < pages:
                raise InputError(f"page_table[{b}, {i}] must be from 0 to {pages - 1}, got {tables[b][i]}")


def check_saved(tensors: Mapping[str, Tensor]) -> None:
    """Raise ``InputError`` unless o, the LSE and their gradients fit a call with these q and v.

    Args:
        tensors: q and v, and any of ``o``, ``lse``, ``do`` and ``dlse``, by name.
    """
    q, v = tensors["q"], tensors["v"]
    packed = q.dim() == 3
    rows: tuple[int, ...] = (q.shape[1], q.shape[0]) if packed else tuple(q.shape[:3])
    kinds = {
        "o": ((*q.shape[:-1], v.shape[-1]), q.dtype, "T, H, DV" if packed else "B, H, Sq, DV"),
        "lse": (rows, torch.float32, "H, T" if packed else "B, H, Sq"),
    }
    for name in ("o", "lse", "do", "dlse"):
        if name not in tensors:
            continue
        tensor, (shape, dtype, letters) = tensors[name], kinds[name.removeprefix("d")]
        check_dense(name, tensor)
        check_storages({name: tensor})
        check_shape(name, tensor, shape, letters)
        if tensor.dtype != dtype or tensor.device != q.device:
            raise InputError(f"{name} must be {dtype} on {q.device}, got {tensor.dtype} on {tensor.device}")
        if name != "do":  # autograd makes negative views of do, and they are resolved
            check_not_negative(name, tensor)


def seed_of(dropout_p: float, dropout_seed: Tensor | None) -> dict[str, Tensor | None]:
    """Return the seed of a call's dropout, where there is any. Raises ``InputError`` where it is not given."""
    if not dropout_p:
        return {}
    if dropout_seed is None:
        raise InputError(f"dropout_seed must be what the forward was given where dropout_p is {dropout_p}, got None")
    return {"dropout_seed": dropout_seed}


def named_gradients(
    wanted: object, out: object, sums: object, tensors: Mapping[str, Tensor]
) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """Return which gradients a public call makes, where it writes some, and where it adds those of k and v.

    Args:
        wanted: names of tensors, what the caller gave for ``wanted``.
        out: by name the tensors that gradients of q, k and v are written to, or None.
        sums: what the caller gave for ``accumulate_into``.
        tensors: of the call, by name.

    Raises:
        InputError: an argument breaks the contract of ``flash_attention_backward``.
    """
    known = ("q", "k", "v", "sinks", "bias")
    if not isinstance(wanted, (tuple, list)) or not wanted or any(name not in known for name in wanted):
        raise InputError(f"wanted must be names among {', '.join(known)}, got {shown(wanted)}")
    if len(set(wanted)) < len(wanted):
        raise InputError(f"wanted must have each name once, got {shown(wanted)}")
    if absent := [name for name in wanted if name not in tensors]:
        raise InputError(f"{absent[0]} must be given where its gradient is wanted, got None")
    if sums is not None and not {"k", "v"} <= set(wanted):
        raise InputError(f"accumulate_into needs k and v in wanted, got {shown(wanted)}")
    added = {} if sums is None else named_sums(sums, tensors)
    return list(wanted), _named_out(out, wanted, tensors, added), added


def _named_out(
    out: object, wanted: Sequence[str], tensors: Mapping[str, Tensor], sums: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    if out is None:
        return {}
    allowed = [name for name in wanted if name == "q" or (name in ("k", "v") and not sums)]
    if not isinstance(out, Mapping) or any(name not in allowed for name in out):
        given = ", ".join(map(str, out)) if isinstance(out, Mapping) else type(out).__name__
        raise InputError(f"out must be tensors by names among {', '.join(allowed) or 'none'}, got {given}")
    others = {**tensors, **{f"accumulate_into's {name}": total for name, total in sums.items()}}
    for name, into in out.items():
        _check_written(f"out's {name}", into, f"that of {name}", tensors[name], tensors[name].dtype, others)
        others[f"out's {name}"] = into
    return dict(out)


def _check_written(
    name: str, into: Tensor, like: str, tensor: Tensor, dtype: torch.dtype, others: Mapping[str, Tensor]
) -> None:
    """Raise ``InputError`` unless a gradient can be written to, or added to, a tensor."""
    check_tensor(name, into)
    check_dense(name, into)
    check_shape(name, into, tuple(tensor.shape), like)
    check_place(name, into, tensor)
    check_not_negative(name, into)
    if into.dtype != dtype:
        raise InputError(f"{name} must be {str(dtype).removeprefix('torch.')}, got {into.dtype}")
    if into.requires_grad and torch.is_grad_enabled():
        raise InputError(f"{name} must not require grad: it is written in place")
    steps = [step for step, size in zip(into.stride(), into.shape, strict=True) if size > 1]
    if 0 in steps or (into.shape[-1] > 1 and into.stride(-1) != 1):
        raise InputError(f"{name} must have contiguous rows and no expanded axis, got strides {into.stride()}")
    if torch.compiler.is_compiling():  # where memory lies cannot be asked for
        return
    if has_internal_overlap(into):
        raise InputError(f"{name} must not overlap itself, got shape {list(into.shape)}, strides {into.stride()}")
    for other, given in others.items():
        if given.dtype == into.dtype and meet(into, given):
            raise InputError(f"{name} must not share memory with {other}: it is written in place")


def named_sums(sums: object, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return, as dk and dv, the tensors that gradients of k and v are added to. Raises ``InputError``."""
    if not isinstance(sums, tuple) or len(sums) != 2:
        raise InputError(f"accumulate_into must be two tensors (dk, dv) or None, got {shown(sums)}")
    for of, total in zip("kv", sums, strict=True):
        _check_written(f"accumulate_into's d{of}", total, f"that of {of}", tensors[of], torch.float32, tensors)
    if not torch.compiler.is_compiling() and meet(*sums):
        raise InputError("accumulate_into's dk and dv must not share memory, and they do")
    return dict(zip(("dk", "dv"), sums, strict=True))
