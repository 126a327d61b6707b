"""The machine, the software and the commit of a run, for its record.

Nothing here names a host, a user or a path: a record is read by strangers. A machine without a GPU, a driver or git is
described as it is. torch is imported where the GPU is asked: ``flashmoe doctor`` asks for the commit alone.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ... import __version__
from ...errors import ProofError
from ..records.evidence import Environment, Gpu, TreeState
from ..records.git import git
from ..subject.subject import PACKAGE_FOLDER, Subject, expand_sources
from ..worker import Emit, run_task
from . import nvml
from .variables import is_setting

# Packages whose version can change a result, beside torch itself.
_PACKAGES = ("triton", "numpy", "scipy", "nvidia-ml-py", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")

_COMMAND_TIMEOUT_S = 20.0
_DESCRIBE_TIMEOUT_S = 120.0


def environment() -> Environment:
    """Describe this machine, its software and the tree that runs. Opens the GPU, if there is one."""
    import torch

    commit, dirty = tree_commit()
    sensors = nvml.open_sensors(uuid_of())
    limits = sensors.limits()
    return Environment(
        gpu=describe_gpu(limits),
        driver=limits.driver,
        cuda=torch.version.cuda,
        python=platform.python_version(),
        platform=f"{platform.system()}-{platform.machine()}",
        cpu=_cpu(),
        versions=_versions(),
        commit=commit,
        dirty=dirty,
        settings=_settings(os.environ) | _flags(),
    )


def describe(payload: dict[str, Any], emit: Emit) -> dict[str, Any]:  # noqa: ARG001 - all tasks take both
    """Return ``environment()`` as plain values: a worker's task, for a parent that keeps off the GPU."""
    return environment().model_dump(mode="json")


def describe_apart() -> Environment:
    """Describe this machine from a process of its own: this one never holds a GPU context. Raises ``ProofError``."""
    result = run_task(f"{__name__}:describe", {}, timeout_s=_DESCRIBE_TIMEOUT_S)
    if not result.ok or result.data is None:
        raise ProofError(f"the environment cannot be described: {result.reason}", hint="`flashmoe doctor` says more")
    return Environment.model_validate(result.data)


def uuid_of(index: int | None = None) -> str | None:
    """Return the UUID of a GPU, by default of the one that torch uses, or None."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    return str(properties.uuid) if hasattr(properties, "uuid") else None


def describe_gpu(limits: nvml.Limits, index: int | None = None) -> Gpu | None:
    """Return what a GPU is, by default the one that torch uses, or None."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    uuid = (uuid_of(index) or limits.uuid or "").removeprefix("GPU-")
    return Gpu(
        name=properties.name,
        arch=properties.major * 10 + properties.minor,
        sms=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
        memory_bytes=properties.total_memory,
        uuid_hash=hashlib.sha256(uuid.encode()).hexdigest()[:12] if uuid else "",
        max_sm_clock_mhz=limits.max_sm_clock_mhz,
        power_limit_w=limits.power_limit_w,
    )


def _cpu() -> str:
    """Return the model of the CPU, or an empty string."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return model.group(1).strip() if model else platform.processor()


def _versions() -> dict[str, str]:
    import torch

    versions = {"flashmoe-science": __version__, "torch": torch.__version__}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        try:
            versions["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        except RuntimeError:  # torch raises when the library found is not the one it was built for
            versions["cudnn"] = "does not fit torch"
    return versions


def _settings(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that can change a result."""
    return {name: _anonymous(value) for name, value in sorted(variables.items()) if is_setting(name)}


def _anonymous(value: str) -> str:
    """Return of a path or a card's UUID only that there is one."""
    if "/" in value or "\\" in value:
        return "(a path)"
    return re.sub(r"(GPU|MIG)-[0-9a-fA-F-]+", r"(a \1 UUID)", value)


def _flags() -> dict[str, str]:
    import torch

    from .shared_state import flags

    return flags() | {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn.benchmark": str(torch.backends.cudnn.benchmark).lower(),
        "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()).lower(),
    }


def tree_commit() -> tuple[str | None, bool | None]:
    """Return the commit of this package's own tree, and whether the package's files differ from it.

    A copy without git says its commit in ``FLASHMOE_COMMIT``; whether it is clean is known only if that ends in
    ``-dirty`` or ``-clean``. An installed package that lies inside some other repository has no commit.
    """
    if given := _given_commit():
        return given
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", ".")
    return commit, None if commit is None or changes is None else changes != ""


def _given_commit() -> tuple[str, bool | None] | None:
    given = os.environ.get("FLASHMOE_COMMIT", "").strip()
    named = given.removesuffix("-dirty").removesuffix("-clean")
    return (named, {"-dirty": True, "-clean": False}.get(given[len(named) :])) if given else None


def subject_tree(subject: Subject) -> TreeState | None:
    """Return the commit of the repository that holds a subject's sources, and whether they differ from it.

    None for a subject of ours: it lies in the tree of this package. A copy without git says its commit as that does.
    """
    if subject.builtin:
        return None
    sources, _ = expand_sources(subject)
    tracked = _git("ls-files", "-z", "--", *sources, folder=subject.folder) if sources else ""
    if not tracked:
        given, dirty = _given_commit() or (None, None)
        return TreeState(commit=given, dirty=dirty)
    commit = _git("rev-parse", "HEAD", folder=subject.folder)
    changes = _git("status", "--porcelain", "--", *sources, folder=subject.folder)
    some_untracked = len(set(filter(None, tracked.split("\0")))) < len(sources)
    dirty = None if commit is None or changes is None else some_untracked or changes != ""
    return TreeState(commit=commit, dirty=dirty)


def _git(*arguments: str, folder: Path | None = None) -> str | None:
    """Return what git prints about a folder, that of this package unless named, or None where it fails."""
    try:
        return git(folder or PACKAGE_FOLDER, *arguments, timeout_s=_COMMAND_TIMEOUT_S)
    except ProofError:
        return None
