"""The program that starts a run on a borrowed machine: sent as text to ``python -c``, so it needs nothing but Python.

It talks over the one SSH connection. Here come frames: a JSON document on a line, and after it as many raw bytes as
its key ``bytes`` says. An empty document is a sign of life. What goes back is a JSON document a line, on the first
stdout of this process; what anything prints goes to stderr.

The run ends soon after its connection does. Nobody would see it go on, and a second run on the same GPU, such as the
one that goes on with it, would spoil the times of both.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import queue
import re
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import traceback
import zipfile
from pathlib import Path
from typing import Any

_GRACE_S = 60.0  # to write down what was finished, before this process is ended by force
_PIP_TIMEOUT_S = 60.0  # the machine is paid for meanwhile; after that the other side sends what is missing


class Link:
    """Both directions of the connection. The main thread never waits for a reader that has gone."""

    def __init__(self) -> None:
        self.ended = ""  # why the connection is of no more use, or is about to be
        self.silence_s = 60.0  # the longest time without a sign of life
        self._frames: queue.SimpleQueue[tuple[dict[str, Any], bytes]] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._out = os.dup(1)
        os.dup2(2, 1)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have told us to ignore it
        signal.signal(signal.SIGTERM, lambda *_: self._end("this machine is about to stop"))
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, event: dict[str, Any]) -> None:
        """Send a document. Nothing is lost of it when the main thread is interrupted."""
        self._events.put(json.dumps(event).encode() + b"\n")

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """Return the next frame that is no sign of life. Raises ``KeyboardInterrupt`` when none will come."""
        while not self.ended:
            try:
                return self._frames.get(timeout=0.5)
            except queue.Empty:
                continue
        raise KeyboardInterrupt

    def close(self) -> None:
        """Wait until everything is sent, unless nobody reads it."""
        self._events.put(b"")
        self._writer.join(self.silence_s)

    def _write(self) -> None:
        while data := self._events.get():
            try:
                while data:
                    data = data[os.write(self._out, data) :]
            except OSError:  # the reader has gone: the other thread sees to what follows
                return

    def _read(self) -> None:
        buffer = bytearray()
        try:
            while True:
                end = self._fill(buffer, lambda: buffer.find(b"\n"))
                header = json.loads(buffer[:end] or b"{}")
                del buffer[: end + 1]
                wanted = int(header.get("bytes", 0))
                self._fill(buffer, lambda wanted=wanted: wanted if len(buffer) >= wanted else -1)
                body = bytes(buffer[:wanted])
                del buffer[:wanted]
                if header.get("do") == "stop":
                    self._end("stopped")
                elif header:
                    self._frames.put((header, body))
        except EOFError as error:
            self._end(str(error))

    def _fill(self, buffer: bytearray, found: Any) -> int:
        """Read until ``found`` returns a place, and return it. Raises ``EOFError`` when nothing more comes."""
        while (place := found()) < 0:
            if not select.select([0], [], [], self.silence_s)[0]:
                raise EOFError(f"no sign of life for {self.silence_s:g} s")
            data = os.read(0, 1 << 16)
            if not data:
                raise EOFError("the connection was closed")
            buffer += data
        return int(place)

    def _end(self, why: str) -> None:
        if self.ended:
            return
        self.ended = why
        os.kill(os.getpid(), signal.SIGINT)  # the chain saves what it has, and ends
        threading.Thread(target=_end_by_force, daemon=True).start()


def _end_by_force() -> None:
    time.sleep(_GRACE_S)
    os._exit(1)  # workers end with their parent


class CannotGoOnError(Exception):
    """What is reported to the other side, with a hint."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def main() -> None:
    """Answer the other side until the run has ended."""
    sys.path[:] = [entry for entry in sys.path if entry]  # "python -c" puts the current folder first
    link = Link()
    folder = None
    try:
        setup, archive = link.receive()
        link.silence_s = float(setup["silence_s"])
        try:
            folder = Path(tempfile.mkdtemp(prefix="flashmoe-"))
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                tar.extractall(folder, **_as_it_is())  # noqa: S202 - our own, over a connection that is ours
            _add_packages(link, setup["requirements"], folder)
        except OSError as error:
            hint = "free some space there, or let TMPDIR name a folder that has some"
            raise CannotGoOnError(f"the tree cannot be unpacked: {error}", hint) from error
        sys.path.insert(0, str(folder / setup["package"]))
        # What the build command and other programs of the run import is the same.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder / setup["package"]), os.environ.get("PYTHONPATH", "")])
        from flashmoe_science.proof.remote.agent import run_request

        link.send({"event": "unpacked"})
        request, _ = link.receive()
        run_request(request["request"], folder / "tree", link.send, link.receive)
        link.send({"event": "done"})
    except KeyboardInterrupt:
        link.send({"event": "ended", "why": link.ended or "interrupted there"})
    except CannotGoOnError as error:
        link.send({"event": "error", "message": str(error), "hint": error.hint})
    except Exception as error:  # noqa: BLE001 - whatever it is, the other side is told
        traceback.print_exc()
        hint = getattr(error, "hint", "")
        message = str(error).removesuffix(f"\nhint: {hint}")
        named = message if hasattr(error, "hint") else f"{type(error).__name__}: {message}"
        link.send({"event": "error", "message": named, "hint": hint})
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if folder is not None:
            os.chdir("/")
            shutil.rmtree(folder, ignore_errors=True)
        link.close()


