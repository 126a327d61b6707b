"""State that all arms of a process share: functions of torch and of the clock, settings, variables, threads.

A subject that replaces one or changes one changes its baselines and its own clock with it, on purpose or not. Often it
is one line at the top of a module that allows TF32. So a snapshot is taken before the subject's code runs, and what
differs afterwards is a failure of the subject. What is changed and put back within one call is not seen.

``SharedState`` is cheap, and taken around calls. ``Guard`` adds the code of the harness and of the modules that it
checks with, and the kernels behind torch's operators: it is taken before the subject is imported.
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import hashlib
import inspect
import json
import math
import os
import random
import secrets
import signal
import statistics
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.attention
import torch.nn.functional as F  # noqa: N812 - its usual name
import torch.testing

from ..subject.loading import load_operator
from ..subject.registry import is_user_defined
from ..subject.subject import Subject
from .variables import is_shared

HINT = "the baselines run in the same process: set it around your own call alone, and put it back"
AT_IMPORT = "importing it changes what all arms share"

_OWNERS: Mapping[str, Any] = {
    "time": time,
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": F,
    "torch.cuda": torch.cuda,
    **{f"torch.cuda.{name}": getattr(torch.cuda, name) for name in ("CUDAGraph", "Event", "Stream")},
    "torch.testing": torch.testing,
    **({each.__name__: each for each in (dist, dist.distributed_c10d)} if dist.is_available() else {}),
}

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_HAS_AFFINITY = hasattr(os, "sched_getaffinity")  # Linux

# Flags that change what a baseline runs; a record's environment has them too.
_FLAGS: Mapping[str, Callable[[], object]] = {
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "torch.utils.deterministic.fill_uninitialized_memory": lambda: (
        torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    ),
    "torch.backends.cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": lambda: (
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": lambda: (
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "torch.backends.cuda.matmul.allow_fp16_accumulation": lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
    "torch.backends.cuda.preferred_blas_library()": torch.backends.cuda.preferred_blas_library,
    "torch.backends.cuda.preferred_linalg_library()": torch.backends.cuda.preferred_linalg_library,
    "torch.backends.cuda.flash_sdp_enabled()": torch.backends.cuda.flash_sdp_enabled,
    "torch.backends.cuda.mem_efficient_sdp_enabled()": torch.backends.cuda.mem_efficient_sdp_enabled,
    "torch.backends.cuda.math_sdp_enabled()": torch.backends.cuda.math_sdp_enabled,
    "torch.backends.cuda.cudnn_sdp_enabled()": torch.backends.cuda.cudnn_sdp_enabled,
    "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()": (
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed
    ),
    "the priority of SDPA's backends": torch._C._get_sdp_priority_order,  # noqa: SLF001 - no public way
    "torch.backends.cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
    "torch.backends.cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "torch.backends.cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "torch.backends.cudnn.enabled": lambda: torch.backends.cudnn.enabled,
}

_SETTINGS: Mapping[str, Callable[[], object]] = {
    **_FLAGS,
    "torch.get_num_threads()": torch.get_num_threads,
    "torch.get_num_interop_threads()": torch.get_num_interop_threads,
    "torch.get_default_device()": torch.get_default_device,
    "torch.is_grad_enabled()": torch.is_grad_enabled,
    "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled,
    "torch.is_autocast_enabled()": lambda: [torch.is_autocast_enabled(device) for device in ("cuda", "cpu")],
    "the number of modes that see every call of torch": lambda: (
        torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()  # noqa: SLF001 - no public way
    ),
    "torch's profiler": torch.autograd._profiler_enabled,  # type: ignore[attr-defined]  # noqa: SLF001 - no public way
    "sys.gettrace()": sys.gettrace,
    "sys.getprofile()": sys.getprofile,
    "threading.gettrace()": threading.gettrace,
    "threading.getprofile()": threading.getprofile,
    "the tools of sys.monitoring": lambda: [getattr(sys, "monitoring", _NoTools).get_tool(tool) for tool in range(6)],
    "gc.isenabled()": gc.isenabled,
    "gc.get_threshold()": gc.get_threshold,
    "gc.get_freeze_count() > 0": lambda: gc.get_freeze_count() > 0,
    "gc.callbacks": lambda: len(gc.callbacks),
    "sys.getswitchinterval()": sys.getswitchinterval,
    "the timers of signal.setitimer": lambda: [signal.getitimer(timer)[1] for timer in _TIMERS],
    "the processors of this process": lambda: sorted(os.sched_getaffinity(0)) if _HAS_AFFINITY else None,
    "the priority of this process": lambda: os.getpriority(os.PRIO_PROCESS, 0),
}


class _NoTools:
    """``sys.monitoring`` before Python 3.12."""

    @staticmethod
    def get_tool(_: int) -> None:
        return None


_TORCH = str(Path(torch.__file__).parent)
_TRITON = str(Path(torch.__file__).parents[1] / "triton")
_STDLIB = sysconfig.get_path("stdlib")
_PROGRESS_BAR = "tqdm/_monitor.py"  # wakes up every ten seconds, wherever a bar was shown


class SharedState:
    """How it was when this was made."""

    def __init__(self) -> None:
        self._functions = _functions()
        self._settings = _settings()
        self._threads = set(sys._current_frames())  # noqa: SLF001 - those of _thread too, which threading does not know

    def changes(self) -> str:
        """Return the functions, settings, variables and threads that differ now, or an empty text."""
        now = _functions()
        replaced = [
            name
            for name, was in self._functions.items()
            if now.get(name) is not was and not _is_wrapped_by_torch(was, now.get(name))
        ]
        replaced += [name for name in now.keys() - self._functions.keys() if _hides(name)]
        settings = _settings()
        changed = [
            f"{name} is {settings.get(name, 'not set')}, and was {self._settings.get(name, 'not set')}"
            for name in [*self._settings, *(settings.keys() - self._settings.keys())]
            if settings.get(name) != self._settings.get(name)
        ]
        frames = sys._current_frames()  # noqa: SLF001 - see above
        threads = [where for thread in frames.keys() - self._threads if (where := _own_code(frames[thread]))]
        del frames  # this frame is one of them: a cycle, which would keep what all callers hold, as copies of inputs
        return "; ".join(
            [
                *(f"{name} is another function" for name in sorted(replaced)),
                *changed,
                *(f"a thread of its own runs ({where})" for where in sorted(threads)),
            ]
        )


class Guard:
    """What a subject must leave alone, as it was when this was made: before its module is imported.

    Ask a bound method that was taken before, as ``changes = Guard().changes``: it needs no name that can be replaced.
    """

    def __init__(self) -> None:
        _let_torch_choose()
        self._shared = SharedState().changes
        self._code = _code()
        self._kernels = _kernels()

    def changes(self) -> str:
        """Return what differs now, by name, or an empty text. It takes some 0.1 s."""
        code, kernels = _code(), _kernels()
        replaced = [
            name
            for name, was in self._code.items()
            if not _is_same(code.get(name), was) and not _is_wrapped_by_torch(was[0], code.get(name, (None,))[0])
        ]
        other = [name for name, was in self._kernels.items() if kernels.get(name) != was]
        shared = self._shared()
        found = [shared, *(line for name in sorted(replaced) if (line := f"{name} is another function") not in shared)]
        found += [f"another kernel is registered for {name}" for name in sorted(other)]
        return "; ".join(filter(None, found))


def guard_against(subject: Subject) -> Callable[[], str]:
    """Return what says what ``subject`` changes; taken before its import, and after that of our operator's baselines.

    An operator of the user's own may import the subject, so it is loaded later.
    """
    if not is_user_defined(subject.operator):
        load_operator(subject.operator).baselines()
    return Guard().changes


def _let_torch_choose() -> None:
    """Make the first calls that set something for all: SDPA's the priority of its backends, vmap's some kernels.

    FlexAttention's masks are made with vmap.
    """
    torch.func.vmap(torch.neg)(torch.zeros(1))
    if torch.version.cuda is not None and torch.cuda.is_available():
        x = torch.zeros(1, 1, 16, 64, dtype=torch.float16, device="cuda")
        F.scaled_dot_product_attention(x, x, x)
        torch.cuda.synchronize()


_Code = tuple[Any, ...]  # the object, and what a function can be given besides: code and defaults

_HARNESS = __name__.partition(".")[0]
_CHECKED_PARTS = tuple(f"{_HARNESS}.{part}" for part in ("proof", "operators", "errors", "gpu.specs"))
_LIBRARIES: Mapping[str, ModuleType] = {
    each.__name__: each
    for each in (
        *(builtins, ctypes, gc, hashlib, inspect, json, math, os, random, secrets, signal, statistics, subprocess),
        *(threading, torch.autograd, torch.backends.cuda, torch.backends.cudnn, torch.linalg, torch.random),
        torch.nn.attention,
    )
}


def _code() -> dict[str, _Code]:
    """Return the functions, classes and constants of the harness, and the functions of what it checks with."""
    found = dict(_members({**_LIBRARIES, **_OWNERS}, functions_only=True))
    ours = {name: module for name, module in sys.modules.items() if name.startswith(_CHECKED_PARTS)}
    return found | dict(_members(ours, functions_only=False))


def _members(modules: Mapping[str, Any], *, functions_only: bool) -> Iterator[tuple[str, _Code]]:
    for owner, holder in modules.items():
        for name, value in list(vars(holder).items()):
            if not functions_only and isinstance(value, type) and getattr(value, "__module__", None) == owner:
                yield f"{owner}.{name}", (value,)
                for method, member in list(vars(value).items()):
                    if callable(function := getattr(member, "__func__", getattr(member, "fget", member))):
                        yield f"{owner}.{name}.{method}", _code_of(function)
            elif callable(value):
                yield f"{owner}.{name}", _code_of(value)
            elif not functions_only and isinstance(value, (int, float, str, bytes, tuple, frozenset)):
                yield f"{owner}.{name}", (value,)


def _code_of(value: Any) -> _Code:
    return value, *(getattr(value, name, None) for name in ("__code__", "__defaults__", "__kwdefaults__"))


def _is_same(now: _Code | None, was: _Code) -> bool:
    if now is None or len(now) != len(was):
        return False
    constant = isinstance(was[0], (int, float, str, bytes, tuple, frozenset))
    return all(a is b or (constant and type(a) is type(b) and a == b) for a, b in zip(now, was, strict=True))


def _kernels() -> dict[str, str]:
    """Return for each of torch's own operators which kernels the dispatcher has."""
    names = torch._C._dispatch_get_all_op_names()  # noqa: SLF001 - no public way
    return {name: torch._C._dispatch_dump(name) for name in names if name.startswith("aten::")}  # noqa: SLF001 - as above


