"""Rows of MLA in 656 bytes: columns without position in fp8 with their scales, and rotated columns in bf16.

A row has 512 numbers of e4m3, then four fp32 scales, one for each 128 of them, then 64 numbers of bf16.

Source: the cache of DeepSeek-V3.2-Exp (DeepSeek-AI, 2025), as the README of FlashMLA describes it; vLLM calls it
``fp8_ds_mla``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import InputError, shown
from ...gpu.checks import check_memory, check_not_mixed, check_tensor
from ..checks import DTYPE_NAMES, check_place, check_shape
from .problem import FP8_COLUMNS, FP8_ROW_BYTES, ROTATED_COLUMNS, SCALED_COLUMNS

_LARGEST_E4M3 = 448.0
_SCALES_END = FP8_COLUMNS + 4 * (FP8_COLUMNS // SCALED_COLUMNS)


@torch.no_grad()
def pack_mla_rows(latents: Tensor, rotated: Tensor) -> Tensor:
    """Return rows of MLA in fp8, as ``sparse_mla`` takes them in its cache.

    The scale of 128 columns is the largest of their absolute values over 448, at least the smallest normal fp32 number;
    1 where all are 0. A column over its scale is rounded to the nearest e4m3 number.

    Args:
        latents: ``[..., 512]`` fp16, bf16 or fp32: the columns without position, which are the values too.
        rotated: ``[..., 64]`` of any of these dtypes: the columns with a rotary embedding.

    Returns:
        ``[..., 656]`` uint8, contiguous: 512 numbers of e4m3, 4 fp32 scales, 64 numbers of bf16.

    Raises:
        InputError: a shape, dtype or device breaks the contract above.

    A column that is NaN or infinite makes NaN of all that share its scale. There are no gradients, and nothing
    synchronises. Source: DeepSeek-V3.2-Exp (DeepSeek-AI, 2025); bytes in the order that FlashMLA's README gives.
    """
    for name, tensor in (("latents", latents), ("rotated", rotated)):
        check_tensor(name, tensor)
        check_memory(name, tensor)
        check_place(name, tensor, latents)
        if tensor.dtype not in DTYPE_NAMES:
            raise InputError(f"{name} must be float16, bfloat16 or float32, got {tensor.dtype}")
    check_not_mixed({"latents": latents, "rotated": rotated})
    check_shape("latents", latents, (*latents.shape[:-1], FP8_COLUMNS), f"..., {FP8_COLUMNS}")
    check_shape("rotated", rotated, (*latents.shape[:-1], ROTATED_COLUMNS), f"..., {ROTATED_COLUMNS}")
    groups = _by_scale(latents.float())
    largest = groups.abs().amax(-1)
    scales = (largest / _LARGEST_E4M3).clamp_min(torch.finfo(torch.float32).tiny)
    scales = torch.where(largest == 0, 1.0, scales)
    stored = (groups / scales[..., None]).clamp(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn)
    parts = stored.flatten(-2), scales, rotated.to(torch.bfloat16)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


@torch.no_grad()
def unpack_mla_rows(rows: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the numbers of rows that ``pack_mla_rows`` made: fp8 columns times their scales, then rotated columns.

    Args:
        rows: ``[..., 656]`` uint8.
        dtype: float16, bfloat16 or float32. Products with scales are fp32, and rounded once.

    Returns:
        ``[..., 576]`` in ``dtype``: a cache that ``sparse_mla`` takes with q of this dtype.

    Raises:
        InputError: a shape or dtype breaks the contract above.
    """
    check_tensor("rows", rows)
    check_memory("rows", rows)
    if rows.dtype != torch.uint8:
        raise InputError(f"rows must be torch.uint8, got {rows.dtype}")
    check_shape("rows", rows, (*rows.shape[:-1], FP8_ROW_BYTES), f"..., {FP8_ROW_BYTES}")
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_NAMES:  # type: ignore[redundant-expr] # callers may pass what types rule out
        raise InputError(f"dtype must be float16, bfloat16 or float32, got {shown(dtype)}")
    return unpack_rows(rows, dtype)


def unpack_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what ``unpack_mla_rows`` does, of float64 too, with products in fp32 at least."""
    wide = torch.promote_types(torch.float32, dtype)
    stored = _by_scale(rows[..., :FP8_COLUMNS].view(torch.float8_e4m3fn).to(wide))
    scales = _copied(rows[..., FP8_COLUMNS:_SCALES_END]).view(torch.float32)
    rotated = _copied(rows[..., _SCALES_END:]).view(torch.bfloat16)
    return torch.cat(((stored * scales.to(wide)[..., None]).flatten(-2).to(dtype), rotated.to(dtype)), -1)


def _by_scale(columns: Tensor) -> Tensor:
    """Return ``[..., 512]`` as ``[..., 4, 128]``."""
    return columns.reshape(*columns.shape[:-1], FP8_COLUMNS // SCALED_COLUMNS, SCALED_COLUMNS)


def _copied(part: Tensor) -> Tensor:
    """Return a copy that starts at its storage's first byte: a wider dtype needs an aligned start."""
    return part.clone(memory_format=torch.contiguous_format)
