"""The rivals in a step of training: forward and backward of each, one after the other, on the current stream."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch.nn.attention import SDPBackend

from ..attention.backward_problem import BackwardProblem
from ..attention_backward.rivals import BackwardMatrixProduct, FlashAttention4, Inputs, Sdpa
from ..errors import InputError

Step: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]"  # o, dq, dk, dv


class SdpaStep(Sdpa):
    """``scaled_dot_product_attention`` and its backward, pinned to one backend."""

    def _bind(self, problem: BackwardProblem, inputs: Inputs) -> Callable[[], Any]:
        p = problem.forward
        options: dict[str, Any] = {"is_causal": p.causal, "scale": p.softmax_scale}
        if p.group > 1:
            options["enable_gqa"] = True
        q, k, v = (inputs[name].detach().requires_grad_() for name in ("q", "k", "v"))
        do = inputs["do"]

        def run() -> Step:
            with torch.enable_grad():
                o = F.scaled_dot_product_attention(q, k, v, **options)
            node: Any = o.grad_fn
            if self.node not in type(node).__name__:
                raise InputError(f"the backward must be that of {self.node}, got {type(node).__name__}")
            dq, dk, dv = node(do)[:3]
            return o.detach(), dq, dk, dv

        return run

    def refusal(self, problem: BackwardProblem) -> str | None:
        """SDPA knows no window but as a mask."""
        return "it has no sliding window" if problem.forward.window != (-1, -1) else super().refusal(problem)


class FlashAttention4Step(FlashAttention4):
    """FlashAttention-4's forward and backward, in its own layout ``[B, S, H, D]``."""

    kernels = ("*FlashAttentionForwardSm*", "*FlashAttentionBackwardSm*")

    def _bind(self, forward: Any, backward: Any, problem: BackwardProblem, inputs: Inputs) -> Callable[[], Any]:
        p = problem.forward
        names = ("q", "k", "v", "do")
        q, k, v, do = (inputs[x].transpose(1, 2).clone(memory_format=torch.contiguous_format) for x in names)
        left, right = (None if size < 0 else size for size in p.window)
        options: dict[str, Any] = {
            "softmax_scale": p.softmax_scale, "causal": p.causal,
            "window_size_left": left, "window_size_right": right,
        }  # fmt: skip
        attend = functools.partial(forward, q, k, v, return_lse=True, **options)
        differentiate = functools.partial(backward, deterministic=self.deterministic, **options)

        def run() -> Step:
            o, lse, *_ = attend()
            dq, dk, dv = differentiate(q, k, v, o, do, lse)[:3]
            return o.transpose(1, 2), dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

        return run


class StepMatrixProduct(BackwardMatrixProduct):
    """A product of two matrices with as many operations as forward and backward take."""

    def _rows(self, problem: Any) -> int:
        operations = float(problem.flops + problem.forward.flops)
        return round(operations / (2.0 * self._SIZE**2) / 128) * 128


_ALL: tuple[Any, ...] = (
    SdpaStep("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION, "CudnnAttention", ("*cudnn*",)),
    SdpaStep(
        "sdpa-flash", SDPBackend.FLASH_ATTENTION, "FlashAttention",
        ("*pytorch_flash::flash_fwd*", "*pytorch_flash::flash_bwd*"),
    ),
    FlashAttention4Step("fa4", deterministic=False),
    FlashAttention4Step("fa4-deterministic", deterministic=True),
    StepMatrixProduct(),
)  # fmt: skip
RIVALS: dict[str, Any] = {rival.name: rival for rival in _ALL}
