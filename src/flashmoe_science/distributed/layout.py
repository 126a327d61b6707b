"""Which tokens each rank holds, and which keys a span of queries needs. No tensor, no collective."""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InputError, shown

Span = tuple[int, int]  # the first token and the one behind the last

_WHOLE = (1.0, 0.5, 0.25)  # of a rank's work: documents with more of it are split; the first that balances ranks counts
_BALANCED = 1.03  # the most work of a rank, over the mean


@dataclass(frozen=True)
class Layout:
    """Which spans of tokens each rank holds, in the order in which it holds them. All hold as many tokens."""

    tokens: int  # of all ranks
    held: tuple[tuple[Span, ...], ...]  # by rank

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.held)

    def of_ranks(self) -> list[Span]:
        """Return the spans of rank 0, then those of rank 1, and so on."""
        return [span for spans in self.held for span in spans]

    def of_tokens(self) -> list[Span]:
        """Return where the spans lie among the tokens of rank 0, then rank 1, and so on, in the order of tokens."""
        ends = itertools.accumulate((end - start for start, end in self.of_ranks()), initial=0)
        return [place for _, place in sorted(zip(self.of_ranks(), itertools.pairwise(ends), strict=True))]


def straight_layout(tokens: int, ranks: int) -> Layout:
    """Give each rank one span. Raises ``InputError`` where the tokens cannot be split so."""
    _check_split(tokens, ranks, "the number of ranks")
    own = tokens // ranks
    return Layout(tokens, tuple(((rank * own, (rank + 1) * own),) for rank in range(ranks)))


def zigzag_layout(tokens: int, ranks: int, parts: int = 1) -> Layout:
    """Give each rank one chunk from the front and one from the back: all have the same causal work.

    With ``parts``, as many ranks hold together what one holds else, as ``split_layout`` says. Raises ``InputError``
    where the tokens cannot be split so.
    """
    odd = parts % 2  # an even number of parts splits no part between the two chunks
    _check_split(tokens, ranks * parts * (1 + odd), f"{'twice ' * odd}the number of ranks")
    return split_layout(Layout(tokens, tuple(_zigzag((0, tokens), ranks, rank) for rank in range(ranks))), parts)


def split_layout(layout: Layout, parts: int) -> Layout:
    """Split what each rank holds among as many ranks, in the order in which it holds it. All get as many tokens."""
    own = layout.tokens // layout.ranks // parts
    cuts = [(part * own, part * own + own) for part in range(parts)]
    return Layout(layout.tokens, tuple(_cut_out(spans, cut) for spans in layout.held for cut in cuts))


def _cut_out(spans: Sequence[Span], cut: Span) -> tuple[Span, ...]:
    """Return which tokens lie within ``cut`` where spans lie one behind the other."""
    found, place = [], 0
    for start, end in spans:
        first, last = max(start, start + cut[0] - place), min(end, start + cut[1] - place)
        found += [(first, last)] if first < last else []
        place += end - start
    return tuple(found)


