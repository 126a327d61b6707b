"""Which cases of a kernel run with the newest Triton alone.

Another version of Triton may fail to compile a kernel, or translate an operation of its language otherwise, but hardly
for one size or tile among many. So with the oldest version every kernel is compiled for every architecture that it is
for, with some of its tiles, and interpreted in a few cases that have each of its ways: every feature and activation,
both masks, both widths of elements. With the newest version every case runs. ``test_one_triton.py`` says what must be
left.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest


def all_but(cases: Iterable[Any], *names: str) -> list[Any]:
    """Return cases as parameters, marked ``one_triton`` but for those with one of ``names``.

    The name of a case is its ``why``; of one that has none it is its text.
    """
    cases = list(cases)
    named = [getattr(case, "why", str(case)) for case in cases]
    for name in names:
        assert name in named, f"{name}: no case has this name"
    return [case if name in names else _mark(case) for case, name in zip(cases, named, strict=True)]


def all_but_some_with(cases: Iterable[Any], properties: Callable[[Any], Iterable[Hashable]]) -> list[Any]:
    """Return cases as parameters, marked ``one_triton`` but for some that have every property of all of them.

    Taken is, time and again, the case with the most properties that are still lacking, the first among equals: so
    another case among them may change which are left, and never what they show.
    """
    cases = list(cases)
    has = [set(properties(case)) for case in cases]
    lacking, left = set[Hashable]().union(*has), set[int]()
    while lacking:
        most = max(range(len(cases)), key=lambda place: len(has[place] & lacking))
        left.add(most)
        lacking -= has[most]
    return [case if place in left else _mark(case) for place, case in enumerate(cases)]


def _mark(case: Any) -> Any:
    """Return a case, or the values of several parameters, as a parameter that is marked."""
    return pytest.param(*case if isinstance(case, tuple) else (case,), marks=pytest.mark.one_triton)
