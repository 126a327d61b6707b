"""Which cases run with the newest Triton alone is marked as asked, and no case is lost."""

from __future__ import annotations

import pytest

from .one_triton import all_but, all_but_each


def marked(cases) -> list[bool]:
    return [bool(getattr(case, "marks", ())) for case in cases]


def test_all_but_those_that_are_named_are_marked():
    cases = all_but(["one-row", "one-key", "causal"], "one-key", "causal")
    assert marked(cases) == [True, False, False]
    assert (cases[0].values, cases[1:]) == (("one-row",), ["one-key", "causal"])
    with pytest.raises(AssertionError, match="one-column: no case has this name"):
        all_but(["one-row"], "one-column")


def test_all_but_each_third_are_marked():
    """Values of several parameters stay apart."""
    cases = all_but_each([(1, 2), (3, 4), (5, 6), (7, 8)], 3)
    assert marked(cases) == [False, True, True, False]
    assert cases[1].values == (3, 4)
