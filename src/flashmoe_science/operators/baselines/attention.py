"""The baselines of our attention: how each is called, in the layout it likes best, and the kernels that show it ran."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch.nn.attention import SDPBackend

from ...attention.api import flash_attention
from ...attention.problem import AttentionProblem
from .base import (
    FA2,
    FA3,
    FA4,
    ONLY_16_BIT,
    TOP_LEFT,
    Baseline,
    Bound,
    Call,
    FlashAttentionBaseline,
    Inputs,
    SdpaBaseline,
    by_name,
    compile_flex,
    contiguous_copy,
    fa3_packed,
    first_tensor,
)


class _WithFeatures(Baseline):
    """A baseline that is called with some features of a problem, and refuses problems that have others."""

    features: Sequence[str] = ()  # of ``AttentionProblem.features``

    def refusal(self, problem: AttentionProblem) -> str | None:
        """Return why it cannot serve ``problem``, or None."""
        lacking = [feature for feature in problem.features if feature not in self.features]
        return f"it is not called with {', '.join(lacking)}" if lacking else super().refusal(problem)


class Sdpa(_WithFeatures, SdpaBaseline):
    """``torch.nn.functional.scaled_dot_product_attention``, by default or pinned to one backend."""

    def __init__(self, name: str, backend: SDPBackend | None, kernels: Sequence[str] = ()) -> None:
        """``backend`` None leaves the choice to PyTorch."""
        super().__init__(name, backend, kernels)
        # The backends of FlashAttention-2 take none.
        self.features = () if backend is SDPBackend.FLASH_ATTENTION else ("a bias",)

    def bind(self, problem: AttentionProblem, inputs: Inputs) -> Call:
        """Return a call with the problem's options."""
        options: dict[str, Any] = {"is_causal": problem.causal}
        if problem.softmax_scale is not None:
            options["scale"] = problem.softmax_scale
        if problem.group > 1:
            options["enable_gqa"] = True
        if problem.bias:
            options["attn_mask"] = inputs["bias"]
        return functools.partial(F.scaled_dot_product_attention, inputs["q"], inputs["k"], inputs["v"], **options)

    def refusal(self, problem: AttentionProblem) -> str | None:
        """SDPA aligns its causal mask top-left, and takes no mask beside it; a mask has the dtype of the query."""
        if found := super().refusal(problem):
            return found
        if problem.bias and problem.causal:
            return "it takes a bias or a causal mask, not both"
        if problem.bias and problem.bias != problem.dtype:
            return "its bias has the dtype of the query"
        return TOP_LEFT if problem.causal and problem.seqlen_q != problem.seqlen_k else None


class Flex(_WithFeatures):
    """FlexAttention, compiled."""

    name = "flex"
    kernels = ("*flex_attention*",)

    def load(self) -> Callable[..., Any]:
        """Return it with a block mask where causal."""
        flex, compiled = compile_flex()

        def bind(problem: AttentionProblem, inputs: Inputs) -> Call:
            mask = None
            if problem.causal:
                shift = problem.seqlen_k - problem.seqlen_q
                mask = flex.create_block_mask(
                    lambda _b, _h, row, key: key <= row + shift,
                    None, None, problem.seqlen_q, problem.seqlen_k, device=inputs["q"].device,
                )  # fmt: skip
            options = {"block_mask": mask, "scale": problem.softmax_scale, "enable_gqa": problem.group > 1}
            return functools.partial(compiled, inputs["q"], inputs["k"], inputs["v"], **options)

        return Bound(bind)


class MatrixProduct(_WithFeatures):
    """A product of two matrices with as many operations: what part of the rate of the matrix units attention reaches.

    ``[M, 8192] x [8192, 8192]`` by ``torch.mm``, random values of the problem's dtype; M is a multiple of 128, so the
    operations are as many to within ``128 / M``.
    """

    name = "matrix-product"
    speed_of_light = True
    _SIZE = 8192
    _FEWEST_ROWS = 4096  # below, the tiles of a product do not fill the SMs evenly, and its rate says little

    def load(self) -> Callable[..., Any]:
        """Return PyTorch's product: the same values in every run, one right side for all inputs of a process."""
        shared: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

        def draw(rows: int, like: torch.Tensor) -> torch.Tensor:
            if like.is_meta:  # it has no values, and no generator
                return torch.empty(rows, self._SIZE, dtype=like.dtype, device="meta")
            generator = torch.Generator(like.device).manual_seed(rows)
            return torch.randn(rows, self._SIZE, dtype=like.dtype, device=like.device, generator=generator)

        def bind(problem: Any, inputs: Inputs) -> Call:
            like = inputs["q"]
            key = like.dtype, like.device
            if key not in shared:
                shared[key] = draw(self._SIZE, like)
            return functools.partial(torch.mm, draw(self._rows(problem), like), shared[key])

        return Bound(bind)

    def refusal(self, problem: Any) -> str | None:
        """A small product does not reach the rate."""
        return super().refusal(problem) or self.refuse_small(problem)

    def refuse_small(self, problem: Any) -> str | None:
        """Return why a product of as many operations says nothing, or None."""
        if self._rows(problem) >= self._FEWEST_ROWS:
            return None
        fewest = 2.0 * self._FEWEST_ROWS * self._SIZE**2
        return f"it is asked for from {fewest:.2g} operations on, this case has {problem.flops:.2g}"

    def operations(self, problem: Any) -> float:
        """Return the operations of the product."""
        return float(problem.flops)

    def _rows(self, problem: Any) -> int:
        return round(self.operations(problem) / (2.0 * self._SIZE**2) / 128) * 128


