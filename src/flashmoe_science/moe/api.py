"""``fused_moe`` and ``explain_moe``: the public contract, and the path from a call to its prepared launches."""

from __future__ import annotations

import torch
from torch import Tensor

from ..gpu.checks import check_one_device
from ..gpu.device import gpu_of
from .backward.autograd import differentiable
from .calls import Run, prepare_run, remember
from .checks import TENSORS, MoeCall, call_key, check_operator_call, moe_problem_of, read_call
from .plan import MoePlan, plan_moe
from .problem import Options
from .routing.api import route

__all__ = ["explain_moe", "fused_moe", "route"]

# Prepared launches by the key of a call, which holds everything that decides plan, kernels and grids.
_prepared: dict[object, Run] = {}


def fused_moe(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "swiglu",
    alpha: float | None = None,
    limit: float | None = None,
    interleaved: bool = False,
    bias_gate_up: Tensor | None = None,
    bias_down: Tensor | None = None,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_weights: Tensor | None = None,
    batch_invariant: bool = False,
    kernel: str = "auto",
) -> Tensor:
    """Run each token through its experts and sum their weighted outputs. No token is dropped.

    An id outside 0 to E - 1 contributes nothing and is no error: if all are, the output is 0.

    out[t] = sum_k topk_weights[t, k] * (w_down[e] @ act(w_gate_up[e] @ x[t] + bias_gate_up[e]) + bias_down[e]),
    with e = topk_ids[t, k], plus the same sum over shared experts, which process every token.

    Args:
        x: ``[T, HID]`` fp16, bf16 or fp32, any strides; T may be 0.
        w_gate_up: ``[E, 2 * INTER, HID]``, or ``[E, INTER, HID]`` without a gate; dtype and device of x, any strides.
            transformers and vLLM use the same layout.
        w_down: ``[E, HID, INTER]``, dtype and device of x, any strides.
        topk_weights: ``[T, K]`` fp16, bf16 or fp32, contiguous.
        topk_ids: ``[T, K]`` int32 or int64, contiguous. An id outside 0 to E - 1 contributes nothing, so that each
            GPU of an expert-parallel group can skip the experts of the others.
        activation: ``"swiglu"`` silu(gate) * up, ``"geglu"`` and ``"geglu_tanh"`` gelu(gate) * up,
            ``"swiglu_clamped"`` (gpt-oss) (up + 1) * gate * sigmoid(alpha * gate) with gate clamped to at most
            ``limit`` and up to [-limit, limit]; without a gate ``"relu2"`` relu(up) ** 2, ``"silu"``, ``"gelu"``,
            ``"gelu_tanh"``.
        alpha: Factor of swiglu_clamped. Default 1.702.
        limit: Clamp of swiglu_clamped. Default 7.
        interleaved: Rows 2i and 2i + 1 of ``w_gate_up`` and of its bias are gate and up (gpt-oss). Otherwise the first
            INTER rows are the gate.
        bias_gate_up: ``[E, 2 * INTER]`` (or ``[E, INTER]``), dtype of x, contiguous.
        bias_down: ``[E, HID]``, dtype of x, contiguous.
        shared_gate_up: ``[S, 2 * SI, HID]``, the weights of S shared experts; SI may differ from INTER.
        shared_down: ``[S, HID, SI]``.
        shared_weights: ``[T, S]`` fp16, bf16 or fp32, contiguous. Default: all 1.
        batch_invariant: Compute the same bits for a token whatever else is in the batch. K, sizes, dtype and GPU must
            be the same.
        kernel: ``"auto"``, or the name of one kernel (``explain_moe`` lists them). A forced kernel never falls back.

    Returns:
        ``[T, HID]`` in the dtype of x, contiguous.

    Raises:
        InputError: a shape, dtype, device or value breaks the contract above.
        UnsupportedError: no kernel, or not the forced one, serves this call. Second-order and forward-mode derivatives
            are not supported.

    All tensors but the ids have gradients. The backward pass keeps the inputs and the first product, and recomputes the
    activation. When gradients are recorded, rows are always sorted by expert. Autocast casts x, weights and biases of
    fp32.

    Numerics: products accumulate in fp32; the activation and each expert's output are rounded to the dtype of x, and
    summed in fp32 in the order of k. Output and gradients are bitwise equal from run to run. Host and device never wait
    for each other. CPU tensors run ``reference.fused_moe``.
    """
    call = read_call(
        {
            "x": x, "w_gate_up": w_gate_up, "w_down": w_down, "topk_weights": topk_weights, "topk_ids": topk_ids,
            "bias_gate_up": bias_gate_up, "bias_down": bias_down, "shared_gate_up": shared_gate_up,
            "shared_down": shared_down, "shared_weights": shared_weights,
        },
        Options(activation, alpha, limit, interleaved, batch_invariant, kernel),
    )  # fmt: skip
    return _call_operator(call) if call.key is None else _run(call.tensors, call.options, call.key)


