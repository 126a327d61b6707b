"""Tensor maps: descriptors of tensors for Hopper's copy engine (TMA), as the driver encodes them.

A kernel takes a map by value, in its parameter block. It is encoded once for a shape; from call to call only the
address changes. The address is the first of the map's 16 words, as ``encode_without_address`` makes sure, so a call
writes that word and no other.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import LaunchError

MAP_BYTES = 128
MAP_ALIGNMENT = 64

_DATA_TYPES = {"fp16": 6, "fp32": 7, "bf16": 9}  # CU_TENSOR_MAP_DATA_TYPE_*
_ITEM_BYTES = {"fp16": 2, "fp32": 4, "bf16": 2}
# CU_TENSOR_MAP_INTERLEAVE_NONE, _L2_PROMOTION_L2_128B and _FLOAT_OOB_FILL_NONE: zeros outside the tensor.
ENCODING = {"interleave": 0, "l2_promotion": 2, "fill": 0}
# Two device addresses that differ in every bit that an address may have, but for the lowest four.
_PATTERNS = (0x0000_5555_5555_5550, 0x0000_2AAA_AAAA_AAA0)


@dataclass(frozen=True, slots=True)
class TensorMap:
    """Shape and strides of one tensor, outermost axis first, strides in elements, the innermost 1."""

    dtype: str  # "fp16", "bf16" or "fp32"
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    of: int | None = None  # the number of the map with the same tensor, if an earlier one has it

    def __post_init__(self) -> None:
        """Give axes of one element, which are never stepped along, a stride that the driver takes."""
        strides, step = list(self.strides), math.prod(self.shape[-1:])
        for axis in range(len(self.shape) - 2, -1, -1):
            if self.shape[axis] == 1:
                strides[axis] = step
            step = strides[axis] * self.shape[axis]
        object.__setattr__(self, "strides", tuple(strides))


@functools.cache
def _driver() -> Any:
    driver = ctypes.PyDLL("libcuda.so.1")
    driver.cuTensorMapEncodeTiled.argtypes = [
        ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int,
    ]  # fmt: skip
    return driver


def encode(tensor_map: TensorMap, layout: Mapping[str, Any], address: int, out: int) -> None:
    """Write the 128 bytes of the map of a tensor at ``address`` to the host address ``out``, a multiple of 64.

    Args:
        tensor_map: the tensor.
        layout: what Triton's compiled kernel says of its descriptor (``metadata.tensordesc_meta``): box and swizzle.
        address: the tensor's device address, a multiple of 16.
        out: where to.

    Raises:
        LaunchError: the driver refuses.
    """
    rank, box = len(tensor_map.shape), layout["block_size"]
    # The driver counts axes from the innermost, and takes strides in bytes, without the innermost.
    shape = (ctypes.c_uint64 * rank)(*reversed(tensor_map.shape))
    strides = (ctypes.c_uint64 * rank)(
        *(_ITEM_BYTES[tensor_map.dtype] * stride for stride in reversed(tensor_map.strides[:-1]))
    )
    code = _driver().cuTensorMapEncodeTiled(
        out, _DATA_TYPES[tensor_map.dtype], rank, address, shape, strides, (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank), ENCODING["interleave"], layout["swizzle"], ENCODING["l2_promotion"],
        ENCODING["fill"],
    )  # fmt: skip
    if code:
        raise LaunchError(f"cannot encode a tensor map (CUDA error {code}): {tensor_map}, box {box}")


def encode_without_address(tensor_map: TensorMap, layout: Mapping[str, Any], out: int) -> None:
    """Write a map to ``out`` whose first word has to be set to the tensor's address before it is used.

    Raises:
        LaunchError: the driver refuses, or keeps the address elsewhere than in the first word.
    """
    seen = []
    for address in _PATTERNS:
        encode(tensor_map, layout, address, out)
        seen.append((ctypes.c_uint64 * (MAP_BYTES // 8)).from_address(out)[:])
    if [words[0] for words in seen] != list(_PATTERNS) or seen[0][1:] != seen[1][1:]:
        raise LaunchError("this driver encodes tensor maps in another way; please report it")
