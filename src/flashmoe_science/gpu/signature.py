"""From a kernel's own parameters and arguments by name to what is compiled and launched.

A kernel names its parameters once, where it is written. A caller gives each of them a value by that name, in any order;
types, order and tensor maps follow from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CompileError
from .compile import KernelSource, parameter_names
from .gluon_versions import descriptor_type
from .tensor_map import TensorMap


@dataclass(frozen=True, slots=True)
class Pointer:
    """The address of a tensor's first element, or of one behind it."""

    dtype: str  # of an element: "fp16", "bf16", "fp32", "i32" or "i64"
    tensor: str = ""  # the name that the caller's tensors have; empty: the parameter's
    aligned: bool = False  # the address is a multiple of 16 bytes


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A tensor that TMA copies tile by tile: shape and strides, outermost axis first, strides in elements."""

    dtype: str
    tile: tuple[int, ...]  # of one copy, swizzled as the matrix units read it
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    tensor: str = ""  # as of a pointer
    same_as: str = ""  # the descriptor that has the same tensor: its address is copied from there


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number that is passed at each launch."""

    kind: str  # "i32", "i64" or "fp32"
    value: float


Argument = Pointer | Descriptor | Scalar | None  # None: the kernel is compiled without it


def scalars(kind: str, group: str = "", **values: float) -> dict[str, Argument]:
    """Return scalars of one type by name; those of a group by ``group.name``."""
    return {f"{group}.{name}" if group else name: Scalar(kind, value) for name, value in values.items()}


@dataclass(frozen=True)
class PreparedKernel:
    """One launch, ready to be compiled: what ``launch.prepare_launch`` takes."""

    source: KernelSource
    grid: tuple[int, int, int]
    scalars: tuple[float, ...] = ()
    tensors: tuple[str, ...] = ()  # one for each address that the launch is given, in order
    tensor_maps: tuple[TensorMap, ...] = ()


def kernel_source(
    function: Any,
    arguments: Mapping[str, Argument],
    constants: Mapping[str, Any],
    *,
    num_warps: int,
    num_stages: int = 1,
    max_registers: int | None = None,
    dependent_launch: bool = False,
) -> KernelSource:
    """Return what is compiled: the kernel with a type for each argument, in the order of its own parameters.

    An argument that is None is a constant. Options are those of ``KernelSource``; a parameter ``DEPENDENT_LAUNCH`` is
    given ``dependent_launch``.

    Raises:
        CompileError: a parameter of the kernel is given no argument or two, or an argument has no parameter.
    """
    names = parameter_names(function)
    waits = {"DEPENDENT_LAUNCH": dependent_launch} if "DEPENDENT_LAUNCH" in names else {}
    _check_names(function.__name__, names, arguments, {**constants, **waits})
    given = {name: value for name in names if (value := arguments.get(name)) is not None}
    return KernelSource(
        function,
        tuple((name, _type_of(value)) for name, value in given.items()),
        (*constants.items(), *((name, None) for name, value in arguments.items() if value is None), *waits.items()),
        frozenset(name for name, value in given.items() if isinstance(value, Pointer) and value.aligned),
        num_warps,
        num_stages,
        max_registers,
        dependent_launch,
    )


def prepare_kernel(
    source: KernelSource, grid: tuple[int, int, int], arguments: Mapping[str, Argument]
) -> PreparedKernel:
    """Return the launch of ``source`` with the arguments it was made of, by name."""
    given = {name: arguments[name] for name, _ in source.signature}
    descriptors = {name: value for name, value in given.items() if isinstance(value, Descriptor)}
    places = list(descriptors)
    return PreparedKernel(
        source,
        grid,
        tuple(value.value for value in given.values() if isinstance(value, Scalar)),
        tuple(
            value.tensor or name
            for name, value in given.items()
            if isinstance(value, Pointer) or (isinstance(value, Descriptor) and not value.same_as)
        ),
        tuple(
            TensorMap(value.dtype, value.shape, value.strides, places.index(value.same_as) if value.same_as else None)
            for value in descriptors.values()
        ),
    )


def _type_of(argument: Pointer | Descriptor | Scalar) -> str:
    if isinstance(argument, Pointer):
        return f"*{argument.dtype}"
    return argument.kind if isinstance(argument, Scalar) else descriptor_type(argument.dtype, argument.tile)


def _check_names(
    kernel: str, names: tuple[str, ...], arguments: Mapping[str, Argument], constants: Mapping[str, Any]
) -> None:
    """Raise ``CompileError`` unless every parameter has one argument and every argument a parameter."""
    given = {*arguments, *constants}
    for problem, found in (
        ("is given no argument for", [name for name in names if name not in given]),
        ("has no parameter", [name for name in (*arguments, *constants) if name not in names]),
        ("is given two arguments for", [name for name in arguments if name in constants]),
    ):
        if found:
            raise CompileError(f"{kernel} {problem} {', '.join(found)}")
