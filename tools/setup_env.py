"""Create the environment of this repository, or bring it up to date: ``setup_env.py [--folder .venv] EXTRA...``.

It needs nothing but Python. A stamp in the environment holds a hash of everything that decides its content, so a second
run returns at once and a changed ``pyproject.toml`` installs anew.

PyTorch's ordinary Linux package brings gigabytes of CUDA libraries. A machine without an NVIDIA driver cannot use them
and gets the CPU build instead: from wherever pip is configured to look, else through uv, which knows PyTorch's indexes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CPU_TORCH = "torch==2.13.0+cpu"  # the "+cpu" builds are on no default index; pip may know a place that has them
ANY_TORCH = "torch>=2.9"
STAMP = "flashmoe-environment.json"


def main() -> None:
    """Read the command line and do it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv", help="of the environment (default: .venv)")
    parser.add_argument("extras", nargs="+", metavar="EXTRA", help="extras of pyproject.toml, e.g. proof or dev")
    arguments = parser.parse_args()
    check_python()
    set_up(arguments.folder.absolute(), set(arguments.extras))


def check_python() -> None:
    """Stop where this Python is none that ``pyproject.toml`` admits: pip would say so after minutes."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    bounds = re.search(r'^requires-python = ">=3\.(\d+),<3\.(\d+)"$', text, re.MULTILINE)
    assert bounds, 'pyproject.toml must have a line requires-python = ">=3.x,<3.y"'
    oldest, behind = (3, int(bounds[1])), (3, int(bounds[2]))
    if oldest <= sys.version_info[:2] < behind:
        return
    found = ".".join(str(part) for part in sys.version_info[:3])
    how = "old" if sys.version_info[:2] < oldest else "new"
    fail(
        f"Python {found} is too {how}, expected 3.{oldest[1]} to 3.{behind[1] - 1}",
        "name another one: make PYTHON=python3.12 ...",
    )


def set_up(folder: Path, extras: set[str]) -> None:
    """Make ``folder`` an environment with this package and ``extras``, unless it is one already."""
    stamp = folder / STAMP
    have = read_stamp(stamp)
    if have == {"base": base(), "package": package_hash(), "extras": have["extras"]} and extras <= set(have["extras"]):
        return
    extras |= set(have["extras"])
    stamp.unlink(missing_ok=True)  # an interrupted installation must not look finished
    python = create(folder, anew=have["base"] not in ("", base()))
    if not has_torch(python):
        install_torch(python)
    wanted = ",".join(sorted(extras))
    say(f"installing flashmoe-science[{wanted}] into {short(folder)}")
    if pip(python, "install", "--editable", f"{ROOT}[{wanted}]") != 0:
        fail("pip could not install the package, see above", "without a package index use: make ENV=off ...")
    stamp.write_text(
        json.dumps({"base": base(), "package": package_hash(), "extras": sorted(extras)}), encoding="utf-8"
    )


def read_stamp(stamp: Path) -> dict[str, Any]:
    """Return what the last run wrote, or what stands for nothing."""
    if not stamp.exists():
        return {"base": "", "package": "", "extras": []}
    content: dict[str, Any] = json.loads(stamp.read_text(encoding="utf-8"))
    return content


def base() -> str:
    """Describe what an environment is built on; when this changes it is built anew."""
    driver = "with" if has_nvidia_driver() else "without"
    return f"Python {sys.version}, {driver} NVIDIA driver, FLASHMOE_TORCH={os.environ.get('FLASHMOE_TORCH', '')}"


def package_hash() -> str:
    """Hash everything else that decides what is installed."""
    digest = hashlib.sha256(str(ROOT).encode())
    for path in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def create(folder: Path, *, anew: bool) -> Path:
    """Create the virtual environment if it is missing or to be made anew, and return its Python."""
    python = folder / "bin" / "python"
    if anew or not python.exists():
        say(f"creating {short(folder)}")
        command = [sys.executable, "-m", "venv", "--clear", str(folder)]
        if subprocess.run(command, check=False, stdout=sys.stderr).returncode != 0:
            fail(
                f"{sys.executable} -m venv {folder} failed, see above", "on Debian and Ubuntu: apt install python3-venv"
            )
    return python


def short(folder: Path) -> str:
    """Return a folder as it is called from the current one."""
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)


def has_nvidia_driver() -> bool:
    """Return whether this machine can run CUDA programs."""
    if sys.platform != "linux":
        return False
    places = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")
    return any(Path(place).exists() for place in places)


def has_torch(python: Path) -> bool:
    """Return whether the environment has a torch of any kind already."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return subprocess.run([str(python), "-c", code], check=False).returncode == 0


def install_torch(python: Path) -> None:
    """Install the torch that suits this machine."""
    chosen = os.environ.get("FLASHMOE_TORCH")
    if chosen:
        say(f"installing {chosen}, as FLASHMOE_TORCH says")
        if pip(python, "install", chosen) != 0:
            fail(f"pip could not install FLASHMOE_TORCH={chosen}, see above", "any requirement or wheel file will do")
        return
    if sys.platform != "linux" or has_nvidia_driver():
        return  # the ordinary package is the right one, and comes with the rest
    say("no NVIDIA driver here: installing the CPU build of torch")
    if pip(python, "install", CPU_TORCH, quietly=True) == 0:
        return
    uv = [str(python), "-m", "uv", "pip", "install", "--python", str(python), "--torch-backend=cpu", ANY_TORCH]
    if pip(python, "install", "uv") != 0 or subprocess.run(uv, check=False).returncode != 0:
        fail(
            "the CPU build of torch could not be installed, neither by pip from its configured sources nor by uv",
            "put a CPU wheel of torch where pip looks (PIP_FIND_LINKS=folder), or name one: FLASHMOE_TORCH=torch.whl; "
            "FLASHMOE_TORCH=torch takes the CUDA build, which is gigabytes",
        )


def pip(python: Path, *arguments: str, quietly: bool = False) -> int:
    """Run pip in the environment and return its exit code. Its progress shows in a terminal; a log gets errors only."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    if not sys.stderr.isatty():
        command.append("--quiet")
    errors = subprocess.DEVNULL if quietly else None
    return subprocess.run(command, check=False, stdout=sys.stderr, stderr=errors).returncode


def say(text: str) -> None:
    """Log one line."""
    print(f"setup: {text}", file=sys.stderr, flush=True)


def fail(text: str, hint: str) -> None:
    """Stop with a message that says what to do."""
    sys.exit(f"setup: {text}\nhint: {hint}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("interrupted; the same command goes on")
        sys.exit(130)
