"""Call every attention kernel with small shapes, on a GPU that runs them, and check the answers.

For compute-sanitizer, which is slow: it watches each access to memory (``memcheck``) or to shared memory
(``racecheck``). ``make sanitize`` runs both.

    compute-sanitizer --tool racecheck --error-exitcode 9 python tools/small_calls.py [--dims 64,96]

Memory comes from cudaMalloc call by call, so that what lies behind a tensor belongs to nobody. Exit code 1: an answer
is wrong, whatever the sanitizer says.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

from flashmoe_science import flash_attention
from flashmoe_science.attention import reference
from flashmoe_science.errors import UnsupportedError
from flashmoe_science.operators.attention import OPERATOR

KERNELS = ("forward_gluon_sm90", "forward_short_gluon", "forward_triton")
# Queries, keys: one step and several, tiles that end early, rows that see no key.
LENGTHS = ((64, 64), (200, 333), (333, 200), (512, 512))


def main() -> int:
    """Return 1 where an answer is wrong, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", default="64,96,128,192,256", help="head dimensions, separated by commas")
    parser.add_argument("--kernels", default=",".join(KERNELS), help="separated by commas")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here", file=sys.stderr)
        return 2
    calls = wrong = refused = 0
    dims = [int(dim) for dim in args.dims.split(",")]
    for kernel, dim, (rows, keys), causal in itertools.product(KERNELS, dims, LENGTHS, (False, True)):
        if kernel not in args.kernels.split(","):
            continue
        generator = torch.Generator(device="cuda").manual_seed(calls)
        q, k, v = (
            torch.randn(1, heads, length, dim, generator=generator, device="cuda").bfloat16()
            for heads, length in ((2, rows), (1, keys), (1, keys))
        )
        try:
            o, _ = flash_attention(q, k, v, causal=causal, return_lse=True, kernel=kernel)
        except UnsupportedError:  # the sanitizer is the point here; what each kernel serves is tested elsewhere
            refused += 1
            continue
        exact, _ = reference.attention(q, k, v, causal=causal, softmax_scale=None, dtype=torch.float64)
        low = reference.attention_low_precision(q, k, v, causal=causal, softmax_scale=None)
        error, budget = (o.double() - exact).abs().max().item(), OPERATOR.error_budget(exact, low)
        calls += 1
        if not error <= budget:
            wrong += 1
            print(f"{kernel} D {dim}, {rows} x {keys}, causal {causal}: error {error:.2e}, allowed {budget:.2e}")
    print(f"{calls} calls, {wrong} wrong; {refused} that the kernel does not serve")
    return 1 if wrong or not calls else 0


if __name__ == "__main__":
    raise SystemExit(main())
