"""Which cases run in `make test-all` alone.

`make test` compiles each kernel with a few tiles of each architecture and interprets each of its ways once. All rows of
all tables, and more sizes that go the same way, are marked ``exhaustive``; a release runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest


def all_but(cases: Iterable[Any], *names: str) -> list[Any]:
    """Return cases as parameters, marked ``exhaustive`` except those with one of ``names``.

    The name of a case is its ``why``, or its text if it has none.
    """
    cases = list(cases)
    named = [getattr(case, "why", str(case)) for case in cases]
    for name in names:
        assert name in named, f"{name}: no case has this name"
    return [case if name in names else _mark(case) for case, name in zip(cases, named, strict=True)]


def all_but_some_with(cases: Iterable[Any], properties: Callable[[Any], Iterable[Hashable]]) -> list[Any]:
    """Return cases as parameters, marked ``exhaustive`` except some that together have every property.

    Greedy: take the case with the most properties that are still missing, the first among equals, until none is.
    """
    cases = list(cases)
    has = [set(properties(case)) for case in cases]
    missing, left = set[Hashable]().union(*has), set[int]()
    while missing:
        most = max(range(len(cases)), key=lambda place: len(has[place] & missing))
        left.add(most)
        missing -= has[most]
    return [case if place in left else _mark(case) for place, case in enumerate(cases)]


def _mark(case: Any) -> Any:
    """Return a case, or the values of several parameters, as a marked parameter."""
    return pytest.param(*case if isinstance(case, tuple) else (case,), marks=pytest.mark.exhaustive)
