"""The fingerprint of a case of experts changes with what the GPU runs in it, and with nothing else.

The sources are our own. What the host runs at each call is in it, or named.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science.gpu import call_code
from flashmoe_science.gpu.dependencies import trace
from flashmoe_science.gpu.device import spec_of
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.moe import (
    api,
    calls,
    fingerprints,
    gradients,
    hopper_plan,
    operator as moe_operator,
    plan,
    prepare,
)
from flashmoe_science.moe.backward_api import fused_moe_backward
from flashmoe_science.moe.inputs import moe_problem_of
from flashmoe_science.moe.operator import OPERATOR
from flashmoe_science.moe.problem import MoeProblem
from flashmoe_science.moe.tiles import GEMV_TABLE, gemv_tiles
from flashmoe_science.moe_backward.operator import OPERATOR as BACKWARD
from flashmoe_science.proof.operator import Fingerprinting, TellingHostFiles
from flashmoe_science.proof.suites import load_suite

from ..files_run import files_run

pytestmark = [pytest.mark.triton, pytest.mark.one_triton]

H200 = SPECS["H200"]
MIXTRAL = {"experts": 8, "top_k": 2, "hidden": 4096, "inter": 14336, "dtype": "bf16"}
TABLES: dict[str, tuple[Any, dict[str, Any]]] = {
    "one": (OPERATOR, {**MIXTRAL, "tokens": 1}),
    "few": (OPERATOR, {**MIXTRAL, "tokens": 8}),
    "sorted": (OPERATOR, {**MIXTRAL, "tokens": 96}),
    "hopper": (OPERATOR, {**MIXTRAL, "tokens": 4096}),
    "shared": (OPERATOR, {**MIXTRAL, "tokens": 96, "shared_experts": 1, "shared_inter": 512}),
    "gradients": (BACKWARD, {**MIXTRAL, "tokens": 64}),
    "gradients-hopper": (BACKWARD, {**MIXTRAL, "tokens": 4096}),
}
KINDS = {
    "one": "gemv_triton", "few": "few_triton", "sorted": "grouped_triton", "hopper": "grouped_gluon_sm90",
    "shared": "grouped_triton", "gradients": "moe_backward_triton", "gradients-hopper": "moe_backward_gluon_sm90",
}  # fmt: skip
FORWARD = {"one", "few", "sorted", "hopper", "shared"}
GRADIENTS = {"gradients", "gradients-hopper"}
SORTED = {"sorted", "hopper", "shared", *GRADIENTS}
EVERY = FORWARD | GRADIENTS
HOPPER = {"hopper", "gradients-hopper"}
TRITON = {"few", "sorted", "shared", "gradients"}  # that multiply in it, but for "one"


def subject(operator):
    return next(iter(operator.entry_points()))


def code(name, arm="", gpu=H200, **change):
    operator, table = TABLES[name]
    return operator.code(arm or subject(operator), operator.parse_case({**table, **change}), gpu)


@functools.cache
def unedited(name, arm=""):
    """Return the fingerprint, made once: to be called before an edit."""
    found = code(name, arm)
    assert found is not None
    return found


def changed(names=EVERY, arm=""):
    """Return the cases whose fingerprint is another one now. Each still has one."""
    now = {name: code(name, arm) for name in names}
    assert None not in now.values()
    return {name for name in names if now[name] != unedited(name, arm)}


def remember(arm="", names=EVERY):
    for name in names:
        unedited(name, arm)


def test_the_cases_are_served_by_the_kernels_that_they_stand_for():
    for name, (operator, table) in TABLES.items():
        assert operator._plan(subject(operator), operator.parse_case(table), H200).kernel == KINDS[name], name
        assert isinstance(operator, Fingerprinting)


@pytest.mark.parametrize("suite", ["moe-decode", "moe-prefill", "moe-train"])
def test_every_case_of_the_suites_has_a_fingerprint_of_its_own(suite):
    loaded = load_suite(suite)
    operator: Any = BACKWARD if suite == "moe-train" else OPERATOR
    found = [operator.code(subject(operator), case.problem, H200) for case in loaded.cases]
    assert None not in found
    assert len(set(found)) == len(found)


def test_every_arm_has_a_fingerprint_of_its_own():
    """Those that serve the case, with its kernel by its name, too."""
    for name, (operator, table) in TABLES.items():
        case = operator.parse_case(table)
        arms = [*operator.entry_points(), *operator.rivals()]
        codes = {arm: code(name, arm) for arm in arms}
        refused = {arm for arm in operator.entry_points() if operator.refusal(arm, case, "H200")}
        assert {arm for arm in arms if codes[arm] is None} == refused, name
        assert len(set(codes.values()) - {None}) == len(arms) - len(refused), name
        assert code(name, gpu=SPECS["L4"]) not in (None, code(name))
        assert code(name, "nobody") is None


def test_of_what_a_rival_holds_its_code_counts_and_no_address():
    fields, roots = call_code._fields_of(BACKWARD.rivals()["grouped_mm"])
    assert fields["_forward"]["_function"] == "flashmoe_science.moe.rivals:_grouped_mm"
    assert {f"flashmoe_science.moe.rivals:{name}" for name in ("FunctionRival", "_grouped_mm")} <= set(roots)
    assert "0x" not in str(fields)


# What reaches the GPU, and what does not


def short(value: object) -> str:
    """Return the name of a parameter; a set has another order in every process."""
    return (" ".join(sorted(value)) if isinstance(value, set | frozenset) else str(value))[:30]


EDITS: list[tuple[str, str, str, set[str]]] = [
    ("moe.gemv_triton", "mask=mask_k[None, :], other=0.0", "mask=mask_k[None, :], other=1.0", {"one"}),
    ("moe.combine_triton", "mask=exists, other=-1", "mask=exists, other=-2", EVERY - {"one"}),
    ("moe.grouped_triton", "mask=offs < pairs, other=-1", "mask=offs < pairs, other=0", TRITON),
    ("moe.sort_triton", "before % BLOCK_M == 0", "before % BLOCK_M == 1", SORTED),
    ("moe.grouped_gluon_sm90", "BLOCK_K = gl.constexpr(64)", "BLOCK_K = gl.constexpr(32)", HOPPER),
    ("moe.weights_gluon_sm90", "PRODUCERS = gl.constexpr(128)", "PRODUCERS = gl.constexpr(64)", {"gradients-hopper"}),
    ("moe.backward_triton", "mask=mask_both, other=0.0", "mask=mask_both, other=1.0", {"gradients"}),
    ("moe.activation_gluon_sm90", "PART = gl.constexpr(16)", "PART = gl.constexpr(32)", {"gradients-hopper"}),
    ("moe.primitives_sm90", "CHUNK = gl.constexpr(64)", "CHUNK = gl.constexpr(32)", HOPPER),
    ("gpu.gluon_sm90", "FIRST_BARRIER = gl.constexpr(5)", "FIRST_BARRIER = gl.constexpr(6)", HOPPER),
    ("gpu.compile", '"enable_fp_fusion": True', '"enable_fp_fusion": False', EVERY),
    ("gpu.launch", "config = _LaunchConfig(*grid, threads,", "config = _LaunchConfig(*grid, 2 * threads,", EVERY),
    ("moe.calls", "addresses[place] = addresses[name] + offset", "addresses[place] = addresses[name]", EVERY),
    ("moe.calls", '"out": torch.empty(', '"out": torch.zeros(', EVERY),
    ("moe.calls", 'add("dproduct", problem', 'add("dproduct", 2 * problem', EVERY),
    ("moe.prepared", "int(offset or 0)", "int(offset or 16)", EVERY),
    ("moe.api", "return call(tensors)", "return call({**tensors, 'x': tensors['x'].clone()})", FORWARD),
    ("moe.backward_api", "do.detach(), (product,", "do.clone(), (product,", GRADIENTS),
    ("moe.gradients", "do = do.clone()", "do = 2 * do", GRADIENTS),
    ("moe.operator", 'scale=p.inter**-0.5),\n            "topk', 'scale=0.0),\n            "topk', EVERY),
    ("moe.operator", 'if value and value != "swiglu"', 'if value and value != "geglu"', EVERY),
    ("moe.drawn", "_DRAWS = 9", "_DRAWS = 7", EVERY),
    ("moe_backward.operator", "manual_seed(seed + 1)", "manual_seed(seed)", GRADIENTS),
    # comments and docstrings, what no case runs, and what describes, plans and prepares: its outcome counts
    ("moe.grouped_triton", "# [T, HID]\n", "# [T, 1, HID]\n", set()),
    ("moe.calls", '"""Return the call that allocates and launches."""', '"""Return it."""', set()),
    ("moe.route_triton", "import triton\n", "import triton\n\nMORE = 1\n", set()),
    ("moe.primitives", "import triton\n", "import triton\n\nMORE = 1\n", set()),
    ("moe.operator", "_MAX_INTERPRETER_STEPS = 4096", "_MAX_INTERPRETER_STEPS = 8192", set()),
    ("moe.plan", "are too few to sort", "are few", set()),
    ("moe.tiles", "    weights_m: int", "    weights_n: int = 0\n    weights_m: int", set()),
    ("moe.inputs", "must not be a negative view", "must be none", set()),
    ("moe.reference", "import torch\n", "import torch\n\nMORE = 1\n", set()),
    ("moe.rivals", "order = torch.argsort(ids)", "order = torch.argsort(-ids)", set()),
    ("moe.routing", "_ELEMENTS = 2048", "_ELEMENTS = 4096", set()),
]  # fmt: skip


@pytest.mark.parametrize(("module", "old", "new", "reached"), EDITS, ids=short)
def test_an_edit_changes_the_cases_that_it_reaches_and_no_others(edit, module, old, new, reached):
    remember()
    edit(module, old, new)
    assert changed() == reached


def test_gradients_are_another_call_than_what_autograd_makes_of_the_forward(edit):
    """``gradients`` is followed where a call makes them, and only there."""
    remember()
    edit("moe.gradients", 'found["x"].add_(more["x"])', 'found["x"].sub_(more["x"])')
    assert changed() == GRADIENTS


def test_a_tile_of_the_tables_changes_the_cases_that_take_it(monkeypatch):
    remember()
    tiles = gemv_tiles(4096, 2)
    other = dataclasses.replace(tiles, up=dataclasses.replace(tiles.up, block_n=8))
    monkeypatch.setitem(GEMV_TABLE, 2, ((math.inf, other),))
    assert changed() == {"one"}


def test_an_entry_for_other_cases_and_another_reason_change_nothing(monkeypatch):
    remember()
    monkeypatch.setitem(GEMV_TABLE, 4, GEMV_TABLE[2])
    made = plan.make_plan
    monkeypatch.setattr(plan, "make_plan", lambda *given: dataclasses.replace(made(*given), reason="for people"))
    assert changed() == set()


def test_the_grid_and_the_constants_that_a_plan_decides_count(monkeypatch):
    remember()
    with monkeypatch.context() as patched:
        patched.setattr(hopper_plan, "REGISTERS", {**hopper_plan.REGISTERS, "up": (208, 96)})
        patched.setattr("flashmoe_science.moe.prepare_sm90.REGISTERS", hopper_plan.REGISTERS)
        assert changed() == {"hopper"}
    card = dataclasses.replace(H200, sms=131)  # of a kernel whose programs draw their tiles one is missing
    assert {name for name in EVERY if code(name, gpu=card) != unedited(name)} == {"hopper", "gradients-hopper"}
    card = dataclasses.replace(H200, name="another", max_sm_clock_mhz=1)
    assert {name for name in EVERY if code(name, gpu=card) != unedited(name)} == set()
    card = spec_of("NVIDIA H200", arch=90, sms=132, l2_bytes=50 << 20)
    assert {name for name in EVERY if code(name, gpu=card) != unedited(name)} == set()


def test_which_tensors_a_kernel_is_given_counts(monkeypatch):
    remember()
    made = prepare.MAKERS["combine"]

    def swapped(*given):
        kernel = made(*given)
        return dataclasses.replace(kernel, tensors=kernel.tensors[::-1])

    monkeypatch.setitem(prepare.MAKERS, "combine", swapped)
    assert changed() == FORWARD - {"one"}


@pytest.mark.parametrize(
    ("name", "larger", "reached"),
    [
        ("workspace_sizes", lambda made, *given: {part: 2 * size for part, size in made(*given).items()}, SORTED),
        ("column_sums", lambda made, *given: 2 * made(*given), GRADIENTS),
    ],
)
def test_the_sizes_of_what_a_call_allocates_count(monkeypatch, name, larger, reached):
    remember()
    monkeypatch.setattr(calls, name, functools.partial(larger, getattr(calls, name)))
    assert changed() == reached


def test_where_a_buffer_lies_counts(monkeypatch):
    """The gradient of w_gate_up lends its memory, or there is a buffer."""
    remember(names=GRADIENTS)
    made = BACKWARD._plan
    monkeypatch.setattr(
        type(BACKWARD), "_plan", lambda _self, *given: dataclasses.replace(made(*given), scratch=2 << 30)
    )
    assert changed(GRADIENTS) == GRADIENTS


@pytest.mark.parametrize("name", ["TENSORS", "GRADIENTS"])
def test_the_order_of_what_is_given_and_made_counts(monkeypatch, name):
    remember()
    monkeypatch.setattr(fingerprints, name, getattr(fingerprints, name)[::-1])
    assert changed() == EVERY


def test_a_routing_that_is_drawn_otherwise_is_another_input():
    for name in EVERY:
        for arm in ("", "grouped_mm"):
            assert code(name, arm, routing="zipf") not in (None, code(name, arm))


def test_a_default_that_is_another_one_counts(monkeypatch):
    """A table leaves defaults out."""
    remember("grouped_mm")
    asked = {"interleaved": True}
    with monkeypatch.context() as patched:
        patched.setattr(moe_operator.MoeOperator, "_options", staticmethod(lambda _case: asked))
        assert changed(EVERY, "grouped_mm") == EVERY
    made = fingerprints.like_inputs
    monkeypatch.setattr(
        fingerprints, "like_inputs", lambda problem: made(dataclasses.replace(problem, weights_dtype="bf16"))
    )
    assert changed(EVERY, "grouped_mm") == EVERY


def test_what_rivals_read_of_a_problem_counts(monkeypatch):
    remember("copy", FORWARD)
    monkeypatch.setattr(MoeProblem, "expert_bytes", 1)
    assert changed(FORWARD, "copy") == FORWARD


def test_options_that_no_kernel_of_the_case_has_are_told_to_rivals():
    assert code("few", "transformers-eager") != code("few", "transformers-eager", activation="geglu")
    clamped = {"activation": "swiglu_clamped", "bias_down": True}
    assert code("few", "grouped_mm", **clamped) != code("few", "grouped_mm", **clamped, limit=5.0)


# How a call describes itself

SMALL = {"tokens": 5, "experts": 4, "top_k": 2, "hidden": 16, "inter": 24, "dtype": "fp16"}
DESCRIBED: list[dict[str, Any]] = [
    SMALL,
    {**SMALL, "tokens": 1, "experts": 1, "top_k": 1, "inter": 1},
    {**SMALL, "hidden": 1, "routing": "zipf"},
    {**SMALL, "activation": "swiglu_clamped", "interleaved": True, "bias_gate_up": True, "bias_down": True},
    {**SMALL, "activation": "relu2", "dtype": "bf16"},
]
FORWARD_ONLY = [
    {**SMALL, "tokens": 0},
    {**SMALL, "shared_experts": 2, "shared_inter": 8, "shared_weights": "bf16", "batch_invariant": True},
]


class PlannedError(Exception):
    """What ends a call once it has planned."""


def called(monkeypatch, operator, table):
    """Call the subject on a CPU, and return the case and what it planned for, and with what."""
    module, name, entry = {
        OPERATOR: (api, "plan_moe", api.fused_moe),
        BACKWARD: (gradients, "plan_backward", functools.partial(fused_moe_backward, kernel="moe_backward_triton")),
    }[operator]
    seen: list[Any] = []

    def note(problem, _gpu, *more):
        seen.append((problem, *more))
        raise PlannedError

    monkeypatch.setattr(module, name, note)
    monkeypatch.setattr(module, "_prepared", {})
    case = operator.parse_case(table)
    with pytest.raises(PlannedError):
        operator.bind(entry, case, operator.make_inputs(case, seed=0, device="cpu"))()
    return case, seen[0]


@pytest.mark.parametrize("table", [*DESCRIBED, *FORWARD_ONLY])
def test_a_call_is_described_as_it_describes_itself(monkeypatch, table):
    case, (problem, kernel) = called(monkeypatch, OPERATOR, table)
    assert OPERATOR._as_called(case).problem == problem
    assert kernel == "auto"


@pytest.mark.parametrize("table", DESCRIBED)
def test_gradients_are_described_as_a_call_describes_them(monkeypatch, table):
    case, (problem, wanted, _) = called(monkeypatch, BACKWARD, table)
    assert BACKWARD._as_called(case).problem == problem
    assert BACKWARD._plan("fused_moe_backward", case, H200).wanted == wanted


@pytest.mark.parametrize("table", [*DESCRIBED, *FORWARD_ONLY])
def test_inputs_lie_as_they_are_told(table):
    case = OPERATOR.parse_case(table)
    made = OPERATOR.make_inputs(case, seed=0, device="cpu")
    assert fingerprints._layouts(fingerprints.like_inputs(case.problem)) == fingerprints._layouts(made)


@pytest.mark.parametrize("suite", ["moe-decode", "moe-prefill", "moe-train"])
def test_a_call_is_described_as_the_case_says(suite):
    operator: Any = BACKWARD if suite == "moe-train" else OPERATOR
    for case in load_suite(suite).cases:
        assert operator._as_called(case.problem) == case.problem, case.name


def test_how_a_call_is_described_counts_and_not_only_how_a_case_is(monkeypatch):
    remember()
    made = moe_problem_of

    def misaligned(*given, **options):
        return dataclasses.replace(made(*given, **options), pointer_alignment=8)

    monkeypatch.setattr(fingerprints, "moe_problem_of", misaligned)
    assert changed() == EVERY


# Rivals

RIVALS: list[tuple[str, str, str, str, set[str]]] = [
    ("few", "moe.rivals", "order = torch.argsort(ids)", "order = torch.argsort(-ids)", {"grouped_mm"}),
    ("few", "moe.rivals", "torch.bmm(w_down[ids]", "torch.bmm(w_down[-ids]", {"batched_mm"}),
    ("few", "moe.reference", "product = ", "product = 2 * ", {"transformers-eager"}),
    ("few", "moe.rivals", "topk_ids.to(torch.int32)", "topk_ids.to(torch.int64)", {"liger"}),
    ("few", "gpu.memory_copy", "round(nbytes / 2 / 4)", "round(nbytes / 4 / 4)", {"copy"}),
    ("few", "moe.drawn", "_active(_routing(case))\n\n", "2 * _active(_routing(case))\n\n", {"copy"}),
    ("few", "moe.drawn", "names[_routing(case)", "names[-_routing(case)", set(OPERATOR.rivals())),
    ("few", "moe.rivals", '"torch._grouped_mm serves bf16"', '"it serves bf16"', {"grouped_mm"}),
    ("gradients", "moe.rivals", "order = torch.argsort(ids)", "order = torch.argsort(-ids)", {"grouped_mm"}),
    ("gradients", "moe_backward.rivals", "retain_graph=True", "retain_graph=None", set(BACKWARD.rivals())),
    ("gradients", "moe.api", "return call(tensors)", "return call({})", set()),
    ("few", "moe.api", "return call(tensors)", "return call({})", set()),
]  # fmt: skip


@pytest.mark.parametrize(("name", "module", "old", "new", "reached"), RIVALS, ids=short)
def test_a_rival_that_is_called_otherwise_has_another_fingerprint(edit, name, module, old, new, reached):
    operator = TABLES[name][0]
    arms = [*operator.rivals()]
    for arm in arms:
        unedited(name, arm)
    edit(module, old, new)
    assert {arm for arm in arms if changed({name}, arm)} == reached


def test_how_a_rival_is_called_in_prose_does_not_count(monkeypatch):
    unedited("few", "grouped_mm")
    monkeypatch.setattr(OPERATOR.rivals()["grouped_mm"], "also_called", ("another",))
    assert changed({"few"}, "grouped_mm") == set()


# Where there is none


def test_an_operator_that_holds_something_has_no_fingerprints(monkeypatch):
    for name, arm in (("few", ""), ("few", "liger"), ("gradients", ""), ("gradients", "liger")):
        operator = TABLES[name][0]
        unedited(name, arm)
        with monkeypatch.context() as patched:
            patched.setattr(operator, "make_inputs", operator.make_inputs)
            assert code(name, arm) is None


def test_a_package_that_changes_others_at_import_has_no_fingerprints(monkeypatch):
    monkeypatch.setattr(call_code, "acts_at_import", lambda _package: "moe.api line 1: torch.x = 1")
    assert [code("few"), code("gradients")] == [None, None]


@pytest.mark.parametrize(
    ("name", "module", "old", "new"),
    [
        ("few", "moe.plan", "tiles = slots(problem)", "tiles = int(open('x').read())"),
        ("sorted", "moe.plan", "pairs = cdiv(problem.pairs, 4) * 4", "pairs = int(open('x').read())"),
        ("gradients", "moe.backward_plan", "return cdiv(problem.inter,", "return int(open('x').read(),"),
        ("hopper", "moe.prepare_sm90", "width = parts * columns", "width = int(open('x').read())"),
        ("few", "moe.calls", 'addresses[""] = 0', "addresses[\"\"] = globals()['x']"),
        ("few", "moe.grouped_triton", "    ids = expert_of_ids", "    vars()\n    ids = expert_of_ids"),
        ("gradients", "moe.gradients", "made = run(given)", "made = globals()['run'](given)"),
    ],
)
def test_a_plan_that_asks_the_machine_and_code_that_is_looked_up_have_none(edit, name, module, old, new):
    unedited(name)
    edit(module, old, new)
    assert code(name) is None


def test_without_triton_ours_have_no_fingerprint_and_rivals_have(monkeypatch):
    monkeypatch.setattr(moe_operator, "can_be_told", lambda: False)
    assert [code("few"), code("gradients")] == [None, None]
    assert None not in (code("few", "grouped_mm"), code("gradients", "liger"))


def test_the_modules_of_kernels_are_known():
    """What is in them runs on the GPU: planning, which imports it, does not. A rival's is imported by no plan."""
    room = Path(api.__file__).parent
    names = {path.stem for path in room.glob("*.py") if path.stem.endswith("_triton") or "gluon" in path.stem}
    names -= {name for name in names if name.startswith("rival_")}
    assert {f"{api.__package__}.{name}" for name in names} == fingerprints._OF_KERNELS


