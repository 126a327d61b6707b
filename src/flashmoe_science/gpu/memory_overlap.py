"""Whether tensors share memory: with themselves, or with one another."""

from __future__ import annotations

from torch import Tensor

from .subclasses import PLAIN


def shares_memory(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Return whether values are the first columns of the keys, as in the absorbed form of MLA."""
    if any(type(tensor) not in PLAIN for tensor in (k_cache, v_cache)) or not v_cache.numel():
        return False  # fake tensors have no address
    same = k_cache.data_ptr() == v_cache.data_ptr() and k_cache.stride() == v_cache.stride()
    return same and v_cache.shape[3] <= k_cache.shape[3]


def is_expanded(cache: Tensor) -> bool:
    """Return whether positions share memory because a stride is 0."""
    return any(stride == 0 for stride, size in zip(cache.stride(), cache.shape, strict=True) if size > 1)


def has_internal_overlap(cache: Tensor) -> bool:
    """Return whether two positions share memory: whole steps lead from an element to itself."""
    axes = sorted(
        ((stride, n, n) for stride, n in zip(cache.stride(), cache.shape, strict=True) if n > 1), reverse=True
    )
    return any(
        _steps_lead(steps * stride, axes[place + 1 :])
        for place, (stride, n, _) in enumerate(axes)
        for steps in range(1, min(n - 1, _reach_of(axes[place + 1 :]) // stride) + 1)
    )


def meet(one: Tensor, other: Tensor) -> bool:
    """Return whether two caches are seen to share memory.

    Keys and values may take turns in it, as heads, tokens or pages of one tensor. Where they have the same strides they
    meet if whole steps lead from an element of one to an element of the other; else if one has the first of the other.
    """
    if any(type(tensor) not in PLAIN for tensor in (one, other)) or not one.numel() or not other.numel():
        return False  # fake tensors have no address
    if is_expanded(one) or is_expanded(other):  # refused as such
        return False
    size = one.element_size()
    distance = other.data_ptr() // size - one.data_ptr() // size
    if -_reach(other) > distance or distance > _reach(one):
        return False
    axes = [*zip(one.stride(), other.stride(), one.shape, other.shape, strict=True)]
    if all(step == step_other or (n <= 1 and m <= 1) for step, step_other, n, m in axes):
        return _steps_lead(distance, sorted(((step, n, m) for step, _, n, m in axes if max(n, m) > 1), reverse=True))
    firsts = ((distance, one.stride(), one.shape), (-distance, other.stride(), other.shape))
    return any(
        _steps_lead(way, sorted(((step, n, 1) for step, n in zip(steps, sizes, strict=True) if n > 1), reverse=True))
        for way, steps, sizes in firsts
    )


def _reach(tensor: Tensor) -> int:
    """Return how many elements the last one lies behind the first."""
    return sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _reach_of(axes: list[tuple[int, int, int]]) -> int:
    return sum(stride * (max(n, m) - 1) for stride, n, m in axes)


def _steps_lead(distance: int, axes: list[tuple[int, int, int]]) -> bool:
    """Return whether ``distance`` is a sum of steps, along each axis (stride, n, m) from 1 - m to n - 1."""
    if not axes:
        return distance == 0
    (stride, n, m), *rest = axes
    reach = _reach_of(rest)  # what is left for the others
    fewest, most = max(1 - m, -((reach - distance) // stride)), min(n - 1, (distance + reach) // stride)
    return any(_steps_lead(distance - steps * stride, rest) for steps in range(fewest, most + 1))
