"""Time other tiles of the merge, and fewer warps, on caches of ordinary heads whose lengths lie on the device.

    FLASHMOE_FA3_LIBRARY=.../fa3.so python lab/decode/merge_tiles.py [--seconds 60]     # on an H200
    python lab/decode/merge_tiles.py --compile                                         # no GPU

A merge is rows x columns x shares of a step, and warps. "alone" launches no merge. Times are medians of replays of a graph
over sets of inputs that do not fit L2. Where all lengths are alike and fill the GPU, no sequence is split, and a merge has
nothing to do but to find that out: each program reads all lengths, and its warps meet in some 20 barriers.

Foreseen, in us more than alone: as it is 3 to 4, one wave of programs of one warp 1 to 2. With unlike lengths 5 to 10 as it
is; fewer registers make one wave of two or three.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import sweep
import torch
from sweep import Inputs, draw_lengths, fa3, ours, problem_of

from flashmoe_science.attention.decode import plan as decode_plan, prepare
from flashmoe_science.attention.decode.plan import MergeConfig, plan_with_kv_cache
from flashmoe_science.gpu.compile import read_resources
from flashmoe_science.gpu.specs import find_gpu

START = time.monotonic()
# Sequences, heads, K/V heads, keys; page size; lengths, if they are not all the most.
CASES = [
    ((16, 32, 8, 8192), 16, None), ((64, 32, 8, 4096), 16, None), ((256, 32, 8, 1024), 16, None),
    ((8, 64, 8, 16384), 64, None), ((128, 16, 2, 1536), 16, None), ((32, 8, 1, 8192), 64, None),
    ((64, 32, 8, 32768), 16, draw_lengths()), ((64, 8, 1, 32768), 64, draw_lengths()),
]  # fmt: skip
# (rows, columns, shares of a step), warps
TILES = [None, ((1, 128, 8), 4), ((1, 128, 8), 1), ((1, 128, 4), 1), ((4, 128, 4), 1), ((4, 128, 8), 4), ((1, 128, 16), 2)]


def with_merge(problem, gpu, tile):
    """Return a plan, and its kernels, with another merge."""
    chosen, warps = decode_plan._merge_config, decode_plan.MERGE_WARPS
    if tile is not None:
        decode_plan._merge_config = lambda *_: MergeConfig(*tile[0])
        decode_plan.MERGE_WARPS = prepare.MERGE_WARPS = tile[1]
    try:
        plan = plan_with_kv_cache(problem, gpu)
        return plan, prepare.prepare_cache_kernels(plan)
    finally:
        decode_plan._merge_config = chosen
        decode_plan.MERGE_WARPS = prepare.MERGE_WARPS = warps


def timed(inputs, plan, kernels) -> float | str:
    """Launch these kernels, which ``prepare_call`` would make anew."""
    kept = prepare.prepare_cache_kernels
    prepare.prepare_cache_kernels = lambda _: kernels
    try:
        return ours(inputs, plan)
    finally:
        prepare.prepare_cache_kernels = kept


def main() -> None:
    gpu = find_gpu("H200")
    for case, page, lengths in CASES:
        problem = problem_of(case, page_size=page, has_seqlens=True)
        plans = {f"{'as it is' if tile is None else tile}": with_merge(problem, gpu, tile) for tile in TILES}
        notes = {name: read_resources(kernels[-1].source, 90).registers for name, (_, kernels) in plans.items()}
        if ARGS.compile:
            print(case, page, {name: (str(plan.merge), notes[name]) for name, (plan, _) in plans.items()})
            continue
        inputs = Inputs(problem, gpu.l2_bytes, lengths)
        print(f"\n{problem.describe()}{' lengths unlike' if lengths else ''}", flush=True)
        sweep.show("", "alone", ours(inputs, plans["as it is"][0], only_decode=True), inputs.kv_bytes)
        for name, (plan, kernels) in plans.items():
            if time.monotonic() - START > ARGS.seconds:
                print("out of time")
                return
            merge = "-".join(map(str, dataclasses.astuple(plan.merge)))
            sweep.show("", f"{name} {merge} r{notes[name]}", timed(inputs, plan, kernels), inputs.kv_bytes)
        sweep.attempt("", "fa3", lambda inputs=inputs: fa3(inputs), inputs.kv_bytes)
        del inputs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--compile", action="store_true")
    ARGS = sweep.ARGS = parser.parse_args()
    main()