# What the host runs at each call


def followed(entry, stops):
    """Return the files that a fingerprint has in it."""
    modules = {name.partition(":")[0].removeprefix("flashmoe_science.") for name in trace((entry,), stops)}
    return {f"{module.replace('.', '/')}.py" for module in modules}


@pytest.mark.parametrize("tokens", [1, 8, 200, 5000])
def test_what_the_host_runs_at_each_call_is_in_the_fingerprint_or_named(as_on_a_gpu, tokens):
    for operator, stops in ((OPERATOR, fingerprints.NOT_FOLLOWED), (BACKWARD, fingerprints.NOT_FOLLOWED_OF_GRADIENTS)):
        assert isinstance(operator, TellingHostFiles)
        case = operator.parse_case({**SMALL, "tokens": tokens, "inter": 16})
        name, entry = subject(operator), operator.entry_points()[subject(operator)]
        function: Any = api.fused_moe
        if operator is BACKWARD:
            function = functools.partial(fused_moe_backward, kernel="moe_backward_triton")
        call = operator.bind(function, case, operator.make_inputs(case, seed=0, device="cpu"))
        call()
        ran, named = files_run(call), operator.host_files(name, case)
        assert named is not None
        assert ran - followed(entry, stops) - named == set()
        assert "moe/calls.py" in ran
        if tokens > 100:  # few tokens need no workspace, whose sizes planning tells
            assert named <= ran
