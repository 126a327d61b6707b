"""Mixture of Experts whose experts are split over the ranks of a mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import InputError, UnsupportedError, shown
from ..moe.api import fused_moe
from ..moe.checks import cast_under_autocast, moe_problem_of, read_tensors
from ..moe.problem import Options
from .exchange import Agreement, all_to_all, describe_tensors, gather_tokens, group_of, kind_of
from .layout import straight_layout
from .once import ReturnTokens, SendTokens, route_once
from .transport import Transport, transport_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_RANKS_OF_GATHER = 8  # of one host, most often


class ExpertParallel:
    """Experts that are split over ranks: each holds some experts, and its own tokens.

    Each rank sums what all experts made of its tokens, in fp32 and in one order: the same bits in every run. The
    host never waits for the GPU, and no token is dropped. Two strategies send different messages:

    - ``"gather"``: all ranks gather all tokens with their experts and weights, and run their own experts on them. Any
      routing has the same cost.
    - ``"once"``: a token goes once to each rank that has experts of it, at most ``capacity * n`` of n tokens to each.
      Where a rank's experts are wanted by more, outputs and their gradients are NaN on all ranks, and
      ``check_capacity`` raises. The weights of an expert that no token reached still have a gradient of 0.

    All ranks of the mesh call every method, with the same options and shapes. The first call of its kind compares them
    over ranks; with ``FLASHMOE_CHECK=1`` in the environment every call does. Errors are then raised on all ranks.
    """

    def __init__(
        self, mesh: DeviceMesh, *, strategy: str = "auto", capacity: float = 1.0, transport: str = "auto"
    ) -> None:
        """Choose the strategy.

        Args:
            mesh: of one dimension, as ``mesh["ep"]``.
            strategy: ``"gather"``, ``"once"``, or ``"auto"``: ``"once"`` over more than 8 ranks if ``capacity`` is
                less than 1, as its messages are not shorter else.
            capacity: the most tokens that a rank sends to each rank, as a share of its tokens, by ``"once"``. With 1
                there is room for any routing.
            transport: by ``"gather"``, ``"collectives"`` of the group's backend (NCCL, gloo); ``"symmetric"``: ranks
                read one another's memory, between GPUs of one host; or ``"auto"``: ``"symmetric"`` where it can be
                had. It changes no bit.

        Raises:
            InputError: the mesh has several dimensions, a name is unknown, or the capacity is not above 0 and at
                most 1.
            UnsupportedError: ``"symmetric"`` is asked for and cannot be had, or asked for with ``"once"``.
        """
        self.group = group_of(mesh, "ep")
        self.rank, self.ranks = self.group.rank(), self.group.size()
        check_capacity_share(capacity)
        if strategy == "auto":
            strategy = "once" if self.ranks > _RANKS_OF_GATHER and capacity < 1 else "gather"
        if strategy not in ("gather", "once"):
            raise InputError(f'strategy must be "gather", "once" or "auto", got {shown(strategy)}')
        if strategy == "once" and transport == "symmetric":
            raise UnsupportedError('strategy="once" serves transport="collectives" alone, got "symmetric"')
        self.strategy, self.capacity = strategy, float(capacity)
        self._transport = transport_of(
            transport if strategy == "gather" else "collectives", self.group, mesh.device_type
        )
        # By rank, since the last check, the most tokens beyond the room of one rank. CUDA graphs hold its address.
        with torch.inference_mode(mode=False):  # else it could not be written outside of that mode
            self._over = torch.zeros(self.ranks, dtype=torch.int64, device=mesh.device_type)
        self._agreement = Agreement(self.group)

    def __deepcopy__(self, memo: object) -> ExpertParallel:
        """Return itself: a copy of a layer talks to the same ranks."""
        return self

    def shard(self, weights: Tensor) -> Tensor:
        """Return the experts of this rank, a view: of ``[E, ...]`` the E / W from ``rank * E / W`` on.

        Raises:
            InputError: the number of experts is not a multiple of the number of ranks.
        """
        if not isinstance(weights, Tensor) or not weights.dim():  # type: ignore[redundant-expr] # callers may pass what types rule out
            raise InputError(f"weights must be a tensor [E, ...], got {shown(weights)}")
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
        kernel: str = "auto",
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
            kernel: likewise.

        Returns:
            ``[n, HID]`` in the dtype of x.

        Raises:
            InputError: an argument breaks the contract, ranks make different calls, or on a CPU, tokens find no room.
            UnsupportedError: no kernel serves this call.

        Gradients: as ``fused_moe``. Those of weights and biases are complete: they have seen the tokens of all ranks.

        Numerics: as ``fused_moe``, and one more rounding of each rank's sum to the dtype of x.
        """
        options: dict[str, Any] = {
            "activation": activation, "alpha": alpha, "limit": limit, "interleaved": interleaved,
            "batch_invariant": batch_invariant, "kernel": kernel,
        }  # fmt: skip
        given = {
            "x": x, "w_gate_up": w_gate_up, "w_down": w_down, "topk_weights": topk_weights, "topk_ids": topk_ids,
            "bias_gate_up": bias_gate_up, "bias_down": bias_down,
        }  # fmt: skip
        device = self._over.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        kind = (repr(options), cast, kind_of(given.values()))
        sizing = f"strategy {self.strategy}, capacity {self.capacity}, autocast {cast}"
        self._agreement.check(kind, lambda: f"{sizing}: {_describe(given, options)}")
        run = self._gather if self.strategy == "gather" else self._once
        return run(given, options)

    def check_capacity(self) -> None:
        """Raise if tokens found no room since the last check, on all ranks: once a step, as it waits for the GPU.

        Raises:
            InputError: names the rank, and how many tokens found no room.
        """
        over = self._over.tolist()
        self._over.zero_()
        rank = max(range(self.ranks), key=over.__getitem__)
        if over[rank] > 0:
            raise InputError(
                f"rank {rank} had {over[rank]} tokens more for the experts of one rank than capacity {self.capacity:g} "
                "has room for: outputs and gradients since the last check may be NaN",
                hint="take a larger capacity; 1 has room for any routing",
            )

    def _gather(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> Tensor:
        local = (given["x"], given["topk_weights"], given["topk_ids"])
        tokens, weights, ids = _Gather.apply(self._transport, *local)  # type: ignore[no-untyped-call]
        # Ids of other ranks' experts are none here.
        partial = self._run(tokens, weights, ids - self.rank * given["w_down"].shape[0], given, options)
        return _Sum.apply(self._transport, partial)  # type: ignore[no-untyped-call, no-any-return]

    def _once(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> Tensor:
        x, ids, experts = given["x"], given["topk_ids"], given["w_down"].shape[0]
        route = route_once(ids, experts, self.ranks, math.ceil(self.capacity * x.shape[0]))
        over = gather_tokens(route.over, straight_layout(self.ranks, self.ranks), self.group)
        self._over.clamp_(min=over)
        # A lost token adds nothing: as a factor, NaN reaches its gradients too.
        factor = torch.where((over > 0).any(), torch.nan, 1.0)
        tokens = SendTokens.apply(self.group, route, x * factor)  # type: ignore[no-untyped-call]
        weights = SendTokens.apply(self.group, route, given["topk_weights"] * factor)  # type: ignore[no-untyped-call]
        partial = self._run(tokens, weights, all_to_all(route.ids, self.group).flatten(0, 1), given, options)
        out = ReturnTokens.apply(self.group, route, partial)  # type: ignore[no-untyped-call]
        if x.device.type == "cpu":  # the host need not wait for it
            self.check_capacity()
        return out * factor  # type: ignore[no-any-return]

    @staticmethod
    def _run(
        tokens: Tensor, weights: Tensor, ids: Tensor, given: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Tensor:
        by_expert = {name: given[name] for name in ("w_gate_up", "w_down", "bias_gate_up", "bias_down")}
        return fused_moe(x=tokens, topk_weights=weights, topk_ids=ids, **by_expert, **options)


def check_capacity_share(capacity: object) -> None:
    """Raise ``InputError`` unless it is a share of a rank's tokens."""
    if type(capacity) not in (int, float) or not 0 < capacity <= 1:  # type: ignore[operator]
        raise InputError(f"capacity must be above 0 and at most 1, got {shown(capacity)}")


class _Gather(torch.autograd.Function):
    """``Transport.gather``, whose gradients are the sums over ranks."""

    @staticmethod
    def forward(ctx: Any, transport: Transport, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Gather."""
        ctx.transport = transport
        found = tuple(transport.gather(tensors))
        ctx.mark_non_differentiable(*(x for x in found if not x.is_floating_point()))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Sum those that are asked for."""
        asked = ctx.needs_input_grad[1:]
        partials = [x for x, needed in zip(gradients, asked, strict=True) if needed]
        found = iter(ctx.transport.sum(partials))
        return None, *(next(found) if needed else None for needed in asked)


class _Sum(torch.autograd.Function):
    """``Transport.sum``, whose gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, transport: Transport, partial: Tensor) -> Tensor:
        """Sum."""
        ctx.transport = transport
        return transport.sum([partial])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Gather."""
        return None, ctx.transport.gather([gradient])[0]


def _describe(given: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Check a call as ``fused_moe`` would on this rank's tokens, and return what all ranks must have alike."""
    tensors = cast_under_autocast(read_tensors(given))
    routing = {name: tensors[name].contiguous() for name in ("topk_weights", "topk_ids")}  # messages are, anyway
    moe_problem_of({**tensors, **routing}, Options(**options))
    asked = ", ".join(f"{name}={value}" for name, value in options.items())
    return f"{describe_tensors(given)}, {asked}"
