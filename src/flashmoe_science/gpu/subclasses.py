"""Kinds of tensors, and whether torch has to see the calls of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

PLAIN = frozenset((Tensor, torch.nn.Parameter))  # classes of tensors that are no more than their elements
PLAIN_OR_NONE = PLAIN | {type(None)}
# Nothing that tells of modes and tracers has a public name.
_no_dispatch: Any = torch._C._disabled_torch_dispatch_impl  # noqa: SLF001
_no_function: Any = torch._C._disabled_torch_function_impl  # noqa: SLF001
_own_function: Any = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
_count_dispatch_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001 - make_fx, FakeTensorMode and counters are some
_count_function_modes = torch._C._len_torch_function_stack  # noqa: SLF001
_function_mode = torch._C._get_function_stack_at  # noqa: SLF001
_is_tracing = torch._C._is_tracing  # noqa: SLF001 - what torch.jit.is_tracing calls


def is_bare_subclass(kind: type[Tensor]) -> bool:
    """Return whether tensors of a kind differ from others in their Python type alone."""
    return kind not in PLAIN and kind.__torch_dispatch__ is _no_dispatch


def has_own_meaning(kind: type[Tensor]) -> bool:
    """Return whether a class and not the elements says what its tensors mean, as ``CausalBias`` does."""
    if kind in PLAIN:
        return False
    override: Any = kind.__torch_function__
    return override is not _no_function and getattr(override, "__func__", None) is not _own_function


def is_dtensor(kind: type[Tensor]) -> bool:
    """Return whether a class is that of tensors which lie in parts on the ranks of a mesh."""
    return kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed.")


def is_untraced(tensor: Tensor) -> bool:
    """Return whether a tensor is the caller's own, and no stand-in of one while a program is made of calls.

    A program can be made of a model that has no memory yet: such stand-ins may be on meta, all of them.
    """
    kind = type(tensor)
    plain = kind in PLAIN or is_bare_subclass(kind)
    return plain and not torch.compiler.is_compiling()


def is_watched() -> bool:
    """Return whether a graph is made of the calls, or a mode wants to see them: these need an operator.

    The context of ``torch.set_default_device`` is a mode too, and only looks at what makes tensors.
    """
    return (
        torch.compiler.is_dynamo_compiling()
        or _count_dispatch_modes() > 0
        or _is_tracing()
        or (_count_function_modes() > 0 and _is_function_watched())
    )


def _is_function_watched() -> bool:
    modes = map(_function_mode, range(_count_function_modes()))
    return not all(isinstance(mode, torch.utils._device.DeviceContext) for mode in modes)  # noqa: SLF001


def is_traced(tensors: Iterable[object]) -> bool:
    """Return whether torch has to see an operator: calls are watched, or a tensor is of another class."""
    return is_watched() or not PLAIN_OR_NONE.issuperset(map(type, tensors))
