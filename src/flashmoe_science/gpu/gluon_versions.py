"""What differs between the versions of Gluon that we support (Triton 3.6 to 3.9), in one place."""

from __future__ import annotations

import typing
from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

# Triton 3.8 renamed the asynchronous copy to shared memory; the arguments are the same: (smem, pointer, mask).
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

# Triton 3.9 removed the old names of the bulk tensor copies; the arguments are the same: (desc, coord, barrier, smem)
# and (desc, coord, smem).
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

# Triton 3.7 renamed the barrier of the threads of one partition.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


def aggregate(cls: Any) -> Any:
    """Make ``cls`` a bundle of values that device code passes around; one constructor argument a field, in order."""
    cls.__annotations__ = typing.get_type_hints(cls)  # they are strings, and types are compared
    if hasattr(gluon, "aggregate"):
        return gluon.aggregate(cls)
    fields = tuple(cls.__annotations__)

    def construct(self: Any, *values: Any) -> None:
        for name, value in zip(fields, values, strict=True):
            setattr(self, name, value if isinstance(value, core.base_value) else gl.constexpr(value))

    construct.__triton_builtin__ = True  # type: ignore[attr-defined] # the compiler calls it as it is
    cls.__init__ = construct
    return core._aggregate(cls)  # noqa: SLF001 - the name before Triton 3.7, which writes no constructor


def descriptor_type(dtype: str, block: tuple[int, ...]) -> str:
    """Return the type of a tensor descriptor for tiles of ``block``, swizzled as the matrix units read them."""
    layout = gl.NVMMASharedLayout.get_default_for(
        list(block), {"fp16": gl.float16, "bf16": gl.bfloat16, "fp32": gl.float32}[dtype]
    )
    return f"tensordesc<{dtype}[{', '.join(map(str, block))}],{layout!r}>"


@builtin  # type: ignore[untyped-decorator] # Gluon gives it no types
def tma_add(desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    """Do what Triton 3.8 calls ``tma.async_atomic_add``; the operation is there before its name."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)  # noqa: SLF001 - as all operations of Gluon do
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)
