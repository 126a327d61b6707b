"""The activation's gradient on Hopper beside Triton's kernel, right and how fast: dactivation.py [whole] [fewer].

Each shape of ``1_h200.txt``: first the new kernel's outputs, into memory full of NaN, against Triton's, and both against
fp64 in 128 rows; its bits over ten repeats, and where the product is overwritten. Nothing is timed that is not right.
Then microseconds of one launch: three in a CUDA graph, the median of 15 rounds of all arms in random order. An arm SxN
has N steps of S columns of the reduction in shared memory. ``whole``: the whole backward pass, with each of both. ``fewer``: shapes with less work.
"""

import random
import statistics
import sys
import time

import torch

from flashmoe_science.gpu.device import gpu_of
from flashmoe_science.gpu.launch import prepare_launch
from flashmoe_science.moe.backward import autograd as gradients
from flashmoe_science.moe.grouped import plan_sm90 as hopper_plan, prepare_sm90
from flashmoe_science.moe.backward.api import fused_moe_backward
from flashmoe_science.moe.backward.plan import GRADIENTS, plan_backward
from flashmoe_science.moe.calls import allocate
from flashmoe_science.moe.backward.prepare import prepare_backward_kernels
from flashmoe_science.moe.problem import MoeProblem

SHAPES = {  # tokens, experts, top_k, hidden, inter
    "mixtral T8192": (8192, 8, 2, 4096, 14336),
    "qwen3 T32768": (32768, 128, 8, 2048, 768),
    "fine T32768": (32768, 128, 8, 4096, 512),
}
FEWER = {  # of the reduction's columns, and of rows an expert
    "olmoe T8192 HID 1024": (8192, 64, 8, 1024, 1024),
    "olmoe T8192 HID 512": (8192, 64, 8, 512, 1024),
    "qwen3 T8192": (8192, 128, 8, 2048, 768),
    "qwen3 T4096": (4096, 128, 8, 2048, 768),
    "qwen3 T2048": (2048, 128, 8, 2048, 768),
    "qwen3 T1024": (1024, 128, 8, 2048, 768),
    "mixtral T1024": (1024, 8, 2, 4096, 14336),
    "mixtral T256": (256, 8, 2, 4096, 14336),
}
ARMS = {"triton": None, "64x3": (64, 3), "32x6": (32, 6)}
WRITTEN = ("dproduct", "scratch", "sums")
device = torch.device("cuda", 0)
begin = time.perf_counter()


refusal = hopper_plan.activation_refusal


def choose(arm):
    hopper_plan.activation_refusal = refusal if arm else lambda *_: "to be compared"
    if arm:
        prepare_sm90.ACTIVATION_STEP, prepare_sm90.ACTIVATION_STAGES = arm


def make(problem):
    """Return the tensors of a call; weights and rows as in training, routing at random."""
    t, e, k, h, i = problem.tokens, problem.experts, problem.top_k, problem.hidden, problem.inter
    g = torch.Generator(device).manual_seed(0)

    def draw(*shape, scale=1.0):
        return torch.randn(*shape, generator=g, device=device, dtype=torch.bfloat16) * scale

    return {
        "x": draw(t, h), "do": draw(t, h), "product": draw(t * k, 2 * i),
        "w_gate_up": draw(e, 2 * i, h, scale=h**-0.5), "w_down": draw(e, h, i, scale=i**-0.5),
        "topk_weights": torch.rand(t, k, generator=g, device=device),
        "topk_ids": torch.rand(t, e, generator=g, device=device).argsort(-1)[:, :k].to(torch.int32).contiguous(),
    }  # fmt: skip


class Kernel:
    """One of the two kernels for one problem, with outputs of its own."""

    def __init__(self, problem, tensors, arm):
        choose(arm)
        plan = plan_backward(problem, gpu_of(tensors["x"]), GRADIENTS[1:4])
        made = allocate(plan, tensors)
        made["scratch"] = torch.empty(problem.pairs * problem.inter, dtype=torch.bfloat16, device=device)
        self.made = {name: made[name] for name in (*WRITTEN, "tiles_ptr", "order_ptr", "positions_ptr")}
        self.all = {**tensors, **made}
        self.launches = []
        sort = []
        for step, kernel in zip(plan.steps, prepare_backward_kernels(plan), strict=True):
            if step in ("sort", "count", "sum", "place") or step.startswith("dactivation"):
                launch = prepare_launch(kernel.source, plan.arch, 0, kernel.grid, kernel.scalars, kernel.tensor_maps)
                (self.launches if step.startswith("dactivation") else sort).append((launch, kernel.tensors))
        assert len(self.launches) == 1, "the parts overwrite each other's weighted activations"
        assert plan.steps[len(sort)] == ("dactivation_sm90" if arm else "dactivation")
        for each in sort:
            self.launch(each)
        torch.cuda.synchronize()

    def launch(self, each):
        launch, names = each
        places = [self.all[name].data_ptr() for name in names]
        launch(torch.cuda.current_stream().cuda_stream, *places, *[0] * (4 - len(places)))

    def run(self):
        self.made["tiles_ptr"][1:4].zero_()  # the counters, which the sort puts to 0
        self.launch(self.launches[0])

    def poison(self):
        for name in WRITTEN:
            self.made[name].fill_(float("nan"))

    def outputs(self):
        return (*(self.made[name].clone() for name in WRITTEN[:2]), self.made["sums"].sum(1))


