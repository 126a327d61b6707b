"""Ask git about a folder: the one place that runs it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from ...errors import ProofError

_TIMEOUT_S = 600.0  # a large repository takes minutes to check out

# What points git at another repository: a hook that runs us sets it. Settings, such as safe.directory, stay.
_ELSEWHERE = frozenset(
    f"GIT_{name}"
    for name in (
        *("DIR", "WORK_TREE", "INDEX_FILE", "OBJECT_DIRECTORY", "ALTERNATE_OBJECT_DIRECTORIES", "COMMON_DIR"),
        *("NAMESPACE", "PREFIX", "GRAFT_FILE", "SHALLOW_FILE", "REPLACE_REF_BASE"),
    )
)


def git(folder: Path, *arguments: str, timeout_s: float = _TIMEOUT_S) -> str:
    """Return what git prints in ``folder``, its last line break left out.

    Raises:
        ProofError: with what git complains about in one line, or because there is no git.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    environment["LC_ALL"] = "C"  # what is read is English
    # Neither a checkout nor a look may run a program that the repository names.
    command = ["git", "-C", str(folder), "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=timeout_s, check=False)
    except OSError as error:
        raise ProofError(f"git cannot be run: {error.strerror}", hint="install git") from error
    except subprocess.TimeoutExpired as error:
        raise ProofError(f"git {arguments[0]} took more than {timeout_s:g} s") from error
    if done.returncode != 0:
        said = os.fsdecode(done.stderr).strip().splitlines() or [f"it exited with status {done.returncode}"]
        fatal = [line for line in said if line.startswith("fatal: ")]  # advice may follow it
        raise ProofError(f"git {arguments[0]}: {(fatal or said)[-1].removeprefix('fatal: ')}")
    return os.fsdecode(done.stdout).removesuffix("\n")  # names of files are bytes, and need not be UTF-8
