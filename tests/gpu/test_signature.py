"""What a kernel's own parameters and arguments by name give: types, order, constants, tensor maps; and refusals."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")
import triton
from triton import language as tl

from flashmoe_science.errors import CompileError
from flashmoe_science.gpu.gluon_versions import descriptor_type
from flashmoe_science.gpu.signature import Descriptor, Pointer, Scalar, kernel_source, prepare_kernel
from flashmoe_science.gpu.tensor_map import TensorMap


@triton.jit
def _kernel(x_desc, more_desc, y_ptr, bias_ptr, rows, scale, BLOCK: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    pass


ARGUMENTS: dict[str, Any] = {  # in another order than the kernel's
    "scale": Scalar("fp32", 0.5),
    "y_ptr": Pointer("bf16", "out", aligned=True),
    "bias_ptr": None,
    "rows": Scalar("i64", 7),
    "more_desc": Descriptor("fp16", (16, 32), (7, 96), (96, 1), same_as="x_desc"),
    "x_desc": Descriptor("fp16", (16, 64), (7, 96), (96, 1), "x"),
}


def test_types_and_values_come_in_the_order_of_the_kernel_s_parameters():
    source = kernel_source(_kernel, ARGUMENTS, {"BLOCK": 64}, num_warps=8, num_stages=3, dependent_launch=True)
    wide, narrow = descriptor_type("fp16", (16, 64)), descriptor_type("fp16", (16, 32))
    assert source.signature == (
        ("x_desc", wide), ("more_desc", narrow), ("y_ptr", "*bf16"), ("rows", "i64"), ("scale", "fp32")
    )  # fmt: skip
    assert dict(source.constants) == {"BLOCK": 64, "bias_ptr": None, "DEPENDENT_LAUNCH": True}
    assert source.aligned == {"y_ptr"}
    assert (source.num_warps, source.num_stages, source.max_registers) == (8, 3, None)
    kernel = prepare_kernel(source, (3, 2, 1), ARGUMENTS)
    assert (kernel.grid, kernel.scalars) == ((3, 2, 1), (7, 0.5))
    assert kernel.tensors == ("x", "out"), "the second descriptor has the address of the first"
    assert kernel.tensor_maps == (TensorMap("fp16", (7, 96), (96, 1)), TensorMap("fp16", (7, 96), (96, 1), of=0))


@pytest.mark.parametrize(
    ("arguments", "constants", "message"),
    [
        ({"rows": Scalar("i32", 1)}, {}, "_kernel is given no argument for BLOCK"),
        ({"cols": None}, {"BLOCK": 1, "TILE": 2}, "_kernel has no parameter cols, TILE"),
        ({"rows": None}, {"BLOCK": 1, "rows": 2}, "_kernel is given two arguments for rows"),
    ],
)
def test_arguments_that_are_missing_or_surplus_are_named(arguments, constants, message):
    with pytest.raises(CompileError, match=message):
        kernel_source(_kernel, {**ARGUMENTS, **arguments}, constants, num_warps=4)
