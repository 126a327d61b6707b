"""Suites of users' own operators, read by a worker: the evidence on them is judged where their code must not run.

One process can have one module of a name, and two kernels of a repository may each have an ``my_operator.py``. A worker
gets the folders of one of them, and what it says is plain data.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import FlashmoeError, SuiteError
from ..worker import Emit, run_task
from .operator import Operator
from .registry import find_operator
from .subject import Limits
from .suites import Suite, load_suite
from .user_operator import cause_of

Problems = Mapping[str, dict[str, Any]]  # of the cases by name, as the operator writes them


def read_user_suite(path: Path, operator: str, folders: Sequence[Path]) -> Problems:
    """Return the cases of the suite in ``path``; its ``operator`` lies in ``folders`` or beside the suite.

    Raises:
        SuiteError: the file is wrong, or the operator's code does not load, hangs or crashes.
    """
    searched = _searched(path, folders)
    if is_loaded(operator, path, folders):  # its code runs here in any case
        return _problems(load_suite(str(path)))
    files = tuple((file, file.stat().st_mtime_ns) for file in (path, *_module_files(operator, searched)))
    return _ask(path, searched, files)


@functools.lru_cache(maxsize=256)
def _ask(path: Path, folders: tuple[Path, ...], _files: tuple[tuple[Path, int], ...]) -> Problems:
    """Let a worker read it, once for each state of its files."""
    payload = {"suite": str(path), "python_path": [str(folder) for folder in folders]}
    result = run_task(f"{__name__}:read_suite", payload, timeout_s=Limits.import_s)
    if not result.ok or result.data is None:
        raise SuiteError(f"{path}: the process that read it: {result.reason}")
    if "failure" in result.data:
        raise SuiteError(result.data["failure"], hint=result.data["hint"])
    problems: Problems = result.data["problems"]
    return problems


def read_suite(payload: dict[str, Any], emit: Emit) -> dict[str, Any]:  # noqa: ARG001 - all tasks take it
    """Read the file ``suite``, whose operator is found on ``python_path``: the task of a worker.

    Returns ``problems``, those of the cases by name; or ``failure`` and ``hint``.
    """
    sys.path[:0] = payload["python_path"]
    try:
        return {"problems": _problems(load_suite(payload["suite"]))}
    except FlashmoeError as error:
        return {"failure": error.message, "hint": error.hint}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever their code raises is the answer
        return {"failure": f"{payload['suite']}: {cause_of(error)}", "hint": ""}


def _problems(suite: Suite) -> dict[str, dict[str, Any]]:
    operator: Operator = find_operator(suite.operator)
    return {case.name: operator.as_table(case.problem) for case in suite.cases}


def _module_files(operator: str, folders: Sequence[Path]) -> list[Path]:
    """Return the files in ``folders`` that importing the operator would read first."""
    top, *rest = operator.partition(":")[0].split(".")
    places = [Path(f"{top}.py"), Path(top, "__init__.py"), Path(top, *rest).with_suffix(".py")]
    return [file for folder in folders for place in places if (file := folder / place).is_file()]


def _searched(path: Path, folders: Sequence[Path]) -> tuple[Path, ...]:
    return tuple(dict.fromkeys([*folders, path.parent]))


def is_loaded(operator: str, path: Path, folders: Sequence[Path]) -> bool:
    """Return whether this process has the very module that the suite in ``path`` would get: its code ran already."""
    file = getattr(sys.modules.get(operator.partition(":")[0]), "__file__", None)
    there = _module_files(operator, _searched(path, folders))
    return file is not None and (not there or Path(file).resolve() in {each.resolve() for each in there})
