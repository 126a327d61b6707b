"""Plant one-token faults in the package and count how many the tests find.

    python tools/mutate.py --seed 0 --count 100 [--group judge] [--suite-dir tests] [--timeout 240] [--jobs 2]

Each mutation changes one token or drops one statement in a copy of this tree. The tests that import the mutated module
run on the copy, nearest first, until one fails. A mutation is *killed* when a test fails that passes without it,
*survived* when all pass, and *timeout* when the tests need more than ``--timeout`` seconds. Results go to the terminal
and, with their diffs, to ``--output``.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import dataclasses
import difflib
import fnmatch
import hashlib
import importlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "flashmoe_science"
# A group: patterns of its files below src/flashmoe_science, and its weight. The first group that matches takes a file.
GROUPS: dict[str, tuple[float, tuple[str, ...]]] = {
    "none": (0.0, ("operators/*",)),
    "gluon": (0.3, ("attention/*_gluon*.py", "moe/*_gluon*.py", "*primitives_sm90.py")),
    "kernels": (1.0, (
        "attention/*_triton.py", "moe/*_triton.py", "*/primitives.py", "attention/*_primitives.py", "*/philox.py",
    )),
    "plans": (1.0, ("attention/*plan*.py", "moe/*plan*.py", "*/tiles.py")),
    "judge": (1.0, tuple(f"proof/*{name}.py" for name in (
        "judge", "statistics", "simultaneous", "familywise", "check", "correctness", "rounds"))),
    "verify": (0.7, ("proof/*claims.py", "proof/*verify.py")),
    "routing": (0.7, ("moe/*routing.py", "moe/routing/*.py", "moe/*problem.py")),
    "inputs": (1.0, (
        "attention/*inputs.py", "attention/*refusals.py", "attention/*checks.py", "attention/*api.py",
        "attention/*contract.py", "attention/varlen.py", "moe/*inputs.py", "moe/*refusals.py", "moe/*checks.py",
        "moe/api.py",
    )),
}  # fmt: skip
COMPARED: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<", ">=")),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">", "<=")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.In: ("in", ("not in",)),
}
TURNED = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
NEAREST = 4  # imports between a test and the module, beyond those of the nearest test
FIRST = 4  # test files that run before all others, as most faults are found there
# These compare the text of sources, which finds every change and no fault; and tests that need a GPU.
IGNORED = re.compile(r"fingerprint|identit|dependencies|untold|test_staleness|printed_claims|test_readme|_gpu$")


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One replacement in one file, at an offset of its text."""

    group: str
    path: str  # below src/flashmoe_science
    kind: str
    start: int
    stop: int
    text: str

    def apply(self, source: str) -> str:
        """Return the source with the fault."""
        return source[: self.start] + self.text + source[self.stop :]

    def diff(self, source: str) -> str:
        """Return the changed lines and their place."""
        lines = difflib.unified_diff(source.splitlines(), self.apply(source).splitlines(), lineterm="", n=0)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++")))

    def diff_of_lines(self, source: str) -> str:
        """Return the line before and after, without their place."""
        first, last = source.rfind("\n", 0, self.start) + 1, source.find("\n", self.stop)
        return (
            f"{source[first:last].strip()}\n{source[first : self.start]}{self.text}{source[self.stop : last]}".strip()
        )


def is_python(source: str) -> bool:
    """Return whether a text is valid; what is not would be found by any test."""
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def group_of(path: str) -> str | None:
    """Return the group of a file of the package, wherever its folder moved."""
    for name, (weight, patterns) in GROUPS.items():
        if any(fnmatch.fnmatch(path, pattern) for pattern in patterns):
            return name if weight else None
    return None


