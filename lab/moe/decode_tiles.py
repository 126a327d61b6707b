"""Tiles of the kernels of few tokens, on one GPU: decode_tiles.py [few|skewed|room].

Whole calls in a CUDA graph of 24, over eight draws of routing, so that weights come from memory; the median of 15 replays
of all arms in random order. First each arm's answer, over memory full of NaN, against fp64. An arm that is slower than
the first in one case may win in another: the table has all of them. Floor: bytes of the active experts' weights by the
rate of a copy of 2 GiB, in the same run. With "shared" after the model it has DeepSeek-V3's shared expert, whose tiles vary.
"""

import concurrent.futures
import multiprocessing
import random
import statistics
import sys
import time

import torch

from flashmoe_science.gpu.device import gpu_of
from flashmoe_science.gpu.launch import prepare_launch
from flashmoe_science.moe import plan as planning, reference
from flashmoe_science.moe.calls import allocate
from flashmoe_science.moe.plan import make_plan, plan_moe
from flashmoe_science.moe.prepare import prepare_moe_kernels
from flashmoe_science.moe.prepared import place_of
from flashmoe_science.moe.problem import MoeProblem
from flashmoe_science.moe.tiles import Gemv, GemvConfig, HopperConfig, Tile, TileConfig

MODELS = {
    "mixtral": (8, 2, 4096, 14336),
    "qwen3": (128, 8, 2048, 768),
    "olmoe": (64, 8, 2048, 1024),
    "fine": (128, 8, 4096, 512),
    "deepseek": (32, 8, 7168, 2048),
    "deepseek shared": (32, 8, 7168, 2048),
    "gpt-oss": (128, 4, 2880, 2880),
}
# fmt: off
UPS = [(4, 1024, 4, 1), (2, 1024, 4, 1), (2, 2048, 4, 1), (1, 2048, 2, 1), (4, 512, 4, 3), (1, 4096, 4, 1)]
DOWNS = [(8, 256, 4, 1, 4), (4, 256, 4, 1, 4), (8, 256, 8, 1, 4), (4, 512, 4, 1, 2)]
FEW = [(32, 128, 4, 4), (16, 128, 4, 4), (16, 128, 4, 5), (16, 256, 4, 3), (16, 256, 4, 4), (32, 128, 4, 3), (32, 64, 4, 5), (64, 128, 4, 3), (16, 128, 2, 4), (32, 256, 4, 3), (8, 256, 4, 4), (8, 256, 4, 5)]
FEW_DOWN = [(64, 128, 4, 4), (32, 128, 4, 4), (32, 128, 4, 5), (32, 256, 4, 3), (32, 256, 4, 4), (64, 128, 4, 3), (64, 64, 4, 5), (16, 256, 4, 4), (16, 128, 4, 5), (128, 128, 4, 3), (128, 64, 4, 4)]
MANY = [(16, (32, 128, 4, 4), (64, 128, 4, 4)), (32, (32, 128, 4, 4), (64, 128, 4, 4)), (64, (64, 64, 4, 4), (128, 64, 4, 4)), (64, (64, 64, 4, 5), (128, 64, 4, 5)), (64, (32, 128, 4, 4), (64, 128, 4, 4)), (128, (64, 64, 4, 4), (128, 64, 4, 4)), (128, (128, 64, 8, 4), (256, 64, 8, 4)), (128, (64, 64, 8, 4), (128, 64, 8, 4))]


# Shared experts of 128 rows: rows, then the tiles of both products; the first is what the plan took then.
SHARED = [(128, (128, 64, 8, 4), (256, 64, 8, 4)), (64, (64, 64, 4, 4), (128, 64, 4, 4)), (128, (64, 64, 8, 4), (128, 64, 8, 4)), (128, (32, 64, 8, 5), (64, 64, 8, 5)), (64, (32, 128, 4, 4), (64, 128, 4, 4)), (128, (32, 128, 8, 3), (64, 128, 8, 3)), (64, (32, 64, 4, 6), (64, 64, 4, 6)), (128, (16, 128, 8, 4), (64, 128, 8, 3))]
# A few tokens of few experts: one expert can have more rows than the 1.5 times the average that the plan had room for then.
SKEWED = [(16, FEW[0], FEW_DOWN[0]), (32, FEW[0], FEW_DOWN[0]), (32, (16, 128, 4, 4), (64, 128, 4, 4)), (32, (32, 128, 4, 3), (64, 128, 4, 3)), (32, (16, 256, 4, 4), (32, 256, 4, 4)), (64, (64, 64, 4, 4), (128, 64, 4, 4)), (64, (32, 128, 4, 4), (64, 128, 4, 4)), (64, (32, 64, 4, 5), (64, 64, 4, 5))]


def tiles(config):
    return TileConfig(config[0], Tile(*config[1]), Tile(*config[2]))


