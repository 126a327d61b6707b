"""Host time, wall time and kernels of calls over ranks: what ``6_timelines`` and ``7_chains`` beside this file show.

It needs several GPUs. Run it in the clone:

    PYTHONPATH=src torchrun --nproc-per-node 2 lab/several_gpus/timeline.py qwen mixtral cp16k packed-gather packed-heads
"""

import os, sys, time, statistics, tomllib
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from flashmoe_science.distributed import ContextParallel, ExpertParallel
from flashmoe_science import route, fused_moe, flash_attention, flash_attention_varlen

rank = int(os.environ["RANK"])
ranks = int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
dev = torch.device("cuda", rank)
dist.init_process_group("cpu:gloo,cuda:nccl", device_id=dev)
mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("x",))["x"]
torch.manual_seed(0)
bf = torch.bfloat16


def leaf(*s, scale=1.0):
    return (torch.randn(*s, device=dev) * scale).to(bf).requires_grad_()


def experts(E, K, H, I, n, grad):
    ep = ExpertParallel(mesh)
    torch.manual_seed(rank)
    x = leaf(n, H)
    up = leaf(E // ranks, 2 * I, H, scale=H**-0.5)
    down = leaf(E // ranks, H, I, scale=I**-0.5)
    w, ids = route(torch.randn(n, E, device=dev), K)
    w = w.detach().requires_grad_()
    do = torch.randn(n, H, device=dev, dtype=bf)

    def call():
        if not grad:
            with torch.no_grad():
                return ep.fused_moe(x, up, down, w, ids)
        out = ep.fused_moe(x, up, down, w, ids)
        return torch.autograd.grad(out, (x, up, down, w), do)

    up1, down1 = leaf(E, 2 * I, H, scale=H**-0.5), leaf(E, H, I, scale=I**-0.5)

    def one():
        out = fused_moe(x, up1, down1, w, ids)
        return torch.autograd.grad(out, (x, up1, down1, w), do) if grad else out

    return call, one


def dense(S):
    cp = ContextParallel(mesh, heads_kv=8)
    q, k, v = leaf(1, 32, S // ranks, 128), leaf(1, 8, S // ranks, 128), leaf(1, 8, S // ranks, 128)
    do = torch.randn_like(q)

    def call():
        o = cp.attention(q, k, v, causal=True)
        return torch.autograd.grad(o, (q, k, v), do)

    Q, K, V = leaf(1, 32, S, 128), leaf(1, 8, S, 128), leaf(1, 8, S, 128)
    DO = torch.randn_like(Q)

    def one():
        return torch.autograd.grad(flash_attention(Q, K, V, causal=True), (Q, K, V), DO)

    return call, one


def packed(name, strategy="auto"):
    lengths = max(
        tomllib.load(open(f"src/flashmoe_science/suites/{name}.toml", "rb"))["cases"], key=lambda c: len(c["lengths"])
    )["lengths"]
    T = sum(lengths)
    cp = ContextParallel(mesh, heads_kv=8, strategy=strategy)
    plan = cp.plan(lengths)
    n = T // ranks
    q, k, v = leaf(n, 32, 128), leaf(n, 8, 128), leaf(n, 8, 128)
    do = torch.randn_like(q)

    def call():
        o = cp.attention_packed(q, k, v, plan, causal=True)
        return torch.autograd.grad(o, (q, k, v), do)

    Q, K, V = leaf(T, 32, 128), leaf(T, 8, 128), leaf(T, 8, 128)
    DO = torch.randn_like(Q)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=dev)

    def one():
        o = flash_attention_varlen(Q, K, V, cu, cu, max(lengths), max(lengths), causal=True)
        return torch.autograd.grad(o, (Q, K, V), DO)

    return call, one


cases = {
    "qwen": lambda: experts(128, 8, 2048, 768, 8192, True),
    "mixtral": lambda: experts(8, 2, 4096, 14336, 8192, True),
    "qwen-1": lambda: experts(128, 8, 2048, 768, 1, False),
    "qwen-128": lambda: experts(128, 8, 2048, 768, 128, False),
    "cp16k": lambda: dense(8192 * ranks),
    "packed-gather": lambda: packed("context-parallel"),
    "packed-heads": lambda: packed("context-parallel", "heads"),
}


def timed(call, what):
    for _ in range(4):
        call()
    host, wall = [], []
    for _ in range(30):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        t = time.perf_counter()
        call()
        host.append(time.perf_counter() - t)
        torch.cuda.synchronize()
        wall.append(time.perf_counter() - t)
    w = torch.tensor(wall, device=dev)
    dist.all_reduce(w, dist.ReduceOp.MAX)
    # back to back: calls without a wait
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    t = time.perf_counter()
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    chain = (time.perf_counter() - t) / 20
    if rank == 0:
        print(
            f"{what}: host {statistics.median(host) * 1e6:.0f} us, wall {w.median().item() * 1e6:.0f} us, in a chain {chain * 1e6:.0f} us",
            flush=True,
        )


for name in sys.argv[1:]:
    call, one = cases[name]()
    timed(call, name)
    if one:
        timed(one, f"{name}, one GPU")
    from torch.profiler import profile, ProfilerActivity

    torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p:
        call()
        torch.cuda.synchronize()
    if rank == 0:
        ev = sorted(
            (e for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e.time_range.start
        )
        t0 = ev[0].time_range.start
        print(
            f"{name}: {sum(e.time_range.elapsed_us() for e in ev):.0f} us of kernels in {ev[-1].time_range.end - t0:.0f} us"
        )
        for e in ev:
            print(f"{e.time_range.start - t0:8.0f} {e.time_range.elapsed_us():7.0f}  {e.name[:48]}")
        sys.stdout.flush()
    del call, one
    torch.cuda.empty_cache()
dist.destroy_process_group()
