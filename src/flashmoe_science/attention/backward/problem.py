"""The gradients of one attention call, described: the key to plans and prepared launches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ...errors import InputError
from ...gpu.checks import check_wanted
from ..checks import check_saved
from ..inputs import DIFFERENTIABLE, TENSORS, Options, batched_problem, check_all_options, pointer_alignment
from ..packed import check_lengths, packed_strides, planned_lengths, problem_of_packed
from ..problem import AttentionProblem, Strides, canonical_strides, output_strides


@dataclass(frozen=True, slots=True)
class BackwardProblem:
    """A call of ``flash_attention``, and which of its gradients are asked for; strides are in elements."""

    forward: AttentionProblem  # its pointer alignment counts o and the gradient of o too
    o_strides: Strides = ()  # type: ignore[assignment] # left out: as the forward lays it out; so below
    do_strides: Strides = ()  # type: ignore[assignment]
    has_dlse: bool = False  # whether there is a gradient of the LSE
    wants_q: bool = True
    wants_kv: bool = True
    wants_sinks: bool = False
    # Whether one bias serves all sequences, and all heads; None: its gradient is not asked for.
    bias_sums: tuple[bool, bool] | None = None
    # Strides of the fp32 tensors that the gradients of k and v are added to; None: they have tensors of their own.
    sums: tuple[Strides, Strides] | None = None
    head_parts: int = 1  # of how many equal parts of the heads this is one: sums have the order of the whole

    def __post_init__(self) -> None:
        """Fill the forward's own strides in."""
        for name in ("o_strides", "do_strides"):
            if not getattr(self, name):
                object.__setattr__(self, name, self.forward.output_strides)

    @property
    def dq_strides(self) -> Strides:
        """Strides of the gradient of q, in the order of q's axes in memory."""
        p = self.forward
        return self._like(p.heads, p.seqlen_q, p.head_dim, p.q_strides)

    @property
    def dk_strides(self) -> Strides:
        """Strides of the gradient of k."""
        if self.sums is not None:
            return self.sums[0]
        p = self.forward
        return self._like(p.heads_kv, p.seqlen_k, p.head_dim, p.k_strides)

    @property
    def dv_strides(self) -> Strides:
        """Strides of the gradient of v."""
        if self.sums is not None:
            return self.sums[1]
        p = self.forward
        return self._like(p.heads_kv, p.seqlen_k, p.head_dim_v, p.v_strides)

    def _like(self, heads: int, seqlen: int, columns: int, strides: Strides) -> Strides:
        if self.forward.packed:
            return 0, columns, heads * columns, 1
        return output_strides(self.forward.batch, heads, seqlen, columns, strides)

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names of what gradients are asked for, in the order in which they are returned."""
        asked = {"q": self.wants_q, "k": self.wants_kv, "v": self.wants_kv, "sinks": self.wants_sinks}
        return tuple(name for name, is_asked in {**asked, "bias": self.bias_sums is not None}.items() if is_asked)

    @property
    def flops(self) -> float:
        """Operations: 2.5 times those of the forward, five products of which it has two."""
        p = self.forward
        return 2.0 * p.batch * p.heads * p.visible_scores * (3 * p.head_dim + 2 * p.head_dim_v)

    def describe(self) -> str:
        """Return a short name, e.g. ``b1_h16_s512_d64_bf16_causal_backward``."""
        return self.forward.describe() + "_backward"


def backward_problem_of(options: Options, tensors: Mapping[str, Tensor], wanted: Sequence[str]) -> BackwardProblem:
    """Check the tensors of a call whose gradients are wanted, and describe them. Raises ``InputError``."""
    describe = batched_problem if options.max_seqlens is None else problem_of_packed
    given = {name: tensors[name] for name in TENSORS if name in tensors}
    forward = describe(given, options._replace(return_lse=True))
    o, do = tensors["o"], tensors["do"]
    alignment = math.gcd(forward.pointer_alignment, pointer_alignment(o, do))
    return BackwardProblem(
        replace(forward, pointer_alignment=alignment),
        _strides(o),
        _strides(do),
        has_dlse="dlse" in tensors,
        sums=(_strides(tensors["dk"]), _strides(tensors["dv"])) if "dk" in tensors else None,
        head_parts=options.head_parts,
        **fields_of_wanted(forward, tensors, wanted),
    )


def fields_of_wanted(forward: AttentionProblem, tensors: Mapping[str, Tensor], wanted: Sequence[str]) -> Any:
    """Return the fields of a ``BackwardProblem`` that say which gradients are asked for."""
    bias = tensors.get("bias") if "bias" in wanted else None
    return {
        "wants_q": "q" in wanted,
        "wants_kv": "k" in wanted or "v" in wanted,
        "wants_sinks": "sinks" in wanted and "sinks" in tensors,
        "bias_sums": None
        if bias is None
        else (bias.shape[0] == 1 and forward.batch > 1, bias.shape[1] == 1 and forward.heads > 1),
    }


def _strides(tensor: Tensor) -> Strides:
    return packed_strides(tensor) if tensor.dim() == 3 else canonical_strides(tensor.shape, tensor.stride())


def check_backward_operator(given: Mapping[str, Tensor], options: Options, wanted: Sequence[int]) -> None:
    """Raise ``InputError`` where arguments of the operator of gradients fit no call of attention.

    Args:
        given: its tensors by name, without those that are None.
        options: the options of the call.
        wanted: numbers of gradients, in ``DIFFERENTIABLE``.
    """
    packed = options.max_seqlens is not None
    check_all_options(options)
    check_wanted(wanted, given, DIFFERENTIABLE)
    for name in ("cu_seqlens_k", "seqused_q", "seqused_k"):
        if not packed and name in given:
            raise InputError(f"{name} must be None without cu_seqlens_q, got one")
    if packed and "cu_seqlens_k" not in given:
        raise InputError("cu_seqlens_k must be given with cu_seqlens_q, got None")
    if options.dropout_p and "dropout_seed" not in given:
        raise InputError(f"dropout_seed must be given where dropout_p is {options.dropout_p}, got None")
    if "do" not in given and "dlse" not in given:
        raise InputError("do or dlse must be given, got None for both")
    axes = 3 if packed else 4
    for name in "qkv":
        if given[name].dim() != axes:
            raise InputError(f"{name} must have {axes} dimensions, got shape {list(given[name].shape)}")
    check_saved(given)
    if options.max_seqlens is not None:
        if given["k"].shape[0] != given["v"].shape[0]:
            raise InputError(f"v must have as many tokens as k, {given['k'].shape[0]}, got {given['v'].shape[0]}")
        if given["q"].device.type == "cpu":
            check_lengths(given, planned_lengths(*options.max_seqlens, given.get("bias")))
