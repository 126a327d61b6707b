"""Read a TOML file into a pydantic model, with errors that name file, key and what was expected."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from ...errors import FlashmoeError, shown
from .files import read_bounded

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SIZE_LIMIT = 1 << 20  # bytes
_DEPTH_LIMIT = 32  # brackets inside one another, and parts of one key

# What decides how deep a file is nested; a text or a comment is skipped as one.
_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"""|' + r"'''.*?'''" + r'|"(?:[^"\\\n]|\\.)*"' + r"|'[^'\n]*'|#[^\n]*|[\[\]{}.,=\n]", re.DOTALL
)

ModelT = TypeVar("ModelT", bound=BaseModel)


def read_toml(path: Path, model: type[ModelT], error: type[FlashmoeError], *, hint: str = "") -> ModelT:
    """Read ``path`` as TOML and validate it as ``model``.

    Raises:
        error: the file cannot be read, is no TOML, or breaks the model. The message names file, key, expected and got.
    """
    try:
        text = read_bounded(path, _SIZE_LIMIT).decode("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else str(problem)
        raise error(f"{path}: cannot be read: {reason}", hint=hint) from problem
    return parse_toml(text, path, model, error, hint=hint)


def parse_toml(text: str, path: Path, model: type[ModelT], error: type[FlashmoeError], *, hint: str = "") -> ModelT:
    """Validate ``text``, which is that of ``path``, as ``model``. Raises ``error`` as ``read_toml`` does."""
    if _is_too_deep(text):
        raise error(f"{path}: expected at most {_DEPTH_LIMIT} tables inside one another, got more", hint=hint)
    try:
        table = tomllib.loads(text.replace("\r\n", "\n"))
    except tomllib.TOMLDecodeError as problem:
        raise error(f"{path}: is not valid TOML: {problem}", hint=hint) from problem
    try:
        return model.model_validate(table)
    except ValidationError as problem:
        lines = [f"{path}: {line}" for line in explain_validation(problem, model)]
        raise error("\n".join(lines), hint=hint) from problem


def _is_too_deep(text: str) -> bool:
    """Return whether a file is nested deeper than any of ours. Reading it could take minutes, or end this process."""
    brackets = parts = 0
    for found in _TOKEN.finditer(text):
        mark = found[0]
        if mark in "[{":
            brackets, parts = brackets + 1, 0
        elif mark in "]}":
            brackets = max(0, brackets - 1)
        elif mark == ".":
            parts += 1
        elif mark in ",=\n":
            parts = 0
        if brackets > _DEPTH_LIMIT or parts > _DEPTH_LIMIT:
            return True
    return False


def explain_validation(problem: ValidationError, model: type[BaseModel]) -> list[str]:
    """Return one line for each broken key: ``key launch.kernels.0.block: expected three integers, got [128]``."""
    lines = []
    for detail in problem.errors():
        key = ".".join(str(part) for part in detail["loc"]) or "(document)"
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "missing":
            lines.append(f"key {key}: missing, expected {_description(model, detail['loc']) or 'a value'}")
        elif detail["type"] == "extra_forbidden":
            table = _model_at(model, detail["loc"][:-1])
            known = list(table.model_fields) if table else []
            near = difflib.get_close_matches(str(detail["loc"][-1]), known, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            lines.append(f"key {key}: unknown key, expected one of {', '.join(known)}{meant}")
        elif detail["type"] == "list_type" and isinstance(detail["input"], dict) and _model_at(model, detail["loc"]):
            lines.append(f"key {key}: expected a list of tables: write [[{key}]], not [{key}]")
        elif detail["type"] in OUR_WORDS:
            expected = _description(model, detail["loc"]) or OUR_WORDS[detail["type"]]
            lines.append(f"key {key}: expected {expected}, got {shown(detail['input'])}")
        else:
            expected = message.replace("Input should be", "expected", 1)
            lines.append(f"key {key}: {expected}, got {shown(detail['input'])}")
    return lines


# What pydantic says of these ("List should have at least 1 item after validation") is of Python, not of a file. The
# description of a key says more; where it has none, these do.
OUR_WORDS = {
    "string_pattern_mismatch": "another text",
    "string_too_short": "a text that is not empty",
    "string_type": "a text",
    "list_type": "a list",
    "tuple_type": "a list",
    "too_short": "at least one",
    "dict_type": "a table",
    "model_type": "a table",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
}


def _model_at(model: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel] | None:
    """Return the model of the table at ``location``, or None where the key is no table of ours."""
    current: type[BaseModel] | None = model
    names_next = False  # of a table whose keys are anybody's, e.g. [gpu.NAME]
    for part in location:
        if isinstance(part, int) or names_next:
            names_next = False
            continue
        field = current.model_fields.get(part) if current else None
        names_next = field is not None and get_origin(field.annotation) is dict
        current = _model_in(field.annotation) if field else None
    return current


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the first model inside an annotation such as ``list[Kernel] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)


def _description(model: type[BaseModel], location: Sequence[int | str]) -> str | None:
    """Return what belongs at a key: the description of its field."""
    table = _model_at(model, location[:-1])
    field = table.model_fields.get(str(location[-1])) if table else None
    return field.description if field else None
