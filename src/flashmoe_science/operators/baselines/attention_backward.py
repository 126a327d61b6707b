"""The baselines of our gradients, and of a step of training: forward and backward, one after the other.

A baseline of gradients is given copies of the inputs, runs its forward on them outside of any timing, and is timed in
its backward alone, called directly on the current stream: autograd's engine would run it on the stream of the forward.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch.nn.attention import SDPBackend

from ...attention.api import flash_attention
from ...attention.backward.api import flash_attention_backward
from ...attention.backward.problem import BackwardProblem
from ...attention.problem import AttentionProblem
from ...errors import InputError
from .attention import MatrixProduct, sequence_major
from .base import ONLY_16_BIT, TOP_LEFT, Baseline, Bound, Call, Inputs, SdpaBaseline, by_name, compile_flex

_INPUTS = ("q", "k", "v", "do")


def _lacking(problem: BackwardProblem, served: Sequence[str] = ()) -> str | None:
    """Return why a baseline that is called with some features alone cannot serve ``problem``, or None."""
    lacking = [feature for feature in problem.forward.features if feature not in served]
    return f"it is not called with {', '.join(lacking)}" if lacking else None


class Sdpa(SdpaBaseline):
    """The backward of ``torch.nn.functional.scaled_dot_product_attention``, pinned to one backend.

    PyTorch asks cuDNN for no deterministic backward, whatever ``torch.use_deterministic_algorithms`` says.
    """

    def __init__(self, name: str, backend: SDPBackend, node: str, kernels: Sequence[str]) -> None:
        """``node`` is a part of the name of the node of autograd's graph that shows the backend."""
        super().__init__(name, backend, kernels)
        self.node = node

    def bind(self, problem: BackwardProblem, inputs: Inputs) -> Call:
        """Run the forward, and return a call of the backward's node."""
        tensors = [inputs[name].clone().requires_grad_() for name in ("q", "k", "v")]
        _, node = self._forward(problem, tensors)
        do = inputs["do"].clone(memory_format=torch.preserve_format)
        return lambda: tuple(node(do)[:3])

    def _forward(self, problem: BackwardProblem, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        """Return o, and the node of autograd's graph that makes its gradients."""
        p, (q, k, v) = problem.forward, tensors
        options: dict[str, Any] = {"is_causal": p.causal, "scale": p.softmax_scale}
        if p.group > 1:
            options["enable_gqa"] = True
        with torch.enable_grad():
            o = F.scaled_dot_product_attention(q, k, v, **options)
        node: Any = o.grad_fn
        if self.node not in type(node).__name__:
            raise InputError(f"the backward must be that of {self.node}, got {type(node).__name__}")
        return o, node

    def version(self) -> str:
        """Return torch's version; the gradients may have other bits in every run."""
        return f"{super().version()}, not deterministic"

    def refusal(self, problem: BackwardProblem) -> str | None:
        """SDPA aligns its causal mask top-left; fused backends serve 16-bit types."""
        p = problem.forward
        if found := _lacking(problem):
            return found
        if p.causal and p.seqlen_q != p.seqlen_k:
            return TOP_LEFT
        return ONLY_16_BIT if p.dtype == "fp32" else None


class SdpaStep(Sdpa):
    """``scaled_dot_product_attention`` and its backward, pinned to one backend."""

    def bind(self, problem: BackwardProblem, inputs: Inputs) -> Call:
        """Return a call of both."""
        tensors, do = [inputs[name].detach().requires_grad_() for name in ("q", "k", "v")], inputs["do"]

        def run() -> tuple[torch.Tensor, ...]:
            o, node = self._forward(problem, tensors)
            return o.detach(), *node(do)[:3]

        return run

    def refusal(self, problem: BackwardProblem) -> str | None:
        """SDPA knows no window but as a mask."""
        return "it has no sliding window" if problem.forward.window != (-1, -1) else super().refusal(problem)


class Flex(Baseline):
    """The backward of FlexAttention, compiled: the features that a function of a score has."""

    name = "flex"
    kernels = ("*flex_attention*",)
    features = ("a sliding window", "a softcap", "ALiBi", "a bias")

    def load(self) -> Callable[..., Any]:
        """Return it with a block mask, and with a function of the scores, where a problem asks for them."""
        flex, compiled = compile_flex()

        def bind(problem: BackwardProblem, inputs: Inputs) -> Call:
            p = problem.forward
            mask = None
            if p.causal or p.window != (-1, -1):
                mask = flex.create_block_mask(
                    _mask_of(p), None, None, p.seqlen_q, p.seqlen_k, device=inputs["q"].device
                )
            leaves = [inputs[name].clone().requires_grad_() for name in ("q", "k", "v")]
            with torch.enable_grad():
                o = compiled(
                    *leaves, score_mod=_score_of(p, inputs), block_mask=mask, scale=p.softmax_scale,
                    enable_gqa=p.group > 1,
                )  # fmt: skip
            do = inputs["do"].clone(memory_format=torch.preserve_format)
            return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)

        return Bound(bind)

    def refusal(self, problem: BackwardProblem) -> str | None:
        """The function of a score knows no sink."""
        return _lacking(problem, self.features) or super().refusal(problem)


