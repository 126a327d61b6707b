"""Try the newest wheel of ``dist/`` as a user would: ``check_wheel.py [--wheel FILE]``. Takes seconds.

It compares the content of the wheel with ``src/`` and ``docs/``, reads its metadata, installs it into a fresh
environment and calls it there. That environment borrows torch and the other dependencies from the Python that runs this
program.
"""

from __future__ import annotations

import argparse
import email
import email.message
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "flashmoe_science"
LARGEST_BYTES = 2 << 20
METADATA = {
    "Name": "flashmoe-science",
    "License-Expression": "Apache-2.0",
    "License-File": "LICENSE",
    "Requires-Python": "<3.14,>=3.10",
    "Description-Content-Type": "text/markdown",
}
EXTRAS = {"proof", "docs", "dev", "examples"}
CALL = """
import pathlib, torch, flashmoe_science
from flashmoe_science.errors import page
assert pathlib.Path(page("reference/suites")).is_file()
from flashmoe_science import flash_attention
q, k, v = torch.randn(3, 1, 2, 16, 32)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
torch.testing.assert_close(flash_attention(q, k, v), expected, rtol=1e-4, atol=1e-5)
print(flashmoe_science.__file__)
"""


def main() -> None:
    """Check one wheel and exit with 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--wheel", type=Path, help="default: the newest of dist/")
    wheel = parser.parse_args().wheel or newest_wheel(ROOT / "dist")
    problems = [*content_problems(wheel, ROOT / "src" / PACKAGE), *metadata_problems(wheel)]
    if not problems:
        problems = use_problems(wheel)
    for problem in problems:
        print(f"{wheel.name}: {problem}")
    if problems:
        sys.exit(1)
    print(f"{wheel.name}: {wheel.stat().st_size >> 10} KiB, complete, installs, imports, computes and answers --help")


def newest_wheel(folder: Path) -> Path:
    """Return the newest wheel of a folder, or stop."""
    wheels = sorted(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        sys.exit(f"there is no wheel in {folder.name}/\nhint: python -m build")
    return wheels[-1]


def content_problems(wheel: Path, package: Path) -> list[str]:
    """Return how the files of a wheel differ from those of the package and the pages of docs/, and a wrong size."""
    files = (path.relative_to(package.parent) for path in package.rglob("*") if path.is_file())
    expected = {path.as_posix() for path in files if "__pycache__" not in path.parts}
    docs = package.parents[1] / "docs"
    expected |= {f"{package.name}/docs/{path.relative_to(docs).as_posix()}" for path in docs.glob("*/*.md")}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    problems = [f"lacks {name}" for name in sorted(expected - found)]
    problems += [f"holds {name}, which is neither in src/ nor a page of docs/" for name in sorted(found - expected)]
    if wheel.stat().st_size > LARGEST_BYTES:
        problems.append(f"is larger than {LARGEST_BYTES >> 20} MiB: {wheel.stat().st_size} bytes")
    return problems


def metadata_problems(wheel: Path) -> list[str]:
    """Return what is missing or wrong in the metadata of a wheel: fields, extras, entry points, licence."""
    with zipfile.ZipFile(wheel) as archive:
        texts = {
            name.partition(".dist-info/")[2]: archive.read(name).decode("utf-8")
            for name in archive.namelist()
            if ".dist-info/" in name
        }
    fields = email.message_from_string(texts.get("METADATA", ""))
    wanted = METADATA | {"Version": wheel.name.split("-")[1]}
    problems = [
        f"metadata {name} must be {value!r}, got {fields[name]!r}"
        for name, value in wanted.items()
        if fields[name] != value
    ]
    lacking = EXTRAS - set(fields.get_all("Provides-Extra", []))
    problems += [f"metadata lacks the extra {name}" for name in sorted(lacking)]
    problems += [
        f"its long description has a link that is dead away from a clone: {link}" for link in relative_links(fields)
    ]
    if texts.get("licenses/LICENSE") != (ROOT / "LICENSE").read_text(encoding="utf-8"):
        problems.append("lacks the licence file")
    if f"flashmoe = {PACKAGE}.cli:main" not in texts.get("entry_points.txt", ""):
        problems.append("lacks the command flashmoe")
    return problems


def relative_links(fields: email.message.Message) -> list[str]:
    """Return the targets of links and pictures of the long description that are no addresses."""
    text = str(fields.get_payload())
    found = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    return [target for target in found if not target.startswith(("https://", "#"))]


def use_problems(wheel: Path) -> list[str]:
    """Install a wheel into a fresh environment and return the problems of using it there."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "environment"
        venv.create(folder, with_pip=False, symlinks=True)
        python = folder / "bin" / "python"
        paths = {key: str(folder) for key in ("base", "platbase")}
        site = Path(sysconfig.get_path("purelib", vars=paths))
        install = ["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)]
        run([sys.executable, "-m", "pip", "--python", str(python), *install])
        # After the wheel on the path. Files *.pth in there, such as that of an editable installation, do not count.
        (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
        problems = []
        imported = run([str(python), "-I", "-c", CALL]).strip()
        if not Path(imported).is_relative_to(site):
            problems.append(f"is not what was imported: {imported}")
        command = str(folder / "bin" / "flashmoe")
        if "Take a kernel from its sources to a verdict" not in run([command, "--help"]):
            problems.append("flashmoe --help does not list the verbs")
        if "standard" not in run([command, "suites"]):
            problems.append("flashmoe suites does not list the suites of the package")
        return problems


def run(command: list[str]) -> str:
    """Return what a command prints, away from this repository; stop where it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tempfile.gettempdir(), env=environment
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)[:200]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