def arms_of(model, tokens, pairs):
    """Return configurations, of routed and of shared experts; the two products of a few tokens are varied one at a time."""
    if "shared" in model and CASES is not ROOM_CASES:
        here = [HopperConfig(), tiles(MANY[2]), tiles(MANY[6])]
        return [(here[0], tiles(c)) for c in SHARED] + [(c, tiles(SHARED[1])) for c in here[1:]]
    if CASES is ROOM_CASES:
        shared = plan_moe(problem_of(model, tokens), gpu_spec()).shared
        return [(tiles(c), shared) for c in MANY[:3]]
    if CASES is SKEWED_CASES and model == "mixtral":
        return [(tiles(c), None) for c in SKEWED]
    return [(config, None) for config in routed_arms_of(tokens, pairs)]


def routed_arms_of(tokens, pairs):
    if tokens == 1:
        return [GemvConfig(Gemv(*u), Gemv(*d)) for u in UPS for d in DOWNS]
    if pairs <= planning.MAX_FEW_PAIRS:
        return [TileConfig(16, Tile(*FEW[0]), Tile(*d)) for d in FEW_DOWN] + [TileConfig(16, Tile(*u), Tile(*FEW_DOWN[0])) for u in FEW[1:]]
    return [TileConfig(m, Tile(*u), Tile(*d)) for m, u, d in MANY] + [HopperConfig()]


FEW_CASES = [(m, 1, "") for m in MODELS if "shared" not in m] + [("mixtral", 64, ""), ("mixtral", 128, ""), ("mixtral", 128, "zipf"), ("deepseek", 64, ""), ("deepseek", 128, ""), ("deepseek", 128, "zipf"), ("olmoe", 128, "zipf"), ("olmoe", 256, ""), ("qwen3", 256, ""), ("qwen3", 512, "")]
SKEWED_CASES = [("deepseek shared", 128, ""), ("deepseek shared", 128, "zipf"), ("deepseek shared", 256, ""), ("mixtral", 32, "zipf"), ("mixtral", 32, ""), ("mixtral", 64, ""), ("mixtral", 64, "zipf"), ("olmoe", 256, "")]
# Eight and sixteen rows an expert: one and a half or twice as many rows a tile.
ROOM_CASES = [(m, t, r) for m, t in (("qwen3", 128), ("qwen3", 256), ("olmoe", 64), ("olmoe", 128), ("fine", 128), ("fine", 256), ("gpt-oss", 256), ("deepseek shared", 32), ("deepseek shared", 64), ("mixtral", 64)) for r in ("", "zipf")]
CASES = {"few": FEW_CASES, "skewed": SKEWED_CASES, "room": ROOM_CASES}[sys.argv[1] if len(sys.argv) > 1 else "few"]


def kernel_name(config, pairs):
    if isinstance(config, GemvConfig):
        return "gemv_triton"
    if isinstance(config, HopperConfig):
        return "grouped_gluon_sm90"
    return "few_triton" if pairs <= planning.MAX_FEW_PAIRS else "grouped_triton"


def describe(arm):
    config, shared = arm
    return describe_one(config) + (f", shared {describe_one(shared)}" if shared else "")


def describe_one(config):
    if isinstance(config, HopperConfig):
        return "hopper"
    rows = f"{config.block_m}: " if isinstance(config, TileConfig) else ""
    return rows + " ".join(str(tuple(getattr(t, n) for n in ("block_n", "block_k", "num_warps", "num_stages", "steps") if hasattr(t, n))) for t in (config.up, config.down))


def gpu_spec():
    return gpu_of(torch.empty(0, device="cuda"))


def problem_of(model, tokens):
    e, k, h, i = MODELS[model]
    return MoeProblem(tokens, e, k, h, i, "bf16", **({"shared_experts": 1, "shared_inter": i} if "shared" in model else {}))


def plan_of(problem, arm):
    gpu, (config, shared) = gpu_spec(), arm
    return make_plan(problem, gpu.name, gpu.arch, kernel_name(config, problem.pairs), config, shared, "lab")


def launches_of(problem, config):
    plan = plan_of(problem, config)
    return plan, [(prepare_launch(k.source, plan.arch, 0, k.grid, k.scalars, k.tensor_maps), k.tensors) for k in prepare_moe_kernels(plan)]


def compile_one(job):
    model, tokens, config = job
    try:
        launches_of(problem_of(model, tokens), config)
    except Exception as error:
        return f"{model} {tokens} {describe(config)}: {type(error).__name__}: {str(error)[:150]}"
    return None


def draw(model, tokens, routing, seed):
    e, k, h, _ = MODELS[model]
    g = torch.Generator("cuda").manual_seed(seed)
    chance = torch.ones(e, device="cuda")
    if routing == "zipf":
        chance = 1 / torch.arange(1, e + 1, device="cuda").float()
        chance = chance[torch.randperm(e, generator=g, device="cuda")]
    ids = torch.multinomial(chance.expand(tokens, e), k, generator=g).to(torch.int32)
    return {"x": torch.randn(tokens, h, generator=g, device="cuda", dtype=torch.bfloat16), "topk_ids": ids, "topk_weights": torch.rand(tokens, k, generator=g, device="cuda")}


