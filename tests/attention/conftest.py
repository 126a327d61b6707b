"""What tests of attention share: a child process that runs kernels in Triton's interpreter, and edited sources."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from flashmoe_science.gpu import dependencies

from .cases import Case, Gradients, Ordering, VarlenCase


@pytest.fixture(scope="session")
def interpreted():
    """Return a check of one case in a child process, which Triton's interpreter needs (it is chosen at import)."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.attention.interpreted"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip

    def check(case: Case | VarlenCase | Gradients | Ordering) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(repr(case) + "\n")
        child.stdin.flush()
        answer = child.stdout.readline().strip()
        assert answer == "right", answer

    yield check
    child.communicate(timeout=30)


@pytest.fixture
def edit(monkeypatch):
    """Let a module of the package read as if some text in it were another."""
    from flashmoe_science.gpu import fingerprint, untold

    read, texts = dependencies.read_source, dict[str, list[tuple[str, str]]]()
    caches: tuple[Any, ...] = (
        dependencies.trace, dependencies._load, fingerprint.host_code, fingerprint.kernel_code,
        untold.asks_the_machine, untold.looks_up,
    )  # fmt: skip

    def forget():
        for cached in caches:
            cached.cache_clear()

    def read_edited(name):
        text, package = read(name)
        for old, new in texts.get(name.removeprefix("flashmoe_science."), ()):
            assert old in text, old
            text = text.replace(old, new)
        return text, package

    def edit(module, old, new):
        texts.setdefault(module, []).append((old, new))
        forget()

    monkeypatch.setattr(dependencies, "read_source", read_edited)
    yield edit
    forget()
