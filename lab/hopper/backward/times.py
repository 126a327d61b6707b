"""Errors and times of the gradients of attention on an H200: times.py [FIELD=NUMBER ...] [LENGTHS=512,4096] [rivals].

FIELD is one of ``HopperBackwardConfig`` that takes NUMBER in place of what the plan says. First the gradients of small
calls are held against fp64, and the bits of a second call against the first. Then TFLOP/s, 2.5 times the forward's
operations over all kernels of a call, nine rounds, medians; 16,384 tokens, hidden size 2048, bf16.
"""

import dataclasses
import statistics
import sys

import torch

from flashmoe_science.attention.backward import plan as backward_plan
from flashmoe_science.attention import reference
from flashmoe_science.attention.backward.autograd import Options, attention_gradients

given = dict(word.split("=") for word in sys.argv[1:] if "=" in word)
lengths = [int(n) for n in given.pop("LENGTHS", "1024,4096,16384").split(",")]
plan_config = backward_plan.hopper_backward_config
backward_plan.hopper_backward_config = lambda problem, gpu: dataclasses.replace(
    plan_config(problem, gpu), **{name: int(number) for name, number in given.items()}
)
torch.manual_seed(0)
flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")


def make(batch, heads, heads_kv, sq, sk, d, causal):
    shapes = (heads, sq), (heads_kv, sk), (heads_kv, sk), (heads, sq)
    q, k, v, do = (torch.randn(batch, h, s, d, device="cuda").bfloat16() for h, s in shapes)
    o, lse = reference.attention(q, k, v, causal=causal, dtype=torch.float32)
    tensors = {"q": q, "k": k, "v": v, "o": o.bfloat16(), "lse": lse.float(), "do": do}
    return tensors, Options(causal=causal, softmax_scale=None, kernel="backward_gluon_sm90")


def check(*sizes):
    tensors, options = make(*sizes)
    found = attention_gradients(options, tensors, ["q", "k", "v"])
    again = attention_gradients(options, tensors, ["q", "k", "v"])
    q, k, v, do = (tensors[name] for name in ("q", "k", "v", "do"))
    exact = reference.attention_backward(q, k, v, do, causal=options.causal, softmax_scale=None, dtype=torch.float64)
    errors = [f"{((found[n].double() - exact[n]).norm() / exact[n].norm()).item():.2e}" for n in ("q", "k", "v")]
    same = all(torch.equal(found[n], again[n]) for n in ("q", "k", "v"))
    print("CHECK", sizes, "relative errors of dq, dk, dv", *errors, "same bits" if same else "OTHER BITS", flush=True)


def milliseconds(call):
    call()
    times = []
    for _ in range(9):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def cudnn(tensors, causal):
    leaves = [tensors[name].detach().requires_grad_() for name in ("q", "k", "v")]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        o = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
    return lambda: torch.autograd.grad(o, leaves, tensors["do"], retain_graph=True)


print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", *sys.argv[1:])
for d in (64, 128, 256):
    for causal in (False, True):
        check(2, 4, 2, 1000, 1100, d, causal)
        check(1, 16, 16, 4096, 4096, d, causal)
for d in (64, 128, 256):
    for causal in (False, True):
        for length in lengths:
            heads = 2048 // d
            tensors, options = make(16384 // length, heads, heads, length, length, d, causal)
            flops = 10 * 16384 * length * 2048 / (2 if causal else 1)
            calls = {"ours": lambda: attention_gradients(options, tensors, ["q", "k", "v"])}
            if "rivals" in sys.argv:
                calls["cudnn"] = cudnn(tensors, causal)
            rates = (f"{name} {flops / milliseconds(call) / 1e9:.0f}" for name, call in calls.items())
            print(f"TIME D {d} {'causal' if causal else 'full'} {length}:", *rates, flush=True)
