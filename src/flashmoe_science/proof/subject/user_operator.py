"""A user's own operator: its code runs in a worker first, and its errors here are reported as its own.

A module that somebody wrote may raise, hang or crash while it is imported, and its methods whenever they are called.
The main process keeps the record of a run: code runs in it only after it has run in a worker once. The kernel runs in a
worker too. An operator error there ends the run; it is not reported as a kernel error.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import math
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from ...errors import FlashmoeError, OperatorError, ProofError, page
from ..processes import TaskResult
from ..worker import Emit, in_worker, run_task
from .failure_hints import explain_import
from .registry import find_operator, is_user_defined

if TYPE_CHECKING:
    from .operator import Operator

_HINT = f"the operator's own code does this; {page('reference/operators')} says what each of its methods returns"
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')  # as faulthandler writes it
_PACKAGE = Path(__file__).resolve().parents[2]
_LIBRARIES = tuple({Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

_tried: set[str] = set()  # modules of operators that were imported here after a worker had come back from it
_tried_cases: set[str] = set()
# By the name that it was asked for by, and the id of the operator, which is kept, so that no other gets it.
_guarded: dict[tuple[str, int], tuple[Any, Operator]] = {}


def load_user_operator(name: str, *, timeout_s: float) -> Operator:
    """Return the operator ``module:OBJECT``: imported in a worker first, and then here.

    Errors of its methods in this process become ``OperatorError``; errors of ours stay as they are.

    Raises:
        OperatorError: it cannot be loaded, or not within ``timeout_s``: says file, line and cause.
    """
    module = name.partition(":")[0]
    if module not in sys.modules and importlib.util.find_spec(module.partition(".")[0]) is not None:
        _try({"operator": name}, f"operator {name} cannot be loaded", timeout_s)
        _tried.add(module)
    with _blamed(f"operator {name} cannot be loaded"):
        operator = find_operator(name)
    if module not in _tried:  # something else imported it here: what it raises there it raises here
        return operator
    return _guarded_once(operator, name)


def find_user_operator(name: str) -> Operator:
    """Return the operator ``module:OBJECT`` in a worker: errors of its methods become ``OperatorError``."""
    return _guarded_once(find_operator(name), name)


def _guarded_once(operator: Operator, name: str) -> Operator:
    key = name, id(operator)
    if key not in _guarded:
        _guarded[key] = operator, _guard(operator, name)
    return _guarded[key][1]


@contextlib.contextmanager
def blaming(name: str) -> Iterator[None]:
    """Turn an error of the harness about the answer of a user's operator into an ``OperatorError``."""
    try:
        yield
    except OperatorError:
        raise
    except ProofError as error:
        if not is_user_defined(name):
            raise
        raise OperatorError(f"operator {name}: {error.message}", hint=error.hint or _HINT) from error


def raise_blamed(reason: str) -> None:
    """Raise the ``OperatorError`` by which a task in a worker ended, if ``reason`` holds one."""
    _, found, said = reason.partition(f"{OperatorError.__name__}: operator ")
    if found:
        raise OperatorError(f"operator {said}", hint=_HINT)


def try_cases(name: str, tables: Sequence[Mapping[str, Any]], *, timeout_s: float) -> None:
    """Let a worker ask the operator all that this process is going to ask of these cases. Once is enough.

    A module that something else has imported here is trusted: it runs in this process in any case.

    Raises:
        OperatorError: a method raises, hangs, crashes, or returns what it must not: says file, line and cause.
    """
    text = json.dumps(tables, default=str)  # TOML has dates
    key = f"{name} {text}"
    if name.partition(":")[0] not in _tried or key in _tried_cases:
        return
    _try({"operator": name, "cases": json.loads(text)}, f"operator {name}", timeout_s)
    _tried_cases.add(key)


def _try(payload: dict[str, Any], what: str, timeout_s: float) -> None:
    result = run_task(f"{__name__}:ask_operator", payload, timeout_s=timeout_s)
    if not result.ok or result.data is None:
        hint = "[limits] import_s in the kernel.toml, or --time-limit, allows more" if result.timed_out else _HINT
        raise OperatorError(f"{what}: {_how_it_ended(result)}", hint=hint)
    if "failure" in result.data:
        raise OperatorError(f"{what}: {result.data['failure']}", hint=result.data["hint"])


def _how_it_ended(result: TaskResult) -> str:
    """Return why a worker gave no answer, and its last known line of code."""
    frames = (found for line in result.output_tail.splitlines() if (found := _FRAME.search(line)) is not None)
    frame = next((found for found in frames if _is_theirs(found["file"])), None)
    where = f" ({Path(frame['file']).name}:{frame['line']} in {frame['name']})" if frame is not None else ""
    return f"{result.reason}{where}"


