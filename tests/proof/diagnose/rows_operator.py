"""An operator whose kernels run on the simulated GPU: twice every element of some rows, a block for every row."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from flashmoe_science.proof.measure.launches import DeviceEvent
from flashmoe_science.proof.subject.custom_operator import CustomOperator, Work

from ..simulated import Doubling, Gpu

SMS = 132


@dataclass(frozen=True)
class Problem:
    rows: int
    length: int


@dataclass(frozen=True)
class Axis:
    name: str
    kind: str
    meaning: str


class GridGpu(Gpu):
    """A simulated GPU whose kernels have grids."""

    def __init__(self):
        super().__init__()
        self.grids: dict[str, int] = {}

    def run(self, seconds, name):
        start = round(self.now * 1e9)
        self.now += seconds
        end = round(self.now * 1e9)
        grid = (self.grids.get(name, 1), 1, 1)
        for listener in self.listeners:
            listener.append(DeviceEvent("kernel", name, start, end, 7, grid, (128, 1, 1), 64, 4096))


class RowsOperator(Doubling):
    name = "tests.proof.diagnose.rows_operator"

    def parse_case(self, table):
        return Problem(**table)

    as_table = CustomOperator.as_table

    def describe(self, problem):
        return f"r{problem.rows}_n{problem.length}"

    def work(self, problem):
        n = problem.rows * problem.length
        return Work(flops=float(n), bytes=8.0 * n, tokens=problem.rows)

    def make_inputs(self, problem, *, seed, device):
        generator = torch.Generator().manual_seed(seed)
        return {"x": torch.randn(problem.rows, problem.length, generator=generator).to(device)}


class ScalableRows(RowsOperator):
    """The same, and it offers longer problems."""

    def axes(self):
        return [Axis("length", "sequential", "the length"), Axis("rows", "parallel", "the rows")]

    def scaled(self, problem, axis, factor):
        table = asdict(problem)
        return Problem(**{**table, axis: table[axis] * factor})


OPERATOR: Any = ScalableRows()


def row_loop(gpu, *, a_unit=1e-6, overhead=2e-6, splits=False):
    """Return a kernel in which every block runs a loop over its row; with ``splits`` the row is shared by blocks."""

    def entry(x):
        rows, length = x.shape
        blocks = rows * (length // 8 if splits else 1)
        loop = 8 if splits else length
        gpu.grids["row_loop"] = blocks
        out = torch.empty(x.shape)
        seconds = overhead + a_unit * loop * max(1.0, blocks / SMS)
        gpu.launch(lambda: out.copy_(2 * x), seconds=seconds, name="row_loop")
        return out

    return entry


GPU = GridGpu()
on_simulated_gpu = row_loop(GPU)
