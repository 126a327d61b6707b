"""The identity of a launch: one hash of all that the compiler and the driver are given. No GPU is needed.

Two launches with one identity run the same machine code under one version of Triton, on blocks and arguments of the
same sizes. The hash has no names of modules, files, functions or local variables, no comments, docstrings or line
numbers. So moving or renaming them leaves it, and a changed token, constant, option, tile or grid does not. It is equal
for every supported version of Python and Triton.

Not in it: how ``launch.py`` launches, and what a call runs besides its kernels, e.g. a fill by torch. Gate *launch*
finds a kernel that was not promised.
"""

from __future__ import annotations

import ast
import builtins
import functools
import hashlib
import json
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import UnreadableError
from .tensor_map import ENCODING

if TYPE_CHECKING:
    from .compile import KernelSource
    from .tensor_map import TensorMap

_DIGITS = 32
_OUTSIDE = frozenset({"builtins", "math", "torch", "triton", "typing"})  # packages whose versions a record names
_LEFT_OUT = frozenset({"ctx", "kind", "type_comment", "type_ignores"})  # of a syntax tree: they follow from the rest
# Options at these values are left out, so an option that is added here with its old behaviour changes no identity.
_USUAL = {"num_stages": 1, "maxnreg": None, "enable_fp_fusion": True, "dependent_launch": False, "of": None}
# Older names of functions of Gluon, and the newest.
_NEWEST_NAMES = {
    "async_copy_global_to_shared": "async_load", "async_copy_shared_to_global": "async_store",
    "thread_barrier": "barrier", "_reinterpret": "reinterpret",
}  # fmt: skip
_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class PlannedSource(Protocol):
    """One launch of a plan, as ``launch.prepare_launch`` is given it."""

    @property
    def source(self) -> KernelSource:
        """The kernel."""

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks in x, y and z."""

    @property
    def scalars(self) -> tuple[float, ...]:
        """Values of the arguments after the pointers."""

    @property
    def tensor_maps(self) -> tuple[TensorMap, ...]:
        """Tensors behind the descriptors."""


def launch_identity(launch: PlannedSource, arch: int) -> str:
    """Return the identity of a launch on ``sm_<arch>``, 32 hexadecimal digits.

    Raises:
        UnreadableError: the kernel reaches something that cannot be read, or a constant has no plain value.
    """
    from .compile import ALIGNMENT, compile_options

    source = launch.source
    kinds = [kind for _, kind in source.signature][len(source.signature) - len(launch.scalars) :]
    return digest({
        "arch": arch,
        "code": code_identity(source.function),
        "signature": [[name, _type(kind)] for name, kind in source.signature],
        "constants": _plain(dict(source.constants)),
        "options": _unusual(compile_options(source)),
        "aligned": [_plain(source.aligned), ALIGNMENT],
        "dependent_launch": source.dependent_launch,
        "grid": _plain(launch.grid),
        # A kernel is given fp32: further digits of a double do not count.
        "scalars": [
            struct.pack("<f", value).hex() if kind == "fp32" else _plain(value)
            for kind, value in zip(kinds, launch.scalars, strict=True)
        ],
        "maps": [
            [_unusual({each.name: getattr(tensor_map, each.name) for each in fields(tensor_map)}), _plain(ENCODING)]
            for tensor_map in launch.tensor_maps
        ],
    })  # fmt: skip


def digest(document: Any) -> str:
    """Return the shortened SHA-256 of values of JSON."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:_DIGITS]


def code_identity(function: Any) -> str:
    """Return the hash of a jitted function and of every function, class and constant that it reaches.

    Raises:
        UnreadableError: one of them cannot be read.
    """
    return _code_identity(getattr(function, "fn", function))


@functools.lru_cache(maxsize=1024)
def _code_identity(function: Any) -> str:
    # Definitions are numbered in the order in which they are found, so that no module is named.
    found, lines = {function: 0}, []
    for definition in (order := [function]):
        text, names = _describe(definition)
        reached: list[Any] = []
        for value, is_code in names:
            if is_code and value not in found:
                found[value] = len(order)
                order.append(value)
            reached.append(["code", found[value]] if is_code else value)
        lines.append([text, reached])
    return digest(lines)


@functools.lru_cache(maxsize=4096)
def _describe(definition: Any) -> tuple[str, Sequence[tuple[Any, bool]]]:
    """Return the hash of a definition's own source, and what its global names stand for, as they come in it."""
    where = f"{definition.__module__}:{definition.__qualname__}"
    module = sys.modules[definition.__module__]
    place = 0 if isinstance(definition, type) else definition.__code__.co_firstlineno
    node = _definitions(str(module.__file__)).get((definition.__qualname__.rpartition(".")[2], place))
    if node is None or "<locals>" in where:
        raise UnreadableError(f"the source of {where} cannot be read: expected a class or function of a module")
    names = {}
    for name in _global_names(node):
        if name in vars(module):
            names[name] = _reach(vars(module)[name], f"{name} of {where}")
        elif not hasattr(builtins, name):
            raise UnreadableError(f"{where} uses {name}, which its module does not have")
    numbers = {name: f"global {i}" for i, name in enumerate(names)}
    kind, parts = normalised(node, numbers)
    return digest([kind, {**parts, "name": ""}]), list(names.values())


