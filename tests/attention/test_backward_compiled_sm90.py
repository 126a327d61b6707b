"""The backward kernels for Hopper, compiled: shared memory, spills, barriers, and what their loops hold."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science.attention.backward.plan_sm90 import HopperBackwardConfig
from flashmoe_science.attention.backward.prepare import prepare_backward_kernels
from flashmoe_science.gpu.compile import compile_kernel, read_resources
from flashmoe_science.gpu.launch import count_parameters

from ..exhaustive import all_but
from .key_loops import key_loops
from .test_backward_sm90 import plan_of

pytestmark = pytest.mark.triton


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "dtype", "causal", "window"),
    all_but(
        [
            (128, 128, "bf16", True, (-1, -1)),
            (128, 128, "bf16", False, (-1, -1)),
            (128, 128, "fp16", True, (-1, -1)),
            (64, 64, "fp16", False, (-1, -1)),
            (104, 40, "bf16", True, (-1, -1)),
            (256, 256, "bf16", True, (-1, -1)),
            (192, 128, "fp16", False, (-1, -1)),
            (192, 128, "bf16", True, (100, -1)),
            (136, 72, "bf16", True, (-1, -1)),
            (160, 160, "bf16", True, (-1, -1)),
            (128, 128, "fp16", True, (100, -1)),
            (64, 64, "bf16", False, (100, 70)),
            (256, 256, "bf16", True, (100, -1)),
        ],
        "(64, 64, 'bf16', False, (100, 70))",
        "(192, 128, 'fp16', False, (-1, -1))",
        "(256, 256, 'bf16', True, (-1, -1))",
    ),
)
def test_kernels_compile(head_dim, head_dim_v, dtype, causal, window, tmp_path):
    """Within shared memory; the products of a step side by side, and nothing spilled beside them."""
    check_compiled(head_dim, head_dim_v, dtype, causal, window, (8, 4), tmp_path)


@pytest.mark.one_triton
@pytest.mark.parametrize(
    "heads",
    [
        pytest.param(heads, marks=marks)
        for heads, marks in (
            ((6, 2), [pytest.mark.exhaustive]),
            ((8, 2), []),
            ((8, 1), [pytest.mark.exhaustive]),
        )
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "dtype"),
    all_but(
        [(128, 128, "bf16"), (64, 64, "bf16"), (192, 128, "bf16"), (192, 128, "fp16"), (256, 256, "bf16")],
        "(128, 128, 'bf16')",
    ),
)
def test_kernels_of_other_groups_compile(head_dim, head_dim_v, dtype, heads, tmp_path):
    """Heads one after another, four together in one walk and in two, and of wide heads two in two walks and in four."""
    check_compiled(head_dim, head_dim_v, dtype, True, (-1, -1), heads, tmp_path)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "dtype", "causal", "window", "heads"),
    all_but(
        [
            (128, 128, "bf16", True, (-1, -1), (7, 1)),
            (128, 128, "bf16", False, (-1, -1), (8, 4)),
            (128, 128, "fp16", True, (100, -1), (8, 4)),
            (104, 40, "bf16", True, (-1, -1), (8, 4)),
            (64, 64, "bf16", True, (-1, -1), (8, 2)),
            (64, 64, "bf16", False, (100, 70), (8, 4)),
            (192, 128, "bf16", True, (-1, -1), (8, 2)),
            (192, 128, "fp16", True, (100, -1), (8, 4)),
            (256, 256, "bf16", True, (-1, -1), (8, 2)),
            (160, 160, "fp16", True, (100, -1), (8, 4)),
        ],
        "(128, 128, 'bf16', True, (-1, -1), (7, 1))",
    ),
)
def test_kernels_for_packed_sequences_compile(head_dim, head_dim_v, dtype, causal, window, heads, tmp_path):
    """Loops are those of one length: what is known of a sequence lies in registers that a warp shares."""
    check_compiled(head_dim, head_dim_v, dtype, causal, window, heads, tmp_path, packed=True)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "dtype", "heads"),
    all_but(
        [
            (128, 128, "bf16", (28, 4)),
            (128, 128, "fp16", (32, 2)),
            (128, 128, "bf16", (16, 2)),
            (64, 64, "bf16", (24, 4)),
            (104, 40, "bf16", (28, 4)),
        ],
        "(128, 128, 'bf16', (28, 4))",
    ),
)
def test_kernels_that_share_groups_compile(head_dim, head_dim_v, dtype, heads, tmp_path):
    """Sums of other programs are added behind the loops, which stay as they are."""
    check_compiled(head_dim, head_dim_v, dtype, True, (-1, -1), heads, tmp_path, batch=1, shared=True)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "dtype", "heads"),
    all_but(
        [
            (128, 128, "bf16", (16, 1)),
            (128, 128, "bf16", (48, 3)),
            (128, 128, "fp16", (8, 1)),
            (128, 128, "bf16", (32, 2)),
            (64, 64, "bf16", (16, 1)),
            (104, 40, "bf16", (16, 1)),
        ],
        "(128, 128, 'bf16', (16, 1))",
    ),
)
def test_kernels_that_share_groups_of_packed_sequences_compile(head_dim, head_dim_v, dtype, heads, tmp_path):
    """Eight heads of a share together, two, and four; which sums they add to is read behind the loops."""
    check_compiled(
        head_dim, head_dim_v, dtype, True, (-1, -1), heads, tmp_path, packed=True, batch=27, shared=True,
        seqlen_q=4096, seqlen_k=4096,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "spilled"),
    all_but([(128, 128, 40), (64, 64, 136), (104, 40, 0), (256, 256, 0), (192, 128, 56)], "(104, 40, 0)"),
)
def test_kernels_with_a_softcap_compile(head_dim, head_dim_v, spilled):
    """The derivative takes registers: some spill, up to ``spilled`` bytes a thread with Triton 3.6 or 3.9."""
    main = prepare_backward_kernels(plan_of(head_dim=head_dim, head_dim_v=head_dim_v, softcap=50.0))[1]
    found = read_resources(main.source, 90)
    assert found.spill_bytes <= spilled
    assert found.shared_memory_bytes <= 227 * 1024


@pytest.mark.parametrize(
    ("dims", "dtype", "mask", "packed"),
    all_but(
        [
            ((128, 128), "bf16", "causal", False),
            ((64, 64), "bf16", "causal", True),
            ((64, 64), "fp16", "full", False),
            ((128, 128), "bf16", "window", True),
            ((192, 128), "bf16", "full", False),
            ((256, 256), "bf16", "causal", False),
        ],
        "((128, 128), 'bf16', 'causal', False)",
    ),
)
def test_kernels_with_alibi_compile(dims, dtype, mask, packed, tmp_path):
    window = (100, -1) if mask == "window" else (-1, -1)
    is_causal = mask != "full"
    check_compiled(dims[0], dims[1], dtype, is_causal, window, (8, 4), tmp_path, packed=packed, alibi="fp32")


def check_compiled(
    head_dim, head_dim_v, dtype, causal, window, heads, tmp_path, *, packed=False, alibi="", batch=64, shared=False,
    **lengths,
):  # fmt: skip
    import triton

    from flashmoe_science.attention.backward.gluon_sm90 import FREE

    plan = plan_of(
        head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, causal=causal, window=window, asked={"has_dlse": True},
        heads=heads[0], heads_kv=heads[1], packed=packed, alibi=alibi, batch=batch, kernel="backward_gluon_sm90",
        **lengths,
    )  # fmt: skip
    assert isinstance(plan.config, HopperBackwardConfig)
    assert (plan.config.shares > 1) == shared
    *first, before, main, after = prepare_backward_kernels(plan)
    for kernel, promised in zip((*first, before, main, after), plan.launches, strict=True):
        compiled = compile_kernel(kernel.source, 90)
        count_parameters(kernel.source, compiled.asm["ptx"])
        assert compiled.metadata.shared <= 227 * 1024
        assert promised.block == (32 * compiled.metadata.num_warps, 1, 1)
    assert not any(read_resources(kernel.source, 90).spill_bytes for kernel in (*first, before, after))
    # Of 128 columns and 64, with grouped heads, ptxas of Triton 3.6 spills two registers once a key tile; where half of
    # V lives in registers, eight.
    is_192 = main.source.name == "_backward_192_sm90_kernel"
    # Of 192 columns up to 14; with windows and Triton 3.9 up to 20.
    has_window, is_oldest = window[0] >= 0, triton.__version__.startswith("3.6.")
    of_192 = 56 if is_oldest or not has_window else 80
    if is_oldest and dtype == "fp16" and heads != (8, 4):  # as without walks over heads together
        of_192 = 72
    holds_v = dict(main.source.constants).get("V_COLUMNS", 0) > 0
    narrow = 8 if head_dim_v <= 64 else 32 if holds_v else 0
    outside_of_loops = 40 * (packed or bool(alibi)) + 16 * (plan.config.shares > 1)
    outside_of_loops += narrow if 64 < head_dim <= 128 else of_192 if is_192 else 0
    assert read_resources(main.source, 90).spill_bytes <= outside_of_loops
    compiled = compile_kernel(main.source, 90)
    ptx = compiled.asm["ptx"]
    assert compiled.metadata.num_warps == 12
    barriers = {int(barrier) for barrier in re.findall(r"\bbar(?:rier\S*)?\.sync\s+(\d+)", ptx)}
    assert max(barriers) < FREE.value
    assert ptx.count("cp.reduce.async.bulk.tensor") == (4 if is_192 else 2)
    loops = key_loops(compiled.asm["cubin"], tmp_path)
    # A masked one and one that is not, for each warpgroup; of the widest heads only one of the two masks. Where keys
    # may come too early, too, a step asks whether it has to. Heads that hold V wait for dV by itself.
    alike = head_dim <= 128 or is_192
    assert len(loops) == (4 if alike else 3) - has_window * (2 if alike else 1)
    for loop in loops:
        # Heads up to 192 have three parts of dQ: with V up to 128 a warpgroup waits for dV and for the first of its two
        # products; with a wider one the first warpgroup multiplies for it twice a step, the second once.
        waits = (5,) if is_192 or holds_v else (3, 4) if 128 < head_dim <= 192 else (4,)
        assert loop["WARPGROUP.DEPBAR"] in waits, "the products are serialised"
        # With Triton 3.9 and 192 columns numbers that live through the loops are kept there, and never stored in them.
        # Packed, the number of the lane may be.
        loads = sum(number for opcode, number in loop.items() if opcode.startswith("LDL"))
        at_most = (5 if has_window else 4) if is_192 else 0
        assert loads <= packed + (0 if is_oldest else at_most)
        assert not [opcode for opcode in loop if opcode.startswith("STL")]
