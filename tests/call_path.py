"""Count the files that a tensor passes on its way through the package: by ``sys.setprofile``, without a GPU."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import flashmoe_science

_PACKAGE = str(Path(flashmoe_science.__file__).parent)
_DEPTH = 4  # containers in containers that are searched for the tensor


@dataclass(frozen=True)
class CallPath:
    """The way of a tensor through one call.

    A stay is a time in one file that a call into another file, or the return from it, ends. Only functions of the
    package that receive the tensor, or a container that holds it, count.
    """

    files: tuple[str, ...]  # of every stay, in order; relative to the package
    calls: int  # all Python functions of the package that were called, with and without the tensor

    @property
    def distinct(self) -> tuple[str, ...]:
        """Each file once, in the order in which the tensor first enters it."""
        return tuple(dict.fromkeys(self.files))

    @property
    def stays(self) -> int:
        """The number of stays."""
        return len(self.files)

    def entries(self, file: str) -> int:
        """The number of stays in one file."""
        return self.files.count(file)

    def until(self, *ends: str) -> CallPath:
        """Return the way before the tensor first enters a file with one of these names."""
        at = next((i for i, file in enumerate(self.files) if file.endswith(ends)), len(self.files))
        return CallPath(self.files[:at], self.calls)


def call_path(call: Callable[[], Any], tensor: torch.Tensor) -> CallPath:
    """Return the way of ``tensor`` through ``call()``; tensors that share its memory count as it."""
    address = tensor.untyped_storage().data_ptr()
    stack: list[str] = []  # of the active functions that hold the tensor, their files
    carries: dict[int, bool] = {}
    stays: list[str] = []
    calls = 0

    def enter(file: str) -> None:
        if not stays or stays[-1] != file:
            stays.append(file)

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        file = frame.f_code.co_filename
        if event not in ("call", "return") or not file.startswith(_PACKAGE):
            return
        if event == "call":
            calls += 1
            code = frame.f_code
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]
            found = any(_holds(frame.f_locals[name], address, _DEPTH) for name in names if name in frame.f_locals)
            carries[id(frame)] = found
            if found:
                stack.append(file[len(_PACKAGE) + 1 :])
                enter(stack[-1])
        elif carries.pop(id(frame), False):
            stack.pop()
            if stack:
                enter(stack[-1])

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return CallPath(tuple(stays), calls)


def _holds(value: object, address: int, depth: int) -> bool:
    """Return whether a value is a tensor in the memory at ``address``, or holds one."""
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and value.untyped_storage().data_ptr() == address
    if depth == 0:
        return False
    if isinstance(value, Mapping):
        value = tuple(value.values())
    elif dataclasses.is_dataclass(value):
        value = tuple(getattr(value, field.name, None) for field in dataclasses.fields(value))
    if isinstance(value, (tuple, list)):
        return any(_holds(one, address, depth - 1) for one in value)
    return False
