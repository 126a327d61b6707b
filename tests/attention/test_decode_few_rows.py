"""The kernels of few rows for MLA on Hopper, run by torch: their indices, masks and walk, in fp64, beside eager torch.

Shared memory begins as NaN, and so do the partial outputs. A copy is made where it is asked for or, so late as it may,
where its barrier is waited for; both have to give the same.
"""

from __future__ import annotations

import itertools
import math
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science.attention.decode import few_fp8_gluon_sm90, few_gluon_sm90, primitives_sm90
from flashmoe_science.attention.decode.plan import plan_with_kv_cache
from flashmoe_science.attention.decode.primitives_sm90 import COLUMNS, KEYS, MORE, STAGES
from flashmoe_science.attention.decode.problem import CacheProblem
from flashmoe_science.attention.decode.reference import attention_with_kv_cache
from flashmoe_science.attention.kernel_arguments import KVSplits, LatentSizes, NewStrides, PageStrides
from flashmoe_science.gpu.specs import SPECS

from .cache_cases import CacheCase, make_tensors

LENGTHS = (0, 1, 63, 64, 65, 200, 321)
NAN_PAIR = 0x7F7F  # two numbers of e4m3


class _Numbers(torch.Tensor):
    """Numbers with the one property of Gluon's tensors that kernels ask for."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment] # torch has a method of this name


def _numbers(x: Any) -> _Numbers:
    return torch.as_tensor(x).as_subclass(_Numbers)


class _Pointer:
    def __init__(self, flat: torch.Tensor, at: Any = 0) -> None:
        self.flat, self.at, self.dtype = flat, at, SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, step: Any) -> _Pointer:
        return _Pointer(self.flat, self.at + step)


def _load(pointer: _Pointer, mask: Any = None, other: float = 0) -> _Numbers:
    at = torch.as_tensor(pointer.at)
    found = pointer.flat[at if mask is None else torch.where(mask, at, 0)]
    return _numbers(found if mask is None else torch.where(mask, found, other))


def _store(pointer: _Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
    at, value, mask = torch.broadcast_tensors(pointer.at, value, mask)
    assert torch.isnan(pointer.flat[at[mask].long()]).all(), "it was written before"
    pointer.flat[at[mask].long()] = value[mask].to(pointer.flat.dtype).as_subclass(torch.Tensor)


class _Shared:
    """A place in shared memory."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def index(self, i: int) -> _Shared:
        return _Shared(self.data[i])

    def reshape(self, shape: list[int]) -> _Shared:
        return _Shared(self.data.view(shape))

    def permute(self, order: tuple[int, ...]) -> _Shared:
        return _Shared(self.data.permute(order))

    def slice(self, start: int, length: int, dim: int) -> _Shared:
        return _Shared(self.data.narrow(dim, start, length))

    def load(self, _layout: None) -> _Numbers:
        return _numbers(self.data.clone())

    def store(self, value: torch.Tensor) -> None:
        self.data.copy_(value)


class _Descriptor:
    """A tensor that TMA copies blocks of; what lies outside is 0."""

    def __init__(self, tensor: torch.Tensor, block: tuple[int, ...]) -> None:
        self.tensor, self.dtype, self.layout = tensor, tensor.dtype, None
        self.block_type = SimpleNamespace(shape=list(block), nbytes=math.prod(block))

    def block(self, coordinates: list[Any]) -> torch.Tensor:
        found = torch.zeros(self.block_type.shape, dtype=self.dtype)
        starts = [int(start) for start in coordinates]
        assert all(0 <= start < size for start, size in zip(starts, self.tensor.shape, strict=True))
        part = self.tensor[tuple(map(slice, starts, map(sum, zip(starts, self.block_type.shape, strict=True))))]
        found[tuple(map(slice, part.shape))] = part
        return found


class _Barrier:
    """An mbarrier of the copies of a slot."""

    def __init__(self, *, late: bool) -> None:
        self.late, self.phase, self.asked, self.expected, self.waiting = late, 0, 0, 0, []  # type: ignore[var-annotated]

    def expect(self, count: int) -> None:
        assert not self.expected
        self.expected = count
        self.asked += 1

    def copy(self, desc: _Descriptor, coordinates: list[Any], place: _Shared) -> None:
        self.expected -= desc.block_type.nbytes
        self.waiting.append((desc, coordinates, place))
        if not self.late:
            self.make_copies()

    def make_copies(self) -> None:
        while self.waiting:
            desc, coordinates, place = self.waiting.pop()
            place.store(desc.block(coordinates))

    def wait(self, parity: int) -> None:
        assert not self.expected, "it would wait for ever"
        assert parity == self.phase & 1
        self.make_copies()
        self.phase += 1

    def finish(self) -> None:
        assert self.asked == self.phase, "a copy nobody waited for may arrive when the memory has another use"


