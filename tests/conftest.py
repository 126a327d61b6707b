"""What every test gets: fixed seeds, poisoned fresh memory, and GPU tests that say why they were skipped.

A test that asks for ``plant`` can change a kernel's source.
"""

from __future__ import annotations

import ast
import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flashmoe_science.attention import api as attention_api
from flashmoe_science.attention.decode import api as cache_api, calls as cache_calls
from flashmoe_science.attention.forward import calls as attention_calls

from . import required
from .gpu_record import GpuRecord


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-record",
        type=Path,
        metavar="FOLDER",
        help="write which tests passed, failed and were skipped on this GPU to a new JSON file in FOLDER",
    )


def pytest_configure(config: pytest.Config) -> None:
    share_cores()
    config.pluginmanager.register(required, "required")
    folder = config.getoption("--gpu-record")
    if folder is None or hasattr(config, "workerinput"):  # with pytest-xdist the controller sees every outcome
        return
    if not torch.cuda.is_available():
        raise pytest.UsageError("--gpu-record needs a GPU, and torch sees none\nhint: `flashmoe doctor` says more")
    config.pluginmanager.register(GpuRecord(config.rootpath / folder, describe_environment), "gpu-record")


def share_cores() -> None:
    """Let parallel test processes, and what they start, use no more threads together than there are cores."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        threads = max(1, (os.cpu_count() or 1) // workers)
        torch.set_num_threads(threads)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def describe_environment() -> dict[str, Any]:
    from flashmoe_science.proof.measure.environment import environment

    return environment().model_dump(mode="json")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and torch sees none here"))


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Give every test the same random numbers, whichever tests ran before it."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poison_fresh_memory(request, monkeypatch) -> None:
    """Fill fresh memory with NaN, so an output element no one wrote fails its test."""
    prepared = (attention_api._prepared, cache_api._prepared)
    for calls in prepared:  # they hold the function that allocates, poisoned or not
        calls.clear()
    if request.node.get_closest_marker("unpoisoned"):
        return
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    for module in (attention_calls, cache_calls):
        monkeypatch.setattr(module, "_empty_strided_cuda", poisoned(module._empty_strided_cuda))


def poisoned(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return what ``empty`` returns, full of NaN."""

    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = empty(*args, **kwargs)
        if out.is_floating_point():
            with torch.no_grad():  # torch.compile asks for leaves that require grad
                out.fill_(math.nan)
        return out

    return filled


@pytest.fixture
def plant() -> Iterator[Callable[[Any], None]]:
    """Let a jitted function read as if it had one statement more."""
    from flashmoe_science.gpu import identity
    from flashmoe_science.proof.judge import staleness as changes

    made: tuple[Any, ...] = (identity._describe, identity._code_identity, changes._identities_now)

    def forget(*more: Any) -> None:
        for cached in (*made, *more):
            cached.cache_clear()

    def plant(function: Any) -> None:
        python = function.fn
        definitions: Any = identity._definitions(str(sys.modules[python.__module__].__file__))
        definitions[python.__name__, python.__code__.co_firstlineno].body.append(ast.Pass())
        forget()

    yield plant
    forget(identity._definitions)
