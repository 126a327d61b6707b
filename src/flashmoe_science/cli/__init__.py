"""The command ``flashmoe``: what it returns to the shell, and how it reports an error.

Importing this package needs the standard library only, so that a missing extra gets an answer and not a traceback. The
verbs are in ``app.py``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, cast

from ..errors import CompileError, FlashmoeError, MachineLostError, TooFewRoundsError
from ..proof.text import foreign
from .exit_codes import BUG, GATE_FAILED, HOLDS, INCONCLUSIVE, INTERRUPTED, USAGE

# Modules that the kernels need, and that the extra `proof` installs.
KERNELS = frozenset({"torch", "triton"})
EXTRA = frozenset(
    {"jinja2", "markdown_it", "numpy", "packaging", "pydantic", "pynvml", "rich", "scipy", "tomli", "tomlkit", "typer"}
)
_OBJECTS_UNTIL_COLLECTION = 200_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: that of the process) and return its exit code."""
    args = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if find_spec("typer") is None:
        return _report_missing("typer", args)
    return _run(args)


def _run(args: list[str]) -> int:
    # Nearly all that a verb reads lives until it ends. Looking for garbage in it often makes `verify` slower.
    gc.set_threshold(_OBJECTS_UNTIL_COLLECTION)
    import typer

    from ..proof.processes import stopped_by_signals

    usage_error = cast("type[Exception]", typer.BadParameter.__base__)  # UsageError has no public name in typer
    try:
        from .app import app

        with stopped_by_signals():
            code = app(args, prog_name="flashmoe", standalone_mode=False, obj=args)
    except usage_error as error:
        context = getattr(error, "ctx", None)
        hint = f"{context.command_path if context else 'flashmoe'} --help shows what it takes"
        message = _in_our_words(error) or cast("Any", error).format_message().rstrip(".")
        return _report(args, "UsageError", message, hint, USAGE)
    except FlashmoeError as error:
        return _report(args, type(error).__name__, error.message, error.hint, _exit_code(error))
    except SystemExit:  # this is how typer ends when the reader of a help text has gone, e.g. `flashmoe --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return HOLDS
    except (KeyboardInterrupt, typer.Abort):  # which of these two, or an exit code, depends on the version of typer
        code = INTERRUPTED
    except Exception as error:  # noqa: BLE001 - a bug: its traceback is shown, and its exit code is no verdict
        module = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if module in KERNELS | EXTRA:
            return _report_missing(module, args)
        print(foreign(traceback.format_exc()), file=sys.stderr)
        what = f"{type(error).__name__}: {error}"
        return _report(args, type(error).__name__, f"this is a bug in flashmoe: {what}", "please report it", BUG)
    if code == INTERRUPTED:
        return _report(args, "KeyboardInterrupt", "interrupted", "", INTERRUPTED)
    return code if isinstance(code, int) else HOLDS


_EXPECTED = {  # what pydantic finds of a value on the command line -> what it must be
    "int_parsing": "an integer",
    "float_parsing": "a number",
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "below {lt}",
}


def _in_our_words(error: Exception) -> str:
    """Return what a number on the command line must be, or an empty text: newer versions of typer ask pydantic."""
    found: list[dict[str, Any]] = getattr(error.__cause__ or error.__context__, "errors", list)()
    if not found or found[0]["type"] not in _EXPECTED:
        return ""
    expected = _EXPECTED[found[0]["type"]].format(**found[0].get("ctx", {}))
    name = str(cast("Any", error).param.name).replace("_", " ")
    return f"{name} must be {expected}, got {found[0]['input']!r}"


def _exit_code(error: FlashmoeError) -> int:
    if isinstance(error, CompileError):
        return GATE_FAILED
    return INCONCLUSIVE if isinstance(error, (MachineLostError, TooFewRoundsError)) else USAGE


def missing_hint(module: str) -> str:
    """Return what installs a module of ``KERNELS`` or ``EXTRA``."""
    return f"pip install {module}" if module in KERNELS else "in a clone: pip install -e '.[proof]'"


def _report_missing(module: str, args: list[str]) -> int:
    return _report(args, "ModuleNotFoundError", f"{module} is not installed", missing_hint(module), USAGE)


def _report(args: list[str], kind: str, message: str, hint: str, code: int) -> int:
    """Say what went wrong on stderr, and under --json as the one document on stdout too."""
    red, cyan, plain = ("\033[1;31m", "\033[1;36m", "\033[0m") if _colour(sys.stderr.isatty()) else ("", "", "")
    print(f"{red}error{plain}: {foreign(message)}", file=sys.stderr)
    if hint:
        print(f"{cyan}hint{plain}: {foreign(hint)}", file=sys.stderr)
    if "--json" in args:
        document = {"error": {"type": kind, "message": message, "hint": hint}, "exit_code": code}
        print(json.dumps(document, indent=2).replace("##", "#\\u0023"))
    return code


def _colour(terminal: bool) -> bool:
    return terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
