"""Child process: run the passes around Hopper's packed gradients in Triton's interpreter, and answer ``right``."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import torch

from flashmoe_science.attention.backward import prepass_triton
from flashmoe_science.attention.backward.plan import plan_backward
from flashmoe_science.attention.backward.plan_sm90 import HopperBackwardConfig, hopper_backward_columns
from flashmoe_science.attention.backward.prepare_sm90 import prepare_hopper_backward, scratch_sizes
from flashmoe_science.attention.backward.problem import BackwardProblem
from flashmoe_science.attention.forward.prepare import interpret
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.gpu.specs import SPECS

from .interpreted_passes import as_held, gradient_of_sinks

HEADS, HEADS_KV = 3, 1


class Packed:
    """Random lengths of packed sequences, some of them 0, with tokens in none before and behind them."""

    def __init__(
        self, seed: int, head_dim: int, batch: int, window: tuple[int, int], longest: int, *, used: bool = False,
        shares: int = 1,
    ):  # fmt: skip
        self.draw, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.batch, self.head_dim, self.window = batch, head_dim, window
        self.lengths, self.starts, self.seqused = {}, {}, {}
        for side in "qk":
            lengths = [self.draw.choice([0, 1, self.draw.randrange(longest)]) for _ in range(batch)]
            starts = [self.draw.choice([0, 37, 130])]
            for length in lengths:
                starts.append(starts[-1] + length)
            self.lengths[side], self.starts[side] = lengths, starts
            if used:
                self.lengths[side] = [self.draw.randint(0, length) for length in lengths]
                self.seqused[side] = torch.tensor(self.lengths[side], dtype=torch.int32)
        q, k = (max(1, self.starts[side][-1] + self.draw.choice([0, 5, 200])) for side in "qk")
        self.tokens = q, k
        p = AttentionProblem(
            batch, HEADS, HEADS_KV, longest, longest, head_dim, head_dim, "fp16", softmax_scale=0.5, window=window,
            packed=True, seqused="qk" if used else "", sinks="fp32",
        )  # fmt: skip
        plan = plan_backward(BackwardProblem(p, has_dlse=True, wants_sinks=True), SPECS["H200"], "backward_gluon_sm90")
        assert isinstance(plan.config, HopperBackwardConfig)
        self.problem, self.config = plan.problem, dataclasses.replace(plan.config, shares=shares)
        plan = dataclasses.replace(plan, config=self.config)
        self.sizes = scratch_sizes(self.problem, self.config, self.tokens)
        self.kernels = {kernel.source.name: kernel for kernel in prepare_hopper_backward(plan, self.tokens)}

    def run(self, name: str, *tensors: torch.Tensor, sides: str = "qk") -> None:
        """Interpret a kernel, which takes lengths behind its other tensors."""
        starts = [torch.tensor(self.starts[side], dtype=torch.int32) for side in sides]
        used = [self.seqused[side] for side in sides if self.seqused]
        interpret(self.kernels[name], (*tensors, *starts, *used))

    def randn(self, *shape: int, dtype: Any = torch.float16) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype)

    def key_tiles(self, b: int) -> tuple[int, int]:
        """Return the first key tile of a sequence that a query sees, and the number of all."""
        queries, keys = self.lengths["q"][b], self.lengths["k"][b]
        tiles = -(-keys // self.config.keys)
        hidden = max(0, keys - queries - self.window[0]) if self.window[0] >= 0 else 0
        return (min(hidden // self.config.keys, tiles) if queries else tiles), tiles


def check_order(case: Packed) -> None:
    sequences = torch.full((case.sizes["sequences"],), -7, dtype=torch.int32)
    case.run("_order_key_tiles_kernel", sequences)
    expected, end = [], 0
    for b in sorted(range(case.batch), key=lambda b: (-case.lengths["k"][b], b)):
        first, tiles = case.key_tiles(b)
        end += (tiles - first) * HEADS_KV * case.config.shares
        lengths = [case.lengths[side][b] for side in "qk"]
        ends = [case.starts[side][b] + case.lengths[side][b] for side in "qk"]
        expected.append([end, tiles - first, *lengths, *ends, case.starts["q"][b] // case.config.block_m + b])
    assert sequences.view(7, case.batch).T.tolist() == expected


def check_clear(case: Packed) -> None:
    """What no other kernel writes becomes 0; all else stays."""
    shapes = ((case.tokens[0], HEADS), (case.tokens[1], HEADS_KV), (case.tokens[1], HEADS_KV))
    made = [torch.full((*shape, case.head_dim), math.nan, dtype=torch.float16) for shape in shapes]
    case.run("_clear_kernel", *made)
    inside = [torch.zeros(tokens, dtype=torch.bool) for tokens in case.tokens]
    for b in range(case.batch):
        inside[0][case.starts["q"][b] : case.starts["q"][b + 1]] = True
        seen_from = case.starts["k"][b] + case.key_tiles(b)[0] * case.config.keys
        inside[1][seen_from : case.starts["k"][b + 1]] = True
    for tensor, kept in zip(made, (inside[0], inside[1], inside[1]), strict=True):
        assert tensor[kept].isnan().all()
        assert not tensor[~kept].any()


def query_tiles(case: Packed) -> list[tuple[int, slice]]:
    """Return the query tiles of all sequences, by number, and the tokens of each. No two share one."""
    found, m = [], case.config.block_m
    for b, length in enumerate(case.lengths["q"]):
        start = case.starts["q"][b]
        for tile in range(-(-length // m)):
            rows = slice(start + tile * m, min(start + tile * m + m, start + length))
            found.append((start // m + b + tile, rows))
    assert len({number for number, _ in found}) == len(found)
    return found


def check_statistics(case: Packed) -> torch.Tensor:
    """Check LSE and delta of every row, and the gradient of sinks; return the semaphores."""
    tokens, m = case.tokens[0], case.config.block_m
    o, do = (case.randn(tokens, HEADS, case.head_dim) for _ in range(2))
    lse, dlse = (case.randn(tokens, HEADS, dtype=torch.float32) for _ in range(2))
    lse[::5], dlse[::5] = -math.inf, math.nan
    stats = torch.full((case.sizes["stats"],), math.nan)
    semaphores = torch.full((case.sizes["dq_semaphore"],), -7, dtype=torch.int32)
    case.run("_prepare_backward_kernel", o, do, lse, dlse, stats, semaphores, sides="q")
    assert not semaphores.any()
    delta = torch.where(lse == -math.inf, 0.0, (o.float() * do.float()).sum(-1) - dlse)
    scaled = torch.where(lse == -math.inf, math.inf, lse * math.log2(math.e))
    found = stats.view(-1, HEADS, 2, m)
    for number, rows in query_tiles(case):
        count = rows.stop - rows.start
        torch.testing.assert_close(found[number, :, 0, :count], scaled[rows].T, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[number, :, 1, :count], delta[rows].T, rtol=1e-4, atol=1e-4)
        assert (found[number, :, 0, count:] == math.inf).all()
        assert not found[number, :, 1, count:].any()
    sinks, dsinks = case.randn(HEADS, dtype=torch.float32), torch.full((HEADS,), math.nan)
    case.run("_sinks_gradient_kernel", stats, sinks, dsinks, sides="")
    terms, used = gradient_of_sinks(sinks, lse, delta), [rows for _, rows in query_tiles(case)]
    expected = sum((terms[rows].sum(0) for rows in used), torch.zeros(HEADS))
    torch.testing.assert_close(dsinks, expected, rtol=1e-4, atol=1e-4)
    return semaphores


def check_finish(case: Packed, semaphores: torch.Tensor) -> None:
    """Check dQ of every row; no row of another sequence is written."""
    m = case.config.block_m
    columns = hopper_backward_columns(case.problem)[0]
    acc = torch.full((case.sizes["acc"],), math.nan).view(-1, HEADS, m * columns)
    dq = torch.full((case.tokens[0], HEADS, case.head_dim), math.nan, dtype=torch.float16)
    expected = dq.clone()
    for number, rows in query_tiles(case):
        for h in range(HEADS):
            expected[rows, h] = 0
            if case.draw.random() < 0.7:  # else no key tile adds to it
                exact = case.randn(m, columns, dtype=torch.float32)
                parts = exact.reshape(m // 64, 64, columns // 64, 64).permute(2, 0, 1, 3).reshape(-1, 64, 64)
                acc[number, h] = torch.stack([as_held(part) for part in parts]).reshape(-1)
                semaphores[(number * HEADS + h) * case.config.writers] = 1
                expected[rows, h] = (0.5 * exact[: rows.stop - rows.start, : case.head_dim]).half()
    case.run("_finish_dq_kernel", acc.view(-1), semaphores, dq, sides="q")
    torch.testing.assert_close(dq, expected, rtol=0, atol=0, equal_nan=True)


if __name__ == "__main__":
    # The instruction that waits for the kernel before is none to the interpreter.
    vars(prepass_triton)["gdc_wait"] = lambda: None
    cases = (
        Packed(0, 64, 5, (-1, -1), 200),
        Packed(1, 128, 1, (70, 0), 300),
        Packed(2, 64, 7, (0, 9), 200),
        Packed(3, 192, 3, (-1, 0), 200, used=True),
        Packed(4, 256, 2, (0, -1), 200),
        Packed(5, 64, 70, (50, 50), 5),  # more than one program orders
        Packed(6, 128, 3, (-1, 0), 300, shares=3),
        Packed(7, 64, 2, (-1, 0), 200, shares=3),
    )
    for case in cases:
        check_order(case)
        if not case.seqused:  # else the call sets all gradients to 0
            check_clear(case)
        if case.batch < 10:  # the interpreter is slow
            check_finish(case, check_statistics(case))
    print("right")
