"""What the harness needs over there beside torch and triton, and how it gets to a machine without a package index."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import RemoteError, shown

_PIP_TIMEOUT_S = 600.0
_OLDEST_GLIBC_MINOR = 17  # of manylinux2014: older ones have no Python that is new enough
_NEWEST_GLIBC_MINOR = 99

# The machine says for what a wheel has to be, and is not trusted: these are the only words of it that pip gets.
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:[<>=!~]=?[0-9][0-9.]*(?:,[<>=!~]=?[0-9][0-9.]*)*)?")
_PYTHON = re.compile(r"3\.[0-9]{1,2}")
_MACHINE = re.compile(r"[a-z0-9][a-z0-9_]{0,31}")

# Module -> requirement, as in pyproject.toml. The chain alone runs there: what judges, keeps and prints stays here.
REQUIREMENTS = {
    "numpy": "numpy>=1.26,<2.4",
    "pydantic": "pydantic>=2.8",
    "pynvml": "nvidia-ml-py>=12.560",
    "tomllib|tomli": "tomli>=2",
}


def asked_for(wanted: object, needed: Iterable[str]) -> list[str]:
    """Return what a machine asks for, out of what the harness needs there. Raises ``RemoteError`` for anything else."""
    needed = list(needed)
    if not isinstance(wanted, list) or not wanted or any(each not in needed for each in wanted):
        message = f"wheels wanted: expected some of {', '.join(needed) or 'none'}, got {shown(wanted)[:200]}"
        raise RemoteError(message, hint="it asks for what the harness does not need: do not trust this machine")
    return [each for each in needed if each in wanted]


def bundle_wheels(requirements: Sequence[str], target: Mapping[str, Any]) -> tuple[bytes, list[str]]:
    """Download wheels for another machine; return them in one archive, and their names. Nothing is built.

    Args:
        requirements: names with versions, as ``asked_for`` returns them; what they need in turn comes too.
        target: ``python``, e.g. 3.11; ``machine``, e.g. x86_64; ``glibc``, its version as two numbers, or empty.

    Raises:
        RemoteError: ``target`` is no such thing, pip finds no wheel for that machine, or is not here.
    """
    assert all(map(_REQUIREMENT.fullmatch, requirements)), requirements
    python, machine = (_word(target, "python", _PYTHON), _word(target, "machine", _MACHINE))
    glibc = target.get("glibc")
    if not isinstance(glibc, list) or not all(type(part) is int for part in glibc):
        raise RemoteError(f"glibc of that machine: expected a list of numbers, got {shown(glibc)[:200]}")
    with tempfile.TemporaryDirectory(prefix="flashmoe-wheels-") as folder:
        argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--dest", folder]
        argv += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
        for platform in platforms(machine, glibc):
            argv += ["--platform", platform]
        try:
            done = subprocess.run(
                [*argv, "--", *requirements],
                capture_output=True,
                text=True,
                timeout=_PIP_TIMEOUT_S,
                check=False,
                cwd=folder,  # "-m" would import what lies in the current one
            )
        except subprocess.TimeoutExpired as error:
            raise RemoteError(
                f"pip download took longer than {_PIP_TIMEOUT_S:g} s", hint="install them there"
            ) from error
        if done.returncode != 0:
            why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            hint = f"install them there: pip install {' '.join(repr(each) for each in requirements)}"
            raise RemoteError(f"wheels for that machine cannot be downloaded here: {why}", hint=hint)
        wheels = sorted(Path(folder).glob("*.whl"))
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as bundle:  # a wheel is compressed already
            for wheel in wheels:
                bundle.write(wheel, wheel.name)
        return buffer.getvalue(), [wheel.name for wheel in wheels]


def _word(target: Mapping[str, Any], key: str, pattern: re.Pattern[str]) -> str:
    value = target.get(key)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise RemoteError(f"{key} of that machine: expected e.g. 3.11 or x86_64, got {shown(value)[:200]}")
    return value


def platforms(machine: str, glibc: Sequence[int]) -> list[str]:
    """Return the platform tags of wheels that run on a Linux of this processor and glibc, the newest first."""
    if len(glibc) < 2 or glibc[0] != 2:
        return [f"linux_{machine}"]
    minors = range(min(glibc[1], _NEWEST_GLIBC_MINOR), _OLDEST_GLIBC_MINOR - 1, -1)
    return [*(f"manylinux_2_{minor}_{machine}" for minor in minors), f"manylinux2014_{machine}", f"linux_{machine}"]
