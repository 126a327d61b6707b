"""Run forward_gluon_sm90 under Triton's concurrency sanitizer, with slots released by mbarriers, which it knows.

    PYTHONPATH=src python lab/hopper/consan.py [D [full|causal]]

The kernel releases a slot of a ring by a barrier of the hardware, of which the sanitizer knows nothing. Here a copy of
the sources releases it by an mbarrier; all else is as it is. Triton's own launcher is used: the sanitizer needs memory of
its own, which Triton asks of the allocator that is set here. A race ends the process with an assertion of the device.
"""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch

BARRIER = '        named_barrier("arrive", self.FREE + slot, 128 * self.READERS + 32)\n'
CHANGES = (
    ('            named_barrier("sync", self.FREE + slot, 128 * self.READERS + 32)\n',
     "            mbarrier.wait(self.free_bars.index(slot), (lap - 1) & 1)\n"),
    (BARRIER, "        mbarrier.arrive(self.free_bars.index(slot))\n"),
    ("    ready_bars: gl.shared_memory_descriptor  # the slot was filled\n",
     "    ready_bars: gl.shared_memory_descriptor\n    free_bars: gl.shared_memory_descriptor\n"),
    ("        mbarrier.init(ready_bars.index(slot), count=1)\n    return Ring(bufs, more_bufs, ready_bars, MORE",
     "        mbarrier.init(ready_bars.index(slot), count=1)\n"
     "    free_bars = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())\n"
     "    for slot in gl.static_range(SLOTS):\n        mbarrier.init(free_bars.index(slot), count=READERS)\n"
     "    return Ring(bufs, more_bufs, ready_bars, free_bars, MORE"),
)  # fmt: skip


def copy_with_mbarriers() -> None:
    """Import a copy of the package in which rings have mbarriers both ways."""
    import flashmoe_science

    folder = Path(tempfile.mkdtemp()) / "flashmoe_science"
    shutil.copytree(Path(flashmoe_science.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in [name for name in sys.modules if name.startswith("flashmoe_science")]:
        del sys.modules[name]
    path = folder / "gpu/gluon_sm90.py"
    text = path.read_text()
    for old, new in CHANGES:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)
    sys.path.insert(0, str(folder.parent))


def scratch(size: int, _alignment: int, _stream: int | None) -> torch.Tensor:
    """Return memory of the sanitizer; torch's is aligned to 512 bytes, and on the stream that kernels run on."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def main() -> None:
    """Run small problems, one after another."""
    copy_with_mbarriers()
    prepare = importlib.import_module("flashmoe_science.attention.prepare")
    plan_of = importlib.import_module("flashmoe_science.attention.plan")
    problem_of = importlib.import_module("flashmoe_science.attention.problem")
    specs = importlib.import_module("flashmoe_science.gpu.specs")
    reference = importlib.import_module("flashmoe_science.attention.reference")
    import triton
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    triton.set_allocator(scratch)
    dims = [int(d) for d in sys.argv[1:2]] or [64, 96, 128, 256]
    masks = [argument == "causal" for argument in sys.argv[2:3]] or [False, True]
    for d, (rows, keys), causal in itertools.product(dims, ((512, 512), (200, 333)), masks):
        problem = problem_of.AttentionProblem(1, 2, 1, rows, keys, d, d, "bf16", causal, return_lse=True)
        plan = plan_of.plan_attention(problem, specs.SPECS["H200"], "forward_gluon_sm90")
        (kernel,) = prepare.prepare_kernels(plan)
        q, k, v = (torch.randn(1, h, s, d, device="cuda").bfloat16() for h, s in ((2, rows), (1, keys), (1, keys)))
        o, lse = torch.full_like(q, torch.nan), torch.empty(1, 2, rows, device="cuda")
        tensors = {
            "q_desc": q,
            "k_desc": k,
            "v_desc": v,
            "o_desc": o,
            "q_more_desc": q,
            "k_more_desc": k,
            "v_more_desc": v,
        }
        arguments, scalars = {}, iter(kernel.scalars)
        for name, kind in kernel.source.signature:
            if kind.startswith("tensordesc"):
                block = [int(x) for x in kind[kind.index("[") + 1 : kind.index("]")].split(",")]
                layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
                arguments[name] = TensorDescriptor.from_tensor(tensors[name], block, layout)
            elif name == "lse_ptr":
                arguments[name] = lse
            elif name == "counter_ptr":
                arguments[name] = torch.zeros(1, dtype=torch.int32, device="cuda")
            else:
                arguments[name] = next(scalars)
        # Fewer programs than tiles, so that each has several.
        kernel.source.function[(2,)](**arguments, **dict(kernel.source.constants), num_warps=4)
        torch.cuda.synchronize()
        exact, _ = reference.attention(q, k, v, causal=causal, softmax_scale=None, dtype=torch.float64)
        print(problem.describe(), "error", (o.double() - exact).abs().max().item(), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TRITON_INSTRUMENTATION_MODE", "consan")
    main()
