"""Gradients with one, two, four and eight query heads of a group walked over together, in turn: heads_together.py warm I N | check | time."""
import dataclasses, os, statistics, sys
import torch
from flashmoe_science import flash_attention
from flashmoe_science.attention import reference
from flashmoe_science.attention.backward import plan as backward_plan, autograd as gradients
from flashmoe_science.attention.backward.autograd import Options, attention_gradients
T = [None]
plain = backward_plan.hopper_backward_config
def conf(p, gpu):
    c = plain(p, gpu)
    return c if T[0] is None else dataclasses.replace(c, heads_together=min(T[0], p.forward.group))
backward_plan.hopper_backward_config = conf
N = (-1, -1)
flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
CASES = [(1, 32, 8, 8192, 128, 128, N), (4, 32, 8, 2048, 128, 128, N), (4, 32, 8, 4096, 128, 128, N), (1, 32, 4, 16384, 128, 128, N), (4, 32, 4, 4096, 128, 128, N), (8, 32, 4, 2048, 128, 128, N),
  (1, 32, 16, 8192, 128, 128, N), (1, 64, 8, 8192, 128, 128, N), (1, 32, 8, 32768, 128, 128, N), (1, 16, 8, 8192, 256, 256, N), (4, 16, 8, 2048, 256, 256, N), (4, 16, 4, 4096, 256, 256, N), (1, 128, 16, 4096, 192, 128, N),
  (1, 32, 8, 8192, 64, 64, N), (4, 32, 4, 4096, 64, 64, N), (1, 32, 16, 8192, 128, 128, (1023, 0))]
WAYS = (1, 2, 4, 8)
def back(case):
    b, h, hk, s, d, dv, window = case
    q, k, v, do = (torch.randn(b, n, s, c, device="cuda").bfloat16() for n, c in ((h, d), (hk, d), (hk, dv), (h, dv)))
    o, lse = flash_attention(q, k, v, causal=True, window=window, return_lse=True)
    t = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do}
    opts = Options(causal=True, softmax_scale=None, window=window, kernel="backward_gluon_sm90")
    return lambda: attention_gradients(opts, t, ["q", "k", "v"]), 5 * b * h * s * s * (d + dv) / 2
mode, *rest = sys.argv[1:]
if mode == "warm":
    i, n = map(int, rest)
    for c, t in [(c, t) for c in CASES for t in WAYS if t <= c[1] // c[2]][i::n]:
        if c[3] == 32768: continue
        T[0] = t; gradients._prepared.clear(); call, _ = back(c); call(); torch.cuda.synchronize(); del call; torch.cuda.empty_cache()
elif mode == "check":
    for b, h, hk, sq, sk, d, dv, window in [(2, 8, 2, 300, 300, 128, 128, N), (1, 8, 1, 700, 513, 128, 128, N), (1, 8, 2, 513, 1100, 128, 128, N), (2, 6, 3, 300, 777, 64, 64, N), (1, 8, 4, 640, 640, 256, 256, N), (1, 8, 4, 500, 640, 192, 128, N)]:
        q, k, v, do = (torch.randn(b, n, s, c, device="cuda").bfloat16() for n, s, c in ((h, sq, d), (hk, sk, d), (hk, sk, dv), (h, sq, dv)))
        o, lse = reference.attention(q, k, v, causal=True, window=window, dtype=torch.float32)
        t = {"q": q, "k": k, "v": v, "o": o.bfloat16(), "lse": lse.float(), "do": do}
        opts = Options(causal=True, softmax_scale=None, window=window, kernel="backward_gluon_sm90")
        exact = reference.attention_backward(q, k, v, do, causal=True, window=window, softmax_scale=None, dtype=torch.float64)
        for way in (1, 2, 4):
            if way > h // hk or (h // hk) % way: continue
            T[0] = way; gradients._prepared.clear()
            found = attention_gradients(opts, t, ["q", "k", "v"])
            same = all(all(torch.equal(found[n], again[n]) for n in ("q", "k", "v")) for again in (attention_gradients(opts, t, ["q", "k", "v"]) for _ in range(20)))
            errs = [f"{((found[n].double() - exact[n]).norm() / exact[n].norm()).item():.2e}" for n in ("q", "k", "v")]
            print("CHECK", way, "together", (b, h, hk, sq, sk, d, dv, window), *errs, "same bits" if same else "OTHER BITS", flush=True)
else:
    print(torch.cuda.get_device_name())
    for c in CASES:
        call, flops = back(c); ways = [t for t in WAYS if t <= c[1] // c[2]]; times = {t: [] for t in ways}
        for t in ways: T[0] = t; gradients._prepared.clear(); call(); call()
        calls = {}
        for r in range(4):
            for t in ways if r % 2 == 0 else ways[::-1]:
                T[0] = t; gradients._prepared.clear(); call()
                for _ in range(5):
                    flush.zero_()
                    s, e = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    s.record(); call(); e.record(); e.synchronize()
                    times[t].append(s.elapsed_time(e))
        base = statistics.median(times[1])
        print("TIME", c, f"ms of one {base:.4f} ({flops / base / 1e9:.0f} TFLOP/s); ", *(f"{t}: {base / statistics.median(times[t]):.3f}" for t in ways[1:]), "| halves of one", *(f"{statistics.median(times[1][i:i+10]):.4f}" for i in (0, 10)), flush=True)
        del call; torch.cuda.empty_cache()
