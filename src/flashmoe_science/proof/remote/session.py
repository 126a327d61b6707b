"""The connections to borrowed machines: one SSH process each, and all their messages, in one place and one order.

Errors before the run starts there keep nothing. Later errors keep every finished case, because each case sends the
record.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shlex
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import resources
from pathlib import PurePath
from typing import IO, Any

from ...errors import EvidenceError, FlashmoeError, InputError, MachineLostError, RemoteError, shown
from ..cost.cost import Budget, RunSize
from ..gates import Progress
from ..gates.run import new_run_id
from ..records.documents import parse_record
from ..records.evidence import Gate, Record
from ..records.files import load_json
from .agent import BUDGET, SIZE, RemoteRequest
from .tree import Tree
from .wheels import REQUIREMENTS, asked_for, bundle_wheels

HEARTBEAT_S = 5.0
SILENCE_S = 45.0  # after so long without a sign of life the run over there ends

# A login shell's PATH is not that of a command over SSH: these are where images for GPU machines have their Python.
PYTHONS = (
    *("python3", "python", "~/.venv/bin/python", "/opt/venv/bin/python", "/venv/main/bin/python"),
    *("/opt/conda/bin/python", "~/miniconda3/bin/python"),
)

_OPTIONS = ("BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=5", "ServerAliveCountMax=3", "Compression=yes")
_NO_PYTHON = "flashmoe finds no python: "
_STOP_S = 90.0  # a run that was told to stop has so long to save what it has
_TAIL_LINES = 40

# A machine is not trusted: whatever it says is bounded.
_TEXT_LIMIT = 2000  # characters of one text that is printed
_LINE_LIMIT = 64 << 20  # bytes of one document, e.g. a record
_TOTAL_LIMIT = 4 << 30  # bytes in all
_PRINTED_LIMIT = 10_000  # documents that print something
_MOST_STEPS = 10**9  # of a gate
_WAITING_LIMIT = 16  # documents that nobody has handled yet

_CHECK = """import sys
v = "Python %d.%d" % sys.version_info[:2]
if sys.version_info < (3, 10): sys.exit(v + " is too old")
import importlib.util as u
lacks = [n for n in ("torch", "triton") if u.find_spec(n) is None]
if lacks: sys.exit(v + " has no " + " and no ".join(lacks))
"""

# Exactly so many bytes are the program: what follows is for it to read.
_BOOT = """import os, sys
n = int(sys.argv[1])
b = b""
while len(b) < n:
    d = os.read(0, n - len(b))
    if not d: sys.exit("the connection was closed")
    b += d
