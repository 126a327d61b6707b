"""Code that no name leads to, and answers of the machine: where there is any, a fingerprint tells nothing."""

from __future__ import annotations

import importlib
import sys

import pytest

from flashmoe_science.gpu import dependencies, untold
from flashmoe_science.gpu.dependencies import UntraceableError
from flashmoe_science.gpu.untold import acts_at_import, asks_the_machine, looks_up

QUIET = """
    import functools
    import math
    import os
    import re

    import torch

    from . import shared
    from .shared import SIZES, Box, row

    LOG2_E = math.log2(math.e)
    _WORD = re.compile("a+")
    _raw = getattr(torch._C, "gone", None)
    TABLE = {1: row("64x64"), 2: Box(1)}
    TABLE[3] = Box(2)
    half = functools.partial(row, "32x32")

    @functools.cache
    def kernel(x, scale=math.pi):
        os.environ["SEEN"] = "1"  # when it is called
        return x

    @torch.library.custom_op("made_up::kernel", mutates_args=())
    def operator(x):
        return x

    @operator.register_fake
    def _fake(x):
        return x

    operator.register_autograd(kernel)

    class Group(Box):
        size = row("16x16")

        def change(self):
            shared.SIZES = ()
    """
SHARED = """
    import torch

    SIZES = (1, 2)

    class Box:
        def __init__(self, size):
            self.size = size

    def row(text):
        found = {}
        for part in text.split("x"):
            found[part] = int(part)
        return found

    def install():
        torch.backends.cudnn.enabled = False

    def install_indirectly():
        return [install()]

    def remember():
        global SIZES
        SIZES = ()
    """


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a package with more at the end of one of its modules, and return its name."""

    def write(more="", *, room="quiet"):
        folder = tmp_path / "made_up"
        folder.mkdir(exist_ok=True)
        for name, text in {
            "__init__": "",
            "quiet": QUIET,
            "shared": SHARED,
            "cli": "",
            "proof": "",
            "other": "",
        }.items():
            (folder / f"{name}.py").write_text(text.replace("\n    ", "\n") + (f"\n{more}\n" if name == room else ""))
        importlib.invalidate_caches()
        forget()
        return "made_up"

    def forget():
        for cached in (dependencies.trace, dependencies._load, acts_at_import, asks_the_machine, looks_up):
            cached.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "made_up"]:
            del sys.modules[name]

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(untold, "_PACKAGE", "made_up")
    yield write
    forget()


def test_nothing_of_ours_acts_at_import():
    """A statement that does leaves every claim stale: move it into a function, or prove that it changes no time."""
    assert acts_at_import("flashmoe_science") == ""


def test_names_tables_caches_and_registrations_do_not_act(package):
    assert acts_at_import(package()) == ""
    assert acts_at_import(package("import other_package", room="cli")) == ""
    assert acts_at_import(package("print(1)", room="cli")) == ""
    assert acts_at_import(package("kernel.half = half", room="quiet")) == ""


@pytest.mark.parametrize(
    "statement",
    [
        "torch.backends.cudnn.enabled = False",
        "torch.set_float32_matmul_precision('high')",
        "_done = torch.set_float32_matmul_precision('high')",
        "_done: object = torch.cuda.init()",
        "os.environ['CUDA_LAUNCH_BLOCKING'] = '1'",
        "del os.environ['HOME']",
        "shared.row = half",
        "_done = setattr(shared, 'row', half)",
        "_set = setattr",
        "_names = vars(shared)",
        "exec('shared.row = None')",
        "type(TABLE[2]).size = 3",
        "for _box in TABLE.values():\n    type(_box).size = 3",
        "if math.pi > 3:\n    shared.SIZES = ()",
        "try:\n    torch.cuda.init()\nexcept RuntimeError:\n    pass",
        "with torch.no_grad():\n    pass",
        "_done = shared.install()",
        "_done = shared.install_indirectly()",
        "_done = shared.remember()",
        "@shared.install\ndef decorated():\n    return 1",
        "def defaults(x=shared.install()):\n    return x",
        "class Body:\n    torch.backends.cudnn.enabled = False",
        "class Body:\n    done = shared.install()",
        "class Derived(Box, made=shared.install()):\n    pass",
        "from math import *",
        "import pytest",
        "try:\n    import pytest\nexcept ImportError:\n    pass",
        "_alias = shared\n_alias.row = half",
        "for _alias in (shared,):\n    _alias.row = half",
    ],
)
def test_what_importing_changes_elsewhere_is_found(package, statement):
    found = acts_at_import(package(statement))
    assert found.startswith("made_up.quiet")
    assert "line" in found or "all names" in found


def test_every_module_counts_whoever_imports_it(package):
    acting = "from . import shared\n\nshared.row = None"
    assert acts_at_import(package(acting, room="other")) == "made_up.other line 4: shared.row = None"


def test_the_harness_may_call_for_its_own_names_and_change_nothing_else(package):
    assert acts_at_import(package("import pydantic\n\nLETTERS = pydantic.TypeAdapter(str)", room="proof")) == ""
    found = acts_at_import(package("import torch\n\ntorch.backends.cudnn.benchmark = True", room="proof"))
    assert found == "made_up.proof line 4: torch.backends.cudnn.benchmark = True"


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("return globals()['kernel']", "globals"),
        ("return vars(shared)['row']", "vars"),
        ("return getattr(shared, 'r' + 'ow')", "getattr"),
        ("return getattr(shared.row, name)", "getattr"),
        ("import sys\n    return sys.modules['made_up.shared']", "sys.modules"),
        ("import importlib\n    return importlib.import_module('made_up.shared')", "import_module"),
        ("import importlib\n    return importlib.import_module(f'{name}.shared')", "import_module"),
    ],
)
def test_code_that_is_not_used_by_its_name_is_said(package, body, what):
    package(f"from . import shared\n\ndef found(name):\n    {body}", room="other")
    assert looks_up(("made_up.other:found",)).endswith(what)


@pytest.mark.parametrize(
    "body",
    [
        "return getattr(shared, 'row')",
        "return getattr(name, name.upper())",
        "import importlib\n    return importlib.import_module('flashinfer')",
    ],
)
def test_code_that_is_used_by_its_name_is_not_looked_up(package, body):
    package(f"from . import shared\n\ndef found(name):\n    {body}", room="other")
    assert looks_up(("made_up.other:found",)) == ""


def test_plans_of_ours_ask_nothing_of_the_machine():
    here = "flashmoe_science"
    asking = frozenset({f"{here}.gpu.device", f"{here}.gpu.launch"})
    for roots in (
        ("attention.plan:plan_attention", "attention.prepare:prepare_kernels"),
        ("attention.decode_plan:plan_with_kv_cache", "attention.decode_prepare:prepare_cache_kernels"),
    ):
        assert asks_the_machine(tuple(f"{here}.{root}" for root in roots), asking) == ""


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("return torch.cuda.is_available()", "torch.cuda"),
        ("return os.path.exists('/dev/nvidia0')", "os.path"),
        ("return open('/dev/nvidia0')", "open"),
        ("import ctypes\n    return ctypes.CDLL('libcuda.so.1')", "all of ctypes"),
        ("from torch import cuda\n    return cuda", "cuda of torch"),
        ("from torch.cuda import device_count\n    return device_count()", "device_count of torch.cuda"),
        ("from time import time\n    return time()", "time of time"),
        ("from .shared import row\n    return row", "made_up.shared:"),
    ],
)
def test_what_a_plan_asks_of_the_machine_is_said(package, body, what):
    package(f"import os\nimport torch\n\ndef planned():\n    {body}", room="other")
    assert what in asks_the_machine(("made_up.other:planned",), frozenset({"made_up.shared"}))


def test_variables_dtypes_and_arithmetic_ask_nothing(package):
    planned = "def planned(x: torch.Tensor):\n    return os.environ.get('A'), torch.float16, math.ceil(1.5), row('1')"
    package(f"import math\nimport os\nimport torch\nfrom .shared import row\n{planned}", room="other")
    assert asks_the_machine(("made_up.other:planned",), frozenset({"made_up.device"})) == ""


def test_a_plan_that_cannot_be_followed_is_said(package):
    package()
    with pytest.raises(UntraceableError, match="has no planned"):
        asks_the_machine(("made_up.quiet:planned",), frozenset())