@functools.lru_cache(maxsize=256)
def _definitions(file: str) -> Mapping[tuple[str, int], ast.AST]:
    """Return functions by name and first line, as code objects have it, and classes of the module by name and 0."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    found: dict[tuple[str, int], ast.AST] = {}
    for node in _statements(tree):
        if isinstance(node, _Definition):
            found[node.name, min(part.lineno for part in (node, *node.decorator_list))] = node
    return found | {(node.name, 0): node for node in tree.body if isinstance(node, ast.ClassDef)}


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements in ``node``, without a look into their expressions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child
            yield from _statements(child)


def normalised(node: Any, names: Mapping[str, str] | None = None) -> Any:
    """Return a syntax tree as values of JSON, without docstrings and places; equal for every version of Python.

    With ``names`` it has these names in place of those of the source, and local variables of functions are numbered.
    """
    if isinstance(node, list):
        return [normalised(item, names) for item in node]
    if not isinstance(node, ast.AST):
        return f"{type(node).__name__} {node!r}"
    if names is not None and isinstance(node, ast.Name) and node.id in names:
        return ["Name", names[node.id]]
    if names is not None and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        parameters = _parameters(node)
        names = {name: said for name, said in names.items() if name not in parameters}
        names |= {name: f"local {i}" for i, name in enumerate(_locals(node, parameters))}
    fields = {
        name: _without_docstring(node) if name == "body" and isinstance(node, (ast.Module, *_Definition)) else value
        for name, value in ast.iter_fields(node)
        if name not in _LEFT_OUT and (value is not None or isinstance(node, ast.Constant)) and value != []
    }
    return [type(node).__name__, {name: normalised(value, names) for name, value in fields.items()}]


def _without_docstring(node: Any) -> list[ast.stmt]:
    body: list[ast.stmt] = node.body
    first = body[0].value if body and isinstance(body[0], ast.Expr) else None
    return body[1:] if isinstance(first, ast.Constant) and isinstance(first.value, str) else body


@functools.lru_cache(maxsize=256)
def _nodes(definition: ast.AST) -> Sequence[ast.AST]:
    return list(ast.walk(definition))


def _parameters(function: ast.AST) -> set[str]:
    return {each.arg for each in _nodes(function) if isinstance(each, ast.arg)}


def _locals(function: ast.AST, parameters: set[str]) -> list[str]:
    """Return the variables that a function binds, without its parameters, in the order in which they are bound."""
    bound = [each for each in _nodes(function) if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)]
    bound.sort(key=lambda each: (each.lineno, each.col_offset))
    return list(dict.fromkeys(each.id for each in bound if each.id not in parameters))


def _global_names(node: ast.AST) -> list[str]:
    """Return the names that a definition reads and does not bind, in the order of its source.

    Only the options of a decorator count, e.g. ``noinline``: the decorator itself runs on the host.
    """
    if isinstance(node, ast.ClassDef):
        return list(dict.fromkeys(name for part in (*node.bases, *node.body) for name in _global_names(part)))
    decorators = getattr(node, "decorator_list", ())
    options = [option.value for each in decorators if isinstance(each, ast.Call) for option in each.keywords]
    parts = [part for part in ast.iter_child_nodes(node) if part not in decorators]
    nodes = [node, *(each for part in [*options, *parts] for each in ast.walk(part))]
    bound = {each.arg for each in nodes if isinstance(each, ast.arg)}
    bound |= {each.id for each in nodes if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)}
    bound |= {each.name for each in nodes[1:] if isinstance(each, _Definition)}
    read = [each for each in nodes if isinstance(each, ast.Name) and each.id not in bound]
    return list(dict.fromkeys(each.id for each in sorted(read, key=lambda each: (each.lineno, each.col_offset))))


def _reach(value: Any, what: str) -> tuple[Any, bool]:
    """Return the definition, the plain value or the outside name behind a global name, and whether it is code."""
    code = getattr(value, "fn", value)
    code = getattr(code, "__wrapped__", code) if hasattr(code, "__triton_builtin__") else code
    if isinstance(code, ModuleType) and _is_outside(code.__name__):
        return ["outside", code.__name__], False
    if isinstance(code, (FunctionType, type)):
        if not _is_outside(code.__module__):
            return code, True
        return ["outside", _NEWEST_NAMES.get(code.__name__, code.__name__)], False
    try:
        return _plain(value), False
    except UnreadableError as error:
        raise UnreadableError(f"{what} cannot be read: {error}") from None


def _is_outside(module: str) -> bool:
    return module.partition(".")[0] in _OUTSIDE


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON has it, where ``true`` is not 1 and 1 is not 1.0. Raises ``UnreadableError``."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if type(value).__name__ == "constexpr":
        return _plain(value.value)
    if type(value).__name__ == "dtype":
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):  # a layout
        return [type(value).__name__, _said((each.name, getattr(value, each.name)) for each in fields(value))]
    raise UnreadableError(f"a value of type {type(value).__name__} has no plain form")


def _said(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return those fields that say something: versions of Triton add others."""
    return {name: _plain(value) for name, value in fields if value not in (None, False, 0, [], ())}


def _unusual(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in options.items() if name not in _USUAL or value != _USUAL[name]}


@functools.lru_cache(maxsize=1024)
def _type(kind: str) -> Any:
    """Return an argument's type; of a descriptor its element, tile and layout, without fields that say nothing."""
    descriptor = re.fullmatch(r"tensordesc<(\w+)\[([\d, ]+)\],(.*)>", kind)
    if descriptor is None:
        if "<" in kind:
            raise UnreadableError(f"type {kind} is not known")
        return kind
    dtype, tile, layout = descriptor.groups()
    try:
        call = ast.parse(layout, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise UnreadableError(f"layout {layout} is not known")
        fields = [(str(keyword.arg), ast.literal_eval(keyword.value)) for keyword in call.keywords]
    except (SyntaxError, ValueError) as error:
        raise UnreadableError(f"layout {layout} is not known") from error
    return [dtype, [int(size) for size in tile.split(",")], ast.unparse(call.func), _said(fields)]
