"""Sweep the tiles and shares of decode_triton on the GPU that is here, beside SDPA (cuDNN) and FlashAttention-3.

    python lab/decode/sweep.py [part ...] [--seconds 75]

Parts that are open, the default: fp8 large small short d64 d256 mla lengths tail. Answered in 1_h200.txt: latency tiles
splits pages unlike widths.

Kernels are compiled first, on all cores. A time is the median of replays of a CUDA graph that cycles over sets of inputs
of more than twice L2 together, so K and V come from memory. Every configuration is compared with fp32 before it is timed.
A configuration is keys x warps x stages x blocks an SM, with "p" where it asks L2 for the first keys ahead; "table" is what
the plan chooses. A line: case, configuration, shares and resources, microseconds a call, TB/s of K and V. FLASHMOE_FA3_LIBRARY names FlashAttention-3's library.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashmoe_science.attention.decode import reference as cache_reference, plan as decode_plan
from flashmoe_science.attention.decode.problem import CacheProblem
from flashmoe_science.attention.decode.config import DecodeConfig
from flashmoe_science.attention.decode.plan import plan_with_kv_cache
from flashmoe_science.gpu.specs import GpuSpec

START = time.monotonic()
DEVICE = "cuda"
# B, H, HK, keys (ANCHORS), D 128 unless said.
CASES = [
    (1, 32, 8, 1024),
    (1, 32, 8, 8192),
    (1, 32, 8, 65536),
    (16, 32, 8, 8192),
    (64, 32, 8, 4096),
    (8, 32, 32, 8192),
    (1, 8, 1, 131072),
]
# (block_n, warps, stages, blocks an SM) for D 128, 16 rows. A step is 32 KB with 64 keys; stages - 1 steps are held.
TILES = [
    (64, 4, 3, 3),
    (64, 4, 2, 5),
    (64, 4, 4, 2),
    (64, 4, 5, 1),
    (64, 4, 7, 1),
    (64, 8, 3, 3),
    (64, 2, 3, 3),
    (32, 4, 3, 6),
    (32, 4, 4, 4),
    (32, 4, 7, 2),
    (32, 2, 4, 4),
    (32, 1, 3, 6),
    (32, 1, 4, 4),
    (32, 1, 5, 3),
    (128, 4, 2, 3),
    (128, 8, 3, 1),
    (128, 8, 4, 1),
]


def ahead(*tiles):
    """Each tile, and itself with L2 asked for the first keys ahead."""
    return [each for tile in tiles for each in (tile, (*tile, True))]


WIDTHS = {
    64: [(64, 4, 4, 4), (128, 4, 3, 2), (128, 4, 2, 6), (64, 4, 3, 6), (64, 2, 4, 4), (128, 8, 3, 3), (256, 8, 2, 3)],
    256: [(32, 4, 3, 3), (32, 4, 2, 5), (32, 4, 4, 2), (16, 4, 4, 4), (64, 4, 2, 3), (64, 8, 3, 1), (32, 8, 3, 3)],
}


def problem_of(case, **others) -> CacheProblem:
    batch, heads, heads_kv, keys = case
    options = {"head_dim": 128, "head_dim_v": 128, "dtype": "bf16", "has_seqlens": False, **others}
    return CacheProblem(batch, heads, heads_kv, 1, keys, **options)


def plan_of(problem: CacheProblem, gpu: GpuSpec, tile=None):
    """Plan with a tile of ours, or with the table's; ("rounds", n): with the table's and n rounds of balanced shares."""
    chosen, rounds = decode_plan.decode_config, decode_plan._BALANCED_ROUNDS
    if tile is not None and tile[0] == "rounds":
        decode_plan._BALANCED_ROUNDS = tile[1]
    elif tile is not None and tile[0] == "table":
        decode_plan.decode_config = lambda *given: dataclasses.replace(chosen(*given), prefetch=True)
    elif tile is not None:
        decode_plan.decode_config = lambda *_: DecodeConfig(16, *tile)
    try:
        return plan_with_kv_cache(problem, gpu)
    finally:
        decode_plan.decode_config, decode_plan._BALANCED_ROUNDS = chosen, rounds


def words_of(tile) -> str:
    if tile is None:
        return "table"
    return "x".join(str(part) for part in tile if part is not True) + (" p" if tile[-1] is True else "")


def compile_only(job):
    """Compile the kernels of one plan, in a process of its own; what goes wrong shows when they are needed."""
    problem, gpu, tile = job
    from flashmoe_science.attention.decode.prepare import prepare_cache_kernels
    from flashmoe_science.gpu.compile import read_resources

    try:
        plan = plan_of(problem, gpu, tile)
        found = [read_resources(kernel.source, plan.arch) for kernel in prepare_cache_kernels(plan)]
        return (
            job,
            max(each.spill_bytes for each in found),
            max(each.registers for each in found),
            max(each.shared_memory_bytes for each in found),
        )
    except Exception as error:  # noqa: BLE001
        return job, -1, str(error)[:80], 0


class Inputs:
    """Sets of inputs of one problem, more than twice L2 together."""

    def __init__(self, problem: CacheProblem, l2_bytes: int, lengths=None):
        p = self.problem = problem
        torch.manual_seed(0)
        self.kv_bytes = p.kv_bytes if lengths is None else sum(lengths) * p.heads_kv * (p.head_dim + p.head_dim_v) * 2
        kind = torch.float8_e4m3fn if p.is_fp8 else torch.bfloat16
        count = max(2, int(2.2 * l2_bytes / max(1, p.kv_bytes)) + 1)
        length = p.page_size or p.capacity
        self.sets, self.expected = [], None
        for _ in range(count):
            cache = [
                torch.randn(p.pages, length, p.heads_kv, p.head_dim, device=DEVICE, dtype=torch.bfloat16).to(kind)
                for _ in ("k" if p.shared_kv else "kv")
            ]
            cache = [cache[0], cache[0][..., : p.head_dim_v]] if p.shared_kv else cache
            q = torch.randn(p.batch, p.heads, 1, p.head_dim, device=DEVICE, dtype=torch.bfloat16)
            tensors = {"q": q, "k_cache": cache[0], "v_cache": cache[1]}
            if p.page_size:
                table = torch.randperm(p.pages, device=DEVICE).reshape(p.batch, -1).int()
                tensors["page_table"] = table
            if p.has_seqlens:
                full = lengths if lengths is not None else [p.capacity] * p.batch
                tensors["cache_seqlens"] = torch.tensor(full, dtype=torch.int32, device=DEVICE)
            for name in ("k_scale",) if p.shared_kv else ("k_scale", "v_scale"):
                if p.k_by_token:
                    tensors[name] = torch.rand(p.pages, length, p.heads_kv, device=DEVICE) + 0.5
            self.sets.append(tensors)


def replay(calls, seconds=0.03) -> float:
    """Return the microseconds of one call: the median of replays of a graph over all sets."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    keep = []
    with torch.cuda.graph(graph):
        repeats = max(1, 20 // len(calls))
        for _ in range(repeats):
            keep += [call() for call in calls]
    graph.replay()
    torch.cuda.synchronize()
    times = []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    until = time.monotonic() + seconds
    while len(times) < 3 or (time.monotonic() < until and len(times) < 30):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (repeats * len(calls)))
    return statistics.median(times)


