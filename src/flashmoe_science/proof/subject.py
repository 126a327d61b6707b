"""What is on trial: one of our own implementations, or somebody's kernel described by a ``kernel.toml``."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, TypeAdapter

from ..errors import InputError, SubjectError
from ..gpu.specs import SPECS, find_gpu
from .evidence import Record, SourceFile, SubjectInfo
from .toml_files import read_toml

if TYPE_CHECKING:
    from .operator import Operator

# Our own operators with the names of their subjects, here so that a listing need not import torch.
BUILTIN_OPERATORS = {
    "attention": (
        *("flash_attention", "forward_triton", "forward_short_gluon"),
        *("forward_gluon_sm90", "forward_features_gluon_sm90"),
    ),
    "attention_backward": ("flash_attention_backward", "backward_triton", "backward_gluon_sm90"),
    "attention_cache": ("flash_attention_with_kv_cache", "decode_gluon_sm90", "decode_triton"),
    "attention_train": ("attention_step",),
    "attention_varlen": ("flash_attention_varlen", "varlen_triton", "varlen_gluon_sm90"),
    "moe": ("fused_moe", "gemv_triton", "few_triton", "grouped_triton", "grouped_gluon_sm90"),
    "moe_backward": ("fused_moe_backward", "moe_backward_triton", "moe_backward_gluon_sm90"),
}

PACKAGE_FOLDER = Path(__file__).resolve().parent.parent

PYTHON = "{python}"  # in a build command: the Python that runs the harness

_HINT = "the format is in docs/reference/kernel-toml.md"


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
    """What is on trial. ``sources`` and ``python_path`` are relative to ``folder``."""

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
    builtin: bool = False
    devices: tuple[str, ...] = ("cuda",)
    limits: Limits = Limits()
    checkout: Checkout | None = None  # of a revision that is compared with another
    rival: Subject | None = None  # the same subject at the other revision, which is the baseline

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, to be handed to a worker process."""
        table: dict[str, Any] = TypeAdapter(Subject).dump_python(self, mode="json")
        return table

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> Subject:
        """Return the inverse of ``to_json``."""
        return TypeAdapter(cls).validate_python(table)


def _three_positive_integers(value: Any) -> Any:
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise ValueError("expected three integers")
    if not all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in value):
        raise ValueError("expected three integers above 0")
    return tuple(value)


def _words(value: Any) -> Any:
    return shlex.split(value) if isinstance(value, str) else value


def _placeholders(words: list[str]) -> list[str]:
    wrong = [word for word in words if re.fullmatch(r"\{\w+\}", word) and word != PYTHON]
    if wrong:
        raise ValueError(f"expected no word in braces but {PYTHON}, the Python that runs the harness")
    return words


def _relative_path(value: Any) -> Any:
    if isinstance(value, str) and Path(value).is_absolute():
        raise ValueError("expected a path relative to this file")
    return value


def _known_gpu(value: Any) -> Any:
    if isinstance(value, str):
        try:
            find_gpu(value)
        except InputError as error:
            raise ValueError(f"expected one of {', '.join(SPECS)}") from error
    return value


_Gpu = Annotated[str, BeforeValidator(_known_gpu)]
_Dim3 = Annotated[tuple[int, int, int], BeforeValidator(_three_positive_integers)]
_Path = Annotated[str, BeforeValidator(_relative_path), StringConstraints(min_length=1)]
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
_EntryPoint = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
_Words = Annotated[list[str], BeforeValidator(_words), Field(min_length=1), AfterValidator(_placeholders)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False, description="a number of seconds above 0")]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)  # "no" is no boolean, and "1.7" no number


class _SubjectTable(_Table):
    name: _Name = Field(description="a name of letters, digits, '_', '.' and '-'")
    operator: str = Field(description="the operator that it implements, e.g. 'attention'")
    entry_point: _EntryPoint = Field(description="'module:attribute'")
    sources: list[_Path] = Field(min_length=1, description="a list of files that decide the result")
    python_path: list[_Path] = ["."]
    devices: list[Literal["cuda", "cpu"]] = Field(default=["cuda"], min_length=1)
    deterministic: bool = False
    expected_speedup: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class _BuildTable(_Table):
    command: _Words | None = None
    timeout_s: float = Field(default=1800.0, gt=0, allow_inf_nan=False)
    needs: list[str] = []
    binaries: list[_Path] = []
    gpus: list[_Gpu] = []
    compile_jobs: _EntryPoint | None = Field(default=None, description="'module:function'")


class _KernelTable(_Table):
    pattern: str = Field(min_length=1, description="a pattern on the kernel's name, e.g. '*attend*'")
    grid: _Dim3 | None = None
    block: _Dim3 | None = None
    shared_memory_bytes: int | None = Field(default=None, ge=0)


