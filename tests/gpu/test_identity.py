"""Identities of launches: what they are made of changes them, and where a kernel lives does not."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

import triton.language as tl

from flashmoe_science.attention import primitives
from flashmoe_science.attention.forward import (
    gluon_sm90 as forward_gluon_sm90,
    merge_triton,
    plan_sm90 as hopper_plan,
    primitives_sm90 as forward_primitives_sm90,
    stream_triton as forward_triton,
)
from flashmoe_science.errors import UnreadableError
from flashmoe_science.gpu import compile as compile_module, gluon_sm90, identity
from flashmoe_science.gpu.compile import KernelSource
from flashmoe_science.gpu.identity import launch_identity
from flashmoe_science.gpu.signature import kernel_source
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.proof.subject.loading import load_operator
from flashmoe_science.proof.subject.operator import identities_of
from flashmoe_science.proof.subject.subject import PACKAGE_FOLDER

from ..proof.processes import python_path
from . import made_up_kernels

pytestmark = pytest.mark.triton

ATTENTION = {"batch": 2, "heads": 8, "seqlen_q": 4096, "head_dim": 128, "dtype": "bf16"}
EXPERTS = {"tokens": 4096, "experts": 8, "top_k": 2, "hidden": 512, "inter": 512, "dtype": "bf16"}
# name: operator, subject, case; each of other kernels
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "hopper": ("attention", "flash_attention", ATTENTION),
    "triton": ("attention", "forward_triton", ATTENTION),
    "features": ("attention", "flash_attention", {**ATTENTION, "softcap": 30.0}),
    "short": ("attention", "flash_attention", {**ATTENTION, "seqlen_q": 64, "head_dim": 64}),
    "backward": ("attention_backward", "flash_attention_backward", ATTENTION),
    "decode": ("attention_cache", "decode_triton", {**ATTENTION, "seqlen_q": 1, "seqlen_k": 8192}),
    "packed": ("attention_varlen", "flash_attention_varlen", {
        "lengths": [300, 5], "heads": 8, "head_dim": 128, "dtype": "bf16",
    }),
    "experts": ("moe", "fused_moe", EXPERTS),
    "gradients": ("moe_backward", "fused_moe_backward", EXPERTS),
}  # fmt: skip


def identities() -> dict[str, list[str]]:
    identity._describe.cache_clear()
    identity._code_identity.cache_clear()
    found = {}
    for name, (operator, subject, table) in CASES.items():
        loaded = load_operator(operator)
        found[name] = identities_of(loaded, subject, loaded.parse_case(table), SPECS["H200"])
    return found


@pytest.fixture(scope="module")
def before() -> dict[str, list[str]]:
    return identities()


def changed(before: dict[str, list[str]]) -> set[str]:
    now = identities()
    return {name for name in CASES if now[name] != before[name]}


def test_every_launch_has_an_identity_and_calls_differ(before):
    assert all(before.values())
    assert all(re.fullmatch("[0-9a-f]{32}", each) for found in before.values() for each in found)
    assert len(set(map(tuple, before.values()))) == len(before)


def test_a_statement_of_a_kernel_changes_the_launches_of_that_kernel(before, plant):
    plant(forward_triton._forward_kernel)
    assert changed(before) == {"triton", "packed"}


def test_a_statement_of_a_helper_changes_the_launches_of_all_that_reach_it(before, plant):
    plant(gluon_sm90.slot_of)
    found = changed(before)
    assert {"hopper", "features"} <= found
    assert not {"triton", "decode"} & found


def test_a_method_of_an_aggregate_is_part_of_the_kernel(before, plant):
    plant(gluon_sm90.Ring.wait)
    found = changed(before)
    assert {"hopper", "features"} <= found
    assert not {"triton", "decode"} & found


def test_a_constant_counts_by_its_value(before, monkeypatch):
    monkeypatch.setattr(forward_primitives_sm90, "_LARGEST_SUM_PTX", type(forward_primitives_sm90.ROWS)("0f00000000"))
    assert changed(before) == {"hopper", "features"}


def test_a_tile_of_a_plan_counts(before, monkeypatch):
    rows = hopper_plan.HOPPER_TABLE[128, 128, False]
    other = tuple((keys, dataclasses.replace(config, num_stages=1)) for keys, config in rows)
    monkeypatch.setitem(hopper_plan.HOPPER_TABLE, (128, 128, False), other)
    assert changed(before) == {"hopper", "features"}


@dataclasses.dataclass(frozen=True)
class Launch:
    source: KernelSource
    grid: tuple[int, int, int] = (1, 1, 1)
    scalars: tuple[float, ...] = ()
    tensor_maps: tuple[Any, ...] = ()


def test_what_a_launch_is_given_counts():
    loaded = load_operator("attention")
    prepared: Any = loaded.launches("flash_attention", loaded.parse_case(ATTENTION), SPECS["H200"])[0]  # type: ignore[attr-defined]
    given = {field: getattr(prepared, field) for field in ("source", "grid", "scalars", "tensor_maps")}
    source, maps = given["source"], given["tensor_maps"]
    sources: list[dict[str, Any]] = [
        {"num_warps": 16}, {"max_registers": 64}, {"aligned": frozenset()}, {"constants": source.constants[1:]},
        {"function": merge_triton._merge_partials_kernel}, {"signature": (("x", "*fp16"), *source.signature[1:])},
    ]  # fmt: skip
    others: list[dict[str, Any]] = [
        {"grid": (prepared.grid[0] + 1, *prepared.grid[1:])},
        {"scalars": (*prepared.scalars[:-1], prepared.scalars[-1] * 2)},
        {"tensor_maps": (dataclasses.replace(maps[0], shape=(1, *maps[0].shape[1:])), *maps[1:])},
        *({"source": dataclasses.replace(source, **change)} for change in sources),
    ]
    found = [launch_identity(Launch(**{**given, **other}), 90) for other in others]
    found += [launch_identity(Launch(**given), arch) for arch in (90, 100)]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (compile_module, "ALIGNMENT", [["tt.divisibility", 4]]),
        (compile_module, "compile_options", lambda source: {"num_warps": source.num_warps, "enable_fp_fusion": False}),
        (identity, "ENCODING", {"interleave": 0, "l2_promotion": 0, "fill": 0}),
    ],
    ids=["alignment", "options", "tensor maps"],
)
def test_what_every_launch_is_given_counts(before, monkeypatch, module, name, value):
    monkeypatch.setattr(module, name, value)
    assert changed(before) >= {"hopper", "features"}


def test_a_default_counts_by_its_value(before, monkeypatch):
    """A call that leaves the option out is given another value, and no call says so."""
    monkeypatch.setitem(kernel_source.__kwdefaults__, "num_stages", 3)
    assert {"hopper", "features"} <= changed(before)


def test_digits_that_fp32_has_not_do_not_count():
    source = KernelSource(merge_triton._merge_partials_kernel, (("scale", "fp32"),), (), frozenset(), 4)
    one, same, other = (launch_identity(Launch(source, scalars=(x,)), 90) for x in (0.1, 0.1 + 1e-12, 0.2))
    assert one == same != other


# Where a kernel lives

SCRIPT = """
import json
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.proof.subject.loading import load_operator
from flashmoe_science.proof.subject.operator import identities_of
found = {}
for name, (operator, subject, table) in json.loads(input()).items():
    loaded = load_operator(operator)
    found[name] = identities_of(loaded, subject, loaded.parse_case(table), SPECS["H200"])
