"""The chain: its order, its stops, and the gates that need no GPU. The subjects run in real worker processes."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from flashmoe_science.errors import ProofError
from flashmoe_science.proof import worker
from flashmoe_science.proof.gates import chain, run
from flashmoe_science.proof.gates.run import passed
from flashmoe_science.proof.judge.run_verdicts import last_word
from flashmoe_science.proof.measure.environment import subject_tree
from flashmoe_science.proof.processes import TaskResult
from flashmoe_science.proof.records.documents import read_record, write_record
from flashmoe_science.proof.records.evidence import GateStatus, TreeState
from flashmoe_science.proof.subject.failure_hints import not_here

from .chain import (
    HONEST,
    SHORT,
    Recorder,
    attention,
    attention_request,
    gate_of,
    request_of,
    run_chain,
    statuses,
    until,
    write_subject,
)
from .fake_operator import Problem

pytestmark = pytest.mark.usefixtures("no_gpu")

HONEST_CODE = "from tests.proof.fake_operator import attend\n"


def test_machine_without_gpu_shows_what_it_can(tmp_path):
    recorder = Recorder()
    record = run_chain(request_of(HONEST, SHORT, Problem(1, 1, 4096, 64)), recorder)
    assert statuses(record) == {
        **dict.fromkeys(("sources", "build", "import", "correct"), "passed"),
        **dict.fromkeys(("launch", "quick", "bench"), "not possible"),
    }
    assert record.complete
    assert gate_of(record, "launch").summary == "no NVIDIA GPU here"
    assert "1 of 2 cases on the CPU" in gate_of(record, "correct").summary
    assert "1 not possible here" in gate_of(record, "correct").summary
    assert "b1_h1_s4096_d64_fp16: 4,096 tokens and more" in gate_of(record, "correct").details[0]
    assert [case.correct for case in record.cases] == [True, None]
    arm = record.cases[0].arms[0]
    assert (arm.status, arm.reason) == ("not measured", "launch is not possible here: no NVIDIA GPU here")
    assert arm.accuracy is not None
    assert arm.accuracy.max_error <= arm.accuracy.budget
    assert arm.accuracy.deterministic
    assert [source.path for source in record.subject.sources] == ["fake_operator.py"]
    write_record(record, tmp_path / "record.json")
    assert read_record(tmp_path / "record.json") == record


def test_progress_and_record_are_told_after_every_gate():
    recorder = Recorder()
    record = run_chain(request_of(until="import"), recorder)
    assert recorder.started == ["sources", "build", "import"]
    assert [gate.name for gate in recorder.finished] == recorder.started
    assert [saved.complete for saved in recorder.saved] == [False, False, False, True]
    assert {saved.id for saved in recorder.saved} == {record.id}
    assert recorder.saved[0].incomplete_reason == "the run has not ended"
    assert statuses(record) == {**until("launch", "not reached")}
    assert record.cases[0].arms[0].reason == "the run was to end after gate import"


def test_impossible_request_is_refused_before_anything_runs():
    recorder = Recorder()
    with pytest.raises(ProofError, match="need names of their own, got sdpa twice"):
        run_chain(request_of(baselines=["sdpa", "sdpa"]), recorder)
    assert recorder.saved == []


# Gate sources.


def test_missing_source_fails_gate_sources():
    record = run_chain(request_of(replace(HONEST, sources=("fake_operator.py", "csrc/*.cu", "page_cheks.py"))))
    assert statuses(record) == until("sources")
    gate = gate_of(record, "sources")
    assert gate.summary == "no such file: csrc/*.cu, page_cheks.py"
    assert gate.hint == "sources are relative to the folder of the kernel.toml; did you mean page_checks.py?"
    assert record.complete


def test_source_changed_during_the_run_makes_the_record_incomplete(tmp_path):
    subject = write_subject(tmp_path, HONEST_CODE, tail="[build]\ncommand = 'sh -c \"echo >> written_subject.py\"'")
    record = run_chain(request_of(subject, until="build"))
    assert not record.complete
    assert record.incomplete_reason == "changed while the run was going on: written_subject.py"


# Gate build.


def build_gate(folder, code=HONEST_CODE, **kwargs):
    subject = write_subject(folder, code, **{k: v for k, v in kwargs.items() if k in ("head", "tail")})
    more = {k: v for k, v in kwargs.items() if k not in ("head", "tail")}
    record = run_chain(request_of(subject, until="build", **more))
    return gate_of(record, "build"), statuses(record)


@pytest.mark.parametrize(
    ("command", "summary"),
    [
        ("sh -c 'echo a cause; exit 3'", "the build command exited with status 3"),
        ("sleep 600", "the build command did not finish within 1 s"),
        ("no-such-compiler", "the build command cannot start no-such-compiler: No such file or directory"),
    ],
)
def test_failed_build_command_fails_gate_build(tmp_path, command, summary):
    gate, all_gates = build_gate(tmp_path, tail=f'[build]\ncommand = "{command}"\ntimeout_s = 1')
    assert all_gates == until("build")
    assert gate.summary == summary
    assert ("a cause" in gate.details) == ("echo" in command)


JOBS = """
import os
from tests.proof.fake_operator import Job, Outcome, attend
def jobs(cases, gpus):
    assert cases[0]["seqlen_q"] == 65
    return [Job(f"tile {i}", gpu, %s) for i in range(3) for gpu in gpus]
