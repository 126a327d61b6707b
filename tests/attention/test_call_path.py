"""A call of attention enters few files, each from above: first calls and repeated ones, with every way to make one."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashmoe_science import flash_attention, flash_attention_varlen, flash_attention_with_kv_cache
from flashmoe_science.attention import api
from flashmoe_science.attention.backward import autograd as gradients
from flashmoe_science.attention.decode import api as cache_api
from flashmoe_science.attention.forward import calls

from ..call_path import call_path

MOST_FILES = 10
MOST_STAYS = {"first": 20, "later": 12}  # up to the launch; on a CPU the reference has its place
LAUNCH = "reference.py"


class Named(torch.Tensor):
    """A tensor that differs from others in its Python type alone."""


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def batch(**options: Any) -> Callable[[torch.Tensor], Any]:
    k, v = torch.randn(2, 2, 7, 16).half(), torch.randn(2, 2, 7, 16).half()
    return lambda q: flash_attention(q, k, v, **options)


def packed(**options: Any) -> Callable[[torch.Tensor], Any]:
    k, v = torch.randn(7, 4, 16), torch.randn(7, 4, 16)
    lengths = ints(0, 2, 4), ints(0, 3, 7), 2, 4
    return lambda q: flash_attention_varlen(q[0], k, v, *lengths, **options)


def cached(**tensors: Any) -> Callable[[torch.Tensor], Any]:
    caches = torch.randn(2, 9, 2, 16).half(), torch.randn(2, 9, 2, 16).half()
    return lambda q: flash_attention_with_kv_cache(q, *caches, cache_seqlens=ints(3, 5), **tensors)


def new_keys() -> dict[str, torch.Tensor]:
    return {name: torch.randn(2, 2, 1, 16).half() for name in ("k", "v")}


def features() -> dict[str, Any]:
    return {"bias": torch.randn(1, 1, 5, 7), "sinks": torch.zeros(4), "alibi": torch.zeros(4), "window": (3, -1)}


CALLS: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "plain": (batch(), torch.randn(2, 4, 5, 16).half()),
    "features": (batch(**features(), dropout_p=0.1), torch.randn(2, 4, 5, 16).half()),
    "recorded": (batch(), torch.randn(2, 4, 5, 16).half().requires_grad_()),
    "recorded features": (batch(**features()), torch.randn(2, 4, 5, 16).half().requires_grad_()),
    "packed": (packed(), torch.randn(1, 4, 4, 16)),
    "cache": (cached(), torch.randn(2, 4, 1, 16).half()),
    "cache append": (cached(**new_keys()), torch.randn(2, 4, 1, 16).half()),
}


@pytest.fixture(autouse=True)
def _nothing_is_prepared(monkeypatch):
    for module in (api, calls, cache_api, gradients):
        monkeypatch.setattr(module, "_prepared", {})
    monkeypatch.setattr(api, "_last_call", ((), None))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_enters_few_files_and_comes_back_to_few(name):
    call, q = CALLS[name]
    for when, most in MOST_STAYS.items():
        path = call_path(lambda: call(q), q)
        assert len(path.distinct) <= MOST_FILES, path.distinct
        assert path.until(LAUNCH).stays <= most, (when, path.files)


def test_an_operator_describes_the_call_again():
    """A subclass comes by the operator, as graphs do: one more description a call."""
    call, q = batch(softcap=2.0), torch.randn(2, 4, 5, 16).half().as_subclass(Named)
    for _ in MOST_STAYS:
        path = call_path(lambda: call(q), q)
        assert len(path.distinct) <= MOST_FILES, path.distinct
        assert path.until(LAUNCH).stays <= MOST_STAYS["first"], path.files


def test_a_backward_pass_enters_few_files():
    call, q = CALLS["recorded features"]
    for most in MOST_STAYS.values():
        o = call(q)
        path = call_path(lambda o=o: o.sum().backward(), q)  # type: ignore[misc]
        assert len(path.distinct) <= MOST_FILES, path.distinct
        assert path.until(LAUNCH).stays <= most, path.files


def test_a_repeated_call_runs_two_functions_before_its_launch():
    """On a GPU one: keys of CPU tensors need the type of the device."""
    call, q = CALLS["plain"]
    with torch.no_grad():
        call(q)
        key = next(iter(api._prepared))
        api._prepared[key] = lambda *_: None
        path = call_path(lambda: call(q), q)
    assert path.calls <= 2
    assert path.distinct == ("attention/api.py",)


def test_the_counter_counts_returns_and_finds_tensors_in_containers(tmp_path, monkeypatch):
    for name, text in {
        "lower": "def inner(given):\n    return given\n",
        "upper": "def outer(q):\n    low.inner({'q': [q]})\n    low.inner({'q': 1})\n    return low.inner((q,))\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr("tests.call_path._PACKAGE", str(tmp_path))
    modules = {}
    for name in ("lower", "upper"):
        modules[name] = types.ModuleType(name)
        source = (tmp_path / f"{name}.py").read_text()
        exec(compile(source, str(tmp_path / f"{name}.py"), "exec"), modules[name].__dict__)
    modules["upper"].low = modules["lower"]  # type: ignore[attr-defined]
    q = torch.zeros(2)
    path = call_path(lambda: modules["upper"].outer(q), q)
    assert path.files == ("upper.py", "lower.py", "upper.py", "lower.py", "upper.py")
    assert (path.calls, path.stays, len(path.distinct)) == (4, 5, 2)
    assert path.until("lower.py").files == ("upper.py",)
