"""Run a subject's build command: for gate build, and before a diagnosis. Both must get the same library."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import InputError
from ...gpu.cuobjdump import find_program
from ...gpu.specs import GpuSpec, find_gpu
from ..processes import TaskResult, run_command
from ..records.evidence import Gpu
from .subject import PYTHON, Subject

ARCH_LIST = "TORCH_CUDA_ARCH_LIST"  # the variable that torch.utils.cpp_extension reads


@dataclass(frozen=True)
class Built:
    """How a build command ended, or what kept it from being run."""

    missing: tuple[str, ...] = ()  # programs that it needs and that are not here
    result: TaskResult | None = None

    @property
    def lacks(self) -> str:
        """What is missing, as a sentence; empty where nothing is."""
        return f"the build command needs {', '.join(self.missing)}, which is not here" if self.missing else ""

    @property
    def hint(self) -> str:
        """How to get the missing programs."""
        if "nvcc" in self.missing:
            return "install the CUDA toolkit, or set CUDA_HOME to its folder: it needs no GPU"
        return "install it, or put its folder on PATH"


def known_gpus(names: Iterable[str], here: Gpu | None) -> list[GpuSpec]:
    """Return the specs of the named GPUs and of the one here; GPUs that the table lacks are left out."""
    specs = {}
    for name in [*names, *([here.name] if here is not None else [])]:
        try:
            spec = find_gpu(name)
        except InputError:  # nothing is known of its limits
            continue
        specs[spec.name] = spec
    return list(specs.values())


def run_build(
    subject: Subject, targets: Sequence[GpuSpec], say: Callable[[str], None], tell: Callable[[str], None]
) -> Built:
    """Run the subject's build command, if everything that it needs is here.

    The command gets the architectures of ``targets``; without targets, the caller's setting stays. ``say`` gets the
    command before it runs, and ``tell`` now and then how long it has run.
    """
    assert subject.build_command is not None
    found = {program: find_program(program) for program in subject.build_needs}
    if missing := tuple(program for program, path in found.items() if path is None):
        return Built(missing)
    env = {}
    folders = dict.fromkeys(str(Path(path).parent) for path in found.values() if path is not None)
    if folders:
        env["PATH"] = os.pathsep.join(folder for folder in (*folders, os.environ.get("PATH", "")) if folder)
    if targets:
        env[ARCH_LIST] = ";".join(f"{arch // 10}.{arch % 10}" for arch in sorted({spec.arch for spec in targets}))
    argv = [word.replace(PYTHON, sys.executable) for word in subject.build_command]
    say(f"build command: {shlex.join(argv)}")

    def on_wait(seconds: float) -> None:
        tell(f"the build command has run for {seconds:.0f} s")

    folder, limit = str(subject.folder), subject.build_timeout_s
    return Built(result=run_command(argv, cwd=folder, timeout_s=limit, env=env, on_wait=on_wait))
