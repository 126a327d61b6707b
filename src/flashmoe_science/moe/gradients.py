"""Gradients of ``fused_moe`` for autograd: what a call keeps, and the operators that graphs hold."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..gpu.device import gpu_of
from ..gpu.refusals import check_not_batched, check_one_device, check_wanted
from . import reference
from .backward_plan import GRADIENTS, plan_backward
from .calls import Run, prepare_run
from .inputs import TENSORS, layout_of, moe_problem_of
from .plan import plan_moe
from .problem import MoeProblem
from .refusals import check_routed

# Tensors that have a gradient, in the order of ``fused_moe``: all but the ids.
DIFFERENTIABLE = tuple(name for name in TENSORS if name != "topk_ids")
_SHARED = {"w_gate_up": "shared_gate_up", "w_down": "shared_down", "topk_weights": "shared_weights"}
_prepared: dict[tuple[Any, ...], Run] = {}
_MAX_PREPARED = 8192
# Activation, alpha, limit, interleaved, batch_invariant, kernel.
Options = tuple[str, float | None, float | None, bool, bool, str]


# What AOTAutograd asks before it reuses memory that was kept; a test fails should the name go away.
_pass_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph  # noqa: SLF001 - has no public name
_hooks_of_kept = torch._C._autograd._top_saved_tensors_default_hooks  # noqa: SLF001 - likewise
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001 - likewise
_count_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001 - likewise
# On the context of a backward pass, if nobody but its graph holds what is kept: the capture in which it was made.
_MADE_IN = "made_in"


def _hooks_let_go() -> bool:
    """Return whether nobody but the graph holds what is kept: no hooks, or those that compute it again."""
    hooks: Any = _hooks_of_kept(True)  # noqa: FBT003 - it has no name: not those that are there because torch traces
    # A hook may be any callable: methods of builtin types have no module.
    return hooks is None or getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def _capture_of(device: torch.device) -> int | None:
    """Return the number of the CUDA graph capture that work on ``device`` is part of, or None."""
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        if not torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream().cuda_stream
    from ..gpu.launch import driver_call

    status, number = ctypes.c_int(), ctypes.c_uint64()
    driver_call(
        "cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number),
        None, None, None, what="cannot tell which graph is captured",
    )  # fmt: skip
    return number.value


def records(tensors: Mapping[str, Tensor | None]) -> bool:
    """Return whether autograd wants gradients of a call."""
    if not torch.is_grad_enabled():
        return False
    return any(tensor is not None and tensor.requires_grad for name, tensor in tensors.items() if name != "topk_ids")


def _prepared_run(key: tuple[Any, ...], make: Any) -> Run:
    run = _prepared.get(key)
    if run is None:
        run = make()
        if len(_prepared) >= _MAX_PREPARED:
            _prepared.clear()
        _prepared[key] = run
    return run


def _describe(tensors: Mapping[str, Tensor], options: Options) -> MoeProblem:
    activation, alpha, limit, interleaved, batch_invariant, _ = options
    return moe_problem_of(
        tensors, activation=activation, alpha=alpha, limit=limit, interleaved=interleaved,
        batch_invariant=batch_invariant, keep_product=True,
    )  # fmt: skip


def _is_reference(device: torch.device, kernel: str) -> bool:
    """Return whether eager torch serves a call: it keeps nothing, and its gradients compute all again."""
    return device.type == "cpu" and kernel in ("auto", "reference")


def _forward(tensors: dict[str, Tensor], options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output and what is kept."""
    x = tensors["x"]
    if _is_reference(x.device, options[5]):
        _describe(tensors, options)  # checks
        nothing = torch.empty((0, 0), dtype=x.dtype, device=x.device)
        everything: dict[str, Any] = {**tensors, **_named(options)}
        return reference.fused_moe(**everything), nothing, nothing.clone()
    key = ("forward", *(layout_of(tensors.get(name)) for name in TENSORS), options)
    run = _prepared_run(
        key, lambda: prepare_run(plan_moe(_describe(tensors, options), gpu_of(x), options[5]), x.device)
    )
    made = run(tensors)
    return made["out"], made["product"], made["shared_product"]


def _named(options: Options) -> dict[str, Any]:
    activation, alpha, limit, interleaved, _, _ = options
    return {"activation": activation, "alpha": alpha or 0.0, "limit": limit or 0.0, "interleaved": interleaved}


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
        do: of the output, any strides.
        products: what ``fused_moe`` kept, of routed and of shared experts.
        tensors: what it was given.
        options: its options.
        wanted: of ``DIFFERENTIABLE`` those that are asked for.
        kernel: of the gradients: a name to force, which never falls back.
        overwrite: the gradients of the products may be written where these are. Versions of those that are written
            to go up before: autograd then refuses to take them for products.

    Raises:
        UnsupportedError: no kernel makes them.

    Numerics: fp32 products and sums; what goes into a product is rounded to the dtype of x. On Hopper dO @ w_down is
    rounded to bf16 where ``activation_gluon_sm90`` makes it, as eager PyTorch does. Every sum has one order: the same
    bits in every run. Those of one gradient may depend on which others are asked for.
    """
    routed = {name: tensors[name] for name in TENSORS[:7] if name in tensors}
    names = [name for name in wanted if name in GRADIENTS]
    found = _routed(do, products[0], routed, options, names, kernel, overwrite=overwrite)
    if "shared_gate_up" not in tensors:
        return found
    theirs = _as_routed(tensors)
    of_shared = {name: shared for name, shared in _SHARED.items() if shared in wanted}
    asked = [*of_shared, *(["x"] if "x" in wanted else [])]
    more = _routed(do, products[1], theirs, options, asked, kernel, overwrite=overwrite)
    if "x" in wanted:
        found["x"].add_(more["x"])
    found.update({shared: more[name] for name, shared in of_shared.items()})
    return found


def _as_routed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return shared experts as a call whose tokens all go to each; rows in the same order as the forward's."""
    x, up = tensors["x"], tensors["shared_gate_up"]
    shape = (x.shape[0], up.shape[0])
    ids = torch.arange(shape[1], dtype=torch.int32, device=x.device).expand(shape).contiguous()
    weights = tensors.get("shared_weights")
    if weights is None:
        weights = torch.ones(shape, dtype=torch.float32, device=x.device)
    return {
        "x": x, "w_gate_up": up, "w_down": tensors["shared_down"], "topk_weights": weights, "topk_ids": ids
    }  # fmt: skip


