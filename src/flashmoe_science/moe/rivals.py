"""The rivals of our experts: how each is called. All take ``fused_moe``'s arguments."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch import Tensor

from ..errors import InputError
from ..gpu.memory_copy import bind_copy, refuse_copy
from . import reference
from .drawn import weight_bytes
from .problem import MoeCase

_MAX_GATHERED_BYTES = 32 << 30  # of weights that batched_mm copies, one expert's for each pair


class MoeRival:
    """One baseline. Without a refusal it serves every case; without patterns no kernel is pinned."""

    name: str
    kernels: Sequence[str] = ()
    distribution = "torch"  # the package whose version counts
    also_called: Sequence[str] = ()  # in prose, besides its name
    yardstick = False

    def load(self) -> Callable[..., Tensor]:
        """Return the entry point. Raises ``ImportError`` with the reason."""
        raise NotImplementedError

    def version(self) -> str:
        """Return the version of the package behind it."""
        return f"{self.distribution} {importlib.metadata.version(self.distribution)}"

    def refusal(self, case: MoeCase) -> str | None:  # noqa: ARG002 - for those that override it
        """Return why it cannot serve ``case``, or None."""
        return None

    def context(self) -> AbstractContextManager[object]:
        """Return the context in which all calls are made."""
        return contextlib.nullcontext()


def _add_shared(out: Tensor, x: Tensor, options: dict[str, Any]) -> Tensor:
    """Add what shared experts make of all tokens, as models do: beside the routed ones."""
    up, down, weights = (options.get(name) for name in ("shared_gate_up", "shared_down", "shared_weights"))
    if up is None or down is None:
        return out
    for s in range(up.shape[0]):
        y = F.linear(_activate(F.linear(x, up[s]), options), down[s])
        out = out + (y if weights is None else y * weights[:, s, None].to(x.dtype))
    return out


def _activate(product: Tensor, options: dict[str, Any]) -> Tensor:
    names = ("alpha", "limit", "interleaved")
    chosen = {name: options[name] for name in names if options.get(name)}
    return reference.activate(product, options.get("activation", "swiglu"), **chosen)


def _grouped_mm(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, topk_weights: Tensor, topk_ids: Tensor, **options: Any
) -> Tensor:
    """Do what transformers does with ``experts_implementation="grouped_mm"``, step by step."""
    tokens, top_k = topk_ids.shape
    experts = w_gate_up.shape[0]
    ids = topk_ids.reshape(-1)
    order = torch.argsort(ids)
    ids_sorted = ids[order]
    back = torch.argsort(order)
    counts = torch.histc(ids_sorted.float(), bins=experts, min=0, max=experts - 1)
    offsets = torch.cumsum(counts, 0, dtype=torch.int32)
    rows = x[order // top_k]
    product = torch._grouped_mm(rows, w_gate_up.transpose(-2, -1), offs=offsets)  # noqa: SLF001 - transformers calls it
    bias_gate_up, bias_down = options.get("bias_gate_up"), options.get("bias_down")
    if bias_gate_up is not None:
        product = product + bias_gate_up[ids_sorted]
    hidden = _activate(product, options)
    y = torch._grouped_mm(hidden, w_down.transpose(-2, -1), offs=offsets)  # noqa: SLF001 - as above
    if bias_down is not None:
        y = y + bias_down[ids_sorted]
    y = y * topk_weights.reshape(-1)[order, None].to(x.dtype)
    return _add_shared(y[back].view(tokens, top_k, -1).sum(1), x, options)


def _batched_mm(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, topk_weights: Tensor, topk_ids: Tensor, **options: Any
) -> Tensor:
    """Do what transformers does with ``experts_implementation="batched_mm"``: a copy of the weights for each pair."""
    tokens, top_k = topk_ids.shape
    ids = topk_ids.reshape(-1)
    rows = x.repeat_interleave(top_k, 0)
    product = torch.bmm(w_gate_up[ids], rows[:, :, None]).squeeze(-1)
    bias_gate_up, bias_down = options.get("bias_gate_up"), options.get("bias_down")
    if bias_gate_up is not None:
        product = product + bias_gate_up[ids]
    y = torch.bmm(w_down[ids], _activate(product, options)[:, :, None]).squeeze(-1)
    if bias_down is not None:
        y = y + bias_down[ids]
    y = y * topk_weights.reshape(-1, 1).to(x.dtype)
    return _add_shared(y.view(tokens, top_k, -1).sum(1), x, options)


def _eager(*tensors: Tensor, **options: Any) -> Tensor:
    """Loop over experts that have tokens, as transformers' models do by themselves."""
    options.pop("batch_invariant", None)
    return reference.fused_moe(*tensors, **options)


