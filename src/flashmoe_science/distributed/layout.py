"""Which tokens each rank holds, and which keys a span of queries needs. No tensor, no collective."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InputError

Span = tuple[int, int]  # the first token and the one behind the last


@dataclass(frozen=True)
class Layout:
    """Tokens in equal chunks, and the chunks of each rank in the order in which it holds them."""

    tokens: int  # of all ranks
    chunks: tuple[tuple[int, ...], ...]  # by rank, rising

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.chunks)

    @property
    def chunk(self) -> int:
        """Return the tokens of a chunk."""
        return self.tokens // sum(map(len, self.chunks))

    def spans(self, rank: int) -> list[Span]:
        """Return the spans of tokens of a rank. Chunks that follow one another are one span."""
        found: list[Span] = []
        for number in self.chunks[rank]:
            start, end = number * self.chunk, (number + 1) * self.chunk
            if found and found[-1][1] == start:
                start = found.pop()[0]
            found.append((start, end))
        return found

    def places(self) -> list[int]:
        """Return, for each chunk of the sequence, its place among the chunks of rank 0, then rank 1, and so on."""
        order = [number for held in self.chunks for number in held]
        return sorted(range(len(order)), key=order.__getitem__)


def straight_layout(tokens: int, ranks: int) -> Layout:
    """Give each rank one span. Raises ``InputError`` where the tokens cannot be split so."""
    _check_split(tokens, ranks, "the number of ranks")
    return Layout(tokens, tuple((rank,) for rank in range(ranks)))


def zigzag_layout(tokens: int, ranks: int) -> Layout:
    """Give each rank one chunk from the front and one from the back: all have the same causal work.

    Raises ``InputError`` where the tokens cannot be split so.
    """
    _check_split(tokens, 2 * ranks, "twice the number of ranks")
    return Layout(tokens, tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks)))


def balanced_layout(work: Sequence[int], tokens: int, ranks: int) -> Layout:
    """Give each rank as many chunks as the others: the chunk with the most work first, to the rank with the least.

    Args:
        work: of each chunk, any unit. Their number is a multiple of ``ranks``.
        tokens: of all chunks.
        ranks: among which they are shared.
    """
    most = len(work) // ranks
    held = [list[int]() for _ in range(ranks)]
    load = [(0, rank) for rank in range(ranks)]  # a heap: of ranks with room
    for number in sorted(range(len(work)), key=lambda number: (-work[number], number)):
        least, rank = load[0]
        held[rank].append(number)
        if len(held[rank]) < most:
            heapq.heapreplace(load, (least + work[number], rank))
        else:
            heapq.heappop(load)
    return Layout(tokens, tuple(tuple(sorted(chunks)) for chunks in held))


def _check_split(tokens: int, parts: int, what: str) -> None:
    if tokens % parts:
        padded = -(-tokens // parts) * parts
        raise InputError(
            f"the number of tokens must be a multiple of {parts}, {what}, got {tokens}",
            hint=f"pad the sequence to {padded} tokens. Padding at the end changes nothing before it if causal; else "
            "make it a document of its own and use attention_packed",
        )


@dataclass(frozen=True)
class Keys:
    """The keys that a span of queries needs, and the window of a call on these alone."""

    start: int
    end: int
    window: tuple[int, int]


def keys_of(queries: Span, document: Span, *, causal: bool, window: tuple[int, int]) -> Keys:
    """Return the keys of a document that some of its queries see.

    A call aligns the last query with the last key. Where keys reach beyond the queries, the window moves by as much.
    """
    left, right = window[0], 0 if causal else window[1]
    end = document[1] if right < 0 else min(document[1], queries[1] + right)
    start = document[0] if left < 0 else max(document[0], queries[0] - left)
    beyond = end - queries[1]
    return Keys(start, end, (left if left < 0 else left + beyond, right if right < 0 else right - beyond))


@dataclass(frozen=True)
class Piece:
    """A span of a rank's tokens as one packed call: where documents start in its queries, and in its keys."""

    queries: Span
    keys: Span
    starts_q: tuple[int, ...]  # from the first query on
    starts_k: tuple[int, ...]  # from the first key on

    @property
    def longest(self) -> tuple[int, int]:
        """Return the queries and the keys of the longest document."""
        return _longest(self.starts_q), _longest(self.starts_k)


def _longest(starts: Sequence[int]) -> int:
    return max(end - start for start, end in itertools.pairwise(starts))


@dataclass(frozen=True)
class PackedLayout:
    """How a packed batch is split."""

    starts: tuple[int, ...]  # where documents start in the batch, and where the last one ends
    layout: Layout

    @property
    def longest(self) -> int:
        """Return the tokens of the longest document."""
        return _longest(self.starts)

    def pieces(self, rank: int, *, causal: bool, window: tuple[int, int]) -> list[Piece]:
        """Return the packed calls of a rank."""
        return [self._piece(span, causal=causal, window=window) for span in self.layout.spans(rank)]

    def _piece(self, span: Span, *, causal: bool, window: tuple[int, int]) -> Piece:
        starts_q, starts_k = [0], [0]
        first_key = -1
        for document in documents_in(span, self.starts):
            queries = max(span[0], document[0]), min(span[1], document[1])
            keys = keys_of(queries, document, causal=causal, window=window)
            if first_key < 0:
                first_key = keys.start
            starts_q.append(queries[1] - span[0])
            starts_k.append(keys.end - first_key)
        return Piece(span, (first_key, first_key + starts_k[-1]), tuple(starts_q), tuple(starts_k))


def documents_in(span: Span, starts: Sequence[int]) -> list[Span]:
    """Return the documents that have tokens in ``span``. None is empty."""
    first = bisect.bisect_right(starts, span[0]) - 1
    behind = bisect.bisect_left(starts, span[1])
    return list(itertools.pairwise(starts[first : behind + 1]))


def plan_packed(lengths: Sequence[int], ranks: int, chunks: int) -> PackedLayout:
    """Split a packed batch so that all ranks have as many tokens, and about as much causal work.

    Args:
        lengths: of the documents, in tokens.
        ranks: among which they are split.
        chunks: of each rank. 1: each rank has one span.

    Raises:
        InputError: a length is no integer above 0, or the tokens cannot be split so.
    """
    if not lengths or any(type(length) is not int or length < 1 for length in lengths):
        raise InputError(f"lengths must be integers above 0, one or more, got {list(lengths)[:8]}")
    starts = (0, *itertools.accumulate(lengths))
    tokens, parts = starts[-1], ranks * chunks
    if tokens % parts:
        missing = -tokens % parts
        raise InputError(
            f"the tokens of all documents must be a multiple of {parts}, the number of chunks, got {tokens}",
            hint=f"append a document of {missing} tokens of padding",
        )
    if chunks == 1:
        return PackedLayout(starts, straight_layout(tokens, ranks))
    size = tokens // parts
    work = [_causal_work((number * size, (number + 1) * size), starts) for number in range(parts)]
    return PackedLayout(starts, balanced_layout(work, tokens, ranks))


def _causal_work(span: Span, starts: Sequence[int]) -> int:
    """Return about how many pairs of query and key a span has."""
    total = 0
    for start, end in documents_in(span, starts):
        first, last = max(span[0], start) - start, min(span[1], end) - start
        total += (last - first) * (last + first)
    return total
