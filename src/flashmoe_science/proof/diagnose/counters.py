"""The GPU's own counters, read by Nsight Compute in a process of its own.

``ncu`` repeats every kernel of one call several times, with caches flushed before each, and leaves the clocks alone
(``--clock-control none``): what it reads is the cold call. It needs permission; without it, and without ``ncu``, the
reason is what comes back.

Source: Nsight Compute CLI (``--page raw --csv``: a header, a line of units, then a line for every kernel). Names are
asked for as the compiler wrote them: demangled ones come simplified (``--rename-kernels`` is on by default), as by
no other tool.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...gpu.cuobjdump import demangle
from ..measure.launches import match_names
from ..processes import TaskResult, run_command
from .observations import DURATION, METRICS, Kernel

_TIMEOUT_S = 300.0
_ATTEMPTS = 4  # a metric that this ncu does not know for this GPU is left out, and the rest tried again

# The child takes over sys.path as it is, like the worker's.
_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    "from flashmoe_science.proof.diagnose.tasks import call_once; call_once(json.load(open(sys.argv[1])))"
)

Command = Callable[..., TaskResult]


def read_counters(
    payload: dict[str, Any], kernels: Sequence[Kernel], *, run: Command = run_command, ncu: str | None = None
) -> tuple[list[Kernel], str]:
    """Return ``kernels`` with the counters of one call, or as they are with the reason why there are none.

    ``payload`` is that of ``tasks.call_once``; ``ncu`` is the program, by default the one on PATH.
    """
    program = ncu or shutil.which("ncu")
    if program is None:
        return list(kernels), "Nsight Compute (ncu) is not on PATH"
    metrics = list(METRICS)
    with tempfile.TemporaryDirectory(prefix="flashmoe-ncu-") as folder:
        request, log = Path(folder) / "request.json", Path(folder) / "log.csv"
        request.write_text(json.dumps(payload), encoding="utf-8")
        for _ in range(_ATTEMPTS):
            argv = [
                *(program, "--clock-control", "none", "--profile-from-start", "off", "--target-processes", "all"),
                *("--csv", "--page", "raw", "--print-units", "base", "--print-kernel-base", "mangled"),
                *("--metrics", ",".join(metrics)),
                *("--log-file", str(log), sys.executable, "-c", _BOOT, str(request), json.dumps(sys.path)),
            ]
            result = run(argv, cwd=folder, timeout_s=_TIMEOUT_S)
            text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            unknown = set(re.findall(r"[Ff]ailed to find metric (?:regex:)?\^?([\w.]+)", text + result.output_tail))
            rows = parse(text)
            if rows or not unknown & set(metrics):
                break
            metrics = [metric for metric in metrics if metric not in unknown]
    if not rows:
        return list(kernels), _why_none(text, result)
    return attach(kernels, rows)


@dataclass(frozen=True)
class Row:
    """One launch as ncu saw it."""

    name: str  # demangled, as a profiler shows it
    grid: tuple[int, ...]  # empty: not told
    block: tuple[int, ...]
    values: dict[str, float]  # metric -> value


def parse(text: str) -> list[Row]:
    """Return the launches in what ``ncu --page raw --csv`` wrote, messages left out."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    # The line of units names no kernel.
    rows = [row for row in csv.DictReader(io.StringIO("\n".join(lines))) if row.get("Kernel Name")]
    names = demangle([row["Kernel Name"] for row in rows])
    return [
        Row(
            name,
            _sizes(row.get("Grid Size")),
            _sizes(row.get("Block Size")),
            {metric: value for metric in METRICS if (value := _number(row.get(metric))) is not None},
        )
        for name, row in zip(names, rows, strict=True)
    ]


def _sizes(text: str | None) -> tuple[int, ...]:
    """Return ``(1,024, 1, 1)`` as numbers; empty for anything else."""
    inner = (text or "").strip().strip("()")
    parts = [part.replace(",", "") for part in inner.split(", " if ", " in inner else ",")]
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


def _number(text: str | None) -> float | None:
    """Return a number as ncu writes it, with commas between thousands; None for what it could not read."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def attach(kernels: Sequence[Kernel], rows: Sequence[Row]) -> tuple[list[Kernel], str]:
    """Give each kernel the counters of its launches: sums are added, percentages weighted by time."""
    found, lacking = [], []
    for kernel in kernels:
        own = [row.values for row in rows if _is_of(kernel, row)]
        weights = [values.get(DURATION) or 1.0 for values in own]
        counters = {}
        for metric in METRICS:
            values = [values[metric] for values in own if metric in values]
            if not own or len(values) < len(own):
                continue
            counters[metric] = sum(values)
            if not metric.endswith(".sum"):
                counters[metric] = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
        lacking += [] if own else [kernel.name]
        found.append(kernel.model_copy(update={"counters": counters}) if own else kernel)
    if not lacking:
        return found, ""
    shown = ", ".join(dict.fromkeys(row.name for row in rows))
    return found, f"ncu shows no kernel {', '.join(lacking)}; what it shows: {shown}"


def _is_of(kernel: Kernel, row: Row) -> bool:
    """Return whether a launch is one of ``kernel``: by its name, grid and block, as far as these are known."""
    told = ((row.grid, kernel.grid), (row.block, kernel.block))
    same = all(not here or known is None or here == tuple(known) for here, known in told)
    return same and match_names(kernel.name, row.name)


def _why_none(text: str, result: TaskResult) -> str:
    """Return why ncu gave no counters, from what it said."""
    said = text + result.output_tail
    if "ERR_NVGPUCTRPERM" in said:
        return "this user may not read the GPU's counters: as root, or with NVreg_RestrictProfilingToAdminUsers=0"
    lines = [line.removeprefix("==ERROR== ") for line in said.splitlines() if line.startswith("==ERROR==")]
    return f"ncu {lines[0] if lines else result.reason or 'shows no kernel'}"
