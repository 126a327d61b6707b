"""What is sent to a borrowed machine in place of the package, and how tests run it there."""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from flashmoe_science.proof.records.evidence import Settings
from flashmoe_science.proof.remote import Host, RemoteRequest, Tree, prove_on

from ..builders import build_record
from ..sshd import WHY_NOT, is_possible

SSH = pytest.mark.needs("sshd", is_possible(), WHY_NOT)

# What is sent in place of the package. The record that it tells travels there as the one to resume.
STUB = """
import json, os, sys, time
def run_request(table, tree, send, receive):
    what, marks = table["command"], table["folder"]
    record = table["resume"]
    record["id"] = table["run"]
    print('{"event": "start", "gate": "a subject prints"}')
    if what == "fail":
        raise ValueError("no such thing")
    send({"event": "start", "gate": "correct"})
    if what == "tell":
        import made_up
        send({"event": "note", "line": f"made_up {made_up.VERSION}"})
    if what == "ask":
        send({"event": "begin", "record": json.dumps(record), "size": table["gpus"] and json.loads(table["gpus"][0])})
        answer, _ = receive()
        send({"event": "note", "line": json.dumps(answer)})
    if what == "meet":
        name = os.environ["MACHINE"]
        open(f"{marks}/{name}", "w").close()
        end = time.monotonic() + 60
        while len(os.listdir(marks)) < 2:
            assert time.monotonic() < end, "the other machine never came"
            time.sleep(0.02)
    nonsense = what == "one tells nonsense"
    if what.startswith("one ") and os.environ["MACHINE"] == "one":
        what = "wait"
    if what == "wait":
        with open(f"{marks}/pid.new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(f"{marks}/pid.new", f"{marks}/pid")
    try:
        send({"event": "record", "record": json.dumps(record)})
        if nonsense and what == "wait":
            send({"event": "finish", "gate": '{"name": 3}'})
        while what == "wait":
            time.sleep(0.1)
    except KeyboardInterrupt:
        record["incomplete_reason"] = "interrupted in gate correct"
        send({"event": "record", "record": json.dumps(record)})
        raise
"""


@dataclass(frozen=True)
class StubTree(Tree):
    """A tree that holds the stub, and a file of so many bytes."""

    root: Path = Path()
    files: tuple[str, ...] = ()
    more: int = 0

    @property
    def package(self) -> str:
        return "package"

    def pack(self) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for name in ("", "proof/", "proof/remote/"):
                tar.addfile(tarfile.TarInfo(f"package/flashmoe_science/{name}__init__.py"))
            files = {"package/flashmoe_science/proof/remote/agent.py": STUB.encode(), "tree/more": bytes(self.more)}
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        return buffer.getvalue()


class Lines:
    """A progress that remembers."""

    def __init__(self):
        self.started, self.notes, self.finished = [], [], []

    def start(self, gate):
        self.started.append(gate)

    def advance(self, done, total, label):
        pass

    def note(self, line):
        self.notes.append(line)

    def finish(self, gate):
        self.finished.append(gate)


def request(what, folder=Path(), record=None):
    record = record or build_record(speedups=[2.0], complete=False, gpu=None)
    return RemoteRequest(
        subject="s", suite="s", baselines=[], settings=Settings(), command=what, folder=str(folder), resume=record
    )


def run(
    what, folder=Path(), *, python, save=lambda name, record: None, names=("gpu",), requirements=None, tree=None, **more
):
    """Run the stub on the machines; return their results and the progress of the first."""
    lines = {name: Lines() for name in names}
    results = prove_on(
        [Host(name, python) for name in names],
        request(what, folder),
        tree or StubTree(),
        progress=lines,
        save=save,
        requirements=requirements or {},
        **more,
    )
    return results, lines[names[0]]
