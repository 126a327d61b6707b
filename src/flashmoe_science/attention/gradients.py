"""Gradients for autograd: what a call records, how its gradients are made, and the operator that graphs hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..gpu.refusals import check_not_batched
from .backward_calls import Call, allocate_gradient, prepare_backward
from .backward_inputs import backward_problem_of
from .backward_plan import BACKWARD_KERNEL, check_backward_kernel_name, plan_backward
from .inputs import gpu_of, layout_of
from .packed import layout_of_tokens, planned_lengths
from .refusals import check_backward_operator, check_stand_in

OPTIONAL = ("sinks", "alibi", "bias", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "dropout_seed")
PLAIN = (Tensor, torch.nn.Parameter)  # kinds of tensors that hold what they are; others come by the operators
_DIFFERENTIABLE = ("q", "k", "v", "sinks", "bias")
_prepared: dict[tuple[Any, ...], Call] = {}
_MAX_PREPARED = 8192
_forward_ad = torch.autograd.forward_ad


@dataclass(frozen=True, slots=True)
class Options:
    """What a call asks for besides its tensors, as far as gradients depend on it."""

    causal: bool
    softmax_scale: float | None
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    max_seqlens: tuple[int, int] | None = None  # of packed sequences, as planned for
    kernel: str = "auto"  # of the gradients: a name to force, which never falls back
    dropout_p: float = 0.0


def kernel_after(forward: str) -> str:
    """Return which kernel makes the gradients of a call that asked for ``forward``: the reference follows itself."""
    return "reference" if forward == "reference" else "auto"


def records(tensors: Mapping[str, Tensor | None]) -> bool:
    """Return whether autograd wants gradients of a call.

    Raises:
        UnsupportedError: of one of which there is none.
    """
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors.values():
        if tensor is not None and tensor.requires_grad:
            break
    else:
        return False
    wanted = [name for name, tensor in tensors.items() if tensor is not None and tensor.requires_grad]
    others = [name for name in wanted if name not in _DIFFERENTIABLE]
    if others:
        raise UnsupportedError(
            f"{', '.join(others)} must not require grad: there is no gradient of it",
            hint="pass detached tensors; slopes that are learned can be a bias",
        )
    return bool(wanted)


def refuse_tangents(tensors: Iterable[Tensor | None]) -> None:
    """Raise ``UnsupportedError`` where an input has a tangent that the call would lose."""
    if _forward_ad._current_level < 0:  # noqa: SLF001 - the public way asks tensor by tensor
        return
    tangents = [_forward_ad.unpack_dual(tensor).tangent for tensor in tensors if isinstance(tensor, Tensor)]  # type: ignore[no-untyped-call]
    if any(tangent is not None for tangent in tangents):
        raise UnsupportedError("an input has a forward-mode tangent, and there is no forward-mode derivative")


def differentiable(
    attend: Callable[..., tuple[Tensor, Tensor]], options: Options, tensors: Mapping[str, Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Return o and the LSE of ``attend(**tensors)``, and record what their gradients need."""
    names = ("q", "k", "v", *OPTIONAL)
    found: tuple[Tensor, Tensor] = _Attention.apply(  # type: ignore[no-untyped-call]
        attend, options, *(tensors.get(name) for name in names)
    )
    return found


class _Attention(torch.autograd.Function):
    """A call with gradients. Nothing is kept but inputs, o and LSE."""

    @staticmethod
    def forward(attend: Callable[..., tuple[Tensor, Tensor]], _options: Options, *tensors: Tensor | None) -> Any:
        given = zip(("q", "k", "v", *OPTIONAL), tensors, strict=True)
        return attend(**{name: tensor for name, tensor in given if tensor is not None})

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.options, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        *inputs, o, lse = ctx.saved_tensors
        tensors = dict(zip(("q", "k", "v", *OPTIONAL), inputs, strict=True))
        wanted = dict(zip(tensors, ctx.needs_input_grad[2:], strict=True))
        found = _gradients(ctx.options, tensors, (o, lse), gradients, wanted)
        return None, None, *(found.get(name) for name in tensors)


