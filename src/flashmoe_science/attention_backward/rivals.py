"""The rivals of our gradients: how each is called, with its own forward run once before, and its kernels.

A rival is given copies of the inputs, runs its forward on them outside of any timing, and is timed in its backward
alone, called directly on the current stream: autograd's engine would run it on the stream of the forward.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..attention.backward_problem import BackwardProblem
from ..attention.rivals import MatrixProduct
from ..errors import InputError

Inputs: TypeAlias = "Mapping[str, torch.Tensor]"
Gradients: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"
Bind: TypeAlias = "Callable[[BackwardProblem, Inputs], Callable[[], Gradients]]"


class Bound:
    """An entry point that runs its forward before the call: ``operator.bind`` uses ``bind_inputs``."""

    def __init__(self, bind_inputs: Bind) -> None:
        """``bind_inputs`` returns the call."""
        self.bind_inputs = bind_inputs

    def __call__(self, *_arguments: object, **_options: object) -> Gradients:
        """Refuse."""
        raise InputError("this entry point is called through operator.bind")


class BackwardRival:
    """One baseline. Without a refusal it serves every problem; without patterns no kernel is pinned."""

    name: str
    kernels: Sequence[str] = ()
    distribution = "torch"  # the package whose version counts
    yardstick = False
    deterministic = False  # whether it was asked for the same bits in every run

    @property
    def also_called(self) -> Sequence[str]:
        """What prose calls it, besides its name."""
        return _ALSO_CALLED.get(self.name, ())

    def load(self) -> Callable[..., Gradients]:
        """Return the entry point. Raises ``ImportError`` with the reason."""
        raise NotImplementedError

    def version(self) -> str:
        """Return the version of the package behind it, and whether it was asked for the same bits in every run."""
        bits = "deterministic" if self.deterministic else "not deterministic"
        return f"{self.distribution} {importlib.metadata.version(self.distribution)}, {bits}"

    def refusal(self, problem: BackwardProblem) -> str | None:  # noqa: ARG002 - for those that override it
        """Return why it cannot serve ``problem``, or None."""
        return None

    def context(self) -> AbstractContextManager[object]:
        """Return the context in which all calls are made."""
        return contextlib.nullcontext()


class Sdpa(BackwardRival):
    """The backward of ``torch.nn.functional.scaled_dot_product_attention``, pinned to one backend.

    PyTorch asks cuDNN for no deterministic backward, whatever ``torch.use_deterministic_algorithms`` says.
    """

    def __init__(self, name: str, backend: SDPBackend, node: str, kernels: Sequence[str]) -> None:
        """``node`` is a part of the name of the node of autograd's graph that shows the backend."""
        self.name, self.backend, self.node, self.kernels = name, backend, node, kernels

    def load(self) -> Callable[..., Gradients]:
        """Return a function that runs the forward where it is bound, and calls the backward's node."""
        return Bound(self._bind)

    def _bind(self, problem: BackwardProblem, inputs: Inputs) -> Callable[[], Gradients]:
        p = problem.forward
        options: dict[str, Any] = {"is_causal": p.causal, "scale": p.softmax_scale}
        if p.group > 1:
            options["enable_gqa"] = True
        with torch.enable_grad():
            q, k, v = (inputs[name].clone().requires_grad_() for name in ("q", "k", "v"))
            o = F.scaled_dot_product_attention(q, k, v, **options)
        node: Any = o.grad_fn
        if self.node not in type(node).__name__:
            raise InputError(f"the backward must be that of {self.node}, got {type(node).__name__}")
        do = inputs["do"].clone(memory_format=torch.preserve_format)

        def run() -> Gradients:
            dq, dk, dv = node(do)[:3]
            return dq, dk, dv

        return run

    def refusal(self, problem: BackwardProblem) -> str | None:
        """SDPA aligns its causal mask top-left; fused backends serve 16-bit types."""
        p = problem.forward
        if p.causal and p.seqlen_q != p.seqlen_k:
            return "its causal mask is aligned top-left where lengths differ"
        return "it serves fp16 and bf16 only" if p.dtype == "fp32" else None

    def context(self) -> AbstractContextManager[object]:
        """Pin the backend."""
        return sdpa_kernel(self.backend)


class FlashAttention4(BackwardRival):
    """FlashAttention-4's backward, in its own layout ``[B, S, H, D]``."""

    kernels: Sequence[str] = ("*FlashAttentionBackwardSm*",)
    distribution = "flash-attn-4"

    def __init__(self, name: str, *, deterministic: bool) -> None:
        """Whether it adds to dQ in one order."""
        self.name, self.deterministic = name, deterministic

    def load(self) -> Callable[..., Gradients]:
        """Import the package: its forward that returns the LSE, and its backward."""
        module = importlib.import_module("flash_attn.cute.interface")
        try:
            return Bound(functools.partial(self._bind, module._flash_attn_fwd, module._flash_attn_bwd))  # noqa: SLF001 - the public way is autograd
        except AttributeError as error:
            raise ImportError(f"this version is called in another way: {error}") from error

    def _bind(self, forward: Any, backward: Any, problem: BackwardProblem, inputs: Inputs) -> Callable[[], Gradients]:
        p = problem.forward
        names = ("q", "k", "v", "do")
        # Always copies: of one head, ``contiguous`` would hand out the memory of the input itself.
        q, k, v, do = (inputs[x].transpose(1, 2).clone(memory_format=torch.contiguous_format) for x in names)
        o, lse, *_ = forward(q, k, v, softmax_scale=p.softmax_scale, causal=p.causal, return_lse=True)
        call = functools.partial(
            backward, q, k, v, o, do, lse, softmax_scale=p.softmax_scale, causal=p.causal,
            deterministic=self.deterministic,
        )  # fmt: skip

        def run() -> Gradients:
            dq, dk, dv = call()[:3]
            return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

        return run

    def refusal(self, problem: BackwardProblem) -> str | None:
        """The package serves 16-bit types."""
        return "it serves fp16 and bf16 only" if problem.forward.dtype == "fp32" else None


class BackwardMatrixProduct(MatrixProduct):
    """A product of two matrices with as many operations as the gradients take."""

    def refusal(self, problem: Any) -> str | None:
        """A small product does not reach the rate."""
        return self._refuse(problem)


# Names as profilers write them.
_ALL: tuple[Any, ...] = (
    Sdpa("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION, "CudnnAttention", ("*cudnn*",)),
    Sdpa("sdpa-flash", SDPBackend.FLASH_ATTENTION, "FlashAttention", ("*pytorch_flash::flash_bwd*",)),
    FlashAttention4("fa4", deterministic=False),
    FlashAttention4("fa4-deterministic", deterministic=True),
    BackwardMatrixProduct(),
)
_ALSO_CALLED = {
    "sdpa-cudnn": ("cuDNN",),
    "fa4": ("FlashAttention-4", "FlashAttention4", "flash-attn 4"),
}
RIVALS: dict[str, Any] = {rival.name: rival for rival in _ALL}