def exact(problem, tensors, order, rows):
    """Return what the kernels give in some rows, in fp64."""
    pair = order[rows].long()
    token, ids = pair // problem.top_k, tensors["topk_ids"].flatten()
    gate, up = tensors["product"][rows].double().chunk(2, 1)
    da = torch.stack([tensors["do"][t].double() @ tensors["w_down"][e].double() for t, e in zip(token, ids[pair])])
    weight, s = tensors["topk_weights"].flatten()[pair, None].double(), gate.sigmoid()
    h = gate * s * up
    dproduct = torch.cat([weight * da * up * s * (1 + gate * (1 - s)), weight * da * gate * s], 1)
    return dproduct, weight * h, (da * h).sum(1)


def is_right(name, problem, tensors, triton, ours):
    """Compare, and print what was found."""
    for kernel in (triton, ours):
        kernel.poison()
        kernel.run()
    torch.cuda.synchronize()
    assert torch.equal(triton.made["order_ptr"], ours.made["order_ptr"])
    expected, found = triton.outputs(), ours.outputs()
    rows = torch.randperm(problem.pairs, device=device)[:128]
    right, said = True, []
    reference = exact(problem, tensors, triton.made["order_ptr"], rows)
    for what, a, b, true in zip(("dproduct", "wh", "sums"), expected, found, reference, strict=True):
        a, b = a.view(problem.pairs, -1), b.view(problem.pairs, -1)
        true = true.view(128, -1)
        errors = [(each[rows].double() - true).abs().max().item() for each in (a, b)]
        # A rounding of dA is one part in 512, and one of the result as much; sums are of thousands of both signs.
        allowed = a.float().abs() / 64 + 0.02 * a.float().abs().mean()
        off = int((~((a.float() - b.float()).abs() <= allowed)).sum())
        right &= off == 0 and errors[1] <= 3 * max(errors[0], true.abs().max().item() / 512)
        said.append(f"{what} {errors[1]:.2e} ({errors[0]:.2e}) of {true.abs().max().item():.1f}, {off} off")
    equal = True
    for _ in range(10):
        ours.poison()
        ours.run()
        equal &= all(map(torch.equal, ours.outputs(), found))
    ours.all["dproduct"] = ours.all["product"] = tensors["product"].clone()
    ours.run()
    equal &= torch.equal(ours.all["dproduct"].view_as(found[0]), found[0])
    ours.all["dproduct"], ours.all["product"] = ours.made["dproduct"], tensors["product"]
    print(f"  {name}: error against fp64, ours (Triton's): {'; '.join(said)}; bits equal {equal}", flush=True)
    return right and equal


def microseconds(calls, rounds=15, repeats=3):
    """Return the median of each call."""
    graphs = {}
    for name, call in calls.items():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name], stream=stream):
            for _ in range(repeats):
                call()
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample([*calls], len(calls)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            times[name].append(1000 * start.elapsed_time(end) / repeats)
    return {name: statistics.median(each) for name, each in times.items()}


def describe(times, flops):
    return ", ".join(f"{name} {us:.0f} us ({flops / us / 1e6:.0f})" for name, us in times.items())


def compare_whole(name, problem, tensors):
    """Time the whole backward pass with each kernel: prepared with it, whatever the switch says afterwards."""
    given = {key: tensors[key] for key in ("x", "w_gate_up", "w_down", "topk_weights", "topk_ids")}
    calls = {}
    for arm in ("triton", "64x3"):
        choose(ARMS[arm])
        gradients._prepared.clear()
        fused_moe_backward(tensors["do"], tensors["product"], **given)
        run = next(iter(gradients._prepared.values()))
        calls[arm] = lambda run=run: run({**given, "do": tensors["do"], "product": tensors["product"]})
    flops = 12 * problem.pairs * problem.hidden * problem.inter
    print(f"{name} backward: {describe(microseconds(calls, 7, 1), flops)}", flush=True)


def main():
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; us, in brackets TFLOP/s", flush=True)
    all_right = True
    if "fewer" in sys.argv:
        hopper_plan.ACTIVATION_FEWEST_HIDDEN = 0
    for name, (t, e, k, h, i) in (FEWER if "fewer" in sys.argv else SHAPES).items():
        problem = MoeProblem(t, e, k, h, i, "bf16", keep_product=True)
        tensors = make(problem)
        kernels = {arm: Kernel(problem, tensors, how) for arm, how in ARMS.items()}
        right = [is_right(f"{name} {arm}", problem, tensors, kernels["triton"], kernels[arm]) for arm in [*ARMS][1:]]
        all_right &= all(right)
        if all(right):
            times = microseconds({arm: kernel.run for arm, kernel in kernels.items()})
            print(f"{name} dactivation: {describe(times, 2 * problem.pairs * h * i)}", flush=True)
        del kernels
        if all(right) and "whole" in sys.argv:
            compare_whole(name, problem, tensors)
        print(f"  {time.perf_counter() - begin:.0f} s so far", flush=True)
        del tensors
        gradients._prepared.clear()
        torch.cuda.empty_cache()
    sys.exit(not all_right)


if __name__ == "__main__":
    main()
