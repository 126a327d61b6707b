"""A subject: one of our own implementations, or a user's kernel described by a ``kernel.toml``."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ...errors import SubjectError
from ..records.evidence import SourceFile
from ..text import did_you_mean

PACKAGE_FOLDER = Path(__file__).resolve().parents[2]

PYTHON = "{python}"  # in a build command: the Python that runs the harness


@dataclass(frozen=True)
class KernelPromise:
    """One kernel that every call launches. ``None``: nothing is promised about this."""

    pattern: str  # fnmatch pattern on the kernel's name
    grid: tuple[int, int, int] | None = None  # blocks
    block: tuple[int, int, int] | None = None  # threads
    shared_memory_bytes: int | None = None  # a block, static and dynamic


@dataclass(frozen=True)
class Limits:
    """The longest silence of a worker in seconds, by what it does: then it is ended, with all that it started."""

    import_s: float = 300.0  # an extension that compiles itself on import takes minutes
    compile_s: float = 900.0  # one kernel, on a CPU
    launch_s: float = 120.0  # one case, all arms: compiling on the first call is part of it
    correct_s: float = 120.0  # one case, on a GPU
    correct_cpu_s: float = 900.0  # one case, where an interpreter runs it
    quick_s: float = 120.0  # one case until its first round, or one round: compiling, tuning and warming up
    bench_s: float = 120.0  # the same

    @classmethod
    def of_all(cls, seconds: float) -> Limits:
        """Return limits that are all the same."""
        return cls(**dict.fromkeys((field.name for field in fields(cls)), seconds))


@dataclass(frozen=True)
class Checkout:
    """Where one revision of a subject lies while two revisions are compared: see ``revisions.py``."""

    label: str  # as it was asked for, e.g. main
    commit: str
    root: Path  # of its working tree
    shared: Path  # the folder with the working trees of both revisions
    repository: Path  # that both come from
    own_name: str = ""  # of the subject, without the revision
    package: str = ""  # our own package, under a name that lets two revisions live in one process


@dataclass(frozen=True)
class Subject:
    """The implementation on trial. ``sources`` and ``python_path`` are relative to ``folder``."""

    name: str
    operator: str  # a built-in operator, or a dotted module path with an object OPERATOR
    entry_point: str  # module:attribute
    folder: Path
    sources: tuple[str, ...]
    python_path: tuple[str, ...] = (".",)
    build_command: tuple[str, ...] | None = None
    build_timeout_s: float = 1800.0
    build_needs: tuple[str, ...] = ()  # programs without which the command cannot run, e.g. nvcc
    binaries: tuple[str, ...] = ()  # what it makes, to be looked into; patterns too
    gpus: tuple[str, ...] = ()  # which it is meant for; empty: not said
    compile_jobs: str | None = None  # module:function, see docs/reference/kernel-toml.md
    kernels: tuple[KernelPromise, ...] = ()
    forbidden_kernels: tuple[str, ...] = ()  # fnmatch patterns
    expected_speedup: float | None = None
    deterministic: bool = False  # same input twice, same bits
    not_served: tuple[str, ...] = ()  # stress draws of the operator that it need not be right for
    builtin: bool = False
    devices: tuple[str, ...] = ("cuda",)
    limits: Limits = Limits()
    checkout: Checkout | None = None  # of a revision that is compared with another
    baseline: Subject | None = None  # the same subject at the other revision

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, to be handed to a worker process."""
        table: dict[str, Any] = TypeAdapter(Subject).dump_python(self, mode="json")
        return table

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> Subject:
        """Return the inverse of ``to_json``."""
        return TypeAdapter(cls).validate_python(table)


def add_python_path(subject: Subject) -> None:
    """Put the subject's folders first in ``sys.path``, as running a script in them would."""
    for entry in reversed(subject.python_path):
        folder = str((subject.folder / entry).resolve())
        if folder not in sys.path:
            sys.path.insert(0, folder)


def load_attribute(entry_point: str) -> Callable[..., Any]:
    """Import ``module:attribute``. Raises ``SubjectError`` when it is missing or cannot be called."""
    module_name, _, attribute = entry_point.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            hint = did_you_mean(part, dir(found))
            raise SubjectError(f"entry point {entry_point}: the module has no attribute {part!r}", hint=hint)
        found = getattr(found, part)
    if not callable(found):
        raise SubjectError(f"entry point {entry_point} must be callable, got {type(found).__name__}")
    entry: Callable[..., Any] = found
    return entry


def expand_sources(subject: Subject) -> tuple[list[str], list[str]]:
    """Return the source files, with patterns such as ``csrc/*.cu`` expanded, and the entries that match no file."""
    return expand_paths(subject.folder, subject.sources)


def expand_paths(folder: Path, entries: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the files of ``folder`` that the entries and patterns name, and the entries that name none."""
    found: dict[str, None] = {}
    missing = []
    for entry in entries:
        if any(letter in entry for letter in "*?["):
            paths = sorted(path for path in folder.glob(entry) if path.is_file())
            matches = [path.relative_to(folder).as_posix() for path in paths]
        else:
            matches = [entry] if (folder / entry).is_file() else []
        found.update(dict.fromkeys(matches))
        if not matches:
            missing.append(entry)
    return list(found), missing


def hash_sources(subject: Subject) -> list[SourceFile]:
    """Return the sources that exist, with the SHA-256 of their bytes."""
    paths, _ = expand_sources(subject)
    return [
        SourceFile(path=path, sha256=hashlib.sha256((subject.folder / path).read_bytes()).hexdigest()) for path in paths
    ]
