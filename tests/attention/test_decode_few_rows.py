"""The kernel of few rows for MLA on Hopper, run by torch: its indices, masks and walk, in fp64, beside eager torch.

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

from flashmoe_science.attention.decode import few_gluon_sm90, primitives_sm90
from flashmoe_science.attention.decode.plan import plan_with_kv_cache
from flashmoe_science.attention.decode.primitives_sm90 import COLUMNS, KEYS, MORE, STAGES
from flashmoe_science.attention.decode.problem import CacheProblem
from flashmoe_science.attention.decode.reference import attention_with_kv_cache
from flashmoe_science.attention.kernel_arguments import KVSplits, LatentSizes, NewStrides
from flashmoe_science.gpu.specs import SPECS

from .cache_cases import CacheCase, make_tensors

LENGTHS = (0, 1, 63, 64, 65, 200, 321)


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


def _mma(a: _Shared, b: _Shared, acc: torch.Tensor, *, use_acc: bool = True, is_async: bool) -> torch.Tensor:
    assert is_async
    return _numbers(a.data @ b.data) + (acc if use_acc else 0)


def _gluon(pid: int) -> SimpleNamespace:
    def pair(function: Any) -> Any:
        return lambda x, y: _numbers(function(torch.as_tensor(x), torch.as_tensor(y)))

    nothing = lambda *_: None  # noqa: E731 - a layout
    return SimpleNamespace(
        float32=torch.float64, int32=torch.int32, int64=torch.int64, program_id=lambda _: _numbers(pid),
        arange=lambda first, end, _: _numbers(torch.arange(first, end)), static_range=range,
        zeros=lambda shape, dtype, _: _numbers(torch.zeros(shape, dtype=dtype)), zeros_like=torch.zeros_like,
        full=lambda shape, value, dtype, _: _numbers(torch.full(shape, value, dtype=dtype)),
        where=lambda c, x, y: _numbers(torch.where(torch.as_tensor(c), x, y)), load=_load, store=_store,
        minimum=pair(torch.minimum), maximum=pair(torch.maximum), exp2=torch.exp2, log2=torch.log2,
        sum=lambda x, axis: x.sum(axis), max=lambda x, axis: x.amax(axis),
        associative_scan=lambda x, axis, _: x.cumsum(axis),
        allocate_shared_memory=lambda dtype, shape, _: _Shared(torch.full(shape, math.nan, dtype=dtype)),
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


def _kernel(pid: int, *, late: bool) -> tuple[Any, list[_Barrier]]:
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
        "warpgroup_mma": _mma, "warpgroup_mma_wait": lambda _, deps: deps[0],
    }  # fmt: skip
    primitives = _in_torch(primitives_sm90, {"gl": gluon})
    found = _in_torch(few_gluon_sm90, {**names, "find_share": primitives["find_share"]})
    return found["_few_rows_sm90_kernel"], bars


def _attend(
    problem: CacheProblem, tensors: dict[str, torch.Tensor], *, late: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o and LSE, with partial outputs merged."""
    p, plan = problem, plan_with_kv_cache(problem, SPECS["H200"], "decode_gluon_sm90")
    assert plan.launches[0].pattern == "_few_rows_sm90_kernel"
    shares = plan.shares
    assert shares is not None
    tokens = 16 // p.heads
    q, cache = tensors["q"].transpose(1, 2).contiguous(), tensors["k_cache"][:, :, 0]
    o = torch.full((p.batch, p.heads, p.seqlen_q, COLUMNS.value), math.nan, dtype=q.dtype)
    lse = torch.full((p.batch, p.heads, p.seqlen_q), math.nan, dtype=q.dtype)
    rows = p.heads * p.seqlen_q
    o_part = torch.full((shares.programs, rows, COLUMNS.value), math.nan, dtype=q.dtype)
    sums_part = torch.full((shares.programs, rows, 2), math.nan, dtype=q.dtype)
    splits = KVSplits(shares.splits, shares.least_tiles, shares.uniform)
    balanced = shares.schedule == "balanced"
    table, lengths = tensors.get("page_table"), tensors.get("cache_seqlens")
    for pid in range(plan.launches[0].grid[0]):
        kernel, bars = _kernel(pid, late=late)
        kernel(
            _Descriptor(q, (1, tokens, p.heads, COLUMNS.value)), _Descriptor(cache, (1, KEYS.value, COLUMNS.value)),
            None if table is None else _Pointer(table.flatten()), None if lengths is None else _Pointer(lengths),
            _Pointer(o.view(-1)), _Pointer(lse.view(-1)), _Pointer(o_part.view(-1)), _Pointer(sums_part.view(-1)),
            _Descriptor(q, (1, tokens, p.heads, MORE.value)), _Descriptor(cache, (1, KEYS.value, MORE.value)),
            p.table_stride, NewStrides(*o.stride()[:3]), LatentSizes(p.batch, p.seqlen_q, 0, p.capacity), splits,
            p.scale * math.log2(math.e), p.heads, p.page_size, p.window[1] == 0, balanced,
            1 << (p.batch - 1).bit_length() if balanced else 1, True,
        )  # fmt: skip
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
