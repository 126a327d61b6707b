"""Packed sequences, gradients and steps have fingerprints by the rules of the plain call. The sources are our own."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science.attention import api, backward_sm90, fingerprints, gradients, varlen
from flashmoe_science.attention.backward_plan import BACKWARD_KERNEL
from flashmoe_science.attention.operator import OPERATOR as PLAIN
from flashmoe_science.attention_backward import operator as backward_operator
from flashmoe_science.attention_backward.operator import OPERATOR as BACKWARD
from flashmoe_science.attention_cache.operator import OPERATOR as CACHE
from flashmoe_science.attention_train.operator import OPERATOR as TRAIN
from flashmoe_science.attention_varlen import operator as varlen_operator
from flashmoe_science.attention_varlen.operator import OPERATOR as VARLEN
from flashmoe_science.gpu import call_code
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.proof.suites import load_suite

pytestmark = [pytest.mark.triton, pytest.mark.one_triton]

H200 = SPECS["H200"]
BATCH = {"batch": 2, "heads": 16, "seqlen_q": 4096, "head_dim": 128, "dtype": "bf16", "causal": True}
PACKED = {"lengths": [4096, 300, 0, 2500], "heads": 16, "head_dim": 128, "dtype": "bf16", "causal": True}
TABLES: dict[Any, dict[str, Any]] = {PLAIN: BATCH, VARLEN: PACKED, BACKWARD: BATCH, TRAIN: BATCH}
TABLES[CACHE] = {"batch": 4, "heads": 16, "seqlen_k": 4096, "head_dim": 128, "dtype": "bf16"}
ALL = pytest.mark.parametrize("operator", TABLES, ids=lambda operator: operator.name)
OTHERS = pytest.mark.parametrize("operator", [VARLEN, BACKWARD, TRAIN], ids=lambda operator: operator.name)


def subject(operator):
    return next(iter(operator.entry_points()))


def code(operator, arm="", gpu=H200, **change):
    problem = operator.parse_case({**TABLES[operator], **change})
    return operator.code(arm or subject(operator), problem, gpu)


@functools.cache
def unedited(operator):
    """Return the fingerprint, made once: to be called before an edit."""
    found = code(operator)
    assert found is not None
    return found


@pytest.mark.parametrize("operator", [BACKWARD, TRAIN], ids=lambda operator: operator.name)
def test_gradients_have_fingerprints_of_their_kernels(operator):
    codes = [code(operator, arm) for arm in (*operator.entry_points(), *operator.rivals())]
    assert None not in codes
    assert len(set(codes)) == len(codes)
    assert code(operator, gpu=SPECS["L4"]) not in (None, codes[0])
    assert code(operator, "nobody") is None


def test_a_kernel_that_is_refused_has_none():
    assert code(BACKWARD, "backward_gluon_sm90", SPECS["L4"]) is None
    assert code(VARLEN, "varlen_gluon_sm90", SPECS["L4"]) is None


def test_the_modules_of_kernels_are_known():
    """What is in them runs on the GPU: planning, which imports it, does not."""
    room = Path(api.__file__).parent
    names = {path.stem for path in room.glob("*.py") if path.stem.endswith("_triton") or "gluon" in path.stem}
    assert {f"{api.__package__}.{name}" for name in names} == fingerprints._OF_KERNELS


# What reaches the GPU

SAVED = "flash_attention_backward(q, k, v, o, lse, do", "flash_attention_backward(q, k, v, do, lse, o"
GRADIENTS: list[tuple[str, str, str, bool, bool]] = [  # the last two: those of gradients change, those of a step do
    ("attention.backward_gluon_sm90", "PART = gl.constexpr(4096)", "PART = gl.constexpr(2048)", True, True),
    ("attention.backward_passes_triton", "delta -= tl.load", "delta += tl.load", True, True),
    ("attention.backward_calls", "{name: allocate_gradient", "{name: 2 * allocate_gradient", True, True),
    ("attention.backward_hopper_calls", '("acc", "turns", "dq"),', '("dq", "turns", "acc"),', True, True),
    ("attention.backward_hopper_calls", "tiles * config.turns + 1", "tiles * config.turns", True, True),
    ("attention.gradients", "return call(tensors)\n", "return call(call(tensors))\n", True, True),
    ("gpu.tma_reduce", "ir.DESCRIPTOR_REDUCE_KIND.ADD", "ir.DESCRIPTOR_REDUCE_KIND.MIN", True, True),
    ("attention_backward.operator", "manual_seed(seed)", "manual_seed(seed + 1)", True, True),
    ("attention_backward.operator", 'inputs["lse"].copy_(lse)', 'inputs["lse"].copy_(2 * lse)', True, False),
    ("attention.reference", "top + torch.log(total)", "top - torch.log(total)", True, False),
    ("attention_train.operator", *SAVED, False, True),
    ("attention.api", "pq, pk, pv = q.data_ptr()", "q = q.contiguous()\n    pq, pk, pv = q.data_ptr()", False, True),
    ("attention.forward_primitives_sm90", "gl.constexpr(1024.0)", "gl.constexpr(512.0)", False, True),
    ("attention.backward_primitives", "tl.exp2(s - lse)", "tl.exp2(lse - s)", False, False),
    ("attention.backward_wide_gluon_sm90", "import ", "import string\nimport ", False, False),
    ("attention.backward_plan", "it is the one for Hopper", "it was made for Hopper", False, False),
    ("attention.backward_sm90", "# numbers in 128 bytes", "# in 128 bytes", False, False),
]  # fmt: skip


@pytest.mark.parametrize(("module", "old", "new", "of_gradients", "of_a_step"), GRADIENTS)
def test_an_edit_changes_the_fingerprint_of_gradients_where_it_reaches_them(
    edit, module, old, new, of_gradients, of_a_step
):
    before = unedited(BACKWARD), unedited(TRAIN)
    edit(module, old, new)
    after = code(BACKWARD), code(TRAIN)
    assert None not in after
    assert (after[0] != before[0], after[1] != before[1]) == (of_gradients, of_a_step)


@pytest.mark.parametrize("operator", [BACKWARD, TRAIN], ids=lambda operator: operator.name)
def test_what_prepares_kernels_is_followed_by_what_it_prepares(operator, monkeypatch):
    """Its text is not in the fingerprint, as the edits above show; a constant that it hands to a kernel is."""
    before = unedited(operator)
    monkeypatch.setattr(backward_sm90, "_UNIT", 4)
    assert code(operator) not in (None, before)


@pytest.mark.parametrize(
    ("module", "old", "new", "reaches"),
    [
        ("attention.sequences_triton", "tiles = (place + BLOCK_M - 1)", "tiles = (place + BLOCK_M)", True),
        ("attention.forward_primitives_sm90", "gl.constexpr(1024.0)", "gl.constexpr(512.0)", True),
        ("attention.packed_calls", "torch.empty(8 * problem.batch", "torch.zeros(8 * problem.batch", True),
        ("attention.varlen", "return call(q, k, v, q.data_ptr()", "return call(v, k, q, q.data_ptr()", True),
        ("attention_varlen.operator", "starts = [0, *itertools", "starts = [1, *itertools", True),
        ("attention_varlen.problem", "return max(self.lengths)", "return sum(self.lengths)", True),
        ("attention.forward_triton", "import triton\n", "import triton\n\nMORE = 1\n", False),
        ("attention.features_plan", "any order comes out even", "any does", False),
        ("attention.api", "pq, pk, pv = q.data_ptr()", "q = q.contiguous()\n    pq, pk, pv = q.data_ptr()", False),
    ],
)
def test_an_edit_changes_the_fingerprint_of_packed_sequences_where_it_reaches_them(edit, module, old, new, reaches):
    before = unedited(VARLEN)
    edit(module, old, new)
    assert code(VARLEN) is not None
    assert (code(VARLEN) != before) is reaches


def test_lengths_count_where_tokens_and_the_longest_are_the_same():
    """They are in the inputs, and no launch shows them."""
    lengths = [4096, 300, 0, 2500]
    others = lengths, lengths[::-1], [4096, 400, 0, 2400]
    found = [code(VARLEN, lengths=q, lengths_k=k) for q in others for k in others]
    assert None not in found
    assert len(set(found)) == len(found)


# How a call describes itself


def planned_by(monkeypatch, module, name, cache):
    """Return the list of problems that ``module`` plans for from here on."""
    seen: list[Any] = []
    made = getattr(module, name)

    def plan(problem, *arguments):
        seen.append(problem)
        return made(problem, *arguments)

    monkeypatch.setattr(module, name, plan)
    monkeypatch.setattr(module, cache, {})
    return seen


def call(operator, table):
    """Call the subject of an operator on a CPU, and return the problem."""
    problem = operator.parse_case(table)
    module, _, attribute = operator.entry_points()[subject(operator)].partition(":")
    inputs = operator.make_inputs(problem, seed=0, device="cpu")
    operator.bind(getattr(importlib.import_module(module), attribute), problem, inputs)()
    return problem


SMALL = {"batch": 2, "heads": 2, "seqlen_q": 4, "seqlen_k": 8, "head_dim": 16, "dtype": "fp16", "causal": True}
ONES = pytest.mark.parametrize(
    "ones", [(), ("batch",), ("heads",), ("seqlen_q",), ("seqlen_k", "batch"), ("head_dim",)]
)


@ONES
@pytest.mark.parametrize("operator", [BACKWARD, TRAIN], ids=lambda operator: operator.name)
def test_gradients_are_described_as_a_call_describes_them(monkeypatch, operator, ones):
    seen = planned_by(monkeypatch, gradients, "plan_backward", "_prepared")
    problem = call(operator, {**SMALL, **dict.fromkeys(ones, 1), "softmax_scale": 1})
    assert seen == [operator._as_called(problem)]


@pytest.mark.parametrize("window", [{}, {"window": [3, 0]}], ids=["plain", "window"])
@ONES
def test_the_forward_of_a_step_is_described_as_its_call_describes_it(monkeypatch, ones, window):
    monkeypatch.setattr(api, "_last_call", ((), None))
    seen = planned_by(monkeypatch, api, "plan_attention", "_prepared")
    problem = call(TRAIN, {**SMALL, **dict.fromkeys(ones, 1), **window})
    assert seen == [TRAIN._as_called(problem).forward]


@pytest.mark.parametrize(
    "change", [{}, {"lengths": [1]}, {"lengths_k": [9, 4, 20, 0], "head_dim_v": 8}, {"heads": 1, "head_dim": 1}]
)
def test_packed_sequences_are_described_as_a_call_describes_them(monkeypatch, change):
    seen = planned_by(monkeypatch, varlen, "plan_attention", "_prepared")
    problem = call(VARLEN, {"lengths": [5, 0, 17, 3], "heads": 4, "head_dim": 16, "dtype": "fp32", **change})
    called, tokens = VARLEN._as_called(problem)
    assert seen == [called]
    assert tokens == (sum(problem.lengths), sum(problem.lengths_k))


@pytest.mark.parametrize("suite", ["standard-backward", "train"])
def test_gradients_are_described_as_the_case_says(suite):
    operator: Any = {"standard-backward": BACKWARD, "train": TRAIN}[suite]
    for case in load_suite(suite).cases:
        assert operator.as_table(operator._as_called(case.problem)) == operator.as_table(case.problem), case.name


def test_packed_sequences_are_described_as_the_case_says():
    for case in load_suite("varlen").cases:
        problem: Any = case.problem
        assert VARLEN._as_called(problem) == (problem.planned, problem.tokens), case.name


@OTHERS
def test_how_a_call_is_described_counts_and_not_only_how_a_case_is(monkeypatch, operator):
    before = code(operator)
    module, name = {
        VARLEN: (varlen_operator, "packed_problem"), BACKWARD: (backward_operator, "backward_problem_of"),
        TRAIN: (backward_operator, "backward_problem_of"),
    }[operator]  # fmt: skip
    made = getattr(module, name)

    def misaligned(*arguments, **options):
        found = made(*arguments, **options)
        if operator is VARLEN:
            return dataclasses.replace(found, pointer_alignment=8)
        return dataclasses.replace(found, forward=dataclasses.replace(found.forward, pointer_alignment=8))

    monkeypatch.setattr(module, name, misaligned)
    assert code(operator) not in (None, before)


# Where there is none


@ALL
def test_an_operator_that_holds_something_has_no_fingerprints(monkeypatch, operator):
    arms = subject(operator), next(iter(operator.rivals()))
    assert None not in [code(operator, arm) for arm in arms]
    monkeypatch.setattr(operator, "make_inputs", operator.make_inputs)
    assert [code(operator, arm) for arm in arms] == [None, None]


@ALL
def test_a_package_that_changes_others_at_import_has_no_fingerprints(monkeypatch, operator):
    monkeypatch.setattr(call_code, "acts_at_import", lambda _package: "attention.varlen line 1: torch.x = 1")
    assert code(operator) is None


@ALL
def test_a_call_that_asks_for_its_gpu_in_another_way_has_no_fingerprint(monkeypatch, operator):
    monkeypatch.setattr(fingerprints, "asked_gpu", lambda q: q)
    assert code(operator) is None


PROGRAMS = ("attention.hopper_plan", "programs = min(tiles, gpu.sms)", "programs = min(tiles, int(open('x').read()))")
OF_GRADIENTS = (
    "attention.backward_hopper_plan", "programs=min(gpu.sms, ", "programs=min(int(open('x').read()), ",
)  # fmt: skip
PREPARING = ("attention.backward_sm90", "values = (*_units(*problem", "values = (*open('x'), *_units(*problem")


@pytest.mark.parametrize(
    ("operator", "module", "old", "new"),
    [
        (VARLEN, "attention.features_plan", "(min(tiles, gpu.sms), 1, 1)", "(min(tiles, int(open('x').read())), 1, 1)"),
        (VARLEN, "attention.features_prepare", "fit = heads_fit(problem)", "fit = int(open('x').read())"),
        (BACKWARD, *OF_GRADIENTS),
        (BACKWARD, *PREPARING),
        (TRAIN, *PROGRAMS),
        (TRAIN, *OF_GRADIENTS),
        (TRAIN, *PREPARING),
    ],
)
def test_a_plan_that_asks_the_machine_has_no_fingerprint(edit, operator, module, old, new):
    unedited(operator)
    edit(module, old, new)
    assert code(operator) is None


COUNTER = ("attention.packed_calls", "counters_of(device).address", "globals()['counters_of'](device).address")
KERNEL = (
    "attention.backward_passes_triton",
    "    tile = tl.num_programs(0)",
    "    vars()\n    tile = tl.num_programs(0)",
)
GRADIENT = (
    "attention.backward_calls",
    "found = {name: allocate_gradient",
    "found = {name: globals()['allocate_gradient']",
)


@pytest.mark.parametrize(
    ("operator", "module", "old", "new"),
    [
        (VARLEN, *COUNTER),
        (VARLEN, "attention.sequences_triton", "    b = tl.program_id(0)", "    vars()\n    b = tl.program_id(0)"),
        (BACKWARD, *GRADIENT),
        (BACKWARD, *KERNEL),
        (TRAIN, *GRADIENT),
        (TRAIN, *KERNEL),
        (TRAIN, "attention.forward_gluon_sm90", "    i = 0  # tiles", "    vars()\n    i = 0  # tiles"),
    ],
)
def test_code_that_is_looked_up_has_no_fingerprint(edit, operator, module, old, new):
    unedited(operator)
    edit(module, old, new)
    assert code(operator) is None


@pytest.mark.parametrize(
    ("operator", "arm", "module", "old", "new"),
    [
        (
            VARLEN,
            "sdpa",
            "attention_varlen.rivals",
            "return torch.cat(outputs)",
            "return globals()['torch'].cat(outputs)",
        ),
        (BACKWARD, "sdpa-cudnn", "attention_backward.rivals", "node: Any = o.grad_fn", "node = vars(o)['grad_fn']"),
        (TRAIN, "sdpa-cudnn", "attention_train.rivals", "node: Any = o.grad_fn", "node = vars(o)['grad_fn']"),
    ],
)
def test_a_rival_that_is_looked_up_has_no_fingerprint(edit, operator, arm, module, old, new):
    assert code(operator, arm) is not None
    edit(module, old, new)
    assert code(operator, arm) is None


@pytest.mark.parametrize("operator", [BACKWARD, TRAIN], ids=lambda operator: operator.name)
def test_gradients_of_a_kernel_that_the_environment_forces_have_no_fingerprint(monkeypatch, operator):
    monkeypatch.setenv(BACKWARD_KERNEL, "backward_triton")
    assert code(operator) is None
    assert code(operator, "sdpa-cudnn") is not None


@OTHERS
def test_without_triton_ours_have_no_fingerprint_and_rivals_have(monkeypatch, operator):
    module = varlen_operator if operator is VARLEN else backward_operator
    monkeypatch.setattr(module, "can_be_told", lambda: False)
    assert code(operator) is None
    assert code(operator, next(iter(operator.rivals()))) is not None


def test_a_step_that_works_more_in_its_forward_is_another_yardstick(monkeypatch):
    """``matrix-product`` has as many operations as both."""
    problem: Any = TRAIN.parse_case(BATCH)
    before = TRAIN.code("matrix-product", problem, H200)
    monkeypatch.setattr(type(problem.forward), "flops", 2 * problem.forward.flops)
    assert TRAIN.code("matrix-product", problem, H200) != before