class Arm:
    def __init__(self, problem, config, weights, draws):
        self.plan, self.launches = launches_of(problem, config)
        self.sets = []
        for d in draws:
            tensors = {**weights, **d}
            self.sets.append({**tensors, **allocate(self.plan, tensors)})

    def call(self, index):
        tensors = self.sets[index]
        for launch, names in self.launches:
            found = [place_of(name) for name in names]
            places = [tensors[name].data_ptr() + offset for name, offset in found]
            launch(torch.cuda.current_stream().cuda_stream, *places, *[0] * (4 - len(places)))
        return tensors["out"]


def graph_of(call, count):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(count):
            call(index % 8)
    return graph


def replay_us(graph, count):
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    graph.replay()
    events[0].record()
    for e in events[1:]:
        graph.replay()
        e.record()
    torch.cuda.synchronize()
    return [1000 * a.elapsed_time(b) / count for a, b in zip(events, events[1:])]


def main():
    begin = time.perf_counter()
    jobs = [(m, t, c) for m, t, _ in CASES for c in arms_of(m, t, problem_of(m, t).pairs)]
    failed = set()
    with concurrent.futures.ProcessPoolExecutor(15, mp_context=multiprocessing.get_context("spawn")) as pool:
        for job, said in zip(jobs, pool.map(compile_one, jobs)):
            if said:
                failed.add((job[0], job[1], describe(job[2])))
                print(said)
    print(f"{len(jobs)} compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    rate = 0.0
    for size in (1 << 28, 1 << 30):
        source = torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device="cuda")
        target = torch.empty_like(source)
        wide, wide_target = source.view(torch.float64), target.view(torch.float64)
        ways = {"copy_": lambda _: target.copy_(source), "bitwise_not": lambda _: torch.bitwise_not(source, out=target), "neg fp64": lambda _: torch.neg(wide, out=wide_target), "neg fp16": lambda _: torch.neg(source.view(torch.float16), out=target.view(torch.float16))}
        for how, call in ways.items():
            graph, events = graph_of(call, 4), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            rates = [2 * size / x / 1e6 for _ in range(5) for x in replay_us(graph, 4)]
            eager = []
            for _ in range(9):
                torch.cuda._sleep(1_000_000)
                events[0].record(); call(0); call(0); events[1].record(); torch.cuda.synchronize()
                eager.append(4 * size / events[0].elapsed_time(events[1]) / 1e9)
            print(f"  {how}, {size >> 20} MiB: {statistics.median(rates):.2f} TB/s in a graph, {statistics.median(eager):.2f} eager", flush=True)
            rate = max(rate, statistics.median(rates))
            del graph
        print(f"  read {size >> 20} MiB: ", *(f"{name} {size / statistics.median(replay_us(graph_of(f, 4), 4)) / 1e6:.2f}" for name, f in {"sum": lambda _: wide.sum(), "max": lambda _: source.max()}.items()))
        del source, target, wide, wide_target
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; a copy: {rate:.2f} TB/s", flush=True)
    for model, tokens, routing in CASES:
        problem = problem_of(model, tokens)
        e, k, h, i = MODELS[model]
        g = torch.Generator("cuda").manual_seed(0)
        weights = {"w_gate_up": torch.randn(e, 2 * i, h, generator=g, device="cuda", dtype=torch.bfloat16).mul_(h**-0.5), "w_down": torch.randn(e, h, i, generator=g, device="cuda", dtype=torch.bfloat16).mul_(i**-0.5)}
        of_shared = {}
        if problem.shared_experts:
            weights |= {"shared_gate_up": weights["w_gate_up"][:1].clone(), "shared_down": weights["w_down"][:1].clone()}
            of_shared = {name: weights[name] for name in ("shared_gate_up", "shared_down")}
        draws = [draw(model, tokens, routing, seed) for seed in range(8)]
        active = statistics.mean(len(d["topk_ids"].unique()) for d in draws)
        floor = (active + problem.shared_experts) * 6 * h * i / rate / 1e6
        exact = reference.fused_moe(draws[0]["x"], weights["w_gate_up"], weights["w_down"], draws[0]["topk_weights"], draws[0]["topk_ids"], **of_shared, dtype=torch.float64)
        arms = {}
        for config in arms_of(model, tokens, problem.pairs):
            name = describe(config)
            if (model, tokens, name) in failed:
                continue
            arm = Arm(problem, config, weights, draws)
            for v in arm.sets[0].values():
                if v.is_floating_point() and not any(v is t for t in (*weights.values(), *draws[0].values())):
                    v.fill_(float("nan"))
            out = arm.call(0)
            torch.cuda.synchronize()
            error = ((out.double() - exact).abs().max() / exact.abs().max()).item()
            if not error < 0.02:
                print(f"  {model} {tokens} {name}: WRONG {error}")
                continue
            arms[name] = (arm, graph_of(arm.call, 24))
        times = {name: [] for name in arms}
        for _ in range(15):
            for name in random.sample([*arms], len(arms)):
                times[name] += replay_us(arms[name][1], 24)
        print(f"{model} T{tokens} {routing}: {active:.1f} experts, floor {floor:.1f} us, 1.2 of it {1.2 * floor:.1f}", flush=True)
        for name, t in times.items():
            print(f"  {statistics.median(t):8.2f} us  {statistics.median(t) / floor:.3f}  {name}", flush=True)
        del arms
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
