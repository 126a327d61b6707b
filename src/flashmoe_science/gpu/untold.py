"""What keeps a fingerprint from telling anything: code that names do not lead to, and answers of the machine.

A fingerprint follows names (``dependencies.py``), and has the outcome of planning in place of its source. So nothing
may be changed from outside while modules are imported, and planning may ask nothing of the machine that it runs on.
Where that is not so, there is no fingerprint, and the files decide.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from .dependencies import (
    _OUTSIDE,
    UntraceableError,
    _acts as _changes_or_calls,
    _Definition,
    _Import,
    _load,
    _Module,
    read_source,
    trace,
)

_PACKAGE = __package__.partition(".")[0]

# What statements may do at the top of a module, besides binding names to values.
_REGISTRATIONS = frozenset({"register_autograd", "register_fake", "register_gradients"})
_NAMED = "for _rival in _ALL:\n    _rival.also_called = _ALSO_CALLED.get(_rival.name, ())"
_KNOWN = frozenset({
    ("attention.rivals", _NAMED),
    ("attention_cache.rivals", _NAMED),
    ("gpu.compile", "nvidia_compiler.print = _print_without_ptx"),
})  # fmt: skip
_NOT_IMPORTED = frozenset({"__main__", "cli", "migrations", "pytest_plugin"})  # by what measures
_HARNESS = "proof"  # whose modules may call what they like for values of their own names

_ACTING_BUILTINS = frozenset({"__import__", "compile", "delattr", "eval", "exec", "globals", "open", "setattr", "vars"})
_LOOKUPS = frozenset({"__import__", "compile", "eval", "exec", "globals", "locals", "vars"})
_QUIET = frozenset({
    "__future__", "abc", "collections", "contextlib", "dataclasses", "enum", "functools", "itertools", "math",
    "operator", "re", "struct", "threading", "triton", "types", "typing", "typing_extensions",
})  # fmt: skip
_QUIET_CALLS = frozenset({"aggregate", "torch.library.custom_op"})

_ASKING_NOTHING = _QUIET | {"json", "numpy"}
_OF_OS, _OF_IMPORTLIB = ("environ",), ("metadata",)
_OF_TORCH = ("bfloat16", "device", "dtype", "float16", "float32", "float64", "int32", "int64", "uint8", "Tensor")


@functools.lru_cache(maxsize=8)
def acts_at_import(package: str) -> str:
    """Return the first statement by which importing ``package`` changes anything but names of its own, or "".

    Of all its modules: which of them a process imports is not followed.
    """
    for name in _modules(package):
        module = _load_or_none(name)
        if module is None:
            return f"{name} imports all names of a module"
        here = name.removeprefix(f"{package}.")
        imported = {each for each, found in module.bindings.items() if any(isinstance(s, _Import) for s in found)}
        for statement in module.body:
            if (here, ast.unparse(statement)) in _KNOWN or _is_of_a_program(statement):
                continue
            if here.partition(".")[0] == _HARNESS:
                acts = not isinstance(statement, (*_Definition, *_Import)) and _changes_or_calls(statement, imported)
            else:
                acts = _acts(module, statement)
            if acts:
                return f"{name} line {statement.lineno}: {ast.unparse(statement).splitlines()[0]}"
    return ""


@functools.lru_cache(maxsize=64)
def asks_the_machine(roots: tuple[str, ...], asking: frozenset[str], stops: frozenset[str] = frozenset()) -> str:
    """Return what functions, with all that they use, ask of the machine that they run on, or "".

    Environment variables and the version of Triton do not count: records have both.

    Args:
        roots: ``module:name``.
        asking: modules of the package that ask it.
        stops: modules that are not followed: what is in them does not run on the host.

    Raises:
        UntraceableError: a name cannot be followed.
    """
    for key, source in trace(roots, stops).items():
        if key.partition(":")[0] in asking:
            return key
        if found := next(_asked(source), ""):
            return f"{key}: {found}"
    return ""


@functools.lru_cache(maxsize=256)
def looks_up(roots: tuple[str, ...], stops: frozenset[str] = frozenset()) -> str:
    """Return where functions, with all that they use, get at code in another way than by its name, or "".

    Raises:
        UntraceableError: a name cannot be followed.
    """
    for key, source in trace(roots, stops).items():
        bindings = _load(key.partition(":")[0]).bindings
        if found := next(_looked_up(source, bindings), ""):
            return f"{key}: {found}"
    return ""


def _looked_up(source: Any, bindings: Container[str]) -> Iterator[str]:
    if isinstance(source, dict):
        for value in source.values():
            yield from _looked_up(value, bindings)
    elif isinstance(source, list):
        kind, fields = source if len(source) == 2 and isinstance(source[1], dict) else ("", {})
        if kind == "Name" and _text(fields["id"]) in _LOOKUPS:
            yield _text(fields["id"])
        elif kind == "Attribute" and _text(fields["attr"]) == "modules":
            yield "sys.modules"
        elif kind == "Call":
            yield from _looked_up_by_call(_named(fields["func"]), fields.get("args", []), bindings)
        for item in source:
            yield from _looked_up(item, bindings)


def _looked_up_by_call(called: str, arguments: list[Any], bindings: Container[str]) -> Iterator[str]:
    """Yield a lookup by a text that is not in the source.

    What a rival's object holds is in its fingerprint, and what a local name stands for follows from the rest.
    """
    if called == "getattr" and arguments[1:2] and arguments[1][0] != "Constant":
        node = arguments[0]
        while node[0] == "Attribute":
            node = node[1]["value"]
        if node[0] == "Name" and _text(node[1]["id"]) in bindings:
            yield called
    if called == "import_module" and arguments:
        what, fields = arguments[0]
        own = what == "Constant" and _text(fields["value"]).partition(".")[0] in (_PACKAGE, "")
        if own or not (what == "Constant" or (what == "Attribute" and _named(fields["value"]) == "self")):
            yield called


def _named(node: Any) -> str:
    """Return the last name of a normalised expression."""
    kind, fields = node
    return _text(fields["attr"]) if kind == "Attribute" else _text(fields["id"]) if kind == "Name" else ""


def _modules(package: str) -> Iterator[str]:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if _NOT_IMPORTED.isdisjoint(parts):
            yield ".".join([package, *(part for part in parts if part != "__init__")])


def _is_of_a_program(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'"


def _load_or_none(name: str) -> _Module | None:
    try:
        return _load(name)
    except UntraceableError:
        return None


def _executed(statement: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when a statement does: of a function its decorators and defaults, not its body."""
    yield statement
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        inside: list[Any] = [*statement.decorator_list, statement.args]
    elif isinstance(statement, ast.Lambda):
        inside = [statement.args]
    else:
        inside = list(ast.iter_child_nodes(statement))
    for node in inside:
        if not isinstance(node, ast.arg):
            yield from _executed(node)