print(json.dumps(found))
"""


def copied_package(folder: Path) -> Path:
    copy = folder / PACKAGE_FOLDER.name
    shutil.copytree(PACKAGE_FOLDER, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def identities_in(folder: Path) -> dict[str, list[str]]:
    environment = {**os.environ, "PYTHONPATH": python_path(folder)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(CASES), env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def with_import_renamed(file: Path, module: Path, name: str) -> str:
    """Return the text of a file that imports a module, given by its path, under its new name."""

    def renamed(found: re.Match[str]) -> str:
        folder = file.parents[len(found["dots"]) - 1]
        is_it = folder.joinpath(*found["path"].split(".")) == module
        return found[0].replace(f"{module.name} import", f"{name} import") if is_it else found[0]

    return re.sub(r"from (?P<dots>\.+)(?P<path>[\w.]+) import", renamed, file.read_text())


def test_new_names_of_files_functions_and_variables_and_comments_change_no_identity(tmp_path, before):
    copy = copied_package(tmp_path)
    for module in (forward_gluon_sm90, gluon_sm90, forward_triton, primitives):
        path = copy / Path(str(module.__file__)).relative_to(PACKAGE_FOLDER)
        text = path.read_text()
        text = re.sub(r"^(@\w+\.jit)\n", r"# A comment.\n\n\1\n", text, flags=re.MULTILINE)
        text = re.sub(r'^( +)"""(?=\S)', r'\1"""Edited: ', text, flags=re.MULTILINE)
        path.write_text(text)
    for file in copy.rglob("*.py"):
        file.write_text(re.sub(r"\bslot_of\b", "place_in_ring", file.read_text()))
    attend = copy / Path(str(forward_gluon_sm90.__file__)).relative_to(PACKAGE_FOLDER)
    attend.write_text(re.sub(r"\bticket\b", "number", attend.read_text()))
    for module, name in ((forward_gluon_sm90, "renamed"), (gluon_sm90, "rings"), (primitives, "shared")):
        path = copy / Path(str(module.__file__)).relative_to(PACKAGE_FOLDER)
        path.rename(path.with_name(f"{name}.py"))
        for each in copy.rglob("*.py"):
            each.write_text(with_import_renamed(each, path.with_suffix(""), name))
    assert not (copy / Path(gluon_sm90.__file__).relative_to(PACKAGE_FOLDER)).exists()
    assert identities_in(tmp_path) == before


# What a kernel reaches outside of itself


def identity_with(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> str:
    monkeypatch.setattr(made_up_kernels, name, value)
    identity._describe.cache_clear()
    identity._code_identity.cache_clear()
    return identity.code_identity(made_up_kernels._noinline_kernel)


def test_a_function_from_outside_counts_by_its_name(monkeypatch):
    names = ("sum", "max", "sum")
    one, other, again = (identity_with(monkeypatch, "REDUCE", getattr(tl, name)) for name in names)
    assert one == again != other


def test_an_option_of_a_decorator_counts_by_its_value(monkeypatch):
    assert identity_with(monkeypatch, "NOINLINE", True) != identity_with(monkeypatch, "NOINLINE", False)


def test_a_builtin_of_our_own_counts_by_its_code(monkeypatch):
    one = identity_with(monkeypatch, "REDUCE", made_up_kernels.copy_once)
    assert one != identity_with(monkeypatch, "REDUCE", made_up_kernels.copy_twice)


def test_a_parameter_hides_a_global_name_and_a_method_does_not(monkeypatch):
    one = identity_with(monkeypatch, "REDUCE", made_up_kernels.Pair)
    monkeypatch.setattr(made_up_kernels, "scaled", made_up_kernels.copy_twice)
    assert one != identity_with(monkeypatch, "REDUCE", made_up_kernels.Pair)


# What cannot be read


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (object(), "SCALE of tests.gpu.made_up_kernels:_first_kernel cannot be read: a value of type object"),
        (primitives, "a value of type module"),
        (lambda x: x, "the source of tests.gpu.test_identity:<lambda> cannot be read"),
    ],
    ids=["an object", "a module of ours", "a function without a name"],
)
def test_what_cannot_be_read_is_an_error(monkeypatch, value, why):
    identity.code_identity(made_up_kernels._first_kernel)
    monkeypatch.setattr(made_up_kernels, "SCALE", value)
    identity._describe.cache_clear()
    identity._code_identity.cache_clear()
    with pytest.raises(UnreadableError, match=re.escape(why)):
        identity.code_identity(made_up_kernels._first_kernel)


def test_a_name_that_is_nowhere_is_an_error(monkeypatch):
    monkeypatch.delattr(made_up_kernels, "SCALE")
    identity._describe.cache_clear()
    identity._code_identity.cache_clear()
    with pytest.raises(UnreadableError, match="_first_kernel uses SCALE, which its module does not have"):
        identity.code_identity(made_up_kernels._first_kernel)


def test_a_layout_counts_without_fields_that_say_nothing():
    plain, more, other = (
        f"tensordesc<bf16[64, 128],NVMMASharedLayout({fields})>"
        for fields in ("swizzle_byte_width=128, rank=2", "swizzle_byte_width=128, rank=2, cga_layout=[]",
                       "swizzle_byte_width=64, rank=2")
    )  # fmt: skip
    assert identity._type(plain) == identity._type(more) != identity._type(other)
    with pytest.raises(UnreadableError, match="layout Odd is not known"):
        identity._type("tensordesc<bf16[64],Odd>")


def test_source_is_normalised_without_docstrings_and_places():
    texts = ('def f(x):\n  "D."\n  return x + 1.0', "# c\n\ndef f( x ):\n    return (x + 1.)", "def f(x): return x + 1")
    one, same, other = (identity.normalised(ast.parse(text)) for text in texts)
    assert one == same != other
