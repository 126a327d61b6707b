"""An operator whose rivals misbehave, for the worker processes that try them."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from .simulated import Doubling, rival


def _twice(x):
    return 2 * x


def _segfault() -> NoReturn:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


good = rival("good", _twice)
absent = rival("absent", error=ImportError("no module named absent"))
crashing = rival("crashing")
crashing.load = _segfault
broken = rival("broken", error=ValueError("bad build"))
last = rival("last", _twice)


class Rivalry(Doubling):
    name = "tests.proof.rival_operator"


OPERATOR = Rivalry([good, absent, crashing, broken, last])
