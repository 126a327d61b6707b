"""The command ``flashmoe``: what it returns to the shell, and how it reports an error.

Importing this package needs the standard library only, so that a missing extra gets an answer and not a traceback. The
verbs are in ``app.py``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, cast

from .. import __version__
from ..errors import CompileError, FlashmoeError, MachineLostError, TooFewRoundsError
from ..proof.text import foreign
from .exit_codes import BUG, GATE_FAILED, HOLDS, INCONCLUSIVE, INTERRUPTED, USAGE
from .verbs import VERBS

# Module -> requirement, as in pyproject.toml: what the kernels need, and what the extra `proof` installs.
KERNELS = {"torch": "torch>=2.9", "triton": "triton>=3.6,<3.10"}
EXTRA = {
    "jinja2": "jinja2>=3.1",
    "markdown_it": "markdown-it-py>=3",
    "numpy": "numpy>=1.26,<2.4",
    "packaging": "packaging>=24",
    "pydantic": "pydantic>=2.8",
    "pynvml": "nvidia-ml-py>=12.560",
    "rich": "rich>=13.7",
    "scipy": "scipy>=1.11.4",
    "tomlkit": "tomlkit>=0.13",
    "typer": "typer>=0.15",
}
if sys.version_info < (3, 11):
    EXTRA["tomli"] = "tomli>=2"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: that of the process) and return its exit code."""
    args = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if missing := _missing(EXTRA):
        if args == ["--version"]:
            print(f"flashmoe {__version__}")
            return HOLDS
        if args[0] in ("--help", "-h"):
            print("Usage: flashmoe VERB ...\n\nProve what a GPU kernel does, and how fast it is.\n\nCommands:")
            print("\n".join(f"  {verb:<10}{text}" for verb, (_, text) in VERBS.items()))
            print(f"\nMost of them need packages that are not installed: pip install {_quoted(missing)}")
            return HOLDS
        return _report_missing(sorted([*missing, *_missing(KERNELS)]), args)
    return _run(args)


def _missing(requirements: Mapping[str, str]) -> list[str]:
    return [text for module, text in requirements.items() if importlib.util.find_spec(module) is None]


def _run(args: list[str]) -> int:
    import typer

    from ..proof.processes import stopped_by_signals
    from .app import app

    usage_error = cast("type[Exception]", typer.BadParameter.__base__)  # UsageError has no public name in typer
    try:
        with stopped_by_signals():
            code = app(args, prog_name="flashmoe", standalone_mode=False, obj=args)
    except usage_error as error:
        context = getattr(error, "ctx", None)
        hint = f"{context.command_path if context else 'flashmoe'} --help shows what it takes"
        message = cast("Any", error).format_message().rstrip(".")
        return _report(args, "UsageError", message, hint, USAGE)
    except FlashmoeError as error:
        return _report(args, type(error).__name__, error.message, error.hint, _exit_code(error))
    except SystemExit:  # this is how typer ends when the reader of a help text has gone, e.g. `flashmoe --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return HOLDS
    except (KeyboardInterrupt, typer.Abort):  # which of these two, or an exit code, depends on the version of typer
        code = INTERRUPTED
    except Exception as error:  # noqa: BLE001 - a bug: its traceback is shown, and its exit code is no verdict
        if isinstance(error, ModuleNotFoundError) and error.name in KERNELS:
            hint = f"pip install '{KERNELS[error.name]}'"
            return _report(args, type(error).__name__, f"{error.name} is not installed", hint, USAGE)
        print(foreign(traceback.format_exc()), file=sys.stderr)
        what = f"{type(error).__name__}: {error}"
        return _report(args, type(error).__name__, f"this is a bug in flashmoe: {what}", "please report it", BUG)
    if code == INTERRUPTED:
        return _report(args, "KeyboardInterrupt", "interrupted", "", INTERRUPTED)
    return code if isinstance(code, int) else HOLDS


def _exit_code(error: FlashmoeError) -> int:
    if isinstance(error, CompileError):
        return GATE_FAILED
    return INCONCLUSIVE if isinstance(error, (MachineLostError, TooFewRoundsError)) else USAGE


def _quoted(requirements: Sequence[str]) -> str:
    return " ".join(map(repr, requirements))


def _report_missing(missing: list[str], args: list[str]) -> int:
    names = ", ".join(re.split("[<>]", text)[0] for text in missing)
    message = f"flashmoe needs packages that are not installed: {names}"
    hint = f"in a clone: pip install -e '.[proof]'; or only these: pip install {_quoted(missing)}"
    return _report(args, "ModuleNotFoundError", message, hint, USAGE)


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