class FunctionRival(MoeRival):
    """A rival that is a function of this file."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Tensor],
        refuse: Callable[[MoeCase], str | None],
        also_called: Sequence[str],
    ) -> None:
        """``refuse`` returns why it cannot serve a case, or None."""
        self.name, self._function, self._refuse, self.also_called = name, function, refuse, also_called

    def load(self) -> Callable[..., Tensor]:
        """Return it."""
        return self._function

    def refusal(self, case: MoeCase) -> str | None:
        """Ask the function's own."""
        return self._refuse(case)


class Liger(MoeRival):
    """Liger-Kernel's fused experts, in Triton; it reads the number of its tiles on the host."""

    name = "liger"
    kernels = ("*_fused_up_proj_swiglu_kernel*", "*_fused_down_proj_kernel*")
    distribution = "liger-kernel"
    also_called = ("Liger-Kernel", "Liger")

    def load(self) -> Callable[..., Tensor]:
        """Return it, shared experts beside it."""
        run = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction.apply

        def liger(
            x: Tensor, w_gate_up: Tensor, w_down: Tensor, topk_weights: Tensor, topk_ids: Tensor, **options: Any
        ) -> Tensor:
            return _add_shared(run(x, w_gate_up, w_down, topk_ids.to(torch.int32), topk_weights), x, options)

        return liger

    def refusal(self, case: MoeCase) -> str | None:
        """It knows one activation, and no biases."""
        lacking = [feature for feature in case.problem.features if feature != "shared experts"]
        return f"it has no {', '.join(lacking)}" if lacking else None


class _BoundCopy:
    """An entry point that lays out what it copies before the call: ``operator.bind`` uses ``bind_inputs``."""

    def __call__(self, *_arguments: object, **_options: object) -> Tensor:
        """Refuse."""
        raise InputError("this entry point is called through operator.bind")

    def bind_inputs(self, case: MoeCase, inputs: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        """Return the copy."""
        return bind_copy(weight_bytes(case), inputs["x"].device)


class MemoryCopy(MoeRival):
    """A copy that moves as many bytes as the weights of active experts have, half read and half written."""

    name = "copy"
    yardstick = True

    def load(self) -> Callable[..., Tensor]:
        """Return PyTorch's copy."""
        return _BoundCopy()

    def refusal(self, case: MoeCase) -> str | None:
        """A small copy does not reach the rate."""
        return refuse_copy(weight_bytes(case))


def _refuse_grouped(case: MoeCase) -> str | None:
    problem = case.problem
    if problem.dtype != "bf16":
        return "torch._grouped_mm serves bf16"
    if problem.hidden % 8 or problem.inter % 8:
        return "torch._grouped_mm serves sizes that are multiples of 8"
    return None


def _refuse_batched(case: MoeCase) -> str | None:
    copied = case.problem.pairs * case.problem.expert_bytes
    if copied > _MAX_GATHERED_BYTES:
        return f"it would copy {copied / 1e9:.0f} GB of weights, one expert's for each pair"
    return None


def _refuse_nothing(_case: MoeCase) -> str | None:
    return None


_ALL: tuple[MoeRival, ...] = (
    FunctionRival("grouped_mm", _grouped_mm, _refuse_grouped, ("torch._grouped_mm", "transformers' grouped_mm")),
    FunctionRival("batched_mm", _batched_mm, _refuse_batched, ("transformers' batched_mm",)),
    FunctionRival("transformers-eager", _eager, _refuse_nothing, ("transformers' eager experts",)),
    Liger(),
    MemoryCopy(),
)
RIVALS: dict[str, MoeRival] = {rival.name: rival for rival in _ALL}
