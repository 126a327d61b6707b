"""Child process: run the passes around Hopper's backward kernel in Triton's interpreter, and answer ``right``."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashmoe_science.attention.backward import prepass_triton as backward_passes_triton
from flashmoe_science.attention.backward.plan import plan_backward
from flashmoe_science.attention.backward.plan_sm90 import HopperBackwardConfig, hopper_backward_tiles
from flashmoe_science.attention.backward.prepare import prepare_backward_kernels
from flashmoe_science.attention.backward.prepare_sm90 import scratch_sizes
from flashmoe_science.attention.backward.problem import BackwardProblem
from flashmoe_science.attention.forward.prepare import interpret
from flashmoe_science.attention.problem import AttentionProblem, output_strides
from flashmoe_science.gpu.specs import SPECS


def as_held(part: torch.Tensor) -> torch.Tensor:
    """Return 64 x 64 numbers of dQ in the order in which the kernel's threads hold and store them."""
    x = part.reshape(4, 2, 8, 8, 4, 2)  # warp, 8 rows further, row, column / 8, lane, column
    return x.permute(3, 0, 2, 4, 1, 5).reshape(4096)


def gradient_of_sinks(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return what each row adds to the gradient of its head's sink."""
    return torch.where(lse == -math.inf, 0.0, -torch.exp(sinks - lse) * delta)


def check_alibi(seqlen: int) -> None:
    """The LSE of a row carries slope * place of the row in its query tile."""
    p = AttentionProblem(2, 3, 1, seqlen, 60, 64, 64, "fp16", causal=True, alibi="fp32", alibi_stride=3)
    problem = BackwardProblem(p)
    plan = plan_backward(problem, SPECS["H200"], "backward_gluon_sm90")
    config = plan.config
    assert isinstance(config, HopperBackwardConfig)
    generator = torch.Generator().manual_seed(0)
    o, do = (torch.randn(2, 3, seqlen, 64, generator=generator).half() for _ in range(2))
    lse, slopes = torch.randn(2, 3, seqlen, generator=generator), torch.randn(2, 3, generator=generator)
    lse[:, 1, : seqlen // 3] = -math.inf
    sizes = scratch_sizes(problem, config)
    stats, turns = torch.full((sizes["stats"],), math.nan), torch.zeros(sizes["dq_semaphore"], dtype=torch.int32)
    interpret(prepare_backward_kernels(plan)[0], (o, do, lse, lse, stats, turns, slopes))
    m, tiles_m = config.block_m, hopper_backward_tiles(problem, config)[0]
    found = stats.reshape(2, 3, tiles_m, 2, m).transpose(2, 3).reshape(2, 3, 2, -1)[:, :, 0, :seqlen]
    expected = (lse + slopes[:, :, None] * (torch.arange(seqlen) % m)) * math.log2(math.e)
    torch.testing.assert_close(found, torch.where(lse == -math.inf, math.inf, expected))


def check(head_dim: int, head_dim_v: int, seqlen: int, *, turned: bool) -> None:
    """Run both passes on random numbers and compare with what they mean."""
    batch, heads = 2, 3
    generator = torch.Generator().manual_seed(head_dim)
    q_strides: Any = (heads * seqlen * head_dim, head_dim, heads * head_dim, 1) if turned else ()
    p = AttentionProblem(
        batch, heads, 1, seqlen, 60, head_dim, head_dim_v, "fp16", causal=True, softmax_scale=0.5, q_strides=q_strides,
        sinks="fp32",
    )  # fmt: skip
    problem = BackwardProblem(p, has_dlse=True, wants_sinks=True)
    plan = plan_backward(problem, SPECS["H200"], "backward_gluon_sm90")
    config = plan.config
    assert isinstance(config, HopperBackwardConfig)
    before, _, after, sinks_gradient = prepare_backward_kernels(plan)

    def made(name: str, columns: int) -> torch.Tensor:
        strides = problem.o_strides if name == "o" else output_strides(batch, heads, seqlen, columns, p.q_strides)
        x = torch.empty(batch, heads, seqlen, columns, dtype=torch.float16)
        return x.as_strided(x.shape, strides).copy_(torch.randn(x.shape, generator=generator))

    o, do = made("o", head_dim_v), made("do", head_dim_v)
    lse = torch.randn(batch, heads, seqlen, generator=generator)
    lse[:, 1, : seqlen // 3] = -math.inf  # rows that see no key, whose LSE has a gradient of NaN
    dlse = torch.where(lse == -math.inf, math.nan, torch.randn(lse.shape, generator=generator))
    sizes = scratch_sizes(problem, config)
    stats = torch.full((sizes["stats"],), math.nan)
    turns = torch.full((sizes["dq_semaphore"],), -7, dtype=torch.int32)
    interpret(before, (o, do, lse, dlse, stats, turns))
    assert not turns.any()
    m, tiles_m = config.block_m, hopper_backward_tiles(problem, config)[0]
    found = stats.reshape(batch, heads, tiles_m, 2, m).transpose(2, 3).reshape(batch, heads, 2, -1)
    seen = lse != -math.inf
    delta = torch.where(seen, (o.float() * do.float()).sum(-1) - dlse, 0.0)
    torch.testing.assert_close(found[:, :, 1, :seqlen], delta, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[:, :, 0, :seqlen], torch.where(seen, lse * math.log2(math.e), math.inf))
    assert torch.equal(found[:, :, 0, seqlen:], torch.full_like(found[:, :, 0, seqlen:], math.inf))
    assert not found[:, :, 1, seqlen:].any()

    sinks, dsinks = torch.randn(heads, generator=generator), torch.full((heads,), math.nan)
    interpret(sinks_gradient, (stats, sinks, dsinks))
    expected = gradient_of_sinks(sinks[:, None], lse, delta).sum((0, 2))
    torch.testing.assert_close(dsinks, expected, rtol=1e-4, atol=1e-4)

    columns = sizes["acc"] // (batch * heads * tiles_m * m)
    exact = torch.randn(batch, heads, tiles_m * m, columns, generator=generator)
    parts = exact.reshape(batch * heads * tiles_m, m // 64, 64, columns // 64, 64).permute(0, 3, 1, 2, 4)
    acc = torch.stack([as_held(part) for part in parts.reshape(-1, 64, 64)]).reshape(-1)
    tiles = batch * heads * tiles_m
    seen_by = torch.arange(tiles) % 3  # 0: the tile sees no key, and was not written
    turns[: tiles * config.writers] = seen_by.repeat_interleave(config.writers)
    acc.view(tiles, -1)[seen_by == 0] = math.nan
    dq = torch.full((batch, heads, seqlen, head_dim), math.nan, dtype=torch.float16)
    dq = dq.as_strided(dq.shape, problem.dq_strides)
    interpret(after, (acc, turns, dq))
    written = (seen_by > 0).reshape(batch, heads, tiles_m, 1).expand(-1, -1, -1, m).reshape(batch, heads, -1, 1)
    expected = torch.where(written, 0.5 * exact, 0.0)[:, :, :seqlen, :head_dim]
    assert torch.equal(dq, expected.half())


if __name__ == "__main__":
    # The instruction that waits for the kernel before is none to the interpreter.
    vars(backward_passes_triton)["gdc_wait"] = lambda: None
    sizes = (
        (64, 64, 128), (40, 24, 150), (128, 128, 64), (104, 40, 70), (192, 128, 70), (136, 64, 130), (160, 160, 70),
        (256, 128, 70),
    )  # fmt: skip
    for head_dim, head_dim_v, seqlen in sizes:
        check(head_dim, head_dim_v, seqlen, turned=head_dim == 40)
    check_alibi(200)
    print("right")
