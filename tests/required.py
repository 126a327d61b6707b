"""What some tests need and not every machine has. They are skipped without it, or fail where it is required.

``FLASHMOE_REQUIRE=nvcc,sshd`` says what has to be here: then a green run has really tested it.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import NoReturn

import pytest

NAMES = ("browser", "nvcc", "sshd", "torchtitan", "trl")
VARIABLE = "FLASHMOE_REQUIRE"


def required() -> set[str]:
    """Return what has to be here."""
    return {name.strip() for name in os.environ.get(VARIABLE, "").split(",")} - {""}


def missing(name: str, reason: str) -> NoReturn:
    """Skip the test for want of ``name``, or let it fail where that is required."""
    assert name in NAMES, name
    if name in required():
        pytest.fail(f"{VARIABLE} has {name}, and this test {reason}", pytrace=False)
    pytest.skip(reason)


def import_needed(module: str, name: str, reason: str) -> ModuleType:
    """Return a module that the tests of ``name`` import, or end the test as ``missing`` does."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        missing(name, reason)


def pytest_configure() -> None:
    if unknown := required() - set(NAMES):
        raise pytest.UsageError(f"{VARIABLE}: expected some of {', '.join(NAMES)}, got {', '.join(sorted(unknown))}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Obey ``@pytest.mark.needs(name, here, reason)``."""
    for mark in item.iter_markers("needs"):
        name, here, reason = mark.args
        if not here:
            missing(name, reason)
