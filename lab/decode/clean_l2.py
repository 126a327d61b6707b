"""Calls over a cache with L2 full of dirty lines, as a fill leaves it, and of clean ones: clean_l2.py. Microseconds, medians of 21."""

import statistics

import torch

from flashmoe_science import flash_attention_with_kv_cache

dirty = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
clean = torch.ones(64 << 20, dtype=torch.float32, device="cuda")


def fill():
    dirty.fill_(2)


def fill_and_read():
    dirty.fill_(2)
    clean.sum()


def microseconds(call, flush):
    for _ in range(3):
        call()
    times = []
    for _ in range(21):
        flush()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return statistics.median(times)


def cudnn(q, k, v):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; 32 heads on 8 K/V heads, D 128, bf16")
for batch, keys in ((1, 1024), (1, 8192), (4, 4096), (1, 32768), (1, 65536), (16, 8192), (64, 4096)):
    q = torch.randn(batch, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, keys, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    heads_first = [q, *(x.transpose(1, 2).contiguous() for x in (k, v))]
    source = torch.empty(2 * k.numel(), dtype=torch.uint8, device="cuda")  # a copy reads one half of the bytes, and writes one
    target = torch.empty_like(source)
    calls = {
        "ours": lambda: flash_attention_with_kv_cache(q, k, v),
        "cudnn": lambda: cudnn(*heads_first),
        "copy": lambda: target.copy_(source),
    }
    for name, call in calls.items():
        times = microseconds(call, fill), microseconds(call, fill_and_read)
        print(f"TIME {batch} x {keys} keys, {4 * k.numel() >> 20} MiB, {name}: after a fill {times[0]:.2f}, after a read {times[1]:.2f}", flush=True)
