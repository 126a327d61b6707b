"""The checks of ``flashmoe doctor``: the parts that proving needs, and the ones that this machine lacks.

It takes a second: versions come from the metadata of packages and GPUs from NVML, so torch, triton and the baselines
are not imported. ``flashmoe baselines`` imports each baseline.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..worker import describe_error
from . import nvml
from .environment import tree_commit

# Distributions behind the baselines of our operators, and the name of each baseline.
BASELINES = {
    "flash-attn": "fa2",
    "flash-attn-3": "fa3",
    "flash-attn-4": "fa4",
    "xformers": "xformers",
    "flashinfer-python": "flashinfer",
    "liger-kernel": "liger",
    "scattermoe": "scattermoe",
    "sonic-moe": "sonicmoe",
    "triton_kernels": "triton_kernels",
    "vllm": "vllm-triton",
}
FA3_LIBRARY = "FLASHMOE_FA3_LIBRARY"  # names FlashAttention-3's shared library, as vLLM builds it

_PROFILING_FLAG = Path("/proc/driver/nvidia/params")
_COMMAND_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Check:
    """One fact about this machine."""

    name: str
    ok: bool | None  # None: it is absent or unknown, and nothing is broken
    text: str
    hint: str = ""  # the remedy


def examine() -> Iterator[Check]:
    """Yield the checks one by one. No check raises: one that fails says so."""
    for name, look in _CHECKS.items():
        try:
            yield from look()
        except Exception as error:  # noqa: BLE001 - a broken part of the machine is the subject of this search
            hint = "a fault of this program or of the installation: please report it with this line"
            yield Check(name, ok=False, text=f"could not be checked: {describe_error(error)}", hint=hint)


def check_width() -> int:
    """Return the length of the longest name, so that the lines of checks align before all are known."""
    return max(map(len, _CHECKS))


class _Torch(NamedTuple):
    version: str
    cuda: str | None


def _torch() -> _Torch | None:
    """Return the versions in torch's own file ``version.py``, without importing torch. None: it is not installed."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    names = runpy.run_path(str(Path(found.origin).with_name("version.py")))
    return _Torch(str(names["__version__"]), names.get("cuda"))


def _check_python() -> list[Check]:
    return [Check("python", ok=True, text=f"{platform.python_version()}, {platform.system()}-{platform.machine()}")]


def _check_torch() -> list[Check]:
    torch = _torch()
    if torch is None:
        return [Check("torch", ok=False, text="not installed", hint="pip install torch")]
    built = f"built for CUDA {torch.cuda}" if torch.cuda else "built without CUDA"
    return [Check("torch", ok=True, text=f"{torch.version}, {built}")]


def _check_triton() -> list[Check]:
    version = _distribution("triton")
    if not version:
        hint = "pip install triton; it is published for Linux"
        return [Check("triton", ok=False, text="not installed", hint=hint)]
    return [Check("triton", ok=True, text=version)]