def ours(inputs: Inputs, plan, check=True, only_decode=False):
    """Return the microseconds of our call, or what is wrong with it."""
    from flashmoe_science.attention.decode.calls import prepare_call

    if only_decode:
        plan = dataclasses.replace(plan, launches=plan.launches[:1])
    call = prepare_call(plan, inputs.sets[0]["q"].device)
    if check and not only_decode:
        o, _ = call(inputs.sets[0])
        if inputs.expected is None:
            inputs.expected, _ = cache_reference.attention_with_kv_cache(
                inputs.problem, inputs.sets[0], dtype=torch.float32
            )
        error = (o.float() - inputs.expected).abs().max().item()
        if not error < 3e-2:
            return f"WRONG by {error:.2e}"
    return replay([lambda tensors=tensors: call(tensors)[0] for tensors in inputs.sets])


def sdpa(inputs: Inputs, backend) -> float:
    """[B, HK, S, D] in memory, which it likes best."""
    sets = [
        (t["q"], t["k_cache"].transpose(1, 2).contiguous(), t["v_cache"].transpose(1, 2).contiguous())
        for t in inputs.sets
    ]
    with sdpa_kernel(backend):
        return replay([lambda s=s: F.scaled_dot_product_attention(*s, enable_gqa=True) for s in sets])


