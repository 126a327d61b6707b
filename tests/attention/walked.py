"""Run the control flow of ``forward_features_gluon_sm90`` in Python: its own source, with numbers in place of tensors.

The producer and the warpgroups of every program run to their ends, one after another; what they do to rings, row tiles
and memory is written down. Arithmetic on tiles is left out. So it shows which rows and keys meet, in which order, and
with which masks, but nothing of what waits for what.
"""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flashmoe_science.attention.forward import variants_gluon_sm90 as kernel
from flashmoe_science.attention.forward.variants_plan import batch_inner, heads_fit, heads_together, variants_config
from flashmoe_science.attention.forward.variants_primitives_sm90 import Args
from flashmoe_science.attention.problem import AttentionProblem


@dataclass
class Seen:
    """What one warpgroup did with one row tile."""

    head: int
    start: int
    first_row: int
    place: int
    cleaned: list[tuple[int, int]] = field(default_factory=list)  # number of the tile in the ring, and its keys
    masked: list[tuple[int, int, int]] = field(default_factory=list)  # number, position of the first row, first key
    unmasked: list[int] = field(default_factory=list)
    placed: list[tuple[int, int, int]] = field(default_factory=list)  # as masked, of all tiles, in order
    outputs: list[int] = field(default_factory=list)  # numbers of the tiles of V that were used, in order
    stored: tuple[int, ...] = ()


@dataclass
class Fill:
    """One tile of K, V, Q or, for all warpgroups, the bias that the producer copied."""

    what: str
    b: int
    head: int
    row: int
    number: int  # of the tile in the ring, or of the row tile
    key: int = 0  # where a tile of the bias starts


class _Nothing:
    """Stands for any tensor."""

    type = types.SimpleNamespace(layout=None)

    def __getattr__(self, _name: str) -> Any:
        return _Nothing()

    def __call__(self, *_a: Any, **_k: Any) -> Any:
        return _Nothing()

    def _same(self, *_: Any) -> _Nothing:
        return self

    __add__ = __radd__ = __sub__ = __mul__ = __lt__ = __getitem__ = _same


def _gluon() -> Any:
    nothing = _Nothing()
    return types.SimpleNamespace(
        minimum=min, maximum=max, where=lambda c, a, b: a if c else b, static_range=range, to_tensor=int,
        constexpr=int, float32=None, full=nothing, zeros=nothing, sum=nothing, arange=nothing, SliceLayout=nothing,
        NVMMADistributedLayout=nothing, convert_layout=nothing, inline_asm_elementwise=nothing, int32=None,
    )  # fmt: skip


def _copy(function: Any, names: dict[str, Any]) -> Callable[..., Any]:
    """Return a function of the kernel with other globals."""
    plain = function.fn
    numbers = {name: value.value for name, value in plain.__globals__.items() if type(value).__name__ == "constexpr"}
    copied = types.FunctionType(plain.__code__, {**plain.__globals__, **numbers, **names})
    copied.__kwdefaults__, copied.__defaults__ = plain.__kwdefaults__, plain.__defaults__
    return copied


