"""What gradients are asked of, described as a problem."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from .backward_problem import BackwardProblem
from .inputs import pointer_alignment, problem_of
from .packed import packed_problem
from .problem import AttentionProblem, canonical_strides

if TYPE_CHECKING:
    from .gradients import Options

_OF_PACKED = (
    "q", "k", "v", "sinks", "alibi", "bias", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "dropout_seed",
)  # fmt: skip


def bias_sums(forward: AttentionProblem, bias: Tensor | None) -> tuple[bool, bool]:
    """Return whether one bias serves all sequences, and all heads."""
    assert bias is not None
    return bias.shape[0] == 1 and forward.batch > 1, bias.shape[1] == 1 and forward.heads > 1


def backward_problem_of(options: Options, tensors: Mapping[str, Tensor], wanted: Sequence[str]) -> BackwardProblem:
    """Describe the gradients of a call. Raises ``InputError``."""
    if options.max_seqlens is None:
        extras = {name: tensors.get(name) for name in ("sinks", "alibi", "bias", "dropout_seed")}
        forward = problem_of(
            tensors["q"], tensors["k"], tensors["v"], causal=options.causal, softmax_scale=options.softmax_scale,
            return_lse=True, window=options.window, softcap=options.softcap, dropout_p=options.dropout_p, **extras,
        )  # fmt: skip
    else:
        given = {name: tensors.get(name) for name in _OF_PACKED}
        forward = packed_problem(
            given, options.max_seqlens, causal=options.causal, softmax_scale=options.softmax_scale, return_lse=True,
            window=options.window, softcap=options.softcap, dropout_p=options.dropout_p,
        )  # fmt: skip
    o, do, bias = tensors["o"], tensors["do"], tensors.get("bias")
    forward = replace(forward, pointer_alignment=math.gcd(forward.pointer_alignment, pointer_alignment(o, do)))
    sums = bias_sums(forward, bias) if bias is not None and "bias" in wanted else None
    return BackwardProblem(
        forward,
        _strides(o),
        _strides(do),
        has_dlse="dlse" in tensors,
        wants_q="q" in wanted,
        wants_kv="k" in wanted or "v" in wanted,
        wants_sinks="sinks" in wanted and "sinks" in tensors,
        bias_sums=sums,
    )


def _strides(tensor: Tensor) -> tuple[int, int, int, int]:
    if tensor.dim() == 4:
        return canonical_strides(tensor.shape, tensor.stride())
    token, head, column = tensor.stride()
    return 0, head if tensor.shape[1] > 1 else 0, token, column if tensor.shape[2] > 1 else 1
