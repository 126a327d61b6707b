"""Which counter a launch gets."""

from __future__ import annotations

import itertools
import threading

import pytest

from flashmoe_science.gpu import counters
from flashmoe_science.gpu.counters import Counters


@pytest.fixture
def capturing(monkeypatch):
    """Hand out addresses without a GPU; return the switch that says whether the current stream is captured."""
    state = {"captured": False}
    blocks = itertools.count(1000, 1000)

    def allocate(_device):
        start = next(blocks)
        return [start, start + 4, start + 8]

    monkeypatch.setattr(counters, "_allocate_zeros", allocate)
    monkeypatch.setattr(counters, "_is_capturing", lambda: state["captured"])
    return state


@pytest.mark.usefixtures("capturing")
def test_a_stream_keeps_its_counter_and_shares_it_with_no_other():
    of = Counters(0).address
    streams = [7, 8, 9, 10, 11]
    first = [of(stream) for stream in streams]
    assert len(set(first)) == 5
    assert [of(stream) for stream in streams] == first


def test_every_captured_launch_has_a_counter_for_itself(capturing):
    of = Counters(0).address
    eager = of(7)
    capturing["captured"] = True
    captured = [of(7) for _ in range(4)]
    capturing["captured"] = False
    assert len({eager, *captured}) == 5
    assert of(7) == eager


@pytest.mark.usefixtures("capturing")
def test_the_per_thread_stream_is_another_in_every_thread():
    """Its handle, 2, is the same in all of them."""
    of = Counters(0).address
    found = [of(2)]
    thread = threading.Thread(target=lambda: found.append(of(2)))
    thread.start()
    thread.join()
    assert len(set(found)) == 2
    assert of(2) == found[0]
