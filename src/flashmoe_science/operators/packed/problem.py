"""One call with packed sequences and their lengths, which the harness knows and the kernels' host does not."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...attention.packed import planned_length
from ...attention.problem import AttentionProblem
from ...errors import InputError


@dataclass(frozen=True)
class VarlenProblem:
    """Lengths, and what is planned for them."""

    lengths: tuple[int, ...]  # queries of each sequence
    lengths_k: tuple[int, ...]  # keys
    planned: AttentionProblem  # packed, of the longest lengths, rounded up as a call does

    def __post_init__(self) -> None:
        """Check the lengths."""
        if not self.lengths or min((*self.lengths, *self.lengths_k)) < 0:
            raise InputError(f"lengths must be integers from 0 on, one at least, got {list(self.lengths)}")
        if len(self.lengths) != len(self.lengths_k):
            raise InputError(f"lengths_k must have as many as lengths, {len(self.lengths)}, got {len(self.lengths_k)}")

    @property
    def dtype(self) -> str:
        """Of q, k, v and o."""
        return self.planned.dtype

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of q, and of k and v."""
        return sum(self.lengths), sum(self.lengths_k)

    @property
    def longest(self) -> tuple[int, int]:
        """The longest lengths."""
        return max(self.lengths), max(self.lengths_k)

    def sequences(self) -> Iterator[AttentionProblem]:
        """Yield each sequence as a problem of its own."""
        contiguous: Any = ()
        strides = dict.fromkeys(("q_strides", "k_strides", "v_strides"), contiguous)
        alone: dict[str, Any] = {
            "batch": 1,
            "packed": False,
            "page_size": 0,
            "table_stride": 0,
            "batch_invariant": False,
        }
        plain = dataclasses.replace(self.planned, **alone, **strides)
        for queries, keys in zip(self.lengths, self.lengths_k, strict=True):
            yield dataclasses.replace(plain, seqlen_q=queries, seqlen_k=keys)

    @functools.cached_property
    def flops(self) -> float:
        """Operations of a call, as in ``AttentionProblem``."""
        return sum(sequence.flops for sequence in self.sequences())

    def describe(self) -> str:
        """Return a short name, e.g. ``varlen_b32_t32768_max3459_h32_8_d128_bf16_causal``."""
        p, (tokens_q, tokens_k) = self.planned, self.tokens
        tokens = f"t{tokens_q}" if self.lengths == self.lengths_k else f"t{tokens_q}_{tokens_k}"
        heads = f"h{p.heads}" if p.heads == p.heads_kv else f"h{p.heads}_{p.heads_kv}"
        dim = f"d{p.head_dim}" if p.head_dim == p.head_dim_v else f"d{p.head_dim}_{p.head_dim_v}"
        words = ["varlen", f"b{len(self.lengths)}", tokens, f"max{self.longest[1]}", heads, dim, p.dtype]
        words += ["causal"] if p.causal else []
        if p.window != (-1, -1):
            words.append("window" + "_".join("all" if size < 0 else str(size) for size in p.window))
        words += [f"page{p.page_size}"] if p.page_size else []
        return "_".join(words + (["invariant"] if p.batch_invariant else []))


def make_problem(lengths: tuple[int, ...], lengths_k: tuple[int, ...], **more: Any) -> VarlenProblem:
    """Return the problem of a call with these lengths; ``more`` are fields of ``AttentionProblem``."""
    planned = AttentionProblem(
        batch=len(lengths),
        seqlen_q=planned_length("max_seqlen_q", max(lengths, default=0)),
        seqlen_k=planned_length("max_seqlen_k", max(lengths_k, default=0)),
        packed=True,
        **more,
    )
    return VarlenProblem(lengths, lengths_k, planned)
