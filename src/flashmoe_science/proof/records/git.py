"""Ask git about a folder: the one place that runs it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
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

    Raises ``ProofError``: with what git complains about in one line, or because there is no git.
    """
    return os.fsdecode(_run(folder, arguments, timeout_s=timeout_s)).removesuffix("\n")  # names need not be UTF-8


def is_commit(text: str) -> bool:
    """Return whether ``text`` can be the hash of a commit, whole or abbreviated."""
    return re.fullmatch(r"[0-9a-f]{7,64}", text) is not None


def read_objects(folder: Path, names: Sequence[str]) -> list[bytes | None]:
    """Return the contents of objects such as ``<commit>`` and ``<commit>:<path>``; None for one that is not here.

    Raises ``ProofError``: git complains, or there is no git.
    """
    asked = [name if "\n" not in name else "" for name in names]  # a line is a question
    given = "\n".join([*asked, ""]).encode()
    answer = _run(folder, ("cat-file", "--batch=%(objecttype) %(objectsize)"), given=given, fetches=False)
    found: list[bytes | None] = []
    for _ in names:
        head, _, answer = answer.partition(b"\n")
        if head.endswith((b" missing", b" ambiguous")):
            found.append(None)
            continue
        kind, _, size = head.partition(b" ")
        found.append(answer[: int(size)] if kind in (b"blob", b"commit") else None)
        answer = answer[int(size) + 1 :]
    return found


def _run(
    folder: Path, arguments: Sequence[str], *, given: bytes = b"", fetches: bool = True, timeout_s: float = _TIMEOUT_S
) -> bytes:
    environment = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    environment["LC_ALL"] = "C"  # what is read is English
    environment |= {} if fetches else {"GIT_NO_LAZY_FETCH": "1"}
    # Neither a checkout nor a look may run a program that the repository names.
    command = ["git", "-C", str(folder), "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, timeout=timeout_s, check=False, input=given
        )
    except OSError as error:
        raise ProofError(f"git cannot be run: {error.strerror}", hint="install git") from error
    except subprocess.TimeoutExpired as error:
        raise ProofError(f"git {arguments[0]} took more than {timeout_s:g} s") from error
    if done.returncode != 0:
        said = os.fsdecode(done.stderr).strip().splitlines() or [f"it exited with status {done.returncode}"]
        fatal = [line for line in said if line.startswith("fatal: ")]  # advice may follow it
        raise ProofError(f"git {arguments[0]}: {(fatal or said)[-1].removeprefix('fatal: ')}")
    return done.stdout
