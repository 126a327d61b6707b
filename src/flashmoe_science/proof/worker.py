"""A fresh process that runs one task. Its crash, hang or kill is a result, not an accident.

The two sides talk over pipes of their own, one JSON document a line. Whatever a subject prints goes elsewhere, so it
cannot spoil an answer::

    parent -- request pipe --> child    a line {"task", "payload"}, then a line for each question; kept open: its end
                                        tells that the parent died
    parent <-- answer pipe --- child    lines {"event": ...}, {"ask": ...} and {"meet": ...}, then one {"result": ...}
                                        or {"error": ...}
    parent <-- output pipe --- child    stdout and stderr: the last part is kept
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import math
import os
import queue
import re
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from ..errors import OperatorError, ProofError
from . import spent
from .processes import REASON_LIMIT, ProcessGroup, TaskResult, describe_exit

_ANSWER_LIMIT_BYTES = 256 * 1024 * 1024  # no honest answer comes near this
_LIBRARY = re.compile(r"[/\\](?:torch|triton)[/\\]")  # frames that say nothing of the code on trial
_LEAD_S = 0.002  # until all ranks that met begin: longer than an answer is on its way
_POLL_S = 0.25  # how often deadlines and deaths are looked for while no answer comes

# The child takes over the parent's sys.path as it is: "python -m" would put the current folder before it.
_BOOT = "import sys; sys.path[:] = sys.argv[3:]; from flashmoe_science.proof.worker import main; main(*sys.argv[1:3])"

Emit = Callable[[dict[str, Any]], None]
Reply = Callable[[dict[str, Any]], dict[str, Any]]

_child: list[Reply] = []  # of a worker: what asks its parent, alone or with all ranks
_place = [0, 1]  # rank, and ranks


@dataclass(frozen=True)
class TaskCall:
    """One task to run in a process of its own."""

    task: str  # module:function, called as function(payload, emit) -> dict
    payload: dict[str, Any]
    timeout_s: float  # the longest silence: each event starts it anew
    limit_s: float | None = None  # the longest time in all
    env: Mapping[str, str] = field(default_factory=dict)  # added to this process's environment
    reply: Reply | None = None  # called in the parent with each question of the task; None: it may ask nothing
    rank: int = 0  # of ``ranks`` processes that run one task together, and meet
    ranks: int = 1


def run_task(
    task: str,
    payload: dict[str, Any],
    *,
    timeout_s: float,
    limit_s: float | None = None,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    env: Mapping[str, str] | None = None,
    reply: Reply | None = None,
) -> TaskResult:
    """Run ``task`` in a fresh process and wait for it.

    Args:
        task: ``module:function``; called as ``function(payload, emit)``, returns a dict of plain JSON values.
        payload: plain JSON values.
        timeout_s: the longest silence allowed; each event starts it anew.
        limit_s: the longest time in all.
        on_event: called here with every event that the task emits.
        env: variables added to this process's environment.
        reply: called here with what the task asks by ``ask``; returns plain JSON values.

    Returns:
        The outcome. Only ``on_event`` and Ctrl-C raise here, after the process is gone.
    """
    call = TaskCall(task, payload, timeout_s, limit_s, env or {}, reply)
    handler = None if on_event is None else lambda _, event: on_event(event)
    return run_tasks([call], on_event=handler)[0]


def run_tasks(
    calls: Sequence[TaskCall], *, on_event: Callable[[int, dict[str, Any]], None] | None = None
) -> list[TaskResult]:
    """Run several tasks at the same time, each in a process of its own; ``on_event`` gets the index of the call too.

    Calls of several ``ranks`` are one task: where all of them ``meet``, each gets what all have brought. The first that
    fails ends the others.
    """
    children: list[_Child] = []
    results: dict[int, TaskResult] = {}
    with selectors.DefaultSelector() as selector:
        try:
            for index, call in enumerate(calls):
                children.append(_Child(call))
                selector.register(children[index].answer, selectors.EVENT_READ, index)
            while len(results) < len(calls):
                selector.select(_POLL_S)
                for key in list(selector.get_map().values()):
                    child = children[key.data]
                    died = child.has_died()  # asked before reading: then the read is complete
                    for event in child.receive():
                        if on_event is not None:
                            on_event(key.data, event)
                    if child.is_over(died=died):
                        selector.unregister(key.fileobj)
                        results[key.data] = child.finish()
                failed = any(not result.ok for result in results.values())
                if not failed:
                    _let_meet(children, results)
                elif calls[0].ranks > 1:
                    left = [index for index in range(len(calls)) if index not in results]
                    results.update({index: children[index].give_up() for index in left})
        finally:
            for child in children:
                child.kill()
    return [results[index] for index in range(len(calls))]


def _let_meet(children: Sequence[_Child], ended: Container[int]) -> None:
    """Once all ranks wait for each other, hand out what they brought, or that they are at different steps."""
    waiting = {rank: child for rank, child in enumerate(children) if rank not in ended and child.brought is not None}
    if not waiting or any(rank not in ended for rank in range(len(children)) if rank not in waiting):
        return
    brought = [child.brought or {} for child in waiting.values()]
    answer: dict[str, Any] = {"values": [each["value"] for each in brought]}
    if len(waiting) < len(children) or len({each["step"] for each in brought}) > 1:
        places = [f"at {waiting[rank].place}" if rank in waiting else "done" for rank in range(len(children))]
        answer = {"differ": ", and ".join(f"rank {rank} is {place}" for rank, place in enumerate(places))}
    for child in waiting.values():
        child.brought = None
        child.send({**answer, "at": time.monotonic() + _LEAD_S})


class _Child:
    """The parent's side of one worker process."""

    def __init__(self, call: TaskCall) -> None:
        self._timeout_s = call.timeout_s
        self._reply = call.reply
        self.brought: dict[str, Any] | None = None  # to where all ranks meet; not None: it waits for the others
        self._start = time.monotonic()
        self._deadline = self._start + call.timeout_s
        self._end = math.inf if call.limit_s is None else self._start + call.limit_s
        self._buffer = bytearray()
        self._spent: dict[str, float] = {}
        self._outcome: tuple[bool, dict[str, Any] | None, str] | None = None
        self._closed = self._timed_out = self._limit_reached = False
        request_read, self._request = os.pipe()
        self.answer, answer_write = os.pipe()
        os.set_blocking(self.answer, False)
        argv = [sys.executable, "-u", "-c", _BOOT, str(request_read), str(answer_write), *sys.path]
        try:
            self._group = ProcessGroup(argv, env=call.env, pass_fds=(request_read, answer_write))
        finally:
            os.close(request_read)
            os.close(answer_write)
        table = {"task": call.task, "payload": call.payload, "parent": os.getpid(), "began": self._start}
        request = json.dumps({**table, "rank": call.rank, "ranks": call.ranks})
        # A thread writes: a payload larger than the pipe must not block us if the child dies while it starts.
        threading.Thread(target=self._send, args=(request.encode() + b"\n",), daemon=True).start()

    def _send(self, request: bytes) -> None:
        with contextlib.suppress(OSError):  # the child is gone: finish() says how it ended
            while request:
                request = request[os.write(self._request, request) :]

    def receive(self) -> list[dict[str, Any]]:
        """Read what has come and return the events in it."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.answer, 1 << 20):
                self._buffer += chunk
                if len(self._buffer) > _ANSWER_LIMIT_BYTES:
                    self._outcome = (False, None, "its answer does not end")
                    return []
            self._closed = True
        events = []
        # The first outcome stands: an answer that came together with garbage must not cover it up.
        while self._outcome is None and (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            if (event := self._read_line(line)) is not None:
                events.append(event)
        return events

    def _read_line(self, line: bytes) -> dict[str, Any] | None:
        self._deadline = time.monotonic() + self._timeout_s
        try:
            message = json.loads(line)
            if "event" in message:
                return dict(message["event"])
            if "meet" in message:
                self.brought = dict(message["meet"])
                return None
            if "ask" in message:
                self._send_reply(message["ask"])
                return None
            if "error" in message:
                self._outcome = (False, None, str(message["error"]))
            else:
                self._outcome, self._spent = (True, dict(message["result"]), ""), dict(message["spent"])
        except (ValueError, TypeError, KeyError):
            self._outcome = (False, None, "its answer cannot be read: something else wrote to the answer pipe")
        return None

    def _send_reply(self, question: dict[str, Any]) -> None:
        if self._reply is None:
            self._outcome = (False, None, "it asked something, and nobody replies")
        else:
            self.send(self._reply(question))

    def send(self, answer: dict[str, Any]) -> None:
        """Answer a question."""
        self._deadline = time.monotonic() + self._timeout_s
        self._send(json.dumps(answer).encode() + b"\n")

    @property
    def place(self) -> str:
        """The step at which it waits, with what it has brought there."""
        brought = self.brought or {"step": "no step", "value": None}
        return f"{brought['step']}, with {brought['value']}" if brought["value"] else str(brought["step"])

    def has_died(self) -> bool:
        """Return whether the process is gone; what it forked may still hold its answer pipe."""
        return self._group.process.poll() is not None

    def is_over(self, *, died: bool) -> bool:
        """Return whether there is nothing left to wait for; past the deadline, settle for that."""
        self._closed |= died
        waiting, now = self._outcome is None and not self._closed, time.monotonic()
        if waiting and now >= self._end:
            self._limit_reached = True
            self._outcome = (False, None, f"stopped after {now - self._start:.0f} s")
        elif waiting and now >= self._deadline and self.brought is None:
            self._timed_out = True
            self._dump_stacks()
            self._outcome = (False, None, f"no answer within {self._timeout_s:g} s")
        return self._outcome is not None or self._closed

    def _dump_stacks(self) -> None:
        """Let the process say where it hangs, in its output, before it is killed."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._group.process.pid, signal.SIGUSR1)
            time.sleep(0.3)

    def finish(self) -> TaskResult:
        """Return the outcome of a process that is over."""
        if self._outcome is None:  # it closed the pipe without an answer: it has died, or is about to
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._group.process.wait(5.0)
            code = self._group.process.poll()
            reason = "it closed its answer pipe" if code is None else describe_exit(code) or "exited with status 0"
            self._outcome = (False, None, reason if code and code < 0 else f"{reason} before it answered")
        self.kill()
        ok, data, reason = self._outcome
        seconds, tail = time.monotonic() - self._start, self._group.output_tail()
        flags = {"timed_out": self._timed_out, "limit_reached": self._limit_reached}
        return TaskResult(ok, data, reason[:REASON_LIMIT], seconds, tail, **flags, spent=self._spent)

    def give_up(self) -> TaskResult:
        """Return the outcome of a rank that another one has ended: what it had brought to where it waits."""
        self._dump_stacks()
        waits = f"waited for it at {self.place}" if self.brought is not None else "was still running"
        self._outcome = (False, None, waits)
        return replace(self.finish(), given_up=True)

    def kill(self) -> None:
        """Kill the process and all that it started, and close our ends."""
        self._group.kill()
        for name in ("answer", "_request"):
            if (handle := getattr(self, name)) >= 0:
                setattr(self, name, -1)
                os.close(handle)


