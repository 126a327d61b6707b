"""State that all arms of a process share: functions of torch and of the clock, and torch's settings.

A subject that replaces one or changes one changes its baselines and its own clock with it, on purpose or not. Often it
is one line at the top of a module that allows TF32. So a snapshot is taken before the subject's code runs, and what
differs afterwards is a failure of the subject. What is changed and put back within one call is not seen.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

HINT = "the baselines run in the same process: set it around your own call alone, and put it back"

_OWNERS: Mapping[str, Any] = {
    "time": time,
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": F,
    "torch.cuda": torch.cuda,
    **{f"torch.cuda.{name}": getattr(torch.cuda, name) for name in ("CUDAGraph", "Event", "Stream")},
}

_SETTINGS: Mapping[str, Callable[[], object]] = {
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.get_default_device()": torch.get_default_device,
    "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "torch.is_grad_enabled()": torch.is_grad_enabled,
    "torch.get_num_threads()": torch.get_num_threads,
    "torch.backends.cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": lambda: (
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": lambda: (
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "torch.backends.cuda.flash_sdp_enabled()": torch.backends.cuda.flash_sdp_enabled,
    "torch.backends.cuda.mem_efficient_sdp_enabled()": torch.backends.cuda.mem_efficient_sdp_enabled,
    "torch.backends.cuda.math_sdp_enabled()": torch.backends.cuda.math_sdp_enabled,
    "torch.backends.cuda.cudnn_sdp_enabled()": torch.backends.cuda.cudnn_sdp_enabled,
    "torch.backends.cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
    "torch.backends.cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "torch.backends.cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "torch.backends.cudnn.enabled": lambda: torch.backends.cudnn.enabled,
}

_TORCH = str(Path(torch.__file__).parent)


class SharedState:
    """How it was when this was made."""

    def __init__(self) -> None:
        self._functions = _functions()
        self._settings = _settings()

    def changes(self) -> str:
        """Return the functions and settings that differ now, or an empty text."""
        now = _functions()
        replaced = [
            name
            for name, was in self._functions.items()
            if now.get(name) is not was and not _is_wrapped_by_torch(was, now.get(name))
        ]
        replaced += [name for name in now.keys() - self._functions.keys() if _hides(name)]
        settings = _settings()
        changed = [
            f"{name} is {settings[name]}, and was {was}"
            for name, was in self._settings.items()
            if settings[name] != was
        ]
        return "; ".join([*(f"{name} is another function" for name in sorted(replaced)), *changed])


def _functions() -> dict[str, object]:
    return {
        f"{owner}.{name}": value
        for owner, holder in _OWNERS.items()
        for name, value in vars(holder).items()
        if callable(value)
    }


def _settings() -> dict[str, object]:
    return {name: _read(get) for name, get in _SETTINGS.items()}


def _read(get: Callable[[], object]) -> object:
    try:
        return get()
    except RuntimeError as error:  # torch's older and newer way to allow TF32 were mixed: the text says so
        return str(error)


def _is_wrapped_by_torch(was: Any, now: Any) -> bool:
    """Return whether torch itself put a wrapper around it: its compiler does so when it is imported."""
    code = getattr(now, "__code__", None)
    by_torch = code is not None and str(code.co_filename).startswith(_TORCH)
    return by_torch and inspect.unwrap(now) is inspect.unwrap(was)


def _hides(name: str) -> bool:
    """Return whether a new function of a class hides an inherited one."""
    owner, _, method = name.rpartition(".")
    holder = _OWNERS[owner]
    return isinstance(holder, type) and any(hasattr(base, method) for base in holder.__mro__[1:])