class Walk:
    """All programs of one launch."""

    def __init__(
        self, problem: AttentionProblem, sequences: list[list[int]] | None = None, *, programs: int = 132, seed: int = 0
    ) -> None:
        """``sequences`` are what ``sequences_triton`` stores of each, where they are packed."""
        config = variants_config(problem)
        tiles_m = -(-problem.seqlen_q // (64 * config.warpgroups))
        self.tiles = sequences[-1][0] if sequences else tiles_m * problem.batch * problem.heads
        self.programs = programs
        self.config, self.problem, self.sequences = config, problem, sequences
        self.fills: list[list[Fill]] = []
        self.seen: list[list[list[Seen]]] = []  # by program and warpgroup
        together = heads_together(problem, config, self.programs) if not sequences else 1
        left, right = problem.window
        self.arguments: dict[str, Any] = {
            "batch": problem.batch, "heads": problem.heads, "seqlen_q": problem.seqlen_q, "seqlen_k": problem.seqlen_k,
            "tiles_m": tiles_m, "together": together, "window_left": max(left, 0), "window_right": max(right, 0),
            "dealt": problem.batch * problem.heads if heads_fit(problem) is None else together,
            "GROUP": problem.group, "WARPGROUPS": config.warpgroups, "BLOCK_N": config.block_n,
            "STAGES": config.num_stages, "IS_PACKED": sequences is not None,
            "HAS_SEQUSED_Q": "q" in problem.seqused, "HAS_ALIBI": False, "HAS_BIAS": bool(problem.bias),
            "BATCH_INNER": batch_inner(problem), "BOUND_LEFT": problem.bounded_left,
            "BOUND_RIGHT": problem.bounded_right, "STORE_LSE": True, "D1": 0, "DV0": 64, "DV1": 0,
        }  # fmt: skip
        # Which program fetches which tile is up to the GPU: each fetches once for a tile of its own, ever larger ones.
        draw = random.Random(seed)
        working = min(programs, self.tiles)
        tickets: list[list[int]] = [[] for _ in range(working)]
        for ticket in range(self.tiles - working):
            draw.choice(tickets).append(ticket)
        for mine, ticket in zip(tickets, range(self.tiles - working, self.tiles), strict=True):
            mine.append(ticket)
        self.tickets = tickets + [[] for _ in range(programs - working)]  # who has no tile draws nothing
        for program in range(programs):
            tiles = self._load(program)
            assert not self.tickets[program] or not sequences, "a program draws once for every tile"
            self.seen.append([self._attend(tiles, w) for w in range(config.warpgroups)])

    def _methods(self, names: dict[str, Any], **more: Any) -> Any:
        a = types.SimpleNamespace(**self.arguments, **more)
        for name in (
            "count_tiles", "deal", "place", "publish", "queries_of", "keys_of", "key_tiles", "unmasked_tiles",
        ):  # fmt: skip
            setattr(a, name, types.MethodType(_copy(getattr(Args, name), names), a))
        a.sequence = lambda rank, what: self.sequences[rank][what] if self.sequences else None
        ends = [sequence[0] for sequence in self.sequences or ()]
        a.find = lambda rank, tile: next(r for r in range(rank, len(ends)) if tile < ends[r])  # there: 32 at a time
        return a

    def _load(self, program: int) -> list[dict[int, int]]:
        tiles: list[dict[int, int]] = []
        fills: list[Fill] = []
        self.fills.append(fills)

        def put(n: int, what: int, value: int) -> None:
            while len(tiles) <= n:
                tiles.append({})
            tiles[n][what] = value

        def fill(what: str, b: int, head: int, row: int, slot: int, lap: int) -> None:
            stages = self.config.num_stages
            number = lap if what.startswith("q") else lap * stages + slot
            fills.append(Fill(what, b, head, row, number))

        def fill_bias(_a: Any, b: int, head: int, row: int, key: int, i: int) -> None:
            fills.append(Fill("bias", b, head, row, i, key))

        def ring(what: str) -> Any:
            def fill_slot(_desc: Any, _more: Any, b: int, head: int, row: int, slot: int, lap: int) -> None:
                fill(f"q{slot}" if what == "q" else what, b, head, row, slot, lap)

            return types.SimpleNamespace(fill=fill_slot)

        drawn: list[int] = []

        def fetch_next(_: Any) -> int:
            drawn.append(self.tickets[program].pop(0))
            return drawn[-1]

        def get_fetched(ticket: int, _counter: Any, _tiles: Any) -> int:
            assert ticket == drawn.pop(), "it is the last that was fetched, and read once"
            return ticket + self.programs

        special = {"ctaid.x": program, "nctaid.x": self.programs}
        names = {
            "gl": _gluon(), "special_register": special.__getitem__, "rematerialize": int,
            "fetch_next": fetch_next, "get_fetched": get_fetched, "wait_for_kernel_before": _Nothing(),
            "fill_bias": fill_bias,
            "slot_of": lambda i, stages: i % stages, "lap_of": lambda i, stages: i // stages,
        }  # fmt: skip
        rows = types.SimpleNamespace(put=put, publish=_Nothing())
        a = self._methods(
            names, row_tiles=rows, q_ring=ring("q"), k_ring=ring("k"), v_ring=ring("v"),
            **dict.fromkeys(("q_desc", "k_desc", "v_desc", "q_more_desc", "k_more_desc", "v_more_desc", "counter_ptr")),
        )  # fmt: skip
        _copy(kernel._load_partition, names)(a)
        return tiles

    def _attend(self, tiles: list[dict[int, int]], w: int) -> list[Seen]:
        found: list[Seen] = []
        released: list[int] = []

        def open_tile(n: int, _what: int) -> int:
            tile = tiles[n]
            if tile[0] >= 0 and len(found) == n:
                found.append(Seen(tile[1], tile[2], tile[0], tile.get(3, self.problem.seqlen_q)))
            return tile[0]

        def first_step(
            _q: Any,
            m: Any,
            total: Any,
            _zero: Any,
            _a: Any,
            i: int,
            _n: int,
            _slope: Any,
            position: int,
            key: int,
            W: int,
        ) -> Any:
            assert w == W
            found[-1].placed.append((i, position, key))
            found[-1].masked.append((i, position, key))
            return _Nothing(), m, total

        def step(_q, acc, more, packed, m, total, _zero, _a, i, n, _slope, position, key, W, IS_EDGE) -> Any:
            assert (W, n) == (w, len(found) - 1)
            found[-1].placed.append((i, position, key))
            found[-1].outputs.append(i - 1)
            if IS_EDGE:
                found[-1].masked.append((i, position, key))
            else:
                found[-1].unmasked.append(i)
            return acc, more, packed, m, total

        def release(i: int) -> None:
            released.append(i)
            found[-1].outputs.append(i)

        def store(_o: Any, _more: Any, _a: Any, where: tuple[int, ...], W: int) -> None:
            found[-1].stored = (*where, W)

        nothing = _Nothing()
        names = {
            "gl": _gluon(), "rematerialize": int, "slot_of": lambda i, _s: i, "lap_of": lambda i, _s: i,
            "_first_step": first_step, "_step": step, "partial_sums": nothing, "rescale": lambda a, b, *_: (a, b),
            "issue_output": lambda *_: (nothing, nothing, nothing),
            "_normalise": lambda m, total, *_: (m, total, nothing),
            "normalise_biased": lambda m, total, *_: (m, total, nothing),
            "_clean_values": lambda _a, i, keys: found[-1].cleaned.append((i, keys)), "_store_lse": nothing,
            "_slope": nothing,
            "warp_scheduler_arrive": nothing, "store_output": store,
            "warpgroup_mma_wait": lambda *_a, **_k: (nothing, nothing, nothing), "tma": nothing,
        }  # fmt: skip
        rows = types.SimpleNamespace(wait=open_tile, read=lambda n, what: tiles[n][what])
        a = self._methods(
            names, row_tiles=rows, q_ring=nothing, q_desc=nothing, k_ring=nothing,
            v_ring=types.SimpleNamespace(wait=nothing, release=release),
        )  # fmt: skip
        _copy(kernel._attend_partition, names)(a, w)
        return found


def order_sequences(
    lengths_q: tuple[int, ...], keys: tuple[int, ...], starts_k: tuple[int, ...], heads: int, block_m: int,
    queries: tuple[int, ...] | None = None, together: int = 1,
) -> list[list[int]]:  # fmt: skip
    """Return what ``sequences_triton`` stores of each sequence, in its order."""
    starts_q = [sum(lengths_q[:b]) for b in range(len(lengths_q))]
    found, end = [], 0
    for b in sorted(range(len(keys)), key=lambda b: (-keys[b], b)):
        tiles = -(-lengths_q[b] // block_m)
        end += tiles * heads
        used = lengths_q[b] if queries is None else queries[b]
        found.append([end, tiles, starts_q[b], lengths_q[b], used, starts_k[b], keys[b], together])
    return found
