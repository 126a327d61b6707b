"""Attention on all ranks for autograd, and as one operator of torch.library for graphs.

A graph holds numbers of the ``ContextParallel`` and of the plan: nothing in it depends on the documents of a batch.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..attention.checks import check_fake
from ..attention.inputs import Options
from ..attention.problem import canonical_strides, output_strides
from ..errors import UnsupportedError
from .calls import Attended, ByHead, Inputs, Recipe
from .named import named


class Owner(Protocol):
    """What serves calls: a ``ContextParallel``."""

    def recipe(self, inputs: Inputs, options: Options, plan: Any) -> Recipe:
        """Check a call on all ranks, and return how it is served."""


class Attend(torch.autograd.Function):
    """Attention on all ranks, eagerly."""

    @staticmethod
    def forward(
        ctx: Any, recipe: Recipe, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, alibi: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return o and LSE of the local tokens."""
        found = recipe.forward(Inputs(q, k, v, ByHead(sinks, alibi)))
        ctx.recipe = recipe
        ctx.save_for_backward(q, k, v, sinks, alibi, found.o, found.lse, *found.kept)
        ctx.set_materialize_grads(False)
        return found.o, found.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
        """Return the gradients of the local tokens."""
        q, k, v, sinks, alibi, o, lse, *kept = ctx.saved_tensors
        inputs, found = Inputs(q, k, v, ByHead(sinks, alibi)), Attended(o, lse, kept)
        made = ctx.recipe.backward(inputs, found, do, dlse, sinks=ctx.needs_input_grad[4])
        return None, *made, None


_OPTIONS = (
    "SymInt owner, SymInt plan, SymInt ranks, SymInt head_groups, bool gathers, bool causal, float? softmax_scale, "
    "SymInt window_left, SymInt window_right, float softcap, bool return_lse"
)


@torch.library.custom_op(
    "flashmoe_science::attention_over_ranks",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? alibi, {_OPTIONS}) -> (Tensor, Tensor, Tensor[])",
)
def _forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, alibi: Tensor | None, *given: Any) -> Any:
    inputs = Inputs(q, k, v, ByHead(sinks, alibi))
    # By "gather" keys may be kept, of which a graph does not know the number: it has none, and sends them again.
    return tuple(_recipe(inputs, given).forward(inputs))


def _recipe(inputs: Inputs, given: tuple[Any, ...]) -> Recipe:
    number, plan, _, _, _, causal, scale, left, right, softcap, return_lse = given
    owner: Owner = named(number, "ContextParallel")
    options = Options(causal, scale, (left, right), softcap, return_lse=return_lse)
    if plan >= 0:
        q, k, v = (x[0].transpose(0, 1) for x in inputs[:3])
        inputs = Inputs(q, k, v, inputs.heads)
    return owner.recipe(inputs, options, named(plan, "plan") if plan >= 0 else None)


@_forward.register_fake
def _fake_forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, alibi: Tensor | None, *given: Any) -> Any:
    """Return outputs without data, in the memory order of the real ones."""
    check_fake(q, k, v, (4, 4, 4), (sinks, alibi, *given))
    (plan, ranks, groups, gathers), return_lse = given[1:5], given[-1]
    (batch, heads, tokens, _), columns = q.shape, v.shape[3]
    o = q.new_empty(batch, tokens, heads, columns).transpose(1, 2)
    lse_heads = heads if return_lse or groups == 0 else 0
    lse = torch.empty(batch, tokens, lse_heads, dtype=torch.float32, device=q.device).transpose(1, 2)
    kept: list[Tensor] = []
    parts = ranks * groups
    for _ in range(groups):
        widths = (x.shape[1] // parts * x.shape[3] for x in (q, k, v))
        received = q.new_empty(ranks, tokens, batch, sum(widths))
        mine, everything = heads // parts, tokens * ranks
        if plan >= 0:
            kept_o = q.new_empty(everything, mine, columns).transpose(0, 1)[None]
            kept_lse = torch.empty(everything, mine, dtype=torch.float32, device=q.device).t()[None]
        elif gathers:
            kept_o = q.new_empty(batch, everything, mine, columns).transpose(1, 2)
            kept_lse = torch.empty(batch, everything, mine, dtype=torch.float32, device=q.device).transpose(1, 2)
        else:
            shape, row = (batch, mine, everything, q.shape[3]), received.shape[3]
            strides = canonical_strides(shape, (row, q.shape[3], batch * row, 1))
            strides = output_strides(batch, mine, everything, columns, strides)
            kept_o = torch.empty_strided((batch, mine, everything, columns), strides, dtype=q.dtype, device=q.device)
            kept_lse = torch.empty(batch, mine, everything, dtype=torch.float32, device=q.device)
        kept += [received, kept_o, kept_lse]
    return o, lse, kept


@torch.library.custom_op(
    "flashmoe_science::attention_over_ranks_backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? alibi, Tensor o, Tensor lse, Tensor[] kept, "
    f"Tensor? do, Tensor? dlse, {_OPTIONS}, bool sinks_wanted) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, alibi: Tensor | None, o: Tensor, lse: Tensor,
    kept: list[Tensor], do: Tensor | None, dlse: Tensor | None, *given: Any,
) -> Any:  # fmt: skip
    inputs = Inputs(q, k, v, ByHead(sinks, alibi))
    found = _recipe(inputs, given[:-1]).backward(inputs, Attended(o, lse, kept), do, dlse, sinks=given[-1])
    own = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in found[:3])  # outputs share no memory
    return (*own, q.new_empty(0) if found.sinks is None else found.sinks)


@_backward.register_fake
def _fake_backward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *others: Any) -> Any:
    gradients = (x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2) for x in (q, k, v))
    return (*gradients, q.new_empty(0) if sinks is None or not others[-1] else sinks.new_empty(sinks.shape))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, sinks, alibi, *ctx.given = inputs
    o, lse, kept = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, sinks, alibi, o, lse, *kept)


def _gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None, _kept: Any) -> Any:
    q, k, v, sinks, alibi, o, lse, *kept = ctx.saved_tensors
    wanted = sinks is not None and ctx.needs_input_grad[3]
    found = _backward(q, k, v, sinks, alibi, o, lse, kept, do, dlse, *ctx.given, wanted)
    return (*found[:3], found[3] if wanted else None, None, *(None for _ in ctx.given))


def _refuse_second_order(_ctx: Any, *_gradients: Any) -> Any:
    raise UnsupportedError("there are no second-order gradients of attention over ranks")


_forward.register_autograd(_gradients, setup_context=_setup_context)
_backward.register_autograd(_refuse_second_order)


def operate(
    inputs: Inputs, options: Options, owner: int, plan: int, ranks: int, head_groups: int, *, gathers: bool
) -> tuple[Tensor, Tensor]:
    """Call the operator, where torch traces.

    Args:
        inputs: of a batch.
        options: of the call.
        owner: the number of the ``ContextParallel``.
        plan: that of the plan, or -1.
        ranks: of the ``ContextParallel`` that divide heads.
        head_groups: likewise, 0 by ``"gather"``.
        gathers: whether keys of other ranks come, too.
    """
    q, k, v, heads = inputs
    o, lse, _ = _forward(
        q, k, v, *heads, owner, plan, ranks, head_groups, gathers, options.causal, options.softmax_scale,
        *options.window, options.softcap, options.return_lse,
    )  # fmt: skip
    return o, lse
