"""What a function depends on, read from the sources: comments, docstrings and format aside, nothing is left out.

A name leads to the statements of its module that bind it, these to the names that they use, and so on through the
package. Names from outside of it stand as they are imported: of which version they are is said elsewhere. Nothing is
run, so what comes out is the same on every machine, with every version of Triton and of Python.

Statements that only ask a function of a module of refusals whether to go on are left out, and with them what it does:
a call that it lets pass runs as it would without them, and of one that it refuses nothing runs.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

WHOLE, EFFECTS = "*", ""  # in place of a name: all of a module; what it does besides binding names
_OBJECT = " of "  # between a member of a base and the class of the object that uses it

_OUTSIDE = frozenset({*sys.stdlib_module_names, "numpy", "torch", "triton", "typing_extensions"})
_BUILTINS = frozenset(dir(builtins)) | {"__name__", "__file__", "__package__"}
_LEFT_OUT = frozenset({"ctx", "kind", "type_comment", "type_ignores"})  # of a node: they follow from the rest
_REFUSALS = "refusals"  # how a module is called, or ends, whose functions raise, or return None and change nothing
_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_Import = (ast.Import, ast.ImportFrom)


class UntraceableError(Exception):
    """Something is used whose source cannot be followed, so a change of it would not be seen."""


def normalised(node: Any) -> Any:
    """Return a syntax tree as plain values, without docstrings and places; equal for every version of Python."""
    if isinstance(node, list):
        return [normalised(item) for item in node]
    if not isinstance(node, ast.AST):
        return f"{type(node).__name__} {node!r}"
    fields = {
        name: _without_docstring(node) if name == "body" and isinstance(node, (ast.Module, *_Definition)) else value
        for name, value in ast.iter_fields(node)
        if name not in _LEFT_OUT and (value is not None or isinstance(node, ast.Constant)) and value != []
    }
    return [type(node).__name__, {name: normalised(value) for name, value in fields.items()}]


def _without_docstring(node: Any) -> list[ast.stmt]:
    body: list[ast.stmt] = node.body
    return body[1:] if body and _is_text(body[0]) else body


def _is_text(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


@functools.lru_cache(maxsize=4096)
def trace(roots: tuple[str, ...], stops: frozenset[str] = frozenset()) -> Mapping[str, Any]:
    """Return all that ``roots`` depend on: ``module:name`` -> its normalised source.

    Args:
        roots: ``module:name``, or ``module:Class.method``, of the class or of its base.
        stops: modules that are not followed: what is taken from them counts otherwise, or not at all.

    Raises:
        UntraceableError: a name cannot be followed.
    """
    found: dict[str, Any] = {}
    todo = [tuple(root.split(":")) for root in roots]
    while todo:
        where, name = todo.pop()
        key = f"{where}:{name}"
        if key in found or where in stops:
            continue
        module = _load(where)
        found[key], uses = _explain(module, name, stops)
        todo += [(where, EFFECTS), *uses]
    return MappingProxyType(dict(sorted(found.items())))


@dataclass(frozen=True)
class _Module:
    name: str
    package: str  # from which its relative imports start
    body: list[ast.stmt]
    bindings: Mapping[str, list[ast.stmt]]
    effects: list[ast.stmt]


def read_source(name: str) -> tuple[str, str]:
    """Return the source of a module, and the package that its relative imports start from."""
    spec = _find(name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise UntraceableError(f"{name} has no source")
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    return Path(spec.origin).read_text(encoding="utf-8"), package


def _find(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):  # its parent is no package; it was made by hand
        return None


@functools.lru_cache(maxsize=1024)
def _load(name: str) -> _Module:
    text, package = read_source(name)
    tree = ast.parse(text)
    _WithoutRefusals(tree).visit(tree)
    body = _without_docstring(tree)
    bindings: dict[str, list[ast.stmt]] = {}
    for statement in body:
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            continue
        bound = set(_bound(statement))
        if "*" in bound:
            raise UntraceableError(f"{name} imports all names of a module")
        for each in bound:
            bindings.setdefault(each, []).append(statement)
    imported = {each for each, statements in bindings.items() if any(isinstance(s, _Import) for s in statements)}
    plain = [statement for statement in body if not isinstance(statement, (*_Definition, *_Import))]
    effects = [statement for statement in plain if _acts(statement, imported)]
    return _Module(name, package, body, bindings, effects)


class _WithoutRefusals(ast.NodeTransformer):
    """Takes those statements out of functions that do nothing but call a refusal by its name.

    Not where an error leads elsewhere than out of the function, and not where the name may stand for something else.
    """

    def __init__(self, module: ast.Module) -> None:
        imports = [node for node in module.body if isinstance(node, ast.ImportFrom) and node.level]
        theirs = [node for node in imports if f"_{(node.module or '').rpartition('.')[2]}".endswith(f"_{_REFUSALS}")]
        bound = [name for statement in module.body for name in _bound(statement)]
        elsewhere = {name for node in ast.walk(module) if isinstance(node, ast.Global) for name in node.names}
        names = {alias.asname or alias.name for node in theirs for alias in node.names}
        self.names = frozenset(name for name in names - elsewhere if bound.count(name) == 1)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outside, self.names = self.names, self.names - _bound_within(node)
        self.generic_visit(node)
        self.names = outside
        node.body = node.body or [ast.Pass()]
        return node

    def _leave(self, node: ast.AST) -> ast.AST:
        return node

    visit_Try = visit_TryStar = visit_With = visit_AsyncWith = visit_AsyncFunctionDef = _leave  # noqa: N815 - as above

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        """Keep what hands a refusal more than names, texts and attributes: to make the rest may change something."""
        call = node.value
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in self.names):
            return node
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        plain = (ast.Name, ast.Constant, ast.Attribute, ast.Dict, ast.Tuple, ast.expr_context)
        return None if all(isinstance(part, plain) for each in given for part in ast.walk(each)) else node


def _bound_within(function: ast.AST) -> set[str]:
    """Return every name that a function, or one within it, binds in any way."""
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, _Import):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif node is not function:  # functions, classes, handlers and patterns have a name, and one of these a rest
            found |= {name for field in ("name", "rest") if isinstance(name := getattr(node, field, None), str)}
    return found


def _outer(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement that belong to its own scope: not those inside functions and classes."""
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, (*_Definition, ast.Lambda)):
            todo += ast.iter_child_nodes(node)


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement at the top of a module binds, or whose values it changes."""
    for node in _outer(statement):
        if isinstance(node, _Definition):
            yield node.name
        elif isinstance(node, _Import):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node.id
        elif base := _changed(node):
            yield base


def _changed(node: ast.AST) -> str:
    """Return the name whose attribute or item a node assigns, or an empty text."""
    if not (isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del))):
        return ""
    base: ast.expr = node
    while isinstance(base, (ast.Attribute, ast.Subscript)):
        base = base.value
    return base.id if isinstance(base, ast.Name) else ""


def _acts(statement: ast.stmt, imported: Iterable[str]) -> bool:
    """Return whether a statement calls something for its effect, or changes what was imported."""
    return any((isinstance(node, ast.Expr) and not _is_text(node)) or _changed(node) in imported
               for node in _outer(statement))  # fmt: skip


def _explain(module: _Module, name: str, stops: frozenset[str]) -> tuple[Any, list[tuple[str, str]]]:
    """Return what a name of a module stands for, and what that uses: pairs of module and name."""
    texts: list[Any] = []
    uses: list[tuple[str, str]] = []
    of = ""
    if name in (WHOLE, EFFECTS):
        statements: list[Any] = module.body if name == WHOLE else module.effects
    else:
        name, _, of = name.partition(_OBJECT)
        first, _, member = name.partition(".")
        statements = list(module.bindings.get(first, ()))
        if not statements:
            raise UntraceableError(f"{module.name} has no {first}")
        of = of or f"{module.name}:{first}"
        if member:
            statements, inherited = _member(module, first, member, statements)
            if inherited:
                texts.append(f"{member} of {':'.join(inherited)}")
                uses.append(_of_object(*inherited, member, of))
    for statement in statements:
        if isinstance(statement, _Import):
            for alias in statement.names:
                if name == WHOLE or (alias.asname or alias.name.partition(".")[0]) == name:
                    text, target = _resolve(module, statement, alias, stops)
                    texts.append(text)
                    uses += [target] if target else []
        else:
            texts.append(normalised(statement))
            uses += _uses(module, statement, stops)
            if "." in name:
                uses += _uses_of_its_object(module, name, of, statement)
    return texts, uses


def _of_object(where: str, name: str, member: str, of: str) -> tuple[str, str]:
    """Return how ``trace`` names a member of a class that an object of the class ``of``, ``module:Class``, uses."""
    return where, f"{name}.{member}" if of == f"{where}:{name}" else f"{name}.{member}{_OBJECT}{of}"


def _member(module: _Module, name: str, member: str, statements: list[Any]) -> tuple[list[Any], tuple[str, str] | None]:
    """Return the statements that bind a member of a class, within it and behind it, and the base that it comes from.

    Raises:
        UntraceableError: there is none, or the class is another than its body says.
    """
    classes = [statement for statement in statements if isinstance(statement, ast.ClassDef)]
    if any(statement.decorator_list or statement.keywords for statement in classes):
        raise UntraceableError(f"{module.name} has another {name} than its body says: it is decorated or made anew")
    behind = [statement for statement in statements if statement not in classes]
    found = [each for statement in classes for each in statement.body if member in _bound(each)]
    says_a_type_alone = all(isinstance(each, ast.AnnAssign) and each.value is None for each in found)
    base = _base_of(module, name) if says_a_type_alone else None
    if not found and base is None:
        raise UntraceableError(f"{module.name} has no {name}.{member}")
    return [*found, *behind], base


def _base_of(module: _Module, name: str) -> tuple[str, str] | None:
    """Return module and name of the one class that a class inherits from; None: it has none, several, or another's."""
    classes = [statement for statement in module.bindings.get(name, ()) if isinstance(statement, ast.ClassDef)]
    if len(classes) != 1 or len(classes[0].bases) != 1 or not isinstance(classes[0].bases[0], ast.Name):
        return None
    where, base = module.name, classes[0].bases[0].id
    while True:  # to the module that defines it
        bindings = _load(where).bindings.get(base, [])
        if any(isinstance(statement, ast.ClassDef) for statement in bindings):
            return where, base
        if len(bindings) != 1 or not isinstance(bindings[0], ast.ImportFrom):
            return None
        alias = next(each for each in bindings[0].names if (each.asname or each.name) == base)
        _, target = _resolve(_load(where), bindings[0], alias, frozenset())
        if target is None or target[1] == WHOLE:
            return None
        where, base = target


