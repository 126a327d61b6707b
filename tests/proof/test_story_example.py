"""Every state of examples/story is stopped at its gate, with a message that names the cause and the mend."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashmoe_science.gpu.cuobjdump import find_program
from flashmoe_science.gpu.machine_code import TENSOR_CORE_OPCODES, for_arch, read_file
from flashmoe_science.proof.diagnose.observations import Kernel
from flashmoe_science.proof.diagnose.tasks import Candidate, match_code
from flashmoe_science.proof.gates import ProveRequest, chain, run
from flashmoe_science.proof.records.evidence import Settings
from flashmoe_science.proof.subject.loading import load_subject
from flashmoe_science.proof.subject.suites import Suite

from .chain import FEW, SUBJECTS, attention, captured, gate_of, launch, run_chain, statuses, story, until

STORY = Path(__file__).parents[2] / "examples" / "story"
PAGE = " ".join((STORY.parents[1] / "docs" / "explanation" / "story.md").read_text(encoding="utf-8").split())
STATES = {path.name[0]: path.name for path in sorted(STORY.glob("*.toml"))}
CASES = (attention(1, 1, 64, 64), attention(1, 3, 65, 64), attention(1, 1, 4, 4))

NEEDS_NVCC = pytest.mark.needs(
    "nvcc",
    find_program("nvcc") is not None and shutil.which("g++") is not None,
    "builds a CUDA extension, which needs nvcc and g++",
)

pytestmark = pytest.mark.usefixtures("own_path")

V1 = "void story::v1::attend_kernel<__half>(story::Args)"
V2 = "void story::v2::attend_kernel<__half>(story::Args)"


@pytest.fixture
def fake_gpu(monkeypatch, gpu):
    """Stand in for a GPU, and leave the build out too."""
    monkeypatch.setitem(chain._GATES, "build", lambda _: run.passed("left out"))
    return gpu


def prove(state, folder=STORY, cases=CASES, subject=None, **changes):
    subject = replace(load_subject(str(folder / STATES[state])), **(subject or {}))
    suite = Suite("made-up", "attention", "Made for a test.", tuple(cases), folder)
    return run_chain(replace(ProveRequest(subject, suite, baselines=["sdpa"], command="flashmoe prove"), **changes))


def copied(folder):
    """Return a copy of the story in which nothing has been built."""
    return Path(shutil.copytree(STORY, folder / "story", ignore=shutil.ignore_patterns("build", "evidence")))


def test_a_kernel_of_fewer_threads_is_stopped_at_gate_launch(fake_gpu):
    promises = [vars(promise) for promise in load_subject(str(STORY / STATES["a"])).kernels]
    old = captured("story_a_wrong_binding", "subject", [launch(V1, shared_memory_bytes=528)], promises=promises)
    fake_gpu.capture = lambda payload: [old, captured("sdpa", "baseline", [launch("fmha")])]
    record = prove("a")
    assert statuses(record) == until("launch"), story(record)
    gate = gate_of(record, "launch")
    assert f"kernel {V1} ran with block (128, 1, 1), promised (384, 1, 1)" in gate.summary
    assert "look where the binding chooses" in gate.hint
    assert f"kernel {V1} ran with block (128, 1, 1), promised (384, 1, 1)" in PAGE


def test_tiles_too_large_are_stopped_at_gate_build_on_any_machine(no_gpu, tmp_path):
    record = prove("b", copied(tmp_path))
    assert statuses(record) == until("build"), story(record)
    gate = gate_of(record, "build")
    assert gate.summary == "*attend_kernel*: 163840 bytes of shared memory a block promised, L4 has 101376"
    assert "smaller tiles or fewer stages" in gate.hint
    assert gate.summary in PAGE
    assert gate.hint in PAGE
    assert not (tmp_path / "story" / "build").exists()


def test_a_slow_kernel_is_stopped_at_gate_quick_with_the_blocks_it_had(fake_gpu):
    fake_gpu.subject = "story_d_serial_loop"
    fake_gpu.launches = [launch(V2, grid=[2, 1, 1], block=[384, 1, 1], shared_memory_bytes=40960)]
    fake_gpu.seconds = {"story_d_serial_loop": 1e-4, "sdpa": 1e-5}
    record = prove("d", settings=FEW)
    assert statuses(record) == until("quick"), story(record)
    gate = gate_of(record, "quick")
    assert gate.summary == (
        "1.70x was expected, and it is about 0.10x of sdpa in graph time (geometric mean of 3 cases); "
        "in 3 of 3 cases it is slower with fewer blocks than the GPU's 132 SMs: b1_h1_s64_d64_fp16, 0.1x, "
        "has 2 blocks, which leave 98% of the SMs idle"
    )
    assert gate.hint.startswith("share the work over more blocks: split the keys")


EXTENSION = f"""
import sys

