"""Check decoding of MLA with few heads against fp64, and time it in parts: kernel, merge, and both.

    FLASHMOE_FA3_LIBRARY=.../fa3.so python lab/decode/mla_few_heads.py [--seconds 60]     # on an H200
    python lab/decode/mla_few_heads.py --compile                                         # no GPU

It stops starting measurements after ``--seconds``.

The checks: poisoned outputs and caches; lengths around tiles and none; pages of 1, 16, 64 and 128 and contiguous caches;
8 and 16 heads; 1, 2 and 4 queries; 1 to 128 sequences; scores that grow; the same bits in 20 runs, and with batch_invariant
of each sequence alone. Small pages and more than 16 rows go to other kernels, which are checked too.

Times are medians of replays of a graph over sets of inputs that do not fit L2. A merge is rows x columns x shares of a step
of a program. "as it is" is the kernel for 64 rows. "alone" launches one of the two kernels. ``11_mla_few_heads_h200.txt``
was made before the plan took merges of 512 columns. What was foreseen of the first case, in us:

row                       | foreseen | why
few heads                 | 102      | what it gains is little, for the merge takes 28
few heads 1x512x4         | 76       | 67 of copies, 2 to find the share, 1 for the last tile, 2 of empty programs, 4 of the merge
few heads alone           | 72       | a tile takes 1.0 to 1.3 of the 2.1 that memory needs
as it is                  | 108      | found
as it is 1x512x4          | 81       | the merge as one wave of blocks in place of ten
as it is 1x512x8          | 82       |
as it is 1x512x16         | 84       | two waves
as it is 1x128x16         | 92       | four waves
as it is alone            | 75       | above 100 if the merge is not to blame, but the tiles
merge alone               | 28       | 4,096 blocks of 153 registers, three an SM: ten waves of 2.5 to 3 us
merge 1x512x4 alone       | 4        |
lengths known             | 79       | as it is, without the balance over sequences: 128 programs, and a merge of 40 registers
one round                 | 108      | as it is with 68 empty programs in place of 200
decode_triton             | 110      | found
decode_triton 1x512x4     | 83       | it has the same merge
fa3                       | 86       | found
copies                    | 67       | found
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import faulthandler
import math
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch

from flashmoe_science import explain_with_kv_cache, flash_attention_with_kv_cache
from flashmoe_science.attention.decode import plan as decode_plan
from flashmoe_science.attention.decode.calls import prepare_call
from flashmoe_science.attention.decode.plan import DecodePlan, MergeConfig, plan_with_kv_cache
from flashmoe_science.attention.decode.plan_sm90 import HOPPER_DECODE
from flashmoe_science.attention.decode.prepare import prepare_cache_kernels
from flashmoe_science.attention.decode.problem import CacheProblem
from flashmoe_science.gpu.compile import read_resources
from flashmoe_science.gpu.planning import PlannedLaunch
from flashmoe_science.gpu.specs import find_gpu

START = time.monotonic()
KERNEL, FEW = "decode_gluon_sm90", "_few_rows_sm90_kernel"
MLA = {"head_dim": 576, "head_dim_v": 512, "shared_kv": True, "dtype": "bf16"}
LENGTHS = (0, 1, 15, 63, 64, 65, 127, 128, 700, 1024, 2999)
COPY_RATE = 4.48  # TB/s: 10_mla_copies_h200.txt
# lengths, heads, queries, page size, dtype, options
CHECKS = [
    *((LENGTHS, heads, queries, page, "bf16", {"causal": queries > 1})
      for heads in (8, 16) for queries in (1, 2, 4) for page in (0, 64)),
    *((LENGTHS, 16, 1, page, "fp16", {}) for page in (1, 16, 128)),
    (LENGTHS, 2, 5, 64, "fp16", {"causal": True}),
    (LENGTHS, 8, 2, 64, "bf16", {}),
    ((1500,), 16, 1, 64, "bf16", {}),
    (tuple(range(3, 1283, 10)), 16, 1, 64, "bf16", {}),  # 128 sequences
    ((9000, *range(1, 32)), 16, 1, 64, "bf16", {}),
    *((LENGTHS, 16, 1, 64, "bf16", {"num_splits": splits}) for splits in (1, 7)),
    *((LENGTHS, heads, queries, 64, "bf16", {"batch_invariant": True, "causal": queries > 1})
      for heads, queries in ((16, 1), (8, 2))),
]  # fmt: skip
# sequences, heads, most keys, page size; and lengths, if they are not all the most
UNLIKE = {
    (64, 16, 12288, 64): [int(12288 * (i / 63) ** 2) for i in range(64)],  # 4k in the mean
    (32, 16, 100_032, 64): [100_000, *range(1, 32)],
}
CASES = [(64, 16, 4096, 64), (64, 8, 4096, 64), (64, 128, 4096, 64), *UNLIKE, (16, 16, 8192, 64), (128, 16, 1024, 64),
         (1, 16, 8192, 64), (16, 128, 8192, 64),
         # not timed yet: shares counted with their partial outputs, and merges of 13 to 32 shares
         (17, 16, 8192, 64), (34, 16, 1024, 64), (8, 16, 8192, 64), (4, 128, 8192, 64)]  # fmt: skip
MERGES = [(1, 512, 4), (1, 512, 8), (1, 512, 16), (1, 128, 16)]
MERGES_128 = [(4, 512, 4), (1, 512, 4), (2, 512, 8)]


def foreseen() -> dict[str, str]:
    lines = [[part.strip() for part in line.split("|")] for line in __doc__.splitlines() if line.count("|") == 2]
    return {name: microseconds for name, microseconds, _ in lines}


def make_call(lengths, heads, queries, page, dtype, options, device="cuda", seed=0):
    """Return the arguments of a call, and the keys of each sequence; all else in the cache is NaN, and no page behind."""
    generator = torch.Generator(device).manual_seed(seed)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    capacity = max(64, max(lengths) + 1)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device).to(kind)

    q = normal(len(lengths), heads, queries, 576)
    keys = [normal(n, 576) for n in lengths]
    length = page or capacity
    each = -(-capacity // length)
    cache = torch.full((len(lengths) * each + 3, length, 1, 576), math.nan, device=device, dtype=kind)
    table = torch.arange(len(lengths) * each, device=device)
    if page:
        table = torch.randperm(cache.shape[0], generator=generator, device=device)[: len(table)]
    else:
        cache = cache[: len(lengths)]
    table = table.view(len(lengths), each)
    for b, rows in enumerate(keys):
        used = -(-len(rows) // length)
        filled = torch.full((used * length, 576), math.nan, device=device, dtype=kind)
        filled[: len(rows)] = rows
        cache[table[b, :used]] = filled.view(used, length, 1, 576)
        table[b, used:] = 2**31 - 1
    given = {"q": q, "k_cache": cache, "v_cache": cache[..., :512], **options}
    given["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    if page:
        given["page_table"] = table.int()
    return given, keys


def exact(q, keys, *, causal: bool):
    """Return o and LSE of one sequence in fp64."""
    heads, queries, _ = q.shape
    if not len(keys):
        return torch.zeros(heads, queries, 512, device=q.device), torch.full((heads, queries), -math.inf, device=q.device)
    wide = keys.double()
    s = q.double() @ wide.T * 576**-0.5
    if causal:
        ahead = torch.arange(len(keys), device=q.device)[None] - torch.arange(queries, device=q.device)[:, None]
        s = s.masked_fill(ahead > len(keys) - queries, -math.inf)
    lse = s.logsumexp(-1)
    p = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return p @ wide[:, :512], lse


def poison() -> None:
    """Leave NaN in the memory that outputs and partial outputs will get."""
    blocks = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for size in (1 << 26, 1 << 22, 1 << 20, 1 << 14)]
    del blocks


def run(given):
    poison()
    return flash_attention_with_kv_cache(**given, return_lse=True)


def plan_of_check(given) -> DecodePlan:
    return explain_with_kv_cache(**given, return_lse=True)


def check_one(check, given, keys, plan) -> str:
    """Return what was found: an error of the norm, and of the LSE. Raises AssertionError."""
    lengths, heads, queries, page, dtype, options = check
    few = page % 64 == 0 and heads * queries <= 16
    assert (plan.launches[0].pattern == FEW) == few, plan
    o, lse = run(given)
    assert torch.isfinite(o).all(), "NaN or inf"
    expected = [exact(q, k, causal=options.get("causal", False)) for q, k in zip(given["q"], keys, strict=True)]
    want, want_lse = (torch.stack([pair[i].double() for pair in expected]) for i in (0, 1))
    error = ((o.double() - want).norm() / want.norm()).item()
    rows = (o.double() - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-3)
    assert torch.equal(lse == -math.inf, want_lse == -math.inf), "LSE of rows without keys"
    lse_error = (lse.double() - want_lse).nan_to_num().abs().max().item()
    limit = 4e-3 if dtype == "bf16" else 1e-3
    assert error < limit, f"error {error:.1e}"
    assert rows.max() < 3 * limit, f"a row is off by {rows.max():.1e}"
    assert lse_error < 1e-4, f"LSE is off by {lse_error:.1e}"
    for _ in range(20):
        again = run(given)
        assert torch.equal(again[0], o), "other bits in another run"
        assert torch.equal(again[1], lse), "another LSE in another run"
    if options.get("batch_invariant"):
        for b, n in enumerate(lengths):
            alone = {**given, **{name: given[name][b : b + 1] for name in ("q", "cache_seqlens", "page_table")}}
            alone["page_table"] = alone["page_table"][:, : max(1, -(-n // page))]  # another capacity, too
            found = run(alone)
            assert torch.equal(found[0][0], o[b]), f"other bits of sequence {b} alone"
            assert torch.equal(found[1][0], lse[b]), f"another LSE of sequence {b} alone"
    return f"err {error:.1e} lse {lse_error:.1e} same"


def check_full(capacity: int) -> None:
    """Without lengths on the device, contiguous, with queries [B, S, H, D] and scores that grow along the keys."""
    given, keys = make_call((capacity,) * 3, 16, 1, 0, "bf16", {})
    cache = torch.stack(keys).unsqueeze(2).contiguous()
    cache[..., 512:] *= torch.linspace(0, 3, capacity, device="cuda")[None, :, None, None].bfloat16()
    q = (given["q"] * 20).transpose(1, 2).contiguous().transpose(1, 2)
    o, lse = run({"q": q, "k_cache": cache, "v_cache": cache[..., :512]})
    for b in range(3):
        want, want_lse = exact(q[b], cache[b, :, 0], causal=False)
        error = ((o[b].double() - want).norm() / want.norm()).item()
        assert error < 8e-3, f"full {capacity}: error {error:.1e}"  # P of large scores has fewer terms to average over
        torch.testing.assert_close(lse[b].double(), want_lse, rtol=1e-4, atol=1e-3)


def with_merge(plan: DecodePlan, rows: int, columns: int, shares: int) -> DecodePlan:
    """Return a plan with another tile of the merge."""
    p = plan.problem
    grid = (-(-512 // columns) * -(-p.heads * p.seqlen_q // rows), 1, p.batch)
    launch = PlannedLaunch("_merge_splits_kernel", grid, (128, 1, 1))
    return dataclasses.replace(plan, merge=MergeConfig(rows, columns, shares), launches=(plan.launches[0], launch))


def plans_of(case, gpu) -> dict[str, DecodePlan]:
    """Return the ways in which a case is timed, by name."""
    batch, heads, keys, page = case
    problem = CacheProblem(batch, heads, 1, 1, keys, page_size=page, has_seqlens=True, **MLA)
    given = gpu.name, gpu.arch, gpu.sms, KERNEL, HOPPER_DECODE, "it is the one before"
    plans = {"few heads": plan_with_kv_cache(problem, gpu, KERNEL)}
    if plans["few heads"].launches[0].pattern != FEW:
        plans = {}
    plans["as it is"] = decode_plan._decode_plan(problem, *given)
    plans["decode_triton"] = plan_with_kv_cache(problem, gpu, "decode_triton")
    merges = MERGES if heads <= 16 else MERGES_128
    for name, plan in list(plans.items()):
        if plan.merge is None:
            continue
        for merge in merges if name == "as it is" else merges[:1]:
            plans[f"{name} {'x'.join(map(str, merge))}"] = with_merge(plan, *merge)
        plans[f"{name} alone"] = dataclasses.replace(plan, launches=plan.launches[:1])
    if plans["as it is"].merge is not None:
        for name, of in (("merge", "as it is"), *((f"merge {'x'.join(map(str, m))}", f"as it is {'x'.join(map(str, m))}") for m in merges)):  # fmt: skip
            plans[f"{name} alone"] = dataclasses.replace(plans[of], launches=plans[of].launches[1:])
    if case not in UNLIKE:
        known = dataclasses.replace(problem, has_seqlens=False)
        plans["lengths known"] = decode_plan._decode_plan(known, *given)
    rounds = decode_plan._BALANCED_ROUNDS
    try:
        decode_plan._BALANCED_ROUNDS = 1
        plans["one round"] = decode_plan._decode_plan(problem, *given)
    finally:
        decode_plan._BALANCED_ROUNDS = rounds
    return plans


def compile_only(job) -> str:
    """Compile one kernel of a plan, in a process of its own; return its resources."""
    plan, which = job
    try:
        found = read_resources(prepare_cache_kernels(plan)[which].source, 90)
        spills = f" SPILLS {found.spill_bytes}" if found.spill_bytes else ""
        return f"r{found.registers} m{found.shared_memory_bytes >> 10}K{spills}"
    except Exception as error:  # noqa: BLE001 - it is named, and the others run
        return f"FAILS {type(error).__name__}: {' '.join(str(error).split())[-200:]}"


def compile_all(plans) -> dict[DecodePlan, str]:
    """Compile each kernel once, on all cores; return the resources of the kernels of each plan."""
    sources = {plan: [kernel.source for kernel in prepare_cache_kernels(plan)] for plan in plans}
    jobs = {source: (plan, which) for plan, each in sources.items() for which, source in enumerate(each)}
    with concurrent.futures.ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        found = dict(zip(jobs, pool.map(compile_only, jobs.values()), strict=True))
    print(f"{len(jobs)} kernels compiled after {time.monotonic() - START:.1f} s, {torch.cuda.is_available() and torch.cuda.get_device_name()}")
    return {plan: ", ".join(found[source] for source in each) for plan, each in sources.items()}


def fa3_calls(inputs):
    from flashmoe_science.operators.baselines.attention_decode import BASELINES

    torch.ops.load_library(os.environ["FLASHMOE_FA3_LIBRARY"])
    return [BASELINES["fa3"].bind_library(inputs.problem, tensors) for tensors in inputs.sets]


def time_case(case, plans, notes, gpu) -> None:
    from sweep import Inputs, replay

    problem = plans["as it is"].problem
    inputs = Inputs(problem, gpu.l2_bytes, UNLIKE.get(case))
    kv_bytes = sum(UNLIKE.get(case, [case[2]] * case[0])) * 1152
    expected = foreseen() if case == CASES[0] else {}
    unlike = " lengths unlike" if case in UNLIKE else ""
    print(f"\n{problem.describe()}{unlike}: {kv_bytes / COPY_RATE / 1e6:.1f} us at the rate of copies", flush=True)

    outputs = []  # of the first way, with which the others are compared

    def calls_of(name, plan):
        call = prepare_call(plan, inputs.sets[0]["q"].device)
        names = ("q", "k_cache", "v_cache", "page_table", *(("cache_seqlens",) if plan.problem.has_seqlens else ()))
        sets = [{name: tensors[name] for name in names} for tensors in inputs.sets]
        if not name.endswith("alone"):
            poison()
            outputs.append(call(sets[0])[0].float())
            error = ((outputs[-1] - outputs[0]).norm() / outputs[0].norm()).item()
            del outputs[1:]
            assert error < 4e-3, f"other outputs than the first, by {error:.1e}"  # NaN is none
        return [lambda tensors=tensors: call(tensors)[0] for tensors in sets]

    rows = {name: lambda name=name, plan=plan: calls_of(name, plan) for name, plan in plans.items()}
    if os.environ.get("FLASHMOE_FA3_LIBRARY"):
        rows["fa3"] = lambda: fa3_calls(inputs)
    for name, make in rows.items():
        if time.monotonic() - START > ARGS.seconds:
            print(f"{name:26} not run: out of time")
            continue
        faulthandler.dump_traceback_later(15, exit=True)  # a kernel that hangs
        try:
            microseconds = replay(make())
            rate = kv_bytes / microseconds / 1e6
            found = f"{microseconds:7.2f} us {rate:6.3f} TB/s" if not name.startswith("merge") else f"{microseconds:7.2f} us"
        except Exception as error:  # noqa: BLE001 - the others say something without it
            found = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        note = notes.get(plans.get(name), "")
        print(f"{name:26} {found} | {f'foreseen {expected[name]} | ' if name in expected else ''}{note}", flush=True)
    if case == CASES[0]:
        import mla_copies

        keys = mla_copies.Keys()
        print(f"{'copies':26} {replay(mla_copies.launches_of(mla_copies.read_table()[0], keys)):7.2f} us | foreseen 67")
        del keys
    faulthandler.cancel_dump_traceback_later()
    del inputs
    torch.cuda.empty_cache()


def main() -> None:
    gpu = find_gpu("H200")
    plans = {case: plans_of(case, gpu) for case in CASES}
    calls = [] if ARGS.compile else [make_call(*check) for check in CHECKS]
    checked = [plan_of_check(given) for given, _ in calls]
    wanted = list(dict.fromkeys([*checked, *(plan for each in plans.values() for plan in each.values())]))
    notes = compile_all(wanted)
    if ARGS.compile:
        for case, each in plans.items():
            for name, plan in each.items():
                print(f"{str(case):22} {name:26} {plan.launches[0].grid[0]:5} programs | {notes[plan]}")
        return
    failed = 0
    for check, (given, keys), plan in zip(CHECKS, calls, checked, strict=True):
        lengths, *rest = check
        faulthandler.dump_traceback_later(15, exit=True)
        try:
            found = check_one(check, given, keys, plan)
        except AssertionError as error:
            failed += 1
            found = f"WRONG: {error}"
        print(f"{len(lengths):3} sequences {rest} {plan.launches[0].pattern}: {found}", flush=True)
    for capacity in (1, 63, 64, 1000, 4096):
        try:
            check_full(capacity)
        except AssertionError as error:
            failed += 1
            print(f"WRONG: {error}")
    faulthandler.cancel_dump_traceback_later()
    print(f"{failed} checks failed, after {time.monotonic() - START:.1f} s", flush=True)
    del calls, given, keys
    torch.cuda.empty_cache()
    for case in CASES:
        time_case(case, plans[case], notes, gpu)
    print(f"{time.monotonic() - START:.1f} s")
    sys.exit(failed > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--compile", action="store_true", help="compile only")
    ARGS = parser.parse_args()
    main()
