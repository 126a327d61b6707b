"""What the order of additions to dQ costs: order_cost.py warm I N | order_cost.py time NAME.

The tree is that of PYTHONPATH: src, and a copy of it without waiting, as `sed -i '/while poll(.*) != turn:/,+1d'` makes of gluon_sm90.py, d192_gluon_sm90.py and
wide_gluon_sm90.py in attention/backward.
"""
import statistics, sys, torch
from flashmoe_science import flash_attention
from flashmoe_science.attention.backward.autograd import Options, attention_gradients
CASES = [(16384 // s, 2048 // d, 2048 // d, s, d, d, causal) for d in (64, 128, 256) for causal in (False, True) for s in (1024, 4096, 16384)]
CASES += [(1, 32, 32, 4096, 192, 128, False), (1, 128, 128, 4096, 192, 128, True), (2, 128, 128, 2048, 192, 128, True), (1, 32, 8, 8192, 128, 128, True), (4, 32, 4, 4096, 128, 128, True), (1, 16, 8, 8192, 256, 256, True)]
flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
def make(c):
    b, h, hk, s, d, dv, causal = c
    q, k, v, do = (torch.randn(b, n, s, w, device="cuda").bfloat16() for n, w in ((h, d), (hk, d), (hk, dv), (h, dv)))
    o, lse = flash_attention(q, k, v, causal=causal, return_lse=True)
    t = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do}
    opts = Options(causal=causal, softmax_scale=None, kernel="backward_gluon_sm90")
    return lambda: attention_gradients(opts, t, ["q", "k", "v"])
if sys.argv[1] == "warm":
    for c in CASES[int(sys.argv[2])::int(sys.argv[3])]:
        make(c)(); torch.cuda.synchronize(); torch.cuda.empty_cache()
else:
    for c in CASES:
        call = make(c); call(); call(); times = []
        for _ in range(11):
            flush.zero_(); s, e = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            s.record(); call(); e.record(); e.synchronize(); times.append(s.elapsed_time(e))
        print("TIME", sys.argv[2], *c, f"{statistics.median(times):.4f}", flush=True); del call; torch.cuda.empty_cache()