class Sites(ast.NodeVisitor):
    """Every place of one file that a mutation may change."""

    def __init__(self, group: str, path: str, source: str) -> None:
        self.group, self.path, self.source = group, path, source
        self.found: list[Mutation] = []
        # The columns of ast count bytes: a file with other characters than ASCII is mapped line by line.
        self.lines = source.splitlines(keepends=True)
        self.offsets = list(itertools.accumulate(map(len, self.lines), initial=0))
        self.tokens = [
            (self.offsets[token.start[0] - 1] + token.start[1], token.string)
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type in (tokenize.OP, tokenize.NAME)
        ]
        self.visit(ast.parse(source))

    def at(self, line: int, column: int) -> int:
        """Return the offset in the text of a position that ast gives."""
        return self.offsets[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node starts and stops."""
        assert isinstance(node, (ast.expr, ast.stmt))
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def add(self, kind: str, start: int, stop: int, *texts: str) -> None:
        """Note a place and what may replace it."""
        self.found.extend(Mutation(self.group, self.path, kind, start, stop, text) for text in texts)

    def between(self, kind: str, left: ast.AST, right: ast.AST, old: str, *texts: str) -> None:
        """Note the operator between two operands."""
        start, stop = self.span(left)[1], self.span(right)[0]
        for place, text in self.tokens:
            if start <= place < stop and text == old.split(maxsplit=1)[0]:
                self.add(kind, place, place + len(old), *texts)
                return

    def visit_Compare(self, node: ast.Compare) -> None:
        """Flip a comparison, or move its border."""
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            old, new = COMPARED.get(type(op), ("", ()))
            for text in new:
                border = text.rstrip("=") == old.rstrip("=") and text[0] in "<>"
                self.between("border" if border else "comparison", left, right, old, text)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Swap plus and minus."""
        texts = isinstance(node.left, ast.JoinedStr) or isinstance(node.right, ast.JoinedStr)
        if isinstance(node.op, (ast.Add, ast.Sub)) and not texts:
            old, new = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
            self.between("sign", node.left, node.right, old, new)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Swap and with or."""
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in itertools.pairwise(node.values):
            self.between("and-or", left, right, old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Remove a not."""
        if isinstance(node.op, ast.Not):
            start = self.span(node)[0]
            self.add("not", start, start + len("not "), "")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Turn index 0 into 1, and 1 into 0."""
        index = node.slice
        if isinstance(index, ast.Constant) and type(index.value) is int and index.value in (0, 1):
            self.add("index", *self.span(index), str(1 - index.value))
            self.visit(node.value)
        else:
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Move a number by one."""
        value = node.value
        if isinstance(value, (int, float)) and not isinstance(value, bool) and "e" not in ast.unparse(node):
            self.add("constant", *self.span(node), str(value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        """Swap min and max."""
        function = node.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        if name in TURNED:
            stop = self.span(function)[1]
            self.add("min-max", stop - len(name), stop, TURNED[name])
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Look into a function's body and defaults, not at its annotations and decorators."""
        for child in (*node.args.defaults, *(value for value in node.args.kw_defaults if value), *node.body):
            self.visit(child)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Look at the value alone."""
        if node.value:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Drop it, and leave its words alone."""
        self.add("statement", *self.span(node), "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        """Drop a call for its effect."""
        if isinstance(node.value, ast.Call):
            self.add("statement", *self.span(node), "pass")
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Drop what adds to a value."""
        self.add("statement", *self.span(node), "pass")
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave the words of messages alone."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave assertions alone: they state what cannot happen."""


def draw_mutations(package: Path, seed: int, count: int, only: str | None) -> list[Mutation]:
    """Return mutations spread over groups by weight, and within a group over its kinds.

    The order depends on the changed text alone, so files that move leave the choice as it is, and so do other edits.
    """
    sites: dict[str, list[tuple[str, Mutation]]] = {}
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        group = group_of(name)
        if group and (only is None or group == only):
            source = path.read_text(encoding="utf-8")
            for site in Sites(group, name, source).found:
                key = hashlib.sha256(f"{seed} {site.diff_of_lines(source)}".encode()).hexdigest()
                sites.setdefault(group, []).append((key, site))
    total = sum(GROUPS[group][0] for group in sites)
    names = [name for name in GROUPS if name in sites]
    shares = {name: int(count * GROUPS[name][0] / total) for name in names}
    for name in itertools.islice(itertools.cycle(reversed(names)), count - sum(shares.values())):
        shares[name] += 1
    drawn = []
    lines = set()  # a line is mutated once
    for name in names:
        kinds: dict[str, list[Mutation]] = {}
        for _, site in sorted(sites[name], key=lambda pair: (pair[0], pair[1].path, pair[1].start)):
            kinds.setdefault(site.kind, []).append(site)
        turns = itertools.cycle(sorted(kinds))
        while shares[name] and any(kinds.values()):
            rest = kinds[next(turns)]
            if rest:
                mutation = rest.pop()
                source = (package / mutation.path).read_text(encoding="utf-8")
                line = source[source.rfind("\n", 0, mutation.start) :].lstrip().partition("\n")[0]
                if line not in lines and is_python(mutation.apply(source)):
                    lines.add(line)
                    drawn.append(mutation)
                    shares[name] -= 1
    return drawn


class Imports:
    """Which modules each module and each test file imports, read from their text."""

    def __init__(self, tree: Path) -> None:
        self.files: dict[str, Path] = {}
        for folder, base in ((tree / "src" / PACKAGE, tree / "src"), (tree / "tests", tree), (tree / "tools", tree)):
            for path in sorted(folder.rglob("*.py")):
                parts = path.relative_to(base).with_suffix("").parts
                self.files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self.edges = {name: self._imported(name) for name in self.files}

    def _imported(self, name: str) -> set[str]:
        path = self.files[name]
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        found = {".".join([*package, "conftest"])}  # pytest imports it
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):  # a child process runs it: python -m
                found.add(node.value)
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) + 1 - node.level] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                found |= {self._origin(base, alias.name) for alias in node.names}
        return (found & self.files.keys()) - {name}

    def _origin(self, base: str, name: str) -> str:
        """Return the module that a name comes from, through what packages hand on."""
        if f"{base}.{name}" in self.files:
            return f"{base}.{name}"
        path = self.files.get(base)
        if path is not None and path.name == "__init__.py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.ImportFrom) or node.level != 1 or not node.module:
                    continue
                if any((alias.asname or alias.name) == name for alias in node.names):
                    return self._origin(f"{base}.{node.module}", name)
        return base

    def tests_of(self, module: str, most: int) -> list[Path]:
        """Return the test files that import a module, at most so many, the nearest first."""
        users: dict[str, set[str]] = {}
        for user, used in self.edges.items():
            for name in used:
                users.setdefault(name, set()).add(user)
        distance, queue = {module: 0}, deque([module])
        while queue:
            name = queue.popleft()
            for user in users.get(name, set()) - distance.keys():
                distance[user] = distance[name] + 1
                queue.append(user)
        tests = {
            name: self.files[name].read_text(encoding="utf-8")
            for name in distance
            if re.search(r"\.test_[^.]*$", name) and not IGNORED.search(name)
        }
        if not tests:
            return []
        nearest = min(distance[name] for name in tests)
        words = set(re.findall(r"[a-z0-9]+", module))
        is_kernel = "@triton.jit" in self.files[module].read_text(encoding="utf-8")

        def order(name: str) -> tuple[bool, int, bool, int, str]:
            """Sort what interprets a kernel first; near before far, quick before slow, names alike before others."""
            interprets, far = "interpreted(" in tests[name], distance[name]
            is_slow = interprets or "compile_kernel" in tests[name] or "subprocess" in tests[name]
            alike = len(words & set(re.findall(r"[a-z0-9]+", name)))
            return is_kernel and not interprets, far, is_slow, -alike, name

        near = [
            name
            for name in sorted(tests, key=order)
            if distance[name] < nearest + NEAREST or (is_kernel and "interpreted(" in tests[name])
        ]
        return [self.files[name] for name in near[:most]]


def serve() -> None:
    """Run pytest in forked children, one for each line of stdin: they need not import torch and Triton again."""
    for name in ("numpy", "pydantic", "scipy.stats", "torch", "triton", "typer"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if not child:
            os.setsid()
            os.chdir(asked["folder"])
            sys.path[:] = [path for path in sys.path if path and Path(path) not in (ROOT / "src", ROOT / "tools")]
            sys.path.insert(0, str(Path(asked["folder"]) / "src"))
            os.environ.update(asked["environment"])
            out = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(out, stream)
            import pytest

            code = int(pytest.main(asked["arguments"]))
            sys.stdout.flush()
            os._exit(code)
        status, end = None, time.monotonic() + asked["seconds"]
        while status is None and time.monotonic() < end:
            time.sleep(0.1)
            done, code = os.waitpid(child, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if done else None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if status is None:
            os.waitpid(child, 0)
        print(json.dumps(status), flush=True)


class Copy:
    """A copy of the tree in which one mutation at a time is planted."""

    def __init__(self, folder: Path, suite: Path) -> None:
        self.tree = folder
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file() and not name.startswith("tests/"):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        shutil.copytree(suite, folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        if (suite.parent / "pyproject.toml").is_file():  # its markers belong to its tests
            shutil.copy2(suite.parent / "pyproject.toml", folder / "pyproject.toml")
        self.server = subprocess.Popen(
            [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.turn = itertools.count(1)
        self.known: set[str] = set()  # tests that fail on the copy without a mutation, too

    @contextlib.contextmanager
    def planted(self, mutation: Mutation) -> Iterator[None]:
        """Change the file, and change it back. Python caches bytecode by seconds, so that each version has its own."""
        path = self.tree / "src" / PACKAGE / mutation.path
        source = path.read_text(encoding="utf-8")
        then = path.stat().st_mtime
        path.write_text(mutation.apply(source), encoding="utf-8")
        os.utime(path, (then, then + 10 * next(self.turn)))
        try:
            yield
        finally:
            path.write_text(source, encoding="utf-8")
            os.utime(path, (then, then + 10 * next(self.turn)))

    def run(self, tests: list[str], seconds: float) -> tuple[str, str]:
        """Return what pytest's end means, and the test that failed."""
        arguments = [
            "-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider",
            "-m", "not gpu and not exhaustive", "--timeout", str(seconds / 2), "--hypothesis-profile", "ci",
            *(f"--deselect={name}" for name in sorted(self.known)), *tests,
        ]  # fmt: skip
        output = self.tree / ".mutate-output"
        asked = {
            "folder": str(self.tree), "arguments": arguments, "seconds": seconds, "output": str(output),
            "environment": {"PYTHONPATH": str(self.tree / "src")},
        }  # fmt: skip
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        print(json.dumps(asked), file=self.server.stdin, flush=True)
        code = json.loads(self.server.stdout.readline())
        if code is None:
            return "timeout", ""
        if code in (0, 5):  # 5: no test is left
            return "survived", ""
        text = output.read_text(encoding="utf-8", errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+\.py(?:::.*?)?)(?: - .*)?$", text, re.MULTILINE)
        if failed is None:
            raise RuntimeError(f"pytest ended with {code} and names no test:\n{text[-2000:]}")
        return "killed", failed[1]


def try_mutation(copy: Copy, imports: Imports, mutation: Mutation, seconds: float, most: int) -> dict[str, object]:
    """Return what the tests say about a mutation."""
    source = (copy.tree / "src" / PACKAGE / mutation.path).read_text(encoding="utf-8")
    parts = Path(mutation.path).with_suffix("").parts
    module = ".".join([PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)])
    tests = [path.relative_to(copy.tree).as_posix() for path in imports.tests_of(module, most)]
    started = time.monotonic()
    while True:
        rest = seconds - (time.monotonic() - started)
        with copy.planted(mutation):
            outcome, test = copy.run(tests[:FIRST], rest) if rest > 0 else ("timeout", "")
            if outcome == "survived" and tests[FIRST:]:
                rest = seconds - (time.monotonic() - started)
                outcome, test = copy.run(tests[FIRST:], rest) if rest > 0 else ("timeout", "")
        # A failure counts where the same test passes without the mutation.
        if outcome != "killed" or copy.run([test], seconds)[0] == "survived":
            break
        copy.known.add(test)
    took = round(time.monotonic() - started, 1)
    shown = mutation.diff(source)
    print(f"{outcome:9}{mutation.group:9}{mutation.path} ({mutation.kind}, {took} s) {test}\n{shown}", flush=True)
    return {
        **dataclasses.asdict(mutation), "outcome": outcome, "test": test, "seconds": took, "diff": shown,
        "files": tests,
    }  # fmt: skip


def main() -> int:
    """Run, print a table by group, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="mutations in all")
    parser.add_argument("--group", choices=[name for name in GROUPS if GROUPS[name][0]], help="of one group alone")
    parser.add_argument(
        "--suite-dir", type=Path, default=ROOT / "tests", help="tests to run; those of another checkout"
    )
    parser.add_argument("--timeout", type=float, default=240, help="seconds that the tests of one mutation may take")
    parser.add_argument("--files", type=int, default=12, help="test files to run for one mutation, the nearest first")
    parser.add_argument("--jobs", type=int, default=1, help="mutations at a time")
    parser.add_argument("--only", default="", help="numbers of mutations to try, separated by commas: 3,17")
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    parser.add_argument("--output", type=Path, default=Path("mutations.json"))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return 0
    package = ROOT / "src" / PACKAGE
    drawn = list(enumerate(draw_mutations(package, args.seed, args.count, args.group)))
    if args.only:
        wanted = {int(number) for number in args.only.split(",")}
        drawn = [(number, mutation) for number, mutation in drawn if number in wanted]
    if args.list:
        for number, mutation in drawn:
            source = (package / mutation.path).read_text(encoding="utf-8")
            print(f"{number} {mutation.group} {mutation.path} {mutation.kind}\n{mutation.diff(source)}")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        copies = [Copy(Path(folder) / f"copy{number}", args.suite_dir.resolve()) for number in range(args.jobs)]
        imports = [Imports(copy.tree) for copy in copies]
        free = list(range(args.jobs))

        def attempt(numbered: tuple[int, Mutation]) -> dict[str, object]:
            place = free.pop()
            try:
                tried = try_mutation(copies[place], imports[place], numbered[1], args.timeout, args.files)
                return {"number": numbered[0], **tried}
            finally:
                free.append(place)

        results = []
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            for result in pool.map(attempt, drawn):
                results.append(result)
                args.output.write_text(
                    json.dumps({"seed": args.seed, "mutations": results}, indent=1), encoding="utf-8"
                )
        for copy in copies:
            copy.server.kill()
            copy.server.wait()
    counts = Counter((result["group"], result["outcome"]) for result in results)
    print(f"\n{'group':10}{'killed':>9}{'survived':>9}{'timeout':>9}")
    for name in [*dict.fromkeys(result["group"] for result in results), None]:
        row = [sum(n for (group, what), n in counts.items() if what == outcome and name in (group, None))
               for outcome in ("killed", "survived", "timeout")]  # fmt: skip
        print(f"{name or 'all':10}" + "".join(f"{number:9}" for number in row))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
