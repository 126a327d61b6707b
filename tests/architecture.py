"""The rules of DESIGN.md about who may import whom, as functions on source text."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

PACKAGE = "flashmoe_science"

# Every layer may import itself and those before it. A folder that is not named here has kernels or their callers.
LAYERS = ("errors", "gpu", "kernels", "operators", "proof", "cli")
LAYER_OF_FOLDER = {"gpu": "gpu", "operators": "operators", "proof": "proof", "cli": "cli"}
LAYER_OF_FILE = {"": "kernels", "errors": "errors", "cli": "cli", "__main__": "cli", "pytest_plugin": "cli"}
MOST_MODULES = 20  # of a folder
MOST_ARGUMENTS = 24  # of a kernel; groups of them are in ``kernel_arguments``
MOST_LINES = 120  # of a jitted function
REGISTRY = "operators"  # the module that names all operators: all that proof may know of them

STOPWATCHES = {
    *("perf_counter", "perf_counter_ns", "process_time", "process_time_ns", "thread_time", "thread_time_ns"),
    *("elapsed_time", "do_bench", "do_bench_cudagraph", "timeit"),
}


@dataclass(frozen=True)
class Import:
    """One imported module: of this package as its path in the package ("proof.measure"), of others as it stands."""

    target: str
    ours: bool
    names: tuple[str, ...]
    line: int
    typing: bool = False  # under ``if TYPE_CHECKING``


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str  # "attention.api"; "" is the package itself
    tree: ast.Module
    imports: tuple[Import, ...]

    @property
    def layer(self) -> str:
        return layer_of(self.name)

    @property
    def room(self) -> str | None:
        """Return the folder of kernels that it belongs to."""
        return room_of(self.name)

    @property
    def stem(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def is_kernel_file(self) -> bool:
        return self.room is not None and is_kernel_name(self.name)


def read(files: Mapping[str, str]) -> list[Module]:
    """Parse the files of the package: path in the package ("proof/measure/measure.py") -> text."""
    names = {path: module_name(path) for path in files}
    known = set(names.values())
    modules = []
    for path, text in files.items():
        tree = ast.parse(text, filename=path)
        folder = names[path] if path.endswith("__init__.py") else names[path].rpartition(".")[0]
        modules.append(Module(names[path], tree, tuple(find_imports(tree, folder, known))))
    return modules


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("__init__").strip("/").replace("/", ".")


def layer_of(name: str) -> str:
    first, _, rest = name.partition(".")
    if first in LAYER_OF_FOLDER:
        return LAYER_OF_FOLDER[first]
    return "kernels" if rest else LAYER_OF_FILE.get(first, "kernels")


def room_of(name: str) -> str | None:
    return name.partition(".")[0] if name and layer_of(name) == "kernels" else None


def is_kernel_name(name: str) -> bool:
    stem = name.rpartition(".")[2]
    return stem.endswith("_triton") or "gluon" in stem


def find_imports(tree: ast.AST, folder: str, known: set[str]) -> Iterator[Import]:
    """Yield every import, at the top or inside a function, for typing or not."""
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    for_types = {id(inner) for block in blocks for inner in ast.walk(block)}
    for node in ast.walk(tree):
        found: list[Import] = []
        if isinstance(node, ast.Import):
            found = [make_import(alias.name, (), node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = list(resolve(node, folder, known))
        yield from (replace(each, typing=id(node) in for_types) for each in found)


def resolve(node: ast.ImportFrom, folder: str, known: set[str]) -> Iterator[Import]:
    """``from .attention import plan`` imports the module ``attention.plan`` where there is one, else ``attention``."""
    source = node.module or ""
    if node.level:
        parts = folder.split(".") if folder else []
        parts = parts[: len(parts) - (node.level - 1)]
        source = ".".join([PACKAGE, *parts, *([source] if source else [])])
    rest = []
    for alias in node.names:
        whole = f"{source}.{alias.name}"
        if whole.removeprefix(f"{PACKAGE}.") in known:
            yield make_import(whole, (), node.lineno)
        else:
            rest.append(alias.name)
    if rest:
        yield make_import(source, tuple(rest), node.lineno)


def make_import(target: str, names: tuple[str, ...], line: int) -> Import:
    if target == PACKAGE or target.startswith(f"{PACKAGE}."):
        return Import(target.removeprefix(PACKAGE).lstrip("."), ours=True, names=names, line=line)
    return Import(target, ours=False, names=names, line=line)


def problems(modules: Iterable[Module]) -> list[str]:
    """Return every broken rule, as ``module:line: what``."""
    modules = list(modules)
    found = [*crowded(modules), *circles(modules)]
    for module in modules:
        for rule in RULES:
            found += [f"{module.name or PACKAGE}:{text}" for text in rule(module)]
    return found


def crowded(modules: Iterable[Module]) -> Iterator[str]:
    """No folder has more than 20 modules: a reader takes them in at a glance."""
    counts = Counter(module.name.rpartition(".")[0] for module in modules if module.name)
    for folder, count in counts.items():
        if count > MOST_MODULES:
            yield f"{folder or PACKAGE}: has {count} modules, expected at most {MOST_MODULES}"


def circles(modules: Sequence[Module]) -> Iterator[str]:
    """No module reaches itself through imports, at the top or in functions; those for types alone do not count."""
    direct = {
        module.name: {each.target for each in module.imports if each.ours and not each.typing} for module in modules
    }
    reached = {name: reachable(direct, name) for name in direct}
    for name, all_of_them in reached.items():
        if name in all_of_them:
            way = sorted(each for each in all_of_them if name in reached.get(each, ()))
            yield f"{name}: imports itself, by way of {', '.join(way)}"


def reachable(direct: Mapping[str, set[str]], name: str) -> set[str]:
    """Return all modules that a module imports, directly or not."""
    seen: set[str] = set()
    todo = list(direct.get(name, ()))
    while todo:
        at = todo.pop()
        if at not in seen:
            seen.add(at)
            todo += direct.get(at, ())
    return seen


def check_layers(module: Module) -> Iterator[str]:
    """``cli -> proof -> operators -> {attention, moe, integrations} -> gpu -> errors``."""
    for item in module.imports:
        if not item.ours:
            continue
        if item.target == "":
            if item.names != ("__version__",):
                yield f"{item.line}: imports the package itself, expected the module that defines the name"
        elif LAYERS.index(layer_of(item.target)) > LAYERS.index(module.layer):
            yield f"{item.line}: {module.layer} imports {item.target}, which is above it"


def check_room(module: Module) -> Iterator[str]:
    """Inside a room ``api -> {reference, plan, kernels} -> primitives``."""
    if module.room is None:
        return
    for item in module.imports:
        if not item.ours or room_of(item.target) != module.room or item.target == module.room:
            continue
        stem = item.target.rpartition(".")[2]
        if stem == "api" and module.name.startswith(f"{item.target.rpartition('.')[0]}.") and module.stem != "__init__":
            yield f"{item.line}: imports api, which is above it"
        if module.is_kernel_file and is_kernel_name(item.target):
            yield f"{item.line}: a kernel file imports another one, {stem}"
        if module.is_kernel_file and stem == "reference":
            yield f"{item.line}: a kernel file imports the reference"
        if module.stem == "reference" and (stem in ("plan", "primitives") or is_kernel_name(item.target)):
            yield f"{item.line}: the reference imports {stem}, which it is there to judge"
        if module.stem == "primitives" and stem != "primitives":
            yield f"{item.line}: primitives imports {stem}, which is above it"


def is_known_to_operators_alone(name: str) -> bool:
    return room_of(name) is not None or layer_of(name) == "operators"


def check_names_no_operator(module: Module) -> Iterator[str]:
    """The harness reaches an operator through load_operator only."""
    if module.layer != "proof":
        return
    for item in module.imports:
        if item.ours and item.target != REGISTRY and is_known_to_operators_alone(item.target):
            yield f"{item.line}: proof imports {item.target}, expected load_operator"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(f"{PACKAGE}."):
            name = node.value.partition(":")[0].removeprefix(f"{PACKAGE}.")
            if is_known_to_operators_alone(name):
                yield f"{node.lineno}: proof names {node.value}, expected load_operator"


def check_plan(module: Module) -> Iterator[str]:
    """A plan can be made on a machine without Triton, and describing a problem needs none."""
    if module.room is None or module.stem not in ("plan", "problem", "reference"):
        return
    for item in module.imports:
        if not item.ours and item.target.partition(".")[0] == "triton":
            yield f"{item.line}: {module.stem} imports {item.target}"


def check_stopwatches(module: Module) -> Iterator[str]:
    """Only ``proof/measure/measure.py`` times anything. All may use ``time.monotonic`` for the seconds of a gate."""
    if module.name == "proof.measure.measure":
        return
    for node in ast.walk(module.tree):
        if not isinstance(node, (ast.Attribute, ast.ImportFrom)):
            continue
        name = ""
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if node.attr in STOPWATCHES or f"{owner}.{node.attr}" in ("time.time", "time.time_ns"):
                name = node.attr
            elif node.attr == "Event" and owner.rpartition(".")[2] == "cuda":
                name = "cuda.Event"
        else:
            clocks = STOPWATCHES | ({"time", "time_ns"} if node.module == "time" else set())
            name = ", ".join(alias.name for alias in node.names if alias.name in clocks)
        if name:
            yield f"{node.lineno}: uses {name}; only proof/measure/measure.py times anything"


def check_docstring(module: Module) -> Iterator[str]:
    if module.tree.body and not ast.get_docstring(module.tree):
        yield "1: has no docstring"


def check_kernels(module: Module) -> Iterator[str]:
    """A reader sees a jitted function at once, and a caller all that a kernel takes."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.FunctionDef) or not any(map(is_jit, node.decorator_list)):
            continue
        arguments = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
        if node.name.endswith("_kernel") and arguments > MOST_ARGUMENTS:
            yield f"{node.lineno}: {node.name} takes {arguments} arguments, expected at most {MOST_ARGUMENTS}"
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MOST_LINES:
            yield f"{node.lineno}: {node.name} has {lines} lines, expected at most {MOST_LINES}"


def is_jit(decorator: ast.expr) -> bool:
    """Return whether it is ``triton.jit`` or ``gluon.jit``, with options or without."""
    decorator = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(decorator).rpartition(".")[2] == "jit"


RULES = (
    check_layers,
    check_room,
    check_names_no_operator,
    check_plan,
    check_stopwatches,
    check_docstring,
    check_kernels,
)