def _mma(a: Any, b: _Shared, acc: torch.Tensor, *, use_acc: bool = True, is_async: bool) -> torch.Tensor:
    assert is_async
    return _numbers((a.data if isinstance(a, _Shared) else a) @ b.data) + (acc if use_acc else 0)


def _shared(dtype: torch.dtype, shape: list[int], _: None) -> _Shared:
    return _Shared(torch.full(shape, math.nan if dtype.is_floating_point else NAN_PAIR, dtype=dtype))


def _even_and_odd(pairs: _Shared, _: None) -> tuple[_Numbers, _Numbers]:
    low, high = ((pairs.data >> shift & 255).to(torch.uint8) for shift in (0, 8))
    even, odd = (each.view(torch.float8_e4m3fn).double() for each in (low, high))
    return _numbers(even), _numbers(odd)


def _power_of_two(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, torch.exp2(torch.floor(torch.log2(x))), 1.0)


def _gluon(pid: int) -> SimpleNamespace:
    def pair(function: Any) -> Any:
        return lambda x, y: _numbers(function(torch.as_tensor(x), torch.as_tensor(y)))

    nothing = lambda *_: None  # noqa: E731 - a layout
    return SimpleNamespace(
        float16=torch.float64, float32=torch.float64, int32=torch.int32, int64=torch.int64,
        program_id=lambda _: _numbers(pid),
        arange=lambda first, end, _: _numbers(torch.arange(first, end)), static_range=range,
        zeros=lambda shape, dtype, _: _numbers(torch.zeros(shape, dtype=dtype)), zeros_like=torch.zeros_like,
        full=lambda shape, value, dtype, _: _numbers(torch.full(shape, value, dtype=dtype)),
        where=lambda c, x, y: _numbers(torch.where(torch.as_tensor(c), x, y)), load=_load, store=_store,
        minimum=pair(torch.minimum), maximum=pair(torch.maximum), exp2=torch.exp2, log2=torch.log2,
        sum=lambda x, axis: x.sum(axis), max=lambda x, axis: x.amax(axis),
        associative_scan=lambda x, axis, _: x.cumsum(axis),
        abs=torch.abs, split=lambda x: x.unbind(-1), join=lambda x, y: torch.stack([x, y], -1), permute=torch.permute,
        reshape=torch.reshape, convert_layout=lambda x, _: x, allocate_shared_memory=_shared, DotOperandLayout=nothing,
        SliceLayout=nothing, BlockedLayout=nothing, NVMMADistributedLayout=nothing,
        NVMMASharedLayout=SimpleNamespace(get_default_for=nothing),
    )  # fmt: skip


def _in_torch(module: Any, names: dict[str, Any]) -> dict[str, Any]:
    """Return the names of a module's kernels, with ``names`` in place of Gluon's."""
    known = dict(names)
    for name, value in vars(module).items():
        if hasattr(value, "fn") and name not in names:
            known[name] = FunctionType(value.fn.__code__, known)
        else:
            known.setdefault(name, getattr(value, "value", value))  # of a gl.constexpr
    return known


def _kernel(pid: int, module: Any, name: str, *, late: bool) -> tuple[Any, list[_Barrier]]:
    """Return the kernel of one program, and its barriers."""
    bars = [_Barrier(late=late) for _ in range(STAGES.value + 1)]
    skip = lambda *_: None  # noqa: E731 - a fence, or a barrier of all threads
    gluon = _gluon(pid)
    names: dict[str, Any] = {
        "gl": gluon, "range": lambda n: range(int(n)), "float": float, "fence_async_shared": skip, "barrier": skip,
        "wait_for_kernel_before": skip, "launch_dependents": skip, "uniform": int,
        "make_tiles": lambda desc, count: gluon.allocate_shared_memory(
            desc.dtype, [count, *desc.block_type.shape], None
        ),
        "make_barriers": lambda count, _: SimpleNamespace(index=bars[:count].__getitem__),
        "mbarrier": SimpleNamespace(
            expect=lambda bar, count: bar.expect(count), wait=lambda bar, parity: bar.wait(parity)
        ),
        "tma_load": lambda desc, coordinates, bar, place: bar.copy(desc, coordinates, place),
        "warpgroup_mma": _mma, "warpgroup_mma_wait": lambda _, deps: deps if len(deps) > 1 else deps[0],
        "_even_and_odd": _even_and_odd, "_power_of_two": _power_of_two,
    }  # fmt: skip
    primitives = _in_torch(primitives_sm90, {"gl": gluon})
    found = _in_torch(module, {**names, "find_share": primitives["find_share"]})
    return found[name], bars


