"""Repeat calls with a bias under one change of the kernel at a time, and say which bits move, and where.

    PYTHONPATH=src python lab/hopper/bias_race.py [repeats]

Each change is made to a copy of the sources, in a process of its own: all compile at once, one repeats at a time.
Printed: repeats with other bits than the first, the error against fp64, rows that moved by warpgroup, warp and tile; time.
"""

import fcntl, os, shutil, subprocess, sys, tempfile, time  # noqa: E401
from pathlib import Path

import torch

import flashmoe_science

NAP = 'gl.inline_asm_elementwise("nanosleep.u32 2000; mov.b32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)\n'
LOADED, FENCE, RELEASE = "    bias = tile.load(s.type.layout)\n", "    fence_async_shared()\n", "    a.bias_ring.release(W)\n"
READ, OUTPUT = "bias = read_bias(s, a, i, W)\n", "acc, more, _ = warpgroup_mma_wait(0, deps=[acc, more, p])\n"
EXPECT, TURNS = "mbarrier.expect(bar, a.bias_desc.block_type.nbytes)\n", "ping_pong=config.ping_pong or widest <= 128"
BIAS, KERNEL = "bias_primitives_sm90.py", "variants_gluon_sm90.py"
STEPS = [(KERNEL, line, f"    if a.HAS_BIAS:\n    {RELEASE}{line}")
         for line in ("    return packed, _raised(", "    return acc, more, packed, _raised(")]  # fmt: skip
WITHOUT = (BIAS, LOADED + FENCE, LOADED)
CHANGES = {
    "as it is": [],
    "no fence": [WITHOUT],
    "no fence, TMA 2 us later": [WITHOUT, (BIAS, EXPECT, NAP + "        " + EXPECT)],
    "no fence, read 2 us later": [WITHOUT, (BIAS, LOADED, "    " + NAP + LOADED)],
    "no fence, warpgroup barrier": [WITHOUT, (BIAS, RELEASE, "    barrier()\n" + RELEASE),
                                    (BIAS, "import tma_load", "import barrier, tma_load")],
    "no fence, released after exp2": [(BIAS, LOADED + FENCE + RELEASE, LOADED), *STEPS],
    "no fence, read after products": [WITHOUT, (BIAS, f"{READ}        {OUTPUT}", f"{OUTPUT}        {READ}")],
    "no fence, no turns": [WITHOUT, ("variants_plan.py", TURNS, "ping_pong=False")],
}  # fmt: skip
CASES = ((128, True, 24, 1000, True), (192, False, 12, 777, False), (256, True, 12, 1000, False))  # D, causal, H, Sk


def measure(name: str, lock: str, repeats: int) -> None:
    """Repeat the calls; the package that was imported is the changed copy."""
    for d, causal, heads, keys, has_sinks in CASES:
        torch.manual_seed(0)
        q, k, v = (torch.randn(4, h, s, d, device="cuda").bfloat16() for h, s in ((heads, 1000), (6, keys), (6, keys)))
        bias = torch.randn(4, heads, 1000, -(-keys // 8) * 8, device="cuda").bfloat16()[..., :keys]
        sinks = torch.randn(heads, device="cuda") if has_sinks else None
        options = {"bias": bias, "sinks": sinks, "causal": causal, "kernel": "forward_features_gluon_sm90"}
        first = flashmoe_science.flash_attention(q, k, v, **options)
        scores = q.double() @ k.double().repeat_interleave(heads // 6, 1).mT / d**0.5 + bias.double()
        scores += torch.full((1000, keys), -torch.inf if causal else 0.0, device="cuda").triu(1 if causal else 9999)
        top = torch.full((heads,), -torch.inf, device="cuda") if sinks is None else sinks
        scores = torch.cat((scores, top.double()[None, :, None, None].expand(4, -1, 1000, 1)), -1)
        exact = scores.softmax(-1)[..., :keys] @ v.double().repeat_interleave(heads // 6, 1)
        with Path(lock).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            torch.cuda.synchronize()
            start = time.perf_counter()
            outputs = [flashmoe_science.flash_attention(q, k, v, **options) for _ in range(repeats)]
            torch.cuda.synchronize()
            took = 1e6 * (time.perf_counter() - start) / repeats
        moved = torch.stack([(o != first).any(-1) for o in outputs])  # [repeats, B, H, rows]
        rows, error = torch.nonzero(moved)[:, -1], max((o - exact).abs().max().item() for o in (first, *outputs))
        places = [torch.bincount(part).tolist() for part in (rows % 128 // 64, rows % 64 // 16, rows // 128)]
        print(f"{name:29} D {d} {'causal' if causal else 'full':6} {int(moved.flatten(1).any(1).sum()):3} of {repeats}"
              f" differ, error {error:.3f}, rows {places}, {took:.0f} us", flush=True)  # fmt: skip


if __name__ == "__main__" and len(sys.argv) == 4:
    measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))
elif __name__ == "__main__":
    folder, processes = tempfile.mkdtemp(), []
    for name, changes in CHANGES.items():
        package = Path(folder, name.replace(" ", "_"), "flashmoe_science")
        shutil.copytree(Path(flashmoe_science.__file__).parent, package)
        for file, old, new in changes:
            text = (path := package / "attention/forward" / file).read_text()
            assert text.count(old) == 1, (name, old)
            path.write_text(text.replace(old, new))
        paths = os.pathsep.join((str(package.parent), os.environ.get("PYTHONPATH", "")))
        command = [sys.executable, __file__, name, f"{folder}/lock", *(sys.argv[1:] or ["50"])]
        processes.append(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}))
    sys.exit(max(process.wait() for process in processes))
