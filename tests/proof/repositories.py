"""Git repositories with a kernel of two revisions, made for a test."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

KERNEL_TOML = """
[subject]
name = "doubling"
operator = "{operator}"
entry_point = "kernel:double"
sources = ["kernel.py", "helper.py"]
devices = ["cuda", "cpu"]
{more}
"""

# Absolute imports, one of them late, of modules that both revisions have under the same names.
KERNEL = """
import torch
import helper
from tests.proof.doubling import GPU


def double(x):
    from late import ZERO

    out = torch.empty(x.shape)
    GPU.launch(lambda: out.copy_(2 * x + ZERO), seconds=helper.SECONDS, name=helper.NAME)
    return out
"""

ATTENTION = """
import helper
from tests.proof.fake_operator import attend


def double(q, k, v, *, causal, softmax_scale):
    return attend(q, k, v, causal=causal) * helper.FACTOR
"""


def git(folder: Path, *arguments: str) -> str:
    """Run git as somebody who has configured nothing."""
    names = {f"GIT_{who}_{what}": "somebody" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {**os.environ, **names, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(["git", *arguments], cwd=folder, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, (arguments, done.stderr)
    return done.stdout.strip()


def commit(folder: Path, files: dict[str, str], *, tag: str) -> str:
    """Write ``files``, commit them, tag the commit and return its hash."""
    if not (folder / ".git").exists():
        folder.mkdir(parents=True, exist_ok=True)
        git(folder, "init", "--quiet")
        git(folder, "symbolic-ref", "HEAD", "refs/heads/main")  # git before 2.28 knows no --initial-branch
    for name, text in files.items():
        path = folder / "kernels" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", tag)
    git(folder, "tag", tag)
    return git(folder, "rev-parse", "HEAD")


def doubling_repository(folder: Path, *, more: str = "", a: str = "5e-6", b: str = "6e-6") -> Path:
    """Return a repository whose revisions ``slow`` and ``fast`` differ in a helper; A is ``first``, B ``second``."""
    toml = KERNEL_TOML.format(operator="tests.proof.doubling", more=more)
    files = {"kernel.toml": toml, "kernel.py": KERNEL, "late.py": "ZERO = 0.0\n"}
    commit(folder, files | {"helper.py": f"SECONDS = {a}\nNAME = 'kernel_of_first'\n"}, tag="first")
    commit(folder, {"helper.py": f"SECONDS = {b}\nNAME = 'kernel_of_second'\n"}, tag="second")
    return folder


def attention_repository(folder: Path, *, more: str = "", a: str = "1.0", b: str = "1.0") -> Path:
    """Return a repository with two revisions of an attention on the CPU, each off by a factor of its own."""
    toml = KERNEL_TOML.format(operator="tests.proof.fake_operator", more=more)
    commit(folder, {"kernel.toml": toml, "kernel.py": ATTENTION, "helper.py": f"FACTOR = {a}  # first\n"}, tag="first")
    commit(folder, {"helper.py": f"FACTOR = {b}  # second\n"}, tag="second")
    return folder