def _routed(
    do: Tensor,
    product: Tensor,
    tensors: dict[str, Tensor],
    options: Options,
    wanted: Sequence[str],
    kernel: str,
    *,
    overwrite: bool,
) -> dict[str, Tensor]:
    """Return the gradients of routed experts."""
    if not wanted:
        return {}
    x = tensors["x"]
    check_routed(do, product, tensors, options, kernel)
    if x.shape[0] == 0:
        return {name: torch.zeros(tensors[name].shape, dtype=tensors[name].dtype, device=x.device) for name in wanted}
    if _is_reference(x.device, options[5]) and kernel == "auto":
        everything: dict[str, Any] = {**tensors, **_named(options)}
        gradients = reference.moe_gradients(do, **everything)
        return {name: gradients[name].to(tensors[name].dtype) for name in wanted}
    do = do.resolve_neg().contiguous()  # an expanded scalar, as sum() gives
    if do.data_ptr() % 16:
        do = do.clone()
    key = ("backward", *(layout_of(tensors.get(name)) for name in TENSORS[:7]), options, tuple(wanted), kernel)
    run = _prepared_run(
        key,
        lambda: prepare_run(plan_backward(_describe(tensors, options), gpu_of(x), tuple(wanted), kernel), x.device),
    )
    given = {**tensors, "do": do, "product": product}
    if overwrite:
        given["dproduct"] = product
    made = run(given)
    return {name: made[f"d_{name}"] for name in wanted}


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
    return _forward(tensors, (activation, alpha, limit, interleaved, batch_invariant, kernel))


@_fused_moe_kept.register_fake
def _fake_kept(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    tensors = {name: tensor for name, tensor in zip(TENSORS, given, strict=False) if tensor is not None}
    options: Any = given[len(TENSORS) :]
    x = tensors["x"]
    check_one_device("x", x, given)
    shapes = [x.shape, (0, 0), (0, 0)]
    if not _is_reference(x.device, options[5]):
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
    """Return the gradients of which ``wanted`` has the numbers, in its order."""
    given = (
        x, w_gate_up, w_down, topk_weights, topk_ids, bias_gate_up, bias_down, shared_gate_up, shared_down,
        shared_weights,
    )  # fmt: skip
    tensors = {name: tensor.detach() for name, tensor in zip(TENSORS, given, strict=True) if tensor is not None}
    options = (activation, alpha, limit, interleaved, batch_invariant, kernel)
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
    """Return whether a tensor has memory of its own, and no meaning besides."""
    return tensor is None or (type(tensor) in (Tensor, torch.nn.Parameter) and not _is_wrapped(tensor))


def _overwrites(ctx: Any, do: Tensor, kept: Sequence[Tensor | None]) -> bool:
    """Return whether this backward pass is the last that needs the products, and nobody records or traces it.

    A pass that a CUDA graph replays is the last one only if the graph makes the products anew.
    """
    if torch.compiler.is_compiling() or not hasattr(ctx, _MADE_IN):
        return False
    is_last = not _pass_keeps_graph() and not torch.is_grad_enabled() and not _count_modes()
    return is_last and all(map(_is_plain, (do, *kept))) and getattr(ctx, _MADE_IN) == _capture_of(do.device)


def _refuse_second_order(_ctx: Any, *_gradients: Any) -> Any:
    raise UnsupportedError(
        "there are no second-order gradients of fused_moe", hint="for them, use flashmoe_science.moe.reference"
    )


_fused_moe_backward.register_autograd(_refuse_second_order)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.options = inputs[len(TENSORS) :]
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


def differentiable(given: Mapping[str, Tensor | None], options: Options) -> Tensor:
    """Return the output of a call, and record what its gradients need.

    The products are nobody else's: a backward pass that is the last one writes their gradients where they are. Not in
    graphs that torch traces, whose operators write to nothing that they are given.
    """
    out: Tensor = _fused_moe_kept(*(given[name] for name in TENSORS), *options)[0]
    if not torch.compiler.is_compiling():
        node: Any = out.grad_fn  # the context of the backward pass, but for transforms, which have their own
        if isinstance(node, torch.autograd.function.FunctionCtx) and _hooks_let_go() and not _count_modes():
            setattr(node, _MADE_IN, _capture_of(out.device))
    return out