def _mask_of(p: AttentionProblem) -> Callable[..., Any]:
    """Return which keys a row sees, as FlexAttention asks for it."""
    shift, (left, right) = p.seqlen_k - p.seqlen_q, p.window
    left, right = (size if size >= 0 else p.seqlen_q + p.seqlen_k for size in (left, 0 if p.causal else right))
    return lambda _b, _h, row, key: (key <= row + shift + right) & (key >= row + shift - left)


def _score_of(p: AttentionProblem, inputs: Inputs) -> Callable[..., Any] | None:
    """Return what features make of a score, as FlexAttention asks for it."""
    bias, softcap, shift = inputs.get("bias"), p.softcap, p.seqlen_k - p.seqlen_q
    slopes = inputs["alibi"].float() if p.alibi else None  # a distance times a number of 16 bits would be rounded
    if not softcap and slopes is None and bias is None:
        return None

    def score(x: torch.Tensor, _b: Any, h: Any, row: Any, key: Any) -> torch.Tensor:
        if softcap:
            x = softcap * torch.tanh(x / softcap)
        if slopes is not None:
            x = x - slopes[h] * (row + shift - key).abs()
        if bias is not None:
            x = x + bias[0, h, row, key]
        return x

    return score


class WithoutFeatures(Baseline):
    """``flash_attention_backward`` of the same sizes and the same causal mask: what the features cost."""

    name = "without-features"
    distribution = None
    speed_of_light = True

    def load(self) -> Callable[..., Any]:
        """Return our gradients, after our forward."""
        return Bound(self._bind)

    @staticmethod
    def _bind(problem: BackwardProblem, inputs: Inputs) -> Call:
        options: dict[str, Any] = {"causal": problem.forward.causal, "softmax_scale": problem.forward.softmax_scale}
        q, k, v, do = (inputs[name] for name in _INPUTS)
        attend: Callable[..., Any] = flash_attention
        o, lse = attend(q, k, v, return_lse=True, **options)
        return functools.partial(flash_attention_backward, q, k, v, o, lse, do, **options)

    def refusal(self, problem: BackwardProblem) -> str | None:
        """There is nothing to leave out of a plain case."""
        return None if problem.forward.features else "the case has no features"


