"""The layers hold, importing the package is cheap, and nothing of one machine is in the repository."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashmoe_science.moe.fingerprints import RUN_AT_EACH_CALL, RUN_AT_EACH_CALL_OF_GRADIENTS

from . import architecture
from .proof.processes import python_path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / architecture.PACKAGE

# Spelled so that this file does not find itself.
FOREIGN = {
    "a path of one machine": r"(?<![\w.~$}])/(w[o]rk|r[o]ot|(h[o]me|U[s]ers)/(?!me/|you/)\w+|t[m]p/bash_jobs[\w.]*)/",
    "the host of a package index": r"(?:p[y]pi\.org|p[y]thonhosted\.org|download\.p[y]torch\.org|p[y]pi\.nvidia\.com)",
}


def tracked_files() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("which files belong to the repository is only known in a git checkout")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def test_the_package_keeps_its_layers() -> None:
    files = {path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    assert "errors.py" in files
    assert architecture.problems(architecture.read(files)) == []


GOOD = {
    "__init__.py": '"""D."""\nfrom .attention.api import f',
    "errors.py": '"""D."""',
    "gpu/specs.py": '"""D."""\nfrom ..errors import InputError',
    "attention/__init__.py": "",
    "attention/primitives.py": '"""D."""\nimport triton',
    "attention/problem.py": '"""D."""\nfrom ..errors import InputError',
    "attention/plan.py": '"""D."""\nfrom ..gpu import specs\nfrom .problem import Problem',
    "attention/reference.py": '"""D."""\nfrom .problem import Problem',
    "attention/forward_triton.py": '"""D."""\nfrom . import primitives',
    "attention/merge_triton.py": '"""D."""\nfrom .primitives import f',
    "attention/forward_gluon_sm90.py": '"""D."""\nfrom .primitives import f',
    "attention/forward_primitives_sm90.py": '"""D."""\nfrom ..gpu import specs',
    "attention/forward_features_gluon_sm90.py": '"""D."""\nfrom .forward_primitives_sm90 import f',
    "attention/api.py": '"""D."""\nfrom . import plan, reference, forward_triton',
    "attention/rivals.py": '"""D."""\nfrom .problem import Problem',
    "attention/other_rival.py": '"""D."""\nfrom .rivals import Rival',
    "attention/rival_registry.py": '"""D."""\nfrom . import other_rival, rivals',
    "attention/operator.py": '"""D."""\nfrom .. import __version__\nfrom . import api, rival_registry, rivals',
    "proof/operator.py": '"""D."""\nfrom ..errors import SubjectError',
    "proof/measure.py": '"""D."""\nimport time\nt = time.perf_counter()\ne = torch.cuda.Event()',
    "proof/gates.py": '"""D."""\nimport time\nfrom . import measure\nt = time.monotonic()\ne = threading.Event()',
    "cli.py": '"""D."""\nfrom .proof import gates\nfrom .attention.plan import f',
}


def test_the_rules_accept_the_design() -> None:
    assert architecture.problems(architecture.read(GOOD)) == []


@pytest.mark.parametrize(
    ("path", "line", "expected"),
    [
        ("errors.py", "from .gpu import specs", "errors imports gpu.specs"),
        ("gpu/specs.py", "from ..attention.plan import f", "gpu imports attention.plan"),
        ("gpu/specs.py", "import flashmoe_science.attention.plan", "gpu imports attention.plan"),
        ("attention/api.py", "def f():\n    from ..proof import operator", "operators imports proof.operator"),
        ("attention/api.py", "if TYPE_CHECKING:\n    from ..proof.operator import Inputs", "operators imports proof"),
        ("__init__.py", "from .proof import gates", "operators imports proof.gates"),
        ("proof/gates.py", "from ..cli import main", "proof imports cli"),
        ("proof/gates.py", "from ..attention.api import f", "proof imports attention.api, expected load_operator"),
        ("proof/gates.py", "f('flashmoe_science.attention.api')", "proof names flashmoe_science.attention.api"),
        ("proof/gates.py", "from .. import attention", "proof imports attention, expected load_operator"),
        ("gpu/specs.py", "from .. import flash_attention", "imports the package itself"),
        ("attention/plan.py", "from .api import f", "imports api, which is above it"),
        ("attention/api.py", "from .operator import OPERATOR", "imports operator, which is there for the harness"),
        ("attention/api.py", "from .other_rival import Other", "imports other_rival, which is there for the harness"),
        (
            "attention/plan.py",
            "from .rival_registry import RIVALS",
            "imports rival_registry, which is there for the harness",
        ),
        ("attention/merge_triton.py", "from .forward_triton import f", "a kernel file imports another one"),
        (
            "attention/forward_gluon_sm90.py",
            "from .forward_features_gluon_sm90 import f",
            "a kernel file imports another",
        ),
        (
            "attention/forward_features_gluon_sm90.py",
            "from .forward_gluon_sm90 import f",
            "a kernel file imports another one",
        ),
        ("attention/merge_triton.py", "from . import reference", "a kernel file imports the reference"),
        ("attention/reference.py", "from .forward_triton import f", "the reference imports forward_triton"),
        ("attention/primitives.py", "from .plan import f", "primitives imports plan"),
        ("attention/plan.py", "import triton.language as tl", "plan imports triton.language"),
        ("proof/gates.py", "t = time.perf_counter()", "uses perf_counter"),
        ("proof/gates.py", "from time import perf_counter_ns", "uses perf_counter_ns"),
        ("proof/gates.py", "t = time.time()", "uses time"),
        ("attention/api.py", "e = torch.cuda.Event(enable_timing=True)", "uses cuda.Event"),
        ("gpu/specs.py", "import triton\nt = triton.testing.do_bench(f)", "uses do_bench"),
    ],
)
def test_the_rules_find_what_breaks_them(path, line, expected) -> None:
    found = architecture.problems(architecture.read({**GOOD, path: f"{GOOD[path]}\n{line}\n"}))
    assert len(found) == 1
    assert expected in found[0]


def test_a_file_without_docstring_is_found() -> None:
    assert architecture.problems(architecture.read({"gpu/specs.py": "X = 1"})) == ["gpu.specs:1: has no docstring"]


def test_importing_the_package_touches_neither_triton_nor_a_gpu_driver() -> None:
    code = """