def ask_operator(payload: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Load an operator and call its methods for ``cases``, tables of a suite: the task of a worker.

    Returns nothing, or ``failure`` and ``hint``. The suite itself reports a case that the operator refuses.
    """
    asked = ""  # the method under way

    def ask(method: str, *arguments: Any) -> Any:
        nonlocal asked
        asked = f"its method {method}: "
        return getattr(operator, method)(*arguments)

    try:
        operator = find_operator(payload["operator"])
        baselines = ask("baselines")
        if not isinstance(baselines, Mapping):
            return _wrong("baselines", "a mapping from names to baselines", baselines)
        for table in payload.get("cases", ()):
            emit({"event": "case"})
            if (wrong := _wrong_answer(ask, table)) is not None:
                return wrong
    except FlashmoeError as error:
        return {"failure": asked + error.message, "hint": error.hint or _HINT}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - an error of their code is the answer
        return {"failure": asked + cause_of(error), "hint": _hint_of(error)}
    return {}


def _wrong_answer(ask: Callable[..., Any], table: dict[str, Any]) -> dict[str, Any] | None:
    """Call each method that the main process calls for a case; return the first wrong answer."""
    try:
        problem = ask("parse_case", table)
    except FlashmoeError:
        return None  # the suite reports it
    found = ask("as_table", problem)
    try:
        json.dumps(found)
    except (TypeError, ValueError):
        return _wrong("as_table", "plain JSON values", found)
    if not isinstance(found, dict):
        return _wrong("as_table", "a dict of plain JSON values", found)
    for method in ("describe", "peak_tflops_key"):
        text = ask(method, problem)
        if not isinstance(text, str) or not text:
            return _wrong(method, "a text", text)
    work = ask("work", problem)
    for part in ("flops", "bytes", "tokens"):
        value = getattr(work, part, None)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
            return _wrong("work", f"{part}, a number of at least 0", value if hasattr(work, part) else work)
    return None


def _wrong(method: str, expected: str, got: object) -> dict[str, Any]:
    return {"failure": f"its method {method} must return {expected}, got {got!r}"[:500], "hint": _HINT}


def cause_of(error: BaseException) -> str:
    """Return an error of a user's code in one line, with its place in their files."""
    said = explain_import(error)[0] if isinstance(error, (ImportError, OSError)) else ""
    message = str(error).strip().partition("\n")[0]
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename or '?').name}:{error.lineno})"
    said = said or (f"{type(error).__name__}: {message}" if message else type(error).__name__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_theirs(frame.filename)]
    return f"{said} ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else said


def _hint_of(error: BaseException) -> str:
    return (explain_import(error)[1] if isinstance(error, (ImportError, OSError)) else "") or _HINT


def _is_theirs(file: str) -> bool:
    """Return whether a frame of this file is of the user's code: not ours, Python's, or of an installed package."""
    path = Path(file)
    return not file.startswith("<") and not any(path.is_relative_to(each) for each in (_PACKAGE, *_LIBRARIES))


@contextlib.contextmanager
def _blamed(what: str) -> Iterator[None]:
    """Turn errors raised inside into ``OperatorError``. Errors of ours stay as they are."""
    try:
        yield
    except FlashmoeError:
        raise
    except (Exception, SystemExit) as error:
        if _is_of_the_gpu(error):  # the line of a GPU error does not show its cause
            raise
        raise OperatorError(f"{what}: {cause_of(error)}", hint=_hint_of(error)) from error


def _is_of_the_gpu(error: BaseException) -> bool:
    return type(error).__name__ == "OutOfMemoryError" or "CUDA" in str(error)


def _guard(operator: Operator, name: str) -> Operator:
    """Return an object with all attributes of ``operator``, whose methods raise errors of ours only.

    An instance's own attributes: whether an operator offers a protocol is asked of them, and not of ``__getattr__``.
    """
    guard = SimpleNamespace()
    with _blamed(f"operator {name} cannot be loaded"):
        for attribute in (each for each in dir(operator) if not each.startswith("_")):
            value = getattr(operator, attribute)
            # A call that is bound runs the kernel, and what that raises is not the operator's.
            is_method = callable(value) and not isinstance(value, type) and not (in_worker() and attribute == "bind")
            setattr(guard, attribute, _told(value, name, attribute) if is_method else value)
    guard.name = name  # as its file has it: an object need not be called OPERATOR
    return cast("Operator", guard)


def _are_inputs(answer: object) -> bool:
    from torch import Tensor  # a listing should not wait for it

    return isinstance(answer, Mapping) and all(isinstance(value, Tensor) for value in answer.values())


def _told(method: Callable[..., Any], operator: str, attribute: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def asked(*args: Any, **kwargs: Any) -> Any:
        with _blamed(f"operator {operator}: its method {attribute}"):
            answer = method(*args, **kwargs)
        if attribute == "make_inputs" and not _are_inputs(answer):
            said = f"make_inputs must return a mapping from names to tensors, got {answer!r}"[:500]
            raise OperatorError(f"operator {operator}: {said}", hint=_HINT)
        return answer

    return asked
