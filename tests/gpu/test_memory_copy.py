"""The speed of light of memory: what one call moves, and what calls find that come after it."""

from __future__ import annotations

import pytest
import torch

from flashmoe_science.gpu import memory_copy
from flashmoe_science.gpu.memory_copy import bind_copy, refuse_copy

CPU = torch.device("cpu")


@pytest.mark.parametrize("nbytes", [8, 1 << 12, 3 << 12])
def test_a_call_writes_half_of_the_bytes_and_every_call_the_same_ones(monkeypatch, nbytes):
    monkeypatch.setattr(memory_copy, "POOL_BYTES", 1 << 14)
    copy = bind_copy(nbytes, CPU)
    first = copy().clone()
    assert first.nbytes == nbytes / 2
    assert first.isfinite().all(), "what has NaN is no answer"
    assert nbytes < 1 << 10 or first.unique().numel() > first.numel() / 2, "the bytes are random"
    for _ in range(6):
        again = copy()
        assert torch.equal(again, first)
        again.fill_(torch.nan)  # as what is captured in a graph: all of it is written anew


def test_calls_take_turns_with_parts_of_the_pool(monkeypatch):
    monkeypatch.setattr(memory_copy, "POOL_BYTES", 1 << 14)
    copy = bind_copy(1 << 12, CPU)
    places = [copy().data_ptr() for _ in range(8)]
    assert places[:4] == places[4:]
    assert len(set(places)) == 4
    one = bind_copy(1 << 20, CPU)
    assert one().data_ptr() == one().data_ptr(), "more than the pool has one part"


def test_each_part_is_read_from_memory_of_its_own(monkeypatch):
    monkeypatch.setattr(memory_copy, "POOL_BYTES", 1 << 14)
    read = []
    invert = torch.bitwise_not

    def watched(source, *, out):
        read.append(source.data_ptr())
        return invert(source, out=out)

    monkeypatch.setattr(torch, "bitwise_not", watched)
    copy = bind_copy(1 << 12, CPU)
    for _ in range(8):
        copy()
    assert read[:4] == read[4:]
    assert len(set(read)) == 4


def test_a_small_copy_is_refused_by_its_size():
    assert refuse_copy(64 << 20) is None
    assert refuse_copy(63 << 20) == "it is asked for from 64 MiB on, this case has 63"
