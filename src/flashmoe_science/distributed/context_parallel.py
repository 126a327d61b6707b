"""Attention over sequences that are split over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..attention.inputs import (
    Options,
    batched_problem,
    cast_under_autocast,
    check_all_options,
    check_flag,
    check_kinds,
    check_window,
)
from ..errors import InputError, UnsupportedError, shown
from ..gpu.subclasses import is_dtensor, is_watched
from .calls import ByHead, Call, CallByRecipe, Inputs, Recipe, fixed_call, refuse_by_gather
from .documents import DocumentsRecipe
from .exchange import Agreement, check_mesh, describe_tensors, gather_tokens, group_of, groups_of, kind_of
from .gather import GatherRecipe
from .heads import HeadsRecipe
from .layout import Layout, plan_documents, plan_straight, straight_layout, zigzag_layout
from .messages import Sizes, explain
from .named import name
from .operator import Attend, operate
from .plan import PackedPlan, Place
from .transport import transport_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_STRATEGIES = ("heads", "gather", "heads+gather")


class ContextParallel:
    """Attention over sequences that are split over ranks: each holds some tokens of all heads.

    Strategies send different things and compute the same:

    - ``"heads"`` (DeepSpeed-Ulysses): an all-to-all turns some tokens of all heads into all tokens of some heads.
      Another one brings o back. All masks and features are served; o and all gradients have the bits of one GPU. The
      number of K/V heads must be a multiple of the number of ranks. Each rank holds one span of tokens.
    - ``"gather"``: all ranks gather K and V, and attend their own queries. Any number of ranks is served. Each rank
      holds a chunk from the front and one from the back, so all have the same causal work. No partial outputs are
      merged: in ``attention`` without a window, o and the gradient of q have the bits of one GPU if chunks are
      multiples of 128 tokens. Gradients of K and V are summed in fp32 and in one order: the same bits in every
      run. Of packed documents, ranks hold whole ones as long as they have about equal work, and K and V travel for
      the others alone.
    - ``"heads+gather"``: both, on a mesh of two dimensions, ``(gather, heads)``. Along the second one lie the ranks
      of a host, which divide the K/V heads: by an all-to-all each gets some heads of the tokens of its host. Then ranks
      of the same heads gather K and V. Messages between hosts, and the memory for what is gathered, are those of
      ``"gather"`` divided by the ranks of a host. It serves what ``"gather"`` serves, and promises the same bits.

    All ranks of the mesh call every method, with the same options, shapes and plan. The first call of its kind compares
    them over ranks; with ``FLASHMOE_CHECK=1`` in the environment every call does. Errors are then raised on all ranks.
    Where a rank ends, a collective of the others fails with ``RankLostError``, which names it. ``torch.compile`` makes
    one operator of a call. Compile calls, or watch them by a mode such as ``FlopCounterMode``, on all ranks or on none.

    ``plan`` compares lengths whenever it is called. Later calls do not compare which plan a rank took, if its tokens
    are as many. A rank that took that of another batch attends other documents, or sends what others do not wait for:
    then a collective fails after its timeout. ``FLASHMOE_CHECK=1`` names it.

    Sources: DeepSpeed-Ulysses (Jacobs et al., 2023) for the exchange of heads; Llama 3 (2024) for the gather of K and
    V; ring-flash-attention (Zhu, 2024) for the chunks from front and back.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        heads_kv: int | None = None,
        strategy: str = "auto",
        head_groups: int = 1,
        transport: str = "auto",
    ) -> None:
        """Choose the strategy.

        Args:
            mesh: of one dimension, as ``mesh["cp"]``; of two by ``"heads+gather"``, as ``mesh["gather", "heads"]``.
            heads_kv: K/V heads of the calls to come: ``"auto"`` chooses ``"heads"`` where the ranks divide them.
            strategy: ``"heads"``, ``"gather"``, ``"heads+gather"`` or ``"auto"``. The last takes ``"gather"`` for
                packed documents with ``causal``, unless ``head_groups`` or ``transport`` ask for ``"heads"``.
            head_groups: where heads are divided, in how many groups a rank's K/V heads travel. While one group attends,
                the next is on its way. It divides the K/V heads of a rank. It changes no bit.
            transport: where heads are divided, ``"collectives"`` of the group's backend (NCCL, gloo); ``"symmetric"``:
                ranks read one another's memory, between GPUs of one host; or ``"auto"``: ``"symmetric"`` where it can
                be had. It changes no bit.

        Raises:
            InputError: the mesh has other dimensions than the strategy, a name is unknown, ``head_groups`` is no
                integer above 0, or ``"auto"`` has no ``heads_kv``.
            UnsupportedError: ``"symmetric"`` is asked for and cannot be had, or asked for with ``"gather"``.
        """
        check_mesh(mesh)
        # Groups and transports are of "heads": who asks for them gets it.
        self._chooses = strategy == "auto" and head_groups == 1 and transport != "symmetric"
        if strategy == "auto":
            if type(heads_kv) is not int or heads_kv < 1:
                raise InputError(
                    f'heads_kv must be given for strategy="auto", an integer above 0, got {shown(heads_kv)}'
                )
            strategy = "gather" if heads_kv % mesh.size() else "heads"
        if strategy not in _STRATEGIES:
            raise InputError(f'strategy must be "heads", "gather", "heads+gather" or "auto", got {shown(strategy)}')
        if type(head_groups) is not int or head_groups < 1:
            raise InputError(f"head_groups must be an integer above 0, got {shown(head_groups)}")
        if strategy == "gather" and (transport == "symmetric" or head_groups != 1):
            raise UnsupportedError(
                f'strategy="gather" serves transport="collectives" and head_groups=1 alone, '
                f"got {shown(transport)} and {head_groups}"
            )
        self.strategy, self.head_groups = strategy, head_groups
        both = strategy == "heads+gather"
        # Whose keys are gathered, and who divides heads: by one of both the same ranks, of which a plan may choose.
        self.group, self._dividing = groups_of(mesh) if both else (group_of(mesh, "cp"),) * 2
        self._parts = self._dividing.size() if both else 1  # of what one rank would hold by "gather"
        self.ranks = self.group.size() * self._parts
        self.rank = self.group.rank() * self._parts + (self._dividing.rank() if both else 0)
        self._place = Place(self.rank, tuple(mesh.mesh.flatten().tolist()), self._parts)
        groups = (self._dividing, self.group) if both else (self.group,)
        carrier = "collectives" if strategy == "gather" and transport == "auto" else transport
        self._transport = transport_of(carrier, self._dividing, mesh.device_type, *groups[1:])
        self._device_type = mesh.device_type
        self._agreement = Agreement(*groups)
        self._number = name(self)

    def __deepcopy__(self, memo: object) -> ContextParallel:
        """Return itself: a copy of a model talks to the same ranks."""
        return self

    def layout(self, tokens: int) -> Layout:
        """Return which tokens each rank holds of a sequence. Raises ``InputError`` where it cannot be split."""
        if self.strategy == "heads":
            return straight_layout(tokens, self.ranks)
        return zigzag_layout(tokens, self.group.size(), self._parts)

    def plan(
        self, lengths: Sequence[int], *, causal: bool = True, windows: Sequence[tuple[int, int]] = ((-1, -1),)
    ) -> PackedPlan:
        """Return how a packed batch is split, once for all layers. All ranks call it, and it compares their lengths.

        Args:
            lengths: of the documents, in tokens, as integers on the host; their sum is a multiple of the number of
                ranks.
            causal: of the calls to come. Calls with other masks prepare their own part of the plan.
            windows: of the calls to come, likewise.

        Raises:
            InputError: on all ranks, where on one a length is no integer above 0, the tokens cannot be split so, or
                the lengths are others than those of rank 0.
        """
        found: list[PackedPlan] = []
        strategy = "gather" if self._chooses and causal else self.strategy

        def describe() -> str:
            check_flag("causal", causal)
            if not isinstance(windows, Sequence):
                raise InputError(f"windows must be a sequence of pairs, got {shown(windows)}")
            for window in windows:
                check_window(window)
            if strategy == "heads":
                packed = plan_straight(lengths, self.ranks)
            else:
                packed = plan_documents(lengths, self.group.size(), self._parts)
            found.append(PackedPlan(packed, strategy, self._place, self._device()))
            sizes = f"{len(packed.starts) - 1} documents, {packed.starts[-1]} tokens"
            return f"a plan of {sizes}, digest {found[0].digest}, strategy {strategy}"

        self._agreement.compare(describe)
        (plan,) = found
        if strategy != "heads":
            plan.prepare([(causal, check_window(window)) for window in windows])
        return plan

    def _device(self) -> torch.device:
        if self._device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self._device_type)

    def shard(self, x: Tensor, dim: int, plan: PackedPlan | None = None) -> Tensor:
        """Return the tokens of this rank, contiguous: of inputs, labels and positions alike.

        Args:
            x: the tensor of all tokens, the same on all ranks.
            dim: the dimension of tokens.
            plan: of a packed batch.

        Raises:
            InputError: the tokens cannot be split, or are not those of the plan.
        """
        _check_sharded(x, dim)
        layout = self._layout_of(x.shape[dim], plan)
        held = layout.held[self.rank] or ((0, 0),)
        return torch.cat([x.narrow(dim, start, end - start) for start, end in held], dim)

    def unshard(self, x: Tensor, dim: int, plan: PackedPlan | None = None) -> Tensor:
        """Return the tokens of all ranks in their order: the inverse of ``shard``. It records no gradient.

        Raises:
            InputError: on all ranks, where the first call of its kind is wrong or differs on one, and where autograd
                would record a gradient of x. Compiled calls are not compared.
        """

        def describe() -> str:
            _check_unsharded(x, dim)
            self._layout_of(x.shape[dim] * self.ranks, plan)
            planned = "" if plan is None else f", plan {plan.digest}"
            return f"unshard: {describe_tensors({'x': x.detach()})}, dim {dim}, strategy {self.strategy}{planned}"

        if not torch.compiler.is_compiling():
            of_plan = (plan.digest, plan.strategy, plan.place) if isinstance(plan, PackedPlan) else type(plan)
            self._agreement.check(("unshard", repr(dim), of_plan, kind_of([x])), describe)
        _check_unsharded(x, dim)
        layout = self._layout_of(x.shape[dim] * self.ranks, plan)
        found = x.detach().movedim(dim, 0)
        if self._parts > 1:
            found = gather_tokens(found, straight_layout(len(found) * self._parts, self._parts), self._dividing)
            layout = self._gathered(layout.tokens, plan)
        return gather_tokens(found, layout, self.group).movedim(0, dim)

    def _gathered(self, tokens: int, plan: PackedPlan | None) -> Layout:
        """Return which tokens each rank holds for its heads when keys are gathered."""
        return zigzag_layout(tokens, self.group.size()) if plan is None else plan.packed.layout

    def _layout_of(self, tokens: int, plan: PackedPlan | None) -> Layout:
        if plan is None:
            return self.layout(tokens)
        _check_plan(plan)
        if plan.layout.tokens != tokens or plan.layout.ranks != self.ranks:
            raise InputError(
                f"the plan is of {plan.layout.tokens} tokens and {plan.layout.ranks} ranks, "
                f"got {tokens} and {self.ranks}"
            )
        if plan.strategy != self.strategy and not (self._chooses and plan.strategy == "gather"):
            raise InputError(
                f"the plan is of another strategy than {self.strategy}",
                hint="make it by this ContextParallel's plan",
            )
        if plan.place != self._place:
            raise InputError(
                f"the plan is of another mesh or rank: {plan.place}, got {self._place}",
                hint="make it by this ContextParallel's plan",
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
        options = Options(causal, softmax_scale, window, softcap, return_lse=return_lse)
        o, lse = self._attend(Inputs(q, k, v, ByHead(sinks, alibi)), options, None)
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
            InputError: as ``attention``; the plan is of other tokens, or another mesh or rank.
            UnsupportedError: as ``attention``; by ``"gather"`` also a window without ``causal``.

        Gradients: as ``attention``.
        """
        if torch.compiler.is_compiling():  # torch would trace the comparison, and guard on what is known
            _check_plan(plan)
        else:
            self._agreement.check(("plan", type(plan).__name__), lambda: _check_plan(plan))
        options = Options(causal, softmax_scale, window, softcap, return_lse=return_lse)
        o, lse = self._attend(Inputs(q, k, v, ByHead(sinks, alibi)), options, plan)
        return (o, lse) if return_lse else o

    def explain(self, q: Tensor, k: Tensor, v: Tensor, plan: PackedPlan | None = None) -> str:
        """Return the strategy of a call, why, the transport, and what this rank sends. Nothing is sent.

        Args:
            q: as ``attention`` takes it, or, with a plan, ``attention_packed``.
            k: likewise.
            v: likewise.
            plan: of a packed batch.
        """
        if plan is not None:
            _check_plan(plan)
        batch, tokens = (q.shape[0], q.shape[2]) if plan is None else (1, q.shape[0])
        columns = k.shape[-1] + v.shape[-1]
        heads, item = (q.shape[1], k.shape[1]), q.element_size()
        sizes = Sizes(self._dividing.size(), batch, tokens, *heads, columns, item, self.group.size())
        strategy = self._strategy_of(plan)
        carriers = {
            "collectives": f"collectives of the group's backend, {dist.get_backend(self.group)}",
            "symmetric": "copies over symmetric memory",
        }
        beside = "nothing is exchanged while attention runs"
        if strategy != "heads" and plan is not None:
            beside = "messages travel while whole documents are attended"
        elif self.head_groups > 1:
            beside = f"{self.head_groups} groups of heads, each on its way while the one before attends"
        lines = explain(strategy, sizes, None if plan is None else plan.packed, self._transport.name)
        carried = f"transport {self._transport.name}: {carriers[self._transport.name]}"
        if strategy == "heads+gather":
            carried += f"; keys are gathered by {carriers['collectives']}"
        return "\n".join([lines[0], carried, beside, *lines[1:]])

    def recipe(self, inputs: Inputs, options: Options, plan: PackedPlan | None) -> Recipe:
        """Check a call on all ranks, and return how it is served. Graphs call it too. Raises as ``attention``."""
        self._check(inputs, options, plan)
        options = check_all_options(options)  # in their types: a window may be a list
        named, strategy = options._replace(return_lse=True), self._strategy_of(plan)
        ranks = self._dividing.size()
        if strategy != "gather":
            named = named._replace(head_parts=ranks * self.head_groups)
        if strategy == "heads":
            call: Call | CallByRecipe = Call(named) if plan is None else plan.whole_call(named)
        else:
            refuse_by_gather(options, inputs.heads, strategy, packed=plan is not None)
            gathers = self._gather_recipe(named, inputs.q.shape[2] * self.ranks, plan)
            if strategy == "gather":
                return gathers
            call = CallByRecipe(gathers)
        rank, groups = self._dividing.rank(), self.head_groups
        return HeadsRecipe(self._transport, call, rank, ranks, groups, return_lse=options.return_lse)

    def _gather_recipe(self, options: Options, tokens: int, plan: PackedPlan | None) -> Recipe:
        if plan is not None:
            return DocumentsRecipe(self.group, plan.calls(options))
        layout = self._gathered(tokens, None)
        held = layout.held[self.group.rank()]
        return GatherRecipe(self.group, layout, tuple(fixed_call(span, layout, options) for span in held))

    def _strategy_of(self, plan: PackedPlan | None) -> str:
        return self.strategy if plan is None else plan.strategy

    def _attend(self, inputs: Inputs, options: Options, plan: PackedPlan | None) -> tuple[Tensor, Tensor]:
        """Serve a call, whose tensors are ``[n, heads, columns]`` with a plan, and so are those returned."""
        if all(isinstance(x, Tensor) for x in inputs[:3]):  # else the check names what is none, on all ranks
            inputs = Inputs(*cast_under_autocast(*inputs[:3]), inputs.heads)
        if is_watched():
            options = check_all_options(options)
            strategy = self._strategy_of(plan)
            groups = 0 if strategy == "gather" else self.head_groups
            number, ranks = -1 if plan is None else plan.number, self._dividing.size()
            call = _with_batch(inputs, plan)
            o, lse = operate(call, options, self._number, number, ranks, groups, gathers=strategy != "heads")
        else:
            recipe = self.recipe(inputs, options, plan)
            q, k, v, heads = _with_batch(inputs, plan)
            o, lse = Attend.apply(recipe, q, k, v, *heads)  # type: ignore[no-untyped-call]
        # By o[0], autograd would write zeros and copy the gradient into them.
        return (o, lse) if plan is None else (o.squeeze(0).transpose(0, 1), lse.squeeze(0))

    def _check(self, inputs: Inputs, options: Options, plan: PackedPlan | None) -> None:
        """Check a call on all ranks."""
        tensors = (*inputs[:3], *inputs.heads)
        documents = None if plan is None else (plan.layout.tokens, plan.strategy, plan.place)

        def describe() -> str:
            self._check_tensors(inputs, plan)
            self._check_contract(inputs, check_all_options(options), plan)
            named = dict(zip(("q", "k", "v", "sinks", "alibi"), tensors, strict=True))
            asked = ", ".join(f"{option}={value}" for option, value in options._asdict().items())
            planned = "" if plan is None else f", plan {plan.digest}"
            sent = f"{self.head_groups} head_groups, transport {self._transport.name}"
            return f"{self._strategy_of(plan)}: {describe_tensors(named)}, {asked}{planned}, {sent}"

        self._agreement.check((repr(options), documents, kind_of(tensors)), describe)

    def _check_tensors(self, inputs: Inputs, plan: PackedPlan | None) -> None:
        q, k, v, heads = inputs
        axes, tokens_at, form = (4, 2, "[B, H, n, D]") if plan is None else (3, 0, "[n, H, D]")
        for letter, tensor in (("q", q), ("k", k), ("v", v)):
            if is_dtensor(type(tensor)):
                raise UnsupportedError(
                    f"{letter} is a DTensor, and ContextParallel takes local ones",
                    hint="call it for to_local() of a tensor that is sharded as shard does",
                )
            if not isinstance(tensor, Tensor) or tensor.dim() != axes:  # type: ignore[redundant-expr] # callers may pass what types rule out
                raise InputError(f"{letter} must be a tensor {form}, got {shown(getattr(tensor, 'shape', tensor))}")
            if tensor.dtype != q.dtype or tensor.device != q.device:
                got = f"{tensor.dtype} on {tensor.device}"
                raise InputError(f"{letter} must have the dtype and device of q, {q.dtype} on {q.device}, got {got}")
            if tensor.shape[tokens_at] != q.shape[tokens_at]:
                raise InputError(
                    f"{letter} must have the tokens of q, {q.shape[tokens_at]}, got {tensor.shape[tokens_at]}",
                    hint="queries and keys are the same tokens here",
                )
        count, count_kv = q.shape[1], k.shape[1]
        heads.check(count)
        ranks, strategy = self._dividing.size(), self._strategy_of(plan)
        parts = ranks * self.head_groups
        if strategy != "gather" and (not count_kv or count_kv % parts or count % parts):
            groups = f" times {self.head_groups} groups" if self.head_groups > 1 else ""
            raise InputError(
                f'heads must be multiples of the {ranks} ranks{groups} for strategy="{strategy}", '
                f"got {count} query heads and {count_kv} K/V heads",
                hint='use strategy="gather", unless shard cut another dimension than that of tokens'
                if not groups
                else "use fewer head_groups",
            )
        if plan is not None and plan.device != q.device:
            raise InputError(f"the plan is on {plan.device}, got tensors on {q.device}")
        self._layout_of(q.shape[tokens_at] * self.ranks, plan)

    def _check_contract(self, inputs: Inputs, options: Options, plan: PackedPlan | None) -> None:
        """Check what one GPU would of the local tensors, as a call of ``flash_attention``."""
        q, k, v, heads = _with_batch(inputs, plan)
        batched_problem(check_kinds({"q": q, "k": k, "v": v, **heads._asdict()}, options), options)


def _check_sharded(x: object, dim: object) -> None:
    """Raise ``InputError`` unless ``dim`` is a dimension of the tensor ``x``."""
    if not isinstance(x, Tensor):
        raise InputError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if is_dtensor(type(x)):
        raise InputError("x is a DTensor, and ContextParallel takes local ones")
    if type(dim) is not int or not -x.dim() <= dim < x.dim():
        raise InputError(f"dim must be one of the {x.dim()} dimensions of x, got {shown(dim)}")


def _check_unsharded(x: object, dim: object) -> None:
    """Raise ``InputError`` unless ``dim`` is a dimension of the tensor ``x``, of which autograd records nothing."""
    _check_sharded(x, dim)
    if torch.is_grad_enabled() and x.requires_grad:  # type: ignore[attr-defined] # a tensor
        raise InputError(
            "x must not require a gradient: unshard records none, so layers before it would not learn",
            hint="keep the tokens of this rank until the loss, or pass x.detach()",
        )


def _check_plan(plan: Any) -> str:
    """Raise ``InputError`` unless it is a plan."""
    if not isinstance(plan, PackedPlan):
        raise InputError(f"plan must be a PackedPlan, as ContextParallel.plan returns it, got {type(plan).__name__}")
    return "a plan"


def _with_batch(inputs: Inputs, plan: PackedPlan | None) -> Inputs:
    """Return ``[n, heads, columns]`` as a batch of one sequence, ``[1, heads, n, columns]``."""
    if plan is None:
        return inputs
    q, k, v = (x.transpose(0, 1)[None] for x in inputs[:3])
    return Inputs(q, k, v, inputs.heads)
