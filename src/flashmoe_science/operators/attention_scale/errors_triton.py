"""P and its gradient with their errors (Triton): what ``errors`` does by PyTorch's operations, in one pass.

Those read and write dozens of tensors of all scores, and a proof waits for them.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ...attention.forward.prepare import interpret
from ...gpu.device import gpu_of_device
from ...gpu.launch import prepare_launch
from ...gpu.planning import refuse_architecture
from ...gpu.signature import Pointer, Scalar, kernel_source, prepare_kernel
from ..error_scale import WIDE

_BLOCK = 1024  # numbers of a row at once
_BLOCK_M, _BLOCK_S = 32, 64  # of a tile
_WARPS = 8  # with 4 registers are spilled
_WIDE = tl.constexpr(2.0**-24)
_FAR = tl.constexpr(69.0)  # as in ``errors``


@triton.jit
def _rounded(s, top, own_ptr, products_ptr, lengths, at, mask, most):
    """Return exp(s - top), and times that what a rounding of scores adds: the bound, and the sum of squares."""
    weight = tl.exp(s - top)
    seen = tl.maximum(s, top - _FAR)
    own = seen
    if own_ptr is not None:
        own = tl.load(own_ptr + at, mask=mask, other=0.0)
    size = tl.maximum(top - seen, tl.abs(own)) * weight
    square = size * size
    if own_ptr is not None:
        added = tl.minimum(tl.abs(seen), most) * weight
        size += added
        square += added * added
    if products_ptr is not None:
        size += lengths * weight
        square += tl.load(products_ptr + at, mask=mask, other=0.0) * weight * weight
    return weight, size, square


@triton.jit
def _p_kernel(
    scores_ptr,  # [N, R, S], R = G * M; overwritten with P
    bound_ptr, variance_ptr,  # the same: written
    own_ptr, products_ptr,  # the same, or None
    q_lengths_ptr,  # [N, R]
    k_lengths_ptr,  # [N, S]
    v_squares_ptr,  # [N, S]
    sinks_ptr,  # [N, R] or None
    spread_ptr,  # [2, N, R]: written
    rows,  # R
    units,  # S / UNIT
    u, tiny,
    of_length,  # the bound of the error of a score, for lengths of 1
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one row. Grid: (N * R,)."""
    row, keys = tl.program_id(0).to(tl.int64), units * UNIT
    start, head = row * keys, row // rows * keys
    offs, none = tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32)
    top = none - float("inf")
    for first in range(0, keys, BLOCK):
        at = first + offs
        top = tl.maximum(top, tl.load(scores_ptr + start + at, mask=at < keys, other=-float("inf")))
    top = tl.max(top, 0)
    if sinks_ptr is not None:
        top = tl.maximum(top, tl.load(sinks_ptr + row))
    top = tl.where(top == -float("inf"), 0.0, top)
    q_length = tl.load(q_lengths_ptr + row)
    weights, sizes, squares = none, none, none
    for first in range(0, keys, BLOCK):
        at = first + offs
        s = tl.load(scores_ptr + start + at, mask=at < keys, other=-float("inf"))
        lengths = q_length * tl.load(k_lengths_ptr + head + at, mask=at < keys, other=0.0)
        weight, size, square = _rounded(s, top, own_ptr, products_ptr, lengths, start + at, at < keys, 1 / u)
        weights, sizes, squares = weights + weight, sizes + size, squares + square
    total = tl.sum(weights, 0)
    if sinks_ptr is not None:
        total += tl.exp(tl.load(sinks_ptr + row) - top)
    share = 1 / tl.where(total == 0, 1.0, total)
    all_size, all_square = tl.sum(sizes, 0) * share, tl.sum(squares, 0) * share * share
    total, squares = none, none
    for first in range(0, keys, BLOCK):
        at = first + offs
        s = tl.load(scores_ptr + start + at, mask=at < keys, other=-float("inf"))
        lengths = q_length * tl.load(k_lengths_ptr + head + at, mask=at < keys, other=0.0)
        weight, size, square = _rounded(s, top, own_ptr, products_ptr, lengths, start + at, at < keys, 1 / u)
        p = weight * share
        stored = u * p + tl.where(p > 0, tiny * share, 0.0)  # P, before it is divided by the sum
        of_sum = lengths * p
        bound = stored + of_length * of_sum + u * (size * share + p * all_size)
        wide = 2 * _WIDE * of_sum
        square = square * share * share + p * p * all_square
        variance = (stored * stored + wide * wide + u * u * square) / 3
        tl.store(scores_ptr + start + at, p, mask=at < keys)
        tl.store(bound_ptr + start + at, bound, mask=at < keys)
        tl.store(variance_ptr + start + at, variance, mask=at < keys)
        each = variance * tl.load(v_squares_ptr + head + at, mask=at < keys, other=0.0)
        total, squares = total + each, squares + each * each
    tl.store(spread_ptr + row, tl.sum(total, 0))
    tl.store(spread_ptr + tl.num_programs(0) + row, tl.sum(squares, 0))


