"""Problems that a forward kernel must get right, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One problem; ``why`` names the test."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: bool
    why: str

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        lengths, dims = f"{self.seqlen_q}x{self.seqlen_k}", f"{self.head_dim}_{self.head_dim_v}"
        return f"{self.why}-{self.batch}x{self.heads}_{self.heads_kv}x{lengths}x{dims}-{self.dtype}-{mask}"


# (Sq, Sk) of FlashAttention's own tests.
PAIRS = (
    (1, 1), (64, 128), (128, 192), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211), (108, 256),
    (384, 256), (640, 128), (512, 256), (1023, 1024), (1024, 1023),
)  # fmt: skip
HEAD_DIMS = (1, 4, 32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)

SMALL = [
    Case(1, 1, 1, 4, 4, 4, 4, "fp16", False, why="story-smallest"),
    Case(1, 1, 1, 65, 65, 64, 64, "fp16", False, why="story-odd"),
    Case(2, 2, 2, 33, 47, 64, 64, "fp16", True, why="causal-more-keys"),
    Case(2, 2, 2, 47, 33, 64, 64, "fp16", True, why="causal-rows-without-keys"),
    Case(1, 4, 2, 19, 23, 80, 80, "fp16", True, why="gqa-d80"),
    Case(2, 6, 1, 17, 31, 111, 111, "fp16", False, why="mqa-odd-dim"),
    Case(1, 2, 2, 40, 56, 64, 32, "fp16", False, why="dv-smaller"),
    Case(1, 2, 1, 21, 70, 48, 96, "fp16", True, why="dv-larger"),
    Case(1, 2, 2, 1, 129, 64, 64, "fp16", True, why="one-row"),
    Case(1, 2, 2, 33, 1, 64, 64, "fp16", False, why="one-key"),
    Case(1, 1, 1, 5, 7, 1, 1, "fp16", False, why="one-column"),
    Case(1, 2, 2, 40, 40, 64, 64, "fp32", True, why="fp32"),
    Case(1, 1, 1, 20, 40, 256, 256, "fp32", False, why="fp32-d256"),
    Case(1, 1, 1, 24, 40, 256, 256, "fp16", True, why="d256"),
]
EMPTY = [
    Case(0, 2, 2, 4, 4, 64, 64, "fp16", False, why="no-batch"),
    Case(2, 0, 0, 4, 4, 64, 64, "fp16", False, why="no-heads"),
    Case(2, 2, 2, 0, 4, 64, 64, "fp16", True, why="no-rows"),
    Case(2, 2, 2, 4, 0, 64, 64, "fp16", False, why="no-keys"),
    Case(2, 2, 2, 4, 0, 64, 64, "fp16", True, why="no-keys-causal"),
]
