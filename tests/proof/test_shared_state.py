"""What a subject must leave alone: the code that checks it, torch's kernels and settings, variables, and the clock."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import types
import weakref

import pytest
import torch

from flashmoe_science.proof.measure import allowed_error, correctness
from flashmoe_science.proof.measure.shared_state import Guard, SharedState
from flashmoe_science.proof.worker import run_task

from .chain import SUBJECTS, write_subject
from .fake_operator import OPERATOR, Problem

IMPORT = "flashmoe_science.proof.measure.tasks:import_subject"
CASE = OPERATOR.as_table(Problem(1, 2, 33, 16))


def test_nothing_differs_where_nothing_was_done():
    assert Guard().changes() == ""


@pytest.mark.parametrize(
    ("module", "name", "other"),
    [
        (allowed_error, "max_error", lambda *_: 0.0),
        (correctness, "NAN_BYTE", 0x00),
        (allowed_error, "Expected", types.SimpleNamespace),
    ],
)
def test_a_part_of_the_harness_that_was_replaced_is_named(monkeypatch, module, name, other):
    changes = Guard().changes
    monkeypatch.setattr(module, name, other)
    assert f"{module.__name__}.{name} is another" in changes()


def test_another_body_of_the_same_function_is_named(monkeypatch):
    changes = Guard().changes
    monkeypatch.setattr(allowed_error.max_error, "__code__", (lambda answer, exact: 0.0).__code__)
    assert f"{allowed_error.__name__}.max_error is another function" in changes()


def test_what_the_first_call_of_vmap_registers_is_no_change():
    """FlexAttention makes its masks with it. In a process of its own, where nobody has called it."""
    text = (
        "import torch; from flashmoe_science.proof.measure.shared_state import Guard; changes = Guard().changes;"
        "torch.func.vmap(torch.neg)(torch.zeros(1)); print(changes() or 'nothing')"
    )
    child = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=True)
    assert child.stdout.strip() == "nothing"


def test_another_kernel_behind_an_operator_of_torch_is_named():
    changes = Guard().changes
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("hypot", lambda a, b: a, "CPU")
        assert changes() == "another kernel is registered for aten::hypot"
    finally:
        library._destroy()


def test_a_variable_that_only_libraries_see_is_named():
    changes = SharedState().changes
    ctypes.CDLL(None).setenv(b"CUBLAS_WORKSPACE_CONFIG", b":16:8", 1)
    try:
        assert changes() == "the variable CUBLAS_WORKSPACE_CONFIG is :16:8, and was not set"
    finally:
        ctypes.CDLL(None).unsetenv(b"CUBLAS_WORKSPACE_CONFIG")


def test_variables_that_say_where_files_lie_are_left_to_the_subject(monkeypatch):
    changes = SharedState().changes
    monkeypatch.setenv("TRITON_CACHE_DIR", "here")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setenv("KMP_INIT_AT_FORK", "FALSE")  # as importing scikit-learn does
    assert changes() == ""
    monkeypatch.setenv("KMP_BLOCKTIME", "0")
    assert changes() == "the variable KMP_BLOCKTIME is 0, and was not set"


def test_a_thread_of_the_subject_is_named_and_those_of_python_are_not():
    changes, end = SharedState().changes, threading.Event()

    def disturb():
        end.wait()

    threads = [threading.Thread(target=disturb), threading.Thread(target=end.wait)]
    for thread in threads:
        thread.start()
    try:
        assert changes().startswith("a thread of its own runs (test_shared_state.py:")
        assert changes().count("thread") == 1
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert changes() == ""


SETTINGS = {
    "torch.backends.cuda.enable_cudnn_sdp(False)": "torch.backends.cuda.cudnn_sdp_enabled() is False",
    "torch._C._set_sdp_priority_order([2, 1, 0, 3, 4])": "the priority of SDPA's backends is [2, 1, 0, 3, 4]",
    "torch.set_num_threads(3)": "torch.get_num_threads() is 3",
    "torch.overrides.BaseTorchFunctionMode().__enter__()": "the number of modes that see every call of torch is 1",
    "sys.setprofile(lambda *_: None)": "sys.getprofile() is <function",
    "threading.settrace(lambda *_: None)": "threading.gettrace() is <function",
    "gc.disable()": "gc.isenabled() is False",
    "gc.freeze()": "gc.get_freeze_count() > 0 is True",
    "gc.callbacks.append(print)": "gc.callbacks is 1",
    "sys.setswitchinterval(1e-6)": "sys.getswitchinterval() is 1e-06",
    "signal.setitimer(signal.ITIMER_PROF, 1e6, 1e6)": "the timers of signal.setitimer is [0.0, 0.0, 1000000.0]",
    "os.nice(1)": "the priority of this process is",
    "os.environ['CUDA_LAUNCH_BLOCKING'] = '1'": "the variable CUDA_LAUNCH_BLOCKING is 1, and was not set",
    "os.putenv('NVIDIA_TF32_OVERRIDE', '1')": "the variable NVIDIA_TF32_OVERRIDE is 1, and was not set",
}


def test_what_a_caller_holds_is_freed_at_once():
    """A frame that refers to itself kept copies of all inputs on the GPU until a collection."""

    def look():
        held = torch.zeros(1)
        state = SharedState()
        assert state.changes() == ""
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        assert look()() is None
    finally:
        gc.enable()


def test_each_handicap_of_the_baselines_that_a_module_sets_up_is_named(tmp_path):
    code = "\n".join(["import gc, os, signal, sys, threading, torch", "torch.set_num_threads(2)", *SETTINGS])
    subject = write_subject(tmp_path, f"{code}\ndef attend(q, k, v, *, causal, softmax_scale):\n    return q\n")
    result = run_task(IMPORT, {"subject": subject.to_json(), "case": CASE}, timeout_s=120)
    assert result.data is not None, result.reason
    assert result.data["failure"].startswith("importing it changes what all arms share: ")
    assert [said for said in SETTINGS.values() if said not in result.data["failure"]] == []


def test_the_record_names_the_flags_of_torch():
    from flashmoe_science.proof.measure.environment import environment

    settings = environment().settings
    assert settings["torch.backends.cuda.cudnn_sdp_enabled()"] == "True"
    assert "the priority of SDPA's backends" in settings


def test_a_module_that_replaces_its_checks_fails_at_import():
    from flashmoe_science.operators.attention import OPERATOR as ATTENTION
    from flashmoe_science.proof.subject.loading import load_subject

    problem = {"batch": 1, "heads": 1, "seqlen_q": 16, "head_dim": 16, "dtype": "fp16"}
    case = ATTENTION.as_table(ATTENTION.parse_case(problem))
    subject = load_subject(str(SUBJECTS / "replaces_checks"))
    result = run_task(IMPORT, {"subject": subject.to_json(), "case": case}, timeout_s=120)
    assert result.data is not None, result.reason
    baseline = "flashmoe_science.operators.baselines.attention.Sdpa.bind"
    times = ("time.perf_counter", "torch.cuda.Event.elapsed_time")
    for name in (*times, "torch.allclose", "torch.distributed.all_reduce", baseline):
        assert f"{name} is another function" in result.data["failure"]


@pytest.fixture(autouse=True)
def as_before():
    yield
    assert gc.isenabled()
    assert sys.getprofile() is None
    assert "CUDA_LAUNCH_BLOCKING" not in os.environ
