"""Kernels in Gluon as Python runs them: their own arithmetic, with what needs a GPU left out."""

from __future__ import annotations

from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

from flashmoe_science.attention.backward.primitives_sm90 import Span


class Int32(int):
    """An integer as Triton has it: division truncates towards zero, and what passes 32 bits is an error."""

    def __new__(cls, value: int) -> Int32:  # noqa: PYI034 - no class is made of it
        assert -(2**31) <= value < 2**31
        return super().__new__(cls, value)

    def __add__(self, other: int) -> Int32:
        return Int32(int(self) + int(other))

    def __sub__(self, other: int) -> Int32:
        return Int32(int(self) - int(other))

    def __rsub__(self, other: int) -> Int32:
        return Int32(int(other) - int(self))

    def __mul__(self, other: int) -> Int32:
        return Int32(int(self) * int(other))

    def __floordiv__(self, other: int) -> Int32:
        return Int32(int(int(self) / int(other)))

    def to(self, _dtype: object) -> int:
        return int(self)  # of 64 bits

    __radd__, __rmul__ = __add__, __mul__


def plain(function: Any, **names: Any) -> Any:
    """Return a function of a kernel as Python runs it."""
    names = {"gl": SimpleNamespace(minimum=min, maximum=max), "rematerialize": lambda x: x, "ROWS": 64, **names}
    return FunctionType(function.fn.__code__, {**function.fn.__globals__, **names}, argdefs=function.fn.__defaults__)


def span_of(seqlen_q: int, seqlen_k: int, left: int, right: int, block_m: int, keys: int) -> Any:
    """Return a ``Span`` whose methods run in Python; -1 for no bound."""
    span = SimpleNamespace(
        seqlen_q=Int32(seqlen_q), seqlen_k=Int32(seqlen_k), tiles_m=Int32(-(-seqlen_q // block_m)),
        window_left=Int32(max(left, 0)), window_right=Int32(max(right, 0)),
        BOUND_LEFT=left >= 0, BOUND_RIGHT=right >= 0, BLOCK_M=block_m, KEYS=keys,
    )  # fmt: skip
    for name in ("earliest", "latest", "first", "end", "first_key_tile", "is_whole", "edge"):
        setattr(span, name, MethodType(plain(getattr(Span, name)), span))
    return span


class Nothing:
    """Takes part in everything, and does nothing."""

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_arguments: object, **_options: object) -> Nothing:
        return self

    def __add__(self, _other: object) -> Nothing:
        return self

    def __lt__(self, _other: object) -> bool:
        return False

    __radd__ = __mul__ = __rmul__ = __and__ = __rand__ = __add__
    __gt__ = __lt__


def partition(function: Any, **names: Any) -> Any:
    """Return a partition of a kernel as Python runs it: ``names`` and numbers are as they are, all else is nothing."""
    known: dict[str, Any] = {"range": range, **names}
    for name, value in function.fn.__globals__.items():
        number = getattr(value, "value", value)  # of a gl.constexpr
        known.setdefault(name, number if isinstance(number, int) else NOTHING)
    return FunctionType(function.fn.__code__, known)


NOTHING = Nothing()
