"""A worker's crash, hang or kill is a result; and nothing that it does spoils or blocks its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashmoe_science.proof import processes, worker
from flashmoe_science.proof.processes import ProcessGroup, run_command
from flashmoe_science.proof.spent import sum_up
from flashmoe_science.proof.worker import TaskCall, describe_error, run_task, run_tasks

from .processes import is_alive, wait_for, wait_until_dead

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def forked_workers():
    """Start workers anew: they are what is tested."""


LIMIT_S = 120.0  # more than a worker needs to start where every core is busy


def run(name, payload=None, *, timeout_s=LIMIT_S, **kwargs):
    return run_task(f"tests.proof.worker_tasks:{name}", payload or {}, timeout_s=timeout_s, **kwargs)


@pytest.fixture
def clock(monkeypatch):
    """Give the parent a clock that a test can put forward, so that no limit is short where a worker has to start."""
    clock = SimpleNamespace(ahead=lambda: 0.0, sleep=time.sleep)
    clock.monotonic = lambda: time.monotonic() + clock.ahead()
    monkeypatch.setattr(worker, "time", clock)
    return clock


def test_events_arrive_in_order_and_at_once(tmp_path):
    seen = []

    def note(event):
        seen.append(event["i"])
        (tmp_path / str(event["i"])).touch()  # without this the task does not go on

    result = run("count_when_told", {"n": 3, "folder": str(tmp_path)}, on_event=note)
    assert (result.data, result.reason) == ({"n": 3}, "")
    assert seen == [0, 1, 2]


def test_a_task_tells_where_its_seconds_went():
    result = run("spend")
    assert set(result.spent) == {"start", "outer", "inner"}
    assert result.spent["inner"] >= 0.3
    assert 0.1 <= result.spent["outer"] < result.spent["inner"]
    assert sum(result.spent.values()) <= result.seconds
    assert sum_up({"outer": 0.1, "inner": 0.31, "none": 0.0}, 0.5) == "inner 0.3 s, outer 0.1 s, the rest 0.1 s"


def test_an_error_inside_of_a_library_is_placed_where_the_user_called_it():
    with pytest.raises(ValueError, match="einsum") as caught:
        torch.einsum("i", *[])
    assert "(test_worker.py:" in describe_error(caught.value)
    with pytest.raises(RuntimeError) as caught_in_interpreter:
        raise RuntimeError("in the interpreter") from caught.value
    assert describe_error(caught_in_interpreter.value) == describe_error(caught.value).replace(
        describe_error(caught.value).partition(" (test_worker")[0], "RuntimeError: in the interpreter"
    )


def test_timeout_is_about_silence(clock, tmp_path):
    seen: list[int] = []
    clock.ahead = lambda: 0.6 * LIMIT_S * len(seen)

    def note(event):
        seen.append(event["i"])
        (tmp_path / str(event["i"])).touch()

    result = run("count_when_told", {"n": 4, "folder": str(tmp_path)}, on_event=note)
    assert (result.data, result.reason) == ({"n": 4}, "")
    assert result.seconds > 2 * LIMIT_S


def test_raise_is_a_result_with_type_message_and_place():
    result = run("raise_error", {"message": "the tile is too large\nsecond line"})
    assert not result.ok
    assert result.data is None
    assert result.reason.startswith("ValueError: the tile is too large (worker_tasks.py:")
    assert str(ROOT) not in result.reason
    assert "second line" in result.output_tail


def test_real_segmentation_fault_leaves_its_stack_in_the_output():
    result = run("crash")
    assert result.reason == "killed by SIGSEGV"
    assert "worker_tasks.py" in result.output_tail


def test_hang_is_ended_and_says_where(clock, monkeypatch, tmp_path):
    groups = []

    class Group(ProcessGroup):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            groups.append(self)

    hangs = tmp_path / "hangs"
    clock.ahead = lambda: LIMIT_S if hangs.exists() else 0.0
    # What the process says when it is asked may take its time.
    clock.sleep = lambda _: wait_for(lambda: "in hang" in groups[0].output_tail(), LIMIT_S)
    monkeypatch.setattr(worker, "ProcessGroup", Group)
    result = run("hang", {"file": str(hangs)})
    assert result.reason == "no answer within 120 s"
    assert "about to hang" in result.output_tail
    assert "in hang" in result.output_tail


def test_a_task_is_ended_after_its_time_in_all_however_much_it_says(clock):
    seen: list[object] = []
    clock.ahead = lambda: 100.0 * len(seen)
    result = run("hang_after_event", limit_s=90.0, on_event=seen.append)
    assert (result.ok, result.limit_reached, result.timed_out) == (False, True, False)
    assert result.reason.startswith("stopped after 1")
    assert run("answer", limit_s=1000.0).limit_reached is False


def test_garbage_and_huge_output_do_not_spoil_the_answer():
    result = run("print_garbage", {"bytes": 20_000_000})
    assert result.data == {"real": True}
    assert result.output_tail.endswith("the end\n")
    assert len(result.output_tail) <= 16 * 1024


def test_garbage_on_the_answer_pipe_is_said():
    assert "something else wrote to the answer pipe" in run("write_to_every_pipe").reason


def test_answer_that_comes_together_with_garbage_does_not_cover_it_up():
    ended = []
    # While the handler of the event waits, garbage and answer pile up in the pipe, to be read at once.
    result = run("emit_then_write_to_every_pipe", on_event=lambda event: ended.append(wait_until_dead(event["pid"])))
    assert ended == [True]
    assert not result.ok
    assert "something else wrote to the answer pipe" in result.reason


def test_nan_in_an_answer_is_refused():
    assert "not JSON compliant" in run("not_json").reason


def test_grandchildren_do_not_block_and_do_not_survive():
    result = run("leave_children")
    assert result.ok, result.reason
    assert is_alive(result.data["stray"])  # in a session of its own, it holds the pipe of the output for 600 s
    os.kill(result.data["stray"], signal.SIGKILL)
    assert wait_until_dead(result.data["near"])


def test_death_is_seen_though_a_fork_holds_the_pipe():
    result = run("die_leaving_a_fork")
    assert result.reason == "killed by SIGKILL"
    assert result.seconds < LIMIT_S


def test_current_folder_shadows_nothing(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    monkeypatch.chdir(tmp_path)
    result = run("where", env={"A_VARIABLE": "1"})
    assert result.ok, result.reason
    assert result.data["variable"] == "1"
    assert result.data["path"] == sys.path
    assert not result.data["json"].startswith(str(tmp_path))


def test_several_tasks_run_at_the_same_time_and_fail_alone():
    seen = []
    calls = [
        TaskCall("tests.proof.worker_tasks:count", {"n": 2}, LIMIT_S),
        TaskCall("tests.proof.worker_tasks:die", {"signal": int(signal.SIGSEGV)}, LIMIT_S),
        TaskCall("tests.proof.worker_tasks:hang", {"file": os.devnull}, 3.0),
    ]
    results = run_tasks(calls, on_event=lambda index, event: seen.append((index, event["i"])))
    assert [r.reason for r in results] == ["", "killed by SIGSEGV", "no answer within 3 s"]
    assert seen == [(0, 0), (0, 1)]


def test_a_rank_that_waits_for_one_that_is_done_is_told_and_keeps_what_it_found():
    calls = [
        TaskCall("tests.proof.worker_tasks:meet_on_rank_1", {}, LIMIT_S, LIMIT_S, rank=rank, ranks=2) for rank in (0, 1)
    ]
    done, waiting = run_tasks(calls)
    assert done.ok
    said = "ranks do not agree: rank 0 is done, and rank 1 is at the first call, with a fault"
    assert said in waiting.reason


def test_error_in_on_event_ends_the_worker():
    def fail(event):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        run("count", {"n": 2, "pause_s": 30}, on_event=fail)
    children = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, check=True).stdout
    assert b"worker import main" not in children


PARENT = """
import sys
sys.path[:0] = {path!r}
from flashmoe_science.proof.worker import run_task
try:
    run_task("tests.proof.worker_tasks:note_pid_and_hang", {{"file": {file!r}}}, timeout_s=600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL", "SIGTERM"])
def test_worker_dies_with_its_parent(tmp_path, name):
    file = tmp_path / "pid"
    script = PARENT.format(path=[str(ROOT), str(ROOT / "src")], file=str(file))
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert wait_for(lambda: file.exists() and file.read_text(), LIMIT_S)
    pid = int(file.read_text())
    assert is_alive(pid)
    parent.send_signal(signal.Signals[name])
    output, _ = parent.communicate(timeout=LIMIT_S)
    assert wait_until_dead(pid)
    assert ("interrupted" in output) == (name == "SIGINT")


def test_command_output_status_and_limit(tmp_path):
    ok = run_command([sys.executable, "-c", "print('built')"], cwd=str(tmp_path), timeout_s=LIMIT_S)
    assert (ok.ok, ok.reason, ok.output_tail) == (True, "", "built\n")
    failed = run_command([sys.executable, "-c", "raise SystemExit(2)"], cwd=str(tmp_path), timeout_s=LIMIT_S)
    assert (failed.ok, failed.reason) == (False, "exited with status 2")
    slow = run_command(["sleep", "600"], cwd=str(tmp_path), timeout_s=0.5)
    assert (slow.ok, slow.reason) == (False, "did not finish within 0.5 s")
    absent = run_command(["no-such-compiler"], cwd=str(tmp_path), timeout_s=LIMIT_S)
    assert absent.reason == "cannot start no-such-compiler: No such file or directory"


def test_a_command_in_another_folder_imports_what_a_relative_path_names(tmp_path, monkeypatch):
    (tmp_path / "here" / "packages").mkdir(parents=True)
    (tmp_path / "here" / "packages" / "only_here.py").write_text("")
    monkeypatch.setattr(processes, "_STARTED_IN", tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["packages", "", "/nowhere"]))
    code = "import only_here, os; print(os.environ['PYTHONPATH'])"
    done = run_command([sys.executable, "-c", code], cwd=str(tmp_path), timeout_s=LIMIT_S)
    assert done.output_tail.strip() == os.pathsep.join([str(tmp_path / "here" / "packages"), "/nowhere"])


def test_an_interrupt_while_a_command_starts_leaves_no_process(monkeypatch):
    started: list[int] = []

    class Interrupted(ProcessGroup):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self.process.pid)
            signal.raise_signal(signal.SIGINT)  # before anybody holds what was started

    monkeypatch.setattr(processes, "ProcessGroup", Interrupted)
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            run_command([sys.executable, "-c", "import time; time.sleep(600)"], cwd=".", timeout_s=600)
        assert wait_until_dead(started[0])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, outside)
