"""The walks of the gradients' kernels for Hopper, by their own source: every partition takes the same steps."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science.attention.backward import (
    d192_gluon_sm90 as backward_192_gluon_sm90,
    gluon_sm90 as backward_gluon_sm90,
    wide_gluon_sm90 as backward_wide_gluon_sm90,
)
from flashmoe_science.attention.backward.primitives_sm90 import (
    FAR,
    KeyTiles,
    _next_key_tile,
    first_query_tile,
    first_whole_tile,
    key_coordinates,
    load_partition,
    number_of_sums,
    place_of,
    query_coordinates,
    query_tile,
    step_at,
    walk_query_tiles,
    write_partition,
)

from .gluon_in_python import NOTHING, Int32, partition, plain, span_of

# For each kernel: its module, query rows and keys of a step, and the partitions that multiply, with their arguments.
KERNELS: dict[str, tuple[ModuleType, int, int, list[tuple[str, tuple[int, ...]]]]] = {
    "d64": (backward_gluon_sm90, 128, 128, [("_multiply_partition", (0,)), ("_multiply_partition", (1,))]),
    "d128": (backward_gluon_sm90, 64, 128, [("_multiply_partition", (0,)), ("_multiply_partition", (1,))]),
    "d192": (backward_192_gluon_sm90, 64, 128, [("_multiply_partition", (0,)), ("_multiply_partition", (1,))]),
    "d256": (backward_wide_gluon_sm90, 64, 64, [("_score_partition", ()), ("_gradient_partition", ())]),
}
LENGTHS = (1, 64, 65, 128, 300)  # part of a tile, whole tiles, a part more, and several


class _Semaphore:
    """A counter that always shows the value that is waited for."""

    def __ne__(self, _other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


class _Arguments(SimpleNamespace):
    """Of what it was not given it has nothing."""

    def __getattr__(self, _name: str) -> Any:
        return NOTHING


class Walk:
    """What a partition is given, and what it did."""

    def __init__(self, span: Any, block_m: int, group: int, together: int, tiles: Sequence[tuple[int, int]]):
        self.steps: list[Any] = []
        drawn = iter([*range(len(tiles)), -1])
        queue = SimpleNamespace(
            IS_PACKED=False, heads_total=Int32(2), publish=NOTHING, fetch_next=lambda _pointer: next(drawn),
            locate=lambda tile: tiles[tile], wait=lambda t, _warps: t if t < len(tiles) else -1,
        )  # fmt: skip
        self.a = _Arguments(
            dq_semaphore_ptr=0, key_tiles=queue, span=span, heads=Int32(2 * group), heads_kv=Int32(2),
            GROUP=group, TOGETHER=together, WARPGROUPS=2, BLOCK_M=block_m, STAGES=2, D=64, COLUMNS=64, V_COLUMNS=0,
            SHARES=1,
        )  # fmt: skip
        for name in ("q_desc", "k_desc", "v_desc", "k_more_desc", "q_more_desc", "do_desc", "stats_desc"):
            setattr(self.a, name, SimpleNamespace(dtype=NOTHING, block_type=SimpleNamespace(nbytes=0)))
        self.loaded: dict[str, list[Any]] = {"q_desc": self.steps, "do_desc": [], "stats_desc": []}

    def run(self, module: ModuleType, function: Any, *arguments: int) -> list[Any]:
        """Run a partition of a kernel, or one that kernels share, and return its steps."""
        sums = 3 if module is backward_192_gluon_sm90 else 2
        gluon = SimpleNamespace(
            minimum=min, static_range=range, zeros=NOTHING, float32=NOTHING, NVMMADistributedLayout=NOTHING,
            to_tensor=Int32, where=lambda is_so, a, b: a if is_so else b,
        )  # fmt: skip
        names: dict[str, Any] = dict(  # noqa: C408 - names of globals
            gl=gluon, step_at=plain(step_at), rematerialize=lambda x: x, poll=lambda _pointer: _Semaphore(),
            tma_load=self._load, load_rows=self._load_rows, raise_counter=self.steps.append,
            _step=lambda *given: self._note(*given[-6:-3], is_masked=given[-1], result=(NOTHING,) * sums),
            _score_step=lambda *given: self._note(*given[-5:-2], is_masked=given[-1], result=NOTHING),
            _gradient_step=lambda *given: self._note(given[-2], None, None, result=(NOTHING, NOTHING)),
        )  # fmt: skip
        shared = (
            _next_key_tile, first_query_tile, first_whole_tile, key_coordinates, place_of, query_coordinates,
            query_tile, walk_query_tiles,
        )  # fmt: skip
        names |= {function.__name__: partition(function, **names) for function in shared}
        names |= {function.__name__: partition(function, **names) for function in shared}  # they call one another
        for method in ("load_keys", "load_queries", "step"):
            setattr(self.a, method, MethodType(partition(getattr(module.Args, method), **names), self.a))
        partition(function, **names)(self.a, *arguments)
        return self.steps

    def _load(self, desc: Any, place: list[int], *_arguments: Any) -> None:
        for name, tiles in self.loaded.items():
            if desc is getattr(self.a, name):
                tiles.append((place[1], place[2] // self.a.BLOCK_M) if len(place) == 4 else place[0])

    def _load_rows(self, desc: Any, b: int, h: int, row: int, column: int, *_arguments: Any) -> None:
        self._load(desc, [b, h, row, column])

    def _note(self, i: int, key: int | None, row: int | None, *, is_masked: bool = True, result: Any) -> Any:
        self.steps.append((i, key, row, is_masked))
        return result


@pytest.mark.parametrize(("group", "together"), [(1, 1), (3, 1), (6, 2), (4, 4)])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (70, 0)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_all_partitions_take_the_same_steps(kernel, window, group, together):
    """Loader, writers and those that multiply; each query tile that sees a key tile once, in every head; masks hold."""
    module, block_m, keys, multiply = KERNELS[kernel]
    for seqlen_q, seqlen_k in itertools.product(LENGTHS, LENGTHS):
        span = span_of(seqlen_q, seqlen_k, window[0], window[1], block_m, keys)
        tiles_m, tiles_n = -(-seqlen_q // block_m), -(-seqlen_k // keys)
        tiles = [(Int32(head), Int32(n)) for n in range(tiles_n) for head in range(2)]
        if any(span.end(n) <= span.first(n) for _, n in tiles):
            continue  # no query sees the last keys: plans refuse it

        def walk(function, *arguments):
            walk = Walk(span, block_m, group, together, tiles)  # noqa: B023 - called here
            return walk.run(module, function, *arguments)

        loader = Walk(span, block_m, group, together, tiles)
        loaded = loader.run(module, load_partition, 2 if kernel == "d256" else 1)
        expected: list[tuple[int, int]] = []
        for head, n in tiles:
            before = len(expected)
            for walked in range(0, group, together):
                for m in range(span.end(n) - 1, span.first(n) - 1, -1):
                    expected += [(head * group + g, m) for g in range(walked + together - 1, walked - 1, -1)]
            assert len(set(expected[before:])) == len(expected) - before
        assert loaded == expected

        places = [head * tiles_m + m for head, m in loaded]
        assert loader.loaded["do_desc"] == loaded
        assert loader.loaded["stats_desc"] == [2 * block_m * place for place in places]
        if kernel == "d256":
            assert walk(write_partition, 0, 2) == [2 * place for place in places]
            assert walk(write_partition, 1, 2) == [2 * place + 1 for place in places]
        else:
            assert walk(write_partition, 0, 1) == places[0::2]
            assert walk(write_partition, 1, 1) == places[1::2]

        for name, arguments in multiply:
            steps = walk(getattr(module, name), *arguments)
            assert [i for i, *_ in steps] == [*range(len(loaded))]
            for (_, key, row, is_masked), (_, m) in zip(steps, loaded, strict=True):
                if row is None:
                    continue
                assert row == m * block_m
                if span.BOUND_LEFT:  # then a step asks for itself: test_spans_are_what_the_window_shows
                    continue
                whole = key + 64 <= seqlen_k and (not span.BOUND_RIGHT or key + 63 <= row + seqlen_k - seqlen_q)
                assert is_masked or whole, f"some of the keys from {key} on are not for row {row}"


class _Counter:
    """How often a counter was raised; nobody waits for more, and no wait is for one value that may have passed."""

    def __init__(self, raised: int):
        self.raised = raised

    def __lt__(self, other: int) -> bool:
        assert self.raised >= other, "the share before has not passed its sums on"
        return False


class _Passed:
    """What shares hand on, and what the last of each stores, by ``_pass_sums_on`` of key tiles as they are drawn."""

    def __init__(self, counters: range):
        self.stored: list[tuple[Any, ...]] = []
        self.raised: Counter[int] = Counter()
        self.sums: dict[int, list[Any]] = {}

        def store_sums(dk, dv, a, head, key, t, w):
            b, kv, first_key = partition(key_coordinates)(a, head, t, 4)
            self.stored.append((b, kv // a.SHARES, first_key + key, w, dk, dv))

        def raise_counter(pointer):
            assert pointer in counters, "not set to 0 by the kernel before, or that of something else"
            self.raised[pointer] += 4  # warps

        names: dict[str, Any] = {
            "rematerialize": lambda x: x, "poll": lambda pointer: _Counter(self.raised[pointer]),
            "raise_counter": raise_counter, "_add_from": lambda pointer, part: [*self.sums[pointer], *part],
            "_store_to": self.sums.__setitem__, "_store_sums": store_sums,
        }  # fmt: skip
        names["number_of_sums"] = partition(number_of_sums, **names)
        self._pass_on = partition(backward_gluon_sm90._pass_sums_on, **names)

    def on(self, a: Any, head: Any, n: Any, key: Any, t: int) -> None:
        for w in range(2):
            self._pass_on([f"dk {head}"], [f"dv {head}"], a, head, n, key, t, w)


@pytest.mark.parametrize("in_turns", [1, 4, 6, 16])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 300), (129, 257), (1, 2)])
@pytest.mark.parametrize("kernel", ["d64", "d128"])
def test_shares_pass_their_sums_on(kernel, seqlen_q, seqlen_k, in_turns):
    """In the order in which they are drawn, each waits for nobody drawn later; the last stores to the K/V head."""
    batch, heads_kv, group, shares = 2, 3, 6, 3
    block_m, keys = KERNELS[kernel][1:3]
    tiles_m, tiles_n = -(-seqlen_q // block_m), -(-seqlen_k // keys)
    heads, columns = heads_kv * group, 128 if kernel == "d128" else 64
    queue = SimpleNamespace(
        IS_PACKED=False, tiles_n=Int32(tiles_n), heads_total=Int32(batch * heads_kv * shares),
        heads_per_group=Int32(in_turns),
    )  # fmt: skip
    a = _Arguments(
        key_tiles=queue, span=SimpleNamespace(tiles_m=Int32(tiles_m)), heads=Int32(heads),
        heads_kv=Int32(heads_kv * shares), SHARES=shares, WARPGROUPS=2, D=columns, DV=columns,
        dq_semaphore_ptr=0, shares_ptr=0,
    )  # fmt: skip
    query_tiles = batch * heads * tiles_m
    passed = _Passed(range(query_tiles + 1, 2 * query_tiles + 1))
    locate = partition(KeyTiles.locate_among, gl=SimpleNamespace(minimum=min))
    for ticket in range(batch * heads_kv * shares * tiles_n):
        head, n = locate(queue, Int32(ticket), Int32(tiles_n))
        passed.on(a, head, n, n * keys, 0)
    stored = passed.stored
    assert len(stored) == batch * heads_kv * tiles_n * 2 == len({place[:4] for place in stored})
    for b, kv, _, _, *found in stored:
        first = (b * heads_kv + kv) * shares
        expected = [[f"{name} {head}" for head in range(first, first + shares)] for name in ("dk", "dv")]
        assert found == expected


PLACES = ((0, 0), (1, 1), (70, 5), (300, 0), (5, 400), (130, 129), (0, 65), (257, 256), (64, 64))  # queries and keys


def order(places: Sequence[tuple[int, int]], window: int, block_m: int, keys: int, heads_kv: int) -> list[list[int]]:
    """Return what ``_order_key_tiles_kernel`` stores of each sequence, in its order, as ``interpreted_packed_passes``.

    Each sequence starts 3 tokens behind the end of the one before.
    """
    starts = [[3 + sum(place[side] + 3 for place in places[:b]) for b in range(len(places))] for side in range(2)]
    found, end = [], 0
    for b in sorted(range(len(places)), key=lambda b: (-places[b][1], b)):
        queries, seen = places[b]
        tiles = -(-seen // keys)
        hidden = max(0, seen - queries - window) // keys if window >= 0 else 0
        tiles = tiles - hidden if queries else 0
        end += tiles * heads_kv
        ends = starts[0][b] + queries, starts[1][b] + seen
        found.append([end, tiles, queries, seen, *ends, starts[0][b] // block_m + b])
    return found


class _PackedWalk(Walk):
    """A partition of a kernel for packed sequences; one program fetches all key tiles."""

    def __init__(
        self, sequences: list[list[int]], window: tuple[int, int], block_m: int, keys: int, group: int, together: int,
        tokens: tuple[int, int], said: dict[tuple[int, int], int], shares: int = 1, in_turns: int = 2,
    ):  # fmt: skip
        """``group`` and ``together`` are of a share, if there are any."""
        super().__init__(span_of(*tokens, *window, block_m, keys), block_m, group, together, [])
        heads_kv, tickets = 3 * shares, iter(range(10**6))
        self.a.SHARES = shares
        self.a.span.tiles_m = Int32(tokens[0] // block_m + len(sequences))
        queue = SimpleNamespace(
            IS_PACKED=True, SHARES=shares, heads_total=Int32(heads_kv), heads_per_group=Int32(in_turns),
            batch=Int32(len(sequences)),
            fetch_next=lambda _pointer: Int32(next(tickets)),
            find=lambda _rank, ticket: Int32(sum(sequence[0] <= ticket for sequence in sequences)),
            sequence=lambda rank, what: Int32(sequences[rank][what]),
            put=lambda t, what, value: said.__setitem__((t, what), value),
            publish=lambda t, number: said.__setitem__((t, 0), number),
            wait=lambda t, _warps: said[t, 0], read=lambda t, what, _warps: said[t, what],
        )  # fmt: skip
        static = SimpleNamespace(minimum=min, static_range=range)
        for name in ("locate_among", "publish_packed"):
            method = partition(getattr(KeyTiles, name), gl=static)
            setattr(queue, name, MethodType(method, queue))
        self.a.span.of_sequence = lambda queries, seen: span_of(queries, seen, *window, block_m, keys)
        self.a.key_tiles, self.a.heads, self.a.heads_kv = queue, Int32(heads_kv * group), Int32(heads_kv)
        self.keys_loaded: list[Any] = []
        self.loaded |= {"k_desc": self.keys_loaded}
        self.turns: list[tuple[int, int]] = []

    def _load(self, desc: Any, place: list[int], *_arguments: Any) -> None:
        if len(place) == 4:  # the tokens that the axes of the map mean
            b, head, row, _ = place
            place = [0, head, (b + row - FAR.value, b)]  # type: ignore[list-item]
        for name, tiles in self.loaded.items():
            if desc is getattr(self.a, name):
                tiles.append(tuple(place[1:]) if len(place) > 1 else place[0])


# Kernel, heads of a share, those that are walked over together, shares of a K/V head, and shares in turns.
PACKED_WALKS = [
    (kernel, *heads)
    for heads in ((1, 1, 1, 2), (3, 1, 1, 2), (7, 7, 1, 2), (2, 2, 3, 2), (4, 2, 2, 4), (1, 1, 7, 1), (4, 4, 4, 16))
    for kernel in (KERNELS if heads[2] == 1 else ("d64", "d128"))
]


@pytest.mark.parametrize(("kernel", "group", "together", "shares", "in_turns"), PACKED_WALKS)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (70, 0)], ids=["full", "causal", "window"])
def test_packed_sequences_are_walked_over_one_by_one(kernel, window, group, together, shares, in_turns):
    """Tiles lie in their sequences, no two of which share a query tile, and turns follow the order of fetching.

    Programs that share a group walk over heads of their own, as if each had a K/V head, and hand dK and dV on.
    """
    module, block_m, keys, multiply = KERNELS[kernel]
    heads_kv = 3 * shares
    sequences = order(PLACES, window[0], block_m, keys, heads_kv)
    tokens_q, tokens_k = (3 + sum(place[side] + 3 for place in PLACES) for side in range(2))
    said: dict[tuple[int, int], int] = {}

    def walk_of() -> _PackedWalk:
        return _PackedWalk(
            sequences, window, block_m, keys, group, together, (tokens_q, tokens_k), said, shares, in_turns
        )

    expected: list[tuple[int, tuple[int, int], int]] = []
    key_tiles: list[tuple[int, int, int, int]] = []  # head, number, where the sequence ends and where its keys start
    owners: dict[int, tuple[int, int]] = {}
    for end, tiles, queries, seen, end_q, end_k, first_tile in sequences:
        span = span_of(queries, seen, window[0], window[1], block_m, keys)
        before = end - heads_kv * tiles
        listed = [*range(-(-seen // keys) - tiles, -(-seen // keys))]
        turns = [range(head, min(head + in_turns, heads_kv)) for head in range(0, heads_kv, in_turns)]
        in_order = [(head, n) for heads in turns for n in listed for head in heads]
        assert len(in_order) == end - before
        for head, n in in_order:
            key_tiles.append((head, n, end_k, end_k - seen))
            assert span.first(n) < span.end(n)
            for walked in range(0, group, together):
                for m in range(span.end(n) - 1, span.first(n) - 1, -1):
                    for g in range(walked + together - 1, walked - 1, -1):
                        tile = (first_tile + m) * heads_kv * group + head * group + g
                        expected.append((head * group + g, (end_q - queries + m * block_m, end_q), tile))
                        assert owners.setdefault(tile, (end_q, queries)) == (end_q, queries)
    loader = walk_of()
    loaded = loader.run(module, load_partition, 2 if kernel == "d256" else 1)
    assert loaded == [(head, place) for head, place, _ in expected]
    assert loader.loaded["do_desc"] == loaded
    assert loader.loaded["stats_desc"] == [2 * block_m * tile for *_, tile in expected]

    writers = [walk_of() for _ in range(2)]
    adds = [walk.run(module, write_partition, w, 2 if kernel == "d256" else 1) for w, walk in enumerate(writers)]
    if kernel == "d256":
        assert adds == [[2 * tile + w for *_, tile in expected] for w in range(2)]
    else:
        assert adds == [[tile for *_, tile in expected[w::2]] for w in range(2)]
    for name, arguments in multiply:
        steps = walk_of().run(module, getattr(module, name), *arguments)
        assert [i for i, *_ in steps] == [*range(len(expected))]
    if module is backward_gluon_sm90:
        check_shares(loader, key_tiles, keys, (tokens_q // block_m + len(PLACES), tokens_k // keys + len(PLACES)))


def check_shares(
    loader: _PackedWalk, key_tiles: list[tuple[int, int, int, int]], keys: int, tiles: tuple[int, int]
) -> None:
    """Keys are those of the K/V head; of all shares the last one stores, and what they hand on has a place of its own.

    Args:
        loader: what loaded the key tiles.
        key_tiles: K/V heads, of which each share counts as one, numbers, and where sequences end and start.
        keys: of a key tile.
        tiles: query tiles and key tiles of a head that there is room for.
    """
    a, shares = loader.a, loader.a.SHARES
    places = [(head // shares, (first + n * keys + w * 64, end)) for head, n, end, first in key_tiles for w in (0, 1)]
    assert loader.keys_loaded == places
    if shares == 1:
        return
    query_tiles, room = tiles[0] * a.heads, tiles[1] * a.heads_kv // shares
    passed = _Passed(range(query_tiles + 1, query_tiles + 1 + room))
    a.D = a.DV = 64
    a.shares_ptr = 0
    for t, (head, n, _, _) in enumerate(key_tiles):
        passed.on(a, Int32(head), n, n * keys, t)
    assert len(passed.raised) == len(key_tiles) // shares
    assert set(passed.raised.values()) == {8 * (shares - 1)}, "two key tiles have the same counter"
    assert len(passed.sums) == 4 * len(passed.raised)
    assert max(passed.sums) + 64 * 64 <= room * keys * 2 * 64
    stored = []
    for head, n, end, first in key_tiles:
        if head % shares == 0:
            parts = [[f"{name} {share}" for share in range(head, head + shares)] for name in ("dk", "dv")]
            stored += [(end, head // shares, FAR.value - end + first + n * keys, w, *parts) for w in range(2)]
    assert sorted(passed.stored) == sorted(stored)
