"""Add a tile of shared memory to a tensor in memory with TMA, in the versions of Gluon that we support."""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma


@builtin  # type: ignore[untyped-decorator] # Gluon gives it no types
def _tma_add(desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    """Do what Triton 3.8 calls ``tma.async_atomic_add``; the operation is there before its name."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)  # noqa: SLF001 - as all operations of Gluon do
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


tma_add = getattr(tma, "async_atomic_add", None) or _tma_add