def _zigzag(span: Span, parts: int, part: int) -> tuple[Span, ...]:
    """Return the chunk from the front and the one from the back that are a part of a span, as one if they touch."""
    start, size = span[0], span[1] - span[0]
    front, back = (
        (start + size * number // (2 * parts), start + size * (number + 1) // (2 * parts))
        for number in (part, 2 * parts - 1 - part)
    )
    return ((front[0], back[1]),) if front[1] == back[0] else (front, back)


def _check_split(tokens: int, parts: int, what: str) -> None:
    if type(tokens) is not int or tokens < 0:
        raise InputError(f"the number of tokens must be an integer, 0 or more, got {shown(tokens)}")
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
class Pieces:
    """Parts of documents as one packed call."""

    starts_q: tuple[int, ...]  # where documents start in the queries, and where the last one ends
    starts_k: tuple[int, ...]  # likewise in the keys
    keys: tuple[Span, ...]  # of each document

    @property
    def longest(self) -> tuple[int, int]:
        """Return the queries and the keys of the longest document."""
        return _longest(self.starts_q), _longest(self.starts_k)


def _longest(starts: Sequence[int]) -> int:
    return max((end - start for start, end in itertools.pairwise(starts)), default=0)


@dataclass(frozen=True)
class PackedLayout:
    """How a packed batch is split.

    Spans of a rank are whole documents first, then parts of documents: the first part of each, then the second of
    each, and so on.
    """

    starts: tuple[int, ...]  # where documents start in the batch, and where the last one ends
    layout: Layout
    rounds: tuple[tuple[int, ...], ...]  # by rank: whole documents, first parts, second parts, and so on

    @property
    def longest(self) -> int:
        """Return the tokens of the longest document."""
        return _longest(self.starts)

    @functools.cached_property
    def sent(self) -> int:
        """Return how many tokens the rank holds that has the most in parts of documents: so many each rank sends."""
        return max(sum(end - start for start, end in self.parts(rank)) for rank in range(self.layout.ranks))

    @functools.cached_property
    def keeps(self) -> bool:
        """Return whether ranks keep the keys that come: of a causal call, no rank needs more than it has tokens."""
        ranks = range(self.layout.ranks)
        needed = (self.pieces(self.parts(rank), causal=True, window=(-1, -1)).starts_k[-1] for rank in ranks)
        return max(needed) * len(ranks) <= self.layout.tokens

    def parts(self, rank: int) -> tuple[Span, ...]:
        """Return the parts of documents that a rank holds."""
        return self.layout.held[rank][self.rounds[rank][0] :]

    def arrivals(self, keys: Span) -> list[Span]:
        """Return where keys of a split document lie, in their order, among what all ranks sent, by rank."""
        number = bisect.bisect_right(self._sent_spans, keys[0], key=lambda span: span[0]) - 1
        found = []
        for start, end, place in itertools.takewhile(lambda span: span[0] < keys[1], self._sent_spans[number:]):
            first, last = max(start, keys[0]), min(end, keys[1])
            found.append((place + first - start, place + last - start))
        return found

    @functools.cached_property
    def _sent_spans(self) -> list[tuple[int, int, int]]:
        """Return parts of documents by their start, and where they lie among what all ranks sent."""
        found = []
        for rank in range(self.layout.ranks):
            place = rank * self.sent
            for start, end in self.parts(rank):
                found.append((start, end, place))
                place += end - start
        return sorted(found)

    def pieces(self, spans: Sequence[Span], *, causal: bool, window: tuple[int, int]) -> Pieces:
        """Return the packed call of spans, each of one document."""
        keys = [keys_of(span, self._document(span), causal=causal, window=window) for span in spans]
        return Pieces(
            tuple(itertools.accumulate((end - start for start, end in spans), initial=0)),
            tuple(itertools.accumulate((each.end - each.start for each in keys), initial=0)),
            tuple((each.start, each.end) for each in keys),
        )

    def _document(self, span: Span) -> Span:
        behind = bisect.bisect_right(self.starts, span[0])
        return self.starts[behind - 1], self.starts[behind]


def plan_straight(lengths: Sequence[int], ranks: int) -> PackedLayout:
    """Give each rank one span of the batch. Raises ``InputError`` as ``plan_documents``."""
    starts = _starts_of(lengths, ranks)
    return PackedLayout(starts, straight_layout(starts[-1], ranks), ((),) * ranks)


def plan_documents(lengths: Sequence[int], ranks: int, parts: int = 1) -> PackedLayout:
    """Give ranks whole documents, so that all have as many tokens and about as much causal work.

    Documents are split where ranks would have unlike work else: the longest ones, each rank with a chunk from the front
    and one from the back. So are those that find no room, each rank with what it has room for.

    Args:
        lengths: of the documents, in tokens.
        ranks: among which they are split.
        parts: in which what a rank holds can be split again, by ``split_layout``.

    Raises:
        InputError: a length is no integer above 0, or their sum is no multiple of ``ranks * parts``.
    """
    starts = _starts_of(lengths, ranks * parts)
    for whole in _WHOLE:
        held = _place(_cut(starts, ranks, whole), starts[-1], ranks)
        work = [sum(_causal_work(span, starts) for span in spans) for spans in held]
        if max(work) * ranks <= _BALANCED * sum(work):
            break
    ordered = [_in_rounds(spans, starts) for spans in held]
    layout = Layout(starts[-1], tuple(spans for spans, _ in ordered))
    return PackedLayout(starts, layout, tuple(rounds for _, rounds in ordered))


def _causal_work(span: Span, starts: Sequence[int]) -> int:
    """Return about twice how many pairs of query and key a span of one document has."""
    first = starts[bisect.bisect_right(starts, span[0]) - 1]
    return (span[1] - first) ** 2 - (span[0] - first) ** 2


def _cut(starts: Sequence[int], ranks: int, whole: float) -> list[tuple[int, tuple[Span, ...]]]:
    """Return documents and equal shares of long ones, with their work, those with the most first."""
    documents = list(itertools.pairwise(starts))
    largest = sum((end - start) ** 2 for start, end in documents) / ranks * whole
    found = []
    for start, end in documents:
        work, most = (end - start) ** 2, min(ranks, (end - start) // 2)
        parts = max(1, min(most, math.ceil(work / largest)))
        found += [(work // parts, _zigzag((start, end), parts, part)) for part in range(parts)]
    return sorted(found, key=lambda part: (-part[0], part[1]))


def _place(parts: Sequence[tuple[int, tuple[Span, ...]]], tokens: int, ranks: int) -> list[list[Span]]:
    """Give each part to the rank with the least work that has room, and cut what finds none; return spans by rank."""
    room = [tokens // ranks] * ranks
    held: list[list[Span]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    homeless: list[Span] = []
    sizes = [sum(end - start for start, end in spans) for _, spans in parts]
    smallest = [*itertools.accumulate(reversed(sizes), min)][::-1]  # of a part and those after it
    for (work, spans), size, least in zip(parts, sizes, smallest, strict=True):
        full = []
        while heap and room[heap[0][1]] < size:
            entry = heapq.heappop(heap)
            if room[entry[1]] >= least:
                full.append(entry)
        if heap:
            load, rank = heap[0]
            held[rank] += spans
            room[rank] -= size
            heapq.heapreplace(heap, (load + work, rank))
        else:
            homeless += spans
        for entry in full:
            heapq.heappush(heap, entry)
    for first, end in homeless:
        start = first
        while start < end:
            rank = max(range(ranks), key=lambda rank: (room[rank], -rank))
            size = min(room[rank], end - start)
            held[rank].append((start, start + size))
            room[rank] -= size
            start += size
    return held


def _in_rounds(held: Sequence[Span], starts: Sequence[int]) -> tuple[tuple[Span, ...], tuple[int, ...]]:
    """Return the spans of a rank in the order of ``PackedLayout``, and how many are in each round."""
    rounds: list[list[Span]] = [[]]
    last, count = -1, 0  # where the document of the last part starts, and how many parts of it came
    for span in _joined(held, starts):
        behind = bisect.bisect_right(starts, span[0])
        document = (starts[behind - 1], starts[behind])
        count = count + 1 if document[0] == last else 1
        last = document[0]
        number = 0 if span == document else count
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(span)
    return tuple(itertools.chain(*rounds)), tuple(map(len, rounds))


def _joined(held: Sequence[Span], starts: Sequence[int]) -> list[Span]:
    """Return spans in their order; parts of a document that touch are one."""
    joined: list[Span] = []
    for span in sorted(held):
        if joined and joined[-1][1] == span[0] and starts[bisect.bisect_left(starts, span[0])] != span[0]:
            joined[-1] = (joined[-1][0], span[1])
        else:
            joined.append(span)
    return joined


def _starts_of(lengths: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return where documents start in a batch, and where the last one ends."""
    if not isinstance(lengths, Sequence) or isinstance(lengths, str):  # type: ignore[redundant-expr, unreachable] # callers may pass what types rule out
        raise InputError(f"lengths must be a list of integers on the host, got {type(lengths).__name__}")
    if not lengths or any(type(length) is not int or length < 1 for length in lengths):
        raise InputError(f"lengths must be integers above 0, one or more, got {list(lengths)[:8]}")
    starts = (0, *itertools.accumulate(lengths))
    if missing := -starts[-1] % ranks:
        raise InputError(
            f"the tokens of all documents must be a multiple of {ranks}, the number of ranks, got {starts[-1]}",
            hint=f"append a document of padding, to {starts[-1] + missing} tokens in all",
        )
    return starts
