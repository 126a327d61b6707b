"""The fingerprint of a case changes with what the GPU runs in it, and with nothing else. The sources are our own."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science import flash_attention
from flashmoe_science.attention import fingerprints, hopper_plan, inputs, operator as attention_operator, plan, prepare
from flashmoe_science.attention.inputs import problem_of
from flashmoe_science.attention.operator import OPERATOR
from flashmoe_science.attention_cache.operator import OPERATOR as CACHE_OPERATOR
from flashmoe_science.gpu import call_code, device
from flashmoe_science.gpu.dependencies import trace
from flashmoe_science.gpu.device import spec_of
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.proof.operator import Fingerprinting, load_operator
from flashmoe_science.proof.suites import load_suite

from ..files_run import files_run

pytestmark = pytest.mark.triton

H200 = SPECS["H200"]
SHAPES = {
    "hopper": {"batch": 2, "heads": 16, "seqlen_q": 4096, "head_dim": 128, "dtype": "bf16"},
    "short": {"batch": 1, "heads": 16, "seqlen_q": 128, "head_dim": 64, "dtype": "fp16"},
    "split": {"batch": 1, "heads": 2, "seqlen_q": 4, "seqlen_k": 8192, "head_dim": 64, "dtype": "fp16"},
    "window": {
        "batch": 2,
        "heads": 16,
        "seqlen_q": 1000,
        "head_dim": 96,
        "dtype": "fp16",
        "window": [100, 0],
        "alibi": "fp32",
    },
    "features": {"batch": 2, "heads": 16, "seqlen_q": 4096, "head_dim": 128, "dtype": "bf16", "window": [100, 0]},
}


def code(shape, arm="flash_attention", gpu=H200):
    found = OPERATOR.code(arm, OPERATOR.parse_case(SHAPES[shape]), gpu)
    assert found is not None
    return found


KINDS = {
    "hopper": "forward_gluon_sm90",
    "features": "forward_features_gluon_sm90",
    "short": "forward_short_gluon",
    "split": "forward_triton",
}


def test_the_shapes_are_served_by_the_kernels_that_they_stand_for():
    plans = {name: plan.plan_attention(OPERATOR.parse_case(table), H200) for name, table in SHAPES.items()}
    assert {name: plans[name].kernel for name in KINDS} == KINDS
    assert len(plans["split"].launches) == 2
    assert plans["window"].kernel == "forward_triton"


@pytest.mark.parametrize(
    "suite", ["seed", "standard", "standard-fp16", "unseen", "decode", "standard-backward", "train", "varlen"]
)
def test_every_case_of_the_suites_has_a_fingerprint_of_its_own_on_every_gpu_that_serves_it(suite):
    loaded = load_suite(suite)
    operator = load_operator(loaded.operator)
    assert isinstance(operator, Fingerprinting)
    subject = next(iter(operator.entry_points()))
    served = {
        (case.name, gpu): operator.code(subject, case.problem, spec)
        for case in loaded.cases
        for gpu, spec in SPECS.items()
        if operator.refusal(subject, case.problem, gpu) is None
    }
    assert None not in served.values()
    of_one = [found for (_, gpu), found in served.items() if gpu == "H200"]
    assert len(set(of_one)) == len(of_one) == len(loaded.cases)


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("attention.forward_gluon_sm90", '"""Attend rows 64 W', '"""Attend no more than rows 64 W'),
        ("attention.forward_gluon_sm90", "  # to the first\n", "\n"),
        (
            "attention.forward_gluon_sm90",
            "    if W == a.WARPGROUPS - 1:\n",
            "    if (\n        W == a.WARPGROUPS - 1\n    ):\n",
        ),
        ("attention.forward_gluon_sm90", "from __future__", "\n\n\nfrom __future__"),
        ("attention.forward_triton", "def _attend(", "def _attend_more("),
        ("attention.decode_triton", "import triton\n", "import triton\n\nMORE = 1\n"),
        ("attention.api", '"""Attend every query', '"""Attend all queries'),
        ("attention.triton_plan", "MERGE_ROWS = 4", "MERGE_ROWS = 8"),
        ("attention.reference", "import torch\n", "import torch\n\nMORE = 1\n"),
        ("gpu.gluon_sm90", "# of the hardware's 16", "# of 16"),
    ],
)
def test_an_edit_that_does_not_reach_the_gpu_leaves_the_fingerprint(edit, module, old, new):
    before = code("hopper")
    edit(module, old, new)
    assert code("hopper") == before


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("attention.forward_primitives_sm90", "gl.constexpr(1024.0)", "gl.constexpr(512.0)"),
        ("attention.forward_primitives_sm90", "m_new = gl.maximum(m, largest", "m_new = gl.minimum(m, largest"),
        # kernel -> _attend_partition -> _step -> multiply -> Ring.wait, through another file into a third
        ("gpu.gluon_sm90", "lap & 1)", "lap & 3)"),
        ("gpu.gluon_sm90", "FIRST_BARRIER = gl.constexpr(5)", "FIRST_BARRIER = gl.constexpr(6)"),
        ("gpu.gluon_versions", '"async_store"', '"async_stores"'),
        ("gpu.tensor_map", "_L2_PROMOTION_128B = 2", "_L2_PROMOTION_128B = 3"),
        ("gpu.compile", '"enable_fp_fusion": True', '"enable_fp_fusion": False'),
        ("gpu.launch", "config = _LaunchConfig(*grid, threads,", "config = _LaunchConfig(*grid, 2 * threads,"),
        ("gpu.counters", "_BLOCK = 4096", "_BLOCK = 8192"),
        ("attention.calls", "o = empty(shape, strides, dtype)", "o = empty(shape, strides, dtype).zero_()"),
        ("attention.api", "pq, pk, pv = q.data_ptr()", "q = q.contiguous()\n    pq, pk, pv = q.data_ptr()"),
        ("attention.operator", "dtype=torch.float32).to(dtype)", "dtype=torch.float32).mul(0).to(dtype)"),
    ],
)
def test_an_edit_that_reaches_the_gpu_changes_the_fingerprint(edit, module, old, new):
    before = code("hopper")
    edit(module, old, new)
    assert code("hopper") != before


def test_an_edited_kernel_changes_the_cases_that_run_it_and_no_others(edit):
    before = {shape: code(shape) for shape in SHAPES}
    edit("attention.primitives", "other=0.0)", "other=1.0)")
    changed = {shape for shape in SHAPES if code(shape) != before[shape]}
    assert changed == {"split", "window"}
    edit("attention.merge_triton", "total += weight", "total += 2 * weight")
    assert code("split") not in (before["split"], before["window"])


def test_a_table_entry_changes_the_cases_that_take_it(monkeypatch):
    before = {shape: code(shape) for shape in SHAPES}
    table = dict(hopper_plan.HOPPER_TABLE)
    table[128, 128, False] = ((2**63, dataclasses.replace(table[128, 128, False][0][1], ping_pong=True)),)
    monkeypatch.setattr(hopper_plan, "HOPPER_TABLE", table)
    assert {shape for shape in SHAPES if code(shape) != before[shape]} == {"hopper"}


def test_an_entry_for_other_shapes_and_another_reason_change_nothing(monkeypatch):
    before = code("hopper")
    table = dict(hopper_plan.HOPPER_TABLE)
    table[256, 256, False] = ((2**63, dataclasses.replace(table[256, 256, False][0][1], num_stages=1)),)
    monkeypatch.setattr(hopper_plan, "HOPPER_TABLE", table)
    made = hopper_plan.hopper_plan
    monkeypatch.setattr(
        plan, "hopper_plan", lambda *arguments: dataclasses.replace(made(*arguments), reason="for people")
    )
    assert code("hopper") == before


def test_the_grid_and_the_constants_that_the_plan_decides_count(monkeypatch):
    before = code("hopper")
    with monkeypatch.context() as patched:
        patched.setattr(prepare, "HOPPER_REGISTERS", {2: 232, 3: 160})
        assert code("hopper") != before
    # One SM fewer is one program fewer: the kernel draws its tiles from a counter.
    assert code("hopper", gpu=dataclasses.replace(H200, sms=131)) != before
    assert code("hopper", gpu=dataclasses.replace(H200, name="another", max_sm_clock_mhz=1)) == before


def test_a_card_as_its_driver_describes_it_gives_what_the_table_of_gpus_gives():
    """A GPU run asks the driver, and a machine without a GPU the table or the record."""
    card = spec_of("NVIDIA H200", arch=90, sms=132, l2_bytes=50 << 20)
    assert [code(shape, gpu=card) for shape in SHAPES] == [code(shape) for shape in SHAPES]
    assert spec_of("NVIDIA H999", arch=90, sms=7, l2_bytes=1).sms == 7


def described(problem, tensors):
    """Return what ``flash_attention`` plans for, as ``bind`` calls it."""
    options = attention_operator._asked(problem, tensors)
    q, k, v = (tensors[name] for name in "qkv")
    scale = problem.softmax_scale
    return problem_of(q, k, v, causal=problem.causal, softmax_scale=scale, return_lse=False, **options)


@pytest.mark.parametrize("ones", [(), ("batch",), ("heads",), ("seqlen_q",), ("seqlen_k", "batch"), ("head_dim",)])
@pytest.mark.parametrize("bias", ["", "fp16"])
def test_an_axis_of_one_element_has_the_stride_that_a_call_gives_it(ones, bias):
    sizes = {"batch": 2, "heads": 2, "seqlen_q": 4, "seqlen_k": 8, "head_dim": 16}
    more = {"bias": bias} if bias else {}
    problem = OPERATOR.parse_case({**sizes, **dict.fromkeys(ones, 1), "dtype": "fp16", **more})
    tensors = OPERATOR.make_inputs(problem, seed=0, device="cpu")
    assert OPERATOR._as_called(problem) == described(problem, tensors)


@pytest.mark.parametrize("suite", ["seed", "standard", "standard-fp16", "unseen", "scaling", "features", "decode"])
def test_a_call_is_described_as_the_case_says(suite):
    """Its strides, pages and sizes are those that the suite's problem has, but for axes of one element."""
    loaded = load_suite(suite)
    operator: Any = load_operator(loaded.operator)
    for case in loaded.cases:
        assert operator.as_table(operator._as_called(case.problem)) == operator.as_table(case.problem), case.name


