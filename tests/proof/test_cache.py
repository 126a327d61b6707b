"""Flushes of L2 with a driver and a GPU that are made up."""

from __future__ import annotations

import ctypes

import pytest
import torch

from flashmoe_science.errors import ProofError
from flashmoe_science.proof.measure.cache import CacheFlush


class Stream:
    """Runs what it holds when the host waits for it, and not before."""

    def __init__(self):
        self.held = []

    def synchronize(self):
        while self.held:
            self.held.pop(0)()


class Driver:
    """Notes what is asked of it, and answers ``code``. A reset is made at once, whatever the stream still holds."""

    def __init__(self, code=0):
        self.code = code
        self.asked = []
        self.stream = Stream()
        self.lines = 0  # that stay

    def cuCtxSetLimit(self, limit, value):  # noqa: N802
        self.asked.append(("limit", limit, value.value))
        return self.code

    def cuCtxResetPersistingL2Cache(self):  # noqa: N802
        self.asked.append(("reset",))
        self.lines = 0
        return self.code


@pytest.fixture
def flush_of(monkeypatch):
    def make(driver):
        monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: driver.stream)
        for name in ("full", "empty"):
            real = getattr(torch, name)
            monkeypatch.setattr(torch, name, lambda *a, real=real, **k: real(*a, **{**k, "device": "cpu"}))
        return CacheFlush(1024)

    return make


def test_no_line_may_stay_and_other_memory_is_written_and_read(flush_of):
    driver = Driver()
    flush = flush_of(driver)
    assert driver.asked == [("limit", 6, 0)]
    flush.flush()
    assert driver.asked[1:] == [("reset",)]
    assert flush._written.nbytes == flush._read.nbytes == 2048
    assert set(flush._written.tolist()) == {2}
    assert flush._written.data_ptr() != flush._read.data_ptr()
    assert flush._seen.item() == 1


def test_lines_of_a_call_that_still_runs_do_not_stay_either(flush_of):
    driver = Driver()
    flush = flush_of(driver)
    driver.stream.held.append(lambda: setattr(driver, "lines", 4096))
    flush.flush()
    driver.stream.synchronize()
    assert driver.lines == 0


def test_a_gpu_without_such_lines_is_asked_once(flush_of):
    driver = Driver(215)
    flush = flush_of(driver)
    driver.stream.held.append(pytest.fail)  # there is nothing to wait for
    flush.flush()
    assert driver.asked == [("limit", 6, 0)]


def test_a_driver_that_fails_is_an_error(flush_of):
    with pytest.raises(ProofError, match="cuCtxSetLimit of the CUDA driver failed with code 201"):
        flush_of(Driver(201))
