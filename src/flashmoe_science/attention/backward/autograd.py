"""Gradients for autograd: what a call records, how its gradients are made, and the operator that graphs hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...gpu.checks import check_not_batched
from ...gpu.device import gpu_at
from ...gpu.subclasses import is_traced
from ..checks import check_fake
from ..forward.calls import remember, run
from ..inputs import DIFFERENTIABLE, AttentionCall, Options, gpu_of, layouts_of, refuse_tangents
from ..packed import check_own_keys, planned_lengths
from ..problem import AttentionProblem
from .calls import Call, add_to_sums, allocate_gradient, prepare_backward
from .plan import BACKWARD_KERNEL, BackwardPlan, check_backward_kernel_name, plan_backward
from .problem import BackwardProblem, backward_problem_of, check_backward_operator, fields_of_wanted

# Tensors besides q, k and v that a call with gradients may have, in the order in which its operator takes them.
OPTIONAL = ("sinks", "alibi", "bias", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "dropout_seed")
_prepared: dict[tuple[Any, ...], Call] = {}


def _options_of_backward(options: Options) -> Options:
    """Return the options of the gradients of a call: the reference follows itself, else the plan chooses."""
    return options._replace(kernel="reference" if options.kernel == "reference" else "auto", return_lse=True)


class _NoTransforms(torch.autograd.Function):
    """Refuses by name what ``torch.func`` would, where it nests transforms: an input shows the innermost alone."""

    @staticmethod
    def vmap(_info: Any, _in_dims: Any, *_arguments: Any) -> Any:
        raise UnsupportedError(
            "attention is not served where torch.vmap and other transforms of torch.func are nested",
            hint="call it without them: a batch is an axis of its own",
        )

    @staticmethod
    def jvp(_ctx: Any, *_tangents: Any) -> Any:
        raise UnsupportedError("an input has a forward-mode tangent, and there is no forward-mode derivative")


def differentiable(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Run a call that returns the LSE, and record what its gradients need."""
    found: tuple[Tensor, Tensor] = _Attention.apply(call.options, (*call.tensors,), *call.tensors.values())  # type: ignore[no-untyped-call]
    return found


class _Attention(_NoTransforms):
    """A call with gradients. Nothing is kept but inputs, o and LSE."""

    @staticmethod
    def forward(options: Options, names: tuple[str, ...], *tensors: Tensor) -> Any:
        return run(AttentionCall(dict(zip(names, tensors, strict=True)), options))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        options, ctx.names, *tensors = inputs
        ctx.options = _options_of_backward(options)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        *inputs, o, lse = ctx.saved_tensors
        tensors = dict(zip(ctx.names, inputs, strict=True))
        needed = dict(zip(ctx.names, ctx.needs_input_grad[2:], strict=True))
        wanted = [name for name in DIFFERENTIABLE if needed.get(name)]
        do, dlse = gradients
        if do is None and dlse is None:
            return (None,) * (len(tensors) + 2)
        check_not_batched("attention", gradients)
        refuse_tangents(gradients)
        given = {**tensors, "o": o, "lse": lse, **({} if do is None else {"do": do})}
        given |= {} if dlse is None else {"dlse": dlse}
        if torch.is_grad_enabled():  # create_graph: they may be asked to be differentiated again
            once = _Once.apply(ctx.options, wanted, tuple(given), *given.values())  # type: ignore[no-untyped-call]
            found = dict(zip(wanted, once, strict=True))
        else:
            found = gradients_of(ctx.options, given, wanted)
        return None, None, *(found.get(name) for name in tensors)


class _Once(_NoTransforms):
    """Gradients that may be asked to be differentiated again."""

    @staticmethod
    def forward(options: Options, wanted: list[str], names: tuple[str, ...], *tensors: Tensor) -> Any:
        found = gradients_of(options, dict(zip(names, tensors, strict=True)), wanted)
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


def forced_kernel(kernel: str) -> str:
    """Return the backward kernel to use: that of the environment, where the caller forces none."""
    forced = os.environ.get(BACKWARD_KERNEL) if kernel == "auto" else None
    if not forced:
        return kernel
    check_backward_kernel_name(forced, BACKWARD_KERNEL)
    return forced


def plan_of_gradients(
    forward: AttentionProblem, named: Mapping[str, Tensor | None], *, has_dlse: bool, kernel: str
) -> BackwardPlan:
    """Return the plan of the gradients of those tensors that require grad, or of all where none does."""
    given = {name: tensor for name, tensor in named.items() if tensor is not None}
    wanted = [name for name, tensor in given.items() if tensor.requires_grad] or [*given]
    check_backward_kernel_name(kernel)
    problem = BackwardProblem(forward, has_dlse=has_dlse, **fields_of_wanted(forward, given, wanted))
    return plan_backward(problem, gpu_of(given["q"]), forced_kernel(kernel))


