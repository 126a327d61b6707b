"""Sparse MLA over a cache in fp8 without a GPU: rows of 656 bytes, meaning, contract, plans and tiles."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashmoe_science import (
    InputError,
    UnsupportedError,
    explain_sparse_mla,
    pack_mla_rows,
    sparse_mla,
    unpack_mla_rows,
)
from flashmoe_science.attention.sparse.plan import plan_sparse_mla
from flashmoe_science.attention.sparse.problem import SparseProblem
from flashmoe_science.gpu.specs import find_gpu

from .sparse_cases import FP8_CASES, IN_FP8, check_sparse, make_call

DEEPSEEK = SparseProblem(8, 16, 1, 32768, 2048, 576, 512, "bf16", page_size=64, is_fp8=True)
COLUMNS = {"latents": 512, "rotated": 64}


def columns(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    latents, rotated = (torch.randn(*shape, n, generator=generator).to(dtype) for n in COLUMNS.values())
    return latents, rotated


class TestRows:
    """``pack_mla_rows`` and ``unpack_mla_rows``."""

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_numbers_come_back_rounded(self, dtype):
        latents, rotated = columns(3, 5, 1, dtype=dtype)
        rows = pack_mla_rows(latents, rotated)
        assert (rows.shape, rows.dtype, rows.is_contiguous()) == ((3, 5, 1, 656), torch.uint8, True)
        found = unpack_mla_rows(rows, torch.float32)
        assert torch.equal(found[..., 512:], rotated.bfloat16().float())
        # e4m3 has 3 bits behind the point down to 2**-6, of a scale of at least 1/448 of the largest column.
        steps = latents.float().abs().unflatten(-1, (4, 128)).amax(-1, keepdim=True) / 448 * 2**-10
        allowed = torch.maximum(latents.float().abs().unflatten(-1, (4, 128)) / 16, steps).flatten(-2)
        assert ((found[..., :512] - latents.float()).abs() <= allowed * 1.001).all()
        assert torch.equal(pack_mla_rows(found[..., :512], found[..., 512:]), rows)

    def test_bytes_lie_where_the_format_says(self):
        latents, rotated = torch.zeros(512), torch.zeros(64)
        latents[0], latents[128], latents[130], latents[511] = 448.0, -2.0, 1.0, 1e-30
        rotated[1] = 1.0
        row = pack_mla_rows(latents, rotated)
        scales = row[512:528].clone().view(torch.float32)
        assert torch.equal(scales, torch.tensor([1.0, 2 / 448, 1.0, 1e-30 / 448]))
        # The largest number of e4m3 is 0x7E, 224 is 0x76, and bf16's 1.0 is 0x3F80.
        places = [0, 128, 130, 511, 528, 529, 530, 531]
        assert row[places].tolist() == [0x7E, 0xFE, 0x76, 0x7E, 0, 0, 0x80, 0x3F]
        others = torch.ones(656, dtype=torch.bool)
        others[[*places, *range(512, 528)]] = False
        assert not row[others].any()

    def test_scales_of_tiny_and_large_columns(self):
        latents = torch.stack([torch.full((512,), size) for size in (1e-45, 1e-38, 3e38)])
        found = unpack_mla_rows(pack_mla_rows(latents, torch.zeros(3, 64)), torch.float32)[:, :512]
        torch.testing.assert_close(found[1:], latents[1:], rtol=0.07, atol=0)
        assert (found[0] == 0).all()  # less than what the smallest normal scale can say
        spoilt = torch.ones(512)
        spoilt[130] = torch.nan
        assert unpack_mla_rows(pack_mla_rows(spoilt, torch.ones(64)))[:512].isnan().view(4, 128).all(1).tolist() == [
            False, True, False, False,
        ]  # fmt: skip

    def test_rows_of_any_layout(self):
        latents, rotated = columns(4, 6)
        rows = pack_mla_rows(latents, rotated)
        assert torch.equal(pack_mla_rows(latents.mT.contiguous().mT, rotated.mT.contiguous().mT), rows)
        odd = torch.zeros(4, 6, 657, dtype=torch.uint8)
        odd[..., 1:] = rows
        assert torch.equal(unpack_mla_rows(odd[..., 1:]), unpack_mla_rows(rows))
        assert torch.equal(unpack_mla_rows(rows.transpose(0, 1)), unpack_mla_rows(rows).transpose(0, 1))
        assert pack_mla_rows(torch.zeros(0, 512), torch.zeros(0, 64)).shape == (0, 656)
        assert not pack_mla_rows(latents.requires_grad_(), rotated).requires_grad

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"latents": torch.ones(2, 511)}, r"latents must have shape \[..., 512\] = \[2, 512\], got \[2, 511\]"),
            ({"rotated": torch.ones(3, 64)}, r"rotated must have shape \[..., 64\] = \[2, 64\], got \[3, 64\]"),
            ({"latents": torch.ones(2, 512).double()}, "latents must be float16, bfloat16 or float32, got torch.f"),
            ({"rotated": torch.ones(2, 64).int()}, "rotated must be float16, bfloat16 or float32, got torch.int32"),
            ({"rotated": torch.ones(2, 64, device="meta")}, "rotated must be on the device of q, cpu, got meta"),
            ({"latents": torch.ones(())}, r"latents must have shape"),
            ({"rotated": None}, "rotated must be a torch.Tensor, got NoneType"),
        ],
    )
    def test_what_breaks_the_contract_is_refused_by_name(self, change, message):
        good = {name: torch.ones(2, size) for name, size in COLUMNS.items()}
        with pytest.raises(InputError, match=message):
            pack_mla_rows(**{**good, **change})

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((torch.zeros(2, 655, dtype=torch.uint8),), r"rows must have shape \[..., 656\] = \[2, 656\]"),
            ((torch.zeros(2, 656),), "rows must be torch.uint8, got torch.float32"),
            ((torch.zeros(656, dtype=torch.uint8), torch.float64), "dtype must be float16, bfloat16 or float32"),
            (("rows",), "rows must be a torch.Tensor, got str"),
        ],
    )
    def test_what_is_no_row_is_refused_by_name(self, arguments, message):
        with pytest.raises(InputError, match=message):
            unpack_mla_rows(*arguments)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("case", FP8_CASES, ids=str)
def test_cpu_tensors(case, dtype):
    check_sparse(dataclasses.replace(case, dtype=dtype), "cpu", "auto")


@pytest.mark.parametrize("page_size", [0, 16])
def test_it_means_the_numbers_of_the_rows(page_size):
    (q, cache, indices), options = make_call(dataclasses.replace(IN_FP8, page_size=page_size, dtype="fp32", scale=0.1))
    found = sparse_mla(q, cache, indices, **options, return_lse=True)
    same = sparse_mla(q, unpack_mla_rows(cache, torch.float32), indices, **options, return_lse=True)
    for one, other in zip(found, same, strict=True):
        torch.testing.assert_close(one, other)
    # Without any code of ours: numbers of the bytes, gathered, scored and averaged.
    stored = cache[..., :512].contiguous().view(torch.float8_e4m3fn).float()
    scales = cache[..., 512:528].contiguous().view(torch.float32).repeat_interleave(128, -1)
    rows = torch.cat([stored * scales, cache[..., 528:].contiguous().view(torch.bfloat16).float()], -1)
    if page_size:
        rows = rows[options["page_table"][0].long()].flatten(0, 1)[None]
    chosen = indices[0, 0][indices[0, 0] >= 0].long()
    rows = rows[0, chosen, 0]
    weights = torch.softmax(q[0, :, 0] @ rows.T * 0.1, -1) if len(chosen) else torch.zeros(q.shape[1], 0)
    torch.testing.assert_close(found[0][0, :, 0], weights @ rows[:, :512])


def good() -> dict[str, Any]:
    return {
        "q": torch.ones(2, 4, 3, 576, dtype=torch.bfloat16), "kv_cache": pack_mla_rows(*columns(2, 20, 1)),
        "indices": torch.zeros(2, 3, 7, dtype=torch.int32),
    }  # fmt: skip


def at_byte(cache: torch.Tensor, first: int, row: int = 656) -> torch.Tensor:
    """Return a copy whose memory begins at such a byte, with rows so far apart."""
    memory = torch.zeros(first + cache[..., 0].numel() * row, dtype=torch.uint8)[first:]
    copied = memory.view(*cache.shape[:-1], row)[..., :656]
    return copied.copy_(cache)


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"kv_cache": torch.zeros(2, 20, 1, 576, dtype=torch.uint8)},
        r"kv_cache must have shape \[pages or B, positions, 1, bytes of a row\] = \[2, 20, 1, 656\], got",
    ),
    ({"kv_cache": torch.zeros(2, 20, 2, 656, dtype=torch.uint8)}, r"= \[2, 20, 1, 656\], got \[2, 20, 2, 656\]"),
    ({"kv_cache": torch.zeros(3, 20, 1, 656, dtype=torch.uint8)}, "kv_cache must have one row for each of 2 sequences"),
    (
        {"kv_cache": torch.zeros(2, 20, 1, 656, dtype=torch.float8_e4m3fn)},
        "kv_cache must be torch.bfloat16, or torch.uint8 for rows in fp8, got torch.float8_e4m3fn",
    ),
    ({"kv_cache": torch.zeros(2, 20, 1, 656, dtype=torch.int8)}, "or torch.uint8 for rows in fp8, got torch.int8"),
    ({"kv_cache": torch.zeros(2, 656, 1, 20, dtype=torch.uint8).transpose(1, 3)}, "must be contiguous along its last"),
    ({"kv_cache": at_byte(good()["kv_cache"], 8)}, "start at multiples of 16 bytes, got an address that is one of 8"),
    (
        {"kv_cache": at_byte(good()["kv_cache"], 0, 664)},
        r"rows that start at multiples of 16 bytes, got an address that is one of 16, and strides \[13280, 664",
    ),
    ({"q": torch.ones(2, 4, 3, 512).bfloat16()}, "q must have D = 576 with a cache in fp8, got 512"),
    ({"q": torch.ones(2, 4, 3, 576).double()}, "q must be float16, bfloat16 or float32, got torch.float64"),
    ({"head_dim_v": 576}, "head_dim_v must be 512 with a cache in fp8, got 576"),
    ({"indices": torch.full((2, 3, 7), 20, dtype=torch.int32)}, r"indices\[0, 0, 0\] must be from 0 to 19, or -1"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[f"{next(iter(c))}-{i}" for i, (c, _) in enumerate(BAD)])
def test_what_breaks_the_contract_is_refused_by_name(change, message):
    sparse_mla(**good())
    with pytest.raises(InputError, match=message):
        sparse_mla(**{**good(), **change})


def test_rows_further_apart_are_served():
    given = good()
    expected = sparse_mla(**given)
    assert torch.equal(sparse_mla(**{**given, "kv_cache": at_byte(given["kv_cache"], 16, 672)}), expected)


def test_the_plan_names_the_kernel_and_what_is_passed_over():
    plan = plan_sparse_mla(DEEPSEEK, find_gpu("H200"))
    assert plan.kernel == "sparse_mla_triton"
    assert "sparse_mla_gluon_sm90 is passed over (it serves caches of 16 bits, got one in fp8)" in plan.reason
    assert "fp8" in DEEPSEEK.describe()
    assert DEEPSEEK.kv_bytes == 8 * 2048 * 656
    assert "b2_h4_s3_20_top7_d576_512_bf16_fp8 on CPU: reference" in str(explain_sparse_mla(**good()))
    with pytest.raises(UnsupportedError, match="it serves caches of 16 bits, got one in fp8"):
        plan_sparse_mla(DEEPSEEK, find_gpu("H200"), "sparse_mla_gluon_sm90")
    for name in ("A100", "A10G"):
        with pytest.raises(UnsupportedError, match=r"fp8 caches need sm_89 or newer, got sm_8\d"):
            plan_sparse_mla(DEEPSEEK, find_gpu(name))
    with pytest.raises(UnsupportedError, match="no kernel attends to indexed rows in fp32"):
        plan_sparse_mla(dataclasses.replace(DEEPSEEK, dtype="fp32"), find_gpu("H200"))
    with pytest.raises(InputError, match="a cache in fp8 must have D 576 and DV 512, got 576 and 448"):
        dataclasses.replace(DEEPSEEK, head_dim_v=448)
    # Rows of q that start anywhere are served, and the cache keeps its alignment.
    odd = dataclasses.replace(DEEPSEEK, pointer_alignment=2)
    assert (odd.q_alignment, odd.cache_alignment) == (1, 16)


@pytest.mark.triton
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("name", ["L4", "H200", "B200"])
def test_tiles_fit_and_nothing_spills(name, heads, dtype):
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    from flashmoe_science.attention.sparse.prepare import prepare_sparse_kernels
    from flashmoe_science.gpu.compile import check_kernel

    gpu = find_gpu(name)
    for page_size in (0, 64):
        problem = SparseProblem(8, heads, 1, 32768, 2048, 576, 512, dtype, page_size=page_size, is_fp8=True)
        for kernel in prepare_sparse_kernels(plan_sparse_mla(problem, gpu)):
            assert not check_kernel(kernel.source, gpu.arch, gpu.name, most_spilled=0).problems


def test_compile_opcheck_and_fake_tensors():
    (q, cache, indices), options = make_call(dataclasses.replace(IN_FP8, page_size=16, sinks=True))

    def attend(q: torch.Tensor, cache: torch.Tensor, indices: torch.Tensor) -> Any:
        return sparse_mla(q + 1, cache, indices, **options, return_lse=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for found, expected in zip(compiled(q, cache, indices), attend(q, cache, indices), strict=True):
        torch.testing.assert_close(found, expected)
    arguments = q, cache, indices, options["page_table"], options["sinks"], 512, None, 0, False, "auto"
    torch.library.opcheck(torch.ops.flashmoe_science.sparse_mla, arguments)
    latents, rotated = columns(2, 20, 1)
    assert torch.equal(
        torch.compile(pack_mla_rows, fullgraph=True, backend="aot_eager")(latents, rotated),
        pack_mla_rows(latents, rotated),
    )
    with FakeTensorMode() as mode:
        o = sparse_mla(*(mode.from_tensor(good()[name]) for name in ("q", "kv_cache", "indices")))
        assert (o.shape, o.dtype) == ((2, 4, 3, 512), torch.bfloat16)
