"""The rivals of our attention: how each is called, in the layout it likes best, and the kernels that show it ran."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import __version__
from ..errors import InputError
from .problem import AttentionProblem

FA3_LIBRARY = "FLASHMOE_FA3_LIBRARY"  # path of FlashAttention-3's shared library, as vLLM builds it


class Rival:
    """One baseline. Without a refusal it serves every problem; without patterns no kernel is pinned."""

    name: str
    kernels: Sequence[str] = ()
    distribution = "torch"  # the package whose version counts
    also_called: Sequence[str] = ()  # in prose, besides its name
    yardstick = False  # whether it does other work, whose answer is none to the problem
    features: Sequence[str] = ()  # of ``AttentionProblem.features``, those that it is called with

    def load(self) -> Callable[..., torch.Tensor]:
        """Return the entry point. Raises ``ImportError`` with the reason."""
        raise NotImplementedError

    def version(self) -> str:
        """Return the version of the package behind it."""
        return f"{self.distribution} {importlib.metadata.version(self.distribution)}"

    def refusal(self, problem: AttentionProblem) -> str | None:
        """Return why it cannot serve ``problem``, or None."""
        lacking = [feature for feature in problem.features if feature not in self.features]
        return f"it is not called with {', '.join(lacking)}" if lacking else self._refuse(problem)

    def _refuse(self, problem: AttentionProblem) -> str | None:  # noqa: ARG002 - for those that override it
        """Return why it cannot serve a problem of the features that it is called with, or None."""
        return None

    def context(self) -> AbstractContextManager[object]:
        """Return the context in which all calls are made."""
        return contextlib.nullcontext()


def _refuse_causal_rectangle(problem: AttentionProblem) -> str | None:
    if problem.causal and problem.seqlen_q != problem.seqlen_k:
        return "its causal mask is aligned top-left where lengths differ"
    return None


class Sdpa(Rival):
    """``torch.nn.functional.scaled_dot_product_attention``, by default or pinned to one backend."""

    def __init__(self, name: str, backend: SDPBackend | None, kernels: Sequence[str] = ()) -> None:
        """``backend`` None leaves the choice to PyTorch."""
        self.name, self.backend, self.kernels = name, backend, kernels
        # The backends of FlashAttention-2 take none.
        self.features = () if backend is SDPBackend.FLASH_ATTENTION else ("a bias",)

    def load(self) -> Callable[..., torch.Tensor]:
        """Return a function that calls SDPA with our argument names."""
        return _Bound(self._call)

    @staticmethod
    def _call(problem: AttentionProblem, inputs: Mapping[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
        options: dict[str, Any] = {"is_causal": problem.causal}
        if problem.softmax_scale is not None:
            options["scale"] = problem.softmax_scale
        if problem.group > 1:
            options["enable_gqa"] = True
        if problem.bias:
            options["attn_mask"] = inputs["bias"]
        return functools.partial(F.scaled_dot_product_attention, inputs["q"], inputs["k"], inputs["v"], **options)

    def _refuse(self, problem: AttentionProblem) -> str | None:
        """SDPA aligns its causal mask top-left, and takes no mask beside it; a mask has the dtype of the query."""
        if problem.bias and problem.causal:
            return "it takes a bias or a causal mask, not both"
        if problem.bias and problem.bias != problem.dtype:
            return "its bias has the dtype of the query"
        return _refuse_causal_rectangle(problem)

    def context(self) -> AbstractContextManager[object]:
        """Pin the backend, where there is one."""
        return contextlib.nullcontext() if self.backend is None else sdpa_kernel(self.backend)


class _Bound:
    """An entry point that lays its inputs out before the call: ``operator.bind`` uses ``bind_inputs``."""

    def __init__(
        self, bind_inputs: Callable[[AttentionProblem, Mapping[str, torch.Tensor]], Callable[[], torch.Tensor]]
    ) -> None:
        self.bind_inputs = bind_inputs

    def __call__(self, *_arguments: object, **_options: object) -> torch.Tensor:
        raise InputError("this entry point is called through operator.bind")


class Flex(Rival):
    """FlexAttention, compiled."""

    name = "flex"
    kernels = ("*flex_attention*",)

    def load(self) -> Callable[..., torch.Tensor]:
        """Return it with a block mask where causal."""
        flex = importlib.import_module("torch.nn.attention.flex_attention")
        # One process measures many shapes; beyond the limit, 8 by default, dynamo would run it eagerly without a word.
        importlib.import_module("torch._dynamo.config").recompile_limit = 1024  # type: ignore[attr-defined]
        compiled = torch.compile(flex.flex_attention, dynamic=False)

        def bind_inputs(problem: AttentionProblem, inputs: Mapping[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
            mask = None
            if problem.causal:
                shift = problem.seqlen_k - problem.seqlen_q
                mask = flex.create_block_mask(
                    lambda _b, _h, row, key: key <= row + shift,
                    None, None, problem.seqlen_q, problem.seqlen_k, device=inputs["q"].device,
                )  # fmt: skip
            options = {"block_mask": mask, "scale": problem.softmax_scale, "enable_gqa": problem.group > 1}
            return functools.partial(compiled, inputs["q"], inputs["k"], inputs["v"], **options)

        return _Bound(bind_inputs)


class MatrixProduct(Rival):
    """A product of two matrices with as many operations: what part of the rate of the matrix units attention reaches.

    ``[M, 8192] x [8192, 8192]`` by ``torch.mm``, random values of the problem's dtype; M is a multiple of 128, so the
    operations are as many to within ``128 / M``.
    """

    name = "matrix-product"
    yardstick = True
    _SIZE = 8192
    _FEWEST_ROWS = 4096  # below, the tiles of a product do not fill the SMs evenly, and its rate says little

    def load(self) -> Callable[..., torch.Tensor]:
        """Return PyTorch's product: the same values in every run, one right side for all inputs of a process."""
        shared: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

        def draw(rows: int, like: torch.Tensor) -> torch.Tensor:
            if like.is_meta:  # it has no values, and no generator
                return torch.empty(rows, self._SIZE, dtype=like.dtype, device="meta")
            generator = torch.Generator(like.device).manual_seed(rows)
            return torch.randn(rows, self._SIZE, dtype=like.dtype, device=like.device, generator=generator)

        def bind_inputs(problem: AttentionProblem, inputs: Mapping[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
            like = inputs["q"]
            key = like.dtype, like.device
            if key not in shared:
                shared[key] = draw(self._SIZE, like)
            return functools.partial(torch.mm, draw(self._rows(problem), like), shared[key])

        return _Bound(bind_inputs)

    def _refuse(self, problem: AttentionProblem) -> str | None:
        """A small product does not reach the rate."""
        if self._rows(problem) >= self._FEWEST_ROWS:
            return None
        fewest = 2.0 * self._FEWEST_ROWS * self._SIZE**2
        return f"it is asked for from {fewest:.2g} operations on, this case has {problem.flops:.2g}"

    def _rows(self, problem: AttentionProblem) -> int:
        return round(problem.flops / (2.0 * self._SIZE**2) / 128) * 128


class WithoutFeatures(Rival):
    """``flash_attention`` of the same sizes and the same causal mask, without features: what the features cost."""

    name = "without-features"
    yardstick = True
    features = ("a sliding window", "a softcap", "attention sinks", "ALiBi", "a bias")

    def load(self) -> Callable[..., torch.Tensor]:
        """Return it with the options that are no features."""
        from .api import flash_attention

        def bind_inputs(problem: AttentionProblem, inputs: Mapping[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
            options: dict[str, Any] = {"causal": problem.causal, "softmax_scale": problem.softmax_scale}
            return functools.partial(flash_attention, inputs["q"], inputs["k"], inputs["v"], **options)

        return _Bound(bind_inputs)

    def version(self) -> str:
        """Return our own version: the package may run from its sources."""
        return f"flashmoe_science {__version__}"

    def _refuse(self, problem: AttentionProblem) -> str | None:
        """There is nothing to leave out of a plain case."""
        return None if problem.features else "the case has no features"


def _sequence_major(inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return copies of q, k and v as contiguous ``[B, S, H, D]``.

    Always copies: of one head, ``contiguous`` would hand out the memory of the input itself. New values in the inputs
    would then reach K and V, and not Q.
    """
    q, k, v = (inputs[name].transpose(1, 2).clone(memory_format=torch.contiguous_format) for name in ("q", "k", "v"))
    return q, k, v


class FlashAttention(Rival):
    """FlashAttention-2, -3 or -4 through its Python package: ``[B, S, H, D]``."""

    def __init__(self, name: str, module: str, distribution: str, kernels: Sequence[str]) -> None:
        """``module`` offers ``flash_attn_func``."""
        self.name, self.module, self.distribution, self.kernels = name, module, distribution, kernels

    def load(self) -> Callable[..., torch.Tensor]:
        """Import the package."""
        function = importlib.import_module(self.module).flash_attn_func

        def bind_inputs(problem: AttentionProblem, inputs: Mapping[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
            q, k, v = _sequence_major(inputs)
            call = functools.partial(function, q, k, v, softmax_scale=problem.softmax_scale, causal=problem.causal)

            def run() -> torch.Tensor:
                out = call()
                o: torch.Tensor = out[0] if isinstance(out, tuple) else out
                return o.transpose(1, 2)

            return run

        return _Bound(bind_inputs)

    def _refuse(self, problem: AttentionProblem) -> str | None:
        """The packages serve 16-bit types."""
        return "it serves fp16 and bf16 only" if problem.dtype == "fp32" else None


class FlashAttention3(FlashAttention):
    """FlashAttention-3: its package, or the library that ``FLASHMOE_FA3_LIBRARY`` names (variable length only)."""

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
        return _Bound(self._bind_library)

    @staticmethod
    def _bind_library(problem: AttentionProblem, inputs: Mapping[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
        p = problem
        q, k, v = (t.reshape(-1, *t.shape[2:]) for t in _sequence_major(inputs))  # packed [T, H, D]
        ends_q = torch.arange(p.batch + 1, dtype=torch.int32, device=q.device) * p.seqlen_q
        ends_k = torch.arange(p.batch + 1, dtype=torch.int32, device=q.device) * p.seqlen_k
        # In the order of the library's schema, up to softmax_scale; then the flags.
        arguments: list[Any] = [
            q,
            k,
            v,
            None,
            None,
            None,
            None,
            ends_q,
            ends_k,
            None,
            None,
            None,
            p.seqlen_q,
            p.seqlen_k,
        ]
        arguments += [None] * 9 + [p.scale, p.causal, -1, -1, 0.0, False, None, 0, None, 0, None, 1, 0, None]
        call = functools.partial(torch.ops._vllm_fa3_C.fwd, *arguments)  # noqa: SLF001 - the name of the library
        shape = (p.batch, p.seqlen_q, p.heads, p.head_dim_v)
        return lambda: call()[0].view(shape).transpose(1, 2)

    def version(self) -> str:
        """Say which build."""
        return "shared library (vLLM's build)" if os.environ.get(FA3_LIBRARY) else super().version()


class Xformers(Rival):
    """``xformers.ops.memory_efficient_attention``."""

    name, distribution = "xformers", "xformers"

    def load(self) -> Callable[..., torch.Tensor]:
        """Import the package."""
        ops = importlib.import_module("xformers.ops")

        def bind_inputs(problem: AttentionProblem, inputs: Mapping[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
            q, k, v = _sequence_major(inputs)
            mask = ops.fmha.attn_bias.LowerTriangularFromBottomRightMask() if problem.causal else None
            return lambda: ops.memory_efficient_attention(
                q, k, v, attn_bias=mask, scale=problem.softmax_scale
            ).transpose(1, 2)

        return _Bound(bind_inputs)

    def _refuse(self, problem: AttentionProblem) -> str | None:
        """Grouped heads need another layout there."""
        return "it is called for equal numbers of heads only" if problem.group > 1 else None


class FlashInfer(Rival):
    """``flashinfer.single_prefill_with_kv_cache``, one sequence a call, on the backend that it chooses."""

    name, distribution = "flashinfer", "flashinfer-python"
    kernels = ("*SinglePrefillWithKVCacheKernel*", "*flashinfer::PrefillWithKVCacheKernel*")  # of Ampere, of Hopper

    def load(self) -> Callable[..., torch.Tensor]:
        """Import the package."""
        function = importlib.import_module("flashinfer").single_prefill_with_kv_cache

        def bind_inputs(problem: AttentionProblem, inputs: Mapping[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
            q, k, v = (t[0].contiguous() for t in _sequence_major(inputs))
            options = {"causal": problem.causal, "sm_scale": problem.softmax_scale}
            return lambda: function(q, k, v, **options).transpose(0, 1)[None]

        return _Bound(bind_inputs)

    def _refuse(self, problem: AttentionProblem) -> str | None:
        """One sequence a call, 16-bit types."""
        if problem.batch != 1:
            return "it is called for one sequence at a time"
        return "it serves fp16 and bf16 only" if problem.dtype == "fp32" else None


# Names as profilers write them (tests/attention/test_rivals.py has some of each). PyTorch's copy of FlashAttention-2 is
# in namespace pytorch_flash, and FlashAttention-4's names hold flash_fwd too.
_ALL: tuple[Rival, ...] = (
    Sdpa("sdpa", None),
    Sdpa("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION, ("*cudnn*",)),
    Sdpa("sdpa-flash", SDPBackend.FLASH_ATTENTION, ("*pytorch_flash::flash_fwd*",)),
    Sdpa("sdpa-efficient", SDPBackend.EFFICIENT_ATTENTION, ("*fmha_cutlassF*",)),
    Sdpa("sdpa-math", SDPBackend.MATH),
    Flex(),
    FlashAttention("fa2", "flash_attn", "flash-attn", ("void flash::flash_fwd*",)),
    FlashAttention3(),
    FlashAttention("fa4", "flash_attn.cute", "flash-attn-4", ("*FlashAttentionForwardSm*",)),
    Xformers(),
    FlashInfer(),
    MatrixProduct(),
    WithoutFeatures(),
)
_ALSO_CALLED = {
    "sdpa": ("scaled_dot_product_attention", "PyTorch's attention"),
    "sdpa-cudnn": ("cuDNN",),
    "flex": ("FlexAttention",),
    "fa2": ("FlashAttention-2", "FlashAttention2", "flash-attn 2"),
    "fa3": ("FlashAttention-3", "FlashAttention3", "flash-attn 3"),
    "fa4": ("FlashAttention-4", "FlashAttention4", "flash-attn 4"),
}
for _rival in _ALL:
    _rival.also_called = _ALSO_CALLED.get(_rival.name, ())
RIVALS: dict[str, Rival] = {rival.name: rival for rival in _ALL}
