"""What baselines share: one object for each, which says how it is called and which kernels show that it ran."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ... import __version__
from ...errors import InputError
from ...gpu.memory_copy import bind_copy, refuse_copy

Inputs = Mapping[str, torch.Tensor]
Call = Callable[[], Any]

FA3_LIBRARY = "FLASHMOE_FA3_LIBRARY"  # path of FlashAttention-3's shared library, as vLLM builds it
ONLY_16_BIT = "it serves fp16 and bf16 only"
TOP_LEFT = "its causal mask is aligned top-left where lengths differ"


class Bound:
    """An entry point that lays its inputs out before the call: ``operator.bind`` uses ``bind_inputs``."""

    layout = "straight"  # of an operator over ranks: how it splits answers

    def __init__(self, bind_inputs: Callable[[Any, Inputs], Call]) -> None:
        """``bind_inputs`` takes a problem and its inputs, and returns the call."""
        self.bind_inputs = bind_inputs

    def __call__(self, *_arguments: object, **_options: object) -> Any:
        """Refuse."""
        raise InputError("this entry point is called through operator.bind")


class Baseline:
    """One baseline. Without a refusal it serves every problem; without patterns no kernel is pinned."""

    name: str
    kernels: Sequence[str] = ()
    distribution: str | None = "torch"  # the package whose version counts; None: this one, installed or not
    speed_of_light = False  # whether it does other work, whose answer is none to the problem

    def load(self) -> Callable[..., Any]:
        """Return the entry point. Raises ``ImportError`` with the reason."""
        return Bound(self.bind)

    def bind(self, problem: Any, inputs: Inputs) -> Call:
        """Return a call, its inputs laid out as it likes them best."""
        raise NotImplementedError

    def version(self) -> str:
        """Return the version of the package behind it."""
        if self.distribution is None:
            return f"flashmoe_science {__version__}"
        return f"{self.distribution} {importlib.metadata.version(self.distribution)}"

    def refusal(self, problem: Any) -> str | None:  # noqa: ARG002 - for those that override it
        """Return why it cannot serve ``problem``, or None."""
        return None

    def context(self) -> AbstractContextManager[object]:
        """Return the context in which all calls are made."""
        return contextlib.nullcontext()


class MemoryCopy(Baseline):
    """A copy of as many bytes as a problem has to read at the least, half read and half written."""

    name = "copy"
    speed_of_light = True

    def __init__(self, size: Callable[[Any], float]) -> None:
        """``size`` returns the bytes of a problem."""
        self._size = size

    def bind(self, problem: Any, inputs: Inputs) -> Call:
        """Return PyTorch's copy."""
        return bind_copy(self._size(problem), next(iter(inputs.values())).device)

    def refusal(self, problem: Any) -> str | None:
        """A small copy does not reach the rate."""
        return refuse_copy(self._size(problem))


class SdpaBaseline(Baseline):
    """``torch.nn.functional.scaled_dot_product_attention``, by default or pinned to one backend."""

    def __init__(self, name: str, backend: SDPBackend | None, kernels: Sequence[str] = ()) -> None:
        """``backend`` None leaves the choice to PyTorch."""
        self.name, self.backend, self.kernels = name, backend, kernels

    def context(self) -> AbstractContextManager[object]:
        """Pin the backend, where there is one."""
        return contextlib.nullcontext() if self.backend is None else sdpa_kernel(self.backend)


class FlashAttentionBaseline(Baseline):
    """FlashAttention-2, -3 or -4: its package, or of -3 the library that ``FLASHMOE_FA3_LIBRARY`` names."""

    function: ClassVar[str]  # of the package

    def __init__(self, name: str, module: str, distribution: str, kernels: Sequence[str]) -> None:
        """``module`` offers the function."""
        self.name, self.module, self.distribution, self.kernels = name, module, distribution, kernels

    def load(self) -> Callable[..., Any]:
        """Load the library, or import the package."""
        path = self._library()
        if not path:
            return Bound(
                functools.partial(self.bind_package, getattr(importlib.import_module(self.module), self.function))
            )
        try:
            torch.ops.load_library(path)  # type: ignore[no-untyped-call]
        except OSError as error:
            raise ImportError(f"{FA3_LIBRARY}={path} cannot be loaded: {error}") from error
        return Bound(self.bind_library)

    def _library(self) -> str:
        return os.environ.get(FA3_LIBRARY, "") if self.name == "fa3" else ""

    def bind_package(self, function: Callable[..., Any], problem: Any, inputs: Inputs) -> Call:
        """Return a call of the package's function."""
        raise NotImplementedError

    def bind_library(self, problem: Any, inputs: Inputs) -> Call:
        """Return a call of the library's function, ``torch.ops._vllm_fa3_C.fwd``."""
        raise NotImplementedError

    def version(self) -> str:
        """Return the version of the package, or say which build of the library."""
        return "shared library (vLLM's build)" if self._library() else super().version()

    def refusal(self, problem: Any) -> str | None:
        """It serves 16-bit types."""
        return ONLY_16_BIT if problem.dtype == "fp32" else None


# Kernels by their names in a profiler (tests/operators/test_attention_baselines.py has some of each). PyTorch's copy of
# FlashAttention-2 is in namespace pytorch_flash, and FlashAttention-4's names hold flash_fwd too.
FA2 = ("fa2", "flash_attn", "flash-attn", ("void flash::flash_fwd*",))
FA3 = ("fa3", "flash_attn_interface", "flash-attn-3", ("*FlashAttnFwdSm*",))
FA4 = ("fa4", "flash_attn.cute", "flash-attn-4", ("*FlashAttentionForwardSm*",))


def fa3_packed(
    tensors: Sequence[torch.Tensor],
    starts: Sequence[torch.Tensor],
    longest: Sequence[int],
    scale: float,
    *,
    causal: bool,
) -> Callable[[], Any]:
    """Return a call of FlashAttention-3's library with q, k and v packed as ``[T, H, D]``."""
    # In the order of the library's schema: what is new, lengths, page table, rotation and scales; then the flags.
    arguments: list[Any] = [*tensors, *[None] * 4, *starts, *[None] * 3, *longest, *[None] * 9]
    arguments += [scale, causal, -1, -1, 0.0, False, None, 0, None, 0, None, 1, 0, None]
    return functools.partial(torch.ops._vllm_fa3_C.fwd, *arguments)  # noqa: SLF001 - the name of the library


def first_tensor(call: Callable[[], Any]) -> torch.Tensor:
    """Call, and return the output alone: some versions return the LSE beside it."""
    out = call()
    o: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return o


def contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy, always: of one head, ``contiguous`` would hand out the memory of the input itself.

    New values in the inputs must reach all tensors of a call, or none.
    """
    return tensor.clone(memory_format=torch.contiguous_format)


def compile_flex() -> tuple[Any, Callable[..., torch.Tensor]]:
    """Return FlexAttention's module, and FlexAttention compiled."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    # One process measures many shapes; beyond the limit, 8 by default, dynamo would run it eagerly without a word.
    importlib.import_module("torch._dynamo.config").recompile_limit = 1024  # type: ignore[attr-defined]
    return flex, torch.compile(flex.flex_attention, dynamic=False)


def by_name(*baselines: Baseline) -> dict[str, Baseline]:
    """Return baselines by their names; the first is the default."""
    return {baseline.name: baseline for baseline in baselines}
