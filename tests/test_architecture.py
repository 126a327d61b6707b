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
    "attention/forward/plan.py": '"""D."""\nfrom ...gpu import specs\nfrom ..problem import Problem',
    "attention/reference.py": '"""D."""\nfrom .problem import Problem',
    "attention/forward/stream_triton.py": '"""D."""\nfrom .. import primitives',
    "attention/forward/merge_triton.py": '"""D."""\nfrom ..primitives import f',
    "attention/forward/gluon_sm90.py": '"""D."""\nfrom ..primitives import f',
    "attention/forward/primitives_sm90.py": '"""D."""\nfrom ...gpu import specs',
    "attention/forward/variants_gluon_sm90.py": '"""D."""\nfrom .primitives_sm90 import f',
    "attention/api.py": '"""D."""\nfrom . import reference\nfrom .forward import plan, stream_triton',
    "operators/__init__.py": '"""D."""',
    "operators/baselines/attention.py": '"""D."""\nfrom ... import __version__\nfrom ...attention import problem',
    "operators/attention.py": '"""D."""\nfrom ..attention import api\nfrom .baselines.attention import BASELINES',
    "proof/subject/operator.py": '"""D."""\nfrom ..errors import SubjectError\nfrom ..operators import MODULES',
    "proof/measure/measure.py": '"""D."""\nimport time\nt = time.perf_counter()\ne = torch.cuda.Event()',
    "proof/gates.py": '"""D."""\nimport time\nfrom . import measure\nt = time.monotonic()\ne = threading.Event()',
    "cli.py": '"""D."""\nfrom .proof import gates\nfrom .attention.plan import f',
}


def test_the_rules_accept_the_design() -> None:
    assert architecture.problems(architecture.read(GOOD)) == []


@pytest.mark.parametrize(
    ("path", "line", "expected"),
    [
        ("errors.py", "from .gpu import specs", "errors imports gpu.specs"),
        ("gpu/specs.py", "from ..attention.forward.plan import f", "gpu imports attention.forward.plan"),
        ("gpu/specs.py", "import flashmoe_science.attention.forward.plan", "gpu imports attention.forward.plan"),
        (
            "attention/api.py",
            "def f():\n    from ..proof.subject import operator",
            "kernels imports proof.subject.operator",
        ),
        (
            "attention/api.py",
            "if TYPE_CHECKING:\n    from ..proof.subject.operator import Inputs",
            "kernels imports proof",
        ),
        ("__init__.py", "from .proof import gates", "kernels imports proof.gates"),
        ("proof/gates.py", "from ..cli import main", "proof imports cli"),
        ("proof/gates.py", "from ..attention.api import f", "proof imports attention.api, expected load_operator"),
        ("proof/gates.py", "f('flashmoe_science.attention.api')", "proof names flashmoe_science.attention.api"),
        ("proof/gates.py", "from .. import attention", "proof imports attention, expected load_operator"),
        ("gpu/specs.py", "from .. import flash_attention", "imports the package itself"),
        ("attention/forward/plan.py", "from ..api import f", "imports api, which is above it"),
        ("attention/api.py", "from ..operators import attention", "kernels imports operators.attention"),
        (
            "operators/attention.py",
            "from ..proof.subject.operator import Operator",
            "operators imports proof.subject.operator",
        ),
        ("proof/gates.py", "from ..operators import attention", "proof imports operators.attention, expected load"),
        ("proof/gates.py", "f('flashmoe_science.operators.moe')", "proof names flashmoe_science.operators.moe"),
        ("attention/forward/merge_triton.py", "from .stream_triton import f", "a kernel file imports another one"),
        (
            "attention/forward/gluon_sm90.py",
            "from .variants_gluon_sm90 import f",
            "a kernel file imports another",
        ),
        (
            "attention/forward/variants_gluon_sm90.py",
            "from .gluon_sm90 import f",
            "a kernel file imports another one",
        ),
        ("attention/forward/merge_triton.py", "from .. import reference", "a kernel file imports the reference"),
        ("attention/reference.py", "from .forward.stream_triton import f", "the reference imports stream_triton"),
        ("attention/primitives.py", "from .forward.plan import f", "primitives imports plan"),
        ("attention/forward/plan.py", "import triton.language as tl", "plan imports triton.language"),
        ("proof/gates.py", "t = time.perf_counter()", "uses perf_counter"),
        ("proof/gates.py", "from time import perf_counter_ns", "uses perf_counter_ns"),
        ("proof/gates.py", "t = time.time()", "uses time"),
        ("attention/api.py", "e = torch.cuda.Event(enable_timing=True)", "uses cuda.Event"),
        ("gpu/specs.py", "import triton\nt = triton.testing.do_bench(f)", "uses do_bench"),
    ],
)
def test_the_rules_find_what_breaks_them(path, line, expected) -> None:
    found = architecture.problems(architecture.read({**GOOD, path: f"{GOOD[path]}\n{line}\n"}))
    (problem,) = [each for each in found if "imports itself" not in each]
    assert expected in problem


def test_a_circle_and_a_crowded_folder_are_found() -> None:
    circle = {"gpu/a.py": '"""D."""\nfrom .b import f', "gpu/b.py": '"""D."""\ndef g():\n    from . import a'}
    assert [each.partition(":")[0] for each in architecture.problems(architecture.read(circle))] == ["gpu.a", "gpu.b"]
    crowd = {f"gpu/m{n}.py": '"""D."""' for n in range(21)}
    assert architecture.problems(architecture.read(crowd)) == ["gpu: has 21 modules, expected at most 20"]


def test_a_large_kernel_is_found() -> None:
    def found(
        name: str, arguments: int, lines: int, decorator: str = "@gluon.jit(do_not_specialize=['a'])"
    ) -> list[str]:
        body = "\n".join(["    pass"] * (lines - 1))
        text = f'"""D."""\n{decorator}\ndef {name}({", ".join(f"a{i}" for i in range(arguments))}):\n{body}\n'
        return architecture.problems(architecture.read({"moe/gluon_sm90.py": text}))

    assert found("_add_kernel", 24, 120) == []
    assert found("_add_kernel", 25, 2) == ["moe.gluon_sm90:3: _add_kernel takes 25 arguments, expected at most 24"]
    assert found("_add", 25, 121, "@triton.jit") == ["moe.gluon_sm90:3: _add has 121 lines, expected at most 120"]
    assert found("_add_kernel", 25, 121, "@functools.cache") == []


def test_a_file_without_docstring_is_found() -> None:
    assert architecture.problems(architecture.read({"gpu/specs.py": "X = 1"})) == ["gpu.specs:1: has no docstring"]


def test_importing_the_package_touches_neither_triton_nor_a_gpu_driver() -> None:
    code = """
import sys
import flashmoe_science
assert "flash_attention" in dir(flashmoe_science)
heavy = {"triton", "pynvml", "pydantic", "typer", "rich", "scipy"} & set(sys.modules)
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