def test_how_a_call_is_described_counts_and_not_only_how_a_case_is(monkeypatch):
    """What ``problem_of`` makes of the tensors is what is planned for on a GPU."""
    before = {shape: code(shape) for shape in SHAPES}
    made = inputs.problem_of

    def misaligned(*arguments, **options):
        return dataclasses.replace(made(*arguments, **options), pointer_alignment=8)

    monkeypatch.setattr(attention_operator, "problem_of", misaligned)
    assert {shape for shape in SHAPES if code(shape) == before[shape]} == set()


def test_a_call_that_asks_for_its_gpu_in_another_way_has_no_fingerprint(monkeypatch):
    assert inputs.gpu_of is device.gpu_of
    monkeypatch.setattr(fingerprints, "asked_gpu", lambda q: device.gpu_of(q.detach()))
    assert OPERATOR.code("flash_attention", OPERATOR.parse_case(SHAPES["hopper"]), H200) is None


def test_the_card_is_described_by_the_function_that_describes_it_on_a_gpu():
    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, L2_cache_size=60 << 20
    )
    assert device.gpu_of_properties(properties) == spec_of("NVIDIA H200", arch=90, sms=132, l2_bytes=60 << 20)


def test_a_package_that_changes_others_at_import_has_no_fingerprints(monkeypatch):
    monkeypatch.setattr(call_code, "acts_at_import", lambda _package: "attention.varlen line 1: torch.x = 1")
    assert OPERATOR.code("flash_attention", OPERATOR.parse_case(SHAPES["hopper"]), H200) is None


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (
            "attention.calls",
            "counter = counters_of(device).address",
            "counter = globals()['counters_of'](device).address",
        ),
        ("attention.forward_gluon_sm90", "    i = 0  # tiles", "    vars()\n    i = 0  # tiles"),
    ],
)
def test_code_that_is_looked_up_has_no_fingerprint(edit, module, old, new):
    edit(module, old, new)
    assert OPERATOR.code("flash_attention", OPERATOR.parse_case(SHAPES["hopper"]), H200) is None