import sys
import flashmoe_science
assert "flash_attention" in dir(flashmoe_science)
heavy = {"triton", "pynvml", "pydantic", "typer", "rich", "sqlalchemy", "scipy"} & set(sys.modules)
assert not heavy, heavy
if sys.platform == "linux":
    maps = open("/proc/self/maps").read()
    assert "libcuda.so" not in maps and "libnvidia-ml" not in maps
"""
    environment = {**os.environ, "PYTHONPATH": python_path(SOURCE.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_python_file_says_what_it_is() -> None:
    silent = []
    for path in tracked_files():
        if path.suffix == ".py" and (tree := ast.parse(path.read_text(encoding="utf-8"))).body:
            silent += [] if ast.get_docstring(tree) else [path.relative_to(ROOT).as_posix()]
    assert silent == []


# What functions of modules of refusals may call besides one another and what other modules check: nothing of it writes.
READS = frozenset({
    "all", "any", "enumerate", "hash", "isinstance", "len", "list", "max", "min", "range", "sorted", "str", "tuple",
    "type", "zip", "InputError", "UnsupportedError", "shown", "is_bare_subclass", "is_untraced", "meet", "frozenset",
    "moe_problem_of", "refuse_tangents",
    "count", "data_ptr", "dim", "get", "get_unwrapped", "index", "is_batchedtensor", "is_compiling", "is_contiguous",
    "is_functorch_wrapped_tensor", "is_gradtrackingtensor", "is_legacy_batchedtensor", "is_neg", "items", "join",
    "keys", "numel", "shares_memory", "removeprefix", "stride", "unpack_dual", "values",
})  # fmt: skip


def faults_of_refusals(text: str) -> list[str]:
    """Return what is in a module of refusals that may change something, or give something back."""
    tree = ast.parse(text)
    at_import = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.Assign)
    found: list[ast.AST] = [node for node in tree.body[1:] if not isinstance(node, at_import)]
    found += [node for node in tree.body if isinstance(node, ast.Assign) and any(map(is_call, ast.walk(node.value)))]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            found += [] if ast.unparse(node.returns or ast.Constant(0)) == "None" else [node]
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            found += [] if name in READS or name.lstrip("_").startswith("check_") else [node]
            found += [keyword.value for keyword in node.keywords if keyword.arg == "out"]
        elif isinstance(node, (ast.Attribute, ast.Subscript)):
            found += [] if isinstance(node.ctx, ast.Load) else [node]
        elif isinstance(node, (ast.Global, ast.Nonlocal, ast.Delete, ast.AugAssign, ast.Lambda, ast.ClassDef)):
            found.append(node)
    return [ast.unparse(node).splitlines()[0] for node in found]


def is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call)


def test_refusals_give_nothing_back_and_change_nothing() -> None:
    """Fingerprints leave calls of them out (``gpu/dependencies.py``)."""
    paths = list(SOURCE.rglob("*refusals.py"))
    assert len(paths) == 4
    for path in paths:
        assert faults_of_refusals(path.read_text(encoding="utf-8")) == [], path


@pytest.mark.parametrize(
    "statement",
    [
        "given.pop('bias', None)", "torch.set_float32_matmul_precision('medium')", "given.update(a=1)", "x.add_(1)",
        "given['a'] = 1", "x.grad = None", "del given['a']", "global A", "setattr(x, 'a', 1)", "check_it(x, out=x)",
        "torch.backends.cuda.enable_flash_sdp(False)", "os.environ.setdefault('A', '1')", "x = lambda: 1",
    ],
)  # fmt: skip
def test_refusals_that_change_something_are_found(statement) -> None:
    head = '"""A."""\n'
    assert faults_of_refusals(f"{head}\ndef check_a(x) -> None:\n    {statement}\n") != []
    assert faults_of_refusals(f"{head}\ndef check_a(x) -> None:\n    check_b(x)\n") == []
    for text in ("A = f()\n", "f()\n", "def check_a(x) -> bool:\n    return True\n"):
        assert faults_of_refusals(head + text) != []


# What the host runs at each call of experts may call, where fingerprints leave it out and it is given tensors, besides
# what refusals may: nothing of it makes a tensor, but for the cast under autocast, which fingerprints know.
READS_OF_INPUTS = READS | {
    "MoeProblem", "bit_length", "columns_up", "dict", "float", "gcd", "get_autocast_dtype", "is_autocast_enabled",
    "is_grad_enabled", "pointer_alignment",
}  # fmt: skip
CASTS, LAYOUT = "cast_under_autocast", "layout_of"
AT_IMPORT = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Expr)


def makers_of_tensors(text: str) -> list[str]:
    """Return what may make a tensor, keep one, or be another on a GPU; checks may ask for a tensor's device."""
    found: list[ast.AST] = []
    for part in ast.parse(text).body:
        if isinstance(part, ast.FunctionDef):
            found += [] if part.name == CASTS else makers_in(part)
        elif not isinstance(part, AT_IMPORT) or any(isinstance(node, ast.Lambda) for node in ast.walk(part)):
            found.append(part)
    return [ast.unparse(node).splitlines()[0] for node in found]


