"""The rivals of our attention of packed sequences: how each is called, and the kernels that show it ran."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit

from ..attention.rivals import FA3_LIBRARY
from ..errors import InputError
from .problem import VarlenProblem

Inputs = Mapping[str, torch.Tensor]
Bind = Callable[[VarlenProblem, Inputs], Callable[[], torch.Tensor]]


class Bound:
    """An entry point that lays its inputs out before the call: ``operator.bind`` uses ``bind_inputs``."""

    def __init__(self, bind_inputs: Bind) -> None:
        """``bind_inputs`` returns the call."""
        self.bind_inputs = bind_inputs

    def __call__(self, *_arguments: object, **_options: object) -> torch.Tensor:
        """Refuse."""
        raise InputError("this entry point is called through operator.bind")


class VarlenRival:
    """One baseline. Without a refusal it serves every problem; without patterns no kernel is pinned."""

    name: str
    kernels: Sequence[str] = ()
    distribution = "torch"  # the package whose version counts
    yardstick = False

    @property
    def also_called(self) -> Sequence[str]:
        """What prose calls it, besides its name."""
        return _ALSO_CALLED[self.name]

    def load(self) -> Callable[..., torch.Tensor]:
        """Return the entry point. Raises ``ImportError`` with the reason."""
        raise NotImplementedError

    def version(self) -> str:
        """Return the version of the package behind it."""
        return f"{self.distribution} {importlib.metadata.version(self.distribution)}"

    def refusal(self, problem: VarlenProblem) -> str | None:
        """Return why it cannot serve ``problem``, or None."""
        return "it serves fp16 and bf16 only" if problem.dtype == "fp32" else None

    def context(self) -> AbstractContextManager[object]:
        """Return the context in which all calls are made."""
        return contextlib.nullcontext()


class TorchVarlen(VarlenRival):
    """``torch.nn.attention.varlen.varlen_attn``, FlashAttention-2 by default."""

    name = "torch-varlen"

    def load(self) -> Callable[..., torch.Tensor]:
        """Return it with the options of this version of torch."""
        function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        known = inspect.signature(function).parameters

        def bind_inputs(problem: VarlenProblem, inputs: Inputs) -> Callable[[], torch.Tensor]:
            p = problem.planned
            options: dict[str, Any] = {"window_size": (-1, 0 if p.causal else -1)}
            if "is_causal" in known:
                options = {"is_causal": p.causal}
            if p.softmax_scale is not None:
                options["scale"] = p.softmax_scale
            if p.group > 1 and "enable_gqa" in known:
                options["enable_gqa"] = True
            starts = inputs["cu_seqlens_q"], inputs["cu_seqlens_k"]
            return functools.partial(
                function, inputs["q"], inputs["k"], inputs["v"], *starts, *problem.longest, **options
            )

        return Bound(bind_inputs)


class Sdpa(VarlenRival):
    """``torch.nn.functional.scaled_dot_product_attention`` for one sequence after another."""

    name = "sdpa"

    def load(self) -> Callable[..., torch.Tensor]:
        """Return a function that calls SDPA for every sequence."""

        def bind_inputs(problem: VarlenProblem, inputs: Inputs) -> Callable[[], torch.Tensor]:
            p = problem.planned
            parts = [
                # Always copies: of one head, ``contiguous`` would hand out the memory of the input itself.
                tuple(part.transpose(0, 1)[None].clone(memory_format=torch.contiguous_format) for part in sequence)
                for sequence in zip(
                    inputs["q"].split(problem.lengths),  # type: ignore[no-untyped-call]
                    inputs["k"].split(problem.lengths_k),  # type: ignore[no-untyped-call]
                    inputs["v"].split(problem.lengths_k),  # type: ignore[no-untyped-call]
                    strict=True,
                )
            ]
            options: dict[str, Any] = {"is_causal": p.causal, "scale": p.softmax_scale, "enable_gqa": p.group > 1}

            def run() -> torch.Tensor:
                outputs = [F.scaled_dot_product_attention(*part, **options)[0].transpose(0, 1) for part in parts]
                return torch.cat(outputs)

            return run

        return Bound(bind_inputs)

    def refusal(self, problem: VarlenProblem) -> str | None:
        """It aligns its causal mask top-left where lengths differ."""
        if problem.planned.causal and problem.lengths != problem.lengths_k:
            return "its causal mask is aligned top-left where lengths differ"
        return None


class FlashAttention(VarlenRival):
    """``flash_attn_varlen_func`` of FlashAttention-2, -3 or -4."""

    def __init__(self, name: str, module: str, distribution: str, kernels: Sequence[str]) -> None:
        """``module`` offers ``flash_attn_varlen_func``."""
        self.name, self.module, self.distribution, self.kernels = name, module, distribution, kernels

    def load(self) -> Callable[..., torch.Tensor]:
        """Import the package."""
        function = importlib.import_module(self.module).flash_attn_varlen_func

        def bind_inputs(problem: VarlenProblem, inputs: Inputs) -> Callable[[], torch.Tensor]:
            # By name: after v, FlashAttention-4 has an argument that the others lack.
            options: dict[str, Any] = {name: inputs[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
            options.update(zip(("max_seqlen_q", "max_seqlen_k"), problem.longest, strict=True))
            options.update(softmax_scale=problem.planned.softmax_scale, causal=problem.planned.causal)
            call = functools.partial(function, inputs["q"], inputs["k"], inputs["v"], **options)

            def run() -> torch.Tensor:
                out = call()
                o: torch.Tensor = out[0] if isinstance(out, tuple) else out
                return o

            return run

        return Bound(bind_inputs)


class FlashAttention3(FlashAttention):
    """FlashAttention-3: its package, or the library that ``FLASHMOE_FA3_LIBRARY`` names."""

    def __init__(self) -> None:
        """Prefer the shared library where one is named."""
        super().__init__("fa3", "flash_attn_interface", "flash-attn-3", ("*FlashAttnFwdSm*",))

    def load(self) -> Callable[..., torch.Tensor]:
        """Load the library, or import the package."""
        path = os.environ.get(FA3_LIBRARY)
        if not path:
            return super().load()
        try:
            torch.ops.load_library(path)  # type: ignore[no-untyped-call]
        except OSError as error:
            raise ImportError(f"{FA3_LIBRARY}={path} cannot be loaded: {error}") from error
        return Bound(self._bind_library)

    @staticmethod
    def _bind_library(problem: VarlenProblem, inputs: Inputs) -> Callable[[], torch.Tensor]:
        p = problem.planned
        # In the order of the library's schema: what is new, lengths, page table, rotation and scales; then the flags.
        arguments: list[Any] = [inputs["q"], inputs["k"], inputs["v"], None, None, None, None]
        arguments += [inputs["cu_seqlens_q"], inputs["cu_seqlens_k"], None, None, None, *problem.longest]
        arguments += [*[None] * 9, p.scale, p.causal, -1, -1, 0.0, False, None, 0, None, 0, None, 1, 0, None]
        call = functools.partial(torch.ops._vllm_fa3_C.fwd, *arguments)  # noqa: SLF001 - the name of the library
        shape = (problem.tokens[0], p.heads, p.head_dim_v)
        return lambda: call()[0].view(shape)

    def version(self) -> str:
        """Say which build."""
        return "shared library (vLLM's build)" if os.environ.get(FA3_LIBRARY) else super().version()


_ALL: tuple[VarlenRival, ...] = (
    TorchVarlen(),
    Sdpa(),
    FlashAttention("fa2", "flash_attn", "flash-attn", ("void flash::flash_fwd*",)),
    FlashAttention3(),
    FlashAttention("fa4", "flash_attn.cute", "flash-attn-4", ("*FlashAttentionForwardSm*",)),
)
_ALSO_CALLED = {
    "torch-varlen": ("varlen_attn",),
    "sdpa": ("scaled_dot_product_attention", "PyTorch's attention"),
    "fa2": ("FlashAttention-2", "FlashAttention2", "flash-attn 2"),
    "fa3": ("FlashAttention-3", "FlashAttention3", "flash-attn 3"),
    "fa4": ("FlashAttention-4", "FlashAttention4", "flash-attn 4"),
}
RIVALS: dict[str, VarlenRival] = {rival.name: rival for rival in _ALL}
