"""Mixture of Experts whose experts are split over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import InputError
from ..moe.api import fused_moe
from .exchange import Agreement, GatherTokens, ReduceTokens, describe_tensors, gather_tokens, group_of
from .layout import straight_layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ExpertParallel:
    """Experts that are split over ranks: each holds some experts, and its own tokens.

    All ranks gather all tokens with their experts and weights, and run their own experts on them. Each rank then sums
    what all experts made of its tokens, in fp32 in the order of ranks: the same bits in every run. The host never waits
    for the GPU, no token is dropped, and any routing has the same cost in messages: for few ranks.

    All ranks of the mesh call every method, with the same options and shapes. The first call of its kind compares them
    over ranks; with ``FLASHMOE_CHECK=1`` in the environment every call does. Errors are then raised on all ranks.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        """Take the group of a mesh of one dimension, as ``mesh["ep"]``. Raises ``InputError`` for another mesh."""
        self.group = group_of(mesh, "ep")
        self.rank, self.ranks = self.group.rank(), self.group.size()
        self._agreement = Agreement(self.group)

    def shard(self, weights: Tensor) -> Tensor:
        """Return the experts of this rank, a view: of ``[E, ...]`` the E / W from ``rank * E / W`` on.

        Raises:
            InputError: the number of experts is not a multiple of the number of ranks.
        """
        experts = weights.shape[0]
        if experts % self.ranks:
            raise InputError(f"the number of experts must be a multiple of the {self.ranks} ranks, got {experts}")
        return weights.narrow(0, self.rank * (experts // self.ranks), experts // self.ranks)

    def fused_moe(
        self,
        x: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        activation: str = "swiglu",
        alpha: float | None = None,
        limit: float | None = None,
        interleaved: bool = False,
        bias_gate_up: Tensor | None = None,
        bias_down: Tensor | None = None,
        batch_invariant: bool = False,
    ) -> Tensor:
        """Run each token of this rank through its experts, which other ranks may hold.

        Args:
            x: ``[n, HID]``, the tokens of this rank; all ranks have as many. An id of -1 fills up.
            w_gate_up: ``[E / W, 2 * INTER, HID]``, the experts of this rank, as ``shard`` returns them.
            w_down: ``[E / W, HID, INTER]``, likewise.
            topk_weights: ``[n, K]`` of the tokens of this rank.
            topk_ids: ``[n, K]`` int32 or int64, ids among all E experts.
            activation: as in ``flashmoe_science.fused_moe``; like all that follow.
            alpha: likewise.
            limit: likewise.
            interleaved: likewise.
            bias_gate_up: ``[E / W, 2 * INTER]``, of this rank's experts.
            bias_down: ``[E / W, HID]``, likewise.
            batch_invariant: likewise.

        Returns:
            ``[n, HID]`` in the dtype of x.

        Raises:
            InputError: an argument breaks the contract, or ranks make different calls.
            UnsupportedError: no kernel serves this call.

        Gradients: as ``fused_moe``. Those of weights and biases are complete: they have seen the tokens of all ranks.

        Numerics: as ``fused_moe``, and one more rounding of each rank's sum to the dtype of x.
        """
        options: dict[str, Any] = {
            "activation": activation, "alpha": alpha, "limit": limit, "interleaved": interleaved,
            "batch_invariant": batch_invariant,
        }  # fmt: skip
        given = {
            "x": x, "w_gate_up": w_gate_up, "w_down": w_down, "topk_weights": topk_weights, "topk_ids": topk_ids,
            "bias_gate_up": bias_gate_up, "bias_down": bias_down,
        }  # fmt: skip
        self._agreement.check(_describe(given, options))
        layout = straight_layout(x.shape[0] * self.ranks, self.ranks)
        tokens = GatherTokens.apply(layout, self.group, x)  # type: ignore[no-untyped-call]
        weights = GatherTokens.apply(layout, self.group, topk_weights)  # type: ignore[no-untyped-call]
        first = self.rank * w_down.shape[0]
        ids = gather_tokens(topk_ids, layout, self.group) - first  # those of other ranks are no experts here
        partial = fused_moe(
            tokens, w_gate_up, w_down, weights, ids, bias_gate_up=bias_gate_up, bias_down=bias_down, **options
        )
        return ReduceTokens.apply(layout, self.group, partial)  # type: ignore[no-untyped-call, no-any-return]


def _describe(given: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    for name, tensor in given.items():
        if tensor is not None and not isinstance(tensor, Tensor):
            return f"error: {name} must be a torch.Tensor, got {type(tensor).__name__}"
        if tensor is not None and tensor.dim() == 0:
            return f"error: {name} must have dimensions, got a number"
    tokens = {name: given[name].shape[0] for name in ("x", "topk_weights", "topk_ids")}
    if len(set(tokens.values())) > 1:
        return f"error: topk_weights and topk_ids must have a row for each token of x, got {tokens}"
    asked = ", ".join(f"{name}={value}" for name, value in options.items())
    return f"{describe_tensors(given)}, {asked}"
