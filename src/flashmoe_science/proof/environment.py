"""Where a run takes place, for its record; and what this machine has and lacks, for its user.

Nothing here names a host, a user or a path: a record is read by strangers. A machine without a GPU, a driver or git is
described as it is.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import __version__
from ..errors import ProofError
from . import nvml
from .evidence import Environment, Gpu, TreeState
from .git import git
from .subject import Subject, expand_sources
from .worker import Emit, describe_error, run_task

if TYPE_CHECKING:
    from .baselines import BaselineStatus

PACKAGE_FOLDER = Path(__file__).resolve().parent.parent

# Packages whose version can change a result, beside torch itself.
_PACKAGES = ("triton", "numpy", "scipy", "nvidia-ml-py", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")

_SETTING = re.compile(
    r"^(TRITON_|CUDA_|CUDNN_|CUBLAS_|TORCH_|TORCHINDUCTOR_|PYTORCH_|NVIDIA_TF32_OVERRIDE$|FLASHMOE_|OMP_NUM_THREADS$)"
)
_NO_SETTING = ("FLASHMOE_COMMIT", "FLASHMOE_SSH", "FLASHMOE_STORE")

_PROFILING_FLAG = Path("/proc/driver/nvidia/params")
_COMMAND_TIMEOUT_S = 20.0
_DESCRIBE_TIMEOUT_S = 120.0


def environment() -> Environment:
    """Describe this machine, its software and the tree that runs. Opens the GPU, if there is one."""
    commit, dirty = tree_commit()
    sensors = nvml.open_sensors(_uuid())
    limits = sensors.limits()
    return Environment(
        gpu=_gpu(limits),
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


def _uuid() -> str | None:
    """Return the UUID of the GPU that torch uses, or None."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return str(properties.uuid) if hasattr(properties, "uuid") else None


def _gpu(limits: nvml.Limits) -> Gpu | None:
    if not torch.cuda.is_available():
        return None
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    uuid = (_uuid() or limits.uuid or "").removeprefix("GPU-")
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
    wanted = {name: v for name, v in sorted(variables.items()) if _SETTING.match(name) and name not in _NO_SETTING}
    return {name: _anonymous(value) for name, value in wanted.items()}


def _anonymous(value: str) -> str:
    """Return of a path or a card's UUID only that there is one."""
    if "/" in value or "\\" in value:
        return "(a path)"
    return re.sub(r"(GPU|MIG)-[0-9a-fA-F-]+", r"(a \1 UUID)", value)


