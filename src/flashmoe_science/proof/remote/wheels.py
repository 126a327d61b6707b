"""What the harness needs over there beside torch and triton, and how it gets to a machine without a package index."""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import RemoteError

_PIP_TIMEOUT_S = 600.0
_OLDEST_GLIBC_MINOR = 17  # of manylinux2014: older ones have no Python that is new enough

# Module -> requirement, as in pyproject.toml. The chain alone runs there: what judges, keeps and prints stays here.
REQUIREMENTS = {
    "numpy": "numpy>=1.26,<2.4",
    "pydantic": "pydantic>=2.8",
    "pynvml": "nvidia-ml-py>=12.560",
    "tomllib|tomli": "tomli>=2",
}


def bundle_wheels(requirements: Sequence[str], target: Mapping[str, Any]) -> tuple[bytes, list[str]]:
    """Download wheels for another machine; return them in one archive, and their names.

    Args:
        requirements: what to install, with what it needs in turn.
        target: ``python``, e.g. 3.11; ``machine``, e.g. x86_64; ``glibc``, its version as two numbers, or empty.

    Raises:
        RemoteError: pip finds no wheel for that machine, or is not here.
    """
    with tempfile.TemporaryDirectory(prefix="flashmoe-wheels-") as folder:
        argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--dest", folder]
        argv += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", str(target["python"])]
        for platform in platforms(str(target["machine"]), target["glibc"]):
            argv += ["--platform", platform]
        try:
            done = subprocess.run(
                [*argv, *requirements], capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False
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


def platforms(machine: str, glibc: Sequence[int]) -> list[str]:
    """Return the platform tags of wheels that run on a Linux of this processor and glibc, the newest first."""
    if len(glibc) < 2 or glibc[0] != 2:
        return [f"linux_{machine}"]
    minors = range(glibc[1], _OLDEST_GLIBC_MINOR - 1, -1)
    return [*(f"manylinux_2_{minor}_{machine}" for minor in minors), f"manylinux2014_{machine}", f"linux_{machine}"]