def makers_in(function: ast.FunctionDef) -> list[ast.AST]:
    may_ask = function.name == LAYOUT or function.name.lstrip("_").startswith("check_")
    found: list[ast.AST] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            found += [] if name in READS_OF_INPUTS or name.lstrip("_").startswith("check_") else [node]
        elif isinstance(node, ast.Attribute):
            asks = node.attr in ("is_cuda", "is_cpu") or (node.attr == "device" and not may_ask)
            found += [node] if asks or not isinstance(node.ctx, ast.Load) else []
        elif isinstance(node, ast.Subscript):
            found += [] if isinstance(node.ctx, ast.Load) else [node]
        elif isinstance(node, (ast.Global, ast.Nonlocal, ast.Lambda)):
            found.append(node)
    return found


def test_what_fingerprints_of_experts_leave_out_makes_no_tensor() -> None:
    """Not seen by them is what these files allocate and launch at each call: they do neither."""
    for name in sorted(RUN_AT_EACH_CALL | RUN_AT_EACH_CALL_OF_GRADIENTS):
        text = (SOURCE / name).read_text(encoding="utf-8")
        if name == "moe/gradients.py":  # of which a call that records nothing runs one function
            text = next(ast.unparse(node) for node in ast.parse(text).body if getattr(node, "name", "") == "records")
        if "torch" in text or "Tensor" in text:
            assert makers_of_tensors(text) == [], name


@pytest.mark.parametrize(
    "statement",
    [
        "x.clone()", "x.double().isnan().any()", "torch.empty(1)", "held[0] = x", "x.held = 1", "global A",
        "x.new_empty(1)", "torch.cuda.memory._set_allocator_settings('')", "return 2 if x.is_cuda else 16",
        "return x[x > 0] if x.device.type == 'cuda' else x", "a = lambda: x",
    ],
)  # fmt: skip
def test_what_makes_a_tensor_is_found(statement) -> None:
    assert makers_of_tensors(f'"""A."""\ndef describe(x):\n    {statement}\n') != []
    assert makers_of_tensors(f'"""A."""\ndef {CASTS}(x):\n    {statement}\n') == []
    assert makers_of_tensors('"""A."""\ndef describe(x):\n    return x.stride()\n') == []
    assert makers_of_tensors('"""A."""\ncheck_a = lambda x: x.clone()\n') != []
    assert makers_of_tensors('"""A."""\ndef check_a(x):\n    same(x.device)\n') == ["same(x.device)"]


def test_nothing_of_one_machine_is_in_the_repository() -> None:
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a picture
            continue
        for what, pattern in FOREIGN.items():
            found += [f"{path.relative_to(ROOT)}: {what}: {hit[0]}" for hit in re.finditer(pattern, text)]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        f"cd /{'work'}/main",
        f"see /{'root'}/.cache",
        f"/{'tmp'}/bash_jobs.0/1",
        f"/{'home'}/ada/x",
        f"https://{'pypi'}.org/x",
    ],
)
def test_the_patterns_find_what_they_are_for(text) -> None:
    assert any(re.search(pattern, text) for pattern in FOREIGN.values())


@pytest.mark.parametrize(
    "text", ["net/work/x", "~/work/x", "/home/me/runs", "$HOME/work", "/usr/bin/python3", "src/root.py"]
)
def test_the_patterns_leave_ordinary_text_alone(text) -> None:
    assert not any(re.search(pattern, text) for pattern in FOREIGN.values())


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in (path for path in tracked_files() if path.suffix == ".md"):
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            place = target.partition("#")[0]
            is_made = place.endswith(("speeds.md", "speeds-cases.md"))  # when the site is built
            if place and not is_made and not re.match(r"[a-z]+:", place) and not (page.parent / place).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []
