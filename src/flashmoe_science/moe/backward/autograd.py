"""Gradients of ``fused_moe`` for autograd: the tensors that a call keeps, and torch's operators."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...gpu.checks import check_not_batched, check_one_device, check_storages, check_wanted
from ...gpu.device import gpu_of
from ...gpu.subclasses import PLAIN, is_watched
from .. import reference
from ..calls import Run, prepare_run, reference_options, remember
from ..checks import TENSORS, call_key, check_gradients_call, moe_problem_of
from ..plan import plan_moe
from ..problem import MoeProblem, Options
from .plan import GRADIENTS, plan_backward

# Tensors with a gradient, in the order of ``fused_moe``: all but the ids.
DIFFERENTIABLE = tuple(name for name in TENSORS if name != "topk_ids")
_SHARED = {"w_gate_up": "shared_gate_up", "w_down": "shared_down", "topk_weights": "shared_weights"}
_prepared: dict[object, Run] = {}

# AOTAutograd asks the first before it reuses saved memory. A test fails if torch removes one of these names.
_pass_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph  # noqa: SLF001 - has no public name
_hooks_of_kept = torch._C._autograd._top_saved_tensors_default_hooks  # noqa: SLF001 - has no public name
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001 - has no public name
# Attribute of a backward context whose graph alone holds the products: the CUDA graph capture that made them.
_MADE_IN = "made_in"


def _hooks_let_go() -> bool:
    """Return whether the graph alone holds saved tensors: no hooks see them, or checkpointing recomputes them."""
    hooks: Any = _hooks_of_kept(True)  # noqa: FBT003 - positional only: ignore the hooks of tracing
    # A hook may be any callable, and methods of builtin types have no module.
    return hooks is None or getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def _capture_of(device: torch.device) -> int | None:
    """Return the id of the CUDA graph capture of the current stream of ``device``, or None."""
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        if not torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream().cuda_stream
    from ...gpu.launch import driver_call

    status, number = ctypes.c_int(), ctypes.c_uint64()
    driver_call(
        "cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number),
        None, None, None, what="cannot tell which graph is captured",
    )  # fmt: skip
    return number.value


def _is_reference(device: torch.device, kernel: str) -> bool:
    """Return whether eager torch serves a call. It keeps no product."""
    return device.type == "cpu" and kernel in ("auto", "reference")


def _forward(tensors: dict[str, Tensor], options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and the first products of routed and of shared experts."""
    key = ("forward", call_key(tensors, options))
    run = _prepared.get(key)
    if run is None:
        x = tensors["x"]
        problem = moe_problem_of(tensors, options, keep_product=True)
        run = remember(_prepared, key, prepare_run(plan_moe(problem, gpu_of(x), options.kernel), x.device))
    made = run(tensors)
    return made["out"], made["product"], made["shared_product"]


def moe_gradients(
    do: Tensor,
    products: tuple[Tensor, Tensor],
    tensors: Mapping[str, Tensor],
    options: Options,
    wanted: Sequence[str],
    kernel: str = "auto",
    *,
    overwrite: bool = False,
) -> dict[str, Tensor]:
    """Return gradients by name.

    Args:
        do: The gradient of the output, any strides.
        products: The first products that ``fused_moe`` kept, of routed and of shared experts.
        tensors: The tensors of the call.
        options: The options of the call.
        wanted: The names of the gradients to compute, of ``DIFFERENTIABLE``.
        kernel: ``"auto"``, or a backward kernel by name, which never falls back.
        overwrite: Let the gradients of the products overwrite them. Their versions rise before, so that autograd
            refuses to use them as products again.

    Raises:
        UnsupportedError: no kernel computes them.

    Numerics: fp32 products and sums; operands of products are rounded to the dtype of x. On Hopper,
    ``activation_gluon_sm90`` rounds dO @ w_down to bf16, as eager PyTorch does. Every sum has a fixed order, so
    gradients are bitwise equal from run to run. The bits of one gradient may depend on which others are wanted.
    """
    routed = {name: tensors[name] for name in TENSORS[:7] if name in tensors}
    names = [name for name in wanted if name in GRADIENTS]
    found = routed_gradients(do, products[0], routed, options, names, kernel, overwrite=overwrite)
    if "shared_gate_up" not in tensors:
        return found
    theirs = _as_routed(tensors)
    of_shared = {name: shared for name, shared in _SHARED.items() if shared in wanted}
    asked = [*of_shared, *(["x"] if "x" in wanted else [])]
    more = routed_gradients(do, products[1], theirs, options, asked, kernel, overwrite=overwrite)
    if "x" in wanted:
        found["x"].add_(more["x"])
    found.update({shared: more[name] for name, shared in of_shared.items()})
    return found


def _as_routed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Describe shared experts as routed ones with every token; rows are in the order of the forward pass."""
    x, up = tensors["x"], tensors["shared_gate_up"]
    shape = (x.shape[0], up.shape[0])
    ids = torch.arange(shape[1], dtype=torch.int32, device=x.device).expand(shape).contiguous()
    weights = tensors.get("shared_weights")
    if weights is None:
        weights = torch.ones(shape, dtype=torch.float32, device=x.device)
    return {
        "x": x, "w_gate_up": up, "w_down": tensors["shared_down"], "topk_weights": weights, "topk_ids": ids
    }  # fmt: skip


def routed_gradients(
    do: Tensor,
    product: Tensor,
    tensors: Mapping[str, Tensor],
    options: Options,
    wanted: Sequence[str],
    kernel: str,
    *,
    overwrite: bool = False,
    product_is_given: bool = False,
) -> dict[str, Tensor]:
    """Return the gradients of routed experts: see ``moe_gradients``.

    ``product_is_given``: the product comes from the user, and is checked although the reference does not read it.
    """
    if not wanted:
        return {}
    x = tensors["x"]
    by_reference = kernel == "auto" and _is_reference(x.device, options.kernel)
    key = ("backward", call_key(tensors, options), tuple(wanted), kernel)
    run = _prepared.get(key)
    problem = moe_problem_of(tensors, options, keep_product=True) if run is None else None
    # The reference keeps no product, so there is none to check.
    check_gradients_call(do, product if product_is_given or not by_reference else None, tensors)
    if problem is not None:
        if x.shape[0] == 0:
            run = _make_zeros(wanted)
        elif by_reference:
            run = _reference_run(problem, wanted)
        else:
            run = prepare_run(plan_backward(problem, gpu_of(x), tuple(wanted), kernel), x.device)
        remember(_prepared, key, run)
    assert run is not None
    do = do.resolve_neg().contiguous()  # sum() gives an expanded scalar
    if do.data_ptr() % 16:
        do = do.clone()
    given = {**tensors, "do": do, "product": product}
    if overwrite:
        given["dproduct"] = product
    made = run(given)
    return {name: made[f"d_{name}"] for name in wanted}


def _make_zeros(wanted: Sequence[str]) -> Run:
    """Return a run for calls without tokens."""

    def run(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        like = {f"d_{name}": tensors[name] for name in wanted}
        return {name: torch.zeros(one.shape, dtype=one.dtype, device=one.device) for name, one in like.items()}

    return run


def _reference_run(problem: MoeProblem, wanted: Sequence[str]) -> Run:
    """Return a run of eager torch, which recomputes the product."""
    options: dict[str, Any] = reference_options(problem)

    def run(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
        given = {name: tensor for name, tensor in tensors.items() if name not in ("product", "dproduct")}
        check_storages(given)
        found = reference.moe_gradients(**given, **options)
        return {f"d_{name}": found[name].to(tensors[name].dtype) for name in wanted}

    return run


@torch.library.custom_op("flashmoe_science::fused_moe_kept", mutates_args=())
def _fused_moe_kept(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and the first products of routed and of shared experts."""
    given = (
        x, w_gate_up, w_down, topk_weights, topk_ids, bias_gate_up, bias_down, shared_gate_up, shared_down,
        shared_weights,
    )  # fmt: skip
    tensors = {name: tensor.detach() for name, tensor in zip(TENSORS, given, strict=True) if tensor is not None}
    return _forward(tensors, Options(activation, alpha, limit, interleaved, batch_invariant, kernel))