def _gradients(
    options: Options,
    tensors: Mapping[str, Tensor | None],
    outputs: tuple[Tensor, Tensor],
    gradients: tuple[Tensor | None, Tensor | None],
    wanted: Mapping[str, bool],
) -> dict[str, Tensor]:
    """Return the gradients that are wanted; differentiated again, they raise ``UnsupportedError``."""
    do, dlse = gradients
    if do is None and dlse is None:
        return {}
    check_not_batched("attention", gradients)
    refuse_tangents(gradients)
    everything = {**tensors, "o": outputs[0], "lse": outputs[1], "do": do, "dlse": dlse}
    given = {name: tensor for name, tensor in everything.items() if tensor is not None}
    names = [name for name in _DIFFERENTIABLE if wanted.get(name)]
    if torch.is_grad_enabled():
        found = _Once.apply(options, names, tuple(given), *given.values())  # type: ignore[no-untyped-call]
        return dict(zip(names, found, strict=True))
    return attention_gradients(options, given, names)


class _Once(torch.autograd.Function):
    """Gradients that may be asked to be differentiated again."""

    @staticmethod
    def forward(options: Options, wanted: list[str], names: tuple[str, ...], *tensors: Tensor) -> Any:
        found = attention_gradients(options, dict(zip(names, tensors, strict=True)), wanted)
        return tuple(found[name] for name in wanted)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep nothing. torch.func, which differentiates everything that a backward does, asks for it."""

    @staticmethod
    def backward(_ctx: Any, *_gradients: Any) -> Any:
        raise _no_second_order()


def _no_second_order() -> UnsupportedError:
    return UnsupportedError(
        "there are no second-order gradients of attention",
        hint="for them, use torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH",
    )


def attention_gradients(options: Options, tensors: Mapping[str, Tensor], wanted: Sequence[str]) -> dict[str, Tensor]:
    """Return gradients by name.

    Args:
        options: what the call asked for.
        tensors: q, k, v and what else the call was given; o and lse that it returned; of their gradients do, dlse, or
            both. Any strides.
        wanted: of q, k, v, sinks and bias those whose gradients are asked for; k and v come together.

    Raises:
        InputError: ``FLASHMOE_BACKWARD_KERNEL`` in the environment is no name of a kernel.
        UnsupportedError: no kernel, or not the kernel forced, serves this call.

    Numerics: fp32 products, sums and softmax; P and dS are rounded to the dtype of q between products. Every sum has
    one order, also where TMA adds to memory: the same bits in every run.
    """
    if options.kernel == "auto" and (forced := os.environ.get(BACKWARD_KERNEL)):
        check_backward_kernel_name(forced, BACKWARD_KERNEL)
        options = replace(options, kernel=forced)
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    if "do" not in tensors:
        tensors["do"] = torch.zeros_like(tensors["o"])
    do = tensors["do"]
    if do.is_neg() or (do.stride(-1) != 1 and do.device.type == "cuda"):  # an expanded scalar, as sum() gives
        tensors["do"] = do.resolve_neg().contiguous()
    wants = tuple(name in wanted for name in _DIFFERENTIABLE)
    layout: Callable[[Tensor], Any] = layout_of if options.max_seqlens is None else layout_of_tokens
    layouts = [layout(tensors[name]) for name in ("q", "k", "v", "o", "do")]
    layouts += [layout_of(tensors.get(name)) for name in OPTIONAL]
    key = (options, wants, "dlse" in tensors, *layouts)
    call = _prepared.get(key)
    if call is None:
        plan = plan_backward(backward_problem_of(options, tensors, wanted), gpu_of(tensors["q"]), options.kernel)
        call = prepare_backward(plan, tensors["q"])
        if len(_prepared) >= _MAX_PREPARED:
            _prepared.clear()
        _prepared[key] = call
    return call(tensors)


# What graphs hold. A gradient that is not asked for has no elements.


@torch.library.custom_op("flashmoe_science::attention_backward", mutates_args=())
def _attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi: Tensor | None,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    dropout_seed: Tensor | None,
    o: Tensor,
    lse: Tensor,
    do: Tensor | None,
    dlse: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    softmax_scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    wanted: Sequence[int],
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, sinks and bias, of which ``wanted`` has the numbers."""
    optional = (sinks, alibi, bias, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, dropout_seed)
    names = ("q", "k", "v", *OPTIONAL, "o", "lse", "do", "dlse")
    everything = dict(zip(names, (q, k, v, *optional, o, lse, do, dlse), strict=True))
    given = {name: tensor for name, tensor in everything.items() if tensor is not None}
    lengths = None if cu_seqlens_q is None else planned_lengths(max_seqlen_q, max_seqlen_k, bias)
    check_backward_operator(given, lengths, dropout_p, wanted, _DIFFERENTIABLE)
    options = Options(causal, softmax_scale, (window_left, window_right), softcap, lengths, kernel, dropout_p)
    found = attention_gradients(options, given, [_DIFFERENTIABLE[number] for number in wanted])
    a, b, c, d, e = (
        found[name] if number in wanted else torch.empty(0, dtype=q.dtype, device=q.device)
        for number, name in enumerate(_DIFFERENTIABLE)
    )
    return a, b, c, d, e