def _acts(module: _Module, statement: ast.AST, seen: frozenset[str] = frozenset()) -> bool:
    """Return whether running a statement at the top of a module changes what does not belong to the module."""
    return any(_node_acts(module, node, seen) for node in _executed(statement))


def _node_acts(module: _Module, node: ast.AST, seen: frozenset[str]) -> bool:
    if isinstance(node, ast.Expr):
        registers = isinstance(node.value, ast.Call) and _last(node.value.func) in _REGISTRATIONS
        return not registers and not isinstance(node.value, ast.Constant)
    if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del)):
        base = _base(node)
        if base is None or _imported_from(module, base) is not None:
            return True
        # An item of a table is its own; of any other name of the module an attribute may be another module's.
        return isinstance(node, ast.Attribute) and not _is_defined(module, base)
    if isinstance(node, _Import):
        return any(_is_of_others(module, where) for where in _imports(node))
    if isinstance(node, ast.Name):
        return node.id in _ACTING_BUILTINS and node.id not in module.bindings
    called = [node.func] if isinstance(node, ast.Call) else []
    called += [each for each in getattr(node, "decorator_list", ()) if not isinstance(each, ast.Call)]
    return any(_call_acts(module, each, seen) for each in called)


def _is_defined(module: _Module, name: str) -> bool:
    return any(isinstance(statement, _Definition) for statement in module.bindings.get(name, ()))


