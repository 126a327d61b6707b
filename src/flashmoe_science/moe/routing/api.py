"""``route``: the public contract, its checks, and the path from a call to its prepared launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError, UnsupportedError, shown
from ...gpu.checks import (
    check_dense,
    check_no_tangent,
    check_not_differentiated_by_torch_func,
    check_not_mapped,
    check_not_mixed,
    check_not_negative,
    check_one_device,
    check_saved_for_gradients,
    check_storages,
    check_tensor,
)
from ...gpu.planning import refuse_architecture
from ...gpu.subclasses import PLAIN, PLAIN_OR_NONE, is_traced, is_untraced
from .. import reference
from ..checks import DTYPE_NAMES
from ..problem import Routing

SCORES = ("softmax", "sigmoid")
_LARGEST_SCALE = (2 - 2.0**-23) * 2.0**127  # of fp32
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001 - what torch.compile's code calls


def route(
    logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    renormalize: bool = True,
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose the ``top_k`` experts of each token and their weights.

    The choice is by score + bias. The weights are the scores of the chosen experts, without the bias.

    Args:
        logits: ``[T, E]`` fp16, bf16 or fp32, any strides.
        top_k: Experts a token.
        score: ``"softmax"`` over all experts, or ``"sigmoid"`` of each.
        renormalize: Divide the weights of a token by their sum. With softmax this equals the softmax over the chosen
            experts (Mixtral, Qwen3 with norm_topk_prob, gpt-oss).
        bias: ``[E]`` fp16, bf16 or fp32, contiguous. It affects the choice, not the weights (DeepSeek-V3).
        groups: Number of groups of consecutive experts. A token chooses only among experts of its best groups. The
            value of a group is the sum of its two best choices with a bias (DeepSeek-V3), else its best (DeepSeek-V2).
        top_groups: Groups that a token may choose from. Default: its best one.
        scale: Factor of the weights (routed_scaling_factor).

    Returns:
        weights ``[T, K]`` fp32, and ids ``[T, K]`` int32, the best first. Ties go to the lower expert; NaN counts as
        -inf.

    Raises:
        InputError: a shape, dtype, device or value breaks the contract above.
        UnsupportedError: no kernel serves this call. Second-order and forward-mode derivatives are not supported.

    Gradients flow from the weights to the logits. The bias has no gradient, as it only affects the choice.

    Numerics: fp32; bitwise equal from run to run; a token's result does not depend on the other tokens.
    """
    if type(logits) not in PLAIN:
        check_tensor("logits", logits)
    if type(bias) not in PLAIN_OR_NONE:
        check_tensor("bias", bias, optional=True)
    check_no_tangent("logits", logits)
    if bias is not None:
        check_no_tangent("bias", bias)
    given = {"logits": logits} if bias is None else {"logits": logits, "bias": bias}
    records = torch.is_grad_enabled() and logits.requires_grad
    if records or is_traced(given.values()):
        check_not_mapped(given.values())
        if records:
            check_saved_for_gradients(given)
        # The operator converts options of another type, and its fake implementation checks nothing.
        check_routing_tensors(logits, bias)
        check_routing_options(logits.shape[1], top_k, score, renormalize, groups, top_groups, scale)
        check_not_differentiated_by_torch_func("logits", logits)
        check_not_mixed(given)
        bias = None if bias is None else bias.detach()
        weights, ids = _route(logits, bias, top_k, score, renormalize, groups, top_groups, float(scale))
        return weights, ids
    check_not_mapped(given.values())
    routing = describe_routing(
        logits, top_k, score=score, renormalize=renormalize, bias=bias, groups=groups, top_groups=top_groups,
        scale=scale,
    )  # fmt: skip
    return _run(routing, logits, bias)