class Dying:
    registers = property(lambda self: os._exit(5))
"""
JOBS_TABLE = "[build]\ncompile_jobs = 'written_subject:jobs'"


def test_kernels_are_compiled_for_every_gpu_named(tmp_path):
    code = JOBS % "Outcome(shared_memory_bytes=2048 * (1 + i))"
    gate, _ = build_gate(tmp_path, code, tail=JOBS_TABLE, gpus=["L4", "H200"])
    assert gate.summary == (
        "6 kernels compiled for 2 GPUs: at most 32 registers a thread, 6 KiB shared memory a block, no spills"
    )
    assert gate.details == [
        "L4: 3 kernels, at most 6 of 99 KiB shared memory a block",
        "H200: 3 kernels, at most 6 of 227 KiB shared memory a block",
    ]


def test_broken_promise_of_a_kernel_fails_gate_build(tmp_path):
    code = JOBS % "Outcome(problems=('12 bytes spilled',) if i == 1 and gpu == 'L4' else ())"
    gate, all_gates = build_gate(tmp_path, code, tail=JOBS_TABLE, gpus=["L4", "H200"])
    assert all_gates == until("build")
    assert gate.summary == "tile 1 for L4: 12 bytes spilled"


def test_compiler_that_dies_fails_gate_build_and_says_where(tmp_path):
    gate, all_gates = build_gate(tmp_path, JOBS % "Dying() if i == 2 else Outcome()", tail=JOBS_TABLE, gpus=["L4"])
    assert all_gates == until("build")
    assert gate.summary.startswith(
        "the compiling process exited with status 5 before it answered while compiling tile 2"
    )


BUILTIN = replace(HONEST, builtin=True)
SEVEN, NINE = replace(SHORT, batch=7), replace(SHORT, batch=9)  # nothing serves the one, an L4 alone the other


def test_what_a_kernel_does_not_serve_is_left_out_of_gate_build():
    record = run_chain(request_of(BUILTIN, SHORT, NINE, until="build", gpus=["L4", "H200"]))
    gate = gate_of(record, "build")
    assert gate.status.value == "passed"
    assert gate.details[0] == "H200: 1 of 2 cases left out, not served: it is for the L4, this is a H200"
    assert [case.arms[0].status for case in record.cases] == ["not measured", "not measured"]


def test_a_case_that_a_kernel_refuses_is_refused_and_the_others_go_on():
    record = run_chain(request_of(BUILTIN, SEVEN, NINE, SHORT))
    assert statuses(record)["correct"] == "passed"
    assert "2 of 2 cases on the CPU" in gate_of(record, "correct").summary
    assert gate_of(record, "correct").summary.endswith("; 1 not served")
    refused, served, _ = record.cases
    assert (refused.correct, served.correct) == (None, True)
    assert [(arm.status, arm.reason) for arm in refused.arms] == [
        ("refused", "it does not serve 7 sequences"),
        ("not measured", "fake_attention does not serve it"),
    ]


# Gate import.


def import_gate(folder, code, **kwargs):
    record = run_chain(request_of(write_subject(folder, code, **kwargs), until="import"))
    assert record.complete
    return gate_of(record, "import"), statuses(record)


def test_import_says_file_and_signature(tmp_path):
    code = "def attend(q, k, v, *, causal, softmax_scale): pass\n"
    gate, _ = import_gate(tmp_path, code)
    assert gate.summary == "written_subject:attend loads in a fresh process"
    assert gate.details == ["loaded written_subject.py", "signature (q, k, v, *, causal, softmax_scale)"]


@pytest.mark.parametrize(
    ("code", "summary"),
    [
        ("raise RuntimeError('symbol not found: _ZN4attn')", "RuntimeError: symbol not found: _ZN4attn"),
        ("import os; os._exit(9)", "exited with status 9 before it answered"),
        (
            "atend = print",
            "the module has no attribute 'attend'",
        ),
        (
            "def attend(q, k, v): pass",
            "the harness passes (Tensor, Tensor, Tensor, causal=False, softmax_scale=None)",
        ),
    ],
)
def test_broken_module_fails_gate_import(tmp_path, code, summary):
    gate, all_gates = import_gate(tmp_path, code + "\n")
    assert all_gates == until("import")
    assert gate.summary.startswith("written_subject:attend: ")
    assert summary in gate.summary
    assert str(tmp_path) not in gate.model_dump_json()


@pytest.fixture
def hang(tmp_path, monkeypatch):
    """Return code that hangs. No worker is waited for from then on: a loaded machine imports torch at leisure."""
    hangs = tmp_path / "hangs"
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1e4 * hangs.exists(), sleep=time.sleep)
    monkeypatch.setattr(worker, "time", clock)
    return f"open({str(hangs)!r}, 'w').close(); time.sleep(600)"


def test_import_that_hangs_fails_gate_import(tmp_path, hang):
    gate, all_gates = import_gate(tmp_path, f"import time\n{hang}\n", tail="[limits]\nimport_s = 120")
    assert all_gates == until("import")
    assert gate.summary == "written_subject:attend: no answer within 120 s"
    assert gate.hint.endswith("; [limits] import_s, or --time-limit, allows more")
    assert any("written_subject.py" in line for line in gate.details)


# Gate correct.


def test_crash_keeps_the_cases_before_it_and_those_after_are_still_checked(tmp_path):
    code = HONEST_CODE.replace("attend", "attend as honest") + (
        "def attend(q, k, v, *, causal, softmax_scale):\n"
        "    if q.shape[2] == 66:\n"
        "        import os; print('last words', flush=True); os.kill(os.getpid(), 11)\n"
        "    return honest(q, k, v, causal=causal)\n"
    )
    recorder = Recorder()
    problems = (SHORT, replace(SHORT, seqlen_q=66), replace(SHORT, seqlen_q=67))
    record = run_chain(request_of(write_subject(tmp_path, code), *problems), recorder)
    gate = gate_of(record, "correct")
    assert statuses(record)["correct"] == "failed"
    assert statuses(record)["quick"] == "not reached"
    assert gate.summary == ("1 of 3 cases ended the process, b1_h3_s66_d64_fp16: killed by SIGSEGV; 2 right")
    assert "last words" in gate.details
    assert gate.hint.startswith("the kernel may have read or written outside of its tensors")
    assert "b1_h3_s66_d64_fp16: killed by SIGSEGV" in gate.details
    reasons = [case.arms[0].reason for case in record.cases]
    assert (reasons[0], reasons[2]) == ("another case failed gate correct", "another case failed gate correct")
    assert [case.correct for case in record.cases] == [True, False, True]
    assert [case.arms[0].status for case in record.cases] == ["not measured", "failed", "not measured"]
    assert record.complete
    assert [case.correct for case in recorder.saved[-4].cases] == [True, None, None]


def test_after_three_crashes_the_rest_is_not_checked(monkeypatch):
    started = []

    def crash(task, payload, *, on_event, **_):
        started.append([case["name"] for case in payload["cases"]])
        on_event({"event": "start", "name": payload["cases"][0]["name"]})
        return TaskResult(ok=False, data=None, reason="killed by SIGSEGV", seconds=1.0, output_tail=f"{len(started)}\n")

    monkeypatch.setitem(chain._GATES, "import", lambda _: passed("left out"))
    monkeypatch.setattr(run, "run_task", crash)
    problems = [replace(SHORT, seqlen_q=size) for size in range(65, 70)]
    record = run_chain(request_of(HONEST, *problems))
    names = [case.name for case in record.cases]
    assert started == [names, names[1:], names[2:]]
    gate = gate_of(record, "correct")
    assert gate.summary == (
        f"3 of 5 cases ended the process, {', '.join(names[:3])}: killed by SIGSEGV; 0 right, 2 not checked"
    )
    assert gate.details == [*(f"{name}: killed by SIGSEGV" for name in names[:3]), "1"]
    assert [case.correct for case in record.cases] == [False, False, False, None, None]


@pytest.mark.parametrize("sizes", [(65,), (65, 66)])
def test_a_call_that_leaves_the_gpu_unusable_is_named_with_what_mends_it(monkeypatch, sizes):
    reason = "stress draw odd_offset: raised AcceleratorError: CUDA error: misaligned address"

    def lose(task, payload, *, on_event, **_):
        name = payload["cases"][0]["name"]
        on_event({"event": "start", "name": name})
        case = {"name": name, "status": "failed", "reason": reason, "accuracy": None, "stand_in": ""}
        on_event({"event": "case", "case": case})
        lost = f"SubjectError: case {name} left the GPU unusable: CUDA error"
        return TaskResult(ok=False, data=None, reason=lost, seconds=1.0, output_tail="")

    monkeypatch.setitem(chain._GATES, "import", lambda _: passed("left out"))
    monkeypatch.setattr(run, "run_task", lose)
    record = run_chain(request_of(HONEST, *(replace(SHORT, seqlen_q=size) for size in sizes)))
    gate = gate_of(record, "correct")
    assert reason in gate.summary
    assert gate.hint == 'not_served = ["odd_offset"] in the kernel.toml says that the kernel does not take such inputs'
    assert "left the GPU unusable" in "".join(gate.details)


def test_hang_fails_its_case_says_where_and_ends_the_gate(tmp_path, hang):
    code = f"import time\ndef attend(q, k, v, *, causal, softmax_scale): {hang}\n"
    subject = write_subject(tmp_path, code, tail="[limits]\ncorrect_cpu_s = 120")
    record = run_chain(request_of(subject, SHORT, replace(SHORT, seqlen_q=66)))
    assert statuses(record)["correct"] == "failed"
    gate = gate_of(record, "correct")
    assert gate.summary == ("1 of 2 cases hung, b1_h3_s65_d64_fp16: no answer within 120 s; 0 right, 1 not checked")
    said = "the last lines of its output say where it hung; [limits] correct_cpu_s, or --time-limit, allows more"
    assert gate.hint == said
    assert [case.correct for case in record.cases] == [False, None]
    assert any("line 2 in attend" in line for line in gate.details)


def test_raise_fails_its_case_and_the_others_are_still_checked(tmp_path):
    code = HONEST_CODE.replace("attend", "attend as honest") + (
        "def attend(q, k, v, *, causal, softmax_scale):\n"
        "    if q.shape[2] == 65: raise ValueError('65 is odd')\n"
        "    return honest(q, k, v, causal=causal)\n"
    )
    record = run_chain(request_of(write_subject(tmp_path, code), SHORT, replace(SHORT, seqlen_q=66)))
    assert [case.correct for case in record.cases] == [False, True]
    assert gate_of(record, "correct").summary.startswith(
        "wrong in 1 of 2 cases; b1_h3_s65_d64_fp16: the first call: raised ValueError: 65 is odd (written_subject.py:"
    )
    assert record.cases[0].arms[0].status == "failed"


def test_a_stand_in_that_is_right_shows_nothing_of_the_subject():
    builtin = replace(HONEST, builtin=True)
    record = run_chain(request_of(builtin, SHORT, replace(SHORT, causal=True)))
    assert "2 of 2 cases on the CPU, 1 of them by plain torch (a GPU runs a kernel): error" in (
        gate_of(record, "correct").summary
    )
    assert [(case.correct, case.stand_in) for case in record.cases] == [
        (True, ""),
        (None, "plain torch (a GPU runs a kernel)"),
    ]
    assert "correct (for a kernel that ran in place of the GPU's) passed; launch" in last_word(record)[1]


def test_a_record_says_which_state_of_a_repository_holds_the_sources():
    tree = TreeState(commit="a" * 40, dirty=True)
    told = replace(request_of(HONEST, SHORT), tree=tree, until="sources")  # as a borrowed machine is told
    assert run_chain(told).tree == tree
    assert run_chain(replace(told, tree=None)).subject.tree == subject_tree(HONEST) is not None
    ours = run_chain(replace(told, tree=None, subject=replace(HONEST, builtin=True)))
    assert ours.subject.tree is None
    assert ours.tree == TreeState(commit=ours.environment.commit, dirty=ours.environment.dirty)


def test_a_name_of_ours_says_nothing_about_a_kernel_of_someone_else(monkeypatch):
    for gate in ("build", "import"):
        monkeypatch.setitem(chain._GATES, gate, lambda _: passed("left out: it takes seconds"))
    request = attention_request("honest_torch", attention(1, 1, 16, 64))
    request = replace(request, subject=replace(request.subject, name="forward_short_gluon"))
    record = run_chain(request)
    assert statuses(record)["correct"] == "passed"
    assert record.cases[0].stand_in == ""


# Interruption.


def test_ctrl_c_saves_what_was_finished_and_goes_on_up(monkeypatch):
    def interrupt(run):
        run.update_case(next(iter(run.cases)), correct=True)
        raise KeyboardInterrupt

    monkeypatch.setitem(chain._GATES, "correct", interrupt)
    recorder = Recorder()
    with pytest.raises(KeyboardInterrupt):
        run_chain(request_of(), recorder)
    last = recorder.saved[-1]
    assert not last.complete
    assert last.incomplete_reason == "interrupted in gate correct"
    assert statuses(last)["import"] == "passed"
    assert statuses(last)["correct"] == "not reached"
    assert last.cases[0].correct is True


def test_error_of_the_harness_is_saved_and_raised(monkeypatch):
    def fail(run):
        raise OSError("disk on fire")

    monkeypatch.setitem(chain._GATES, "build", fail)
    recorder = Recorder()
    with pytest.raises(OSError, match="disk on fire"):
        run_chain(request_of(), recorder)
    assert recorder.saved[-1].incomplete_reason == "the harness failed: OSError: disk on fire in gate build"


# What a machine without a GPU cannot do is no fault of a kernel.


def test_a_module_that_asks_for_a_driver_is_not_possible_here(tmp_path):
    line = 'raise RuntimeError("0 active drivers ([]). There should only be one.")'
    record = run_chain(request_of(write_subject(tmp_path, f"{line}\n{HONEST_CODE}")))
    assert gate_of(record, "import").status is GateStatus.NOT_POSSIBLE
    assert "it asks for a GPU driver, and there is none here" in gate_of(record, "import").summary
    assert gate_of(record, "correct").status is GateStatus.NOT_POSSIBLE


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("Found no NVIDIA driver on your system.", "it asks for a GPU driver, and there is none here"),
        ("Torch not compiled with CUDA enabled", "it asks for a GPU driver, and there is none here"),
        ("libcuda.so.1: cannot open shared object file", "it asks for a GPU driver, and there is none here"),
        ("No CUDA GPUs are available", "it asks for a GPU driver, and there is none here"),
        ("'InterpreterBuilder' object has no attribute 'create_x'", "Triton's interpreter cannot run it"),
        ("head_dim 96", ""),
    ],
)
def test_what_a_machine_without_a_gpu_cannot_do_is_known_by_what_it_says(said, why):
    assert not_here(said) == not_here("", RuntimeError(said)) == why


def test_a_number_that_the_interpreter_hands_over_as_it_is_is_no_fault():
    class InterpreterError(Exception):
        pass

    cause = AttributeError("'float' object has no attribute 'to'")
    error = InterpreterError(repr(cause))
    error.__cause__ = cause
    assert not_here(str(error), error) == "Triton's interpreter cannot run it"
    assert not_here(str(cause), cause) == ""


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        ('RuntimeError("\\"addmm\\" not implemented for \'BFloat16\'")', GateStatus.NOT_POSSIBLE),
        ('NotImplementedError("head_dim 96")', GateStatus.FAILED),
    ],
)
def test_a_call_that_a_cpu_cannot_run_is_not_possible_here(tmp_path, raised, status):
    code = f"{HONEST_CODE}\ndef attend(*args, **kwargs):\n    raise {raised}\n"
    record = run_chain(request_of(write_subject(tmp_path, code)))
    assert gate_of(record, "correct").status is status, gate_of(record, "correct").summary