class _LaunchTable(_Table):
    forbidden: list[str] = []
    kernels: list[_KernelTable] = []


class _LimitsTable(_Table):
    import_s: _Seconds = Limits.import_s
    compile_s: _Seconds = Limits.compile_s
    launch_s: _Seconds = Limits.launch_s
    correct_s: _Seconds = Limits.correct_s
    correct_cpu_s: _Seconds = Limits.correct_cpu_s
    quick_s: _Seconds = Limits.quick_s
    bench_s: _Seconds = Limits.bench_s


class _KernelFile(_Table):
    subject: _SubjectTable = Field(description="a table [subject]")
    build: _BuildTable = _BuildTable()
    launch: _LaunchTable = _LaunchTable()
    limits: _LimitsTable = _LimitsTable()


def load_subject(text: str, *, time_limit: float | None = None) -> Subject:
    """Return the built-in subject called ``text``, or the one that the file ``text`` describes.

    Args:
        text: a name or a path.
        time_limit: seconds of silence allowed to a worker, whatever it does. Default: what the file says.

    Raises:
        SubjectError: no built-in subject has this name, or the file is wrong (names file, key and what was expected).
    """
    path = Path(text)
    if path.suffix == ".py":
        beside = _files_beside(path)
        near = [file for file in beside if file.name == "kernel.toml"] or beside
        hint = f"beside it is {near[0]}" if near else _HINT
        raise SubjectError(f"{text}: a .py is no subject: name its kernel.toml", hint=hint)
    if path.suffix != ".toml" and len(path.parts) == 1:
        names = builtin_names()
        if text in names:  # a folder of the same name is meant by "./name"
            return _with_limit(_builtin_subject(names[text], text), time_limit)
        if not path.exists():
            close = difflib.get_close_matches(text, names, n=1)
            hint = f"did you mean {close[0]}?" if close else "give the path of a kernel.toml"
            if file := _file_that_names(text, Path()):
                hint = f"name its file: ./{file}"
            raise SubjectError(f"subject must be one of {', '.join(names)} or a kernel.toml, got {text!r}", hint=hint)
    return _subject_from_file(path / "kernel.toml" if path.is_dir() else path, time_limit)


def _files_beside(path: Path) -> list[Path]:
    """Return the TOML files in the folder of ``path`` that describe a subject, as pyproject.toml does not."""
    return [file for file in sorted(path.parent.glob("*.toml")) if _has_subject(file)]


def _has_subject(file: Path) -> bool:
    with contextlib.suppress(OSError):  # one that cannot be read is suggested to nobody
        return re.search(rb"^\s*\[\s*subject\s*\]", file.read_bytes(), re.MULTILINE) is not None
    return False


def _file_that_names(name: str, folder: Path) -> Path | None:
    """Return the TOML file in ``folder`` whose subject has this name, or None."""
    for path in _files_beside(folder / name):
        with contextlib.suppress(SubjectError):  # one with a mistake
            if read_toml(path, _KernelFile, SubjectError).subject.name == name:
                return path
    return None


def _with_limit(subject: Subject, seconds: float | None) -> Subject:
    return subject if seconds is None else replace(subject, limits=Limits.of_all(seconds))


def builtin_names() -> dict[str, str]:
    """Return our own subjects: name -> operator."""
    return {name: operator for operator, names in BUILTIN_OPERATORS.items() for name in names}


def is_builtin(subject: SubjectInfo) -> bool:
    """Return whether a record's subject is our own one of this name: an entry point of this package, from its folder.

    The module of the entry point does not count: a file that moves leaves its records valid.
    """
    own_folder = subject.folder is None or PurePosixPath(subject.folder).name == PACKAGE_FOLDER.name
    own_module = subject.entry_point.startswith(f"{PACKAGE_FOLDER.name}.")
    return own_folder and own_module and builtin_names().get(subject.name) == subject.operator


def _builtin_subject(operator_name: str, name: str) -> Subject:
    from .operator import load_operator

    operator = load_operator(operator_name)
    return Subject(
        name=name,
        operator=operator_name,
        entry_point=operator.entry_points()[name],
        folder=PACKAGE_FOLDER,
        sources=tuple(operator.sources(name)),
        python_path=(),
        deterministic=True,  # our kernels add in one order: docs promise the same bits
        builtin=True,
        devices=("cuda", "cpu"),  # Triton's interpreter runs them where there is no GPU
    )