def _distribution(name: str) -> str:
    """Return the version of an installed distribution, or an empty string."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _check_driver() -> list[Check]:
    cards = nvml.list_sensors()
    if isinstance(cards, nvml.NoSensors):
        missing = "not installed" in cards.reason
        install = "install NVIDIA's driver; without one everything but timing works"
        return [Check("driver", ok=None, text=cards.reason, hint="pip install nvidia-ml-py" if missing else install)]
    limits = cards[0].limits() if cards else nvml.Limits()
    text = f"{limits.driver or 'unknown'}, serves CUDA up to {limits.driver_cuda or 'unknown'}"
    torch = _torch()
    built, served = (_numbers(version) for version in (torch and torch.cuda, limits.driver_cuda))
    if torch and built and served and built[0] > served[0]:
        hint = f"update the driver, or install a torch that is built for CUDA {served[0]}"
        return [Check("driver", ok=False, text=f"{text}; torch is built for {torch.cuda}", hint=hint)]
    return [Check("driver", ok=True, text=text)]


def _numbers(version: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version or ""))


def _check_gpu() -> list[Check]:
    cards = nvml.list_sensors()
    if isinstance(cards, nvml.NoSensors) or not cards:
        hint = "build, import and correctness can be shown here; launches and times need an NVIDIA GPU"
        return [Check("GPU", ok=None, text="none that the driver shows", hint=hint)]
    torch = _torch()
    if torch and torch.cuda is None:
        hint = "install a torch that is built for CUDA: https://pytorch.org/get-started/locally"
        return [Check("GPU", ok=False, text="there is one, but this torch is built without CUDA", hint=hint)]
    checks = [check for card in cards for check in (_check_card(card.limits()), _check_clocks(card))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        hint = "unset it to use all GPUs" if visible else "unset it: it hides every GPU"
        text = f"CUDA_VISIBLE_DEVICES={visible} limits the GPUs that torch uses"
        checks.append(Check("GPU", ok=None if visible else False, text=text, hint=hint))
    return checks


def _check_card(limits: nvml.Limits) -> Check:
    parts = [limits.name or "unknown", f"sm_{limits.arch}" if limits.arch else "unknown architecture"]
    parts += [f"{limits.memory_bytes / 2**30:.0f} GiB"] if limits.memory_bytes else []
    if limits.arch is not None and limits.arch < 80:
        return Check("GPU", ok=False, text=", ".join(parts), hint="the kernels need sm_80 or newer")
    return Check("GPU", ok=True, text=", ".join(parts))


def _check_clocks(sensors: nvml.Sensors) -> Check:
    now, limits = sensors.read(), sensors.limits()
    if now.sm_clock_mhz is None:
        hint = "times are taken all the same, without clocks beside them"
        return Check("clocks", ok=None, text="the driver does not report them", hint=hint)
    parts = [f"SM {now.sm_clock_mhz} MHz now, {limits.max_sm_clock_mhz or 'unknown'} at most"]
    parts += [f"{now.power_w:.0f} W of {limits.power_limit_w:.0f}"] if now.power_w and limits.power_limit_w else []
    parts += [f"{now.temperature_c} C"] if now.temperature_c is not None else []
    if now.throttle:
        hint = "the card holds its clocks back while it does nothing: look at power, cooling, and who else uses it"
        return Check("clocks", ok=False, text=f"{', '.join(parts)}; throttled: {now.throttle}", hint=hint)
    return Check("clocks", ok=True, text=", ".join(parts))


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


def _output(*command: str) -> str | None:
    """Return the output of a command, or None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


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
    """Return whether Nsight Compute may read counters, by the driver's parameters; None where they do not say."""
    found = re.search(r"^RmProfilingAdminOnly:\s*(\d+)", parameters or "", re.MULTILINE)
    if found is None:
        return None
    return is_root or found.group(1) == "0"


def _read_or_none(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _check_baselines() -> list[Check]:
    found = {name: _distribution(distribution) for distribution, name in BASELINES.items()}
    if os.environ.get(FA3_LIBRARY):
        found["fa3"] = f"the library that {FA3_LIBRARY} names"
    here = [f"{name} ({version})" for name, version in found.items() if version]
    missing = [name for name, version in found.items() if not version]
    text = ", ".join(["those of PyTorch", *here]) + (f"; not installed: {', '.join(missing)}" if missing else "")
    return [Check("baselines", ok=True, text=text, hint="`flashmoe baselines` imports each and says whether it runs")]


def _check_tree() -> list[Check]:
    commit, dirty = tree_commit()
    if commit is None:
        hint = "set FLASHMOE_COMMIT, so that a record can say which tree ran"
        return [Check("commit", ok=None, text="unknown: this copy is not a git repository", hint=hint)]
    if dirty:
        hint = "commit before a run that is to be evidence"
        return [Check("commit", ok=None, text=f"{commit[:12]}, with uncommitted changes", hint=hint)]
    return [Check("commit", ok=True, text=commit[:12])]


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
