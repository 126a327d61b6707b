"""Times of calls whose row tiles do not fill an H200, by each kernel that can serve them: few_tiles.py [two].

``two``: heads of 64 columns, full, take two warpgroups for three; ``two causal``: causal ones. Microseconds of one call in a CUDA graph, L2 flushed before
each, median of 30; forward_gluon_sm90, forward_triton (which splits the keys), cuDNN.
"""

import dataclasses
import statistics
import sys

import torch

from flashmoe_science import flash_attention
from flashmoe_science.attention.forward import plan_sm90 as hopper_plan

if "two" in sys.argv:
    which = (64, 64, "causal" in sys.argv)
    three = hopper_plan.HOPPER_TABLE[which]
    two = dataclasses.replace(hopper_plan.HOPPER_TABLE[64, 64, False][0][1], warpgroups=2)
    hopper_plan.HOPPER_TABLE[which] = tuple((keys, two) for keys, _ in three)
flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")


def microseconds(call):
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(30):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return statistics.median(times)


def cudnn(q, k, v, causal):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", *sys.argv[1:])
for d in (64, 128, 256):
    for length in (256, 512, 1024, 2048, 4096):
        for tiles in (8, 16, 32, 64, 96):
            heads = tiles * 128 // length
            if heads == 0 or ("two" in sys.argv and d != 64):
                continue
            for causal in (False, True):
                if "causal" in sys.argv and not (causal and length >= 2048):
                    continue
                q, k, v = (torch.randn(1, heads, length, d, dtype=torch.bfloat16, device="cuda") for _ in range(3))
                found = {"cudnn": microseconds(lambda: cudnn(q, k, v, causal))}
                for kernel in ("forward_gluon_sm90", "forward_triton", "auto"):
                    found[kernel] = microseconds(lambda: flash_attention(q, k, v, causal=causal, kernel=kernel))
                what = f"D {d} {'causal' if causal else 'full'} {length} keys, {tiles} tiles of 128 rows"
                print(what, *(f"{name} {t:.2f}" for name, t in found.items()), flush=True)
