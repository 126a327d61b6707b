"""Tiles of the backward kernels compile, and their loops over whole tiles touch no local memory.

`make test` compiles one row an architecture; `make test-all` one width of each and all of Hopper's for 16-bit elements.
``FLASHMOE_ALL_FEATURES=1 make test-all`` compiles all rows in all ways, which are 432 problems.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

import triton

from flashmoe_science import InputError, UnsupportedError
from flashmoe_science.attention.backward.plan import (
    BACKWARD_TABLES,
    BackwardConfig,
    BackwardPlan,
    backward_tiles,
    plan_backward,
)
from flashmoe_science.attention.backward.prepare import prepare_backward_kernels
from flashmoe_science.attention.backward.problem import BackwardProblem
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.gpu.compile import compile_kernel, read_resources
from flashmoe_science.gpu.launch import count_parameters
from flashmoe_science.gpu.specs import SPECS, shared_memory_limit

from .key_loops import matrix_loops

pytestmark = pytest.mark.triton

GPUS = {80: "A100", 86: "A10G", 89: "L4", 90: "H200", 100: "B200", 120: "RTX 5090"}
RESTS: dict[str, Any] = {"seqlen_q": 1000, "seqlen_k": 900, "rests": True}
BOUNDED: dict[str, Any] = {"window": (300, 20), "softcap": 30.0, "alibi": "fp32"}
WAYS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "features": {**BOUNDED, **RESTS, "bias": "fp32"},
    "rests": {**RESTS, "causal": True},
    "full": {},
    "packed": {"packed": True, "causal": True},
    "packed-features": {**BOUNDED, "causal": True, "packed": True, "seqused": "qk"},
    "columns": {"causal": True, "rests": True},
    # A bias whose keys lie apart: of each head, for all sequences.
    "transposed": {**BOUNDED, **RESTS, "bias": "fp32", "bias_strides": (0, 900_000, 1, 1000)},
    "dropout": {**BOUNDED, **RESTS, "bias": "fp32", "dropout_p": 0.1},
    "packed-dropout": {"causal": True, "packed": True, "seqused": "qk", "dropout_p": 0.1},
    "packed-bias": {**BOUNDED, "causal": True, "packed": True, "seqused": "qk", "bias": "fp32"},
    "packed-bias-dropout": {**BOUNDED, "packed": True, "seqused": "k", "bias": "fp32", "dropout_p": 0.1},
}
# Local memory a thread, outside of the loops that multiply: what one head's tiles share is kept there.
MOST_LOCAL_BYTES = 512
MOST_EDGE_ACCESSES = 6  # to local memory, a thread and a tile that is masked


def make_plan(arch: int, columns: int, dtype: str, way: str, **change: Any) -> BackwardPlan:
    asked = dict(WAYS[way])
    dim = columns * 5 // 8 if asked.pop("rests", False) else columns
    sizes = {"batch": 2, "heads": 4, "heads_kv": 2, "seqlen_q": 1024, "seqlen_k": 1024, "head_dim": dim}
    problem = AttentionProblem(**{**sizes, "head_dim_v": dim, "dtype": dtype, **asked, **change})
    sums = (True, False) if problem.bias else None
    described = BackwardProblem(problem, has_dlse="rests" in way, bias_sums=sums)
    return plan_backward(described, SPECS[GPUS[arch]], "backward_triton")


def compiled() -> Iterator[tuple[int, int, str, str]]:
    """Yield architecture, columns, dtype and way; by default one width of each architecture, and all of Hopper's."""
    complete = os.environ.get("FLASHMOE_ALL_FEATURES") == "1"
    widths = (64, 128, 256)
    for turn, (arch, columns) in enumerate(itertools.product(GPUS, widths)):
        if complete:
            for dtype, way in itertools.product(("bf16", "fp32"), WAYS):
                yield arch, columns, dtype, way
        elif arch == 90 or columns == widths[turn // 3 % 3]:
            yield arch, columns, ("bf16", "fp16")[turn % 2], list(WAYS)[turn % 3]
    if not complete:
        yield 80, 64, "fp32", "causal"
        for arch, columns in ((80, 64), (89, 256), (90, 128), (100, 64), (120, 128)):
            yield arch, columns, "bf16", "dropout"
        for arch, columns in ((80, 128), (86, 64), (90, 64), (90, 128), (90, 256), (100, 256), (120, 64)):
            yield arch, columns, "bf16", "packed-bias"
        yield 90, 64, "bf16", "packed-dropout"
        yield 100, 128, "bf16", "packed-bias-dropout"
        yield 80, 64, "fp32", "packed-bias"
        yield 90, 64, "fp32", "dropout"
        for arch, columns in ((80, 128), (90, 64), (90, 128), (90, 256)):
            yield arch, columns, "bf16", "transposed"


COMPILED = list(compiled())
# Known faults: what touches local memory in loops over whole tiles, of 3.6 and 3.9 with Triton 3.9 alone.
SPILLS = {
    (90, 128, "bf16", "transposed"): "_backward_q_kernel: 49, 38 and 54 accesses in its loops, 400 bytes a thread",
    (100, 256, "bf16", "transposed"): "_backward_bias_kernel: 13 accesses in its loop, 80 bytes a thread",
}


# Both widths of elements, every kind of architecture, plain and with all features.
USUAL = (
    (80, 64, "fp32", "causal"),
    (86, 64, "bf16", "packed-bias"),
    (89, 256, "bf16", "dropout"),
    (90, 128, "bf16", "features"),
    (100, 128, "bf16", "packed-bias-dropout"),
    (120, 128, "bf16", "dropout"),
)


def row(case: tuple[int, int, str, str]) -> Any:
    """Return a row as a parameter; one of ``SPILLS`` is known to fail with Triton 3.9, and has to."""
    if case in USUAL:
        return case
    if case not in SPILLS:
        return pytest.param(*case, marks=pytest.mark.exhaustive)
    spills = triton.__version__.startswith("3.9.")
    known = pytest.mark.xfail(spills, reason=SPILLS[case], raises=AssertionError, strict=True)
    return pytest.param(*case, marks=[known, pytest.mark.exhaustive])


def test_the_tables_cover_every_architecture_and_every_width():
    assert {arch for archs in BACKWARD_TABLES for arch in archs} == set(GPUS)
    for table in BACKWARD_TABLES.values():
        assert set(table) == set(itertools.product((2, 4), (64, 128, 256)))
    assert {arch for arch, *_ in COMPILED} == {arch for arch, *_ in USUAL} == set(GPUS)
    assert set(USUAL) <= set(COMPILED)
    assert {columns for _, columns, *_ in COMPILED} == {64, 128, 256}
    ways = {"causal", "features", "rests", "dropout", "packed-dropout", "packed-bias", "transposed"}
    assert {way for *_, way in COMPILED} >= ways
    assert {(90, columns, "bf16", "transposed") for columns in (64, 128, 256)} <= set(COMPILED)


def test_a_transposed_bias_has_keys_that_lie_apart():
    p = make_plan(90, 128, "bf16", "transposed").problem.forward
    assert p.bias_strides[2:] == (1, p.seqlen_q)
    for kernel in prepare_backward_kernels(make_plan(90, 128, "bf16", "transposed"))[1:]:
        assert dict(kernel.source.constants)["bias_strides.COLUMN"] == p.seqlen_q


@pytest.mark.parametrize(("arch", "columns", "dtype", "way"), [row(case) for case in COMPILED])
def test_every_row_of_the_tables_compiles(arch, columns, dtype, way, tmp_path):
    """Within shared memory, with matrix instructions, and without local memory where the time goes."""
    plan = make_plan(arch, columns, dtype, way)
    kernels = prepare_backward_kernels(plan)
    assert [kernel.source.name for kernel in kernels] == [launch.pattern for launch in plan.launches]
    for kernel, launch in zip(kernels, plan.launches, strict=True):
        assert kernel.grid == launch.grid
        assert 32 * kernel.source.num_warps == launch.block[0]
        found = read_resources(kernel.source, arch)
        assert found.shared_memory_bytes <= shared_memory_limit(arch), kernel.source.name
        if kernel.source.name == "_delta_kernel":
            assert found.spill_bytes == 0
        assert found.spill_bytes <= MOST_LOCAL_BYTES, kernel.source.name
        if dtype != "fp32":
            assert any("MMA" in opcode for opcode in found.instructions), kernel.source.name
        if kernel.source.name == "_delta_kernel":
            continue
        if dtype == "fp32" and columns > 64:  # its products take more registers than there are
            continue
        loops = matrix_loops(compile_kernel(kernel.source, arch).asm["cubin"], tmp_path)
        assert loops, kernel.source.name
        accesses = [loop["LDL"] + loop["STL"] for loop in loops]
        assert min(accesses) == 0, (kernel.source.name, accesses)
        assert max(accesses) <= MOST_EDGE_ACCESSES, (kernel.source.name, accesses)


def test_the_launch_path_passes_what_the_kernels_take():
    """Pointers and scalars in the order of the compiled parameters, of all that a call can ask for."""
    for way, change in (
        ("features", {}),
        ("packed-features", {"sinks": "bf16"}),
        ("packed-bias", {}),
        ("causal", {"heads_kv": 1}),
        ("dropout", {}),
    ):
        for kernel in prepare_backward_kernels(make_plan(90, 64, "bf16", way, **change)):
            names = [name for name, kind in kernel.source.signature if not kind.startswith("*")]
            assert len(kernel.scalars) == len(names)
            kinds = [kind.startswith("*") for _, kind in kernel.source.signature]
            assert kinds == sorted(kinds, reverse=True), "pointers come first"
            count_parameters(kernel.source, compile_kernel(kernel.source, 90).asm["ptx"])


def test_plans():
    """Which tile, and what is launched."""
    tiles = backward_tiles(90, 2, 64)
    whole, rests = make_plan(90, 64, "bf16", "causal"), make_plan(90, 64, "bf16", "causal", seqlen_q=1000)
    assert isinstance(whole.config, BackwardConfig)
    assert isinstance(rests.config, BackwardConfig)
    assert (whole.config.kv, rests.config.kv) == (tiles.kv, tiles.kv_ragged)
    assert whole.config.q == rests.config.q == tiles.q
    packed, windowed = make_plan(90, 64, "bf16", "packed"), make_plan(90, 64, "bf16", "causal", window=(9, -1))
    assert isinstance(packed.config, BackwardConfig)
    assert isinstance(windowed.config, BackwardConfig)
    assert packed.config.kv == tiles.kv_ragged
    assert (windowed.config.kv, windowed.config.q) == (tiles.kv_features, tiles.q_features)
    dropping, windowed = (make_plan(90, 64, "bf16", "causal", dropout_p=0.1, **w) for w in ({}, {"window": (9, -1)}))
    assert dropping.config == windowed.config
    assert isinstance(dropping.config, BackwardConfig)
    assert dropping.config.kv.num_warps * dropping.config.q.num_warps == 64
    grids = {launch.pattern: launch.grid[0] for launch in whole.launches}
    assert grids["_backward_kv_kernel"] == 1024 // tiles.kv.block_n * 2 * 2
    assert grids["_backward_q_kernel"] == 1024 // tiles.q.block_m * 2 * 4
    assert grids["_delta_kernel"] == 1024 // 64 * 2 * 4
    assert "_backward_kv_kernel" in str(whole)
    assert whole.as_dict()["kernel"] == "backward_triton"
    wide = [launch.pattern for launch in make_plan(90, 256, "bf16", "causal").launches]
    assert wide == ["_delta_kernel", "_backward_kv_kernel", "_backward_kv_kernel", "_backward_q_kernel"]
    only_q = plan_backward(BackwardProblem(whole.problem.forward, wants_kv=False), SPECS["H200"], "backward_triton")
    assert [launch.pattern for launch in only_q.launches] == ["_delta_kernel", "_backward_q_kernel"]
    assert make_plan(90, 64, "bf16", "causal", seqlen_k=0).launches == ()
    assert plan_backward(whole.problem, None).kernel == "reference"
    wider = backward_tiles(103, 2, 64)
    assert wider == backward_tiles(100, 2, 64)


def test_refusals():
    problem = make_plan(90, 64, "bf16", "causal").problem
    names = "backward_gluon_sm90, backward_triton, backward_masked_triton, reference"
    with pytest.raises(InputError, match=f"kernel must be auto or one of {names}, got 'fastest'"):
        plan_backward(problem, SPECS["H200"], "fastest")
    with pytest.raises(UnsupportedError, match="no kernel serves head dimension 513"):
        make_plan(90, 64, "bf16", "causal", head_dim=513)
    with pytest.raises(UnsupportedError, match=r"backward_triton needs an NVIDIA GPU(.|\n)*TRITON_INTERPRET=1"):
        plan_backward(problem, None, "backward_triton")
    with pytest.raises(UnsupportedError, match="blocks is too large"):
        make_plan(90, 64, "bf16", "causal", batch=2**20, heads=2**10, heads_kv=2**10, seqlen_q=2**13)
