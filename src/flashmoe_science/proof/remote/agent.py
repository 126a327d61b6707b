"""Run the chain on the borrowed machine, and tell the other side everything: the records too, as they grow."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field, TypeAdapter

from ..cost.cost import Budget, RunSize, spent_seconds
from ..gates import ProveRequest, prove
from ..records.evidence import Gate, GateName, Model, Record, RecordId, Settings, TreeState
from ..subject.loading import load_subject
from ..subject.suites import load_suite

Send = Callable[[dict[str, Any]], None]
Receive = Callable[[], tuple[dict[str, Any], bytes]]

SIZE: TypeAdapter[RunSize] = TypeAdapter(RunSize)  # as they travel
BUDGET: TypeAdapter[Budget | None] = TypeAdapter(Budget | None)


class RemoteRequest(Model):
    """A run of the chain as it travels. Paths are relative to the tree."""

    run: RecordId = ""  # the id of its record, given here: a record with another is not taken
    subject: str  # one of ours, or the path of a kernel.toml
    suite: str  # a packaged suite, or the path of a file
    baselines: list[str]
    gpus: list[str] = Field(default_factory=list)
    until: str | None = None
    expect: float | None = None
    settings: Settings
    command: str = ""
    repository: str | None = None  # the folder that holds claims and evidence
    folder: str = "."  # the current one
    commit: str = ""  # for FLASHMOE_COMMIT: what of the tree was known where it came from
    tree: TreeState | None = None  # that holds the subject's sources, where they are not this package's
    resume: Record | None = None
    time_limit: float | None = None  # as --time-limit has it


# What a request of the chain says in the same words.
AS_IT_IS = ("baselines", "gpus", "until", "expect", "settings", "command", "resume")


class _Told:
    """A progress that tells the other side."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def start(self, gate: str) -> None:
        self._send({"event": "start", "gate": gate})

    def advance(self, done: int, total: int, label: str) -> None:
        self._send({"event": "advance", "done": done, "total": total, "label": label})

    def note(self, line: str) -> None:
        self._send({"event": "note", "line": line})

    def finish(self, gate: Gate) -> None:
        self._send({"event": "finish", "gate": gate.model_dump_json()})


class _Asked:
    """The meter of a run here: rates and earlier runs are known on the other side, how large it is only here."""

    def __init__(self, send: Send, receive: Receive) -> None:
        self._send, self._receive = send, receive
        self._budget: Budget | None = None

    def start(self, record: Record, size: RunSize) -> None:
        plain = SIZE.dump_python(size, mode="json")
        self._send({"event": "begin", "record": record.model_dump_json(), "size": plain})
        answer, _ = self._receive()
        self._budget = BUDGET.validate_python(answer["budget"])

    def refusal(self, gate: GateName, record: Record) -> str:
        return self._budget.refusal(gate, spent_seconds(record)) if self._budget else ""

    def seconds_left(self, record: Record) -> float | None:
        return self._budget.seconds_left(spent_seconds(record)) if self._budget else None


def run_request(table: dict[str, Any], tree: Path, send: Send, receive: Receive) -> None:
    """Run what ``table``, a ``RemoteRequest``, asks in the folder ``tree``.

    Args:
        table: the request as it came.
        tree: where the files are.
        send: tells the other side.
        receive: returns its next answer.

    Raises:
        FlashmoeError: the request cannot be carried out.
        KeyboardInterrupt: after what was finished has been sent.
    """
    wanted = RemoteRequest.model_validate(table)
    if wanted.commit:
        os.environ["FLASHMOE_COMMIT"] = wanted.commit
    os.chdir(tree / wanted.folder)
    subject = load_subject(_in_tree(wanted.subject, tree), time_limit=wanted.time_limit)
    request = ProveRequest(
        subject=subject,
        suite=load_suite(_in_tree(wanted.suite, tree)),
        **{name: getattr(wanted, name) for name in AS_IT_IS},
        repository=None if wanted.repository is None else tree / wanted.repository,
        run=wanted.run,
        tree=wanted.tree,
        meter=_Asked(send, receive),
        borrowed=True,
    )

    def save(record: Record) -> None:
        send({"event": "record", "record": record.model_dump_json()})

    prove(request, progress=_Told(send), save=save)


def _in_tree(text: str, tree: Path) -> str:
    """Return the path of a file of the tree; a name stays a name."""
    return str(tree / text) if text.endswith(".toml") else text
