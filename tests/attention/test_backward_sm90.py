"""The backward kernel for Hopper compiles without spills in its loops, within shared memory; on a GPU, gradients."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch

from flashmoe_science.gpu.compile import compile_kernel, read_resources
from flashmoe_science.gpu.launch import count_parameters

from .key_loops import key_loops

pytestmark = pytest.mark.triton

PAIRS = [(128, 128), (300, 700), (700, 300), (1, 1), (239, 1), (1024, 1024)]


def make_shape(head_dim, head_dim_v, dtype, *, causal, heads_kv=4, seqlen_q=1000, seqlen_k=1100):
    from flashmoe_science.attention.backward_sm90 import BackwardShape

    def strides(heads, length, columns):
        return heads * length * columns, length * columns, columns

    q, o = strides(8, seqlen_q, head_dim), strides(8, seqlen_q, head_dim_v)
    k, v = strides(heads_kv, seqlen_k, head_dim), strides(heads_kv, seqlen_k, head_dim_v)
    sizes = (2, 8, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v)
    return BackwardShape(*sizes, dtype, causal, 0.1, True, q, k, v, o, o, q, k, v)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "dtype", "causal", "deterministic"),
    [(128, 128, "bf16", True, True), (64, 64, "fp16", False, True), (104, 40, "bf16", True, False)],
)
def test_kernels_compile(head_dim, head_dim_v, dtype, causal, deterministic, tmp_path):
    """Within shared memory; the products of a step side by side, and nothing spilled beside them."""
    from flashmoe_science.attention.backward_gluon_sm90 import FREE
    from flashmoe_science.attention.backward_sm90 import default_config, prepare

    shape = make_shape(head_dim, head_dim_v, dtype, causal=causal)
    config = dataclasses.replace(default_config(shape), deterministic=deterministic)
    before, main, after = prepare(shape, config)
    for kernel in (before, main, after):
        compiled = compile_kernel(kernel.source, 90)
        count_parameters(kernel.source, compiled.asm["ptx"])
        assert compiled.metadata.shared <= 227 * 1024
    assert read_resources(before.source, 90).spill_bytes == read_resources(after.source, 90).spill_bytes == 0
    compiled = compile_kernel(main.source, 90)
    ptx = compiled.asm["ptx"]
    assert compiled.metadata.num_warps == 12
    barriers = {int(barrier) for barrier in re.findall(r"\bbar(?:rier\S*)?\.sync\s+(\d+)", ptx)}
    assert max(barriers) < FREE.value
    assert ptx.count("cp.reduce.async.bulk.tensor") == 2
    loops = key_loops(compiled.asm["cubin"], tmp_path)
    assert len(loops) == 4  # a masked one and one that is not, for each warpgroup
    for loop in loops:
        assert loop["WARPGROUP.DEPBAR"] == 4, "the products are serialised"
        assert [opcode for opcode in loop if opcode.startswith(("LDL", "STL"))] == []


def gradients(q, k, v, do, dlse, *, causal, dtype):
    """Return O, LSE and the gradients of attention, computed in ``dtype`` by autograd."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(group, 1).transpose(2, 3) * q.shape[3] ** -0.5
    if causal:
        mask = torch.ones(s.shape[2:], dtype=torch.bool, device=s.device).tril(s.shape[3] - s.shape[2])
        s = s.masked_fill(~mask, -math.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.where(lse[..., None] == -math.inf, 0.0, torch.exp(s - lse[..., None]))
    o = p @ v.repeat_interleave(group, 1)
    seen = torch.where(lse == -math.inf, 0.0, lse)
    found = torch.autograd.grad((o * do.to(dtype)).sum() + (seen * dlse.to(dtype)).sum(), (q, k, v))
    return o.detach(), lse.detach(), [torch.nan_to_num(x) for x in found]


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (128, 128), (104, 40), (40, 24)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), PAIRS)
def test_gradients(seqlen_q, seqlen_k, head_dim, head_dim_v, causal):
    """Within twice the error of the same in bf16, against fp64; and the same bits again."""
    from flashmoe_science.attention.backward_sm90 import launch

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    generator = torch.Generator(device="cuda").manual_seed(seqlen_q)

    def draw(heads, length, columns):
        return torch.randn(2, heads, length, columns, generator=generator, device="cuda", dtype=torch.bfloat16)

    q, k = draw(6, seqlen_q, head_dim), draw(2, seqlen_k, head_dim)
    v, do = draw(2, seqlen_k, head_dim_v), draw(6, seqlen_q, head_dim_v)
    dlse = torch.randn(2, 6, seqlen_q, generator=generator, device="cuda")
    o, lse, exact = gradients(q, k, v, do, dlse, causal=causal, dtype=torch.float64)
    _, _, low = gradients(q, k, v, do, dlse, causal=causal, dtype=torch.bfloat16)
    o, lse = o.to(torch.bfloat16), lse.float()
    found = launch(q, k, v, o, lse, do, dlse=dlse, causal=causal)
    for name, ours, right, eager in zip("qkv", found, exact, low, strict=True):
        assert torch.isfinite(ours).all(), name
        rounding = ((right.float() + 0.3 - 0.3) - right).abs().max()
        budget = 2 * (eager.double() - right).abs().max() + 2 * rounding
        assert (ours.double() - right).abs().max() <= budget, name
    again = launch(q, k, v, o, lse, do, dlse=dlse, causal=causal)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
