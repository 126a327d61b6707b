"""Observations of kernels whose truth is known, made from a small model of a GPU. Nothing here was measured."""

from __future__ import annotations

from typing import Any

from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.proof.diagnose.case import HYPOTHESES
from flashmoe_science.proof.diagnose.gather import chip_of
from flashmoe_science.proof.diagnose.hypotheses import diagnose_case
from flashmoe_science.proof.diagnose.observations import Code, Finding, Kernel, Observations, Scaled, Sensors, Times
from flashmoe_science.proof.records.evidence import Work

MEANING = {
    "keys": ("sequential", "the number of keys"),
    "length": ("sequential", "the sequence length"),
    "batch": ("parallel", "the batch"),
}

PLAIN = Code(
    registers=64, local_bytes=0, instructions=900, tensor_core=0, tensor_core_in_loops=0, local=0, local_in_loops=0
)
TENSOR = PLAIN.model_copy(update={"tensor_core": 32, "tensor_core_in_loops": 32})


def kernel(blocks: int, **changes: Any) -> Kernel:
    """Return a kernel of ``blocks`` blocks of 128 threads."""
    table = {"name": "attend_kernel", "grid": (blocks, 1, 1), "block": (128, 1, 1), "registers": 64}
    return Kernel.model_validate({**table, "shared_memory_bytes": 16384, "code": TENSOR, **changes})


def scaled(axis: str, factor: int, seconds: float | None, blocks: int | None, reason: str = "") -> Scaled:
    """Return a longer call."""
    kind, meaning = MEANING[axis]
    return Scaled.model_validate(
        {"case": f"made up with {factor} times {meaning}", "axis": axis, "kind": kind, "meaning": meaning}
        | {"factor": factor, "seconds": seconds, "blocks": blocks, "reason": reason}
    )


def observe(
    *,
    kernels: list[Kernel] | None = None,
    device: float | None = 500e-6,
    wall: float | None = None,
    gpu: str = "H200",
    flops: float = 67e6,
    nbytes: float = 262144.0,
    dram_bytes: float = 0.0,
    runs: list[Scaled] | None = None,
    **more: Any,
) -> Observations:
    """Return observations of one call: by default of one kernel as large as the GPU, with nothing to complain of."""
    work = Work(flops=flops, bytes=nbytes, tokens=512, peak="fp16")
    call = wall if wall is not None or device is None else device * 1.01
    table: dict[str, Any] = {
        "case": "made up",
        "problem": {},
        "work": work,
        "chip": chip_of(SPECS[gpu], work),
        "times": Times(kernel=device, graph=device, wall=call),
        "clock": "graph",
        "clock_seconds": device,
        "dram_bytes": dram_bytes,
        "kernels": [kernel(132 * 16)] if kernels is None else kernels,
        "scaled": runs or [],
        "sensors": Sensors(sm_clock_mhz=[1980] * 5, throttle=[""] * 5, max_sm_clock_mhz=1980),
        "broken_promises": [],
    }
    return Observations.model_validate({**table, **more})


def finding(observations: Observations, hypothesis: str) -> Finding:
    """Return what became of one hypothesis."""
    found = {each.hypothesis: each for each in diagnose_case(observations).findings}
    assert len(found) == len(HYPOTHESES)
    return found[hypothesis]


def full_gpu(seconds: float = 500e-6, blocks: int = 132 * 16) -> list[Scaled]:
    """Return longer calls of a kernel that fills the GPU: all cost their full time."""
    return [
        scaled("keys", 2, 2 * seconds, blocks),
        scaled("keys", 4, 4 * seconds, blocks),
        scaled("batch", 2, 2 * seconds, 2 * blocks),
        scaled("batch", 16, 16 * seconds, 16 * blocks),
    ]


def serial_story(seqlen: int = 512) -> Observations:
    """Return the story's kernel (examples/story, state d): tiles of 64 rows, and in each block one loop over all keys.

    (1, 1, S, 64) in fp16 on an H200: S / 64 blocks of 384 threads on 132 SMs, about 1.1 us a key. While all blocks
    have an SM of their own, sixteen times the batch costs nothing.
    """
    blocks, overhead, a_key = seqlen // 64, 3e-6, 1.1e-6

    def seconds(keys: int, copies: int = 1) -> float:
        return overhead + a_key * keys * max(1.0, copies * blocks / 132 / 2)  # an SM holds two without slowing down

    device = seconds(seqlen)
    return observe(
        kernels=[
            kernel(blocks, block=(384, 1, 1), registers=78, shared_memory_bytes=40960, code=PLAIN, seconds=device)
        ],
        device=device,
        wall=device + 5e-6,
        flops=4.0 * seqlen * seqlen * 64,
        nbytes=4.0 * seqlen * 64 * 2,
        runs=[
            scaled("keys", 2, seconds(2 * seqlen), blocks),
            scaled("keys", 4, seconds(4 * seqlen), blocks),
            scaled("length", 2, seconds(2 * seqlen), 2 * blocks),
            scaled("length", 4, seconds(4 * seqlen), 4 * blocks),
            scaled("batch", 2, seconds(seqlen, 2), 2 * blocks),
            scaled("batch", 4, seconds(seqlen, 4), 4 * blocks),
            scaled("batch", 16, seconds(seqlen, 16), 16 * blocks),
        ],
        missing={"counters": "Nsight Compute (ncu) is not on PATH"},
    )