def _flags() -> dict[str, str]:
    return {
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


def _output(*command: str) -> str | None:
    """Return what a command prints, or None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@dataclass(frozen=True)
class Check:
    """One fact about this machine."""

    name: str
    ok: bool | None  # None: it is not here, or cannot be told; nothing is broken
    text: str
    hint: str = ""  # what to do about it


def doctor() -> list[Check]:
    """Look at everything that proving needs, one check each. No check raises: one that fails says so."""
    checks = []
    for name, look in _CHECKS.items():
        try:
            checks += look()
        except Exception as error:  # noqa: BLE001 - a broken part of the machine is what this is looking for
            hint = "a fault of this program or of the installation: please report it with this line"
            checks.append(Check(name, ok=False, text=f"could not be checked: {describe_error(error)}", hint=hint))
    return checks


def _check_torch() -> list[Check]:
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return [Check("torch", ok=True, text=f"{torch.__version__}, {built}")]


def _check_triton() -> list[Check]:
    try:
        import triton
    except ImportError as error:
        hint = "pip install triton; it is published for Linux"
        return [Check("triton", ok=False, text=f"cannot be imported: {error}", hint=hint)]
    return [Check("triton", ok=True, text=str(triton.__version__))]


def _check_driver() -> list[Check]:
    sensors = nvml.open_sensors(_uuid())
    limits = sensors.limits()
    if isinstance(sensors, nvml.NoSensors):
        missing = "not installed" in sensors.reason
        hint = (
            "pip install nvidia-ml-py"
            if missing
            else "install NVIDIA's driver; without one everything but timing works"
        )
        return [Check("driver", ok=None, text=sensors.reason, hint=hint)]
    text = f"{limits.driver or 'unknown'}, serves CUDA up to {limits.driver_cuda or 'unknown'}"
    built, served = (_version(v) for v in (torch.version.cuda, limits.driver_cuda))
    if built and served and built[0] > served[0]:
        hint = f"update the driver, or install a torch that is built for CUDA {served[0]}"
        return [Check("driver", ok=False, text=f"{text}; torch is built for {torch.version.cuda}", hint=hint)]
    return [Check("driver", ok=True, text=text)]


def _check_gpu() -> list[Check]:
    if not torch.cuda.is_available():
        if torch.version.cuda is None and nvml.open_sensors().limits().name:
            hint = "install a torch that is built for CUDA: https://pytorch.org/get-started/locally"
            return [Check("GPU", ok=False, text="there is one, but this torch is built without CUDA", hint=hint)]
        hint = "build, import and correctness can be shown here; launches and times need an NVIDIA GPU"
        return [Check("GPU", ok=None, text="none that torch can use", hint=hint)]
    sensors = nvml.open_sensors(_uuid())
    gpu = _gpu(sensors.limits())
    assert gpu is not None
    text = f"{gpu.name}, sm_{gpu.arch}, {gpu.sms} SMs, {gpu.memory_bytes / 2**30:.0f} GiB, L2 {gpu.l2_bytes >> 20} MiB"
    if gpu.arch < 80:
        hint = "the kernels need sm_80 or newer"
        return [Check("GPU", ok=False, text=text, hint=hint), *_check_clocks(sensors)]
    return [Check("GPU", ok=True, text=text), *_check_clocks(sensors)]


def _check_clocks(sensors: nvml.AnySensors) -> list[Check]:
    now, limits = sensors.read(), sensors.limits()
    if now.sm_clock_mhz is None:
        reason = sensors.reason or "the driver does not report them"
        return [Check("clocks", ok=None, text=reason, hint="times are taken all the same, without clocks beside them")]
    parts = [f"SM {now.sm_clock_mhz} MHz now, {limits.max_sm_clock_mhz or 'unknown'} at most"]
    parts += [f"{now.power_w:.0f} W of {limits.power_limit_w:.0f}"] if now.power_w and limits.power_limit_w else []
    parts += [f"{now.temperature_c} C"] if now.temperature_c is not None else []
    if now.throttle:
        hint = "the card holds its clocks back while it does nothing: look at power, cooling, and who else uses it"
        return [Check("clocks", ok=False, text=f"{', '.join(parts)}; throttled: {now.throttle}", hint=hint)]
    return [Check("clocks", ok=True, text=", ".join(parts))]


def _check_nvcc() -> list[Check]:
    if shutil.which("nvcc") is None:
        hint = "our kernels do not need it; a CUDA extension on trial does: install the CUDA toolkit"
        return [Check("nvcc", ok=None, text="not on PATH", hint=hint)]
    found = re.search(r"release ([\d.]+)", _output("nvcc", "--version") or "")
    return [Check("nvcc", ok=True, text=f"CUDA {found.group(1)}" if found else "version unknown")]


def _check_ncu() -> list[Check]:
    if shutil.which("ncu") is None:
        hint = "only a diagnosis with counters needs Nsight Compute: it comes with the CUDA toolkit"
        return [Check("Nsight Compute", ok=None, text="not on PATH", hint=hint)]
    found = re.search(r"Version ([\d.]+)", _output("ncu", "--version") or "")
    return [Check("Nsight Compute", ok=True, text=found.group(1) if found else "version unknown"), *_check_counters()]


def _check_counters() -> list[Check]:
    may = may_read_counters(_read_or_none(_PROFILING_FLAG), is_root=hasattr(os, "geteuid") and os.geteuid() == 0)
    if may is None:
        hint = "`ncu --set basic` on any program tells"
        return [Check("GPU counters", ok=None, text="unknown: the driver does not say who may read them", hint=hint)]
    if may:
        return [Check("GPU counters", ok=True, text="this user may read them")]
    hint = "as root, or with the driver's option NVreg_RestrictProfilingToAdminUsers=0"
    return [Check("GPU counters", ok=False, text="the driver keeps them for the administrator", hint=hint)]


def may_read_counters(parameters: str | None, *, is_root: bool) -> bool | None:
    """Return whether Nsight Compute may read counters, by the driver's parameters; None where it cannot be told."""
    found = re.search(r"^RmProfilingAdminOnly:\s*(\d+)", parameters or "", re.MULTILINE)
    if found is None:
        return None
    return is_root or found.group(1) == "0"


def _read_or_none(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _with_version(status: BaselineStatus) -> str:
    return f"{status.name} ({status.version})" if status.version else status.name


def _check_baselines() -> list[Check]:
    from .baselines import available_baselines
    from .operator import load_operator
    from .subject import BUILTIN_OPERATORS

    checks = []
    for operator in BUILTIN_OPERATORS:
        found = available_baselines(load_operator(operator))
        here = [_with_version(status) for status in found if status.available]
        waiting = [_with_version(status) for status in found if status.installed and not here]
        missing = [status.name for status in found if not status.installed]
        text = ", ".join(here) or (f"none without a GPU; installed: {', '.join(waiting)}" if waiting else "none found")
        text += f"; not here: {', '.join(missing)}" if missing else ""
        hint = f"`flashmoe baselines --operator {operator}` says why" if missing else ""
        checks.append(Check(f"baselines of {operator}", ok=True if here else None, text=text, hint=hint))
    return checks


def _version(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text or ""))


def _check_tree() -> list[Check]:
    commit, dirty = tree_commit()
    if commit is None:
        hint = "set FLASHMOE_COMMIT, so that a record can say which tree ran"
        return [Check("commit", ok=None, text="unknown: this copy is not a git repository", hint=hint)]
    if dirty:
        hint = "commit before a run that is to be evidence"
        return [Check("commit", ok=None, text=f"{commit[:12]}, with uncommitted changes", hint=hint)]
    return [Check("commit", ok=True, text=commit[:12])]


def _check_python() -> list[Check]:
    return [Check("python", ok=True, text=f"{platform.python_version()}, {platform.system()}-{platform.machine()}")]


_CHECKS: dict[str, Callable[[], list[Check]]] = {
    "python": _check_python,
    "torch": _check_torch,
    "triton": _check_triton,
    "driver": _check_driver,
    "GPU": _check_gpu,
    "nvcc": _check_nvcc,
    "Nsight Compute": _check_ncu,
    "baselines": _check_baselines,
    "commit": _check_tree,
}
