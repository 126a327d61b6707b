"""Calls with a block mask: cases, their inputs, and what they are held to."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from flashmoe_science import BlockMask, flash_attention
from flashmoe_science.attention.backward.autograd import attention_gradients
from flashmoe_science.attention.inputs import Options

from .checks import DTYPES, assert_gradients_right, assert_right


@dataclass(frozen=True)
class MaskCase:
    """One problem; ``why`` names the test."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    kind: str  # of ``KINDS``
    why: str
    masks: tuple[int, int] = (1, 1)  # sequences and heads with a mask of their own
    softcap: float = 0.0
    sinks: str = ""
    scale: float | None = None
    through_lse: bool = False

    def __str__(self) -> str:
        return self.why


def random_mask(case: MaskCase, device: str) -> tuple[BlockMask, Tensor]:
    """Some rows see nothing; the first block is full where it is whole, and the blocks behind it are empty."""
    generator = torch.Generator(device).manual_seed(3)
    shape = (*case.masks, case.seqlen_q, case.seqlen_k)
    dense = torch.rand(shape, generator=generator, device=device) < 0.3
    dense[..., :128, :128] = True
    dense[..., :128, 128:256] = False
    dense[..., case.seqlen_q // 2 :: 7, :] = False
    return BlockMask.from_dense(dense), dense


def documents(case: MaskCase, device: str, *, causal: bool = True) -> tuple[BlockMask, Tensor]:
    generator = torch.Generator(device).manual_seed(3)
    ids = torch.randint(0, 3, (case.masks[0], case.seqlen_q), generator=generator, device=device).sort(1)[0]
    ids[:, -5:] = -1  # padding
    dense = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, None]
    return BlockMask.documents(ids, causal=causal), (dense.tril() if causal else dense)[:, None]


def prefix(case: MaskCase, device: str) -> tuple[BlockMask, Tensor]:
    lengths = torch.arange(case.masks[0], device=device) * 70 + 33
    place = torch.arange(case.seqlen_q, device=device)
    dense = (place <= place[:, None]) | (place < lengths[:, None, None])
    return BlockMask.prefix(lengths, case.seqlen_q), dense[:, None]


def tree(case: MaskCase, device: str) -> tuple[BlockMask, Tensor]:
    """Token n has parent (n - 1) // 2."""
    before = case.seqlen_k - case.seqlen_q
    parents = (torch.arange(case.seqlen_q, device=device) - 1) // 2
    parents[0] = -1
    dense = torch.zeros(1, 1, case.seqlen_q, case.seqlen_k, dtype=torch.bool, device=device)
    dense[..., :before] = True
    for token in range(case.seqlen_q):
        ancestor = token
        while ancestor >= 0:
            dense[0, 0, token, before + ancestor] = True
            ancestor = (ancestor - 1) // 2 if ancestor else -1
    return BlockMask.tree(parents, keys_before=before), dense


