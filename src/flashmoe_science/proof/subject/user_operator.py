"""A user's own operator: its errors are reported as its own, and not as errors of the harness or of the kernel."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from ...errors import FlashmoeError, OperatorError, ProofError, page
from .failure_hints import explain_import
from .registry import find_operator, is_user_defined

if TYPE_CHECKING:
    from .operator import Operator

_HINT = f"the operator's own code does this; {page('reference/operators')} says what each of its methods returns"
_PACKAGE = Path(__file__).resolve().parents[2]
_LIBRARIES = tuple({Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

# By the name that it was asked for by, and the id of the operator, which is kept, so that no other gets it.
_guarded: dict[tuple[str, int], tuple[Any, Operator]] = {}


def load_user_operator(name: str) -> Operator:
    """Return the operator ``module:OBJECT``. Errors of its methods become ``OperatorError``; ours stay as they are.

    Raises:
        OperatorError: it cannot be loaded: says file, line and cause.
    """
    with _blamed(f"operator {name} cannot be loaded"):
        operator = find_operator(name)
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
            is_method = callable(value) and not isinstance(value, type) and attribute != "bind"
            setattr(guard, attribute, _told(value, name, attribute) if is_method else value)
    guard.name = name  # as its file has it: an object need not be called OPERATOR
    return cast("Operator", guard)


def _told(method: Callable[..., Any], operator: str, attribute: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def asked(*args: Any, **kwargs: Any) -> Any:
        with _blamed(f"operator {operator}: its method {attribute}"):
            answer = method(*args, **kwargs)
        if expected := _expected_instead(attribute, answer):
            said = f"its method {attribute} must return {expected}, got {answer!r}"[:500]
            raise OperatorError(f"operator {operator}: {said}", hint=_HINT)
        return answer

    return asked


def _expected_instead(method: str, answer: Any) -> str:
    """Return what a method has to return, or an empty text where it did."""
    if method in ("describe", "peak_tflops_key"):
        return "" if isinstance(answer, str) and answer else "a text"
    if method == "baselines":
        return "" if isinstance(answer, Mapping) else "a mapping from names to baselines"
    if method == "work":
        parts = [getattr(answer, part, None) for part in ("flops", "bytes", "tokens")]
        right = all(isinstance(part, (int, float)) and 0 <= part < math.inf for part in parts)
        return "" if right else "flops, bytes and tokens, numbers of at least 0"
    if method == "as_table":
        with contextlib.suppress(TypeError, ValueError):
            return "" if isinstance(answer, dict) and json.dumps(answer) else "a dict"
        return "plain JSON values"
    if method == "make_inputs":
        from torch import Tensor  # a listing should not wait for it

        right = isinstance(answer, Mapping) and all(isinstance(value, Tensor) for value in answer.values())
        return "" if right else "a mapping from names to tensors"
    return ""