def fa3(inputs: Inputs) -> float:
    """Variable length, or paged where the cache is."""
    p, device = inputs.problem, DEVICE
    ends_q = torch.arange(p.batch + 1, dtype=torch.int32, device=device)
    ends_k = ends_q * p.capacity
    calls = []
    for t in inputs.sets:
        q = t["q"].transpose(1, 2).reshape(-1, p.heads, p.head_dim).contiguous()
        if p.page_size:
            k, v, cu, table = t["k_cache"], t["v_cache"], None, t["page_table"]
            used = t.get("cache_seqlens", torch.full((p.batch,), p.capacity, dtype=torch.int32, device=device))
        else:
            k, v = (t[name].reshape(-1, p.heads_kv, p.head_dim) for name in ("k_cache", "v_cache"))
            cu, table, used = ends_k, None, None
        arguments = [q, k, v, None, None, None, None, ends_q, cu, None, None, used, 1, p.capacity, table]
        arguments += [None] * 8 + [p.scale, False, -1, -1, 0.0, False, None, 0, None, 0, None, 1, 0, None]
        assert not p.shared_kv, "it is called with keys and values in memory of their own"
        calls.append(lambda arguments=arguments: torch.ops._vllm_fa3_C.fwd(*arguments)[0])
    return replay(calls)


def show(case: str, what: str, microseconds, kv_bytes: float) -> None:
    if isinstance(microseconds, str):
        print(f"{case:34} {what:44} {microseconds}", flush=True)
    else:
        print(f"{case:34} {what:44} {microseconds:9.2f} us {kv_bytes / microseconds / 1e6:6.3f} TB/s", flush=True)


def attempt(case: str, what: str, run, kv_bytes: float) -> None:
    """Time it, or say why not; nothing after the time limit."""
    if time.monotonic() - START > ARGS.seconds:
        print(f"{case:34} {what:44} not run: out of time")
        return
    try:
        show(case, what, run(), kv_bytes)
    except Exception as error:  # noqa: BLE001 - a refusal of a rival is a result
        show(case, what, f"{type(error).__name__}: {str(error).splitlines()[0][:90]}", kv_bytes)


def rivals(inputs: Inputs, name: str, which) -> None:
    """Time those asked for: True for all."""
    if not inputs.problem.page_size and which in (True, "all", "cudnn"):
        attempt(name, "sdpa-cudnn", lambda: sdpa(inputs, SDPBackend.CUDNN_ATTENTION), inputs.kv_bytes)
    if not inputs.problem.page_size and which is True:
        attempt(name, "sdpa-flash", lambda: sdpa(inputs, SDPBackend.FLASH_ATTENTION), inputs.kv_bytes)
    if which in (True, "all", "fa3") and os.environ.get("FLASHMOE_FA3_LIBRARY"):
        attempt(name, "fa3", lambda: fa3(inputs), inputs.kv_bytes)


def part_tiles(gpu: GpuSpec):
    for case in CASES:
        yield case, [(problem_of(case), tile, "") for tile in TILES], True, None


