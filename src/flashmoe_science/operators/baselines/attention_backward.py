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

from ...attention.backward.problem import BackwardProblem
from ...errors import InputError
from .attention import MatrixProduct, sequence_major
from .base import ONLY_16_BIT, TOP_LEFT, Baseline, Bound, Call, Inputs, SdpaBaseline, by_name

_INPUTS = ("q", "k", "v", "do")


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
        o, lse, *_ = forward(q, k, v, softmax_scale=p.softmax_scale, causal=p.causal, return_lse=True)
        call = functools.partial(
            backward, q, k, v, o, do, lse, softmax_scale=p.softmax_scale, causal=p.causal,
            deterministic=self.deterministic,
        )  # fmt: skip
        return lambda: tuple(gradient.transpose(1, 2) for gradient in call()[:3])

    def version(self) -> str:
        """Return the package's version, and whether it was asked for the same bits in every run."""
        return f"{super().version()}, {'deterministic' if self.deterministic else 'not deterministic'}"

    def refusal(self, problem: BackwardProblem) -> str | None:
        """The package serves 16-bit types."""
        return ONLY_16_BIT if problem.forward.dtype == "fp32" else None


class FlashAttention4Step(FlashAttention4):
    """FlashAttention-4's forward and backward, in its own layout ``[B, S, H, D]``."""

    kernels = ("*FlashAttentionForwardSm*", "*FlashAttentionBackwardSm*")

    def _bind(self, forward: Any, backward: Any, problem: BackwardProblem, inputs: Inputs) -> Call:
        p = problem.forward
        q, k, v, do = sequence_major(inputs, _INPUTS)
        left, right = (None if size < 0 else size for size in p.window)
        options: dict[str, Any] = {
            "softmax_scale": p.softmax_scale, "causal": p.causal,
            "window_size_left": left, "window_size_right": right,
        }  # fmt: skip
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
    BackwardMatrixProduct(),
)
STEP_BASELINES = by_name(
    SdpaStep(*_CUDNN),
    SdpaStep(*_FLASH, _FLASH_KERNELS),
    FlashAttention4Step("fa4", deterministic=False),
    FlashAttention4Step("fa4-deterministic", deterministic=True),
    StepMatrixProduct(),
)
