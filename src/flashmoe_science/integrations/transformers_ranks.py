"""Whether a model of transformers got the positions that ``shard`` gives a rank: without them it counts from 0."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import InputError
from .transformers_packing import are_positions, is_captured, is_readable, version

if TYPE_CHECKING:
    from ..distributed import ContextParallel, PackedPlan
    from ..distributed.layout import Span

_FEW = 4  # spans that are made on the device; more are copied there at once
_HINT = (
    "hand over context_parallel.shard(positions, 1), with torch.arange(tokens)[None] as positions; packed documents "
    "need context_parallel_plan, and positions that restart"
)


def check_positions(
    context_parallel: ContextParallel, plan: PackedPlan | None, positions: Any, tokens: int, module: torch.nn.Module
) -> None:
    """Raise unless each rank has the positions of its own tokens.

    All layers ask for the same tensor: on a GPU it has to be waited for, once a call of the model. Ranks compare theirs
    as ``ContextParallel`` compares calls. While a model is compiled or a CUDA graph captured, other positions fail when
    it runs; those of a plan are not looked at.

    Args:
        context_parallel: splits the sequence.
        plan: of a packed batch, or None.
        positions: ``[B or 1, tokens]``; what has another form is not looked at. Zeros in a plan's last document are
            padding.
        tokens: of this rank.
        module: the layer that asks.

    Raises:
        InputError: positions are others; on all ranks where a call is the first of its kind.
    """
    if not isinstance(positions, Tensor) or not positions.dim() or not are_positions(positions, len(positions), tokens):
        return
    if torch.compiler.is_compiling() or is_captured(positions):
        if plan is None:
            expected = _positions_of(_spans(context_parallel, None, tokens), positions.device)
            torch._assert_async((positions == expected).all(), f"position_ids must be this rank's: {_HINT}")  # noqa: SLF001  no public name
        return
    if not is_readable(positions) or not _fits(plan, context_parallel.ranks, tokens):
        return
    known = positions.__dict__.get("flashmoe_rank")
    question = (version(positions), context_parallel, plan)
    # Who asks again belongs to the next call: versions of inference tensors say nothing.
    if known is not None and known[0] == question and known[1] != id(module):
        return

    def describe() -> str:
        _compare(positions, _spans(context_parallel, plan, tokens), context_parallel.rank)
        return "the positions of its tokens"

    kind = ("position_ids", tokens, plan is None)
    context_parallel._agreement.check(kind, describe)  # noqa: SLF001  all ranks refuse, as one of them may look right
    describe()
    positions.__dict__["flashmoe_rank"] = (question, id(module))


def _fits(plan: Any, ranks: int, tokens: int) -> bool:
    """Whether a plan, if there is one, is of so many tokens a rank; attention names what is wrong else."""
    layout = getattr(plan, "layout", None)
    return plan is None or (layout is not None and (layout.ranks, layout.tokens) == (ranks, ranks * tokens))


def _spans(context_parallel: ContextParallel, plan: PackedPlan | None, tokens: int) -> list[tuple[Span, bool]]:
    """Return the positions of this rank's tokens, as spans, and which are of a plan's last document."""
    rank = context_parallel.rank
    if plan is None:
        return [(span, False) for span in context_parallel.layout(tokens * context_parallel.ranks).held[rank]]
    found = []
    for start, end in plan.layout.held[rank]:
        first = start
        while first < end:  # a span may hold several documents
            number = bisect.bisect_right(plan.starts, first)
            begin, last = plan.starts[number - 1], min(end, plan.starts[number])
            found.append(((first - begin, last - begin), number == len(plan.starts) - 1))
            first = last
    return found


def _positions_of(spans: list[tuple[Span, bool]], device: torch.device) -> Tensor:
    place = device if len(spans) < _FEW else torch.device("cpu")
    return torch.cat([torch.arange(*span, device=place) for span, _ in spans]).to(device)


def _compare(positions: Tensor, spans: list[tuple[Span, bool]], rank: int) -> None:
    """Raise ``InputError`` where positions are not those of spans."""
    expected = _positions_of(spans, positions.device)
    if bool((positions == expected).all()):
        return
    is_last = torch.cat([torch.full((span[1] - span[0],), last, device=positions.device) for span, last in spans])
    wrong = (positions != expected) & ~(is_last & (positions == 0))  # the last document may be padding
    if bool(wrong.any()):
        row, token = wrong.nonzero()[0].tolist()
        raise InputError(
            f"position_ids must be those of rank {rank}, {int(expected[token])} at its token {token}, "
            f"got {int(positions[row, token])}",
            hint=_HINT,
        )
