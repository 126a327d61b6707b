"""Which cases of a kernel run with the newest Triton alone.

Another version of Triton may fail to compile a kernel, or translate an operation of its language otherwise, but hardly
for one size or tile among many. So with the oldest version every kernel is compiled for every architecture, with some
of its tiles, and interpreted in a case or two. With the newest version every case runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def all_but(cases: Iterable[Any], *names: str) -> list[Any]:
    """Return cases as parameters, marked ``one_triton`` but for those whose text starts with one of ``names``."""
    cases = list(cases)
    for name in names:
        assert any(str(case).startswith(name) for case in cases), f"{name}: no case has this name"
    return [case if str(case).startswith(names) else _mark(case) for case in cases]


def all_but_each(cases: Iterable[Any], n: int) -> list[Any]:
    """Return cases as parameters, marked ``one_triton`` but for each n-th, from the first on."""
    return [_mark(case) if number % n else case for number, case in enumerate(cases)]


def _mark(case: Any) -> Any:
    """Return a case, or the values of several parameters, as a parameter that is marked."""
    return pytest.param(*case if isinstance(case, tuple) else (case,), marks=pytest.mark.one_triton)
