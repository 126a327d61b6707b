"""The GPU's own counters, read by Nsight Compute in a process of its own.

``ncu`` repeats every kernel of one call several times, with caches flushed before each, and leaves the clocks alone
(``--clock-control none``): what it reads is the cold call. It needs permission; without it, and without ``ncu``, the
reason is what comes back.

Source: Nsight Compute CLI (``--page raw --csv``: a header, a line of units, then a line for every kernel).
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
from pathlib import Path
from typing import Any

from ..launches import match_names
from ..worker import TaskResult, run_command
from .observations import Kernel

METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "smsp__thread_inst_executed_per_inst_executed.ratio",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "lts__t_bytes.sum",
)

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

    Args:
        payload: of ``tasks.call_once``.
        kernels: of the call.
        run: stands in for ``worker.run_command``.
        ncu: the program; None looks on PATH.
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
                *("--csv", "--page", "raw", "--print-units", "base", "--print-kernel-base", "demangled"),
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


def parse(text: str) -> list[tuple[str, dict[str, float]]]:
    """Return name and counters of every kernel in what ``ncu --page raw --csv`` wrote, messages left out."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    found = []
    for row in rows:
        name = row.get("Kernel Name") or ""
        if not name:  # the line of units
            continue
        values = {metric: value for metric in METRICS if (value := _number(row.get(metric))) is not None}
        found.append((name, values))
    return found


def _number(text: str | None) -> float | None:
    """Return a number as ncu writes it, with commas between thousands; None for what it could not read."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


_SUMS = tuple(metric for metric in METRICS if metric.endswith(".sum"))


def attach(kernels: Sequence[Kernel], rows: Sequence[tuple[str, dict[str, float]]]) -> tuple[list[Kernel], str]:
    """Give each kernel the counters of its launches: sums are added, percentages weighted by time."""
    found, lacking = [], []
    for kernel in kernels:
        own = [values for name, values in rows if match_names(kernel.name, name)]
        if not own:
            lacking.append(kernel.name)
            found.append(kernel)
            continue
        counters = {}
        for metric in METRICS:
            if not all(metric in values for values in own):
                continue
            if metric in _SUMS:
                counters[metric] = sum(values[metric] for values in own)
            else:
                weights = [values.get("gpu__time_duration.sum", 1.0) or 1.0 for values in own]
                counters[metric] = sum(w * v[metric] for w, v in zip(weights, own, strict=True)) / sum(weights)
        found.append(kernel.model_copy(update={"counters": counters}))
    return found, f"ncu shows no kernel {', '.join(lacking)}" if lacking else ""


def _why_none(text: str, result: TaskResult) -> str:
    """Return why ncu gave no counters, from what it said."""
    said = text + result.output_tail
    if "ERR_NVGPUCTRPERM" in said:
        return "this user may not read the GPU's counters: as root, or with NVreg_RestrictProfilingToAdminUsers=0"
    lines = [line.removeprefix("==ERROR== ") for line in said.splitlines() if line.startswith("==ERROR==")]
    return f"ncu {lines[0] if lines else result.reason or 'shows no kernel'}"
