"""The public ``BlockMask``: which keys each query sees, block by block."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import InputError, UnsupportedError, shown
from ...gpu.checks import check_memory, check_not_mapped, check_tensor
from ...gpu.subclasses import is_untraced
from .lists import (
    BLOCK,
    MaskSizes,
    Seen,
    build,
    check_block_size,
    in_blocks_of_128,
    pack_lists,
    to_dense,
    visited,
)

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

_CACHED = "_flashmoe_science_mask"  # of torch's mask: ours, and what it was made of


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which keys each query sees: the argument ``mask`` of ``flash_attention``.

    Made by one of the class methods, once for all layers: it lies on the device of what it is made of, and its memory
    grows with the blocks of 128 x 128 that are seen. Making it waits for the device, but for ``blocks`` with blocks of
    a multiple of 128 and no causal mask. Calls with it wait for nothing, so that CUDA graphs can hold them.

    Row m and key n count from the first of each; a causal mask shows keys up to m + Sk - Sq. A negative id, or a row
    that sees no key, gives 0 and an LSE of -inf.

    Attributes:
        sizes: sequences and heads with a mask of their own, queries and keys.
        lists: int32, the blocks that each block of queries visits, and each block of keys.
        bits: int32 ``[partial blocks, 128, 4]``.
    """

    sizes: MaskSizes
    lists: Tensor
    bits: Tensor

    @classmethod
    def from_dense(cls, mask: Tensor) -> BlockMask:
        """Return the mask of booleans ``[B or 1, heads, Sq, Sk]``, True where a query sees a key.

        Args:
            mask: ``heads`` is H or what divides it: head h has mask ``h * heads // H``. Any strides.

        Raises:
            InputError: it is no boolean tensor of 4 dimensions.
        """
        _check_values("mask", mask)
        if mask.dtype != torch.bool or mask.dim() != 4:
            raise InputError(
                f"mask must be boolean, of 4 dimensions [B or 1, heads, Sq, Sk], got {mask.dtype}, "
                f"shape {list(mask.shape)}"
            )
        sizes = MaskSizes(*mask.shape)
        batch, heads, rows, columns = sizes.blocks
        ends = (columns * BLOCK - sizes.seqlen_k, rows * BLOCK - sizes.seqlen_q)
        padded = torch.nn.functional.pad(mask, (0, ends[0], 0, ends[1]))
        tiles = padded.view(batch, heads, rows, BLOCK, columns, BLOCK)
        full = tiles.all(5).all(3)
        return cls._built(sizes, full, tiles.any(5).any(3), lambda b, h, row, key: padded[b, h, row, key])

    @classmethod
    def documents(cls, ids: Tensor, *, causal: bool = True) -> BlockMask:
        """Return the mask of documents in a row: a token sees those of its own document.

        Args:
            ids: ``[S]`` or ``[B, S]`` integers: the document of each token; negative: it sees nothing and is not seen.
            causal: it sees none behind itself.
        """
        _check_integers("ids", ids, (1, 2), "[S] or [B, S]")
        _check_flag("causal", causal)
        ids = ids[None] if ids.dim() == 1 else ids
        batch, length = ids.shape
        sizes = MaskSizes(batch, 1, length, length)
        blocks = sizes.blocks[2]
        tiles = torch.nn.functional.pad(ids, (0, blocks * BLOCK - length), value=-1).view(batch, blocks, BLOCK)
        low, high = tiles.amin(-1), tiles.amax(-1)
        meets = (low[:, :, None] <= high[:, None]) & (low[:, None] <= high[:, :, None])
        one = (low == high) & (low >= 0)
        full = meets & one[:, :, None] & one[:, None]
        if causal:
            meets, full = meets.tril(), full.tril(-1)

        def seen(b: Tensor, _h: Tensor, row: Tensor, key: Tensor) -> Tensor:
            found = (ids[b, row] == ids[b, key]) & (ids[b, row] >= 0)
            return found & (key <= row) if causal else found

        return cls._built(sizes, full[:, None], meets[:, None], seen)

    @classmethod
    def prefix(cls, lengths: Tensor, seqlen: int) -> BlockMask:
        """Return the causal mask of sequences whose first tokens all see one another.

        Args:
            lengths: ``[B]`` integers: tokens of each prefix, which every token sees.
            seqlen: queries, and keys.
        """
        _check_integers("lengths", lengths, (1,), "[B]")
        _check_length("seqlen", seqlen)
        sizes = MaskSizes(lengths.shape[0], 1, seqlen, seqlen)
        blocks = torch.arange(sizes.blocks[2], device=lengths.device)
        reached, inside = (lengths[:, None] > first for first in (blocks * BLOCK, (blocks + 1) * BLOCK - 1))
        before = blocks <= blocks[:, None]
        return cls._built(
            sizes,
            (before.tril(-1) | inside[:, None])[:, None],
            (before | reached[:, None])[:, None],
            lambda b, _h, row, key: (key <= row) | (key < lengths[b]),
        )

    @classmethod
    def tree(cls, parents: Tensor, *, keys_before: int = 0) -> BlockMask:
        """Return the mask of trees of tokens, as in speculative decoding: a token sees itself and its ancestors.

        Args:
            parents: ``[N]`` or ``[B, N]`` integers: the number of each token's parent, -1 for none.
            keys_before: keys in front of those of the tree, which every token sees: there are ``keys_before`` + N.
        """
        _check_integers("parents", parents, (1, 2), "[N] or [B, N]")
        _check_length("keys_before", keys_before)
        parents = parents[None] if parents.dim() == 1 else parents
        outside = parents[(parents < -1) | (parents >= parents.shape[1])].tolist()
        if outside:
            raise InputError(f"parents must be from -1 (none) to {parents.shape[1] - 1}, got {outside[0]}")
        batch, tokens = parents.shape
        numbers = torch.arange(tokens, device=parents.device)
        reached = (parents[:, :, None] == numbers) | torch.eye(tokens, dtype=torch.bool, device=parents.device)
        for _ in range(max(1, tokens).bit_length()):  # each step doubles the generations
            reached = torch.bmm(reached.float(), reached.float()) > 0
        around = (reached & reached.mT).triu(1).nonzero().tolist()
        if around:
            _, one, other = around[0]
            raise InputError(f"parents must have no cycle, got one through tokens {one} and {other}")
        before = torch.ones(batch, tokens, keys_before, dtype=torch.bool, device=parents.device)
        return cls.from_dense(torch.cat([before, reached], -1)[:, None])

    @classmethod
    def blocks(
        cls, indices: Tensor, block_size: int, seqlen_q: int, seqlen_k: int, *, causal: bool = False
    ) -> BlockMask:
        """Return the mask of chosen blocks: the queries of a block see the keys of the blocks that it lists.

        Args:
            indices: ``[B or 1, heads, cdiv(Sq, block_size), count]`` integers: numbers of key blocks, each list in any
                order; negative ones, and those behind the last block, are left out. ``heads`` is H or what divides it.
            block_size: queries and keys of a block: a multiple of 128, or 1, 2, 4, ... 64.
            seqlen_q: queries.
            seqlen_k: keys.
            causal: besides, row m sees keys up to m + Sk - Sq.
        """
        _check_integers("indices", indices, (4,), "[B or 1, heads, query blocks, count]")
        _check_length("seqlen_q", seqlen_q)
        _check_length("seqlen_k", seqlen_k)
        _check_flag("causal", causal)
        check_block_size("block_size", block_size)
        batch, heads, rows, count = indices.shape
        columns = -(-seqlen_k // block_size)
        if rows != -(-seqlen_q // block_size):
            raise InputError(
                f"indices must have a list for each of {-(-seqlen_q // block_size)} blocks of queries, got {rows}"
            )
        sizes = MaskSizes(batch, heads, seqlen_q, seqlen_k)
        listed = torch.zeros(batch, heads, rows, columns + 1, dtype=torch.bool, device=indices.device)
        places = torch.where((indices >= 0) & (indices < columns), indices, columns)
        listed = listed.scatter(3, places.long(), value=True)[..., :columns]
        size = (block_size, block_size)
        whole, some = (in_blocks_of_128(listed, size, sizes, every=every) for every in (True, False))
        if not causal and block_size % BLOCK == 0:  # nothing is partial, and shapes say how many blocks there may be
            each = min(count, columns) * (block_size // BLOCK)
            room = batch * heads * sizes.blocks[2] * min(each, sizes.blocks[3])
            nothing = torch.zeros_like(whole)
            with _outside_inference():
                bits = torch.zeros(0, BLOCK, BLOCK // 32, dtype=torch.int32, device=indices.device)
                return cls(sizes, pack_lists(whole, nothing, (room, 0)), bits)
        if causal:
            ends = torch.arange(1, sizes.blocks[2] + 1, device=indices.device) * BLOCK + (seqlen_k - seqlen_q)
            starts = torch.arange(sizes.blocks[3], device=indices.device) * BLOCK
            some = some & (starts < ends[:, None])
            whole = whole & (starts + BLOCK <= ends[:, None] - BLOCK + 1)

        def seen(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
            found = listed[b, h, row // block_size, key // block_size]
            return found & (key <= row + (seqlen_k - seqlen_q)) if causal else found

        return cls._built(sizes, whole, some, seen)

    @classmethod
    def from_torch(cls, mask: TorchBlockMask) -> BlockMask:
        """Return the mask that ``torch.nn.attention.flex_attention.create_block_mask`` made.

        Its ``mask_mod`` is evaluated now, on partial blocks alone: what it reads may change afterwards. The answer is
        kept with the mask, as the layers of a model ask for the same one.

        Raises:
            InputError: its blocks are of other sizes than multiples of 128, or 1, 2, 4, ... 64.
        """
        from .flex import map_blocks

        made_of = (
            (mask.mask_mod, (tuple(mask.seq_lengths), tuple(mask.BLOCK_SIZE))),
            *(
                None if part is None else (part, 0 if part.is_inference() else part._version)  # noqa: SLF001 - has no public name
                for part in (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
            ),
        )
        known = mask.__dict__.get(_CACHED)
        if known is not None and _are_same(known[0], made_of):
            found: BlockMask = known[1]
            return found
        with _outside_inference():
            found = cls._built(*map_blocks(mask))
        mask.__dict__[_CACHED] = made_of, found
        return found

    @classmethod
    def _built(cls, sizes: MaskSizes, full: Tensor, candidates: Tensor, seen: Seen) -> BlockMask:
        with _outside_inference():
            return cls(sizes, *build(sizes, full, candidates, seen))

    def to_dense(self) -> Tensor:
        """Return booleans ``[batch, heads, Sq, Sk]``, True where a query sees a key. It waits for the device."""
        return to_dense(self.sizes, self.lists, self.bits)

    def visited_share(self) -> float:
        """Return the share of all blocks that are seen, wholly or in part. It waits for the device."""
        full, partial, there = visited(self.sizes, self.lists)
        return (full + partial) / max(1, there)


def _outside_inference() -> contextlib.AbstractContextManager[None]:
    """Return a context in which what is made can be kept for gradients: masks outlive the call that makes them."""
    return torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def is_block_mask(mask: object) -> bool:
    """Return whether it is a mask of ours or of torch, whose module takes long to load."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return isinstance(mask, BlockMask) or (module is not None and isinstance(mask, module.BlockMask))


def as_block_mask(mask: Any) -> BlockMask:
    """Return a mask that a caller passed as ours. Raises ``InputError``, and ``UnsupportedError`` while compiling."""
    if isinstance(mask, BlockMask):
        return mask
    if not is_block_mask(mask):
        hint = "BlockMask.from_dense makes one of booleans" if isinstance(mask, Tensor) else ""
        raise InputError(
            f"mask must be a BlockMask, of flashmoe_science or of torch, or None, got {type(mask).__name__}", hint=hint
        )
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            "torch's BlockMask is not converted while a call is compiled",
            hint="pass BlockMask.from_torch(mask), made outside of the compiled function",
        )
    return BlockMask.from_torch(mask)


def _are_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(
        a is b or (a is not None and b is not None and a[0] is b[0] and a[1] == b[1])
        for a, b in zip(one, other, strict=True)
    )


def _check_values(name: str, tensor: Any) -> None:
    """Raise ``InputError`` unless a tensor has values here: which blocks there are follows from them."""
    check_tensor(name, tensor)
    check_not_mapped([tensor])
    if not is_untraced(tensor) or tensor.device.type not in ("cpu", "cuda"):
        raise InputError(
            f"{name} must have values, on a CUDA device or the CPU, got {type(tensor).__name__} on {tensor.device}",
            hint="make masks outside of what torch traces or compiles, and pass them in",
        )
    check_memory(name, tensor)


def _check_integers(name: str, tensor: Any, axes: tuple[int, ...], letters: str) -> None:
    _check_values(name, tensor)
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() not in axes:
        raise InputError(
            f"{name} must be int32 or int64, of shape {letters}, got {tensor.dtype}, shape {list(tensor.shape)}"
        )


def _check_length(name: str, length: Any) -> None:
    if type(length) is not int or not 0 <= length < 2**31:
        raise InputError(f"{name} must be an integer from 0 to 2**31 - 1, got {shown(length)}")


def _check_flag(name: str, flag: Any) -> None:
    if not isinstance(flag, bool):
        raise InputError(f"{name} must be True or False, got {shown(flag)}")