def part_splits(gpu: GpuSpec):
    for case, splits in (
        (CASES[0], (2, 4, 8, 16)),
        (CASES[1], (8, 16, 22, 32, 43, 64, 128)),
        (CASES[2], (16, 33, 49, 66, 99, 132)),
        (CASES[3], (1, 2, 3, 4, 6, 8, 16)),
        (CASES[4], (1, 2, 3, 4, 8)),
        (CASES[5], (1, 2, 3, 4, 8)),
        (CASES[6], (66, 132, 198, 228, 256)),
    ):
        yield case, [(problem_of(case, num_splits=n), None, f"num_splits {n}") for n in splits], False, None


def part_pages(gpu: GpuSpec):
    for case in ((16, 32, 8, 8192), (64, 32, 8, 4096), (1, 32, 8, 8192)):
        for page in (0, 1, 16, 64, 256):
            problem = problem_of(case, page_size=page, has_seqlens=True)
            invariant = dataclasses.replace(problem, batch_invariant=True)
            yield (
                case,
                [
                    (problem, None, f"page {page}, lengths on the device"),
                    (invariant, None, f"page {page}, invariant"),
                    (dataclasses.replace(problem, num_splits=4), None, f"page {page}, 4 splits"),
                ],
                page in (16, 64),
                None,
            )


def part_large(gpu: GpuSpec):
    """Whether large tiles reach cuDNN where much is read: what is near the winner, and keys asked for ahead."""
    tiles = ahead((128, 8, 3, 1), (64, 4, 4, 2)) + [
        (128, 8, 2, 1), (64, 8, 5, 1), (64, 8, 4, 1), (128, 4, 3, 1), (64, 4, 5, 1, True),
    ]  # fmt: skip
    for case in (CASES[3], CASES[4], CASES[5], CASES[2], (1, 8, 1, 131072)):
        yield case, [(problem_of(case), tile, "") for tile in [None, *tiles]], "cudnn", None


def part_small(gpu: GpuSpec):
    """What one sequence gains by keys asked for ahead, and from which length on one block an SM is the faster."""
    tiles = ahead((64, 4, 3, 3), (64, 4, 3, 1)) + [(32, 4, 3, 6, True), (32, 2, 3, 6, True), (64, 4, 2, 5, True)]
    for keys in (512, 1024, 2048, 4096, 8192):
        case = (1, 32, 8, keys)
        yield case, [(problem_of(case), tile, "") for tile in [None, *tiles]], "", None


def part_short(gpu: GpuSpec):
    """Many short sequences: blocks that come and go."""
    tiles = ahead((64, 4, 4, 2), (64, 4, 3, 3), (128, 8, 3, 1)) + [(32, 2, 4, 4, True), (64, 8, 3, 2, True)]
    for case in ((256, 32, 8, 512), (256, 32, 8, 1024), (128, 32, 8, 2048), (32, 32, 8, 512), (4, 32, 8, 4096)):
        yield case, [(problem_of(case), tile, "") for tile in [None, *tiles]], "all", None


def part_d64(gpu: GpuSpec):
    """One block an SM at D 64: 256x8x3 has the bytes of 128x8x3 at D 128."""
    tiles = ahead((128, 4, 3, 2), (256, 8, 3, 1), (128, 8, 4, 1)) + [
        (256, 8, 2, 1), (128, 8, 5, 1), (128, 4, 5, 1), (128, 4, 4, 1),
    ]  # fmt: skip
    for case in ((16, 32, 8, 8192), (64, 16, 16, 2048), (32, 16, 1, 16384), (16, 16, 2, 8192)):
        wide = {"head_dim": 64, "head_dim_v": 64}
        yield case, [(problem_of(case, **wide), tile, "") for tile in tiles], "all" if case[2] == 2 else "", None


def part_d256(gpu: GpuSpec):
    for case in ((16, 32, 8, 8192), (1, 32, 8, 8192), (1, 32, 8, 1024)):
        wide = {"head_dim": 256, "head_dim_v": 256}
        tiles = [None, *ahead((64, 8, 3, 1)), (64, 8, 2, 1)]
        yield case, [(problem_of(case, **wide), tile, "") for tile in tiles], "all" if case[3] == 1024 else "", None