def ask(question: dict[str, Any]) -> dict[str, Any]:
    """Ask the parent of this worker, and wait for its reply."""
    return _child[0](question)


def rank_here() -> int:
    """Return which of the processes that run one task together this is."""
    return _place[0]


def ranks_here() -> int:
    """Return how many processes run this task together; 1: this one alone."""
    return _place[1]


def meet(value: Any, step: str) -> list[Any]:
    """Return what all ranks bring to ``step``, by rank, once all are there. Raises ``ProofError`` where one is not."""
    return _meet(value, step)["values"] if ranks_here() > 1 else [value]


def _meet(value: Any, step: str) -> dict[str, Any]:
    answer = _child[1]({"value": value, "step": step})
    if "differ" in answer:
        raise ProofError(f"ranks do not agree: {answer['differ']}")
    return answer


def agree(fault: str, step: str) -> str:
    """Return the faults of all ranks as one text, each with its rank; of one process its own. Empty: there is none."""
    faults = meet(fault, step)
    return fault if len(faults) == 1 else "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(faults) if each)


def line_up() -> None:
    """Return at the same moment on all ranks: they share the clock of their host."""
    if ranks_here() > 1:
        at = _meet(None, "a clock")["at"]
        while time.monotonic() < at:
            pass


def main(request_handle: str, answer_handle: str) -> None:
    """Run one task: the child's side. Never returns."""
    request_fd, answer_fd = int(request_handle), int(answer_handle)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    requests = os.fdopen(request_fd, "rb")
    request = json.loads(requests.readline())
    replies = _die_with_parent(requests, int(request["parent"]))

    def send(message: dict[str, Any]) -> None:
        # NaN is no JSON: a reader elsewhere would refuse the record that holds it.
        line = json.dumps(message, allow_nan=False).encode() + b"\n"
        while line:
            line = line[os.write(answer_fd, line) :]

    def ask_parent(question: dict[str, Any]) -> dict[str, Any]:
        send({"ask": question})
        return dict(json.loads(replies.get()))

    def ask_all(brought: dict[str, Any]) -> dict[str, Any]:
        send({"meet": brought})
        return dict(json.loads(replies.get()))

    _child.append(ask_parent)
    _child.append(ask_all)
    _place[:] = request["rank"], request["ranks"]
    try:
        module, _, name = request["task"].partition(":")
        function = getattr(importlib.import_module(module), name)
        spent.count("start", time.monotonic() - request["began"])
        result = function(request["payload"], lambda event: send({"event": event}))
        answer = {"result": result, "spent": spent.spent()}
        json.dumps(answer, allow_nan=False)
    except BaseException as error:  # noqa: BLE001 - a subject may raise SystemExit, or anything else
        with contextlib.suppress(Exception):  # a subject may have closed stderr: the answer matters more
            traceback.print_exc()
        answer = {"error": describe_error(error)}
    send(answer)
    os._exit(0)  # the answer is out: a subject's destructors and threads must not change it


def describe_error(error: BaseException) -> str:
    """Return type, message and place of an error in one line; no path of this machine is in it."""
    message = str(error).strip().partition("\n")[0]
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if isinstance(error, OperatorError):  # it names the place: that of the operator's code, and not of what asked it
        return text[:REASON_LIMIT]
    if type(error).__name__ == "OutOfMemoryError" or "CUDA out of memory" in message:
        text = f"GPU out of memory: {text}"
    if place := _place_of(error):
        text += f" ({Path(place.filename).name}:{place.lineno} in {place.name})"
    return text[:REASON_LIMIT]


def _place_of(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame of an error and what caused it that is in neither torch nor Triton, else the last."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    frames = [frame for each in causes for frame in traceback.extract_tb(each.__traceback__)]
    others = [frame for frame in frames if not _LIBRARY.search(frame.filename)]
    return (others or frames)[-1] if frames else None


def _die_with_parent(requests: IO[bytes], parent: int) -> queue.SimpleQueue[bytes]:
    """End this process, and its group, when the parent is gone. Return the lines that come until then."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def watch() -> None:
        for line in requests:  # ends when the parent closes its end, or dies
            lines.put(line)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    return lines