def _own_code(frame: FrameType | None) -> str:
    """Return where a thread runs code that is neither Python's nor torch's nor Triton's, or an empty text."""
    while frame is not None:
        file = frame.f_code.co_filename
        known = file.startswith((_TORCH, _TRITON, "<frozen")) or file.endswith(_PROGRESS_BAR)
        if not known and not _is_pythons(file):
            return f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _is_pythons(file: str) -> bool:
    return file.startswith(_STDLIB) and "-packages" not in file  # those that are installed lie in a folder below


def _functions() -> dict[str, object]:
    return {
        f"{owner}.{name}": value
        for owner, holder in _OWNERS.items()
        for name, value in vars(holder).items()
        if callable(value)
    }


def flags() -> dict[str, str]:
    """Return torch's flags as text, by name: a record says with which of them its arms ran."""
    return {name: str(_read(get)) for name, get in _FLAGS.items()}


def _settings() -> dict[str, object]:
    variables = {f"the variable {name}": value for name, value in _variables().items() if is_shared(name)}
    return {name: _read(get) for name, get in _SETTINGS.items()} | variables


def _variables() -> dict[str, str]:
    """Return the environment as C code and as Python reads it: ``os.putenv`` changes the one and not the other."""
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found: dict[str, str] = dict(os.environ)
    index = 0
    while (entry := entries[index]) is not None:
        name, _, value = entry.decode(errors="replace").partition("=")
        if found.setdefault(name, value) != value:
            found[name] += f", and {value} for libraries"
        index += 1
    return found


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
