"""How a described call is served: by an operator of torch.library, through autograd, or at once.

Graphs that torch traces hold the operators; eager calls of plain tensors never come by them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..gpu.checks import refuse_dtensors
from ..gpu.subclasses import is_traced
from .backward.autograd import differentiable, register_gradients
from .checks import check_fake
from .context_parallel import refuse_context_parallel
from .dtensor import prepare_dtensors
from .forward.calls import run
from .inputs import TENSORS, AttentionCall, Options, describe_call
from .problem import canonical_strides, output_strides

_MASKS = "bool causal, float? softmax_scale, SymInt window_left, SymInt window_right, float softcap"
_HEADS = "Tensor? sinks, Tensor? alibi, Tensor? bias"
_PACKED = "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k"
_LONGEST = "SymInt max_seqlen_q, SymInt max_seqlen_k"
_USED = "Tensor? seqused_q, Tensor? seqused_k"


def attend(
    tensors: Mapping[str, Any], options: Options, operate: Callable[[AttentionCall], tuple[Tensor, Any]] | None = None
) -> Any:
    """Serve a call of a public function. ``operate`` calls another operator than ``operate_with_features``."""
    refuse_context_parallel()
    traced = is_traced(tensors.values())
    call = describe_call(tensors, options, traced=traced)
    if traced:
        prepare_dtensors(tensors.values())
        o, lse = (operate or operate_with_features)(call)
    elif call.recorded:
        o, lse = differentiable(call)
    else:
        return run(call)
    return (o, lse) if options.return_lse else o


def operate_with_features(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Call the operator that serves all options of a call."""
    if "mask_lists" in call.tensors:
        refuse_dtensors("attention with a mask", call.tensors.values())
        operator = _attention_masked
    elif call.options.max_seqlens is None:
        operator = _attention_features
    else:
        operator = _attention_varlen
        if "page_table" in call.tensors:
            refuse_dtensors("attention over pages", call.tensors.values())
            operator = _attention_varlen_paged
    given = {**call.tensors, **call.options._asdict()}
    given["window_left"], given["window_right"] = call.options.window
    given["max_seqlen_q"], given["max_seqlen_k"] = call.options.max_seqlens or (0, 0)
    given["mask_batch"], given["mask_heads"] = call.options.mask_sizes
    found: tuple[Tensor, Tensor] = operator(*(given.get(name) for name in operator.names))
    return found


class Operator:
    """An operator of torch.library that attends, and the names of its arguments."""

    def __init__(self, name: str, arguments: str, serve: Callable[..., Any] | None = None, returns: int = 2) -> None:
        """Define the operator.

        Args:
            name: after the name of the package.
            arguments: its schema; names are those of ``TENSORS`` and of the public functions.
            serve: what is called instead of the call that the arguments describe.
            returns: o, and for 2 the LSE: where it is not asked for, one of no elements.
        """
        self.names = [argument.split()[-1] for argument in arguments.split(", ")]
        self._tensors = [name for name in TENSORS if name in self.names]
        self._returns = returns
        self.definition = torch.library.custom_op(
            f"flashmoe_science::{name}",
            serve or self._serve,
            mutates_args=(),
            schema=f"({arguments}) -> {'Tensor' if returns == 1 else '(Tensor, Tensor)'}",
        )
        self.definition.register_fake(self._fake)

    def __call__(self, *arguments: Any) -> Any:
        """Call the operator."""
        return self.definition(*arguments)

    def options_of(self, given: Mapping[str, Any]) -> Options:
        """Return the options among its arguments, as they are: longest lengths may be symbols."""
        longest = (given["max_seqlen_q"], given["max_seqlen_k"]) if "max_seqlen_q" in given else None
        return Options(
            given.get("causal", False), given["softmax_scale"],
            (given.get("window_left", -1), given.get("window_right", -1)), given["softcap"], longest, given["kernel"],
            given.get("dropout_p", 0.0), (given.get("mask_batch", 0), given.get("mask_heads", 0)),
            given.get("num_splits", 0), given.get("batch_invariant", False), return_lse=given["return_lse"],
        )  # fmt: skip

    def _serve(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        given = dict(zip(self.names, arguments, strict=True))
        if given.get("dropout_p") and given["dropout_seed"] is None:  # a backward pass could not know it
            raise InputError(
                f"dropout_seed must be given to the operator where dropout_p is {given['dropout_p']}, got None"
            )
        refuse_context_parallel()
        tensors = {name: None if given[name] is None else given[name].detach() for name in self._tensors}
        found = run(describe_call(tensors, self.options_of(given)))
        if given["return_lse"]:
            return found  # type: ignore[no-any-return]
        return found, torch.empty(0, dtype=torch.float32, device=found.device)

    def _fake(self, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
        """Return outputs without data, in the memory order of the real ones."""
        packed, paged = "max_seqlen_q" in self.names, "page_table" in self.names
        axes = 3 if packed else 4
        check_fake(q, k, v, (axes, 4, 4) if paged else (axes, axes, axes), others)
        if packed:
            o = torch.empty((*q.shape[:2], v.shape[-1]), dtype=q.dtype, device=q.device)
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device).t()
        else:
            (batch, heads, seqlen_q, _), columns = q.shape, v.shape[3]
            strides = output_strides(batch, heads, seqlen_q, columns, canonical_strides(q.shape, q.stride()))
            o = torch.empty_strided((batch, heads, seqlen_q, columns), strides, dtype=q.dtype, device=q.device)
            lse = torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device)
        if self._returns == 1:
            return o
        given = dict(zip(self.names[3:], others, strict=True))
        return o, lse if given.get("return_lse", True) else torch.empty(0, dtype=torch.float32, device=q.device)


_attention_features = Operator(
    "attention_features",
    f"Tensor q, Tensor k, Tensor v, {_MASKS}, {_HEADS}, Tensor? dropout_seed, float dropout_p, bool return_lse, "
    "str kernel",
)
_attention_varlen = Operator(
    "attention_varlen",
    f"{_PACKED}, {_LONGEST}, {_MASKS}, {_HEADS}, {_USED}, Tensor? dropout_seed, float dropout_p, bool return_lse, "
    "str kernel",
)
# A separate operator: one with gradients saves its inputs by name, and torch leaves out those that have a default.
_attention_varlen_paged = Operator(
    "attention_varlen_paged",
    f"{_PACKED}, Tensor page_table, {_LONGEST}, {_MASKS}, {_HEADS}, {_USED}, SymInt num_splits, "
    "bool batch_invariant, bool return_lse, str kernel",
)
_attention_masked = Operator(
    "attention_masked",
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor mask_lists, Tensor mask_bits, SymInt mask_batch, "
    "SymInt mask_heads, float? softmax_scale, float softcap, bool return_lse, str kernel",
)
for _operator in (_attention_features, _attention_varlen, _attention_masked):
    register_gradients(_operator.definition, _operator.names, _operator.options_of)
