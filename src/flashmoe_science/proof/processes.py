"""Processes that end with this one, with all that they started; and signals that ask for an end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

OUTPUT_TAIL_BYTES = 16 * 1024
REASON_LIMIT = 2000  # characters

# Runs a command in its own group, and ends that group when this process is gone, however it went: a signal that kills
# leaves nobody to do it. ``argv``: a pipe that nobody writes to, one for why the command cannot start, the command.
_GUARD = """
import os, resource, signal, subprocess, sys, threading
held, said = int(sys.argv[1]), int(sys.argv[2])
def watch():
    os.read(held, 1)
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
try:
    code = subprocess.Popen(sys.argv[3:], stdin=subprocess.DEVNULL).wait()
except OSError as error:
    os.write(said, (error.strerror or str(error)).encode())
    os._exit(127)
if code < 0:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # what ends a run, and leaves its record

_STARTED_IN = Path.cwd()  # what a relative entry of PYTHONPATH is relative to


@dataclass(frozen=True)
class TaskResult:
    """How a task ended."""

    ok: bool
    data: dict[str, Any] | None
    reason: str  # why it is not ok
    seconds: float
    output_tail: str  # the end of what the process wrote to stdout and stderr
    timed_out: bool = False  # it was silent for longer than allowed
    limit_reached: bool = False  # it ran for as long as it might in all
    given_up: bool = False  # another rank of its task failed
    spent: Mapping[str, float] = field(default_factory=dict)  # seconds of its parts, of a worker that told


class ProcessGroup:
    """A process with all its descendants. Its output is drained, so that it never blocks, and the end of it is kept."""

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str | None = None, pass_fds: Sequence[int] = ()
    ) -> None:
        self._tail = bytearray()
        self._killed = False
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_import_path(), **env},
            cwd=cwd,
            pass_fds=pass_fds,
            start_new_session=True,  # a group of its own to kill, and a terminal's Ctrl-C reaches only us
        )
        self._reader = threading.Thread(target=self._drain, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def _drain(self, stream: IO[bytes]) -> None:
        with stream:
            while chunk := os.read(stream.fileno(), 65536):
                self._tail += chunk
                del self._tail[:-OUTPUT_TAIL_BYTES]

    def output_tail(self) -> str:
        """Return the end of the output so far."""
        return bytes(self._tail).decode("utf-8", errors="replace")

    def kill(self) -> None:
        """Kill what is left of the group and reap it. Safe to call again."""
        if self._killed:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver call may hold it for ever: go on without it
            self.process.wait(10.0)
        self._reader.join(timeout=1.0)  # a descendant in a session of its own may hold the pipe for ever
        self._killed = True


def _import_path() -> dict[str, str]:
    """Return ``PYTHONPATH`` for a process that starts in another folder, where there is one: no entry is relative."""
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {"PYTHONPATH": os.pathsep.join(str(_STARTED_IN / entry) for entry in entries)} if entries else {}


def run_command(
    argv: Sequence[str],
    *,
    cwd: str,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    on_wait: Callable[[float], None] | None = None,
) -> TaskResult:
    """Run a command to its end; ``data`` is empty. A command that cannot start is a result too.

    It ends with this process, whatever ends that. ``on_wait`` is called now and then with the seconds so far.
    """
    start = time.monotonic()
    held, hold = os.pipe()
    said, say = os.pipe()
    group: ProcessGroup | None = None
    try:
        with _interrupt_put_off():
            guard = [sys.executable, "-I", "-S", "-c", _GUARD, str(held), str(say)]
            group = ProcessGroup([*guard, *argv], env=env or {}, cwd=cwd, pass_fds=(held, say))
        os.close(say)
        say = -1
        reason = _wait(group.process, start, timeout_s, on_wait)
        if failure := os.read(said, REASON_LIMIT).decode(errors="replace") if reason else "":
            reason = f"cannot start {argv[0]}: {failure}"
    except OSError as error:
        reason = f"cannot start {argv[0]}: {error.strerror}"
    finally:
        if group is not None:
            group.kill()
        for handle in (held, hold, said, *([say] if say >= 0 else [])):
            os.close(handle)
    ok, seconds = reason == "", time.monotonic() - start
    return TaskResult(ok, {} if ok else None, reason, seconds, group.output_tail() if group is not None else "")


def _wait(
    process: subprocess.Popen[bytes], start: float, timeout_s: float, on_wait: Callable[[float], None] | None
) -> str:
    """Return how a process ended, or an empty text for status 0."""
    while (left := start + timeout_s - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return describe_exit(process.wait(min(left, 1.0)))
        if on_wait is not None:
            on_wait(time.monotonic() - start)
    process.kill()  # the command holds the pipe on which the guard says why it did not start
    return f"did not finish within {timeout_s:g} s"


@contextlib.contextmanager
def _interrupt_put_off() -> Iterator[None]:
    """Let signals wait for the end of the block: a process that is half started is one that nobody could kill."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: handler for number in STOPPING if callable(handler := signal.getsignal(number))}
    came: list[int] = []
    for number in handlers:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let every signal that asks for an end do what Ctrl-C does: what runs is ended, and what is finished is kept."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = [number for number in STOPPING if signal.getsignal(number) == signal.SIG_DFL]  # nohup ignores one

    def stop(_: int, __: object) -> None:
        for number in asked:
            signal.signal(number, signal.SIG_IGN)  # the record is being written
        raise KeyboardInterrupt

    for number in asked:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in asked:
            signal.signal(number, signal.SIG_DFL)


def describe_exit(code: int) -> str:
    """Return how a process ended, or an empty text for status 0."""
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exited with status {code}" if code else ""