def _run(routing: Routing, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return (_reference if logits.device.type == "cpu" else run_route)(routing, logits, bias)


def describe_routing(
    logits: Tensor,
    top_k: object,
    *,
    score: object = "softmax",
    renormalize: object = True,
    bias: Tensor | None = None,
    groups: object = 1,
    top_groups: object = 1,
    scale: object = 1.0,
) -> Routing:
    """Check the arguments against the contract of ``route``, and describe the call. Raises ``InputError``."""
    check_routing_tensors(logits, bias)
    tokens, experts = logits.shape
    k, of, best = check_routing_options(experts, top_k, score, renormalize, groups, top_groups, scale)
    return Routing(
        tokens=tokens,
        experts=experts,
        top_k=k,
        dtype=DTYPE_NAMES[logits.dtype],
        strides=logits.stride(),
        score=str(score),
        renormalize=bool(renormalize),
        bias="" if bias is None else DTYPE_NAMES[bias.dtype],
        groups=of,
        top_groups=best,
        scale=float(scale),  # type: ignore[arg-type]
    )


def check_routing_options(
    experts: int, top_k: object, score: object, renormalize: object, groups: object, top_groups: object, scale: object
) -> tuple[int, int, int]:
    """Check the options of ``route``, and return top_k, groups and top_groups. Raises ``InputError``."""
    k = _check_count("top_k", top_k)
    of, best = _check_groups(experts, _check_count("groups", groups), _check_count("top_groups", top_groups))
    allowed = best * (experts // of)
    if k > allowed:
        whose = f" of {best} group{'s' if best > 1 else ''}" if of > 1 else ""
        raise InputError(f"top_k must be at most the {allowed} experts{whose}, got {shown(k)}")
    if not isinstance(score, str) or score not in SCORES:
        raise InputError(f"score must be one of {', '.join(SCORES)}, got {shown(score)}")
    if not isinstance(renormalize, bool):
        raise InputError(f"renormalize must be True or False, got {shown(renormalize)}")
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not abs(scale) <= _LARGEST_SCALE:
        raise InputError(f"scale must be a finite number of fp32, got {shown(scale)}")
    return k, of, best


def check_routing_tensors(logits: Tensor, bias: Tensor | None) -> None:
    """Check logits and bias against the contract of ``route``. Raises ``InputError``."""
    check_dense("logits", logits)
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise InputError(f"logits must have 2 dimensions [T, E], E at least 1, got shape {list(logits.shape)}")
    if logits.device.type not in ("cpu", "cuda") and is_untraced(logits):
        raise InputError(f"logits must be on a CUDA device or the CPU, got {logits.device}")
    _check_kind("logits", logits)
    if bias is None:
        return
    check_dense("bias", bias)
    _check_kind("bias", bias)
    if bias.device != logits.device:
        raise InputError(f"bias must be on the device of logits, {logits.device}, got {bias.device}")
    if tuple(bias.shape) != (logits.shape[1],):
        raise InputError(f"bias must have shape [E] = {[logits.shape[1]]}, got {list(bias.shape)}")
    if not bias.is_contiguous():
        raise InputError(f"bias must be contiguous, got strides {list(bias.stride())}")


def _check_kind(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in DTYPE_NAMES:
        raise InputError(f"{name} must be float16, bfloat16 or float32, got {tensor.dtype}")
    check_not_negative(name, tensor)


def _check_groups(experts: int, groups: int, top_groups: int) -> tuple[int, int]:
    if experts % groups:
        raise InputError(f"groups must divide the {experts} experts, got {shown(groups)}")
    if top_groups > groups:
        raise InputError(f"top_groups must be at most groups = {groups}, got {shown(top_groups)}")
    return groups, top_groups


def _check_count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} must be an integer, 1 or more, got {shown(value)}")
    return value


def _reference(routing: Routing, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    check_storages({"logits": logits} if bias is None else {"logits": logits, "bias": bias})
    return reference.route(
        logits,
        routing.top_k,
        score=routing.score,
        renormalize=routing.renormalize,
        bias=bias,
        groups=routing.groups,
        top_groups=routing.top_groups,
        scale=routing.scale,
    )


def run_route(routing: Routing, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Allocate the outputs and launch; on CPU tensors in Triton's interpreter."""
    shape, device = (routing.tokens, routing.top_k), logits.device
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    ids = torch.empty(shape, dtype=torch.int32, device=device)
    if routing.tokens == 0:
        return weights, ids
    if device.type == "cpu":
        from ..prepare import interpret
        from .prepare import kernel_of

        kernel = kernel_of(routing, 0)
        given = {"logits": logits, "weights": weights, "ids": ids, **({} if bias is None else {"bias": bias})}
        interpret(kernel, given)
        return weights, ids
    tensors = (logits, *(() if bias is None else (bias,)), weights, ids)
    with torch.cuda.device(device):
        assert _raw_stream is not None
        addresses = [tensor.data_ptr() for tensor in tensors]
        _launch_of(routing, device.index)(_raw_stream(device.index), *addresses, *[0] * (4 - len(addresses)))
    return weights, ids


def run_route_backward(routing: Routing, logits: Tensor, ids: Tensor, dweights: Tensor) -> Tensor:
    """Return the gradient of the logits; on CPU tensors in Triton's interpreter."""
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if routing.tokens == 0:
        return dlogits
    given = {"logits": logits, "ids": ids, "dweights": dweights.contiguous(), "dlogits": dlogits}
    if logits.device.type == "cpu":
        from ..prepare import interpret
        from .prepare import backward_kernel_of

        interpret(backward_kernel_of(routing, 0), given)
        return dlogits
    with torch.cuda.device(logits.device):
        assert _raw_stream is not None
        addresses = [tensor.data_ptr() for tensor in given.values()]
        _launch_of(routing, logits.device.index, is_backward=True)(_raw_stream(logits.device.index), *addresses)
    return dlogits


@functools.lru_cache(maxsize=1024)
def _launch_of(routing: Routing, device: int, *, is_backward: bool = False) -> Callable[..., None]:
    from ...gpu.device import gpu_of_device
    from ...gpu.launch import prepare_launch
    from .prepare import backward_kernel_of, kernel_of

    arch = gpu_of_device(device).arch
    refuse_architecture(arch)
    kernel = backward_kernel_of(routing, arch) if is_backward else kernel_of(routing, arch)
    return prepare_launch(kernel.source, arch, device, kernel.grid, kernel.scalars)


@torch.library.custom_op("flashmoe_science::moe_route", mutates_args=())
def _route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    score: str,
    renormalize: bool,
    groups: int,
    top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = {"score": score, "renormalize": renormalize, "groups": groups, "top_groups": top_groups}
    bias = None if bias is None else bias.detach()
    logits = logits.detach()
    return _run(describe_routing(logits, top_k, bias=bias, scale=scale, **options), logits, bias)


@_route.register_fake
def _fake_route(logits: Tensor, bias: Tensor | None, top_k: int, *_options: object) -> tuple[Tensor, Tensor]:
    check_one_device("logits", logits, (bias,))
    shape = (logits.shape[0], top_k)
    device = logits.device
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=torch.int32, device=device)


def _check_routed(dweights: Tensor, logits: Tensor, ids: Tensor) -> None:
    """Raise ``InputError`` unless ids and the gradient of the weights fit the result of ``route`` for the logits."""
    check_routing_tensors(logits, None)
    for name, tensor, dtype in (("ids", ids, torch.int32), ("dweights", dweights, torch.float32)):
        if tensor.dtype != dtype or tensor.device != logits.device:
            raise InputError(f"{name} must be {dtype} on {logits.device}, got {tensor.dtype} on {tensor.device}")
        if tensor.dim() != 2 or tensor.shape != (logits.shape[0], ids.shape[-1]):
            raise InputError(f"{name} must have shape [T, K], T = {logits.shape[0]}, got {list(tensor.shape)}")
    if not ids.is_contiguous():
        raise InputError(f"ids must be contiguous, got strides {list(ids.stride())}")


@torch.library.custom_op("flashmoe_science::moe_route_backward", mutates_args=())
def _route_backward(
    dweights: Tensor, logits: Tensor, ids: Tensor, score: str, renormalize: bool, scale: float
) -> Tensor:
    """Return the gradient of the logits."""
    dweights, logits, ids = dweights.detach(), logits.detach(), ids.detach()
    _check_routed(dweights, logits, ids)
    routing = describe_routing(logits, ids.shape[1], score=score, renormalize=renormalize, scale=scale)
    if logits.device.type == "cpu":
        found = reference.route_gradient(dweights, logits, ids, score=score, renormalize=renormalize, scale=scale)
        return found.to(logits.dtype)
    return run_route_backward(routing, logits, ids, dweights)


@_route_backward.register_fake
def _fake_route_backward(dweights: Tensor, logits: Tensor, ids: Tensor, *_options: object) -> Tensor:
    check_one_device("logits", logits, (dweights, ids))
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _refuse_second_order(_ctx: Any, *_gradients: Any) -> Any:
    raise UnsupportedError(
        "there are no second-order gradients of route", hint="for them, use flashmoe_science.moe.reference"
    )


_route_backward.register_autograd(_refuse_second_order)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, _, ctx.score, ctx.renormalize, _, _, ctx.scale = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, output[1])


def _backward(ctx: Any, dweights: Tensor | None, _dids: Tensor | None) -> Any:
    logits, ids = ctx.saved_tensors
    found = None
    if dweights is not None:
        found = _route_backward(dweights, logits, ids, ctx.score, ctx.renormalize, ctx.scale)
    return found, *[None] * 7


_route.register_autograd(_backward, setup_context=_setup_context)
