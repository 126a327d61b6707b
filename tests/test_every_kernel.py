"""Each kernel compiles for each architecture that it serves, with the Triton that is installed.

``make test-triton`` asks the oldest Triton the same. Other tests look at tiles and features.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science.attention.backward.plan import plan_backward
from flashmoe_science.attention.backward.prepare import prepare_backward_kernels
from flashmoe_science.attention.backward.problem import BackwardProblem
from flashmoe_science.attention.decode.merge import merge_kernel
from flashmoe_science.attention.decode.plan import plan_with_kv_cache
from flashmoe_science.attention.decode.prepare import prepare_cache_kernels
from flashmoe_science.attention.decode.problem import CacheProblem
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.gpu.compile import KernelSource, read_resources
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.moe.problem import Routing
from flashmoe_science.moe.routing.prepare import backward_kernel_of, kernel_of
from flashmoe_science.proof.subject.loading import load_operator
from flashmoe_science.proof.subject.registry import BUILTIN_OPERATORS
from flashmoe_science.proof.subject.suites import list_suites, load_suite, operator_in

pytestmark = pytest.mark.triton

PACKAGE = Path(__file__).parents[1] / "src" / "flashmoe_science"
GPUS = {80: "A100", 86: "A10G", 89: "L4", 90: "H200", 100: "B200", 120: "RTX 5090"}
# Their matrix instructions are the same, so `make test` compiles each kernel for one of them.
ALIKE = (80, 86, 89, 120)
# Besides files that end in ``_sm90``: what kernels for Hopper alone need before or after them.
FOR_HOPPER = ("attention/backward/prepass_triton.py", "attention/forward/sequences_triton.py")


def expected() -> Iterator[Any]:
    """Yield every kernel of attention and MoE by name, with each architecture that it serves."""
    turns = itertools.cycle(ALIKE)
    for path in sorted(path for room in ("attention", "moe") for path in (PACKAGE / room).rglob("*.py")):
        is_for_hopper = path.stem.endswith("_sm90") or path.relative_to(PACKAGE).as_posix() in FOR_HOPPER
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list:
                others = set() if is_for_hopper else {*ALIKE} - {next(turns)}
                for arch in [90] if is_for_hopper else GPUS:
                    yield pytest.param(node.name, arch, marks=[pytest.mark.exhaustive] if arch in others else [])


def sources() -> Iterator[tuple[KernelSource, int]]:
    """Yield what the cases of all suites launch on each architecture, and what no case of them does."""
    for name, subjects in BUILTIN_OPERATORS.items():
        operator: Any = load_operator(name)  # ours, a KernelOperator
        suites = [suite for suite, path in list_suites().items() if operator_in(path) == name]
        problems = [case.problem for suite in suites for case in load_suite(suite).cases]
        for subject in subjects:
            for job in operator.compile_jobs(subject, problems, list(GPUS.values())):
                yield job.source, SPECS[job.gpu].arch
    appending = CacheProblem(2, 8, 2, 1, 4096, 128, 128, "bf16", seqlen_new=1)
    forward = AttentionProblem(2, 4, 2, 512, 512, 64, 64, "bf16", bias="fp32")
    biased = BackwardProblem(forward, bias_sums=(True, False))
    with_sinks = AttentionProblem(2, 4, 2, 512, 512, 64, 64, "bf16", sinks="fp32")
    sinking = BackwardProblem(with_sinks, wants_sinks=True)
    merged = (((65536, 32768, 64, 1), (1024, 512, 1)),) * 3
    packed = BackwardProblem(AttentionProblem(2, 4, 2, 512, 512, 64, 64, "bf16", packed=True))
    masked = BackwardProblem(AttentionProblem(2, 4, 2, 512, 512, 64, 64, "bf16", mask_batch=1, mask_heads=2))
    routing = Routing(9, 64, 4, "fp32", (64, 1), "sigmoid", True, "fp32", 4, 2, 1.0)
    for arch, gpu in GPUS.items():
        planned = (
            *prepare_cache_kernels(plan_with_kv_cache(appending, SPECS[gpu])),
            *prepare_backward_kernels(plan_backward(biased, SPECS[gpu])),
            *prepare_backward_kernels(plan_backward(packed, SPECS[gpu])),
            *prepare_backward_kernels(plan_backward(sinking, SPECS[gpu])),
            merge_kernel((2, 2, 512, 64), merged, ("bf16", "bf16", "fp32"), aligned=True),
            *prepare_backward_kernels(plan_backward(masked, SPECS[gpu])),
            kernel_of(routing, arch),
            backward_kernel_of(routing, arch),
        )
        yield from ((kernel.source, arch) for kernel in planned)


@functools.cache
def sources_by_name() -> dict[tuple[str, int], KernelSource]:
    found: dict[tuple[str, int], KernelSource] = {}
    for source, arch in sources():
        found.setdefault((source.name, arch), source)
    return found


@pytest.mark.parametrize(("kernel", "arch"), [*expected()])
def test_it_compiles(kernel, arch):
    assert (kernel, arch) in sources_by_name(), "no case launches it: add one to sources()"
    found = read_resources(sources_by_name()[kernel, arch], arch)
    assert found.shared_memory_bytes <= SPECS[GPUS[arch]].shared_memory_per_block_bytes