@_fused_moe_kept.register_fake
def _fake_kept(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    tensors = {name: tensor for name, tensor in zip(TENSORS, given, strict=False) if tensor is not None}
    options = Options(*given[len(TENSORS) :])
    x = tensors["x"]
    check_one_device("x", x, given)
    shapes = [x.shape, (0, 0), (0, 0)]
    if not _is_reference(x.device, options.kernel):
        shapes[1] = (tensors["topk_ids"].numel(), tensors["w_gate_up"].shape[1])
        if "shared_gate_up" in tensors:
            shared = tensors["shared_gate_up"]
            shapes[2] = (shared.shape[0] * x.shape[0], shared.shape[1])
    out, product, shared_product = (torch.empty(shape, dtype=x.dtype, device=x.device) for shape in shapes)
    return out, product, shared_product


@torch.library.custom_op("flashmoe_science::fused_moe_backward", mutates_args=())
def _fused_moe_backward(
    do: Tensor,
    product: Tensor,
    shared_product: Tensor,
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
    wanted: Sequence[int],
) -> list[Tensor]:
    """Return gradients in the order of ``wanted``, which holds indices into ``DIFFERENTIABLE``."""
    given = (
        x, w_gate_up, w_down, topk_weights, topk_ids, bias_gate_up, bias_down, shared_gate_up, shared_down,
        shared_weights,
    )  # fmt: skip
    tensors = {name: tensor.detach() for name, tensor in zip(TENSORS, given, strict=True) if tensor is not None}
    options = Options(activation, alpha, limit, interleaved, batch_invariant, kernel)
    check_wanted(wanted, tensors, DIFFERENTIABLE)
    names = [DIFFERENTIABLE[number] for number in wanted]
    found = moe_gradients(do.detach(), (product.detach(), shared_product.detach()), tensors, options, names)
    return [found[name] for name in names]


@_fused_moe_backward.register_fake
def _fake_backward(*given: Any) -> list[Tensor]:
    tensors = dict(zip(TENSORS, given[3:], strict=False))
    wanted = given[-1]
    check_one_device("x", tensors["x"], given)
    like = [tensors[DIFFERENTIABLE[number]] for number in wanted]
    return [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in like]


def _is_plain(tensor: Tensor | None) -> bool:
    """Return whether a tensor is a plain one with memory of its own, or None."""
    return tensor is None or (type(tensor) in PLAIN and not _is_wrapped(tensor))


def _overwrites(ctx: Any, do: Tensor, kept: Sequence[Tensor | None]) -> bool:
    """Return whether this backward pass is the last one to need the products, and is neither recorded nor traced.

    In a CUDA graph that is replayed, a pass is the last one only if the same graph computes the products.
    """
    if torch.compiler.is_compiling() or not hasattr(ctx, _MADE_IN):
        return False
    is_last = not _pass_keeps_graph() and not torch.is_grad_enabled() and not is_watched()
    return is_last and all(map(_is_plain, (do, *kept))) and getattr(ctx, _MADE_IN) == _capture_of(do.device)


def _refuse_second_order(_ctx: Any, *_gradients: Any) -> Any:
    raise UnsupportedError(
        "there are no second-order gradients of fused_moe", hint="for them, use flashmoe_science.moe.reference"
    )


_fused_moe_backward.register_autograd(_refuse_second_order)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.options = Options(*inputs[len(TENSORS) :])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[: len(TENSORS)], *output[1:])


def _backward(ctx: Any, do: Tensor | None, *_others: Tensor | None) -> Any:
    *inputs, product, shared_product = ctx.saved_tensors
    nothing: list[Tensor | None] = [None] * (len(TENSORS) + len(ctx.options))
    if do is None:
        return tuple(nothing)
    check_not_batched("fused_moe", (do,))
    needed = dict(zip(TENSORS, ctx.needs_input_grad, strict=False))
    wanted = [number for number, name in enumerate(DIFFERENTIABLE) if needed[name]]
    if _overwrites(ctx, do, (product, *inputs)):
        tensors = {name: tensor.detach() for name, tensor in zip(TENSORS, inputs, strict=True) if tensor is not None}
        products = product.detach(), shared_product.detach()
        names = [DIFFERENTIABLE[number] for number in wanted]
        made = moe_gradients(do.detach(), products, tensors, ctx.options, names, overwrite=True)
        found = [made[name] for name in names]
    else:
        found = _fused_moe_backward(do, product, shared_product, *inputs, *ctx.options, wanted)
    for number, gradient in zip(wanted, found, strict=True):
        nothing[TENSORS.index(DIFFERENTIABLE[number])] = gradient
    return tuple(nothing)


_fused_moe_kept.register_autograd(_backward, setup_context=_setup_context)


def differentiable(tensors: Mapping[str, Tensor], options: Options) -> Tensor:
    """Return the output of a call, and save the first products for its gradients.

    The graph alone holds the products, so the last backward pass overwrites them with their gradients. Traced graphs do
    not, as their operators must not write to their inputs.
    """
    out: Tensor = _fused_moe_kept(*(tensors.get(name) for name in TENSORS), *options)[0]
    if not torch.compiler.is_compiling():
        node: Any = out.grad_fn  # the context of the backward pass, except under transforms
        if isinstance(node, torch.autograd.function.FunctionCtx) and _hooks_let_go() and not is_watched():
            setattr(node, _MADE_IN, _capture_of(out.device))
    return out
