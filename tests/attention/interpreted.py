"""Child process: read cases from stdin, run them in Triton's interpreter, answer ``right`` or why not."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import mmap
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashmoe_science import flash_attention, flash_attention_varlen
from flashmoe_science.attention import packed
from flashmoe_science.attention.backward.autograd import attention_gradients
from flashmoe_science.attention.forward.calls import allocate_lse, allocate_output
from flashmoe_science.attention.forward.prepare import interpret, prepare_kernels
from flashmoe_science.attention.forward.sequences_triton import _order_sequences_kernel
from flashmoe_science.attention.inputs import problem_of
from flashmoe_science.attention.packed import planned_lengths
from flashmoe_science.attention.tiles import ForwardConfig, Plan
from flashmoe_science.gpu.planning import PlannedLaunch

from .cases import Case, FeatureCase, Gradients, Ordering, VarlenCase
from .checks import (
    ask_for_gradients,
    assert_gradients_right,
    assert_right,
    assert_varlen_gradients_right,
    assert_varlen_right,
    differentiate,
    far_apart,
    make_features,
    make_inputs,
    make_packed,
    make_paged,
    options_of,
)
from .mask_cases import MaskCase, check_mask
from .mixed_cases import Mixed, check_mixed


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill fresh memory with NaN, of integers with -7: an element that no one wrote shows."""
    empty = torch.empty

    def filled(*sizes: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*sizes, **options)
        return tensor.fill_(math.nan if tensor.is_floating_point() else -7)

    torch.empty = filled
    try:
        yield
    finally:
        torch.empty = empty


def fenced(tensor: torch.Tensor, side: str) -> torch.Tensor:
    """Return a contiguous copy with a page "before" or "behind" it that ends the process where it is read."""
    if not tensor.numel():
        return tensor
    page = mmap.PAGESIZE
    room = -(-tensor.nbytes // page) * page
    memory = mmap.mmap(-1, page + room)
    fence, offset = (0, page) if side == "before" else (room, room - tensor.nbytes)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + fence
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), ctypes.c_size_t(page), 0) == 0
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    return copy.view(tensor.shape).copy_(tensor)


def turned_bias(bias: torch.Tensor) -> torch.Tensor:
    """Return a bias whose rows are next to one another in memory, and behind which nobody may read."""
    return fenced(bias.transpose(2, 3), "behind").transpose(2, 3)