def test_a_rival_that_is_looked_up_has_no_fingerprint(edit):
    edit("attention.rivals", "return _Bound(self._call)", 'return _Bound(globals()["Sdpa"]._call)')
    assert OPERATOR.code("sdpa", OPERATOR.parse_case(SHAPES["hopper"]), H200) is None


def test_a_plan_that_asks_the_machine_has_no_fingerprint(edit):
    code("hopper")
    edit("attention.hopper_plan", "programs = min(tiles, gpu.sms)", "programs = min(tiles, int(open('x').read()))")
    assert OPERATOR.code("flash_attention", OPERATOR.parse_case(SHAPES["hopper"]), H200) is None


def test_arms_are_told_apart_and_what_cannot_be_told_is_none():
    problem = OPERATOR.parse_case(SHAPES["hopper"])
    assert code("hopper", arm="forward_gluon_sm90") != code("hopper", arm="forward_triton")
    assert OPERATOR.code("nobody", problem, H200) is None
    assert OPERATOR.code("sdpa#2", problem, H200) is None
    assert OPERATOR.code("forward_gluon_sm90", problem, SPECS["L4"]) is None  # refused there
    decode = CACHE_OPERATOR.parse_case({"batch": 1, "heads": 4, "seqlen_k": 64, "head_dim": 64, "dtype": "fp16"})
    assert CACHE_OPERATOR.code("nobody", decode, H200) is None


