"""Which cases of a run differ in one size alone: the lines along which one sees how time grows.

Nothing here knows what an operator's sizes mean: a size is an integer of its problem.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..records.evidence import CaseRecord

FEWEST_CASES = 3  # two points are a slope that nothing contradicts


@dataclass(frozen=True)
class Sweep:
    """Cases along which one size grows and, but for ``along``, nothing else changes."""

    keys: tuple[str, ...]  # the size; several keys where they are equal, e.g. seqlen_q and seqlen_k
    along: tuple[str, ...]  # the one other size that changes with it, or nothing
    fixed: Mapping[str, Any]  # what the cases share, of all that differs anywhere in the run
    cases: tuple[CaseRecord, ...]  # by size

    @property
    def sizes(self) -> list[int]:
        """The size of each case."""
        return [int(case.problem[self.keys[0]]) for case in self.cases]

    @property
    def along_sizes(self) -> list[int]:
        """What the other size is in each case; empty where none changes."""
        return [int(case.problem[self.along[0]]) for case in self.cases] if self.along else []


def find_sweeps(cases: Sequence[CaseRecord]) -> list[Sweep]:
    """Return the sweeps among ``cases``, those of one size alone first, then the longer ones.

    Where a suite changes two sizes together (more positions, fewer sequences), that is a sweep of the one with which
    the work grows, unless its cases are part of a sweep of that size alone.
    """
    same = _sizes(cases)
    sizes = [*same, *_moving_together(cases, same)]
    found = [sweep for size in sizes for sweep in _sweeps(cases, same, size, ())]
    alone = {(sweep.keys, case.name) for sweep in found for case in sweep.cases}
    seen: set[frozenset[str]] = set()
    for size in sizes:
        for other in sizes:
            for sweep in _sweeps(cases, same, size, other) if not set(size) & set(other) else ():
                names = frozenset(case.name for case in sweep.cases)
                if names not in seen and not all((size, name) in alone for name in names):
                    seen.add(names)
                    found.append(sweep)
    return sorted(found, key=lambda sweep: (bool(sweep.along), -len(sweep.cases)))  # stable: then in the order of keys


def _sizes(cases: Sequence[CaseRecord]) -> list[tuple[str, ...]]:
    """Return the sizes that differ between the cases; keys that are equal in every case are one size."""
    columns: dict[tuple[int, ...], list[str]] = {}
    for key in _shared_keys(cases):
        column = [case.problem[key] for case in cases]
        if all(isinstance(value, int) and not isinstance(value, bool) for value in column):
            columns.setdefault(tuple(column), []).append(key)
    return [tuple(keys) for column, keys in columns.items() if len(set(column)) > 1]


def _moving_together(cases: Sequence[CaseRecord], sizes: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return pairs of sizes that are equal in some cases alone, but along a line: of self-attention among others."""
    pairs = []
    for one, two in itertools.combinations(sizes, 2):
        equal = {case.problem[one[0]] for case in cases if case.problem[one[0]] == case.problem[two[0]]}
        if len(equal) >= FEWEST_CASES:
            pairs.append((*one, *two))
    return pairs


def _shared_keys(cases: Sequence[CaseRecord]) -> list[str]:
    return [key for key in cases[0].problem if all(key in case.problem for case in cases)] if cases else []


def _sweeps(
    cases: Sequence[CaseRecord], sizes: Sequence[tuple[str, ...]], size: tuple[str, ...], other: tuple[str, ...]
) -> Iterable[Sweep]:
    """Yield the sweeps of ``size`` with ``other`` changing along (nothing: no other)."""
    groups: dict[Hashable, list[CaseRecord]] = {}
    for case in cases:
        if len({case.problem[key] for key in size}) > 1:
            continue
        rest = {key: value for key, value in case.problem.items() if key not in (*size, *other)}
        groups.setdefault(repr(sorted(rest.items())), []).append(case)
    for group in groups.values():
        ordered = sorted({case.problem[size[0]]: case for case in reversed(group)}.items())  # the first of each size
        line = tuple(case for _, case in ordered)
        if len(line) < FEWEST_CASES:
            continue
        if other and not _is_line(group, line, other):
            continue
        yield Sweep(size, other, _fixed(cases, line[0], sizes, (*size, *other)), line)


def _is_line(group: Sequence[CaseRecord], line: Sequence[CaseRecord], other: tuple[str, ...]) -> bool:
    """Return whether two sizes change in step and the work grows: a grid of both is no line."""
    grows = all(one.work.flops < two.work.flops for one, two in itertools.pairwise(line))
    return len(line) == len(group) == len({case.problem[other[0]] for case in group}) and grows


def _fixed(
    cases: Sequence[CaseRecord], case: CaseRecord, sizes: Sequence[tuple[str, ...]], moving: tuple[str, ...]
) -> dict[str, Any]:
    """Return what tells the cases of a sweep from the others of the run."""
    repeated = {key for keys in sizes for key in keys[1:]}  # equal to the first of its size
    return {
        key: case.problem[key]
        for key in _shared_keys(cases)
        if key not in moving and key not in repeated and any(other.problem[key] != case.problem[key] for other in cases)
    }
