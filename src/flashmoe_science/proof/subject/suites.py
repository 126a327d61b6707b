"""Named shapes, each with where it comes from: packaged TOML files, and a user's own."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Hashable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from ...errors import InputError, SubjectError, SuiteError, page
from ..records.evidence import Record
from ..records.toml_files import read_toml
from ..text import did_you_mean
from .loading import load_operator
from .registry import is_user_defined
from .user_operator import cause_of

if TYPE_CHECKING:
    from .subject import Subject

_HINT = f"the format is in {page('reference/suites')}"


@dataclass(frozen=True)
class SuiteCase:
    """One shape. ``problem`` is the operator's own description of one call."""

    name: str
    problem: Hashable
    origin: str  # where the shape comes from


@dataclass(frozen=True)
class Suite:
    """Shapes of one operator."""

    name: str
    operator: str
    description: str
    cases: tuple[SuiteCase, ...]
    path: Path


class _SuiteFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="a name of letters, digits, '_', '.' and '-'"
    )
    operator: str = Field(description="an operator, e.g. 'attention'")
    description: str = Field(min_length=1, description="one sentence")
    defaults: dict[str, Any] = Field(default={}, description="a table of the keys that every case has")
    cases: list[dict[str, Any]] = Field(min_length=1, description="a list of tables [[cases]]")


class _Named(BaseModel):
    """What tells a suite from other TOML files."""

    name: str
    operator: str
    cases: list[dict[str, Any]]


def list_suites() -> dict[str, Path]:
    """Return the packaged suites: name -> file."""
    folder = Path(str(resources.files("flashmoe_science") / "suites"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"), key=lambda path: path.stem)}


def load_suite(name_or_path: str) -> Suite:
    """Return the packaged suite of this name, or the one in this file.

    Raises ``SuiteError`` where there is no such suite, or the file is wrong (names file, key and the expected value).
    """
    packaged = list_suites()
    path = packaged.get(name_or_path, Path(name_or_path))
    if path.suffix != ".toml" and not path.exists():
        hint = did_you_mean(name_or_path, packaged, f"give the path of a suite file, see {page('reference/suites')}")
        raise SuiteError(f"suite must be one of {', '.join(packaged)} or a file, got {name_or_path!r}", hint=hint)
    file = read_toml(path, _SuiteFile, SuiteError, hint=_HINT)
    same = packaged.get(file.name, path)
    if same != path and same.read_bytes() != path.read_bytes():  # a claim tells its reader the name alone
        message = f"{path}: key name: a packaged suite of other cases is called {file.name!r}"
        raise SuiteError(message, hint="give it a name of its own")
    return Suite(file.name, file.operator, file.description, _parse_cases(file, path), path)


def suite_beside(subject: Subject) -> Path | None:
    """Return the file suite.toml beside a kernel.toml, where it is a suite of the subject's operator."""
    path = subject.folder / "suite.toml"
    return path if not subject.builtin and path.is_file() and operator_in(path) == subject.operator else None


def check_operator(suite: Suite, subject: Subject) -> None:
    """Refuse a suite of another operator than the subject's. Raises ``SuiteError``, with the suite beside it if any."""
    if suite.operator == subject.operator:
        return
    beside = subject.folder / "suite.toml"
    own = [name for name, path in list_suites().items() if operator_in(path) == subject.operator]
    hint = f"--suite {' or '.join(own)}" if own else f"{page('reference/suites')} says how to write one"
    if beside.is_file() and beside.resolve() != suite.path.resolve():
        here = Path.cwd().resolve()
        found = beside.resolve()
        hint = f"--suite {shlex.quote(str(found.relative_to(here) if found.is_relative_to(here) else found))}"
    raise SuiteError(
        f"suite {suite.name} is of operator {suite.operator!r}, and subject {subject.name} of {subject.operator!r}",
        hint=hint,
    )


def suite_text(record: Record, repository: Path | None) -> str:
    """Return what ``load_suite`` takes for the suite of ``record``: the file in ``repository``, or its name."""
    own = user_suite_file(record, repository) if repository is not None else None
    return str(own) if own is not None else record.suite


def user_suite_file(record: Record, repository: Path) -> Path | None:
    """Return the file of a record's suite in ``repository``, or None: it is a packaged one, or not there.

    It is looked for in ``suites/``, by its file's name, and then beside the subject's kernel.toml, by its own name.
    """
    kept = repository / "suites" / f"{record.suite}.toml"
    if kept.is_file() and kept.resolve().is_relative_to(repository.resolve()):
        return kept
    if record.subject.folder is None or (
        record.suite in list_suites() and not is_user_defined(record.subject.operator)
    ):
        return None
    folder = repository / record.subject.folder
    if not folder.resolve().is_relative_to(repository.resolve()):
        return None
    beside = sorted(folder.glob("*.toml"))
    return next((path for path in beside if _name_and_operator(path)[0] == record.suite), None)


def _name_and_operator(path: Path) -> tuple[str, str]:
    """Return what a file says it is a suite of, and of which operator; empty texts where it is no suite."""
    try:
        table = read_toml(path, _Named, SuiteError)
    except SuiteError:
        return "", ""
    return table.name, table.operator


def operator_in(path: Path) -> str:
    """Return the operator that a suite file names, or an empty text where it is none."""
    return _name_and_operator(path)[1]


def _parse_cases(file: _SuiteFile, path: Path) -> tuple[SuiteCase, ...]:
    if is_user_defined(file.operator) and (beside := str(path.resolve().parent)) not in sys.path:
        sys.path.append(beside)  # a user's own operator may lie beside its suite
    try:
        operator = load_operator(file.operator)
    except (SubjectError, ImportError) as error:
        message = error.message if isinstance(error, SubjectError) else cause_of(error)
        raise SuiteError(f"{path}: key operator: {message}", hint=_HINT) from error
    cases: dict[str, SuiteCase] = {}
    for index, own in enumerate(file.cases):
        table = {**file.defaults, **own}
        key = f"{path}: key cases.{index}"
        origin, name = table.pop("origin", None), table.pop("name", None)
        if not isinstance(origin, str) or not origin:
            raise SuiteError(f"{key}.origin: expected where this shape comes from, got {origin!r}", hint=_HINT)
        try:
            problem = operator.parse_case(table)
        except InputError as error:
            raise SuiteError(f"{key}: {str(error).partition(chr(10))[0]}", hint=error.hint or _HINT) from error
        name = operator.describe(problem) if name is None else name
        if not isinstance(name, str) or not name:
            raise SuiteError(f"{key}.name: expected a text, got {name!r}", hint=_HINT)
        if name in cases:
            raise SuiteError(f"{key}: the name {name!r} is taken by an earlier case", hint="give it a name of its own")
        cases[name] = SuiteCase(name, problem, origin)
    return tuple(cases.values())
