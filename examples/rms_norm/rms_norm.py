"""RMSNorm in one Triton kernel: a program takes one row."""

import torch
import triton
import triton.language as tl

from flashmoe_science.gpu.compile import KernelJob, KernelSource

NUM_WARPS = 4


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, y_ptr, columns, eps, BLOCK: tl.constexpr):
    """Normalise one row of x [rows, columns]. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < columns
    x = tl.load(x_ptr + row * columns + offs, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / columns + eps)
    tl.store(y_ptr + row * columns + offs, (x * scale * weight).to(y_ptr.dtype.element_ty), mask=mask)


def rms_norm(x, weight, *, eps):
    """Return x / sqrt(mean(x ** 2) + eps) * weight, for x [rows, columns]."""
    x = x.contiguous()
    rows, columns = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(columns)
    _rms_norm_kernel[(rows,)](x, weight, y, columns, eps, BLOCK=block, num_warps=NUM_WARPS)
    return y


def compile_jobs(cases, gpus):
    """Return one job for each kernel that the cases need on these GPUs; none of them has to be here."""
    jobs = {}
    for case in cases:
        pointer, block = f"*{case['dtype']}", triton.next_power_of_2(case["columns"])
        signature = [(name, pointer) for name in ("x_ptr", "weight_ptr", "y_ptr")]
        signature += [("columns", "i32"), ("eps", "fp32")]
        aligned = frozenset(("x_ptr", "weight_ptr", "y_ptr"))
        source = KernelSource(_rms_norm_kernel, tuple(signature), (("BLOCK", block),), aligned, NUM_WARPS)
        for gpu in gpus:
            jobs[source, gpu] = KernelJob(f"_rms_norm_kernel {case['dtype']} BLOCK={block}", gpu, source)
    return list(jobs.values())
