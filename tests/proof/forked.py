"""Workers that are forked from a process that has imported torch: each new one would spend two seconds on that.

A worker that is forked so has the environment, the folder, the pipes and the group of one that is started anew.
``tests/proof/test_worker.py`` tries those that are started anew.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from flashmoe_science.proof import worker

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([f"{worker.__package__}.measure.{name}" for name in ("recheck", "shared_state")])
_start_anew = subprocess.Popen


class _Handle:
    """A file descriptor that a forked process gets."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _detach, (reduction.DupFd(self.number),)


def _detach(inherited: Any) -> int:
    return int(inherited.detach())


class _Forked:
    """What ``subprocess.Popen`` is to a worker."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: str | None) -> None:
        output, write = os.pipe()
        handles = [_Handle(number) for number in (int(argv[4]), int(argv[5]), write)]
        about = (argv[6:], dict(env), cwd or str(Path.cwd()), os.getpid())
        self._process = _FORKS.Process(target=_run, args=(*handles, *about))
        self._process.start()
        os.close(write)
        self.stdout = os.fdopen(output, "rb", 0)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return self._process.exitcode


def _run(
    request: int, answer: int, output: int, path: Sequence[str], env: Mapping[str, str], folder: str, parent: int
) -> None:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    os.getppid = lambda: parent  # the process that forks is no parent to ask
    sys.path[:] = path
    worker.main(str(request), str(answer))


def popen(argv: Sequence[str], **options: Any) -> Any:
    """Stand in for ``subprocess.Popen``: fork where a worker is to be started."""
    if list(argv[1:4]) == ["-u", "-c", worker._BOOT]:
        return _Forked(argv, options["env"], options["cwd"])
    return _start_anew(argv, **options)