class FlashAttention4(Baseline):
    """FlashAttention-4's backward, in its own layout ``[B, S, H, D]``."""

    kernels: Sequence[str] = ("*FlashAttentionBackwardSm*",)
    distribution = "flash-attn-4"

    def __init__(self, name: str, *, deterministic: bool) -> None:
        """Whether it adds to dQ in one order."""
        self.name, self.deterministic = name, deterministic

    def load(self) -> Callable[..., Any]:
        """Import the package: its forward that returns the LSE, and its backward."""
        module = importlib.import_module("flash_attn.cute.interface")
        try:
            return Bound(functools.partial(self._bind, module._flash_attn_fwd, module._flash_attn_bwd))  # noqa: SLF001 - the public way is autograd
        except AttributeError as error:
            raise ImportError(f"this version is called in another way: {error}") from error

    def _bind(self, forward: Any, backward: Any, problem: BackwardProblem, inputs: Inputs) -> Call:
        p = problem.forward
        q, k, v, do = sequence_major(inputs, _INPUTS)
        options = self._options(p)
        o, lse, *_ = forward(q, k, v, return_lse=True, **options)
        call = functools.partial(backward, q, k, v, o, do, lse, deterministic=self.deterministic, **options)
        return lambda: tuple(gradient.transpose(1, 2) for gradient in call()[:3])

    @staticmethod
    def _options(p: AttentionProblem) -> dict[str, Any]:
        """Return the options of both passes; those of features are given where they are asked for."""
        left, right = (None if size < 0 else size for size in p.window)
        options: dict[str, Any] = {"softmax_scale": p.softmax_scale, "causal": p.causal}
        if p.window != (-1, -1):
            options |= {"window_size_left": left, "window_size_right": right}
        return {**options, "softcap": p.softcap} if p.softcap else options

    def version(self) -> str:
        """Return the package's version, and whether it was asked for the same bits in every run."""
        return f"{super().version()}, {'deterministic' if self.deterministic else 'not deterministic'}"

    def refusal(self, problem: BackwardProblem) -> str | None:
        """The package serves 16-bit types."""
        if found := _lacking(problem, ("a sliding window", "a softcap")):
            return found
        return ONLY_16_BIT if problem.forward.dtype == "fp32" else None


class FlashAttention4Step(FlashAttention4):
    """FlashAttention-4's forward and backward, in its own layout ``[B, S, H, D]``."""

    kernels = ("*FlashAttentionForwardSm*", "*FlashAttentionBackwardSm*")

    def _bind(self, forward: Any, backward: Any, problem: BackwardProblem, inputs: Inputs) -> Call:
        q, k, v, do = sequence_major(inputs, _INPUTS)
        options = self._options(problem.forward)
        attend = functools.partial(forward, q, k, v, return_lse=True, **options)
        differentiate = functools.partial(backward, deterministic=self.deterministic, **options)

        def run() -> tuple[torch.Tensor, ...]:
            o, lse, *_ = attend()
            return tuple(each.transpose(1, 2) for each in (o, *differentiate(q, k, v, o, do, lse)[:3]))

        return run


class BackwardMatrixProduct(MatrixProduct):
    """A product of two matrices with as many operations as the gradients take."""

    def refusal(self, problem: Any) -> str | None:
        """A small product does not reach the rate."""
        return self.refuse_small(problem)


class StepMatrixProduct(BackwardMatrixProduct):
    """A product of two matrices with as many operations as forward and backward take."""

    def operations(self, problem: Any) -> float:
        """Return those of both."""
        return float(problem.flops + problem.forward.flops)


_CUDNN = ("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION, "CudnnAttention", ("*cudnn*",))
_FLASH = ("sdpa-flash", SDPBackend.FLASH_ATTENTION, "FlashAttention")
_FLASH_KERNELS = ("*pytorch_flash::flash_fwd*", "*pytorch_flash::flash_bwd*")

BASELINES = by_name(
    Sdpa(*_CUDNN),
    Sdpa(*_FLASH, _FLASH_KERNELS[1:]),
    FlashAttention4("fa4", deterministic=False),
    FlashAttention4("fa4-deterministic", deterministic=True),
    Flex(),
    BackwardMatrixProduct(),
    WithoutFeatures(),
)
STEP_BASELINES = by_name(
    SdpaStep(*_CUDNN),
    SdpaStep(*_FLASH, _FLASH_KERNELS),
    FlashAttention4Step("fa4", deterministic=False),
    FlashAttention4Step("fa4-deterministic", deterministic=True),
    StepMatrixProduct(),
)
