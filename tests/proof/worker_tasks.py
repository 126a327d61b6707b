"""Tasks that behave badly, each in its own way, for test_worker.py."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from flashmoe_science.proof.spent import spending
from flashmoe_science.proof.worker import meet, rank_here


def answer(payload, emit):
    return {"got": payload, "pid": os.getpid()}


def spend(payload, emit):
    """Take some time for one part, and some of it for another within."""
    with spending("outer"):
        time.sleep(0.1)
        with spending("inner"):
            time.sleep(0.3)
    return {}


def count(payload, emit):
    for i in range(payload["n"]):
        emit({"event": "step", "i": i})
        time.sleep(payload.get("pause_s", 0))
    return {"n": payload["n"]}


def count_when_told(payload, emit):
    """Tell each number, and go on when somebody has made a file of its name: an event that is kept back stops it."""
    for i in range(payload["n"]):
        emit({"i": i})
        while not Path(payload["folder"], str(i)).exists():
            time.sleep(0.02)
    return {"n": payload["n"]}


def meet_on_rank_1(payload, emit):
    if rank_here() == 1:
        meet("a fault", "the first call")
    return {}


def raise_error(payload, emit):
    raise ValueError(payload["message"])


def leave(payload, emit):
    sys.exit(3)


def leave_at_once(payload, emit):
    os._exit(payload["status"])


def hang(payload, emit):
    print("about to hang")
    Path(payload["file"]).touch()
    time.sleep(600)


def hang_after_event(payload, emit):
    emit({"event": "step"})
    time.sleep(600)


def die(payload, emit):
    print("about to die")
    os.kill(os.getpid(), payload["signal"])
    time.sleep(60)


def crash(payload, emit):
    import ctypes

    ctypes.string_at(0)


def print_garbage(payload, emit):
    print('{"result": {"fake": true}}')
    sys.stdout.buffer.write(b"\xff\xfe\x00\n")
    print("x" * payload["bytes"])
    print("the end")
    return {"real": True}


def write_to_every_pipe(payload, emit):
    for handle in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(handle, b"garbage\n")
    return {}


def emit_then_write_to_every_pipe(payload, emit):
    emit({"pid": os.getpid()})
    return write_to_every_pipe(payload, emit)


def close_everything(payload, emit):
    os.closerange(0, 64)
    time.sleep(600)


def not_json(payload, emit):
    return {"value": float("nan")}


def leave_children(payload, emit):
    """Leave a grandchild that holds every pipe it can, and one in a session of its own."""
    near = subprocess.Popen(["sleep", "600"])
    stray = subprocess.Popen(["sleep", "600"], start_new_session=True)
    return {"near": near.pid, "stray": stray.pid}


def die_leaving_a_fork(payload, emit):
    """Die while a forked copy of this process holds the answer pipe open."""
    if os.fork() == 0:
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGKILL)


def crash_after_answer(payload, emit):
    import atexit

    atexit.register(os.abort)
    return {"done": True}


def where(payload, emit):
    import json

    return {"path": sys.path, "cwd": str(Path.cwd()), "json": json.__file__, "variable": os.environ.get("A_VARIABLE")}


def out_of_memory(payload, emit):
    import torch

    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def note_pid_and_hang(payload, emit):
    """Hang, as compiled code does that never lets another thread run."""
    import ctypes

    Path(payload["file"]).write_text(str(os.getpid()))
    ctypes.PyDLL(None).sleep(600)  # holds the interpreter's lock
