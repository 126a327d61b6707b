"""A diagnosis on a real GPU: of a plain kernel with a serial loop on a small grid, and of one of ours."""

from __future__ import annotations

import pytest

from flashmoe_science.proof.diagnose.gather import Request, observe_here
from flashmoe_science.proof.diagnose.hypotheses import diagnose_case
from flashmoe_science.proof.diagnose.observations import Status
from flashmoe_science.proof.judge.roofline import known_spec
from flashmoe_science.proof.measure.environment import describe_apart
from flashmoe_science.proof.subject.loading import load_subject

from ..chain import SUBJECTS, attention

pytestmark = [pytest.mark.gpu, pytest.mark.timing, pytest.mark.unpoisoned]


def diagnose(subject, case, *, baselines=(), counters=False):
    gpu = describe_apart().gpu
    assert gpu is not None
    if known_spec(gpu) is None:
        pytest.skip(f"{gpu.name} is not in the table of gpu/specs.py")
    (found,) = observe_here(Request(subject, [case], baselines, seed=1, counters=counters), gpu, say=print)
    return found, diagnose_case(found)


def assert_statuses(case, wanted):
    """Compare what became of some hypotheses; a failing test shows what was said of each, and all that was measured."""
    told = {each.hypothesis: each for each in case.findings}
    lines = [f"{each.hypothesis}: {each.status.value}: {each}" for each in case.findings]
    lines.append(str(case.observations))
    assert {name: told[name].status for name in wanted} == wanted, "\n".join(["", *lines])


def test_a_plain_kernel_with_sixteen_blocks_is_a_serial_loop_on_a_small_grid():
    """The grid of (1, 1, 512, 64) is 16 blocks of 128 threads, each with one loop over all keys."""
    subject, problem = load_subject(str(SUBJECTS / "honest_triton")), attention(1, 1, 512, 64)
    found, case = diagnose(subject, problem, baselines=["sdpa"], counters=True)
    assert [baseline.name for baseline in found.baselines] == ["sdpa"]
    assert len(found.kernels) == 1, (found.kernels, found.missing)
    (kernel,) = found.kernels
    assert (kernel.blocks, kernel.threads) == (16, 128)
    assert kernel.code is not None, kernel.code_missing
    assert_statuses(
        case,
        {
            "grid too small": Status.CONFIRMED,
            "serial loop": Status.CONFIRMED,
            "no tensor-core instructions": Status.RULED_OUT,
            "bound by memory bandwidth": Status.RULED_OUT,
        },
    )
    # Not everywhere may this user read counters; where ncu shows kernels, this one is among them.
    assert kernel.counters or "shows no kernel" not in found.missing["counters"], found.missing


def test_a_kernel_of_ours_on_a_problem_that_fills_the_gpu_is_no_small_grid():
    found, case = diagnose(load_subject("flash_attention"), attention(4, 16, 4096, 128))
    assert found.times.call is not None, found.missing
    assert found.kernels, found.missing
    assert all(kernel.code is not None and kernel.seconds for kernel in found.kernels), found.kernels
    names = (
        *("grid too small", "serial loop", "launch-bound", "no tensor-core instructions"),
        "another kernel than promised",
    )
    assert_statuses(case, dict.fromkeys(names, Status.RULED_OUT))
