"""Everything that a launch is given is in its fingerprint, and nothing that a version of Triton adds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

import triton.language as tl

from flashmoe_science.gpu import fingerprint as module
from flashmoe_science.gpu.compile import KernelSource
from flashmoe_science.gpu.dependencies import UntraceableError
from flashmoe_science.gpu.fingerprint import digest, fingerprint
from flashmoe_science.gpu.tensor_map import TensorMap

from . import made_up_kernels
from .made_up_kernels import _first_kernel, _second_kernel

pytestmark = pytest.mark.triton

LAYOUT = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, transposed=False, cga_layout=[])"


@dataclass(frozen=True)
class Launch:
    source: KernelSource
    grid: tuple[int, int, int] = (4, 1, 1)
    scalars: tuple[float, ...] = (7, 0.1)
    tensor_maps: tuple[TensorMap, ...] = (TensorMap("fp16", (64, 64), (64, 1)),)


def signature(layout=LAYOUT, tile="64, 64", scale="fp32"):
    return (("x_desc", f"tensordesc<fp16[{tile}],{layout}>"), ("y_ptr", "*fp32"), ("n", "i32"), ("scale", scale))


SOURCE = KernelSource(_first_kernel, signature(), (("BLOCK", 64),), frozenset({"y_ptr"}), 4)
PLAIN = Launch(SOURCE)


def of(*launches, arch=90, host=None):
    return fingerprint(arch, launches, host or {})


def with_source(**changes):
    return of(dataclasses.replace(PLAIN, source=dataclasses.replace(SOURCE, **changes)))


CHANGED = {
    "function": _second_kernel,
    "signature": signature(scale="fp64"),
    "constants": (("BLOCK", 128),),
    "aligned": frozenset(),
    "num_warps": 8,
    "num_stages": 2,
    "max_registers": 128,
    "dependent_launch": True,
}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(KernelSource)])
def test_every_field_of_a_kernel_counts(field):
    """A field that is added to it is here without a line, and fails until it has one."""
    launch = PLAIN if field != "signature" else dataclasses.replace(PLAIN, scalars=(7, 1))
    source = dataclasses.replace(SOURCE, **{field: CHANGED[field]})
    assert of(dataclasses.replace(launch, source=source)) != of(launch)


@pytest.mark.parametrize(
    "change",
    [
        {"grid": (5, 1, 1)},
        {"scalars": (8, 0.1)},
        {"scalars": (7, 0.2)},
        {"tensor_maps": (TensorMap("bf16", (64, 64), (64, 1)),)},
        {"tensor_maps": (TensorMap("fp16", (64, 32), (64, 1)),)},
        {"tensor_maps": (TensorMap("fp16", (64, 64), (128, 1)),)},
        {"tensor_maps": (TensorMap("fp16", (64, 64), (64, 1), of=0),)},
        {"tensor_maps": ()},
    ],
)
def test_everything_that_a_launch_is_given_counts(change):
    assert of(dataclasses.replace(PLAIN, **change)) != of(PLAIN)


def test_architecture_order_number_and_host_count():
    other = Launch(dataclasses.replace(SOURCE, function=_second_kernel))
    found = [of(PLAIN), of(PLAIN, PLAIN), of(PLAIN, other), of(other, PLAIN), of(PLAIN, arch=100), of()]
    found.append(of(PLAIN, host={"host": "x"}))
    assert len(set(found)) == len(found)
    assert of(PLAIN) == of(Launch(SOURCE))


@pytest.mark.parametrize(
    ("one", "other"), [(True, 1), (1, 1.0), ("1", 1), (None, 0), (None, False), (0.0, -0.0), ("None", None)]
)
def test_values_that_are_equal_to_python_are_not_the_same_constant(one, other):
    assert with_source(constants=(("BLOCK", one),)) != with_source(constants=(("BLOCK", other),))


def test_a_double_counts_as_the_fp32_that_the_kernel_gets():
    assert of(dataclasses.replace(PLAIN, scalars=(7, 0.1 + 1e-12))) == of(PLAIN)


def test_of_a_descriptor_tile_and_swizzle_count_and_fields_that_say_nothing_do_not():
    plain = with_source(signature=signature())
    assert with_source(signature=signature(LAYOUT.replace(", cga_layout=[]", ""))) == plain
    assert with_source(signature=signature(LAYOUT.replace("[])", "[], fp4_padded=False)"))) == plain
    assert with_source(signature=signature(LAYOUT.replace("=128", "=64"))) != plain
    assert with_source(signature=signature(LAYOUT.replace("transposed=False", "transposed=True"))) != plain
    assert with_source(signature=signature(tile="64, 32")) != plain


def test_what_is_not_known_is_said():
    for layout in ("lambda: 0", "Layout(128)", "Layout(width=f())", "Layout("):
        with pytest.raises(UntraceableError, match="layout"):
            with_source(signature=signature(layout))
    with pytest.raises(UntraceableError, match="type tuple<i32>"):
        with_source(signature=(*signature()[:3], ("scale", "tuple<i32>")))
    with pytest.raises(UntraceableError, match="object"):
        with_source(constants=(("BLOCK", object()),))


def test_a_kernel_made_inside_a_function_cannot_be_followed():
    @dataclass(frozen=True)
    class Made:
        fn: object

    def kernel(x):
        return x

    with pytest.raises(UntraceableError, match="no function of a module"):
        module.kernel_code(Made(kernel))


def test_a_constant_that_comes_from_elsewhere_than_the_source_counts(monkeypatch):
    before = of(PLAIN)
    module.kernel_code.cache_clear()
    assert of(PLAIN) == before
    module.kernel_code.cache_clear()
    monkeypatch.setattr(made_up_kernels, "SCALE", tl.constexpr(3.0))
    assert of(PLAIN) != before
    module.kernel_code.cache_clear()


def test_the_hash_is_one_of_plain_values():
    assert len(digest({"a": [1, (2, 3)]})) == 64
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({"a": (1, 2)}) != digest({"a": (2, 1)})
