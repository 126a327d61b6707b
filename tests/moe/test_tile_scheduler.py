"""Which tiles the programs of the kernels for Hopper draw: their producers' own source, run in Python with numbers."""

from __future__ import annotations

import itertools
import types
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science.gpu.signature import PreparedKernel
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.moe import primitives_sm90
from flashmoe_science.moe.backward import weights_gluon_sm90
from flashmoe_science.moe.backward.plan import plan_backward
from flashmoe_science.moe.backward.prepare import prepare_backward_kernels
from flashmoe_science.moe.grouped import gluon_sm90 as grouped_gluon_sm90
from flashmoe_science.moe.problem import MoeProblem

pytestmark = pytest.mark.triton

EXPERTS, ROW_TILES = 3, 37
PROGRAMS = 5  # few, so that all draw
# Where the tables begin, in one memory of numbers; the kernels know what lies where in them.
TABLE, OFFSETS = 1000, 5000


def make_memory() -> dict[int, int]:
    """Return the table of row tiles and the offsets as the sort leaves them, counters at 0."""
    memory = dict.fromkeys([TABLE + 1, TABLE + 2, *range(OFFSETS, OFFSETS + EXPERTS + 5)], 0)
    memory[TABLE] = ROW_TILES
    for tile in range(ROW_TILES):
        memory.update(zip(range(TABLE + 4 + 4 * tile, TABLE + 8 + 4 * tile), (0, tile, tile + 1, 0), strict=True))
    memory.update({OFFSETS + expert: 100 * expert for expert in range(EXPERTS + 1)})
    return memory


def walk(module: Any, kernel: PreparedKernel, memory: dict[int, int]) -> list[tuple[int, ...]]:
    """Return what all programs of a launch publish of their tiles, and count in ``memory`` as they do."""
    source = module._load_partition.fn
    numbers = {name: value.value for name, value in source.__globals__.items() if type(value).__name__ == "constexpr"}
    published: list[tuple[int, ...]] = []

    def count(place: int, more: int, *, sem: str) -> int:
        assert sem == "relaxed"
        memory[place] += more
        return memory[place] - more

    a = MagicMock(**dict(kernel.source.constants), drawn=kernel.scalars[0], tiles_ptr=TABLE, offsets_ptr=OFFSETS)
    a.configure_mock(PRODUCERS=128, PRODUCT=256)
    a.w_desc.block_type.nbytes = 0
    a.tiles.publish = lambda _n, *what: published.append(what)
    assert kernel.grid[0] > PROGRAMS
    for program in range(PROGRAMS):
        names = {
            "gl": MagicMock(minimum=min, maximum=max, load=memory.__getitem__, static_range=range, atomic_add=count),
            "special_register": {"ctaid.x": program, "nctaid.x": PROGRAMS}.__getitem__,
            "slot_of": lambda i, stages: i % stages,
            "lap_of": lambda i, stages: i // stages,
            "_tokens": lambda *_: (None, None),
            "wait_for_kernel_before": lambda: None,
            **dict.fromkeys(("_gather", "named_barrier", "mbarrier", "async_copy", "tma_load"), MagicMock()),
        }
        for shared in (primitives_sm90.row_and_column_tile, primitives_sm90.draw_tile):
            names[shared.fn.__name__] = types.FunctionType(shared.fn.__code__, {**shared.fn.__globals__, **names})
        types.FunctionType(source.__code__, {**source.__globals__, **numbers, **names})(a)
        assert published.pop() in ((0, 0, 0, -1), (0, -1, 0, 0)), "the end"
    return published


def test_launches_that_share_a_counter_draw_every_tile_of_theirs_once():
    """Gradients in parts of some columns: counters go on where the launch before left them."""
    problem = MoeProblem(300_000, EXPERTS, 1, 1000, 1288, "bf16", keep_product=True)
    plan = plan_backward(problem, SPECS["H200"], ("x", "w_down"))
    kernels = list(zip(plan.steps, prepare_backward_kernels(plan), strict=True))
    memory = make_memory()
    for step, parts in (("ddown_sm90", 3), ("dx_sm90", 2)):
        launches = [kernel for each, kernel in kernels if each == step]
        assert len(launches) == parts
        for kernel in launches:
            constants = dict(kernel.source.constants)
            if step == "dx_sm90":
                found = [(row, column) for _, row, _, column in walk(grouped_gluon_sm90, kernel, memory)]
                expected = itertools.product(range(ROW_TILES), range(constants["TILES_N"]))
            else:
                found = [what[:3] for what in walk(weights_gluon_sm90, kernel, memory)]  # type: ignore[misc]
                tiles = -(-constants["M"] // 128), -(-constants["N"] // 256)
                expected = itertools.product(range(EXPERTS), *map(range, tiles))  # type: ignore[assignment]
            assert sorted(found) == list(expected), (step, kernel.scalars)