def _as_it_is() -> dict[str, Any]:
    """Return how to unpack our own archive: links and modes as they are, where Python asks."""
    return {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}


def _add_packages(link: Link, requirements: dict[str, str], folder: Path) -> None:
    """Make importable what the harness needs and this Python lacks: from a package index, else from the other side."""
    missing = [requirement for module, requirement in requirements.items() if _lacks(module, requirement)]
    if not missing:
        return
    packages = folder / "packages"
    link.send({"event": "note", "line": f"installing {', '.join(missing)} for this run"})
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1", "--timeout", "10", "install"]
    argv += ["--quiet", "--only-binary", ":all:", "--target", str(packages), *missing]
    here = {**os.environ, "TMPDIR": str(folder)}  # what a pip that is killed leaves behind goes with the folder
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False, env=here)
        why = (done.stderr.strip().splitlines() or ["pip failed"])[-1] if done.returncode else ""
    except subprocess.TimeoutExpired:
        why = f"pip did not end within {_PIP_TIMEOUT_S:g} s"
    if why:
        link.send({"event": "wheels wanted", "requirements": missing, "why": why, **_target()})
        _, archive = link.receive()
        with zipfile.ZipFile(io.BytesIO(archive)) as bundle:
            for name in bundle.namelist():  # a wheel is an archive of what is to be importable: no pip is needed
                with zipfile.ZipFile(io.BytesIO(bundle.read(name))) as wheel:
                    wheel.extractall(packages)  # noqa: S202 - the same
    sys.path.insert(0, str(packages))
    importlib.invalidate_caches()


def _lacks(module: str, requirement: str) -> bool:
    """Return whether a module is not here, or is older than its requirement ``name>=version,...``.

    ``first|second`` is here when one of them is.
    """
    if not any(importlib.util.find_spec(each) for each in module.split("|")):
        return True
    name, _, bounds = requirement.partition(">=")
    try:
        return _numbers(importlib.metadata.version(name)) < _numbers(bounds.partition(",")[0])
    except importlib.metadata.PackageNotFoundError:  # a module without a package: somebody put it there on purpose
        return False


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]


def _target() -> dict[str, Any]:
    """Return for which Python and platform a wheel has to be."""
    libc, version = platform.libc_ver()
    return {
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "machine": platform.machine(),
        "glibc": _numbers(version) if libc == "glibc" else [],
    }


if __name__ == "__main__":
    main()