exec(compile(b, "bootstrap.py", "exec"), {"__name__": "__main__"})
"""

_SHELL = """check=$1 boot=$2 size=$3; shift 3
for p in "$@"; do
case $p in "~/"*) p=$HOME/${p#"~/"};; esac
command -v "$p" >/dev/null 2>&1 || continue
why=$("$p" -c "$check" 2>&1 </dev/null) && exec "$p" -u -c "$boot" "$size"
tried="$tried$p: $why; "
done
printf '%s%s\\n' "$_NO_PYTHON" "$(printf %s "$tried" | tr '\\n' ' ')"
""".replace("$_NO_PYTHON", _NO_PYTHON)


_Queue = queue.Queue[tuple["_Session", str, dict[str, Any]]]  # what came from where; "ended" is the last


@dataclass(frozen=True)
class Host:
    """A machine that ``ssh`` reaches under ``name``.

    Args:
        name: ``user@machine``, or a name from ``~/.ssh/config``.
        python: of that machine; empty: the first of ``PYTHONS`` that has torch and triton.
    """

    name: str
    python: str = ""

    def __post_init__(self) -> None:
        """Refuse what ssh would take for an option. Raises ``InputError``."""
        if not re.fullmatch(r"[^\s-]\S*", self.name):
            raise InputError(f"host must be user@machine or a name from ~/.ssh/config, got {self.name!r}")


@dataclass
class HostResult:
    """How the run on one host ended."""

    host: Host
    record: Record | None = None  # as far as it came here
    error: FlashmoeError | None = None  # why it is not there, or not complete
    stopped: bool = False  # on request
    seconds: float = 0.0  # how long the machine was held
    reached: bool = False  # it answered: until then nothing is held


def prove_on(
    hosts: Sequence[Host],
    request: RemoteRequest,
    tree: Tree,
    *,
    progress: Mapping[str, Progress],
    save: Callable[[str, Record], None],
    begin: Callable[[str, Record, RunSize], Budget | None] = lambda *_: None,
    requirements: Mapping[str, str] = REQUIREMENTS,
    heartbeat_s: float = HEARTBEAT_S,
    silence_s: float = SILENCE_S,
) -> list[HostResult]:
    """Run the chain on every host at the same time.

    Args:
        hosts: where, each once.
        request: what.
        tree: what is sent.
        progress: told what is going on, one for each host's name.
        save: gets the name and the record, as it grows; each replaces the one before. Where it fails, that run ends.
        begin: gets the name, the record before its first gate and what is going to be run there; returns what holds it
            to a budget, if anything. Where it fails, that run ends before it costs anything.
        requirements: what the harness needs there: module -> requirement.
        heartbeat_s: between signs of life.
        silence_s: after so long without one the run over there ends.

    Returns:
        One result for each host, in order. Where a connection is lost, with the last record and the error.

    Raises:
        KeyboardInterrupt: after the runs were told to stop and what they had finished was saved.
    """
    said: _Queue = queue.Queue(_WAITING_LIMIT)
    archive = tree.pack()
    setup = {"package": tree.package, "silence_s": silence_s, "requirements": dict(requirements)}
    sessions = [_Session(host, said, _with_an_id(request), setup, archive, heartbeat_s) for host in hosts]
    open_ = set(sessions)

    def handle(session: _Session, kind: str, data: dict[str, Any]) -> None:
        if kind == "record":
            if (record := session.take(data["record"])) is not None:
                save(session.host.name, record)
        elif kind == "begin":
            record = session.read(data["record"])
            budget = begin(session.host.name, record, SIZE.validate_python(data["size"]))
            session.tell({"do": "begin", "budget": BUDGET.dump_python(budget, mode="json")})
        elif kind == "ended":
            open_.discard(session)
            session.settle()
        else:
            session.show(progress[session.host.name], kind, data)

    try:
        for session in sessions:
            session.start()
        _drain(said, open_, handle)
    except KeyboardInterrupt:  # every run saves what it has; a second Ctrl-C ends this at once
        for session in open_:
            session.result.stopped = True
            progress[session.host.name].note("stopping: what is finished comes here first")
            session.tell({"do": "stop"})
        _drain(said, open_, handle, time.monotonic() + _STOP_S)
        raise
    finally:
        for session in sessions:
            session.kill()
    return [session.result for session in sessions]


def _drain(
    said: _Queue,
    open_: Collection[_Session],
    handle: Callable[[_Session, str, dict[str, Any]], None],
    deadline: float | None = None,
) -> None:
    """Handle all that comes, in the main thread, so that Ctrl-C finds it there. A run that cannot be heard ends."""
    while open_:
        try:
            session, kind, data = said.get(timeout=0.5)  # wakes now and then: Ctrl-C is seen on every system
        except queue.Empty:
            if deadline is not None and time.monotonic() > deadline:
                return
            continue
        name = session.host.name
        try:
            handle(session, kind, data)
        except FlashmoeError as error:
            session.give_up(error)
        except OSError as error:
            session.give_up(EvidenceError(f"{name}: the record cannot be kept: {error.strerror}"))
        except (ValueError, KeyError, TypeError, ArithmeticError) as error:
            why = " ".join(str(error).split())
            message = f"{name}: a {kind} came that cannot be read: {type(error).__name__}: {why}"
            session.give_up(RemoteError(message))


def _with_an_id(request: RemoteRequest) -> RemoteRequest:
    """Return the request of one host: the id of its record is given here, and not there."""
    subject = PurePath(request.subject).stem  # of a kernel.toml, its name without the ending
    run = new_run_id(PurePath(request.suite).stem, subject, datetime.now(timezone.utc))
    return request.model_copy(update={"run": re.sub(r"[^A-Za-z0-9_.@-]", "_", run)})


def _text(data: Mapping[str, Any], key: str) -> str:
    """Return a text that a machine said, no longer than a reader wants. Raises ``TypeError`` where it is none."""
    value = data[key]
    if not isinstance(value, str):
        raise TypeError(f"{key} must be a text, got {shown(value)[:200]}")
    return _cut(value)


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT_LIMIT else text[:_TEXT_LIMIT] + " ..."


def _count(data: Mapping[str, Any], key: str) -> int:
    """Return a count that a machine said. Raises ``ValueError`` where it is none."""
    value = data[key]
    if type(value) is not int or not 0 <= value <= _MOST_STEPS:
        raise ValueError(f"{key} must be an integer from 0 to {_MOST_STEPS}, got {shown(value)[:200]}")
    return value


class _Session:
    """One connection, in threads of its own: they put what comes into the queue and decide nothing."""

    def __init__(
        self,
        host: Host,
        said: _Queue,
        request: RemoteRequest,
        setup: dict[str, Any],
        archive: bytes,
        heartbeat_s: float,
    ) -> None:
        self.host = host
        self.result = HostResult(host)
        self.gate = ""  # that has begun
        self._said = said
        self._request = request
        self._setup = setup
        self._archive = archive
        self._heartbeat_s = heartbeat_s
        self._lock = threading.Lock()  # one frame at a time
        self._ended = threading.Event()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._connected = self._done = False
        self._refused: FlashmoeError | None = None  # why nothing more is taken from it
        self._printed = 0
        self._error: FlashmoeError | None = None
        self._why = ""  # what the other side said when it ended early
        self._process: subprocess.Popen[bytes] | None = None

    # In the main thread.

    def read(self, text: object) -> Record:
        """Return the record in a text that came. Raises ``EvidenceError`` where it is none, or of another run."""
        where = f"a record from {self.host.name}"
        if not isinstance(text, str):
            raise EvidenceError(f"{where}: expected a text, got {type(text).__name__}")
        record, given = parse_record(text, where), self._request.run
        if record.id != given:
            raise EvidenceError(f"{where}: key id: expected {given}, got {record.id}")
        return record

    def take(self, text: object) -> Record | None:
        """Return a record that came, to be saved. What is none, or is of another run, ends the connection."""
        if self._refused is not None:
            return None
        try:
            self.result.record = self.read(text)
        except EvidenceError as error:
            self.refuse(RemoteError(f"{error}; the connection was ended, and this record was not saved"))
            return None
        return self.result.record

    def show(self, progress: Progress, kind: str, data: dict[str, Any]) -> None:
        """Tell ``progress`` what came, where it is something to tell."""
        if kind == "start":
            self.gate = _text(data, "gate")
            progress.start(self.gate)
        elif kind == "advance":
            progress.advance(_count(data, "done"), _count(data, "total"), _text(data, "label"))
        elif kind == "note":
            progress.note(_text(data, "line"))
        elif kind == "finish":
            gate = Gate.model_validate_json(data["gate"])
            texts = {"summary": _cut(gate.summary), "hint": _cut(gate.hint), "details": [*map(_cut, gate.details)]}
            progress.finish(gate.model_copy(update=texts))

    def give_up(self, error: FlashmoeError) -> None:
        """Let the run end, whose machine would be paid for nothing. Those on other machines go on."""
        if self.result.error is None:
            self.result.error = error
            self.tell({"do": "stop"})

    def settle(self) -> None:
        """Note how the run ended, once nothing more comes."""
        if not self.result.stopped and self.result.error is None:
            self.result.error = self.error()

    def start(self) -> None:
        """Connect and begin. Raises ``RemoteError`` when there is no ssh."""
        program = (resources.files(__package__) / "bootstrap.py").read_bytes()
        pythons = [self.host.python] if self.host.python else list(PYTHONS)
        words = ["sh", "-c", _SHELL, "flashmoe", _CHECK, _BOOT, str(len(program)), *pythons]
        argv = [*ssh_command(), *(word for option in _OPTIONS for word in ("-o", option)), "-T", "--", self.host.name]
        try:
            self._process = subprocess.Popen(
                [*argv, f"exec {shlex.join(words)}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a terminal's Ctrl-C reaches only us, who tell the other side to stop
            )
        except OSError as error:
            hint = "install an SSH client, or let FLASHMOE_SSH name one"
            raise RemoteError(f"{argv[0]} cannot be started: {error.strerror}", hint=hint) from error
        self._began = time.monotonic()
        self._logger = threading.Thread(target=self._read_log, daemon=True)
        self._logger.start()
        for work in (self._read, lambda: self._speak(program)):
            threading.Thread(target=work, daemon=True).start()

    def tell(self, header: dict[str, Any], body: bytes = b"") -> None:
        """Send one frame; that nobody reads it shows elsewhere."""
        stdin = self._stream("stdin")
        with self._lock, contextlib.suppress(OSError, ValueError):
            stdin.write(json.dumps({**header, **({"bytes": len(body)} if body else {})}).encode() + b"\n" + body)
            stdin.flush()

    def kill(self) -> None:
        """End what is left of the connection."""
        self._ended.set()
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        with self._lock, contextlib.suppress(OSError):  # what was not sent is of no use to anybody
            self._stream("stdin").close()

    def refuse(self, error: FlashmoeError) -> None:
        """End the connection because of what came over it."""
        self._refused = error
        self.kill()

    def error(self) -> FlashmoeError | None:
        """Return why the run is not complete here, or None."""
        name, record = self.host.name, self.result.record
        if self._refused is not None:
            return self._refused
        if self._done:
            return None
        if self._error is not None:
            return self._error
        if not self._connected:
            return _cannot_connect(name, list(self._tail))
        where = f"in gate {self.gate}" if self.gate else "before the first gate"
        why = (self._why or (self._tail[-1] if self._tail else "it was closed")).rstrip(".")
        kept = f"the record of what was finished, {record.id}, is here" if record else "there is no record yet"
        hint = f"flashmoe prove --host {name} --resume {record.id}" if record else ""
        return MachineLostError(f"{name}: the run ended early {where}: {why}; {kept}", hint=hint)

    def _stream(self, name: str) -> IO[bytes]:
        assert self._process is not None
        stream: IO[bytes] | None = getattr(self._process, name)
        assert stream is not None
        return stream

    def _speak(self, program: bytes) -> None:
        """Send the program, the tree and the request, then signs of life."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._stream("stdin").write(program)
        self.tell({"do": "set up", **self._setup}, self._archive)
        while not self._ended.wait(self._heartbeat_s):
            self.tell({})

    def _read_log(self) -> None:
        with self._stream("stderr") as log:
            while line := log.readline(_TEXT_LIMIT):
                if text := line.decode(errors="replace").strip():
                    self._tail.append(text)

    def _read(self) -> None:
        try:
            with self._stream("stdout") as answers:
                left = _TOTAL_LIMIT
                while line := answers.readline(_LINE_LIMIT):
                    left -= len(line)
                    if left < 0 or (len(line) == _LINE_LIMIT and not line.endswith(b"\n")):
                        raise RemoteError(
                            f"{self.host.name}: it says more than {_LINE_LIMIT} bytes at once, or too much"
                        )
                    self._hear(line.decode(errors="replace"))
        except RemoteError as error:
            self.refuse(error)
        finally:
            assert self._process is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10.0)
            self._logger.join(10.0)  # what ssh says last is why it ended
            self.result.seconds, self.result.reached = time.monotonic() - self._began, self._connected
            self._ended.set()
            self._said.put((self, "ended", {}))

    def _hear(self, line: str) -> None:
        if line.startswith(_NO_PYTHON):
            self._connected = True
            tried = line.removeprefix(_NO_PYTHON)[:_TEXT_LIMIT].strip().rstrip(";")
            tried = tried or f"there is no {self.host.python or ', no '.join(PYTHONS)}"
            hint = "install torch and triton there, or name the Python that has them: --python"
            self._error = RemoteError(f"{self.host.name}: no Python there can run this: {tried}", hint=hint)
            return
        try:
            event = load_json(line)
            kind = str(event.pop("event"))
        except (ValueError, KeyError, TypeError, AttributeError):
            return  # what a login shell prints
        self._connected = True
        try:
            self._answer(kind, event)
        except (KeyError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"[:_TEXT_LIMIT]
            raise RemoteError(f"{self.host.name}: a {kind[:40]} came that cannot be read: {why}") from error

    def _answer(self, kind: str, event: dict[str, Any]) -> None:
        if kind == "wheels wanted":
            self._send_wheels(event)
        elif kind == "unpacked":
            self.tell({"do": "prove", "request": json.loads(self._request.model_dump_json())})
        elif kind == "done":
            self._done = True
        elif kind == "ended":
            self._why = _text(event, "why")
        elif kind == "error":
            hint = _text(event, "hint")
            said = f"{self.host.name} says: {hint}" if hint else ""
            self._error = RemoteError(f"{self.host.name}: {_text(event, 'message')}", hint=said)
        else:
            self._printed += kind not in ("advance", "record")
            if self._printed > _PRINTED_LIMIT:
                raise RemoteError(f"{self.host.name}: it says more than {_PRINTED_LIMIT} things")
            self._said.put((self, kind, event))

    def _note(self, line: str) -> None:
        self._said.put((self, "note", {"line": line}))

    def _send_wheels(self, event: dict[str, Any]) -> None:
        why = f"no package index there ({_text(event, 'why')})"
        self._note(f"{why}: downloading wheels here")
        try:
            bundle, names = bundle_wheels(asked_for(event["requirements"], self._setup["requirements"].values()), event)
        except RemoteError as error:
            self._error = RemoteError(f"{self.host.name}: {error.message}", hint=error.hint)
            self.tell({"do": "stop"})
            return
        self._note(f"sending {', '.join(names)}")
        self.tell({"do": "wheels"}, bundle)


def ssh_command() -> list[str]:
    """Return the words that start SSH: ``FLASHMOE_SSH``, or ``ssh``."""
    return shlex.split(os.environ.get("FLASHMOE_SSH", "")) or ["ssh"]


def _cannot_connect(name: str, log: Sequence[str]) -> RemoteError:
    """Return what ssh said, with what to do about it."""
    text = "\n".join(log)
    last = log[-1] if log else "ssh said nothing"
    by_hand = shlex.join([*ssh_command(), name])
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in text:
        hint = "another machine at the same address, or somebody in between: compare the key's fingerprint with your "
        hint += "provider's before you run ssh-keygen -R"
        return RemoteError(f"{name} has another host key than the one that is known", hint=hint)
    if "Host key verification failed" in text:
        hint = f"compare its fingerprint with your provider's when you connect by hand once: {by_hand}"
        return RemoteError(f"{name} has a host key that is not known here, and none is accepted unseen", hint=hint)
    if "Permission denied" in text:
        hint = f"the key has to work without a password: ssh-agent, or IdentityFile in ~/.ssh/config; try {by_hand}"
        return RemoteError(f"{name} refuses the login: {last}", hint=hint)
    return RemoteError(f"{name} cannot be reached: {last}", hint=f"the same as ssh sees it: {by_hand}")
