"""The operator of ``fake_operator`` with a baseline of ``library``, and its times on the clock of a CPU."""

from __future__ import annotations

from flashmoe_science.proof.measure import gpu_tasks
from flashmoe_science.proof.measure.measure import Timer

from . import library
from .fake_operator import FakeBaseline, FakeOperator


class LibraryBaseline(FakeBaseline):
    def load(self):
        return library.attend


class LibraryOperator(FakeOperator):
    name = "tests.proof.library_operator"

    def baselines(self):
        return {"sdpa": LibraryBaseline("sdpa")}


OPERATOR = LibraryOperator()


def measure(payload, emit):
    return gpu_tasks.measure(payload, emit, gpu_tasks.open_gpu(payload, Timer))


def measure_alone(payload, emit):
    return gpu_tasks.measure_alone(payload, emit, gpu_tasks.open_gpu(payload, Timer, alone=True))
