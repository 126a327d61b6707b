"""What a caller has set for its own code, and must not reach a reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")


def without_autocast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function of eager torch compute in the dtypes that it chooses, also in a region of autocast."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        device = _device_type((*args, *kwargs.values()))
        if device is None or not torch.amp.is_autocast_available(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return call


def _device_type(arguments: Iterable[Any]) -> str | None:
    for argument in arguments:
        tensors = argument.values() if isinstance(argument, dict) else (argument,)
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                return tensor.device.type
    return None
