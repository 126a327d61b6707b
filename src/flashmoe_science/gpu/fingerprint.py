"""One hash of everything that decides what a GPU runs in a call, made with no GPU.

Of every launch: the kernel's source with all that it calls, its constants, the types and alignment of its arguments,
its options, grid, tensor maps and the scalars that it is given. Of the host: the source of what launches them. Shared
memory, registers and machine code follow from these and from the version of Triton, which is not in the hash.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib
import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from .compile import KernelSource
from .dependencies import UntraceableError, trace
from .tensor_map import TensorMap


class Launch(Protocol):
    """One launch of a plan: see ``launch.prepare_launch``."""

    @property
    def source(self) -> KernelSource:
        """The kernel."""

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks."""

    @property
    def scalars(self) -> tuple[float, ...]:
        """What follows the pointers."""

    @property
    def tensor_maps(self) -> tuple[TensorMap, ...]:
        """What TMA is told."""


def fingerprint(arch: int, launches: Iterable[Launch], host: Mapping[str, Any]) -> str:
    """Return the hash of a call on ``sm_<arch>``.

    Args:
        arch: 90 for sm_90.
        launches: in their order.
        host: what else decides what runs: plain values.

    Raises:
        UntraceableError: something that a kernel is made of cannot be followed.
    """
    return digest({"arch": arch, "launches": [_describe(launch) for launch in launches], "host": dict(host)})


def digest(document: Any) -> str:
    """Return the SHA-256 of plain values. Raises ``UntraceableError`` for others."""
    return hashlib.sha256(json.dumps(_plain(document), sort_keys=True).encode()).hexdigest()


@functools.lru_cache(maxsize=256)
def host_code(roots: tuple[str, ...], stops: frozenset[str]) -> str:
    """Return the hash of host functions with all that they use: see ``dependencies.trace``."""
    return digest(dict(trace(roots, stops)))


def _describe(launch: Launch) -> dict[str, Any]:
    source = launch.source
    options = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
    del options["function"]
    options["signature"] = [[name, _type(kind)] for name, kind in source.signature]
    options["constants"] = dict(source.constants)
    # A kernel is given fp32: what a double has beyond does not count.
    kinds = [kind for _, kind in source.signature][len(source.signature) - len(launch.scalars) :]
    scalars = [
        struct.pack("<f", value).hex() if kind == "fp32" else value
        for kind, value in zip(kinds, launch.scalars, strict=True)
    ]
    return {
        "code": kernel_code(source.function),
        "options": options,
        "grid": launch.grid,
        "scalars": scalars,
        "maps": [dataclasses.asdict(tensor_map) for tensor_map in launch.tensor_maps],
    }


@functools.lru_cache(maxsize=1024)
def kernel_code(function: Any) -> str:
    """Return the hash of a kernel's source, with every function, constant and class that it uses.

    Raises:
        UntraceableError: it uses something that cannot be followed.
    """
    python = function.fn
    if "." in python.__qualname__:
        raise UntraceableError(f"{python.__qualname__} is no function of a module")
    found = trace((f"{python.__module__}:{python.__name__}",))
    return digest({"source": dict(found), "values": dict(_values(found))})


def _values(names: Iterable[str]) -> Iterable[tuple[str, Any]]:
    """Yield the constants among ``names`` with their values: they may come from elsewhere than the source."""
    for key in names:
        module, _, name = key.partition(":")
        value: Any = getattr(importlib.import_module(module), name, None)
        value = value.value if type(value).__name__ == "constexpr" else value
        if isinstance(value, (bool, int, float, str)):
            yield key, value


def _type(kind: str) -> Any:
    """Return an argument's type; of a descriptor, element, tile and layout without fields that say nothing.

    Versions of Triton add such fields.
    """
    descriptor = re.fullmatch(r"tensordesc<(\w+)\[([\d, ]+)\],(.*)>", kind)
    if descriptor is None:
        if "<" in kind:
            raise UntraceableError(f"type {kind} is not known")
        return kind
    dtype, tile, layout = descriptor.groups()
    try:
        call = ast.parse(layout, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise UntraceableError(f"layout {layout} is not known")
        fields = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise UntraceableError(f"layout {layout} is not known") from error
    said = {name: value for name, value in fields.items() if value not in (None, False, 0, [], ())}
    return [dtype, [int(size) for size in tile.split(",")], ast.unparse(call.func), said]


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON has it, where ``true`` is no 1, and 1 no 1.0. Raises ``UntraceableError``."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(item) for item in value)
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    raise UntraceableError(f"a value of type {type(value).__name__} cannot be told from another")