def part_mla(gpu: GpuSpec):
    for case, page in (((16, 16, 1, 8192), 0), ((64, 16, 1, 4096), 64), ((1, 16, 1, 32768), 0)):
        mla = {"head_dim": 576, "head_dim_v": 512, "shared_kv": True, "page_size": page, "has_seqlens": page > 0}
        yield case, [(problem_of(case, **mla), tile, "") for tile in ahead((64, 8, 3, 1))], "", None


def part_lengths(gpu: GpuSpec):
    """Lengths on the device: whether they cost what a call without pays, on pages too; and what equal bits cost."""
    for case in ((16, 32, 8, 8192), (64, 32, 8, 4096), (1, 32, 8, 8192), (256, 32, 8, 1024)):
        for page in (0, 16, 64):
            problem = problem_of(case, page_size=page, has_seqlens=True)
            invariant = dataclasses.replace(problem, batch_invariant=True)
            rows = [
                (problem, tile, "") for tile in (None, ("table", True), (128, 8, 3, 1), (64, 4, 4, 2), ("rounds", 4))
            ]
            yield case, [*rows, (invariant, None, "invariant")], "fa3" if case[0] == 256 and page else "", None


FP8_TILES = [
    (128, 8, 3, 1), (128, 8, 3, 2), (128, 8, 2, 2), (256, 8, 2, 1), (256, 8, 3, 1), (128, 4, 3, 2), (128, 4, 3, 3),
    (128, 4, 2, 4), (64, 4, 4, 3), (64, 4, 3, 5), (64, 4, 5, 2), (64, 4, 4, 4),
]  # fmt: skip
FP8_MLA_TILES = [(64, 8, 3, 1), (64, 8, 2, 2), (64, 4, 2, 2), (32, 4, 3, 3), (32, 8, 3, 2), (128, 8, 2, 1), (32, 4, 4, 2)]


def part_fp8(gpu: GpuSpec):
    """8-bit caches: half of the bytes for each wait, so more blocks an SM, or more keys a step."""
    token = {"k_by_token": True, "v_by_token": True}
    for case, page, more in (
        (CASES[3], 0, {}),
        ((32, 32, 8, 4096), 16, {}),
        ((32, 32, 8, 4096), 16, token),
        ((8, 64, 8, 16384), 64, {}),
        ((128, 16, 2, 1536), 16, {}),
        ((1, 32, 8, 32768), 0, {}),
        ((64, 16, 1, 4096), 64, {"shared_kv": True, "k_by_token": True}),
    ):
        wide = {"head_dim": 576, "head_dim_v": 512} if more.get("shared_kv") else {}
        if more:  # scales lie as the cache does, without its columns
            length = page or case[3]
            strides = (length * case[2], case[2], 1)
            more = {**more, "k_scale_strides": strides, "v_scale_strides": () if wide else strides}
        options = {"is_fp8": True, "page_size": page, "has_seqlens": page > 0, **wide, **more}
        tiles = FP8_MLA_TILES if wide else FP8_TILES
        yield case, [(problem_of(case, **options), tile, "") for tile in [None, *tiles]], "", None


def part_tail(gpu: GpuSpec):
    """Unlike lengths: how many rounds of shares."""
    case, lengths = (64, 32, 8, 32768), draw_lengths()
    problem = problem_of(case, page_size=16, has_seqlens=True)
    tiles = [None, ("table", True), ("rounds", 1), ("rounds", 4), ("rounds", 8), (64, 4, 4, 2), (64, 4, 3, 3)]
    invariant = dataclasses.replace(problem, batch_invariant=True)
    yield case, [*((problem, tile, "") for tile in tiles), (invariant, None, "invariant")], "", lengths


def draw_lengths() -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return (torch.exp(torch.randn(64, generator=generator) * 1.2 + 7.0)).long().clamp(16, 32768).tolist()


