"""What refuses a call with a K/V cache; as in ``refusals``, functions raise, or return None and change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import InputError
from ..gpu.refusals import check_dense, check_no_bare_subclass, check_no_tangent
from .cache_contract import check_types, meet, shares_memory
from .checks import check_devices

# What operators of a cache take the Python type off; others would come back from them for ever.
_DETACHED = ("q", "k_cache", "v_cache", "k", "v")


def check_tuples(options: tuple[object, ...], types: tuple[type, ...]) -> None:
    """Raise ``InputError`` where another option than the window is a tuple, perhaps one without a hash."""
    if types.count(tuple) > 1:
        check_types(options)


def check_apart(k: Tensor | None, k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise ``InputError`` where keys and values are written to caches that share memory; at each call.

    A prepared call serves caches that lie otherwise, one in the other, too.
    """
    if k is not None and not shares_memory(k_cache, v_cache) and meet(k_cache, v_cache):  # columns are told of as such
        raise InputError("v_cache must have memory of its own, as k and v are written to it, got some of k_cache")


def check_operator_call(given: Mapping[str, Any]) -> None:
    """Raise what the operators of a cache would not, or by other names."""
    tensors = {name: tensor for name, tensor in given.items() if isinstance(tensor, Tensor)}
    for name, tensor in tensors.items():
        check_dense(name, tensor)
        if name not in _DETACHED:
            check_no_bare_subclass(name, tensor)
        check_no_tangent(name, tensor)
    check_devices(tensors)
    for name in ("rotary_cos", "rotary_sin"):
        if name in tensors and "k" not in tensors:
            raise InputError(f"{name} needs new keys k: queries are rotated where keys are appended, got None")
