"""Add a tile of shared memory to a tensor in memory with Hopper's copy engine, in the versions of Gluon that we support."""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma


@builtin
def _tma_add(desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    """Do what Triton 3.8 calls ``tma.async_atomic_add``; the operation is there before its name."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)  # noqa: SLF001 - as all operations of Gluon do
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


tma_add = getattr(tma, "async_atomic_add", None) or _tma_add


@gluon.jit
def wait_until_read():
    """Wait until shared memory that this warp's stores and additions read can be written again."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group.read 0; bar.warp.sync 0xffffffff; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_until_done():
    """Wait until memory has what this warp stored and added."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
