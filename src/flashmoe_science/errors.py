"""Every error that a caller can catch.

::

    FlashmoeError
    ├── InputError (ValueError)                 an argument breaks the documented contract
    ├── UnsupportedError (NotImplementedError)  a valid problem that no kernel serves here
    ├── CompileError (RuntimeError)             a kernel does not compile, or not within the limits of its target
    ├── LaunchError (RuntimeError)              the driver refuses to load or to launch a kernel
    ├── RankLostError (RuntimeError)            a collective failed: it names the ranks that do not answer
    ├── MissingPackageError (ImportError)       a package that an integration is for is not installed
    └── ProofError                              the harness cannot go on
        ├── SubjectError (ValueError)           a kernel.toml is wrong: names file, key and what was expected
        │   └── OperatorError                   the code of a user's own operator is wrong: names method, file and line
        ├── SuiteError (ValueError)             a suite file is wrong, or no suite has this name
        ├── ClaimError (ValueError)             a claim file is wrong, or names what does not exist
        ├── EvidenceError (ValueError)          a record cannot be read, or records cannot be pooled
        ├── UnreadableError (RuntimeError)      a kernel reaches something whose source or value cannot be read
        ├── RatesError (ValueError)             a rates.toml is wrong
        ├── TooFewRoundsError (ValueError)      so few rounds that no interval exists
        └── RemoteError (RuntimeError)          a borrowed machine cannot be reached or used
            └── MachineLostError                it, or the connection to it, went away in the middle of a run
"""

from __future__ import annotations

from pathlib import Path

_INSTALLED_PAGES = Path(__file__).parent / "docs"  # in a wheel; a clone has them beside src/
_CLONE = Path(__file__).parents[2]


def page(name: str) -> str:
    """Return where a page of the documentation is: its file, or in the clone itself ``docs/NAME.md``."""
    installed = _INSTALLED_PAGES / f"{name}.md"
    if installed.is_file():
        return str(installed)
    return str(Path("docs" if Path.cwd() == _CLONE else _CLONE / "docs", f"{name}.md"))


def shown(value: object) -> str:
    """Return ``value`` as messages have it: Python prints no integer of more than some thousand digits."""
    try:
        return repr(value)
    except ValueError:
        return f"{type(value).__name__} too long to be printed"
    except Exception:  # noqa: BLE001 - whose representation fails, as that of a tensor without memory, has its own error
        return f"{type(value).__name__} that cannot be printed"


class FlashmoeError(Exception):
    """Root of all errors raised on purpose by this package: ``message``, and what to do next: ``hint``, or nothing."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message}\nhint: {hint}" if hint else message)
        self.message = message
        self.hint = hint


class InputError(FlashmoeError, ValueError):
    """A shape, dtype, device or value breaks the documented contract."""


class UnsupportedError(FlashmoeError, NotImplementedError):
    """No kernel serves this valid problem on this device."""


class CompileError(FlashmoeError, RuntimeError):
    """A kernel does not compile for its target, or needs more than the target has."""


class LaunchError(FlashmoeError, RuntimeError):
    """The driver refuses to load or to launch a kernel."""


class RankLostError(FlashmoeError, RuntimeError):
    """A collective between ranks failed, as a rank ended or cannot be reached."""


class MissingPackageError(FlashmoeError, ImportError):
    """A package that an integration is for cannot be imported."""


class ProofError(FlashmoeError):
    """The harness cannot go on."""


class SubjectError(ProofError, ValueError):
    """A subject's description is wrong."""


class OperatorError(SubjectError):
    """The code of a user's own operator raises, or gives what it must not: no fault of the kernel on trial."""


class SuiteError(ProofError, ValueError):
    """A suite is wrong or unknown."""


class ClaimError(ProofError, ValueError):
    """A claim is wrong or names something that does not exist."""


class EvidenceError(ProofError, ValueError):
    """A record cannot be read, or records may not be pooled."""


class UnreadableError(ProofError, RuntimeError):
    """A kernel reaches something whose source or value cannot be read, so a change of it would not be seen."""


class RatesError(ProofError, ValueError):
    """A file of prices is wrong."""


class TooFewRoundsError(ProofError, ValueError):
    """There are too few rounds for an interval at the confidence asked for."""


class RemoteError(ProofError, RuntimeError):
    """A borrowed machine cannot be reached or used."""


class MachineLostError(RemoteError):
    """A run on a borrowed machine ended before its end: the connection was lost, or the machine."""