def _imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [] if node.level else [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def _is_of_others(module: _Module, where: str) -> bool:
    top = where.partition(".")[0]
    return top != module.name.partition(".")[0] and top not in _OUTSIDE and top != "__future__"


def _call_acts(module: _Module, called: ast.expr, seen: frozenset[str]) -> bool:
    base, text = _base(called), ast.unparse(called)
    if base is None or text in _QUIET_CALLS or _last(called) in _REGISTRATIONS:
        return False
    source = _imported_from(module, base)
    if source is None:
        return _function_acts(module, base, seen) if text == base else False
    where, name = source
    if where.partition(".")[0] != module.name.partition(".")[0]:
        return where.partition(".")[0] not in _QUIET
    loaded = _load_or_none(where)
    name = name if text == base else text.removeprefix(f"{base}.")
    return loaded is None or _function_acts(loaded, name, seen)


def _function_acts(module: _Module, name: str, seen: frozenset[str]) -> bool:
    """Return whether a function of a module, called while it is imported, changes anything that outlives the call."""
    key = f"{module.name}:{name}"
    if key in seen:
        return False
    bodies = [each for each in module.bindings.get(name, ()) if isinstance(each, (ast.FunctionDef,))]
    for node in (node for body in bodies for statement in body.body for node in ast.walk(statement)):
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            return True
        changes = isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del))
        if changes and (_base(node) is None or _base(node) in module.bindings):
            return True
        if not isinstance(node, (ast.Expr, ast.Attribute, ast.Subscript)) and _node_acts(module, node, seen | {key}):
            return True
    return False


def _base(node: ast.AST | None) -> str | None:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _last(node: ast.AST | None) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _imported_from(module: _Module, name: str) -> tuple[str, str] | None:
    """Return the module that a name was imported from, and its name there; None: it was not imported."""
    for statement in module.bindings.get(name, ()):
        if isinstance(statement, ast.ImportFrom):
            base = importlib.util.resolve_name(f"{'.' * statement.level}{statement.module or ''}", module.package)
            alias = next(alias for alias in statement.names if (alias.asname or alias.name) == name)
            inner = f"{base}.{alias.name}"
            return (inner, "") if _load_is_possible(inner) else (base, alias.name)
        if isinstance(statement, ast.Import):
            return next(a.name for a in statement.names if (a.asname or a.name.partition(".")[0]) == name), ""
    return None


def _load_is_possible(name: str) -> bool:
    if name.partition(".")[0] != _PACKAGE:
        return False
    try:
        read_source(name)
    except UntraceableError:
        return False
    return True


def _asked(source: Any) -> Iterator[str]:
    """Yield what a normalised source asks of the machine."""
    if isinstance(source, str):
        what, _, where = source.partition(" of ")
        if where and "'" not in source:  # an import, as ``trace`` puts it
            yield from _asked_by_import(what, where)
    elif isinstance(source, dict):
        for value in source.values():
            yield from _asked(value)
    elif isinstance(source, list):
        if len(source) == 2 and isinstance(source[1], dict):
            yield from _asked_by_node(*source)
        for item in source:
            yield from _asked(item)


def _asked_by_node(kind: str, fields: dict[str, Any]) -> Iterator[str]:
    if kind == "Attribute":
        yield from _asked_by_attribute(fields)
    elif kind == "Name" and fields["id"] == "str 'open'":
        yield "open"
    elif kind == "Import":
        for _, alias in fields["names"]:
            yield from _asked_by_import("all", _text(alias["name"]))
    elif kind == "ImportFrom" and "module" in fields and fields.get("level", "int 0") == "int 0":
        for _, alias in fields["names"]:
            yield from _asked_by_import(_text(alias["name"]), _text(fields["module"]))


def _text(value: str) -> str:
    """Return a text that was ``normalised``."""
    return value.removeprefix("str ").strip("'")


def _asked_by_import(what: str, where: str) -> Iterator[str]:
    top = where.partition(".")[0]
    allowed = {"os": _OF_OS, "importlib": _OF_IMPORTLIB, "torch": _OF_TORCH}.get(top)
    if top == _PACKAGE or top in _ASKING_NOTHING or (allowed is not None and where in (top, "importlib.metadata")
                                         and what in ("all", *allowed)):  # fmt: skip
        return
    yield f"{what} of {where}"


def _asked_by_attribute(node: Any) -> Iterator[str]:
    base = node["value"]
    name = _text(base[1]["id"]) if base[0] == "Name" else ""
    attribute = _text(node["attr"])
    allowed = {"os": _OF_OS, "importlib": _OF_IMPORTLIB, "torch": _OF_TORCH}.get(name)
    if allowed is not None and attribute not in allowed:
        yield f"{name}.{attribute}"