@_attention_backward.register_fake
def _fake_backward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, alibi: Tensor | None, bias: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    check_stand_in(q, k, v, (q.dim(), q.dim(), q.dim()), (sinks, alibi, bias, *options))
    wanted = options[-2]
    return tuple(
        _fake_gradient(name, tensor)
        if tensor is not None and number in wanted
        else torch.empty(0, dtype=q.dtype, device=q.device)
        for number, (name, tensor) in enumerate(zip(_DIFFERENTIABLE, (q, k, v, sinks, bias), strict=True))
    )


def _fake_gradient(name: str, tensor: Tensor) -> Tensor:
    if name in ("sinks", "bias"):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return allocate_gradient(tensor)


def _refuse_second_order(_ctx: Any, *_gradients: Any) -> Any:
    raise _no_second_order()


_attention_backward.register_autograd(_refuse_second_order)


def register_gradients(operator: Any, options_of: Callable[..., Options]) -> None:
    """Give an operator that returns o and LSE its gradients.

    Its tensors come first, q, k and v and then those of ``OPTIONAL`` by name; ``options_of`` makes options of the rest.
    """
    names = [argument.name for argument in operator._opoverload._schema.arguments]  # noqa: SLF001 - the public way to it is new
    tensors = [name for name in names if name in ("q", "k", "v", *OPTIONAL)]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        given = dict(zip(names, inputs, strict=True))
        ctx.options = options_of(**{name: value for name, value in given.items() if name not in tensors})
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(given[name] for name in tensors), *output)

    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
        *inputs, o, lse = ctx.saved_tensors
        if lse.numel() != o.numel() // max(1, o.shape[-1]):
            raise UnsupportedError("this call kept no LSE, and gradients need it", hint="return_lse=True keeps it")
        nothing = [None] * len(names)
        if do is None and dlse is None:
            return tuple(nothing)
        given = dict(zip(tensors, inputs, strict=True))
        needed = {name: need for name, need in zip(names, ctx.needs_input_grad, strict=True) if need}
        wanted = [number for number, name in enumerate(_DIFFERENTIABLE) if name in needed]
        o_: Options = ctx.options
        found = _attention_backward(
            given["q"], given["k"], given["v"], *(given.get(name) for name in OPTIONAL), o, lse, do, dlse,
            *(o_.max_seqlens or (0, 0)), o_.causal, o_.softmax_scale, *o_.window, o_.softcap, o_.dropout_p,
            wanted, o_.kernel,
        )  # fmt: skip
        by_name = {_DIFFERENTIABLE[number]: found[number] for number in wanted}
        return tuple(by_name.get(name) for name in names)

    operator.register_autograd(backward, setup_context=setup_context)
