"""What refuses a call before anything of it runs: these functions raise, or return None and change nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, shown
from ..gpu.refusals import (
    check_not_negative,
    check_one_device,
    check_wanted,
)
from ..gpu.subclasses import is_untraced
from .inputs import check_flag, check_shape
from .packed import check_lengths
from .plan import check_kernel_name

_SAVED = ("o", "lse", "do", "dlse")


def check_call(return_lse: object, kernel: object) -> None:
    """Raise ``InputError`` for what a prepared call would be looked for by, and is of no type that it may be."""
    check_flag("return_lse", return_lse)
    if not isinstance(kernel, str):  # what plans a call looks at names
        check_kernel_name(kernel)


def check_key(key: Sequence[Any]) -> None:
    """The same of a key, which ends with both."""
    check_call(*key[-2:])


def check_devices(tensors: Mapping[str, Tensor | None]) -> None:
    """Raise what an operator's stand-in would not: one tensor on meta, and torch takes the stand-in for all."""
    q = tensors["q"]
    assert q is not None
    if is_untraced(q) and q.device.type not in ("cpu", "cuda"):
        raise InputError(f"q must be on a CUDA device or the CPU, got {q.device}")
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != q.device:
            raise InputError(f"{name} must be on the device of q, {q.device}, got {tensor.device}")


def check_longest(max_seqlen_q: object, max_seqlen_k: object) -> None:
    """Raise ``InputError`` for longest lengths that are no integers; ``planned_lengths`` says how large they may be.

    In a graph that is traced they may be symbols, of which nothing more is asked.
    """
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if isinstance(length, bool) or not isinstance(length, (int, torch.SymInt)):
            raise InputError(f"{name} must be an integer from 0 to 2**31 - 1, got {shown(length)}")


def check_stand_in(q: Tensor, k: Tensor, v: Tensor, axes: tuple[int, int, int], others: Iterable[object]) -> None:
    """Raise ``InputError`` where a stand-in is given other axes than an operator takes, or several devices."""
    for name, tensor, expected in zip("qkv", (q, k, v), axes, strict=True):
        if tensor.dim() != expected:
            raise InputError(f"{name} must have {expected} dimensions, got shape {list(tensor.shape)}")
    check_one_device("q", q, (k, v, *others))


def check_saved(tensors: Mapping[str, Tensor]) -> None:
    """Raise ``InputError`` unless o and LSE, and the gradients of them, are like what a call with q and v returned.

    Args:
        tensors: q and v, and of ``o``, ``lse``, ``do`` and ``dlse`` those that there are, by name.
    """
    q, v = tensors["q"], tensors["v"]
    packed = q.dim() == 3
    rows: tuple[int, ...] = (q.shape[1], q.shape[0]) if packed else tuple(q.shape[:3])
    kinds = {
        "o": ((*q.shape[:-1], v.shape[-1]), q.dtype, "T, H, DV" if packed else "B, H, Sq, DV"),
        "lse": (rows, torch.float32, "H, T" if packed else "B, H, Sq"),
    }
    for name in _SAVED:
        if name not in tensors:
            continue
        tensor, (shape, dtype, letters) = tensors[name], kinds[name.removeprefix("d")]
        check_shape(name, tensor, shape, letters)
        if tensor.dtype != dtype or tensor.device != q.device:
            raise InputError(f"{name} must be {dtype} on {q.device}, got {tensor.dtype} on {tensor.device}")
        if name != "do":  # which is resolved: autograd makes such ones
            check_not_negative(name, tensor)


def check_backward_operator(
    given: Mapping[str, Tensor],
    lengths: tuple[int, int] | None,
    dropout_p: float,
    wanted: Sequence[int],
    names: Sequence[str],
) -> None:
    """Raise ``InputError`` where arguments of the operator of gradients are no call's that can have been made.

    Args:
        given: its tensors by name, without those that are None.
        lengths: the longest ones as they are planned for; None: not packed.
        dropout_p: the share that was dropped.
        wanted: numbers of gradients.
        names: what they are of.
    """
    check_wanted(wanted, given, names)
    for name in ("cu_seqlens_k", "seqused_q", "seqused_k"):
        if lengths is None and name in given:
            raise InputError(f"{name} must be None without cu_seqlens_q, got one")
    if lengths is not None and "cu_seqlens_k" not in given:
        raise InputError("cu_seqlens_k must be given with cu_seqlens_q, got None")
    if dropout_p and "dropout_seed" not in given:
        raise InputError(f"dropout_seed must be given where dropout_p is {dropout_p}, got None")
    if "do" not in given and "dlse" not in given:
        raise InputError("do or dlse must be given, got None for both")
    axes = 4 if lengths is None else 3
    for name in "qkv":
        if given[name].dim() != axes:
            raise InputError(f"{name} must have {axes} dimensions, got shape {list(given[name].shape)}")
    check_saved(given)
    if lengths is not None and given["k"].shape[0] != given["v"].shape[0]:
        raise InputError(f"v must have as many tokens as k, {given['k'].shape[0]}, got {given['v'].shape[0]}")
    if lengths is not None and given["q"].device.type == "cpu":
        for side, longest in zip("qk", lengths, strict=True):
            tokens = given[side].shape[0]
            check_lengths(side, tokens, given[f"cu_seqlens_{side}"], longest, given.get(f"seqused_{side}"))
