"""An operator whose baselines misbehave, for the worker processes that try them."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from .simulated import Doubling, make_baseline


def _twice(x):
    return 2 * x


def _segfault() -> NoReturn:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


good = make_baseline("good", _twice)
absent = make_baseline("absent", error=ImportError("no module named absent"))
crashing = make_baseline("crashing")
crashing.load = _segfault
broken = make_baseline("broken", error=ValueError("bad build"))
last = make_baseline("last", _twice)


class Contest(Doubling):
    name = "tests.proof.baseline_operator"


OPERATOR = Contest([good, absent, crashing, broken, last])