def chosen_blocks(case: MaskCase, device: str, *, size: int = 128, causal: bool = False) -> tuple[BlockMask, Tensor]:
    """Two blocks of each list, some of which name one twice, or none."""
    generator = torch.Generator(device).manual_seed(3)
    rows, columns = -(-case.seqlen_q // size), -(-case.seqlen_k // size)
    shape = (*case.masks, rows, 2)
    indices = torch.randint(-1, columns + 1, shape, generator=generator, device=device)
    listed = (indices[..., None] == torch.arange(columns, device=device)).any(3)
    dense = listed.repeat_interleave(size, 2).repeat_interleave(size, 3)[:, :, : case.seqlen_q, : case.seqlen_k]
    if causal:
        dense = dense & torch.ones_like(dense).tril(case.seqlen_k - case.seqlen_q)
    return BlockMask.blocks(indices, size, case.seqlen_q, case.seqlen_k, causal=causal), dense


def of_torch(case: MaskCase, device: str, *, size: int = 128) -> tuple[Any, Tensor]:
    """A window whose width depends on sequence and head, as a function."""

    def shown(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key <= row + 20 + 40 * b) & (key + 60 * h + 30 >= row)

    mask = create_block_mask(shown, *case.masks, case.seqlen_q, case.seqlen_k, device=device, BLOCK_SIZE=size)
    sizes = (*case.masks, case.seqlen_q, case.seqlen_k)
    b, h, row, key = torch.meshgrid(*(torch.arange(n, device=device) for n in sizes), indexing="ij")
    return mask, shown(b, h, row, key)


KINDS: dict[str, Callable[[MaskCase, str], tuple[Any, Tensor]]] = {
    "random": random_mask,
    "documents": documents,
    "documents-full": lambda case, device: documents(case, device, causal=False),
    "prefix": prefix,
    "tree": tree,
    "blocks": chosen_blocks,
    "blocks-causal": lambda case, device: chosen_blocks(case, device, causal=True),
    "blocks-64": lambda case, device: chosen_blocks(case, device, size=64),
    "torch": of_torch,
    "torch-64": lambda case, device: of_torch(case, device, size=64),
}
_C = MaskCase
CASES = [
    _C(1, 2, 1, 140, 257, 32, 32, "fp16", "random", "gqa-odd"),
    _C(2, 2, 1, 130, 140, 40, 24, "fp32", "random", "heads-of-their-own", masks=(2, 2), through_lse=True),
    _C(2, 4, 2, 128, 256, 32, 48, "fp16", "random", "heads-of-k", masks=(1, 2), softcap=3.0),
    _C(1, 2, 2, 40, 300, 144, 144, "fp16", "random", "wide", scale=-0.3),
    _C(1, 2, 1, 130, 140, 32, 32, "fp32", "random", "sinks", sinks="bf16", softcap=2.0, through_lse=True),
    _C(2, 2, 1, 300, 300, 32, 32, "fp16", "documents", "documents", masks=(2, 1)),
    _C(2, 2, 2, 257, 257, 16, 16, "fp16", "documents-full", "documents-full"),
    _C(2, 2, 1, 260, 260, 32, 32, "fp16", "prefix", "prefix", masks=(2, 1)),
    _C(2, 4, 2, 13, 150, 64, 64, "fp16", "tree", "tree"),
    _C(1, 2, 1, 300, 400, 32, 32, "fp16", "blocks", "blocks", masks=(1, 2)),
    _C(2, 2, 1, 300, 400, 32, 32, "fp16", "blocks-causal", "blocks-causal", masks=(2, 1), sinks="fp32"),
    _C(1, 2, 2, 200, 190, 32, 32, "fp32", "blocks-64", "blocks-64", masks=(1, 2)),
    _C(2, 2, 1, 140, 200, 32, 32, "fp16", "torch", "torch", masks=(2, 2)),
    _C(1, 2, 1, 150, 260, 32, 32, "fp16", "torch-64", "torch-64"),
    _C(1, 2, 1, 1, 1, 1, 1, "fp16", "random", "one-key"),
    _C(0, 2, 1, 4, 4, 16, 16, "fp16", "random", "no-batch"),
    _C(2, 2, 1, 0, 4, 16, 16, "fp16", "random", "no-rows"),
    _C(2, 2, 1, 4, 0, 16, 16, "fp16", "random", "no-keys", sinks="fp32"),
]

# What Hopper's own kernel serves: rows and blocks that see nothing, masks of sequences and heads, all widths.
HOPPER_CASES = [
    _C(2, 4, 2, 300, 512, 128, 128, "bf16", "random", "random", masks=(2, 2)),
    _C(2, 4, 2, 300, 512, 64, 64, "fp16", "random", "random-d64", masks=(2, 2)),
    _C(1, 2, 1, 300, 512, 256, 256, "bf16", "random", "random-d256", masks=(1, 2)),
    _C(1, 2, 1, 300, 512, 192, 128, "bf16", "random", "random-d192"),
    _C(1, 2, 1, 300, 512, 96, 80, "fp16", "random", "random-d96"),
    _C(2, 2, 1, 384, 384, 128, 128, "bf16", "documents", "documents", masks=(2, 1)),
    _C(2, 2, 1, 384, 384, 128, 128, "fp16", "prefix", "prefix", masks=(2, 1)),
    _C(2, 4, 2, 13, 256, 128, 128, "bf16", "tree", "tree"),
    _C(1, 4, 1, 1000, 2048, 128, 128, "bf16", "blocks", "blocks", masks=(1, 4)),
    _C(2, 2, 1, 700, 640, 64, 64, "bf16", "blocks-causal", "blocks-causal", masks=(2, 1)),
    _C(1, 2, 2, 200, 256, 256, 256, "fp16", "blocks-64", "blocks-64", masks=(1, 2)),
    _C(2, 32, 8, 2048, 2048, 128, 128, "bf16", "documents-full", "many-tiles"),
]


def make_inputs(case: MaskCase, device: str) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Return random q, k and v, and the options besides the mask."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, dtype: str = case.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(DTYPES[dtype])

    q = draw(case.batch, case.heads, case.seqlen_q, case.head_dim)
    k = draw(case.batch, case.heads_kv, case.seqlen_k, case.head_dim)
    v = draw(case.batch, case.heads_kv, case.seqlen_k, case.head_dim_v)
    options: dict[str, Any] = {"softcap": case.softcap, "softmax_scale": case.scale}
    return q, k, v, options | ({"sinks": draw(case.heads, dtype=case.sinks)} if case.sinks else {})


def hide_unseen(case: MaskCase, dense: Tensor, tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return k and v with NaN in blocks of keys that no query sees: nobody may read them."""
    unseen = torch.ones(case.heads_kv, case.seqlen_k, dtype=torch.bool, device=dense.device)
    of_head = torch.arange(case.heads, device=dense.device) * dense.shape[1] // case.heads
    for h, seen in enumerate(dense.any(0).any(1)[of_head]):
        for first in range(0, case.seqlen_k, 128):
            if seen[first : first + 128].any():
                unseen[h * case.heads_kv // case.heads, first : first + 128] = False
    return tuple(tensor.masked_fill(unseen[..., None], math.nan) for tensor in tensors)


def check_mask(
    case: MaskCase, device: str, *, kernel: str = "auto", backward: str = "auto",
    poison: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:  # fmt: skip
    """Hold output, LSE and gradients against fp64; another run, of other strides, has the same bits."""
    q, k, v, options = make_inputs(case, device)
    mask, dense = KINDS[case.kind](case, device)
    is_reference = device == "cpu" and kernel == "auto"  # which multiplies hidden keys by 0
    poisoned_k, poisoned_v = (k, v) if is_reference else hide_unseen(case, dense, (k, v))
    with poison():
        o, lse = flash_attention(q, poisoned_k, poisoned_v, mask=mask, **options, return_lse=True, kernel=kernel)
        turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, poisoned_k, poisoned_v)]
        again = flash_attention(*turned, mask=mask, **options, kernel=kernel)
    assert_right(o, q, k, v, lse=lse, mask=dense, **options)
    assert torch.equal(again, o), "another memory layout gives other bits"
    generator = torch.Generator(device).manual_seed(2)
    do = torch.randn(o.shape, generator=generator, device=device).to(o.dtype)
    given = {"q": q, "k": poisoned_k, "v": poisoned_v, "o": o, "lse": lse, "do": do}
    dlse = None
    if case.through_lse:
        dlse = torch.randn(lse.shape, generator=generator, device=device)
        given["dlse"] = torch.where(lse == -math.inf, math.nan, dlse)
        dlse = torch.where(lse == -math.inf, 0.0, dlse)
    own = mask if isinstance(mask, BlockMask) else BlockMask.from_torch(mask)
    given |= {"mask_lists": own.lists, "mask_bits": own.bits}
    wanted = ["q", "k", "v"]
    if "sinks" in options:
        given["sinks"] = options["sinks"]
        wanted.append("sinks")
    asked = Options(
        causal=False,
        softmax_scale=case.scale,
        softcap=case.softcap,
        kernel=backward,
        mask_sizes=own.sizes[:2],
    )
    with poison():
        found = attention_gradients(asked, given, wanted)
        repeat = attention_gradients(asked, given, wanted)
    assert_gradients_right(found, q, k, v, do, dlse, mask=dense, **options)
    for name, gradient in found.items():
        assert torch.equal(repeat[name], gradient), f"d{name} has other bits in another run"
