"""Attention whose tokens are split over ranks, for the harness: one sequence, or packed documents.

All ranks make the whole q, k, v and do, ``[T, heads, D]``, and a call takes this rank's tokens. It gives o, and dq, dk
and dv where gradients are asked for. The truth is that of the whole problem, of which a rank's answer is a part.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from ...attention import reference
from ...distributed import ContextParallel
from ...distributed.layout import Layout, plan_documents, zigzag_layout
from ...errors import InputError
from ...gpu.planning import Work
from ...gpu.specs import GpuSpec
from ..attention import OPERATOR as FIXED, AttentionOperator
from ..attention_scale import forward_scale, step_scale
from ..attention_step import OPERATOR as STEP
from ..attention_varlen import OPERATOR as FORWARD
from ..attention_varlen_backward import OPERATOR as BACKWARD
from ..base import DTYPES, standard_normal
from ..baselines.base import Inputs
from ..baselines.context_parallel import BASELINES, CHUNKS
from ..error_scale import Scale
from .over_ranks import OperatorOverRanks, Pass, RankedProblem, mesh_of, narrowed, rank_here, with_gradients

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ...gpu.identity import PlannedSource

_TENSORS = ("q", "k", "v", "do")
_SCORES_AT_ONCE = 1 << 28  # of a K/V head's queries, in the framework's eager run


def _attention(strategy: str) -> Callable[..., Any]:
    """Return an entry point by one strategy of ours."""

    @functools.lru_cache(maxsize=4)
    def context(mesh: DeviceMesh) -> ContextParallel:
        return ContextParallel(mesh, strategy=strategy, heads_kv=mesh.size())

    @functools.lru_cache(maxsize=64)
    def plan(mesh: DeviceMesh, lengths: tuple[int, ...]) -> Any:
        return context(mesh).plan(lengths)

    def entry(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        do: torch.Tensor | None,
        *,
        mesh: DeviceMesh,
        lengths: tuple[int, ...],
        causal: bool,
    ) -> Any:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if len(lengths) > 1:
                o: torch.Tensor = context(mesh).attention_packed(q, k, v, plan(mesh, lengths), causal=causal)
                return o
            o = context(mesh).attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), causal=causal)
            return o.squeeze(0).transpose(0, 1)

        return with_gradients(attend, (q, k, v), do)

    return entry


context_parallel: Any = _attention("auto")
context_parallel.layout = "auto"
context_parallel_gather: Any = _attention("gather")
context_parallel_gather.layout = "chunks"


def layout_of(problem: RankedProblem) -> Layout:
    """Return what a rank has by layout "chunks": one from front and back of a sequence, or documents."""
    lengths, ranks = problem.whole.lengths, problem.ranks
    if len(lengths) == 1:
        return zigzag_layout(lengths[0], ranks)
    return plan_documents(lengths, ranks).layout


def _is_straight(problem: RankedProblem, layout: str) -> bool:
    """Return whether each rank has one span. With layout "auto" it does of one sequence, not of packed documents."""
    return layout == "straight" or (layout == "auto" and len(problem.whole.lengths) == 1)


class ContextParallelOperator(OperatorOverRanks):
    """Attention over ranks, for the harness."""

    name = "context_parallel"
    keys = {
        "ranks": int, "lengths": list, "heads": int, "heads_kv": int, "head_dim": int, "dtype": str, "causal": bool,
        "gradients": bool,
    }  # fmt: skip
    required = ("ranks", "lengths", "heads", "head_dim", "dtype")
    same_as = {"heads_kv": "heads"}
    omitted = {"gradients": True}
    kernels = {"context_parallel": "auto", "context_parallel_gather": "auto"}
    rooms = ("attention", "distributed")
    framework = AttentionOperator.framework
    known_baselines = BASELINES
    fresh: ClassVar[tuple[str, ...]] = (*_TENSORS, *(f"{name}{CHUNKS}" for name in _TENSORS))

    def make_problem(self, table: dict[str, Any]) -> RankedProblem:
        """Return the problem of a case."""
        ranks, gradients = self.check_ranks(table, {"heads_kv": table["heads_kv"]})
        if sum(table["lengths"]) % (2 * ranks):
            raise InputError(f"lengths must sum up to a multiple of {2 * ranks}, got {sum(table['lengths'])}")
        whole = {**table, "lengths_k": table["lengths"], "head_dim_v": table["head_dim"]}
        return RankedProblem(BACKWARD.make_problem(whole), ranks, gradients)

    def values(self, problem: RankedProblem) -> dict[str, Any]:
        """Return the value of each key."""
        own = {"ranks": problem.ranks, "gradients": problem.gradients, "lengths": problem.whole.lengths}
        return {key: own[key] if key in own else getattr(problem.whole.planned, key) for key in self.keys}

    def describe(self, problem: RankedProblem) -> str:
        """Return a short name, e.g. ``w2_s16384_h32_8_d128_bf16_causal``."""
        p, lengths = problem.whole.planned, problem.whole.lengths
        tokens = f"s{lengths[0]}" if len(lengths) == 1 else f"packed{len(lengths)}_t{sum(lengths)}"
        words = [f"w{problem.ranks}", tokens, f"h{p.heads}_{p.heads_kv}", f"d{p.head_dim}", p.dtype]
        return "_".join([*words, *["causal"] * p.causal, *["forward"] * (not problem.gradients)])

    def outputs(self, problem: RankedProblem) -> Sequence[str]:
        """Return the names of what a call gives."""
        return ("o", "dq", "dk", "dv") if problem.gradients else ("o",)

    def work(self, problem: RankedProblem) -> Work:
        """Return the work of one rank."""
        forward = self.part_of(FORWARD, problem)
        if not problem.gradients:
            return forward
        backward = self.part_of(BACKWARD, problem)
        return Work(forward.flops + backward.flops, backward.bytes, forward.tokens)

    def make_inputs(self, problem: RankedProblem, *, seed: int, device: str) -> dict[str, torch.Tensor]:
        """Return whole q, k, v and do, where documents start, and this rank's tokens by layout "chunks"."""
        p, lengths = problem.whole.planned, problem.whole.lengths
        heads = {"q": p.heads, "k": p.heads_kv, "v": p.heads_kv, "do": p.heads}
        shapes = {name: (sum(lengths), count, p.head_dim) for name, count in heads.items()}
        inputs = standard_normal(shapes, DTYPES[p.dtype], torch.Generator(device=device).manual_seed(seed))
        chunks = {
            f"{name}{CHUNKS}": self.shard(problem, "chunks", rank_here(), name, inputs[name]) for name in _TENSORS
        }
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        return {**inputs, **chunks, "cu_seqlens_q": starts, "cu_seqlens_k": starts.clone()}

    def refresh(self, problem: RankedProblem, inputs: Inputs, *, seed: int) -> None:
        """Write new values into q, k, v and do."""
        super().refresh(problem, {name: inputs[name] for name in _TENSORS}, seed=seed)
        self.update_copies(problem, inputs)

    def update_copies(self, problem: RankedProblem, inputs: Inputs) -> None:
        """Write this rank's tokens by layout "chunks" once more, after those of the whole problem have changed."""
        for name in _TENSORS:
            inputs[f"{name}{CHUNKS}"].copy_(self.shard(problem, "chunks", rank_here(), name, inputs[name]))

    def bind(self, entry: Callable[..., Any], problem: RankedProblem, inputs: Inputs) -> Callable[[], Any]:
        """Return a call on this rank's tokens, in the layout of the entry point."""
        if hasattr(entry, "bind_inputs"):
            return super().bind(entry, problem, inputs)
        if _is_straight(problem, self.layout(entry)):
            tensors = narrowed(inputs, _TENSORS, problem.ranks)
        else:
            tensors = [inputs[f"{name}{CHUNKS}"] for name in _TENSORS]
        do = tensors.pop() if problem.gradients else None
        options = {"lengths": problem.whole.lengths, "causal": problem.whole.planned.causal}
        mesh = functools.partial(mesh_of, problem.ranks, tensors[0].device.type)
        return lambda: entry(*tensors[:3], do, mesh=mesh(), **options)

    def shard(self, problem: RankedProblem, layout: str, rank: int, output: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tokens of a rank."""
        del output
        if _is_straight(problem, layout):
            length = tensor.shape[0] // problem.ranks
            return tensor.narrow(0, rank * length, length)
        return torch.cat([tensor[start:end] for start, end in layout_of(problem).held[rank]])

    def exact(self, problem: RankedProblem, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Return the whole answer in fp64."""
        return self._by_heads(problem, inputs, self._exact)

    def _exact(self, problem: RankedProblem, inputs: Inputs) -> Sequence[torch.Tensor]:
        def answer(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            options: dict[str, Any] = {"causal": problem.whole.planned.causal, "dtype": torch.float64}
            if not problem.gradients:
                return reference.attention(*tensors, **options)[:1]
            found = reference.attention_backward(*tensors, **options, output=True)
            return [found[name] for name in ("o", "q", "k", "v")]

        return _by_document(problem, inputs, answer)

    def low_precision(self, problem: RankedProblem, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Return the framework's whole answer in the problem's dtype, some rows of a head at once: all may not fit."""
        return self._by_heads(problem, inputs, self._low_precision)

    def _low_precision(self, problem: RankedProblem, inputs: Inputs) -> Sequence[torch.Tensor]:
        p, sums = problem.whole.planned, {}
        for name in _TENSORS:  # o has the shape of its gradient
            sums[name] = torch.zeros(inputs[name].shape, dtype=torch.float32, device=inputs[name].device)
        for begin, end in itertools.pairwise(inputs["cu_seqlens_q"].tolist()):
            rows = max(1, _SCORES_AT_ONCE // (p.group * (end - begin)))
            for first, head in itertools.product(range(begin, end, rows), range(inputs["k"].shape[1])):
                queries, mine = slice(first, min(first + rows, end)), slice(head * p.group, (head + 1) * p.group)
                keys = slice(begin, queries.stop if p.causal else end)
                places = {"q": (queries, mine), "k": (keys, slice(head, head + 1)), "v": (keys, slice(head, head + 1))}
                leaves = [inputs[name][place].transpose(0, 1)[None] for name, place in places.items()]
                do = inputs["do"][queries, mine].transpose(0, 1)[None] if problem.gradients else None
                attend = functools.partial(reference.attention_low_precision, causal=p.causal)
                o, *gradients = with_gradients(attend, leaves, do)
                sums["do"][queries, mine] = o[0].transpose(0, 1).float()
                for (name, place), gradient in zip(places.items(), gradients, strict=False):
                    sums[name][place] += gradient[0].transpose(0, 1)
        order = ("do", "q", "k", "v") if problem.gradients else ("do",)
        return [sums[name].to(inputs[name].dtype) for name in order]

    def error_scale(self, problem: RankedProblem, inputs: Inputs) -> tuple[Scale, ...]:
        """Return what is allowed in each element of the whole answer."""
        found = self._by_heads(problem, inputs, self._error_scale)
        return tuple(Scale(*pair) for pair in zip(found[::2], found[1::2], strict=True))

    def _error_scale(self, problem: RankedProblem, inputs: Inputs) -> Sequence[torch.Tensor]:
        def scale(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            options: dict[str, Any] = {"causal": problem.whole.planned.causal, "softmax_scale": None}
            if not problem.gradients:
                return forward_scale(*tensors, **options)
            return [each for scale in step_scale(*tensors, **options) for each in scale]

        return _by_document(problem, inputs, scale)

    def _by_heads(
        self, problem: RankedProblem, inputs: Inputs, answer: Callable[[RankedProblem, Inputs], Sequence[torch.Tensor]]
    ) -> tuple[torch.Tensor, ...]:
        """Return ``[T, heads, columns]`` of all heads. Where all ranks are here, each works out some heads."""
        if not dist.is_initialized():
            return tuple(answer(problem, inputs))
        mine = dict(inputs)
        for name in _TENSORS:
            heads = inputs[name].shape[1] // problem.ranks
            mine[name] = inputs[name].narrow(1, rank_here() * heads, heads)
        return tuple(_of_all_heads(x, problem.ranks) for x in answer(problem, mine))

    def sample(
        self, problem: RankedProblem, inputs: Inputs, *, seed: int
    ) -> tuple[RankedProblem, Inputs, Callable[[torch.Tensor], torch.Tensor], int] | None:
        """Return as many heads of K and V as there are ranks, drawn by ``seed``, with the heads of q that share them.

        Returns:
            Their problem, their inputs, what picks their part of a rank's output, and the number of such parts. None:
            there is one.
        """
        table = self.as_table(problem)
        parts = table["heads_kv"] // problem.ranks
        if parts < 2:
            return None
        chosen = random.Random(seed).randrange(parts)

        def pick(tensor: torch.Tensor) -> torch.Tensor:
            tokens, _, columns = tensor.shape
            return tensor.reshape(tokens, table["heads_kv"], -1, columns)[:, chosen::parts].flatten(1, 2)

        its = {**inputs, **{name: pick(inputs[name]) for name in _TENSORS}}
        heads = problem.whole.planned.group * problem.ranks
        return self.parse_case({**table, "heads": heads, "heads_kv": problem.ranks}), its, pick, parts

    def launches(self, subject: str, problem: RankedProblem, gpu: GpuSpec) -> Sequence[PlannedSource]:
        """Return those of a rank by "heads". By "gather" it makes a call for each chunk: nothing is told."""
        return super().launches(subject, problem, gpu) if subject == "context_parallel" else ()

    def passes(self, subject: str, problem: RankedProblem) -> Sequence[Pass]:
        """Return what ranks run: of one sequence all tokens of some heads; of packed documents what each rank has."""
        p, lengths = problem.whole.planned, list(problem.whole.lengths)
        table = {"head_dim": p.head_dim, "dtype": p.dtype, "causal": p.causal}
        base, name = (STEP, "attention_step") if problem.gradients else (FIXED, "flash_attention")
        if len(lengths) == 1 and subject == "context_parallel":
            heads = {"heads": p.heads // problem.ranks, "heads_kv": p.heads_kv // problem.ranks}
            return [(base, name, base.parse_case({**table, **heads, "batch": 1, "seqlen_q": lengths[0]}))]
        table |= {"heads": p.heads, "heads_kv": p.heads_kv}
        if len(lengths) == 1:  # by "gather": a call for each chunk, on the keys that it sees
            chunks = itertools.chain(*layout_of(problem).held)
            sizes = [(end - start, end if p.causal else lengths[0]) for start, end in chunks]
            cases = ({**table, "batch": 1, "seqlen_q": rows, "seqlen_k": keys} for rows, keys in sizes)
            return [(base, name, base.parse_case(case)) for case in cases]
        found: list[Pass] = []
        for queries, keys in _calls_of(problem):
            packed = {**table, "lengths": queries, "lengths_k": keys}
            found.append((FORWARD, "flash_attention_varlen", FORWARD.parse_case(packed)))
            if problem.gradients:
                found.append((BACKWARD, "flash_attention_varlen_backward", BACKWARD.parse_case(packed)))
        return found


def _by_document(
    problem: RankedProblem, inputs: Inputs, answer: Callable[..., Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    """Return what ``answer`` makes of q, k, v and do of each document, ``[1, heads, S, D]``, one behind the other."""
    names, found = _TENSORS if problem.gradients else _TENSORS[:3], []
    for begin, end in itertools.pairwise(inputs["cu_seqlens_q"].tolist()):
        tensors = (inputs[name][begin:end].transpose(0, 1)[None] for name in names)
        found.append([each[0].transpose(0, 1) for each in answer(*tensors)])
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def _of_all_heads(some: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return ``[T, heads, columns]`` of what each rank has of some heads."""
    by_rank = some.new_empty(ranks * some.shape[0], *some.shape[1:])
    dist.all_gather_into_tensor(by_rank, some.contiguous())
    return torch.unflatten(by_rank, 0, (ranks, -1)).transpose(0, 1).flatten(1, 2)


def _calls_of(problem: RankedProblem) -> list[tuple[list[int], list[int]]]:
    """Return the queries and keys of every packed call of all ranks.

    Calls of whole documents are given tensors of all tokens of the rank: that makes grids larger, and changes no work.
    """
    packed = plan_documents(problem.whole.lengths, problem.ranks)
    found = []
    for held, (alone, *_) in zip(packed.layout.held, packed.rounds, strict=True):
        for spans in filter(None, (held[:alone], held[alone:])):
            pieces = packed.pieces(spans, causal=problem.whole.planned.causal, window=(-1, -1))
            queries, keys = ([end - start for start, end in each] for each in (spans, pieces.keys))
            found.append((queries, keys))
    return found


OPERATOR = ContextParallelOperator()