def _attend(
    problem: CacheProblem, tensors: dict[str, torch.Tensor], *, late: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o and LSE, with partial outputs merged."""
    p, plan = problem, plan_with_kv_cache(problem, SPECS["H200"], "decode_gluon_sm90")
    module = few_fp8_gluon_sm90 if p.is_fp8 else few_gluon_sm90
    name = "_few_rows_fp8_sm90_kernel" if p.is_fp8 else "_few_rows_sm90_kernel"
    assert plan.launches[0].pattern == name
    shares = plan.shares
    assert shares is not None
    q, cache = tensors["q"].transpose(1, 2).contiguous(), tensors["k_cache"][:, :, 0]
    o = torch.full((p.batch, p.heads, p.seqlen_q, COLUMNS.value), math.nan, dtype=q.dtype)
    lse = torch.full((p.batch, p.heads, p.seqlen_q), math.nan, dtype=q.dtype)
    rows = p.heads * p.seqlen_q
    o_part = torch.full((shares.programs, rows, COLUMNS.value), math.nan, dtype=q.dtype)
    sums_part = torch.full((shares.programs, rows, 2), math.nan, dtype=q.dtype)
    splits, balanced = KVSplits(shares.splits, shares.least_tiles, shares.uniform), shares.schedule == "balanced"
    table, lengths = tensors.get("page_table"), tensors.get("cache_seqlens")
    items = 2 if p.is_fp8 else 1
    cache = cache.contiguous().view(torch.int16) if p.is_fp8 else cache
    keys, more_keys = (_Descriptor(cache, (1, KEYS.value, each.value // items)) for each in (COLUMNS, MORE))
    places = (None if table is None else _Pointer(table.flatten()), None if lengths is None else _Pointer(lengths))
    outputs = (_Pointer(each.view(-1)) for each in (o, lse, o_part, sums_part))
    ends = (LatentSizes(p.batch, p.seqlen_q, 0, p.capacity), splits, p.scale * math.log2(math.e))
    block_b = 1 << (p.batch - 1).bit_length() if balanced else 1
    options = (p.heads, p.page_size, p.window[1] == 0, balanced, block_b, True)
    arguments: tuple[Any, ...]
    if p.is_fp8:
        scale, scale_strides = tensors.get("k_scale"), PageStrides(*p.k_scale_strides or (0,) * 3)
        q_strides = NewStrides(*(q.stride(axis) // 8 for axis in (0, 2, 1)))
        arguments = (
            _Pointer(q.view(-1)), keys, *places, None if scale is None else _Pointer(scale.flatten()), *outputs,
            more_keys, p.table_stride, q_strides, NewStrides(*o.stride()[:3]), scale_strides, *ends, *options,
            p.k_by_token,
        )  # fmt: skip
    else:
        queries = (1, 16 // p.heads, p.heads)
        q_desc, q_more_desc = (_Descriptor(q, (*queries, each.value)) for each in (COLUMNS, MORE))
        arguments = (
            q_desc, keys, *places, *outputs, q_more_desc, more_keys, p.table_stride, NewStrides(*o.stride()[:3]), *ends,
            *options,
        )  # fmt: skip
    for pid in range(plan.launches[0].grid[0]):
        kernel, bars = _kernel(pid, module, name, late=late)
        kernel(*arguments)
        for bar in bars:
            bar.finish()
    for b in range(p.batch):
        if balanced:
            counts = [_share_of(n, p, lengths, splits) for n in range(shares.programs)]
            mine = [n for n, (owner, split, count) in enumerate(counts) if owner == b and split < count]
        else:
            _, _, count = _share_of(b * shares.splits, p, lengths, splits, balanced=False)
            mine = list(range(b * shares.splits, b * shares.splits + count))
        if len(mine) == 1:
            continue
        m, sums = sums_part[mine].unbind(-1)
        top = m.amax(0)
        weight = torch.exp2(m - torch.where(top == -math.inf, 0.0, top))
        total = (sums * weight).sum(0)
        merged = (o_part[mine] * weight[..., None]).sum(0) / torch.where(total == 0, 1.0, total)[:, None]
        o[b] = merged.view(p.seqlen_q, p.heads, -1).transpose(0, 1)
        lse[b] = ((top + total.log2()) / math.log2(math.e)).view(p.seqlen_q, p.heads).t()
    return o, lse


def _share_of(
    chunk: int, p: CacheProblem, lengths: torch.Tensor | None, splits: KVSplits, *, balanced: bool = True
) -> tuple[int, int, int]:
    find = _in_torch(primitives_sm90, {"gl": _gluon(0)})["find_share"]
    sizes = LatentSizes(p.batch, p.seqlen_q, 0, p.capacity)
    block_b = 1 << (p.batch - 1).bit_length() if balanced else 1
    pointer = None if lengths is None else _Pointer(lengths)
    b, split, _, count, _ = find(_numbers(chunk), sizes, pointer, splits, balanced, block_b, KEYS.value)
    return int(b), int(split), int(count)


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize(
    ("heads", "seqlen_q", "options"),
    [
        (16, 1, {}),
        (8, 2, {"causal": True}),
        (2, 3, {"causal": True, "num_splits": 3}),
        (4, 4, {"num_splits": 1}),
        (1, 16, {"causal": True, "batch_invariant": True}),
    ],
    ids=str,
)
def test_it_attends_as_eager_torch(heads, seqlen_q, options, late):
    for page_size, full in itertools.product((0, 64, 128), (False, True)):
        if full and page_size:
            continue
        lengths = (321, 321) if full else LENGTHS
        case = CacheCase(
            "few", lengths, 321, heads, 1, seqlen_q, 576, 512, dtype="fp32", page_size=page_size, full=full, shared=True
        )
        tensors = {name: x.double() if x.is_floating_point() else x for name, x in make_tensors(case).items()}
        capacity = tensors["page_table"].shape[1] * page_size if page_size else 321
        problem = CacheProblem(
            len(lengths), heads, 1, seqlen_q, capacity, 576, 512, "bf16", page_size=page_size, shared_kv=True,
            has_seqlens=not full, pages=tensors["k_cache"].shape[0], return_lse=True, **options,
        )  # fmt: skip
        expected, expected_lse = attention_with_kv_cache(problem, tensors, dtype=torch.float64)
        o, lse = _attend(problem, tensors, late=late)
        torch.testing.assert_close(o, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("scale", ["none", "all", "head", "token"])
@pytest.mark.parametrize(
    ("heads", "seqlen_q", "options"),
    [
        (16, 1, {}), (8, 2, {"causal": True}), (4, 4, {"num_splits": 2}), (1, 16, {"causal": True}), (32, 1, {}),
        (16, 2, {"causal": True}), (8, 3, {"causal": True}), (2, 11, {"causal": True}),
    ],
    ids=str,
)  # fmt: skip
def test_it_attends_to_a_cache_of_8_bits(heads, seqlen_q, options, scale, late):
    for page_size, full in ((0, False), (0, True), (64, False)):
        lengths = (321, 321) if full else LENGTHS
        case = CacheCase(
            "few", lengths, 321, heads, 1, seqlen_q, 576, 512, dtype="fp32", page_size=page_size, full=full,
            shared=True, fp8=scale,
        )  # fmt: skip
        tensors = make_tensors(case)
        tensors["q"] = tensors["q"].double()
        scales = tensors.get("k_scale")
        if scales is not None and scale == "token":  # of values that are 0, of tiny ones, and of large ones
            scales[:, ::3] *= 2.0**-130
            scales[:, 1::7] = 0
            scales[:, 5::11] *= 2.0**9
        capacity = tensors["page_table"].shape[1] * page_size if page_size else 321
        strides: tuple[int, ...] = ()
        if scales is not None:
            strides = scales.stride() if scale == "token" else (0, 0, 0)
        problem = CacheProblem(
            len(lengths), heads, 1, seqlen_q, capacity, 576, 512, "bf16", page_size=page_size, shared_kv=True,
            has_seqlens=not full, pages=tensors["k_cache"].shape[0], return_lse=True, is_fp8=True,
            k_by_token=scale == "token", k_scale_strides=strides, **options,
        )  # fmt: skip
        expected, expected_lse = attention_with_kv_cache(problem, tensors, dtype=torch.float64)
        o, lse = _attend(problem, tensors, late=late)
        torch.testing.assert_close(o, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-9, atol=1e-9)


def test_weights_fit_into_fp16_beside_scores_of_any_size():
    """In fp32: a score and its maximum are rounded, and so is the logarithm of a scale."""
    weights = _in_torch(few_fp8_gluon_sm90, {"gl": _gluon(0)})["_weights"]
    generator = torch.Generator().manual_seed(0)
    for exponent in range(0, 30, 2):
        s = torch.randn(64, 16, generator=generator) * 2.0**exponent
        size = torch.rand(64, generator=generator) * 20 - 15
        m = (s + size[:, None]).amax(0)
        p = weights(s, m, size) * torch.exp2(size)[:, None]
        assert p.dtype == torch.float32
        assert p.max() <= torch.finfo(torch.float16).max
        assert (p.amax(0) > 0).all()
