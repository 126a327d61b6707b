"""Causal gradients of grouped heads, by programs that share a group, heads walked over together, and K/V heads in turns.

shared_groups.py warm | check | time SECONDS. A plan is written s(shares)t(heads together)x(K/V heads or shares in turns).
"""

import concurrent.futures
import dataclasses
import os
import statistics
import sys
import time

import torch

from flashmoe_science import flash_attention
from flashmoe_science.attention import reference
from flashmoe_science.attention.backward import autograd, plan as backward_plan
from flashmoe_science.attention.backward.autograd import attention_gradients
from flashmoe_science.attention.inputs import Options

planned = backward_plan.hopper_backward_config
chosen: list[tuple[int, int, int] | None] = [None]


def config(problem, gpu):
    found = planned(problem, gpu)
    if chosen[0] is None:
        return found
    shares, together, turns = chosen[0]
    p = problem.forward
    tiles = -(-p.seqlen_k // found.keys) * p.batch * p.heads_kv * shares
    programs = min(gpu.sms, tiles)
    return dataclasses.replace(found, shares=shares, heads_together=together, heads_per_group=turns, programs=programs)


backward_plan.hopper_backward_config = config


def name_of(problem_plan):
    c = problem_plan.config
    return f"s{c.shares}t{c.heads_together}x{c.heads_per_group}"


# Query and K/V heads, batch, tokens, head size, and whether causal. First those of suite grouped-backward.
CASES = [
    (28, 4, 1, 4096, 128), (40, 8, 1, 4096, 128), (64, 8, 1, 8192, 128), (32, 2, 1, 8192, 128), (24, 4, 1, 8192, 64),
    (28, 4, 1, 8192, 128), (32, 2, 1, 4096, 128), (32, 8, 1, 8192, 128), (32, 8, 1, 4096, 128), (28, 4, 1, 2048, 128),
    (28, 4, 1, 16384, 128), (32, 2, 1, 16384, 128), (32, 4, 1, 8192, 128), (20, 4, 1, 4096, 128), (24, 4, 1, 4096, 128),
    (48, 8, 1, 4096, 128), (16, 1, 1, 8192, 128), (28, 4, 1, 4096, 64), (64, 8, 1, 4096, 128), (28, 4, 4, 4096, 128),
    (32, 2, 1, 8192, 64), (40, 8, 1, 8192, 128), (32, 8, 1, 2048, 128), (24, 4, 1, 4096, 64), (64, 8, 1, 8192, 64),
    (16, 8, 1, 8192, 128), (40, 8, 1, 4096, 64), (20, 4, 1, 8192, 128), (32, 8, 1, 8192, 64), (32, 2, 1, 32768, 128),
    (28, 4, 1, 2048, 128, False), (32, 2, 1, 4096, 128, False), (16, 1, 1, 4096, 128, False), (28, 4, 1, 3000, 128, False),
    (48, 8, 1, 8192, 128), (32, 4, 1, 4096, 64), (28, 4, 1, 16384, 64), (32, 8, 4, 4096, 128),
]  # fmt: skip
# By query heads of a group: shares and heads together.
WAYS = {
    2: [(1, 2), (2, 1)],
    4: [(1, 4), (1, 2), (2, 2), (4, 1)],
    5: [(1, 5), (5, 1)],
    6: [(1, 6), (2, 3), (3, 2), (6, 1)],
    7: [(1, 7), (7, 1)],
    8: [(1, 4), (1, 8), (2, 4), (4, 2), (8, 1)],
    16: [(1, 4), (1, 16), (2, 8), (4, 4), (8, 2), (16, 1)],
}


def parts_of(case):
    return (*case, True)[:6]


def groups_of(group, causal):
    """Return shares and heads together: walks of equal lengths gain nothing by heads together."""
    return WAYS[group] if causal else [(shares, 1) for shares in range(1, group + 1) if group % shares == 0]


def ways_of(case):
    heads, heads_kv, batch, seqlen, head_dim, causal = parts_of(case)
    usual = 32 if head_dim == 64 else 16
    found = []
    for shares, together in groups_of(heads // heads_kv, causal):
        for turns in dict.fromkeys((4, 8, usual)):
            if turns == 4 or turns <= 2 * heads_kv * batch * shares:
                found.append((shares, together, turns))
    return found


def call_of(case):
    heads, heads_kv, batch, seqlen, head_dim, causal = parts_of(case)
    torch.manual_seed(0)
    q, k, v, do = (
        torch.randn(batch, n, seqlen, head_dim, device="cuda").bfloat16() for n in (heads, heads_kv, heads_kv, heads)
    )
    o, lse = flash_attention(q, k, v, causal=causal, return_lse=True)
    tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do}
    options = Options(causal=causal, softmax_scale=None, kernel="backward_gluon_sm90")
    return lambda: attention_gradients(options, tensors, ["q", "k", "v"]), tensors


def compile_one(task):
    heads, heads_kv, head_dim, causal, way = task
    from flashmoe_science.attention.backward.plan import plan_backward
    from flashmoe_science.attention.backward.prepare import prepare_backward_kernels
    from flashmoe_science.attention.backward.problem import BackwardProblem
    from flashmoe_science.attention.problem import AttentionProblem
    from flashmoe_science.gpu.compile import compile_kernel
    from flashmoe_science.gpu.specs import SPECS

    chosen[0] = way and (*way, 16)
    problem = BackwardProblem(
        AttentionProblem(
            batch=1, heads=heads, heads_kv=heads_kv, seqlen_q=4096, seqlen_k=4096, head_dim=head_dim,
            head_dim_v=head_dim, dtype="bf16", causal=causal,
        )
    )  # fmt: skip
    for kernel in prepare_backward_kernels(plan_backward(problem, SPECS["H200"], "backward_gluon_sm90")):
        compile_kernel(kernel.source, 90)


def warm():
    tasks = {}
    for heads, heads_kv, _, _, head_dim, causal in map(parts_of, CASES):
        for way in (*groups_of(heads // heads_kv, causal), None):
            tasks.setdefault((heads // heads_kv, head_dim, causal, way), (heads, heads_kv, head_dim, causal, way))
    with concurrent.futures.ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, tasks.values()))


def check():
    """dQ has the bits of the plan without shares; dK and dV are right; all have the same bits in 10 calls."""
    for head_dim in (128, 64):
        for heads, heads_kv, batch, seqlen in ((14, 2, 2, 700), (32, 2, 1, 1300), (12, 2, 1, 640), (10, 2, 1, 1025)):
            chosen[0] = None
            autograd._prepared.clear()
            call, t = call_of((heads, heads_kv, batch, seqlen, head_dim))
            usual = call()
            exact = reference.attention_backward(
                t["q"], t["k"], t["v"], t["do"], causal=True, softmax_scale=None, dtype=torch.float64
            )

            def errors(found):
                return [f"{((found[n].double() - exact[n]).norm() / exact[n].norm()).item():.2e}" for n in "qkv"]

            print("CHECK usual", (heads, heads_kv, batch, seqlen, head_dim), *errors(usual), flush=True)
            for shares, together in WAYS[heads // heads_kv]:
                for turns in (3, 16)[: 2 if head_dim == 128 and seqlen == 700 else 1]:
                    chosen[0] = (shares, together, turns)
                    autograd._prepared.clear()
                    nan = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(8)]
                    del nan
                    found = call()
                    runs = [call() for _ in range(10)]
                    same = all(torch.equal(found[n], again[n]) for n in "qkv" for again in runs)
                    as_usual = torch.equal(found["q"], usual["q"])
                    print(
                        "CHECK", chosen[0], *errors(found), "same bits" if same else "OTHER BITS",
                        "dq as usual" if as_usual else "DQ DIFFERS", flush=True,
                    )  # fmt: skip


def cudnn_call(t, causal):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (t[n].detach().requires_grad_() for n in "qkv")
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return lambda: torch.autograd.grad(o, (q, k, v), t["do"], retain_graph=True)


def measure(until):
    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for case in CASES:
        heads, heads_kv, batch, seqlen, head_dim, causal = parts_of(case)
        if time.monotonic() > until - 4:
            print("no time left for", case)
            continue
        chosen[0] = None
        autograd._prepared.clear()
        call, t = call_of(case)
        flops = (5 if causal else 10) * batch * heads * seqlen * seqlen * head_dim
        ways = [None, *ways_of(case)]
        calls = {}
        usual = call()
        for way in ways:  # what is prepared stays beside what comes after
            chosen[0] = way
            autograd._prepared.clear()
            call()
            (calls[way],) = autograd._prepared.values()
        wrong = []
        for way in ways[1:]:
            found = calls[way](t)
            if not torch.equal(found["q"], usual["q"]):
                wrong.append((way, "dq"))
            for n in "kv":
                if (found[n].float() - usual[n].float()).norm() > 4e-3 * usual[n].float().norm():
                    wrong.append((way, n))
        arms = {way: (lambda way=way: calls[way](t)) for way in ways}
        try:
            arms["cudnn"] = cudnn_call(t, causal)
            arms["cudnn"]()
        except RuntimeError as error:
            print("cudnn", error)
        times = {arm: [] for arm in arms}
        for turn in range(7):
            for arm in arms if turn % 2 == 0 else reversed(arms):
                flush.zero_()
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                a.record()
                arms[arm]()
                b.record()
                times[arm].append((a, b))
            torch.cuda.synchronize()
        rates = {
            arm: flops / statistics.median(a.elapsed_time(b) for a, b in pairs[1:]) / 1e9
            for arm, pairs in times.items()
        }
        chosen[0] = None
        c = planned_of(case)
        in_order = sorted((arm for arm in rates if isinstance(arm, tuple)), key=lambda arm: -rates[arm])
        print(
            f"D{head_dim} {heads}/{heads_kv} {batch}x{seqlen}{'' if causal else ' full'}: cudnn {rates.get('cudnn', 0):.0f},",
            f"planned s{c.shares}t{c.heads_together}x{c.heads_per_group} {rates[None]:.0f} |",
            " ".join(f"s{s}t{to}x{tu}:{rates[s, to, tu]:.0f}" for s, to, tu in in_order),
            f"WRONG {wrong}" if wrong else "", flush=True,
        )  # fmt: skip
        del calls, arms, call, t, usual, found
        torch.cuda.empty_cache()


def planned_of(case):
    from flashmoe_science.attention.backward.problem import BackwardProblem
    from flashmoe_science.attention.problem import AttentionProblem
    from flashmoe_science.gpu.device import gpu_at

    heads, heads_kv, batch, seqlen, head_dim, causal = parts_of(case)
    forward = AttentionProblem(
        batch=batch, heads=heads, heads_kv=heads_kv, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=head_dim,
        head_dim_v=head_dim, dtype="bf16", causal=causal,
    )  # fmt: skip
    return planned(BackwardProblem(forward), gpu_at(torch.device("cuda", 0)))


if __name__ == "__main__":
    if sys.argv[1] == "warm":
        warm()
    elif sys.argv[1] == "check":
        check()
    else:
        measure(time.monotonic() + float(sys.argv[2]))
