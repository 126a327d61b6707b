"""The gradients of one attention call, described: the key to plans and prepared launches."""

from __future__ import annotations

from dataclasses import dataclass

from .problem import AttentionProblem, Strides, output_strides


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
        p = self.forward
        return self._like(p.heads_kv, p.seqlen_k, p.head_dim, p.k_strides)

    @property
    def dv_strides(self) -> Strides:
        """Strides of the gradient of v."""
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