@triton.jit
def _with_error(bound, variance, error):
    """Add an independent error of uniform distribution."""
    return bound + error, variance + error * error / 3


@triton.jit
def _ds_kernel(
    p_ptr,  # [N, R, S], R = G * M
    p_bound_ptr, p_variance_ptr,  # the same: rewritten
    ds_ptr,  # the same: holds dp
    out_ptr,  # [5, N, R, S]: size, bound and variance without the error of delta, and with it; written
    capped_ptr,  # [N, R, S] or None
    of_rows_ptr,  # [6, N, R]: delta, the error of its sum, its bound, its variance, squares of q and do
    of_keys_ptr,  # [2, N, S]: lengths of v, squares of k
    row_spread_ptr,  # [2, tiles of S, N, R]: written
    key_spread_ptr,  # [4, tiles of R, N, S]: written
    rows,  # R
    units,  # S / UNIT
    u, tiny,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Compute one tile. Grid: (tiles of R, tiles of S, N)."""
    n, keys = tl.program_id(2).to(tl.int64), units * UNIT
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_s = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    is_row, is_key = offs_m < rows, offs_s < keys
    row, key = n * rows + offs_m, n * keys + offs_s
    all_rows, all_keys = tl.num_programs(2).to(tl.int64) * rows, tl.num_programs(2).to(tl.int64) * keys
    of_rows = of_rows_ptr + row
    delta = tl.load(of_rows, mask=is_row, other=0.0)[:, None]
    of_sum = tl.load(of_rows + all_rows, mask=is_row, other=0.0)[:, None]
    delta_bound = tl.load(of_rows + 2 * all_rows, mask=is_row, other=0.0)[:, None]
    delta_variance = tl.load(of_rows + 3 * all_rows, mask=is_row, other=0.0)[:, None]
    q_square = tl.load(of_rows + 4 * all_rows, mask=is_row, other=0.0)[:, None]
    do_square = tl.load(of_rows + 5 * all_rows, mask=is_row, other=0.0)[:, None]
    v_length = tl.load(of_keys_ptr + key, mask=is_key, other=0.0)[None, :]
    k_square = tl.load(of_keys_ptr + all_keys + key, mask=is_key, other=0.0)[None, :]
    at, mask = row[:, None] * keys + offs_s[None, :], is_row[:, None] & is_key[None, :]
    p = tl.load(p_ptr + at, mask=mask, other=0.0)
    lost = tl.where(p > 0, tiny, 0.0)
    p_bound = tl.load(p_bound_ptr + at, mask=mask, other=0.0)
    p_variance = tl.load(p_variance_ptr + at, mask=mask, other=0.0)
    p_bound, p_variance = _with_error(p_bound, p_variance, lost)
    tl.store(p_bound_ptr + at, p_bound, mask=mask)
    tl.store(p_variance_ptr + at, p_variance, mask=mask)
    dp = tl.load(ds_ptr + at, mask=mask, other=0.0)
    change = dp - delta
    ds = p * change
    size, bound, variance = tl.abs(ds), p_bound * tl.abs(change), p_variance * change * change
    bound, variance = _with_error(bound, variance, u * p * tl.abs(dp))  # as a framework's eager run rounds it
    bound, variance = _with_error(bound, variance, 2 * of_sum * v_length * p)
    bound, variance = _with_error(bound, variance, lost + u * size)
    if capped_ptr is not None:
        capped = tl.load(capped_ptr + at, mask=mask, other=0.0)
        slope = 1 - capped * capped
        turned = 2 * u * (1 - slope) * size  # tanh is rounded
        ds, size, bound, variance = ds * slope, size * slope, bound * slope, variance * slope * slope
        bound, variance = _with_error(bound, variance, turned)
    all_bound, all_variance = bound + p * delta_bound, variance + p * p * delta_variance
    tl.store(ds_ptr + at, ds, mask=mask)
    plane = all_rows * keys
    tl.store(out_ptr + at, size, mask=mask)
    tl.store(out_ptr + plane + at, bound, mask=mask)
    tl.store(out_ptr + 2 * plane + at, variance, mask=mask)
    tl.store(out_ptr + 3 * plane + at, all_bound, mask=mask)
    tl.store(out_ptr + 4 * plane + at, all_variance, mask=mask)
    of_row, of_q, of_do = variance * k_square, all_variance * q_square, p_variance * do_square
    row_spread_ptr += tl.program_id(1) * all_rows + row
    tl.store(row_spread_ptr, tl.sum(of_row, 1), mask=is_row)
    tl.store(row_spread_ptr + tl.num_programs(1) * all_rows, tl.sum(of_row * of_row, 1), mask=is_row)
    key_spread_ptr += tl.program_id(0) * all_keys + key
    tiles = tl.num_programs(0) * all_keys
    tl.store(key_spread_ptr, tl.sum(of_q, 0), mask=is_key)
    tl.store(key_spread_ptr + tiles, tl.sum(of_q * of_q, 0), mask=is_key)
    tl.store(key_spread_ptr + 2 * tiles, tl.sum(of_do, 0), mask=is_key)
    tl.store(key_spread_ptr + 3 * tiles, tl.sum(of_do * of_do, 0), mask=is_key)


def refuse_device(device: torch.device) -> None:
    """Raise ``UnsupportedError`` where Triton compiles nothing for this GPU."""
    refuse_architecture(gpu_of_device(device.index).arch)


def p_with_errors(scores, sinks, own, products, lengths, v_squares, *, low, head_dim):
    """Do what ``errors.p_with_errors`` does; ``scores`` become P."""
    bound, variance = (torch.empty(scores.shape, device=scores.device) for _ in range(2))
    spread = torch.empty((2, *scores.shape[:3], 1), device=scores.device)
    tensors = {
        "scores_ptr": scores,
        "bound_ptr": bound,
        "variance_ptr": variance,
        "own_ptr": own,
        "products_ptr": products,
        "q_lengths_ptr": lengths[0].contiguous(),
        "k_lengths_ptr": lengths[1].contiguous(),
        "v_squares_ptr": v_squares.contiguous(),
        "sinks_ptr": None if sinks is None else sinks[..., None].expand(scores.shape[:3]).contiguous(),
        "spread_ptr": spread,
    }
    numbers = {"u": low.u, "tiny": low.tiny, "of_length": WIDE * (2 + math.sqrt(head_dim))}
    _launch(_p_kernel, (spread[0].numel(), 1, 1), tensors, numbers, {"BLOCK": _BLOCK})
    return scores, bound, variance, (spread[0], spread[1])


def ds_with_errors(p, dp, capped, delta, v_lengths, squares, *, low):
    """Do what ``errors.ds_with_errors`` does; ``dp`` becomes ds."""
    heads, rows, keys = dp.shape[0], dp.shape[1] * dp.shape[2], dp.shape[3]
    grid = triton.cdiv(rows, _BLOCK_M), triton.cdiv(keys, _BLOCK_S), heads
    out = torch.empty((5, *dp.shape), device=dp.device)
    row_spread = torch.empty((2, grid[1], *dp.shape[:3], 1), device=dp.device)
    key_spread = torch.empty((4, grid[0], heads, 1, keys, 1), device=dp.device)
    tensors = {
        "p_ptr": p[0],
        "p_bound_ptr": p[1],
        "p_variance_ptr": p[2],
        "ds_ptr": dp,
        "out_ptr": out,
        "capped_ptr": capped,
        "of_rows_ptr": torch.stack([*(each[..., 0] for each in delta), *squares[:2]]),
        "of_keys_ptr": torch.stack([v_lengths, squares[2]]),
        "row_spread_ptr": row_spread,
        "key_spread_ptr": key_spread,
    }
    blocks = {"BLOCK_M": _BLOCK_M, "BLOCK_S": _BLOCK_S}
    _launch(_ds_kernel, grid, tensors, {"u": low.u, "tiny": low.tiny}, blocks)
    of_keys = key_spread.sum(1)
    return dp, *out.unbind(), tuple(row_spread.sum(1)), tuple(of_keys[:2]), tuple(of_keys[2:])


def _launch(function, grid, tensors, numbers, blocks):
    """Run a kernel, on CPU tensors in Triton's interpreter. The first tensor is ``[N, G, M, S]``, some are None."""
    assert all(each is None or each.is_contiguous() for each in tensors.values())
    group, rows, keys = next(iter(tensors.values())).shape[1:]
    unit = 4 if keys % 4 == 0 else 1  # then four numbers are read at once
    arguments = {
        **{n: None if x is None else Pointer("fp32", aligned=x.data_ptr() % 16 == 0) for n, x in tensors.items()},
        **{name: Scalar("fp32", number) for name, number in numbers.items()},
        "rows": Scalar("i32", group * rows),
        "units": Scalar("i32", keys // unit),
    }
    source = kernel_source(function, arguments, {"UNIT": unit, **blocks}, num_warps=_WARPS)
    kernel = prepare_kernel(source, grid, arguments)
    given = [tensors[name] for name in kernel.tensors]
    device = given[0].device
    if device.type == "cpu":
        interpret(kernel, tuple(given))
        return
    with torch.cuda.device(device):
        launch = prepare_launch(source, gpu_of_device(device.index).arch, device.index, grid, kernel.scalars)
        launch(torch.cuda.current_stream().cuda_stream, *(each.data_ptr() for each in given))