def test_a_kernel_that_cannot_be_followed_has_no_fingerprint(edit):
    edit("attention.forward_primitives_sm90", "import struct\n", "import struct\nfrom .primitives import *\n")
    assert OPERATOR.code("flash_attention", OPERATOR.parse_case(SHAPES["hopper"]), H200) is None
    code("short")


def test_without_triton_ours_have_no_fingerprint_and_rivals_have(monkeypatch):
    monkeypatch.setattr(attention_operator, "can_be_told", lambda: False)
    problem = OPERATOR.parse_case(SHAPES["hopper"])
    assert OPERATOR.code("flash_attention", problem, H200) is None
    assert OPERATOR.code("fa3", problem, H200) is not None


def test_a_rival_that_is_ours_has_the_fingerprint_of_what_runs_without_the_features(edit):
    """So an edit of the kernel that it measures against changes it, and one of the kernel with features does not."""
    windowed = OPERATOR.parse_case({**SHAPES["hopper"], "window": [100, -1]})
    before = [OPERATOR.code(arm, windowed, H200) for arm in ("flash_attention", "without-features")]
    assert None not in before
    assert before[1] not in (before[0], code("hopper"))
    edit("attention.forward_features_gluon_sm90", "_clean(v[0], keys)", "_clean(v[0], keys + 0)")
    after = [OPERATOR.code(arm, windowed, H200) for arm in ("flash_attention", "without-features")]
    assert (after[0] != before[0], after[1] == before[1]) == (True, True)
    edit("attention.forward_gluon_sm90", "self.row_tiles.put(n, _HEAD, h)", "self.row_tiles.put(n, _HEAD, h + 0)")
    assert OPERATOR.code("without-features", windowed, H200) not in (None, before[1])


RIVALS = list(OPERATOR.rivals())


def test_every_rival_has_a_fingerprint_of_its_own():
    found = [code("hopper", arm=name) for name in RIVALS]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("p.scale, p.causal, -1, -1", "p.scale, p.causal, 0, -1", {"fa3"}),
        ("clone(memory_format", "contiguous(memory_format", {"fa2", "fa3", "fa4", "xformers", "flashinfer"}),
        ("_SIZE = 8192", "_SIZE = 4096", {"matrix-product"}),
    ],
)
def test_a_rival_that_is_called_otherwise_has_another_fingerprint(edit, old, new, changed):
    before = {name: code("hopper", arm=name) for name in RIVALS}
    edit("attention.rivals", old, new)
    assert {name for name in RIVALS if code("hopper", arm=name) != before[name]} == changed


def test_how_a_rival_is_called_in_prose_does_not_count_and_its_backend_does(monkeypatch):
    before = code("hopper", arm="sdpa-cudnn")
    rival = OPERATOR.rivals()["sdpa-cudnn"]
    monkeypatch.setattr(rival, "also_called", ("another",))
    assert code("hopper", arm="sdpa-cudnn") == before
    monkeypatch.setattr(rival, "backend", None)
    assert code("hopper", arm="sdpa-cudnn") != before


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("options", [{}, {"window": (3, 0), "softcap": 5.0}], ids=["plain", "features"])
def test_what_the_host_runs_at_each_call_is_in_the_fingerprint_or_named(device, options):
    """On a CPU there is the reference besides, and its checks."""
    q, k, v = torch.randn(3, 1, 2, 300, 64, device=device, dtype=torch.bfloat16)
    flash_attention(q, k, v, causal=True, **options)
    ran = files_run(lambda: flash_attention(q, k, v, causal=True, **options))
    followed = {
        name.partition(":")[0].removeprefix("flashmoe_science.").replace(".", "/") + ".py"
        for name in trace(("flashmoe_science.attention.api:flash_attention",), fingerprints.NOT_FOLLOWED)
    }
    assert "attention/api.py" in ran
    known = followed | (fingerprints.RUN_AT_EACH_CALL_WITH_FEATURES if options else fingerprints.RUN_AT_EACH_CALL)
    assert ran - known <= ({"attention/reference.py", "attention/problem.py"} if device == "cpu" else set())
    if options:
        assert {"attention/inputs.py", "attention/gradients.py"} <= ran
