#!/bin/bash
# Mixed batches on Hopper's own kernel: right first, then timed beside the portable ones.
mkdir -p "${TMPDIR:-/tmp}/mx" && W="${TMPDIR:-/tmp}/mx"
nvidia-smi --query-gpu=name,clocks.sm,clocks.max.sm --format=csv,noheader
cat > $W/batches.py <<'P'
import random, itertools, torch
def lognormal(n, mean, lo, hi, seed):
    d = random.Random(seed)
    return [max(lo, min(hi, int(d.lognormvariate(0, 0.8) * mean * 0.73))) for _ in range(n)]
def vary(n, mean, seed, spread=0.25):
    d = random.Random(seed)
    return [int(mean * (1 + spread * (2 * d.random() - 1))) for _ in range(n)]
B = {}
def add(name, q, k, H, HK, D, page): B[name] = (q, k, H, HK, D, page)
add("decode64x4k-32/8-p16", [1]*64, [4096]*64, 32, 8, 128, 16)
add("decode64x4k-64/8-p64", [1]*64, [4096]*64, 64, 8, 128, 64)
add("decode128-ragged2k-8/1-p16", [1]*128, lognormal(128, 2048, 64, 16384, 1), 8, 1, 128, 16)
add("chunk2048+63tok4k-32/8-p16", [2048]+[1]*63, [4096]+vary(63, 4096, 2), 32, 8, 128, 16)
add("chunk512+31tok8k-32/8-p64", [512]+[1]*31, [8192]+vary(31, 8192, 3), 32, 8, 128, 64)
add("chunk512on16k-8/1-p64", [512], [16384], 8, 1, 128, 64)
add("prompts8k-32/8-p16", *([x:=[979,233,2074,681,324,1889,1105,907],x]), 32, 8, 128, 16)
add("chunks4x2048-64/8-p64", [2048]*4, [2048,4096,8192,16384], 64, 8, 128, 64)
add("spec64x4-32/8-p16", [4]*64, vary(64, 4096, 4), 32, 8, 128, 16)
add("spec32x4-8k-8/1-d64-p64", [4]*32, vary(32, 8192, 5), 8, 1, 64, 64)
add("chunk1024+127tok2k-32/8-d64-p16", [1024]+[1]*127, [2048]+vary(127, 2048, 6), 32, 8, 64, 16)
add("gptoss-64/8-d64-p16", [700,1500,300]+[1]*60, [700,1500,2300]+lognormal(60, 3000, 100, 12000, 7), 64, 8, 64, 16)
def call(name, device="cuda", dtype=torch.bfloat16, seed=0):
    q, k, H, HK, D, page = B[name]
    meta = device == "meta"
    per = [-(-n // page) for n in k]; total = sum(per) + 2
    if meta:
        mk = lambda *s: torch.empty(*s, dtype=dtype)
    else:
        g = torch.Generator(device).manual_seed(seed)
        mk = lambda *s: torch.randn(*s, generator=g, device=device, dtype=dtype)
    table = torch.zeros(len(q), max(per), dtype=torch.int32)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(1)).tolist()
    for b, n in enumerate(per):
        table[b, :n] = torch.tensor([order.pop() for _ in range(n)], dtype=torch.int32)
    i32 = lambda v: torch.tensor(v, dtype=torch.int32, device=device) if not meta else torch.tensor(v, dtype=torch.int32)
    starts = [0, *itertools.accumulate(q)]
    out = dict(q=mk(sum(q), H, D), k=mk(total, page, HK, D), v=mk(total, page, HK, D), cu_seqlens_q=i32(starts),
        cu_seqlens_k=i32(starts), max_seqlen_q=max(q), max_seqlen_k=max(k), seqused_k=i32(k),
        page_table=table.to(device) if not meta else table)
    if not meta:
        for b, n in enumerate(k):  # poison behind the end
            if n % page:
                for c in "kv": out[c][table[b, (n-1)//page], n % page:] = float("nan")
    return out
def flops_bytes(name):
    q, k, H, HK, D, page = B[name]
    f = sum(4*D*H*(n*m - n*(n-1)/2) for n, m in zip(q, k)); return f, sum(k)*HK*D*4 + sum(q)*H*D*4
P
cat > $W/compile.py <<'P'
import sys, os; sys.path.insert(0, os.path.dirname(__file__))
import dataclasses, time
from concurrent.futures import ProcessPoolExecutor
import torch
from batches import B, call
from flashmoe_science.attention.tiles import ForwardConfig as F
from flashmoe_science.attention.mixed import plan as mp
usual = mp.mixed_config
def variant(few=None, many=None):
    def made(p, arch):
        c = usual(p, arch)
        if few: c = dataclasses.replace(c, few=F(max(c.few.block_m, 16), *few[:3]), few_blocks=few[3])
        if many: c = dataclasses.replace(c, many=F(*many))
        return c
    return made
FEW = {"few64w4s4b2": (64,4,4,2), "few64w4s3b3": (64,4,3,3), "few128w8s3b1": (128,8,3,1), "few128w4s2b2": (128,4,2,2)}
MANY = {"many128x128w8s2": (128,128,8,2), "many128x64w8s4": (128,64,8,4), "many128x64w8s2": (128,64,8,2), "many64x64w4s3": (64,64,4,3)}
SWEEP_FEW = ["decode64x4k-32/8-p16", "decode128-ragged2k-8/1-p16", "spec64x4-32/8-p16"]
SWEEP_MANY = ["chunk512on16k-8/1-p64", "prompts8k-32/8-p16", "chunks4x2048-64/8-p64", "gptoss-64/8-d64-p16"]
SWEEP = {"usual": {}, "few32": {"rows": 32}, "few64": {"rows": 64}, "s4b2": {"few": (64,4,4,2)}, "n128s2b2": {"few": (128,4,2,2)}, "n128w8s3b1": {"few": (128,8,3,1)}}
SWEEP_FEW = ["decode64x4k-32/8-p16", "decode64x4k-64/8-p64", "decode128-ragged2k-8/1-p16", "spec32x4-8k-8/1-d64-p64"]
def fewer(rows=None, few=None):
    def made(p, arch, kernel="mixed_triton"):
        c = usual(p, arch, kernel)
        if rows: c = dataclasses.replace(c, few=mp._few_tile(arch, max(64, p.head_dim), max(rows, c.few.block_m))[0], few_blocks=mp._few_tile(arch, max(64, p.head_dim), max(rows, c.few.block_m))[1], has_many=p.seqlen_q*p.group > max(rows, c.few.block_m))
        if few: c = dataclasses.replace(c, few=F(c.few.block_m, *few[:3]), few_blocks=few[3])
        return c
    return made
def pong(on):
    def made(p, arch, kernel="mixed_triton"):
        return dataclasses.replace(usual(p, arch, kernel), ping_pong=on)
    return made
def jobs():
    for n in B:
        yield n, "usual", None, "mixed_gluon_sm90"; yield n, "usual", None, "mixed_triton"
        if max(B[n][0]) > 8: yield n, "pong0", None, "mixed_gluon_sm90"; yield n, "pong1", None, "mixed_gluon_sm90"
    for n in SWEEP_FEW:
        for k in SWEEP: yield n, k, None, "mixed_triton"
def one(job):
    from flashmoe_science.attention.forward.plan import plan_attention
    from flashmoe_science.attention.forward.prepare import prepare_kernels
    from flashmoe_science.attention.mixed.prepare import prepare_mixed
    from flashmoe_science.attention.packed import packed_problem
    from flashmoe_science.gpu.specs import SPECS
    from flashmoe_science.gpu.compile import compile_kernel
    name, few, many, kernel = job
    try:
        mp.mixed_config = pong(few == "pong1") if few.startswith("pong") else fewer(**SWEEP[few])
        c = call(name, "meta"); lens = c.pop("max_seqlen_q"), c.pop("max_seqlen_k")
        p = packed_problem(c, lens, return_lse=False, causal=True)
        plan = plan_attention(p, SPECS["H100"], kernel)
        ks = prepare_mixed(plan, 132, c["q"].shape[0], c["k"].shape[0]) if kernel.startswith("mixed") else prepare_kernels(plan)
        return [(k.source.name, compile_kernel(k.source, 90).metadata.shared) for k in ks]
    except Exception as e:
        return f"{job}: {type(e).__name__}: {str(e)[:200]}"
if __name__ == "__main__":
    t = time.time()
    with ProcessPoolExecutor(14) as pool:
        for r in pool.map(one, list(jobs())):
            if isinstance(r, str): print("COMPILE", r, flush=True)
    print(f"compiled in {time.time()-t:.0f} s", flush=True)
P
cat > $W/run.py <<'P'
import sys, os; sys.path.insert(0, os.path.dirname(__file__))
import torch, statistics, time
from batches import B, call, flops_bytes
from compile import fewer, pong, SWEEP, SWEEP_FEW, mp, usual
from flashmoe_science import flash_attention_varlen as attend, flash_attention_with_kv_cache
from flashmoe_science.attention.forward import calls
from flashmoe_science.attention import reference
def timed(f, n):
    for _ in range(3): f()
    torch.cuda.synchronize()
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        f()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=s):
            for _ in range(n): o = f()
    times = []
    for _ in range(7):
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record(); g.replay(); b.record(); b.synchronize(); times.append(a.elapsed_time(b) / n * 1e3)
    return statistics.median(times)
def poison():
    x = [torch.full((n,), 255, dtype=torch.uint8, device="cuda") for n in (1<<28, 1<<24, 1<<22, 1<<20, 1<<14, 512, 512)]; del x
def check(name, kernel):
    c = call(name); poison()
    o, lse = attend(**c, causal=True, return_lse=True, kernel=kernel)
    base = attend(**c, causal=True, kernel="forward_triton")
    d = (o.float() - base.float()).abs().max().item()
    worst = 0.0
    q, k, H, HK, D, page = B[name]
    st = c["cu_seqlens_q"].tolist()
    for b in sorted({0, len(q)//2, len(q)-1}):
        kk, vv = (c[x][c["page_table"][b, : -(-k[b]//page)].long()].flatten(0, 1)[: k[b]].transpose(0, 1)[None] for x in "kv")
        qq = c["q"][st[b]:st[b+1]].transpose(0, 1)[None]
        for h in (0, HK - 1):
            G = H // HK
            e, el = reference.attention(qq[:, h*G:(h+1)*G], kk[:, h:h+1], vv[:, h:h+1], causal=True, dtype=torch.float64)
            worst = max(worst, (o[st[b]:st[b+1], h*G:(h+1)*G].transpose(0, 1)[None].double() - e).abs().max().item())
            worst = max(worst, 0.1*(lse[h*G:(h+1)*G, st[b]:st[b+1]][None].double() - el).abs().max().item())
    same = all(torch.equal(o, attend(**c, causal=True, kernel=kernel)) for _ in range(50))
    print(f"CHECK {kernel:17s} {name:34s} to fp64 {worst:.2e}  to forward_triton {d:.2e}  nan {bool(o.isnan().any())}  same bits {same}", flush=True)
copy_a = torch.empty(1 << 29, dtype=torch.uint8, device="cuda"); copy_b = torch.empty_like(copy_a)
rate = 2 * copy_a.numel() / timed(lambda: copy_b.copy_(copy_a), 5) / 1e6
print(f"copy {rate:.2f} TB/s", flush=True); del copy_a, copy_b
GLUON = sys.argv[1] == "gluon"
for kernel in (("mixed_gluon_sm90",) if GLUON else ("mixed_triton",)):
    for name in B:
        try: check(name, kernel)
        except Exception as e: print("CHECK FAILED", kernel, name, type(e).__name__, str(e)[:300], flush=True)
for name in B if GLUON else ():
    try:
        c = call(name); f, by = flops_bytes(name); q, k, H, HK, D, page = B[name]
        n = 10 if f < 1e12 else 4
        run = {kk: (lambda kk=kk: attend(**c, causal=True, kernel=kk)) for kk in ("mixed_gluon_sm90", "mixed_triton", "forward_triton")}
        t = {kk: timed(g, n) for kk, g in run.items()}
        line = f"TIME {name:34s} gluon {t['mixed_gluon_sm90']:8.1f}  triton {t['mixed_triton']:8.1f}  forward_triton {t['forward_triton']:8.1f}  x{t['forward_triton']/t['mixed_gluon_sm90']:5.2f}  {f/t['mixed_gluon_sm90']/1e6:6.1f} TFLOP/s {by/t['mixed_gluon_sm90']/1e6:5.2f} TB/s"
        if len(set(q)) == 1 and q[0] <= 8:
            qq = c["q"].view(len(q), q[0], H, D).transpose(1, 2)
            d = timed(lambda: flash_attention_with_kv_cache(qq, c["k"], c["v"], cache_seqlens=c["seqused_k"], page_table=c["page_table"], causal=True), n)
            line += f"  with_kv_cache {d:7.1f}"
        elif max(q) > 8:
            for on in (False, True):
                mp.mixed_config = pong(on); calls._prepared.clear()
                line += f"  pong{int(on)} {timed(run['mixed_gluon_sm90'], n):.1f}"
            mp.mixed_config = usual; calls._prepared.clear()
        print(line, flush=True)
    except Exception as e: print("TIME FAILED", name, type(e).__name__, str(e)[:300], flush=True)
for name in () if GLUON else SWEEP_FEW:
    c = call(name); line = f"SWEEP {name:34s}"
    for key, value in SWEEP.items():
        mp.mixed_config = fewer(**value); calls._prepared.clear()
        try: line += f"  {key} {timed(lambda: attend(**c, causal=True, kernel='mixed_triton'), 5):.1f}"
        except Exception as e: line += f"  {key} {type(e).__name__}"
    print(line, flush=True)
mp.mixed_config = usual; calls._prepared.clear()
# what the host takes, eager
import time as clock
c = call("decode128-ragged2k-8/1-p16")
for kk in ("mixed_gluon_sm90", "mixed_triton", "forward_triton") if GLUON else ():
    for _ in range(20): attend(**c, causal=True, kernel=kk)
    torch.cuda.synchronize(); t0 = clock.perf_counter()
    for _ in range(200): attend(**c, causal=True, kernel=kk)
    t1 = clock.perf_counter(); torch.cuda.synchronize()
    print(f"HOST {kk} {(t1-t0)/200*1e6:.1f} us a call", flush=True)
P
timeout 60 python $W/compile.py
timeout 30 python $W/run.py triton
timeout 50 python $W/run.py gluon
if python -c "import pytest" 2>/dev/null; then
  X=""; python -c "import xdist" 2>/dev/null && X="-n 12"
  timeout 60 python -m pytest -q -p no:cacheprovider -x --maxfail=8 $X tests/attention/test_mixed_gpu.py -m gpu -k "graph or invariant or 200 or other_numbers or random or compiled or far" 2>&1 | tail -25
else
  timeout 50 python - <<'Q'
import sys; sys.path.insert(0, ".")
print("no pytest")
Q
fi
