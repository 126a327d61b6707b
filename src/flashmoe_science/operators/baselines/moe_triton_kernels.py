"""triton_kernels, the experts of Triton's own repository, as a baseline."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...moe.problem import DEFAULT_ALPHA, DEFAULT_LIMIT, MoeCase
from .base import Baseline, Bound, Call, Inputs
from .moe import add_shared, options_of

_SERVED = {"swiglu": "swiglu", "swiglu_clamped": "gpt-oss's swiglu"}


def _bind(case: MoeCase, inputs: Inputs) -> Call:
    """Return the call: routing by given experts, a product with its activation, a product and a sum of rows.

    Laid out before it: gates and values of ``w_gate_up`` row by row, biases in fp32, and routing weights as a matrix
    ``[T, E]`` of scores, since the library routes by scores. All other inputs are copied too, so that a call answers to
    the values that its inputs have now.
    """
    ogs = importlib.import_module("triton_kernels.matmul_ogs")
    route = importlib.import_module("triton_kernels.topk").topk
    tile_rows = importlib.import_module("triton_kernels.tensor").make_ragged_tensor_metadata
    p, up = case.problem, inputs["w_gate_up"]
    up = up.clone() if p.interleaved else _by_turns(up)
    inputs = {name: tensor.clone() for name, tensor in inputs.items() if name != "w_gate_up"}
    x, ids = inputs["x"], inputs["topk_ids"].int()  # of fewer bits than 32 it would lose experts
    scores = torch.zeros(p.tokens, p.experts, dtype=torch.float32, device=x.device)
    scores.scatter_(1, inputs["topk_ids"].long(), inputs["topk_weights"].float())
    up, down = up.transpose(1, 2), inputs["w_down"].transpose(1, 2)
    bias_up, bias_down = (inputs[name].float() if name in inputs else None for name in ("bias_gate_up", "bias_down"))
    if bias_up is not None and not p.interleaved:
        bias_up = _by_turns(bias_up)
    activation = ogs.FusedActivation(*_activation(case, ogs.FnSpecs))
    options: dict[str, Any] = {name: inputs[name] for name in inputs if name.startswith("shared_")}
    options.update(options_of(case))

    def run() -> Tensor:
        sparse = route(scores, p.top_k, apply_softmax=False, y_indx=ids)
        order, place = sparse.mask_metadata.col_sorted_indx, sparse.mask_metadata.row_sorted_indx
        tiles = tile_rows(sparse.mask_metadata.col_sum, p.pairs)
        weights = sparse.vals.flatten()[order]
        routing = ogs.RoutingData(weights, tiles.slice_sizes, p.experts, p.top_k, tiles)
        gather, scatter = ogs.GatherIndx(order, place), ogs.ScatterIndx(place, order)
        hidden = ogs.matmul_ogs(x, up, bias_up, routing, gather_indx=gather, fused_activation=activation)
        out: Tensor = ogs.matmul_ogs(hidden, down, bias_down, routing, scatter_indx=scatter, gammas=weights)
        return add_shared(out, x, options)

    return run


def _by_turns(rows: Tensor) -> Tensor:
    """Return ``[E, 2 * INTER, ...]``, first all gates and then all values, with gate and value by turns."""
    halves = rows.reshape(rows.shape[0], 2, rows.shape[1] // 2, *rows.shape[2:])
    return halves.transpose(1, 2).reshape(rows.shape)


def _activation(case: MoeCase, specs: Callable[..., Any]) -> tuple[Any, tuple[float, ...]]:
    """Return what is fused into the first product, with its arguments."""
    p = case.problem
    if p.activation == "swiglu":
        from .moe_swiglu_triton import swiglu

        return specs("swiglu_without_clamp", swiglu, (), reduction_n=2), ()
    clamped = importlib.import_module("triton_kernels.swiglu").swiglu_fn
    return specs("swiglu", clamped, ("alpha", "limit"), reduction_n=2), (
        p.alpha or DEFAULT_ALPHA,
        p.limit or DEFAULT_LIMIT,
    )


class TritonKernels(Baseline):
    """The experts of Triton's repository, forward only; their swiglu is gpt-oss's, plain swiglu is fused by us."""

    name = "triton_kernels"
    kernels = ("*matmul_ogs*",)
    distribution = "triton_kernels"

    def load(self) -> Callable[..., Any]:
        """Return what binds it."""
        importlib.import_module("triton_kernels.matmul_ogs")
        return Bound(_bind)

    def version(self) -> str:
        """Return its version, the same at every tag of Triton's repository, and that of Triton."""
        return f"{super().version()}, triton {importlib.metadata.version('triton')}"

    def refusal(self, case: MoeCase) -> str | None:
        """Tell what it does not fuse, and what its routing does not serve."""
        p = case.problem
        if p.activation not in _SERVED:
            return f"it fuses {' and '.join(_SERVED.values())}, got {p.activation}"
        if p.dtype == "fp32":
            return "it serves 16-bit operands"
        if p.batch_invariant:
            return "its tiles go by the number of tokens, so it is not batch-invariant"
        if p.top_k & (p.top_k - 1):
            return f"its routing serves powers of two as top_k, got {p.top_k}"
        return None
