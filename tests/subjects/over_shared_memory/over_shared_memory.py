"""A tile that no L4 can hold: the compiler takes it, and its launch would fail."""

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashmoe_science.gpu.specs import find_gpu


@triton.jit
def _large_tile_kernel(
    a_ptr,  # [M, K]
    b_ptr,  # [K, N]
    c_ptr,  # [M, N]
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply one tile, with four stages of loads under way. Grid: (1,)."""
    offs_m, offs_n, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=4):
        a = tl.load(a_ptr + offs_m[:, None] * K + start + offs_k[None, :])
        b = tl.load(b_ptr + (start + offs_k)[:, None] * BLOCK_N + offs_n[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + offs_m[:, None] * BLOCK_N + offs_n[None, :], acc)


@dataclass(frozen=True)
class Outcome:
    """What compiling showed."""

    registers: int
    spill_bytes: int
    shared_memory_bytes: int
    seconds: float
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """The kernel, for one GPU."""

    label: str
    gpu: str

    def run(self):
        """Compile it with no GPU, and compare its shared memory with the GPU's."""
        spec = find_gpu(self.gpu)
        signature = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp32", "K": "i32"}
        constants = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64}
        # Rows that begin at multiples of 16 bytes, without which loads are not asynchronous and take no stages.
        aligned = {(i,): [["tt.divisibility", 16]] for i in range(4)}
        source = ASTSource(
            _large_tile_kernel,
            {**signature, **dict.fromkeys(constants, "constexpr")},
            {(4 + i,): value for i, value in enumerate(constants.values())},
            aligned,
        )
        kernel = triton.compile(source, target=GPUTarget("cuda", spec.arch, 32), options={"num_warps": 8})
        shared, limit = kernel.metadata.shared, spec.shared_memory_per_block_bytes
        problems = (f"{shared} bytes of shared memory a block, the limit is {limit}",) if shared > limit else ()
        return Outcome(0, 0, shared, 0.0, problems)


def compile_jobs(cases, gpus):
    """Return one job a GPU; the tile is the same for every case."""
    return [Job("large tile", gpu) for gpu in gpus]


def attend(q, k, v, *, causal=False, softmax_scale=None):
    """Never get this far."""
    raise NotImplementedError