def too_small(inputs: dict[str, Any], bias: torch.Tensor) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Yield maxima that sequences are longer than, and a bias for no more: nothing beside it may be read."""
    rows, columns = (size // 2 for size in bias.shape[2:])
    for side in ("before", "behind"):
        yield {**inputs, "max_seqlen_q": rows, "max_seqlen_k": columns}, fenced(bias[:, :, :rows, :columns], side)


def check(case: Case | VarlenCase | Gradients | Ordering | MaskCase | Mixed) -> None:
    """Compare one case with fp64, or with sorting."""
    if isinstance(case, Ordering):
        check_ordering(case)
    elif isinstance(case, Mixed):
        check_mixed(case, poison=poisoned)
    elif isinstance(case, MaskCase):
        kernels = {"kernel": "forward_masked_triton", "backward": "backward_masked_triton"}
        check_mask(case, "cpu", **kernels, poison=poisoned)
    elif isinstance(case, Gradients):
        check_gradients(case)
    elif isinstance(case, VarlenCase):
        check_varlen(case)
    elif isinstance(case, FeatureCase):
        check_features(case)
    else:
        check_plain(case)


def check_ordering(case: Ordering) -> None:
    """Compare what is known of every sequence, those with the most keys first, with sorting."""
    batch, block_b = len(case.seqlens_q), 64
    starts_q, starts_k = ([0, *itertools.accumulate(lengths)] for lengths in (case.seqlens_q, case.seqlens_k))
    queries, keys = case.seqused_q or case.seqlens_q, case.seqused_k or case.seqlens_k
    optional = {"seqused_q_ptr": case.seqused_q, "seqused_k_ptr": case.seqused_k}
    found = torch.full((8, batch), -7, dtype=torch.int32)
    _order_sequences_kernel[(-(-batch // block_b),)](
        found, torch.tensor(starts_q, dtype=torch.int32), torch.tensor(starts_k, dtype=torch.int32),
        **{name: None if given is None else torch.tensor(given, dtype=torch.int32) for name, given in optional.items()},
        batch=batch, heads=case.heads, together_keys=case.together_keys, BLOCK_M=case.block_m, BLOCK_B=block_b,
    )  # fmt: skip
    expected, end = [], 0
    for b in sorted(range(batch), key=lambda b: (-keys[b], b)):
        tiles = -(-case.seqlens_q[b] // case.block_m)
        end += tiles * case.heads
        together = 1
        if case.together_keys is not None:
            most = min(max(case.together_keys // max(keys[b], 1), 1), case.heads)
            together = -(-case.heads // -(-case.heads // most))
        expected.append((end, tiles, starts_q[b], case.seqlens_q[b], queries[b], starts_k[b], keys[b], together))
    assert [tuple(column) for column in found.T.tolist()] == expected


def check_varlen(case: VarlenCase) -> None:
    """Compare every sequence with fp64; in another memory layout too."""
    inputs, options = make_packed(case, "cpu"), make_features(case, "cpu")
    given = make_paged(case, inputs) if case.page_size else inputs
    turned = options
    if case.bias:
        turned = {**options, "bias": turned_bias(options["bias"])}
        options["bias"] = fenced(options["bias"], "before")
    with poisoned():
        o, lse = flash_attention_varlen(**given, **options, return_lse=True, kernel="forward_triton")
        apart = {name: torch.stack((given[name], given[name]), 1)[:, 1] for name in "qkv"}
        if case.page_size:  # heads before positions, and a table that is part of a wider one
            apart |= {name: given[name].transpose(1, 2).contiguous().transpose(1, 2) for name in "kv"}
            apart["page_table"] = torch.nn.functional.pad(given["page_table"], (0, 3))[:, :-3]
        again = flash_attention_varlen(**{**given, **apart}, **turned, kernel="forward_triton")
    assert_varlen_right(o, lse, inputs, options)
    rows = slice(0, sum(case.seqlens_q))
    assert torch.equal(again[rows], o[rows]), "another memory layout gives other bits"
    if case.bias:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packed, "reads_lengths", lambda _device: False)  # as on a GPU
            for small, bias in too_small(given, options["bias"]):
                flash_attention_varlen(**small, **{**options, "bias": bias}, kernel="forward_triton")


def check_features(case: FeatureCase) -> None:
    """Compare one case with fp64, its keys split where it says so, and its bias in another memory layout.

    Keys that a window hides from all rows are NaN, in whole tiles: they must not be read.
    """
    q, clean_k, clean_v = make_inputs(case, "cpu")
    k, v = clean_k.clone(), clean_v.clone()
    first, last = case.keys_within_reach
    for tensor in (k, v):
        tensor[:, :, :first], tensor[:, :, last:] = math.nan, math.nan
    options = make_features(case, "cpu")
    with poisoned():
        if case.splits > 1:
            o, lse = attend_in_shares(q, k, v, case.splits, options)
        else:
            o, lse = flash_attention(q, k, v, **options, return_lse=True, kernel="forward_triton")
            if case.bias:
                turned = options["bias"].transpose(2, 3).contiguous().transpose(2, 3)
                again = flash_attention(q, k, v, **{**options, "bias": turned}, kernel="forward_triton")
                assert torch.equal(again, o), "another memory layout of the bias gives other bits"
    assert_right(o, q, clean_k, clean_v, lse=lse, **options)


def attend_in_shares(q, k, v, splits: int, options) -> tuple[torch.Tensor, torch.Tensor]:
    """Run forward and merge as a GPU with idle SMs would: plans for a CPU never split."""
    problem = problem_of(q, k, v, return_lse=True, **options)
    heads, config = problem.batch * problem.heads, ForwardConfig(16, 32, 4, 1, splits)
    launches = (
        PlannedLaunch("_forward_kernel", (-(-problem.seqlen_q // 16) * splits * heads, 1, 1), (128, 1, 1)),
        PlannedLaunch("_merge_partials_kernel", (-(-problem.seqlen_q // 4) * heads, 1, 1), (128, 1, 1)),
    )
    forward, merge = prepare_kernels(Plan(problem, "CPU", 0, "forward_triton", config, launches, "a test asked"))
    o, lse = allocate_output(problem, q), allocate_lse(problem, q)
    o_part, lse_part = torch.empty(splits * problem.rows * problem.head_dim_v), torch.empty(splits * problem.rows)
    interpret(forward, (q, k, v, o_part, lse_part, *(options[name] for name in problem.extras)))
    interpret(merge, (o_part, lse_part, o, lse))
    return o, lse


def check_plain(case: Case) -> None:
    """Compare one case with fp64, its layout changed too."""
    q, k, v = make_inputs(case, "cpu")
    with poisoned():
        o, lse = flash_attention(q, k, v, causal=case.causal, return_lse=True, kernel="forward_triton")
        strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
        again = flash_attention(*strided, causal=case.causal, kernel="forward_triton")
    assert_right(o, q, k, v, causal=case.causal, lse=lse)
    assert torch.equal(again, o), "another memory layout gives other bits"
    if o.numel() and k.numel():
        check_expanded(q, k, v, causal=case.causal)
        for scale in (1e-60, 0.0, -0.5):
            o, lse = flash_attention(
                q, k, v, causal=case.causal, softmax_scale=scale, return_lse=True, kernel="forward_triton"
            )
            assert_right(
                o, q, k, v, causal=case.causal, softmax_scale=scale, lse=lse, name=f"output with scale {scale}"
            )


def check_expanded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> None:
    """Expand each axis of k and of v in turn, so that it has stride 0."""
    for axis in range(4):
        for name in ("k", "v"):
            one = (k if name == "k" else v).narrow(axis, 0, 1).expand_as(k if name == "k" else v)
            args = (q, one, v) if name == "k" else (q, k, one)
            o = flash_attention(*args, causal=causal, kernel="forward_triton")
            assert_right(o, *args, causal=causal, name=f"{name} expanded along axis {axis}")


def check_gradients(gradients: Gradients) -> None:
    """Compare the gradients of one case with fp64; in another memory layout too, of which the bits are the same."""
    case = gradients.case
    asked: dict[str, Any] = {"kernel": "backward_triton", "through_lse": gradients.through_lse}
    if isinstance(case, VarlenCase):
        check_packed_gradients(gradients, case, asked)
        return
    q, k, v = make_inputs(case, "cpu")
    if gradients.low:
        q, k = 8 * q.abs(), -8 * k.abs()
    options: dict[str, Any] = make_features(case, "cpu") if isinstance(case, FeatureCase) else {"causal": case.causal}
    with poisoned():
        found, do, dlse = differentiate(flash_attention, {"q": q, "k": k, "v": v}, options, **asked)
    assert_gradients_right(found, q, k, v, do, dlse, **options)
    if gradients.summed:
        check_sums(flash_attention, {"q": q, "k": k, "v": v}, options, asked)
    bias = options.get("bias")
    if gradients.far:
        assert bias is not None
        options = {**options, "bias": far_apart(bias)}
        again, _, _ = differentiate(flash_attention, {"q": q, "k": k, "v": v}, options, **asked)
        for name in ("q", "k", "v"):
            assert torch.equal(again[name], found[name]), f"keys of a bias far apart give other bits in d{name}"
    if gradients.turned:
        turned = {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in (("q", q), ("k", k), ("v", v))}
        if bias is not None:
            options = {**options, "bias": bias.transpose(2, 3).contiguous().transpose(2, 3)}
        again, _, _ = differentiate(flash_attention, turned, options, **asked)
        for name, gradient in again.items():
            assert torch.equal(gradient, found[name]), f"another memory layout gives other bits in d{name}"
            if name in turned:
                assert gradient.stride() == turned[name].stride(), f"d{name} lies in memory as {gradient.stride()}"


def check_packed_gradients(gradients: Gradients, case: VarlenCase, asked: dict[str, Any]) -> None:
    """Compare the gradients of packed sequences with fp64."""
    inputs, options = make_packed(case, "cpu"), make_features(case, "cpu")
    bias = options.get("bias")
    if bias is not None:
        options["bias"] = fenced(bias, "before")
    with poisoned():
        found, do, dlse = differentiate(flash_attention_varlen, inputs, options, **asked)
    assert_varlen_gradients_right(found, inputs, options, do, dlse)
    if gradients.summed:
        check_sums(flash_attention_varlen, inputs, options, asked)
    if bias is not None:
        check_layouts_of_packed_bias(found, inputs, options, asked)


def check_sums(call: Any, tensors: dict[str, Any], options: dict[str, Any], asked: dict[str, Any]) -> None:
    """Add dK and dV to parts of an fp32 tensor: sums from 0, rounded, have the bits of gradients; one more is exact."""
    (given, inputs, _), _, _ = ask_for_gradients(call, tensors, options, **asked)
    k, v = inputs["k"], inputs["v"]
    found = attention_gradients(given, inputs, ["k", "v"])
    totals = torch.zeros(*k.shape[:-1], k.shape[-1] + v.shape[-1] + 3)
    sums = {"dk": totals[..., : k.shape[-1]], "dv": totals[..., k.shape[-1] + 3 :]}
    attention_gradients(given, {**inputs, **sums}, ["q", "k", "v"])
    once = {name: total.clone() for name, total in sums.items()}
    for name in ("k", "v"):
        assert torch.equal(once[f"d{name}"].to(k.dtype), found[name]), f"the sum d{name} is another one"
    for total in sums.values():
        total.add_(1)
    attention_gradients(given, {**inputs, **sums}, ["k", "v"])
    for name, total in sums.items():
        assert torch.equal(total, (once[name] + 1) + once[name]), f"{name} is not added to what was there"
    assert not totals[..., k.shape[-1] : k.shape[-1] + 3].any()


def check_layouts_of_packed_bias(
    found: dict[str, torch.Tensor], inputs: dict[str, Any], options: dict[str, Any], asked: dict[str, Any]
) -> None:
    """Hold gradients against those of the same bias, transposed and expanded; then let sequences be longer than it."""
    bias = options["bias"]
    batch, heads = inputs["cu_seqlens_q"].numel() - 1, inputs["q"].shape[1]
    for other in (turned_bias(bias), bias.expand(batch, heads, -1, -1)):
        with poisoned():
            again, _, _ = differentiate(flash_attention_varlen, inputs, {**options, "bias": other}, **asked)
        for name, gradient in again.items():
            if name == "bias" and other.shape != bias.shape:
                shared = [axis for axis in (0, 1) if other.shape[axis] != bias.shape[axis]]
                summed, off = gradient.double().sum(shared, keepdim=True), max(1e-3, 4 * torch.finfo(bias.dtype).eps)
                torch.testing.assert_close(summed, found[name].double(), rtol=off, atol=off)  # summands were rounded
            else:
                assert torch.equal(gradient, found[name]), f"another layout of the bias gives other bits in d{name}"
    # Kernels whose grids leave nothing of longer sequences out would write what no test can know.
    for small, few in too_small(inputs, bias):
        o = torch.zeros(*inputs["q"].shape[:2], inputs["v"].shape[2], dtype=inputs["q"].dtype)
        tensors = {name: tensor for name, tensor in {**inputs, **options}.items() if isinstance(tensor, torch.Tensor)}
        tensors |= {"bias": few, "o": o, "lse": torch.zeros(inputs["q"].shape[:2]).T, "do": o}
        lengths = planned_lengths(small["max_seqlen_q"], small["max_seqlen_k"], few)
        attention_gradients(options_of(options, lengths, "backward_triton"), tensors, ["q", "k", "v", "bias"])


def main() -> None:
    """Serve until stdin ends."""
    for line in sys.stdin:
        try:
            kinds = {"Case": Case, "FeatureCase": FeatureCase, "VarlenCase": VarlenCase, "Gradients": Gradients}
            kinds |= {"Ordering": Ordering, "MaskCase": MaskCase, "Mixed": Mixed}
            check(eval(line, kinds))  # the parent's own repr
            answer = "right"
        except Exception as error:  # noqa: BLE001 - the parent fails the test with it
            answer = f"{type(error).__name__}: {error}".replace("\n", " | ")
        print(answer, flush=True)


if __name__ == "__main__":
    main()