def _uses_of_its_object(module: _Module, name: str, of: str, statement: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the members of its object, of the class ``of``, that a method of a class or of its base uses.

    Raises:
        UntraceableError: it uses its object in another way.
    """
    arguments = statement.args if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) else None
    if arguments is None or any(ast.unparse(each) == "staticmethod" for each in statement.decorator_list):  # type: ignore[attr-defined]
        return
    own = next((argument.arg for argument in [*arguments.posonlyargs, *arguments.args]), "")
    nodes = list(ast.walk(statement))
    members = [node for node in nodes if isinstance(node, ast.Attribute) and _is_named(node.value, own)]
    of_base = [node for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()"]
    base = _base_of(module, name.partition(".")[0])
    known = {id(node.value) for node in members}
    if base is not None:
        known |= {id(node.value.func) for node in of_base}  # type: ignore[attr-defined] # super() is a call
    for node in nodes:
        if (_is_named(node, "super") or _is_named(node, own)) and id(node) not in known:
            raise UntraceableError(f"{module.name} hands on the object of {name}, or asks its base")
    where, _, whole = of.partition(":")
    yield from (_of_object(where, whole, node.attr, of) for node in members)
    if base is not None:
        yield from (_of_object(*base, node.attr, of) for node in of_base)


def _is_named(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _resolve(
    module: _Module, statement: ast.stmt, alias: ast.alias, stops: frozenset[str]
) -> tuple[str, tuple[str, str] | None]:
    """Return what an import binds, in words, and where that is in the package; None: it is from outside."""
    if isinstance(statement, ast.Import):
        where, name = alias.name, ""
    else:
        assert isinstance(statement, ast.ImportFrom)
        base = f"{'.' * statement.level}{statement.module or ''}"
        where, name = importlib.util.resolve_name(base, module.package), alias.name
    text = f"{name or 'all'} of {where}"
    top = where.partition(".")[0]
    if top != module.name.partition(".")[0]:
        if top not in _OUTSIDE and top != "__future__":
            raise UntraceableError(f"{module.name} imports {where}")
        return text, None
    if not name:
        if alias.asname is None:
            raise UntraceableError(f"{module.name} imports {where} by its whole name")
        return text, (where, WHOLE)
    if where in stops or name in _load(where).bindings:
        return text, (where, name)
    if _find(f"{where}.{name}") is None:
        raise UntraceableError(f"{where} has no {name}")
    return text, (f"{where}.{name}", WHOLE)


def _uses(module: _Module, statement: ast.AST, stops: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield what a statement uses, as pairs of module and name.

    A local name that a global one has too counts for both: rather one thing too many than one too few.
    """
    nodes = list(ast.walk(statement))
    inner = {alias.asname or alias.name.partition(".")[0] for n in nodes if isinstance(n, _Import) for alias in n.names}
    local = inner | {node.arg for node in nodes if isinstance(node, ast.arg)}
    local |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    local |= {node.name for node in nodes if isinstance(node, (*_Definition, ast.ExceptHandler)) and node.name}
    attributes = {id(n.value): n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
    for node in nodes:
        if isinstance(node, _Import):
            targets = [_resolve(module, node, alias, stops)[1] for alias in node.names]
            yield from (target for target in targets if target)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if node.id in module.bindings:
                yield from _use(module, node.id, attributes.get(id(node)), stops)
            elif node.id not in local and node.id not in _BUILTINS:
                raise UntraceableError(f"{module.name} uses {node.id}, which it does not bind")


def _use(module: _Module, name: str, attribute: str | None, stops: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield what a name stands for; of a module of the package, the attribute that is used alone."""
    for statement in module.bindings[name]:
        if attribute is not None and isinstance(statement, _Import):
            alias = next(a for a in statement.names if (a.asname or a.name.partition(".")[0]) == name)
            _, target = _resolve(module, statement, alias, stops)
            if target and target[1] == WHOLE:
                yield (target[0], attribute)
                continue
        yield (module.name, name)