def _subject_from_file(path: Path, time_limit: float | None) -> Subject:
    near = [] if path.exists() else difflib.get_close_matches(path.name, [p.name for p in _files_beside(path)])
    hint = f"did you mean {path.parent / near[0]}?" if near else _HINT
    file = read_toml(path, _KernelFile, SubjectError, hint=hint)
    table, build, launch = file.subject, file.build, file.launch
    if table.name in builtin_names():  # its record would be taken for evidence on ours
        message = f"expected a name that none of our own subjects has, got {table.name!r}"
        raise SubjectError(f"{path}: key subject.name: {message}", hint="give it a name of its own")
    subject = Subject(
        name=table.name,
        operator=table.operator,
        entry_point=table.entry_point,
        folder=path.resolve().parent,
        sources=tuple(dict.fromkeys([path.name, *table.sources])),  # the file itself decides the result too
        python_path=tuple(table.python_path),
        build_command=tuple(build.command) if build.command else None,
        build_timeout_s=build.timeout_s,
        build_needs=tuple(build.needs),
        binaries=tuple(build.binaries),
        gpus=tuple(build.gpus),
        compile_jobs=build.compile_jobs,
        kernels=tuple(KernelPromise(**kernel.model_dump()) for kernel in launch.kernels),
        forbidden_kernels=tuple(launch.forbidden),
        expected_speedup=table.expected_speedup,
        deterministic=table.deterministic,
        devices=tuple(table.devices),
        limits=Limits(**file.limits.model_dump()),
    )
    subject = _with_limit(subject, time_limit)
    try:
        operator_of(subject)
    except SubjectError as error:
        message = str(error).partition("\nhint: ")[0]
        raise SubjectError(f"{path}: key subject.operator: {message}", hint=error.hint) from error
    return subject


def operator_of(subject: Subject) -> Operator:
    """Return the operator that ``subject`` implements; a user's own is looked for on the subject's ``python_path``."""
    from .operator import is_own, load_operator

    if is_own(subject.operator):
        add_python_path(subject)
    operator = load_operator(subject.operator, timeout_s=subject.limits.import_s)
    if subject.checkout is None:
        return operator
    from .isolation import at_revision

    return at_revision(operator, subject)


def add_python_path(subject: Subject) -> None:
    """Put the subject's folders first in ``sys.path``, as running a script in them would."""
    for entry in reversed(subject.python_path):
        folder = str((subject.folder / entry).resolve())
        if folder not in sys.path:
            sys.path.insert(0, folder)


def load_entry(subject: Subject) -> Callable[..., Any]:
    """Import the entry point. It runs the subject's code: call it in a worker process only.

    Raises:
        SubjectError: the module has no such attribute, or it cannot be called.
    """
    add_python_path(subject)
    if subject.checkout is None:
        return load_attribute(subject.entry_point)
    from .isolation import load_revision

    return load_revision(subject)


def load_attribute(entry_point: str) -> Callable[..., Any]:
    """Import ``module:attribute``. Raises ``SubjectError`` when it is missing or cannot be called."""
    module_name, _, attribute = entry_point.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, dir(found), n=1)
            hint = f"did you mean {close[0]}?" if close else ""
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


def subject_text(record: Record, repository: Path | None) -> str:
    """Return what ``load_subject`` takes for the subject of ``record``: its name, or its file in ``repository``.

    Raises:
        SubjectError: the record does not say where its file is, or it is there no more.
    """
    subject = record.subject
    if is_builtin(subject):
        return subject.name
    hint = "name it: flashmoe prove my_kernel.toml --resume RUN"
    if repository is None or subject.folder is None or not subject.sources:
        raise SubjectError(f"run {record.id} does not say where the file of {subject.name} is", hint=hint)
    path = repository / subject.folder / subject.sources[0].path  # a kernel.toml is the first of its sources
    if not path.is_file():
        raise SubjectError(f"{path}: the file of {subject.name} in run {record.id} is not there", hint=hint)
    return str(path)


def python_folders(record: Record, repository: Path) -> list[Path]:
    """Return where the modules of a record's subject are looked for in ``repository``, as far as its file says now."""
    if record.subject.folder is None:
        return []
    folder, entries = repository / record.subject.folder, ["."]
    if record.subject.sources:
        with contextlib.suppress(SubjectError):  # the file is gone, or wrong now: the folder itself may do
            path = folder / record.subject.sources[0].path
            entries = read_toml(path, _KernelFile, SubjectError, hint=_HINT).subject.python_path
    return [(folder / entry).resolve() for entry in entries]


def with_expectation(subject: Subject, speedup: float | None) -> Subject:
    """Return the subject with another expected speedup, or itself when ``speedup`` is None."""
    return subject if speedup is None else replace(subject, expected_speedup=speedup)
