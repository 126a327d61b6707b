"""Kinds of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_no_dispatch: Any = torch._C._disabled_torch_dispatch_impl  # noqa: SLF001 - has no public name


def is_bare_subclass(kind: type[Tensor]) -> bool:
    """Return whether tensors of a kind differ from others in their Python type alone."""
    return kind not in (Tensor, torch.nn.Parameter) and kind.__torch_dispatch__ is _no_dispatch


def is_untraced(tensor: Tensor) -> bool:
    """Return whether a tensor is the caller's own, and no stand-in of one while a program is made of calls.

    A program can be made of a model that has no memory yet: such stand-ins may be on meta, all of them.
    """
    kind = type(tensor)
    plain = kind in (Tensor, torch.nn.Parameter) or is_bare_subclass(kind)
    return plain and not torch.compiler.is_compiling()
