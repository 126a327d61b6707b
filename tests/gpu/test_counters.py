"""Which counter a launch gets."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from flashmoe_science.gpu import counters
from flashmoe_science.gpu.counters import Counters


@pytest.fixture
def now(monkeypatch):
    """Hand out addresses without a GPU; return what the driver and torch say of the current stream."""
    state = SimpleNamespace(captured=False, torchs=True, id=0)
    blocks = itertools.count(1000, 1000)

    def allocate(_device):
        start = next(blocks)
        return [start, start + 4, start + 8]

    monkeypatch.setattr(counters, "_allocate_zeros", allocate)
    monkeypatch.setattr(counters, "_is_capturing", lambda: state.captured)
    monkeypatch.setattr(counters, "_is_torchs", lambda _device: state.torchs)
    monkeypatch.setattr(counters, "_stream_id", lambda _stream: state.id)
    return state


@pytest.mark.usefixtures("now")
def test_a_stream_keeps_its_counter_and_shares_it_with_no_other():
    of = Counters(0).address
    streams = [7, 8, 9, 10, 11]
    first = [of(stream) for stream in streams]
    assert len(set(first)) == 5
    assert [of(stream) for stream in streams] == first


def test_every_captured_launch_has_a_counter_for_itself(now):
    of = Counters(0).address
    eager = of(7)
    now.captured = True
    captured = [of(7) for _ in range(4)]
    now.captured = False
    assert len({eager, *captured}) == 5
    assert of(7) == eager


def test_a_handle_that_is_used_again_is_another_stream(now):
    """Also the per-thread stream: its handle, 2, is the same in all threads."""
    of = Counters(0).address
    now.torchs, now.id = False, 100
    first = of(2)
    assert of(2) == first
    now.id = 101
    assert of(2) != first
    now.id = 100
    assert of(2) == first


def test_the_ids_by_which_torch_knows_its_streams(monkeypatch):
    """The default stream is 0, those of the pool are odd, and of any other the id is its handle: a pointer, 1 or 2."""
    for stream_id, torchs in ((0, True), (3, True), (35, True), (2, False), (0x55D0_1230, False)):
        monkeypatch.setattr(counters, "_current_stream", lambda _device, found=stream_id: (found, 0, 1))
        assert counters._is_torchs(0) is torchs
