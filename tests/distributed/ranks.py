"""Run one function of a module on several ranks over gloo, and return what each printed as JSON.

``python -m tests.distributed.ranks MODULE FUNCTION`` is what each rank runs.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..proof.processes import python_path

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(
    module: str, function: str, ranks: int, folder: Path, *, backend: str = "gloo", timeout: float = 240
) -> list[dict[str, Any]]:
    """Return what ``function(rank, ranks)`` returned on each rank. A rank that fails fails the test.

    NVLink multicast stays off: not every machine that is shared allows it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    processes = []
    for rank in range(ranks):
        environment = {
            **os.environ, "PYTHONPATH": python_path(ROOT / "src", ROOT), "RANK": str(rank), "WORLD_SIZE": str(ranks),
            "STORE": str(folder / "store"), "OUT": str(folder / f"{rank}.json"), "OMP_NUM_THREADS": "1",
            "BACKEND": backend, "NCCL_NVLS_ENABLE": "0",
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.distributed.ranks", module, function]
        with (folder / f"{rank}.log").open("w", encoding="utf-8") as log:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join((folder / f"{rank}.log").read_text(encoding="utf-8")[-3000:] for rank in range(ranks))
    assert codes == [0] * ranks, logs
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]


def main() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = os.environ["BACKEND"]
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    try:
        found = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(rank, ranks)
        Path(os.environ["OUT"]).write_text(json.dumps(found), encoding="utf-8")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