def _run(tensors: dict[str, Tensor], options: Options, key: object) -> Tensor:
    """Make a call, prepared once for all that have its key."""
    run = _prepared.get(key)
    if run is None:
        plan = plan_moe(moe_problem_of(tensors, options), gpu_of(tensors["x"]), options.kernel)
        run = remember(_prepared, key, prepare_run(plan, tensors["x"].device))
    return run(tensors)["out"]


def explain_moe(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "swiglu",
    alpha: float | None = None,
    limit: float | None = None,
    interleaved: bool = False,
    bias_gate_up: Tensor | None = None,
    bias_down: Tensor | None = None,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_weights: Tensor | None = None,
    batch_invariant: bool = False,
    kernel: str = "auto",
) -> MoePlan:
    """Return the plan of ``fused_moe`` for the same arguments, without a launch.

    ``print`` shows it as text, ``.as_dict()`` gives it as data. Arguments and errors are those of ``fused_moe``. When
    gradients would be recorded, the plan is that of the forward pass that keeps the first product.
    """
    call = read_call(
        {
            "x": x, "w_gate_up": w_gate_up, "w_down": w_down, "topk_weights": topk_weights, "topk_ids": topk_ids,
            "bias_gate_up": bias_gate_up, "bias_down": bias_down, "shared_gate_up": shared_gate_up,
            "shared_down": shared_down, "shared_weights": shared_weights,
        },
        Options(activation, alpha, limit, interleaved, batch_invariant, kernel),
    )  # fmt: skip
    problem = moe_problem_of(call.tensors, call.options, keep_product=call.is_recorded)
    return plan_moe(problem, gpu_of(x), kernel)


# Traced graphs and calls with tensor subclasses run the operator below; eager calls do not. It never calls itself: what
# traces may go on while it runs.


@torch.library.custom_op("flashmoe_science::fused_moe", mutates_args=())
def _fused_moe(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    bias_gate_up: Tensor | None,
    bias_down: Tensor | None,
    shared_gate_up: Tensor | None,
    shared_down: Tensor | None,
    shared_weights: Tensor | None,
    activation: str,
    alpha: float | None,
    limit: float | None,
    interleaved: bool,
    batch_invariant: bool,
    kernel: str,
) -> Tensor:
    given = (
        x, w_gate_up, w_down, topk_weights, topk_ids, bias_gate_up, bias_down, shared_gate_up, shared_down,
        shared_weights,
    )  # fmt: skip
    tensors = {name: tensor.detach() for name, tensor in zip(TENSORS, given, strict=True) if tensor is not None}
    options = Options(activation, alpha, limit, interleaved, batch_invariant, kernel)
    return _run(tensors, options, call_key(tensors, options))


@_fused_moe.register_fake
def _fake_fused_moe(x: Tensor, *_rest: object) -> Tensor:
    check_one_device("x", x, _rest)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _call_operator(call: MoeCall) -> Tensor:
    check_operator_call(call)
    activation, alpha, limit, interleaved, batch_invariant, kernel = call.options
    alpha, limit = (None if number is None else float(number) for number in (alpha, limit))
    options = Options(activation, alpha, limit, interleaved, batch_invariant, kernel)
    if call.is_recorded:
        return differentiable(call.tensors, options)
    out: Tensor = _fused_moe(*(call.tensors.get(name) for name in TENSORS), *options)
    return out
