"""Block masks without a GPU: what they are made of, their contract, and the kernels in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from flashmoe_science import BlockMask, InputError, UnsupportedError, explain, explain_gradients, flash_attention
from flashmoe_science.attention.backward.plan import plan_backward
from flashmoe_science.attention.backward.problem import BackwardProblem
from flashmoe_science.attention.forward.plan import plan_attention
from flashmoe_science.attention.masks.block_mask import as_block_mask
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.attention.tiles import ForwardConfig
from flashmoe_science.gpu.specs import SPECS

from ..exhaustive import all_but
from .mask_cases import CASES, KINDS, check_mask


def heads(seqlen_q: int = 20, seqlen_k: int = 30) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 4, seqlen_q, 8), torch.randn(2, 2, seqlen_k, 8), torch.randn(2, 2, seqlen_k, 8)


def some_mask(*shape: int) -> BlockMask:
    return BlockMask.from_dense(torch.rand(shape or (1, 1, 20, 30)) < 0.5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_mask_shows_what_it_was_made_of(case):
    mask, dense = KINDS[case.kind](case, "cpu")
    own = as_block_mask(mask)
    assert torch.equal(own.to_dense(), dense)
    assert own.sizes == tuple(dense.shape)


def entries(lists: list[int], first: int, count: int) -> list[tuple[int, int, int]]:
    """Return each entry of lists as number of the list, block, and place of its bits or -1."""
    found = []
    for number in range(count):
        start, end = lists[first + number : first + number + 2]
        found += [(number, block, -1) for block in lists[start:end]]
        start, end = lists[first + count + 1 + number : first + count + number + 3]
        found += [(number, lists[at], lists[at + 1]) for at in range(start, end, 2)]
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_lists_of_keys_are_the_transpose(case):
    """The gradients of k and v read them alone. Blocks of a list ascend, so that sums have one order."""
    own = as_block_mask(KINDS[case.kind](case, "cpu")[0])
    batch, heads, rows, columns = own.sizes.blocks
    lists, masks = own.lists.tolist(), batch * heads
    by_rows = entries(lists, 0, masks * rows)
    by_keys = entries(lists, 2 * (masks * rows + 1), masks * columns)
    turned = [(n // columns * rows + block, n % columns, place) for n, block, place in by_keys]
    assert sorted(turned) == sorted((n, block, place) for n, block, place in by_rows)
    for found in (by_rows, by_keys):
        assert found == sorted(found, key=lambda entry: (entry[0], entry[2] >= 0, entry[1]))


def test_full_blocks_have_no_bits_and_empty_ones_are_not_listed():
    """Memory grows with the blocks that are seen: 8 documents of 512 tokens, 4 x 4 blocks each."""
    ids = torch.arange(8).repeat_interleave(512)
    whole, causal = BlockMask.documents(ids, causal=False), BlockMask.documents(ids)
    assert whole.bits.shape[0] == 0
    assert whole.visited_share() == 8 * 16 / 32**2
    assert causal.bits.shape[0] == 32  # the diagonal
    assert causal.visited_share() == 8 * 10 / 32**2
    assert causal.lists.numel() < 4 * 33 + 6 * 8 * 10


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpu_tensors_run_the_reference(case):
    check_mask(case, "cpu")


@pytest.mark.triton
@pytest.mark.parametrize("case", all_but(CASES, "gqa-odd", "heads-of-their-own", "wide", "sinks", "torch"), ids=str)
def test_kernels_interpreted(case, interpreted):
    """Forward, dq, dk and dv, in a child process; blocks of keys that nobody sees are NaN."""
    interpreted(case)


REFUSED: dict[str, dict[str, Any]] = {
    "causal": {"causal": True}, "window": {"window": (3, -1)}, "alibi": {"alibi": torch.ones(4)},
    "bias": {"bias": torch.zeros(1, 1, 20, 30)}, "dropout_p": {"dropout_p": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_masks_beside_it_are_refused_by_name(name):
    for call in (flash_attention, explain, explain_gradients):
        with pytest.raises(UnsupportedError, match=f"^{name} is not served beside a mask"):
            call(*heads(), mask=some_mask(), **REFUSED[name])


def test_masks_that_do_not_fit_are_refused_by_name():
    q, k, v = heads()
    calls: tuple[Any, ...] = (flash_attention, explain, explain_gradients)
    for call in calls:
        with pytest.raises(InputError, match=r"mask must be of 20 queries and 30 keys, got 20 and 29"):
            call(q, k, v, mask=some_mask(1, 1, 20, 29))
        with pytest.raises(InputError, match=r"must be of 2 or 1 sequences and of heads that divide 4, got 3 and 1"):
            call(q, k, v, mask=some_mask(3, 1, 20, 30))
        with pytest.raises(InputError, match=r"heads that divide 4, got 1 and 3"):
            call(q, k, v, mask=some_mask(1, 3, 20, 30))
        with pytest.raises(InputError, match=r"mask must be a BlockMask, .*, got Tensor\nhint: BlockMask.from_dense"):
            call(q, k, v, mask=torch.ones(1, 1, 20, 30, dtype=torch.bool))
        with pytest.raises(InputError, match=r"mask must be a BlockMask, .*, got int"):
            call(q, k, v, mask=3)
    with pytest.raises(InputError, match=r"mask must be on the device of q, meta, got cpu"):
        flash_attention(*(x.to("meta") for x in (q, k, v)), mask=some_mask())


Made: Any = BlockMask  # and what types rule out
BAD: dict[str, tuple[Any, str]] = {
    "float": (lambda: Made.from_dense(torch.ones(1, 1, 2, 2)), "mask must be boolean, of 4 dimensions"),
    "two axes": (lambda: Made.from_dense(torch.ones(2, 2, dtype=torch.bool)), "mask must be boolean, of 4"),
    "ids": (lambda: Made.documents(torch.ones(4)), "ids must be int32 or int64, of shape"),
    "causal": (lambda: Made.documents(torch.ones(4, dtype=torch.int32), causal=1), "causal must be True"),
    "lengths": (lambda: Made.prefix(torch.ones(2, 2, dtype=torch.int64), 4), "lengths must be int32 or int64"),
    "seqlen": (lambda: Made.prefix(torch.ones(2, dtype=torch.int64), 4.0), "seqlen must be an integer"),
    "parents": (lambda: Made.tree([0, 1]), "parents must be a torch.Tensor, got list"),
    "parents behind the last": (lambda: Made.tree(torch.tensor([-1, 2])), "parents must be from -1 (none) to 1, got 2"),
    "parents before -1": (lambda: Made.tree(torch.tensor([-1, -2])), "parents must be from -1 (none) to 1, got -2"),
    "a cycle": (lambda: Made.tree(torch.tensor([1, 2, 0])), "parents must have no cycle, got one through tokens 0 and"),
    "a cycle below": (
        lambda: Made.tree(torch.tensor([[-1, 0, 1, 2], [-1, 3, 0, 1]])),
        "parents must have no cycle, got one through tokens 1 and 3",
    ),
    "indices": (lambda: Made.blocks(torch.zeros(1, 1, 2, 1).int(), 128, 100, 100), "for each of 1 blocks of"),
    "size": (lambda: Made.blocks(torch.zeros(1, 1, 1, 1).int(), 96, 90, 90), "block_size must be a multiple of"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_no_mask_can_be_made_of_is_refused_by_name(name):
    make, message = BAD[name]
    with pytest.raises(InputError, match=re.escape(message)):
        make()


def test_blocks_of_torch_of_other_sizes_are_refused_by_name():
    mask = create_block_mask(lambda b, h, row, key: row >= key, None, None, 192, 192, device="cpu", BLOCK_SIZE=96)
    with pytest.raises(InputError, match="the block size of mask must be a multiple of 128, or divide it, got 96"):
        BlockMask.from_torch(mask)


def test_a_mask_of_torch_is_converted_once_unless_it_changes():
    mask = create_block_mask(lambda b, h, row, key: row >= key, None, None, 300, 300, device="cpu")
    first = BlockMask.from_torch(mask)
    assert BlockMask.from_torch(mask) is first
    mask.kv_num_blocks.zero_()
    assert BlockMask.from_torch(mask) is not first
    assert not BlockMask.from_torch(mask).to_dense()[:, :, :256, :128].logical_not().all()  # full blocks stayed
    mask = create_block_mask(lambda b, h, row, key: row >= key, None, None, 300, 300, device="cpu")
    first = BlockMask.from_torch(mask)
    mask.mask_mod = lambda b, h, row, key: row > key
    assert torch.equal(BlockMask.from_torch(mask).to_dense(), first.to_dense().tril(-1))


def test_part_of_a_mask_of_torch_is_refused_by_name():
    mask = create_block_mask(lambda b, h, row, key: row >= key, None, None, 300, 300, device="cpu")
    with pytest.raises(InputError, match="mask must have a list for each of 3 blocks of queries, got 2"):
        BlockMask.from_torch(mask[:, :, torch.tensor([0, 2])])


def test_a_mask_made_in_inference_mode_serves_training():
    torchs = create_block_mask(lambda b, h, row, key: row >= key, None, None, 30, 30, device="cpu")
    with torch.inference_mode():
        masks = [
            BlockMask.from_torch(torchs),
            BlockMask.documents(torch.zeros(30, dtype=torch.int32)),
            BlockMask.blocks(torch.zeros(1, 1, 1, 1, dtype=torch.int32), 128, 30, 30),
        ]
    q, k, v = (torch.randn(1, 2, 30, 8, requires_grad=True) for _ in range(3))
    for mask in masks:
        flash_attention(q, k, v, mask=mask).sum().backward()


def test_plans_choose_the_kernels_of_masks():
    problem = AttentionProblem(2, 32, 8, 8192, 8192, 128, 128, "bf16", return_lse=True, mask_batch=1, mask_heads=8)
    few = dataclasses.replace(problem, batch=1, heads=8, mask_heads=1, seqlen_q=2048)
    for gpu, changes in (("A100", {}), ("B200", {}), ("H200", {"sinks": "bf16"}), ("H200", {"seqlen_k": 8200})):
        plan = plan_attention(dataclasses.replace(problem, **changes), SPECS[gpu])
        assert plan.kernel == "forward_masked_triton"
        assert plan.launches[0].pattern == "_masked_forward_kernel"
    assert plan_attention(few, SPECS["H200"]).kernel == "forward_masked_triton"  # 128 row tiles for 132 SMs
    assert plan_attention(problem, SPECS["H200"]).kernel == "forward_masked_gluon_sm90"
    for rows, block_m in ((20, 16), (100, 64), (8192, 128)):  # no tile is half empty
        config = plan_attention(dataclasses.replace(problem, seqlen_q=rows), SPECS["A100"]).config
        assert isinstance(config, ForwardConfig)
        assert config.block_m == block_m
    sizes = ((256, 256), (64, 256), (256, 64))  # the wider of both decides what fits
    tiles = {
        plan_attention(dataclasses.replace(problem, head_dim=d, head_dim_v=dv), SPECS["A100"]).config for d, dv in sizes
    }
    assert len(tiles) == 1
    for gpu in ("A100", "H200", "B200"):
        backward = plan_backward(BackwardProblem(problem), SPECS[gpu])
        assert backward.kernel == "backward_masked_triton"
        assert [at.pattern for at in backward.launches] == ["_delta_kernel", "_masked_kv_kernel", "_masked_q_kernel"]
        for kernel in ("forward_triton", "forward_gluon_sm90", "forward_features_gluon_sm90", "forward_short_gluon"):
            with pytest.raises(UnsupportedError, match=f"{kernel} does not serve .*: it does not serve a block mask"):
                plan_attention(problem, SPECS[gpu], kernel)
        for kernel in ("backward_triton", "backward_gluon_sm90"):
            with pytest.raises(UnsupportedError, match=f"{kernel} does not serve"):
                plan_backward(BackwardProblem(problem), SPECS[gpu], kernel)
    plain = AttentionProblem(2, 32, 8, 8192, 8192, 128, 128, "bf16")
    with pytest.raises(UnsupportedError, match=r"forward_masked_triton does not serve .*: it serves calls with"):
        plan_attention(plain, SPECS["H200"], "forward_masked_triton")
    with pytest.raises(UnsupportedError, match=r"backward_masked_triton does not serve .*: it serves calls with"):
        plan_backward(BackwardProblem(plain), SPECS["H200"], "backward_masked_triton")


HOPPER_KERNEL = "forward_masked_gluon_sm90"
NOT_OF_HOPPER: dict[str, tuple[str, dict[str, Any], str]] = {
    "no-mask": ("H200", {"mask_batch": 0, "mask_heads": 0}, "it serves calls with a mask"),
    "sinks": ("H200", {"sinks": "fp32"}, "it serves a mask without sinks and softcap"),
    "softcap": ("H200", {"softcap": 2.0}, "it serves a mask without sinks and softcap"),
    "keys": ("H200", {"seqlen_k": 8256}, "numbers of keys that are multiples of 128, got 8256"),
    "columns": ("H200", {"head_dim": 40, "head_dim_v": 36}, "multiples of 8"),
    "gpu": ("B200", {}, "it is for sm_90, this GPU is sm_100"),
    "dtype": ("H200", {"dtype": "fp32"}, "it serves fp16 and bf16 only"),
}


def masked_problem(**changes):
    sizes: dict[str, Any] = {
        "batch": 2, "heads": 32, "heads_kv": 8, "seqlen_q": 8192, "seqlen_k": 8192, "head_dim": 128, "head_dim_v": 128,
        "dtype": "bf16", "mask_batch": 1, "mask_heads": 8,
    }  # fmt: skip
    return AttentionProblem(**{**sizes, **changes})


@pytest.mark.parametrize("why", NOT_OF_HOPPER)
def test_what_hoppers_kernel_does_not_serve_is_refused_by_name(why):
    gpu, changes, message = NOT_OF_HOPPER[why]
    with pytest.raises(UnsupportedError, match=f"{HOPPER_KERNEL} does not serve .*{message}"):
        plan_attention(masked_problem(**changes), SPECS[gpu], HOPPER_KERNEL)


@pytest.mark.triton
@pytest.mark.parametrize("columns", [64, 96, 128, 192, 256])
def test_hoppers_kernel_compiles_almost_without_spills(columns):
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    from flashmoe_science.attention.forward.prepare import prepare_kernels
    from flashmoe_science.gpu.compile import read_resources

    problem = masked_problem(head_dim=columns, head_dim_v=columns, return_lse=True)
    plan = plan_attention(problem, SPECS["H200"], HOPPER_KERNEL)
    (kernel,) = prepare_kernels(plan)
    assert kernel.grid == (132, 1, 1)
    found = read_resources(kernel.source, 90)
    assert found.spill_bytes <= (40 if columns == 256 else 0)
    assert any("HGMMA" in name for name in found.instructions)


def test_blocks_that_visit_the_most_come_first():
    """The order lies behind the four tables of starts; blocks of as many keep theirs."""
    generator = torch.Generator().manual_seed(1)
    dense = (
        torch.rand(2, 3, 700, 900, generator=generator)
        < torch.rand(2, 3, 6, 1, generator=generator).repeat_interleave(128, 2)[:, :, :700] ** 8 * 0.001
    )
    mask = BlockMask.from_dense(dense)
    rows, columns = 2 * 3 * 6, 2 * 3 * 8
    at = 2 * (rows + 1) + 2 * (columns + 1)
    starts, partial = mask.lists[: rows + 1], mask.lists[rows + 1 : 2 * rows + 2]
    visited = (starts.diff() + partial.diff() // 2).view(6, 6)
    order = mask.lists[at : at + rows].view(6, 6).long()
    assert torch.equal(order, visited.argsort(dim=1, descending=True, stable=True))
    assert len(visited.unique()) > 2


def test_explain_says_which_share_of_the_blocks_is_visited():
    q, k, v = heads(256, 256)
    mask = BlockMask.documents(torch.arange(256) // 128)
    assert explain(q, k, v, mask=mask).reason.endswith("; 50.0% of the blocks are visited")


def test_autograd_and_opcheck():
    """Gradients through the public call are those of a bias that hides the same keys."""
    q, k, v = (x.double().float().requires_grad_() for x in heads(150, 140))
    sinks = torch.randn(4, requires_grad=True)
    mask = some_mask(2, 2, 150, 140)
    bias = torch.zeros(2, 4, 150, 140).masked_fill(~mask.to_dense().repeat_interleave(2, 1), -torch.inf)
    given = (q, k, v, sinks)
    found, expected = (
        torch.autograd.grad(flash_attention(q, k, v, sinks=sinks, **options).square().sum(), given)
        for options in ({"mask": mask}, {"bias": bias})
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    operators = torch.ops.flashmoe_science
    arguments: Any = (q, k, v, sinks, mask.lists, mask.bits, 2, 2, None, 0.0, True, "auto")
    torch.library.opcheck(operators.attention_masked, arguments)
    plain = [x.detach() for x in given]
    o, lse = operators.attention_masked(*plain, *arguments[4:])
    more = (*plain, mask.lists, mask.bits, o, lse, o, None, 2, 2, None, 0.0, [0, 1, 2, 3], "auto")
    torch.library.opcheck(operators.attention_masked_backward, more)


def test_the_operator_refuses_tensors_that_are_no_mask():
    q, k, v = heads()
    mask = some_mask()
    call = torch.ops.flashmoe_science.attention_masked
    for lists, bits, sizes in (
        (mask.lists.long(), mask.bits, (1, 1)), (mask.lists, mask.bits[:, :64], (1, 1)),
        (mask.lists[None], mask.bits, (1, 1)), (mask.lists, mask.bits, (3, 1)), (mask.lists, mask.bits, (0, 0)),
    ):  # fmt: skip
        with pytest.raises(InputError, match=r"mask_lists|mask_bits|mask must be of"):
            call(q, k, v, None, lists, bits, *sizes, None, 0.0, True, "auto")


def test_compiled_calls_hold_the_operator():
    mask = some_mask()
    q, k, v = (x.requires_grad_() for x in heads())

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(2 * q, k, v, mask=mask)

    compiled: Any = torch.compile(step, fullgraph=True, backend="aot_eager")
    expected, found = step(q, k, v), compiled(q, k, v)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_a_mask_may_be_an_argument_of_a_compiled_function():
    q, k, v = heads()

    def call(mask: BlockMask) -> Tensor:
        return flash_attention(q, k, v, mask=mask)

    compiled: Any = torch.compile(call, fullgraph=True, backend="eager")
    for mask in (some_mask(), some_mask(), some_mask(2, 4, 20, 30)):
        torch.testing.assert_close(compiled(mask), flash_attention(q, k, v, mask=mask))


def test_masks_of_torch_are_refused_by_name_while_compiling():
    q, k, v = heads()
    mask = create_block_mask(lambda b, h, row, key: row >= key, None, None, 20, 30, device="cpu")

    def call(q: Tensor) -> Tensor:
        return flash_attention(q, k, v, mask=mask)

    compiled: Any = torch.compile(call, backend="eager")
    with pytest.raises(UnsupportedError, match="torch's BlockMask is not converted while a call is compiled"):
        compiled(q)
