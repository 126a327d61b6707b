"""Load a subject by its name or file, its operator, and its entry point."""

from __future__ import annotations

import contextlib
import difflib
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from ...errors import InputError, SubjectError, page
from ...gpu.specs import SPECS, find_gpu
from ..records.evidence import Record, SubjectInfo
from ..records.toml_files import read_toml
from ..text import did_you_mean
from .operator import ours, stress_draws_of
from .registry import BUILTIN_OPERATORS, find_operator, is_user_defined
from .subject import PACKAGE_FOLDER, PYTHON, KernelPromise, Limits, Subject, add_python_path, load_attribute
from .user_operator import load_user_operator

if TYPE_CHECKING:
    from .operator import Operator

_HINT = f"the format is in {page('reference/kernel-toml')}"


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
    not_served: list[str] = []
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

    ``time_limit``: seconds of silence allowed to a worker, whatever it does; by default those of the file. Raises
    ``SubjectError`` where there is no such subject, or the file is wrong (names file, key and the expected value).
    """
    path = Path(text)
    if path.suffix == ".py":
        near = next((f"beside it is {file}" for file in _files_beside(path)), _HINT)
        raise SubjectError(f"{text}: a .py is no subject: name its kernel.toml", hint=near)
    if path.suffix != ".toml" and len(path.parts) == 1:
        names = builtin_names()
        if text in names:  # a folder of the same name is meant by "./name"
            return _with_limit(_builtin_subject(names[text], text), time_limit)
        if not path.exists():
            near = ", ".join(difflib.get_close_matches(text, names))
            hint = f"did you mean {near}?" if near else f"a kernel.toml is described in {page('reference/kernel-toml')}"
            files = [file for file, name in _files_beside(path).items() if name == text]
            hint = f"name its file: ./{files[0]}" if files else hint
            raise SubjectError(f"there is no file or folder {text!r}, and no kernel of ours of that name", hint=hint)
    return _subject_from_file(path / "kernel.toml" if path.is_dir() else path, time_limit)


def _files_beside(path: Path) -> dict[Path, str]:
    """Return the TOML files in the folder of ``path`` that describe a subject, with its name; kernel.toml is first."""
    found = {}
    for file in sorted(path.parent.glob("*.toml"), key=lambda file: (file.name != "kernel.toml", file.name)):
        with contextlib.suppress(SubjectError):  # it has a mistake, or describes something else
            found[file] = read_toml(file, _KernelFile, SubjectError).subject.name
    return found


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


def same_entry(one: str, other: str) -> bool:
    """Return whether two entry points are one; of our own package its files may have moved since a record."""
    (module, _, name), (other_module, _, other_name) = one.partition(":"), other.partition(":")
    is_ours = {module.partition(".")[0], other_module.partition(".")[0]} == {PACKAGE_FOLDER.name}
    return one == other or (is_ours and name == other_name)


def _builtin_subject(operator_name: str, name: str) -> Subject:
    operator = ours(load_operator(operator_name))
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
    near = [] if path.exists() else difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")])
    hint = f"did you mean {path.parent / near[0]}?" if near else _HINT
    file = read_toml(path, _KernelFile, SubjectError, hint=hint)
    table, build, launch = file.subject, file.build, file.launch
    if table.name in builtin_names():  # its record would count as evidence on ours
        message = f"expected a name that none of our own subjects has, got {table.name!r}"
        raise SubjectError(f"{path}: key subject.name: {message}", hint="give it a name of its own")
    told: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in table.model_dump().items()
    }
    told["sources"] = tuple(dict.fromkeys([path.name, *table.sources]))  # the file itself decides the result too
    subject = Subject(
        **told,
        folder=path.resolve().parent,
        build_command=tuple(build.command) if build.command else None,
        build_timeout_s=build.timeout_s,
        build_needs=tuple(build.needs),
        binaries=tuple(build.binaries),
        gpus=tuple(build.gpus),
        compile_jobs=build.compile_jobs,
        kernels=tuple(KernelPromise(**kernel.model_dump()) for kernel in launch.kernels),
        forbidden_kernels=tuple(launch.forbidden),
        limits=Limits(**file.limits.model_dump()),
    )
    subject = _with_limit(subject, time_limit)
    try:
        operator = operator_of(subject)
    except SubjectError as error:
        raise SubjectError(f"{path}: key subject.operator: {error.message}", hint=error.hint) from error
    draws = stress_draws_of(operator)
    if unknown := [name for name in subject.not_served if name not in draws]:
        expected = f"names of stress draws of {subject.operator} ({', '.join(draws) or 'it has none'})"
        hint = did_you_mean(unknown[0], draws, _HINT)
        raise SubjectError(f"{path}: key subject.not_served: expected {expected}, got {unknown[0]!r}", hint=hint)
    return subject


def operator_of(subject: Subject) -> Operator:
    """Return the operator that ``subject`` implements; a user's own is looked for on the subject's ``python_path``."""
    if is_user_defined(subject.operator):
        add_python_path(subject)
    operator = load_operator(subject.operator)
    if subject.checkout is None:
        return operator
    from .revision_import import at_revision

    return at_revision(operator, subject)


def load_operator(name: str) -> Operator:
    """Return the operator called ``name``. Raises ``SubjectError``: there is none, it does not fit, or it raises."""
    return load_user_operator(name) if is_user_defined(name) else find_operator(name)


def load_entry(subject: Subject) -> Callable[..., Any]:
    """Import the entry point. It runs the subject's code: call it in a worker process only.

    Raises:
        SubjectError: the module has no such attribute, or it cannot be called.
    """
    add_python_path(subject)
    if subject.checkout is None:
        return load_attribute(subject.entry_point)
    from .revision_import import load_revision

    return load_revision(subject)


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
    if not path.is_file() or not is_inside(path, repository):
        raise SubjectError(f"{path}: the file of {subject.name} in run {record.id} is not there", hint=hint)
    return str(path)


def is_inside(path: Path, repository: Path) -> bool:
    """Return whether a path that a record names lies in its repository, links followed."""
    return path.resolve().is_relative_to(repository.resolve())


def python_folders(record: Record, repository: Path) -> list[Path]:
    """Return where the modules of a record's subject are looked for in ``repository``, as far as its file says now."""
    if record.subject.folder is None:
        return []
    folder, entries = repository / record.subject.folder, ["."]
    if record.subject.sources:
        with contextlib.suppress(SubjectError):  # the file is gone, or wrong now: the folder itself may do
            path = folder / record.subject.sources[0].path
            entries = read_toml(path, _KernelFile, SubjectError, hint=_HINT).subject.python_path
    return [found for entry in entries if is_inside(found := (folder / entry).resolve(), repository)]