import torch

sys.path.append({str(SUBJECTS / "common")!r})
from plain_torch import attend as attend_plainly


@torch.library.custom_op("story::attend", mutates_args=())
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, is_causal: bool) -> torch.Tensor:
    # As the kernel reads them, 16 bytes at a time: a GPU ends the process of a call that is not aligned.
    if not all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (q, k, v)):
        raise RuntimeError("misaligned address")
    return attend_plainly(q, k, v, causal=is_causal, softmax_scale=scale)
"""


def test_the_state_without_a_fault_takes_inputs_of_any_layout(no_gpu, tmp_path):
    folder = copied(tmp_path)
    (folder / "build" / "f_asserted").mkdir(parents=True)
    (folder / "build" / "f_asserted" / "story_extension.py").write_text(EXTENSION)
    changes = {"build_command": None, "binaries": (), "devices": ("cpu",)}
    record = prove("f", folder, (attention(2, 2, 64, 64), attention(1, 1, 4, 4)), until="correct", subject=changes)
    assert statuses(record)["correct"] == "passed", story(record)
    assert {"strided", "expanded", "odd_offset"} <= set(record.cases[0].stress_draws)


@pytest.fixture(scope="module")
def built_once(tmp_path_factory):
    """Return a copy of the story for all states: those of the same flags share object files."""
    return copied(tmp_path_factory.mktemp("states"))


@NEEDS_NVCC
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the next test shows the same")
def test_what_is_built_is_stopped_where_no_gpu_is_needed(no_gpu, tmp_path):
    # One test, so that the object files which the states share are compiled once.
    folder = copied(tmp_path)
    records = {state: prove(state, folder, gpus=["L4"]) for state in "ace"}
    ends = {state: next(g for g, s in statuses(record).items() if s != "passed") for state, record in records.items()}
    assert ends == {"a": "launch", "c": "import", "e": "import"}, "".join(map(story, records.values()))
    gates = {state: statuses(record)[ends[state]] for state, record in records.items()}
    assert gates == {"a": "not possible", "c": "failed", "e": "failed"}

    built = gate_of(records["a"], "build").summary
    assert built.startswith("4 kernels for sm_89 (L4): at most ")
    assert "story::v1::attend_kernel takes at most 128 threads a block (__launch_bounds__), 384 are promised" in built

    # A diagnosis finds the machine code of a kernel by the name that a profiler shows.
    library = folder / "build" / "a_wrong_binding" / "story_extension.so"
    candidates: list[Candidate] = [(code, None, None) for code in for_arch(read_file(library), 89)]
    code = match_code(Kernel(name=V2), candidates)
    assert code is not None
    assert (code.name, code.count(TENSOR_CORE_OPCODES)) == (V2, 0)

    unloaded = gate_of(records["c"], "import")
    function = "cudaError story::v2::launch<__nv_bfloat16>(story::Args const&)"
    assert f"story_extension.so does not load: undefined symbol: {function}, mangled _ZN5story2v2" in unloaded.summary
    assert f"add `template {function};` to the .cu file that defines it" in unloaded.hint

    changed = gate_of(records["e"], "import")
    arguments = "(Tensor, Tensor, Tensor, causal=False, softmax_scale=None)"
    assert f"it takes (q, k, v, scale, is_causal), and the harness passes {arguments}" in changed.summary
    assert "Or write an operator: its `bind` passes others" in changed.hint

    for gate in (unloaded, changed):
        assert gate.summary in PAGE
        assert gate.hint in PAGE


@NEEDS_NVCC
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("state", "gate"),
    [
        ("a", "launch"),
        ("b", "build"),
        ("c", "import"),
        ("d", "quick"),  # far too slow, with or without the GPU to itself
        ("e", "import"),
        ("f", None),
    ],
)
def test_every_state_is_stopped_on_a_gpu(built_once, state, gate):
    record = prove(state, built_once, settings=Settings(processes=1, rounds=4, times=["graph"]))
    assert statuses(record) == (until(gate) if gate else dict.fromkeys(statuses(record), "passed")), story(record)
