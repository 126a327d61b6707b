"""Gradients of packed documents, by programs that share a group, heads walked over together, and K/V heads in turns.

packed_plans.py warm | time SECONDS. A plan is written s(shares)t(heads together)x(K/V heads or shares in turns).
"""

import concurrent.futures, dataclasses, os, pathlib, statistics, sys, time, tomllib
import torch
import flashmoe_science as fs
from flashmoe_science.attention.backward import autograd, plan as plans
from flashmoe_science.attention.backward.prepare import prepare_backward_kernels
from flashmoe_science.attention.backward.problem import BackwardProblem
from flashmoe_science.attention.inputs import Options
from flashmoe_science.attention.packed import planned_lengths
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.gpu.compile import compile_kernel
from flashmoe_science.gpu.specs import SPECS

planned, chosen = plans.hopper_backward_config, [None]

def config(problem, gpu):
    named = dict(zip(("shares", "heads_together", "heads_per_group"), chosen[0] or ()))
    return dataclasses.replace(planned(problem, gpu), **named, **({"programs": gpu.sms} if named else {}))

plans.hopper_backward_config = config
suite = tomllib.loads((pathlib.Path(fs.__file__).parent / "suites/train-packed.toml").read_text())
L = [case["lengths"] for case in suite["cases"]]
USUAL, SHORT, LONG = L[9], L[3], L[6]
C, W128, W4K = {"causal": True}, {"causal": True, "window": (127, -1)}, {"causal": True, "window": (4095, -1)}
CASES = [  # query and K/V heads, head size, mask, lengths, and plans
    (16, 1, 128, C, USUAL, "s1t8x2 s2t8x2 s2t8x4 s4t4x1 s4t4x2 s4t4x4 s4t4x8 s8t2x2 s8t2x8 s16t1x4"),
    (8, 1, 128, C, USUAL, "s1t8x2 s2t4x1 s2t4x2 s4t2x2 s4t2x4 s8t1x2"),
    (7, 1, 128, C, USUAL, "s1t7x2 s7t1x1 s7t1x2 s7t1x4 s7t1x8"),
    (16, 2, 128, C, USUAL, "s1t8x2 s2t4x2 s2t4x4 s4t2x2"),
    (32, 2, 128, C, USUAL, "s1t8x2 s2t8x2 s2t8x4 s4t4x2 s4t4x4"),
    (64, 4, 128, C, USUAL, "s1t8x2 s2t8x2 s2t8x4 s2t8x8 s4t4x2"),
    (28, 4, 128, C, L[4], "s1t7x2 s7t1x2 s7t1x4"),
    (32, 8, 128, W4K, L[16], "s1t1x2 s1t1x4 s1t1x8 s1t1x16 s1t2x2 s1t2x4 s1t2x16 s1t4x2 s1t4x4"),
    (64, 8, 64, W128, L[17], "s1t1x4 s1t1x8 s1t1x16 s1t1x32 s1t2x8 s1t4x8 s1t8x2 s1t8x8"),
    (16, 16, 128, {}, L[8], "s1t1x1 s1t1x2 s1t1x4 s1t1x8 s1t1x16"),
    (16, 1, 256, C, L[15], "s1t1x1 s1t2x1 s1t4x1 s1t8x1 s1t16x1"),
    (16, 4, 256, C, L[13], "s1t1x2 s1t1x16 s1t2x2 s1t2x16 s1t4x1 s1t4x2 s1t4x4"),
    (8, 1, 128, C, SHORT, "s1t8x2 s2t4x2 s4t2x2"),
    (8, 1, 128, C, 4 * USUAL, "s1t8x2 s2t4x2"),
    (8, 1, 128, C, USUAL[:7], "s1t8x2 s2t4x2 s4t2x2 s8t1x2 s8t1x8"),
    (16, 1, 128, C, 4 * USUAL, "s1t8x2 s2t8x2 s4t4x2"),
    (16, 1, 128, C, LONG, "s1t8x2 s2t8x2 s4t4x2 s8t2x2"),
    (16, 1, 64, C, USUAL, "s1t8x32 s2t8x32 s4t4x2 s4t4x32 s8t2x32"),
    (96, 8, 128, C, USUAL, "s1t6x2 s2t6x2 s3t4x2"),
    (16, 1, 128, {}, USUAL[:7], "s1t1x16 s2t1x16 s4t1x16"),
]  # fmt: skip
ways_of = {case[5]: [tuple(map(int, w[1:].replace("t", "x").split("x"))) for w in case[5].split()] for case in CASES}


