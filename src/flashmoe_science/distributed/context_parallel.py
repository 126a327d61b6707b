"""Attention over sequences that are split over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..attention.inputs import Options
from ..errors import InputError, shown
from .calls import ByHead, Call, Exchange, Gathered, fixed_call, on_device, packed_call, refuse_by_gather
from .exchange import Agreement, HeadsToTokens, TokensToHeads, describe_tensors, gather_tokens, group_of
from .layout import Layout, PackedPlan, plan_packed, straight_layout, zigzag_layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_STRATEGIES = ("heads", "gather")
_CHUNKS = 8  # of a rank: with so many, packed documents are within 10 % of equal work


class ContextParallel:
    """Attention over sequences that are split over ranks: each holds some tokens of all heads.

    Two strategies send different things and compute the same:

    - ``"heads"`` (DeepSpeed-Ulysses): an all-to-all turns some tokens of all heads into all tokens of some heads.
      Another one brings o back. All masks and features are served; o and all gradients have the bits of one GPU. The
      number of K/V heads must be a multiple of the number of ranks. Each rank holds one span of tokens.
    - ``"gather"``: all ranks gather K and V, and attend their own queries. Any number of ranks is served. Each rank
      holds a chunk from the front and one from the back, so all have the same causal work. No partial outputs are
      merged: o and the gradient of q have the bits of one GPU if chunks are multiples of 128 tokens. Gradients of K and
      V are summed in fp32 in the order of ranks: the same bits in every run.

    All ranks of the mesh call every method, with the same options and shapes. The first call of its kind compares them
    over ranks; with ``FLASHMOE_CHECK=1`` in the environment every call does. Errors are then raised on all ranks.

    Sources: DeepSpeed-Ulysses (Jacobs et al., 2023) for the exchange of heads; Llama 3 (2024) for the gather of K and
    V; ring-flash-attention (Zhu, 2024) for the chunks from front and back.
    """

    def __init__(self, mesh: DeviceMesh, *, heads_kv: int | None = None, strategy: str = "auto") -> None:
        """Choose the strategy.

        Args:
            mesh: of one dimension, as ``mesh["cp"]``.
            heads_kv: K/V heads of the calls to come: ``"auto"`` chooses ``"heads"`` where the ranks divide them.
            strategy: ``"heads"``, ``"gather"`` or ``"auto"``.

        Raises:
            InputError: the mesh has several dimensions, the strategy is unknown, or ``"auto"`` has no ``heads_kv``.
        """
        self.group = group_of(mesh, "cp")
        self.rank, self.ranks = self.group.rank(), self.group.size()
        if strategy == "auto":
            if heads_kv is None:
                raise InputError('heads_kv must be given for strategy="auto", got None')
            strategy = "gather" if heads_kv % self.ranks else "heads"
        if strategy not in _STRATEGIES:
            raise InputError(f'strategy must be "heads", "gather" or "auto", got {shown(strategy)}')
        self.strategy = strategy
        self._agreement = Agreement(self.group)

    def layout(self, tokens: int) -> Layout:
        """Return which tokens each rank holds of a sequence. Raises ``InputError`` where it cannot be split."""
        return (straight_layout if self.strategy == "heads" else zigzag_layout)(tokens, self.ranks)

    def plan(self, lengths: Sequence[int]) -> PackedPlan:
        """Return how a packed batch is split, once for all layers.

        Args:
            lengths: of the documents, in tokens, as integers on the host; their sum is a multiple of the number of
                ranks, and with ``"gather"`` of 8 times that.

        Raises:
            InputError: a length is no integer above 0, or the tokens cannot be split so.
        """
        return plan_packed(lengths, self.ranks, 1 if self.strategy == "heads" else _CHUNKS)

    def shard(self, x: Tensor, dim: int, plan: PackedPlan | None = None) -> Tensor:
        """Return the tokens of this rank, contiguous: of inputs, labels and positions alike.

        Args:
            x: the tensor of all tokens, the same on all ranks.
            dim: the dimension of tokens.
            plan: of a packed batch.

        Raises:
            InputError: the tokens cannot be split, or are not those of the plan.
        """
        layout = self._layout_of(x.shape[dim], plan)
        return torch.cat([x.narrow(dim, start, end - start) for start, end in layout.spans(self.rank)], dim)

    def unshard(self, x: Tensor, dim: int, plan: PackedPlan | None = None) -> Tensor:
        """Return the tokens of all ranks in their order: the inverse of ``shard``. It records no gradient."""
        layout = self._layout_of(x.shape[dim] * self.ranks, plan)
        return gather_tokens(x.detach().movedim(dim, 0), layout, self.group).movedim(0, dim)

    def _layout_of(self, tokens: int, plan: PackedPlan | None) -> Layout:
        if plan is None:
            return self.layout(tokens)
        if plan.layout.tokens != tokens or plan.layout.ranks != self.ranks:
            raise InputError(
                f"the plan is of {plan.layout.tokens} tokens and {plan.layout.ranks} ranks, "
                f"got {tokens} and {self.ranks}"
            )
        if (len(plan.layout.chunks[0]) == 1) != (self.strategy == "heads"):
            raise InputError(
                f"the plan is of another strategy than {self.strategy}", hint="make it by this ContextParallel's plan"
            )
        return plan.layout

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        softmax_scale: float | None = None,
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        alibi: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attend the queries of this rank to the keys of all ranks.

        Args:
            q: ``[B, H, n, D]``, the tokens that ``shard`` gives this rank.
            k: ``[B, HK, n, D]``, the same tokens.
            v: ``[B, HK, n, DV]``, the same tokens.
            causal: as in ``flash_attention``, over the whole sequence; like the other options.
            softmax_scale: default ``D ** -0.5``.
            window: (left, right), -1 for no bound.
            softcap: 0 for none.
            sinks: ``[H]``, the same on all ranks.
            alibi: ``[H]``, the same on all ranks.
            return_lse: return the log-sum-exp of the local rows too.

        Returns:
            o ``[B, H, n, DV]`` of the local tokens, or the pair of o and lse ``[B, H, n]`` fp32.

        Raises:
            InputError: an argument breaks the contract on any rank, or ranks make different calls.
            UnsupportedError: no kernel serves this call; or ``alibi`` without ``causal`` by ``"gather"``.

        Gradients: of q, k, v and sinks, and of the LSE. That of sinks is this rank's part: ranks add theirs, as they do
        for every parameter.
        """
        options = Options(causal, softmax_scale, window, softcap, return_lse=True)
        heads = ByHead(sinks, alibi)
        layout = self._check((q, k, v), heads, options, None)
        if self.strategy == "heads":
            o, lse = self._by_heads((q, k, v), heads, Call(options), return_lse=return_lse)
        else:
            calls = [fixed_call(span, layout, options) for span in layout.spans(self.rank)]
            o, lse = self._by_gather((q, k, v), heads, layout, calls)
        return (o, lse) if return_lse else o

    def attention_packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: PackedPlan,
        *,
        causal: bool = False,
        softmax_scale: float | None = None,
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        alibi: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attend the queries of this rank to the keys of their own documents, which other ranks may hold.

        Args:
            q: ``[n, H, D]``, the tokens that ``shard`` gives this rank by the plan.
            k: ``[n, HK, D]``, the same tokens.
            v: ``[n, HK, DV]``, the same tokens.
            plan: what ``plan`` returned for the lengths of the documents.
            causal: as in ``flash_attention_varlen``, over whole documents; like the other options.
            softmax_scale: default ``D ** -0.5``.
            window: (left, right), -1 for no bound.
            softcap: 0 for none.
            sinks: ``[H]``, the same on all ranks.
            alibi: ``[H]``, the same on all ranks.
            return_lse: return the log-sum-exp of the local rows too.

        Returns:
            o ``[n, H, DV]`` of the local tokens, or the pair of o and lse ``[H, n]`` fp32.

        Raises:
            InputError: as ``attention``; the plan is of other tokens.
            UnsupportedError: as ``attention``; by ``"gather"`` also a window without ``causal``.

        Gradients: as ``attention``.
        """
        options = Options(causal, softmax_scale, window, softcap, return_lse=True)
        heads = ByHead(sinks, alibi)
        layout = self._check((q, k, v), heads, options, plan)
        by_batch = q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        if self.strategy == "heads":
            starts = on_device(plan.starts, q.device)
            packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
            call = Call(options._replace(max_seqlens=(plan.longest, plan.longest)), starts=packed)
            o, lse = self._by_heads(by_batch, heads, call, return_lse=return_lse)
        else:
            pieces = plan.pieces(self.rank, causal=causal, window=window)
            calls = [packed_call(piece, options, q.device) for piece in pieces]
            o, lse = self._by_gather(by_batch, heads, layout, calls)
        o = o[0].transpose(0, 1)
        return (o, lse[0]) if return_lse else o

    def explain(self, q: Tensor, k: Tensor, v: Tensor) -> str:
        """Return the strategy of a call of ``attention``, why, and the bytes that this rank sends. Nothing is sent."""
        heads, heads_kv, tokens = q.shape[1], k.shape[1], q.shape[2]
        away, rows = self.ranks - 1, q.shape[0] * tokens * q.element_size()
        columns_k, columns_v = k.shape[3], v.shape[3]
        if self.strategy == "heads":
            per_row = (heads * (columns_k + columns_v) + heads_kv * (columns_k + columns_v)) / self.ranks
            why = f"{self.ranks} ranks divide {heads_kv} K/V heads; all-to-all of q, k, v and o"
            forward = backward = int(away * rows * per_row)
        else:
            forward = away * rows * heads_kv * (columns_k + columns_v)
            backward = forward + away * rows // q.element_size() * 4 * heads_kv * (columns_k + columns_v)
            why = "all ranks gather K and V; their gradients travel in fp32"
        return (
            f"strategy {self.strategy}: {why}\n"
            f"{tokens} of {tokens * self.ranks} tokens a rank, {heads} query heads, {heads_kv} K/V heads\n"
            f"a rank sends {forward / 1e6:.1f} MB forward, {backward / 1e6:.1f} MB backward"
        )

    def _check(
        self, tensors: tuple[Tensor, Tensor, Tensor], heads: ByHead, options: Options, plan: PackedPlan | None
    ) -> Layout:
        """Check a call on all ranks, and return its layout."""
        layout, call = None, ""
        try:
            layout = self._checked_layout(*tensors, heads, plan)
            call = _describe(self.strategy, (*tensors, *heads), options, plan)
        except InputError as error:
            call = f"error: {error}"
        self._agreement.check(call)
        assert layout is not None
        if self.strategy == "gather":
            refuse_by_gather(options, heads, plan)
        return layout

    def _checked_layout(self, q: Tensor, k: Tensor, v: Tensor, heads: ByHead, plan: PackedPlan | None) -> Layout:
        axes, tokens_at, form = (4, 2, "[B, H, n, D]") if plan is None else (3, 0, "[n, H, D]")
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if not isinstance(tensor, Tensor) or tensor.dim() != axes:  # type: ignore[redundant-expr] # callers may pass what types rule out
                raise InputError(f"{name} must be a tensor {form}, got {shown(getattr(tensor, 'shape', tensor))}")
            if tensor.dtype != q.dtype or tensor.device != q.device:
                got = f"{tensor.dtype} on {tensor.device}"
                raise InputError(f"{name} must have the dtype and device of q, {q.dtype} on {q.device}, got {got}")
            if tensor.shape[tokens_at] != q.shape[tokens_at]:
                raise InputError(
                    f"{name} must have the tokens of q, {q.shape[tokens_at]}, got {tensor.shape[tokens_at]}",
                    hint="queries and keys are the same tokens here",
                )
        heads.check(q.shape[1])
        if self.strategy == "heads" and (k.shape[1] % self.ranks or q.shape[1] % self.ranks):
            raise InputError(
                f'heads must be multiples of the {self.ranks} ranks for strategy="heads", '
                f"got {q.shape[1]} query heads and {k.shape[1]} K/V heads",
                hint='use strategy="gather"',
            )
        return self._layout_of(q.shape[tokens_at] * self.ranks, plan)

    def _by_heads(
        self, tensors: tuple[Tensor, Tensor, Tensor], heads: ByHead, call: Call, *, return_lse: bool
    ) -> tuple[Tensor, Any]:
        q, k, v = TokensToHeads.apply(self.group, *tensors)  # type: ignore[no-untyped-call]
        o, lse = call.attend({"q": q, "k": k, "v": v, **heads.of_rank(self.rank, self.ranks)._asdict()})
        o = HeadsToTokens.apply(self.group, o)  # type: ignore[no-untyped-call]
        if return_lse:
            lse = HeadsToTokens.apply(self.group, lse[..., None])[..., 0]  # type: ignore[no-untyped-call]
        return o, lse

    def _by_gather(
        self, tensors: tuple[Tensor, Tensor, Tensor], heads: ByHead, layout: Layout, calls: Sequence[Call]
    ) -> tuple[Tensor, Tensor]:
        exchange = Exchange(self.group, layout, tuple(calls))
        return Gathered.apply(exchange, *tensors, *heads)  # type: ignore[no-untyped-call, no-any-return]


def _describe(strategy: str, tensors: Sequence[Tensor | None], options: Options, plan: PackedPlan | None) -> str:
    named = dict(zip(("q", "k", "v", "sinks", "alibi"), tensors, strict=True))
    asked = ", ".join(f"{name}={value}" for name, value in options._asdict().items())
    documents = (
        ""
        if plan is None
        else f", {len(plan.starts) - 1} documents, digest {hash((plan.starts, plan.layout.chunks)):x}"
    )
    return f"{strategy}: {describe_tensors(named)}, {asked}{documents}"