def part_unlike(gpu: GpuSpec):
    lengths = draw_lengths()
    for heads_kv in (8, 1):
        case = (64, 32 if heads_kv == 8 else 8, heads_kv, 32768)
        problem = problem_of(case, page_size=16, has_seqlens=True)
        rows = [(problem, None, "balanced"), (dataclasses.replace(problem, batch_invariant=True), None, "invariant")]
        rows += [(dataclasses.replace(problem, num_splits=n), None, f"num_splits {n}") for n in (1, 4, 16)]
        yield case, rows, True, lengths


def part_latency(gpu: GpuSpec):
    for keys in (128, 512, 1024, 2048, 4096):
        case = (1, 32, 8, keys)
        tiles = [
            (64, 4, 3, 3),
            (64, 4, 2, 5),
            (64, 8, 2, 3),
            (32, 4, 3, 6),
            (32, 2, 3, 6),
            (128, 8, 2, 2),
            (128, 4, 2, 3),
        ]
        rows = [(problem_of(case), tile, "") for tile in tiles]
        rows += [(problem_of(case, page_size=16, has_seqlens=True), tiles[0], "page 16, a length on the device")]
        yield case, rows, True, None


def part_widths(gpu: GpuSpec):
    for dim, tiles in WIDTHS.items():
        for case in ((16, 32, 8, 8192), (1, 32, 8, 8192), (64, 16, 16, 2048), (32, 16, 1, 16384)):
            yield case, [(problem_of(case, head_dim=dim, head_dim_v=dim), tile, "") for tile in tiles], True, None


OPEN = {
    "fp8": part_fp8,
    "large": part_large,
    "small": part_small,
    "short": part_short,
    "lengths": part_lengths,
    "d64": part_d64,
    "tail": part_tail,
    "mla": part_mla,
    "d256": part_d256,
}
PARTS = {
    **OPEN,
    "latency": part_latency,
    "tiles": part_tiles,
    "splits": part_splits,
    "pages": part_pages,
    "unlike": part_unlike,
    "widths": part_widths,
}


def main() -> None:
    from flashmoe_science.gpu.device import current_gpu

    gpu = current_gpu()
    assert gpu is not None, "there is no GPU"
    if os.environ.get("FLASHMOE_FA3_LIBRARY"):
        torch.ops.load_library(os.environ["FLASHMOE_FA3_LIBRARY"])
    steps = [(part, *step) for part in ARGS.parts for step in PARTS[part](gpu)]
    jobs = list(dict.fromkeys((problem, gpu, tile) for _, _, rows, _, _ in steps for problem, tile, _ in rows))
    notes = {}
    with concurrent.futures.ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        for job, spills, registers, shared in pool.map(compile_only, jobs, chunksize=4):
            notes[job] = f"r{registers} m{shared >> 10}" + (f" SPILLS {spills}" if spills else "")
    print(f"{gpu.name}, {len(jobs)} plans compiled after {time.monotonic() - START:.1f} s")
    for part, case, rows, beside, lengths in steps:
        print(f"\n{part} {case}")
        by_layout = itertools.groupby(rows, key=lambda row: (row[0].page_size, row[0].has_seqlens, row[0].head_dim))
        for _, group in by_layout:
            group = list(group)
            inputs = Inputs(group[0][0], gpu.l2_bytes, lengths)
            name = group[0][0].describe()
            for problem, tile, words in group:
                inputs.problem = problem
                plan = plan_of(problem, gpu, tile)
                shares = f" {plan.shares.most}x" if plan.shares else ""
                what = words or words_of(tile)
                what = f"{what}{shares} {notes[problem, gpu, tile]}"
                attempt(name, what, lambda: ours(inputs, plan, check=lengths is None), inputs.kv_bytes)
                if part == "latency" and len(plan.launches) > 1:
                    attempt(name, "  without the merge", lambda: ours(inputs, plan, only_decode=True), inputs.kv_bytes)
            if beside:
                rivals(inputs, name, beside)
            del inputs
            torch.cuda.empty_cache()
    print(f"\n{time.monotonic() - START:.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--seconds", type=float, default=75.0)
    ARGS = parser.parse_args()
    ARGS.parts = ARGS.parts or list(OPEN)
    main()