def plan_of(heads, heads_kv, head_dim, mask, lengths, way):
    chosen[0], longest = way, planned_lengths(max(lengths), max(lengths), None)
    p = AttentionProblem(len(lengths), heads, heads_kv, *longest, head_dim, head_dim, "bf16", packed=True, **mask)
    return plans.plan_backward(BackwardProblem(p), SPECS["H200"], "backward_gluon_sm90")


def compile_one(task):
    for kernel in prepare_backward_kernels(plan_of(*task)):
        compile_kernel(kernel.source, 90)


def warm():  # turns are no constants of a kernel
    tasks = {(case[:3], str(case[3]), way[:2]): (*case[:5], way) for case in CASES for way in ways_of[case[5]]}
    tasks |= {number: (*case[:5], None) for number, case in enumerate(CASES)}
    with concurrent.futures.ProcessPoolExecutor(min(len(tasks), os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, tasks.values()))


def call_of(heads, heads_kv, head_dim, mask, lengths, _):
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    counts = heads, heads_kv, heads_kv, heads
    q, k, v, do = (torch.randn(sum(lengths), n, head_dim, device="cuda").bfloat16() for n in counts)
    o, lse = fs.flash_attention_varlen(q, k, v, starts, starts, *[max(lengths)] * 2, return_lse=True, **mask)
    given = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do, "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    options = Options(**{"causal": False, **mask}, max_seqlens=(max(lengths),) * 2, kernel="backward_gluon_sm90")
    left = mask.get("window", (1 << 30,))[0] + 1
    pairs = (n * (n + 1) // 2 - max(0, n - left) * (max(0, n - left) + 1) // 2 if mask else n * n for n in lengths)
    call = lambda: autograd.attention_gradients(options, given, ["q", "k", "v"])
    return given, call, 10 * heads * head_dim * sum(pairs)


def measure(case, flush):
    given, call, flops = call_of(*case)
    calls, pairs, usual = {}, {way: [] for way in ways_of[case[5]]}, None
    for way in (None, *pairs):  # what is prepared stays beside what comes after
        chosen[0] = way
        autograd._prepared.clear()
        found = call()
        (calls[way],) = autograd._prepared.values()
        usual = usual or found
        far = [n for n in "kv" if (found[n].float() - usual[n].float()).norm() > 4e-3 * usual[n].float().norm()]
        if far or not torch.equal(found["q"], usual["q"]):
            print("WRONG", case[:4], way, far)
    for turn in range(6):
        for way in reversed(pairs) if turn % 2 else pairs:
            pairs[way].append([torch.cuda.Event(enable_timing=True) for _ in range(4)])
            for arm, (begin, end) in zip((None, way), (pairs[way][-1][:2], pairs[way][-1][2:])):
                flush.zero_()
                begin.record()
                calls[arm](given)
                end.record()
        torch.cuda.synchronize()
    times = {way: [(a.elapsed_time(b), c.elapsed_time(d)) for a, b, c, d in found[1:]] for way, found in pairs.items()}
    c, usual = plan_of(*case[:5], None).config, statistics.median(a for found in times.values() for a, _ in found)
    print(f"D{case[2]} {case[0]}/{case[1]} {case[3]} {len(case[4])} documents up to {max(case[4])}:", end=" ")
    print(f"planned s{c.shares}t{c.heads_together}x{c.heads_per_group} {flops / usual / 1e9:.0f} |", end="")
    for (s, t, x), found in times.items():  # TFLOP/s, and how many times as fast as the plan in the same rounds
        rate, gain = (statistics.median(numbers) for numbers in zip(*((flops / b / 1e9, a / b) for a, b in found)))
        print(f" s{s}t{t}x{x}:{rate:.0f}({gain:.2f})", end="")
    print(flush=True)


if __name__ == "__main__":
    warm()
    until = time.monotonic() + float(sys.argv[2]) if sys.argv[1] == "time" else 0
    for case in (case for case in CASES if time.monotonic() < until):
        measure(case, torch.empty(64 << 20, dtype=torch.int32, device="cuda"))