def attention_gradients(
    options: Options,
    tensors: Mapping[str, Tensor],
    wanted: Sequence[str],
    *,
    unrounded: bool = False,
    out: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return gradients by name.

    Args:
        options: what the call asked for.
        tensors: q, k, v and what else the call was given; o and lse that it returned; of their gradients do, dlse, or
            both. Any strides.
            With dk and dv, fp32, those of k and v are added to them, and returned so.
        wanted: of q, k, v, sinks and bias those whose gradients are asked for; k and v come together.
        unrounded: return those of k and v in fp32, unless the kernel rounds them itself. Others then add to them.
        out: where gradients of q, k and v are written, by name, in the dtype of q; not those that are added to others.
            Hopper's kernels write packed ones there at once, which are contiguous; others are copied.

    Raises:
        InputError: ``FLASHMOE_BACKWARD_KERNEL`` in the environment is no name of a kernel, or sequences share keys.
        UnsupportedError: no kernel, or not the kernel forced, serves this call.

    Numerics: fp32 products, sums and softmax; P and dS are rounded to the dtype of q between products. Every sum has
    one order, also where TMA adds to memory: the same bits in every run.
    """
    kernel = forced_kernel(options.kernel)
    if "k" in wanted or "v" in wanted:
        check_own_keys(tensors)
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    if "do" not in tensors:
        tensors["do"] = torch.zeros_like(tensors["o"])
    do = tensors["do"]
    if do.is_neg() or (do.stride(-1) != 1 and do.device.type == "cuda"):  # an expanded scalar, as sum() gives
        tensors["do"] = do.resolve_neg().contiguous()
    lengths = options.max_seqlens and planned_lengths(*options.max_seqlens, tensors.get("bias"))
    options = options._replace(kernel=kernel, max_seqlens=lengths)
    layouts = {name: tensor for name, tensor in tensors.items() if name not in ("lse", "dlse")}
    key = (options, *wanted, unrounded, "dlse" in tensors, *layouts, *layouts_of(layouts, packed=lengths is not None))
    call = _prepared.get(key)
    if call is None:
        q = tensors["q"]
        problem = backward_problem_of(options, tensors, wanted)
        if unrounded and problem.sums is None:
            problem = replace(problem, sums=(problem.dk_strides, problem.dv_strides))
        plan = plan_backward(problem, gpu_at(q.device), options.kernel)
        call = remember(_prepared, key, prepare_backward(plan, q.device))
    return _copied(call({**tensors, **{f"out_{name}": x for name, x in (out or {}).items()}}), out)


def _copied(found: dict[str, Tensor], out: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return gradients, after copying to ``out`` those that no kernel wrote there."""
    places = {name: x if found[name] is x else x.copy_(found[name]) for name, x in (out or {}).items()}
    return {**found, **places}


def gradients_of(
    options: Options,
    tensors: Mapping[str, Tensor],
    wanted: Sequence[str],
    *,
    unrounded: bool = False,
    out: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return what ``attention_gradients`` does, by the operator where torch has to see one: that rounds them."""
    if not is_traced(tensors.values()):
        return attention_gradients(options, tensors, wanted, unrounded=unrounded, out=out)
    given = {name: tensor.detach() for name, tensor in tensors.items()}
    numbers = [number for number, name in enumerate(DIFFERENTIABLE) if name in wanted]
    found = _call_operator(options, given, numbers)
    return _copied(add_to_sums({DIFFERENTIABLE[number]: found[number] for number in numbers}, tensors), out)


def _call_operator(o: Options, given: Mapping[str, Tensor | None], numbers: Sequence[int]) -> Sequence[Tensor]:
    """Return what the operator of gradients does; of a call with a mask, that of masks."""
    if given.get("mask_lists") is not None:
        masked: Sequence[Tensor] = _attention_masked_backward(
            *(given.get(name) for name in _MASKED_TENSORS), *o.mask_sizes, o.softmax_scale, o.softcap, numbers, o.kernel
        )
        return masked
    found: Sequence[Tensor] = _attention_backward(
        *(given.get(name) for name in _TENSORS), *(o.max_seqlens or (0, 0)), o.causal, o.softmax_scale, *o.window,
        o.softcap, o.dropout_p, numbers, o.kernel,
    )  # fmt: skip
    return found


# Graphs hold this operator. A gradient that is not asked for has no elements.
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? alibi, Tensor? bias, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? dropout_seed, Tensor o, Tensor lse, "
    "Tensor? do, Tensor? dlse, SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal, float? softmax_scale, "
    "SymInt window_left, SymInt window_right, float softcap, float dropout_p, SymInt[] wanted, str kernel"
)
_TENSORS = ("q", "k", "v", *OPTIONAL, "o", "lse", "do", "dlse")


@torch.library.custom_op(
    "flashmoe_science::attention_backward",
    mutates_args=(),
    schema=f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _attention_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, sinks and bias whose numbers are in ``wanted``."""
    given = {name: tensor for name, tensor in zip(_TENSORS, arguments, strict=False) if tensor is not None}
    longest, (causal, scale, *window, softcap, dropout_p, wanted, kernel) = arguments[15:17], arguments[17:]
    max_seqlens = longest if "cu_seqlens_q" in given else None
    options = Options(causal, scale, (window[0], window[1]), softcap, max_seqlens, kernel, dropout_p)
    check_backward_operator(given, options, wanted)
    return _made(options, given, wanted, DIFFERENTIABLE)


def _made(
    options: Options, given: Mapping[str, Tensor], wanted: Sequence[int], names: Sequence[str]
) -> tuple[Tensor, ...]:
    """Return a gradient for each name, without elements where it is not wanted."""
    found = attention_gradients(options, given, [names[number] for number in wanted])
    q = given["q"]
    return tuple(
        found[name] if number in wanted else torch.empty(0, dtype=q.dtype, device=q.device)
        for number, name in enumerate(names)
    )


@_attention_backward.register_fake
def _fake_backward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, alibi: Tensor | None, bias: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    check_fake(q, k, v, (q.dim(), q.dim(), q.dim()), (sinks, alibi, bias, *options))
    return _fake_gradients({"q": q, "k": k, "v": v, "sinks": sinks, "bias": bias}, options[-2])


def _fake_gradients(tensors: Mapping[str, Tensor | None], wanted: Sequence[int]) -> tuple[Tensor, ...]:
    q = tensors["q"]
    assert q is not None
    return tuple(
        _fake_gradient(name, tensor)
        if tensor is not None and number in wanted
        else torch.empty(0, dtype=q.dtype, device=q.device)
        for number, (name, tensor) in enumerate(tensors.items())
    )


def _fake_gradient(name: str, tensor: Tensor) -> Tensor:
    if name in ("sinks", "bias"):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return allocate_gradient(tensor)


def _refuse_second_order(_ctx: Any, *_gradients: Any) -> Any:
    raise _no_second_order()


_attention_backward.register_autograd(_refuse_second_order)

_MASKED_TENSORS = ("q", "k", "v", "sinks", "mask_lists", "mask_bits", "o", "lse", "do", "dlse")


@torch.library.custom_op(
    "flashmoe_science::attention_masked_backward",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor mask_lists, Tensor mask_bits, Tensor o, Tensor lse, "
        "Tensor? do, Tensor? dlse, SymInt mask_batch, SymInt mask_heads, float? softmax_scale, float softcap, "
        "SymInt[] wanted, str kernel) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def _attention_masked_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v and sinks whose numbers are in ``wanted``."""
    given = {name: tensor for name, tensor in zip(_MASKED_TENSORS, arguments, strict=False) if tensor is not None}
    batch, heads, scale, softcap, wanted, kernel = arguments[len(_MASKED_TENSORS) :]
    options = Options(causal=False, softmax_scale=scale, softcap=softcap, kernel=kernel, mask_sizes=(batch, heads))
    check_backward_operator(given, options, wanted)
    return _made(options, given, wanted, DIFFERENTIABLE[:4])


@_attention_masked_backward.register_fake
def _fake_masked_backward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
    check_fake(q, k, v, (4, 4, 4), (sinks, *options))
    return _fake_gradients({"q": q, "k": k, "v": v, "sinks": sinks}, options[-2])


_attention_masked_backward.register_autograd(_refuse_second_order)


def register_gradients(operator: Any, names: Sequence[str], options_of: Callable[[Mapping[str, Any]], Options]) -> None:
    """Give an operator that returns o and LSE its gradients.

    Args:
        operator: what ``torch.library.custom_op`` returned.
        names: the names of its arguments; tensors have those of ``OPTIONAL``.
        options_of: makes options of the arguments by name.
    """
    tensors = [name for name in names if name in ("q", "k", "v", *OPTIONAL, "mask_lists", "mask_bits")]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        given = dict(zip(names, inputs, strict=True))
        ctx.options = _options_of_backward(options_of(given))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(given[name] for name in tensors), *output)

    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
        *inputs, o, lse = ctx.saved_tensors
        if lse.numel() != o.numel() // max(1, o.shape[-1]):
            raise UnsupportedError("this call kept no LSE, and gradients need it", hint="return_lse=True keeps it")
        if do is None and dlse is None:
            return (None,) * len(names)
        given = dict(zip(tensors, inputs, strict=True))
        needed = {name: need for name, need in zip(names, ctx.needs_input_grad, strict=True) if need}
        wanted = [number for number, name in enumerate(DIFFERENTIABLE) if name in needed]
        saved = {**given, "o": o, "lse": lse, "do": do, "dlse": dlse}
        found = _call_operator(ctx.options, saved, wanted)
        by_name = {DIFFERENTIABLE[number]: found[number] for number in wanted}
        return tuple(by_name.get(name) for name in names)

    operator.register_autograd(backward, setup_context=setup_context)