class WithoutFeatures(_WithFeatures):
    """``flash_attention`` of the same sizes and the same causal mask, without features: what the features cost."""

    name = "without-features"
    distribution = None
    speed_of_light = True
    features = ("a sliding window", "a softcap", "attention sinks", "ALiBi", "a bias")

    def bind(self, problem: AttentionProblem, inputs: Inputs) -> Call:
        """Return a call with the options that are no features."""
        options: dict[str, Any] = {"causal": problem.causal, "softmax_scale": problem.softmax_scale}
        return functools.partial(flash_attention, inputs["q"], inputs["k"], inputs["v"], **options)

    def refusal(self, problem: AttentionProblem) -> str | None:
        """There is nothing to leave out of a plain case."""
        return super().refusal(problem) if problem.features else "the case has no features"


def sequence_major(inputs: Inputs, names: Sequence[str] = ("q", "k", "v")) -> list[torch.Tensor]:
    """Return copies of inputs as contiguous ``[B, S, H, D]``."""
    return [contiguous_copy(inputs[name].transpose(1, 2)) for name in names]


class FlashAttention(_WithFeatures, FlashAttentionBaseline):
    """FlashAttention in its own layout, ``[B, S, H, D]``; the library serves variable lengths only."""

    function = "flash_attn_func"

    def bind_package(self, function: Callable[..., Any], problem: AttentionProblem, inputs: Inputs) -> Call:
        """Return a call of copies."""
        options = {"softmax_scale": problem.softmax_scale, "causal": problem.causal}
        call = functools.partial(function, *sequence_major(inputs), **options)
        return lambda: first_tensor(call).transpose(1, 2)

    def bind_library(self, problem: AttentionProblem, inputs: Inputs) -> Call:
        """Return a call of copies, packed as ``[T, H, D]``."""
        p = problem
        q, k, v = (t.reshape(-1, *t.shape[2:]) for t in sequence_major(inputs))
        steps = torch.arange(p.batch + 1, dtype=torch.int32, device=q.device)
        starts, longest = (steps * p.seqlen_q, steps * p.seqlen_k), (p.seqlen_q, p.seqlen_k)
        call = fa3_packed((q, k, v), starts, longest, p.scale, causal=p.causal)
        shape = (p.batch, p.seqlen_q, p.heads, p.head_dim_v)
        return lambda: call()[0].view(shape).transpose(1, 2)


class Xformers(_WithFeatures):
    """``xformers.ops.memory_efficient_attention``."""

    name, distribution = "xformers", "xformers"

    def load(self) -> Callable[..., Any]:
        """Import the package."""
        ops = importlib.import_module("xformers.ops")

        def bind(problem: AttentionProblem, inputs: Inputs) -> Call:
            q, k, v = sequence_major(inputs)
            mask = ops.fmha.attn_bias.LowerTriangularFromBottomRightMask() if problem.causal else None
            return lambda: ops.memory_efficient_attention(
                q, k, v, attn_bias=mask, scale=problem.softmax_scale
            ).transpose(1, 2)

        return Bound(bind)

    def refusal(self, problem: AttentionProblem) -> str | None:
        """Grouped heads need another layout there."""
        found = super().refusal(problem)
        return found or ("it is called for equal numbers of heads only" if problem.group > 1 else None)


class FlashInfer(_WithFeatures):
    """``flashinfer.single_prefill_with_kv_cache``, one sequence a call, on the backend that it chooses."""

    name, distribution = "flashinfer", "flashinfer-python"
    kernels = ("*SinglePrefillWithKVCacheKernel*", "*flashinfer::PrefillWithKVCacheKernel*")  # of Ampere, of Hopper

    def load(self) -> Callable[..., Any]:
        """Import the package."""
        function = importlib.import_module("flashinfer").single_prefill_with_kv_cache

        def bind(problem: AttentionProblem, inputs: Inputs) -> Call:
            q, k, v = (t[0].contiguous() for t in sequence_major(inputs))
            options = {"causal": problem.causal, "sm_scale": problem.softmax_scale}
            return lambda: function(q, k, v, **options).transpose(0, 1)[None]

        return Bound(bind)

    def refusal(self, problem: AttentionProblem) -> str | None:
        """One sequence a call, 16-bit types."""
        if found := super().refusal(problem):
            return found
        if problem.batch != 1:
            return "it is called for one sequence at a time"
        return ONLY_16_BIT if problem.dtype == "fp32" else None


BASELINES = by_name(
    Sdpa("sdpa", None),
    Sdpa("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION, ("*cudnn*",)),
    Sdpa("sdpa-flash", SDPBackend.FLASH_ATTENTION, ("*pytorch_flash::flash_fwd*",)),
    Sdpa("sdpa-efficient", SDPBackend.EFFICIENT_ATTENTION, ("*fmha_cutlassF*",)),
    Sdpa("sdpa-math", SDPBackend.MATH),
    Flex(),
    FlashAttention(*FA2),
    FlashAttention(*FA3),
    FlashAttention(*FA4),
    Xformers(),
    FlashInfer(),
    MatrixProduct(),
    WithoutFeatures(),
)
