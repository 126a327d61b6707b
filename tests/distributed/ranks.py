"""Run one function of a module on several ranks over gloo, and return what each printed as JSON.

``python -m tests.distributed.ranks MODULE FUNCTION`` is what each rank runs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..proof.processes import python_path

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(
    module: str,
    function: str,
    ranks: int,
    folder: Path,
    *,
    backend: str = "gloo",
    timeout: float = 240,
    killed: int | None = None,
) -> list[dict[str, Any]]:
    """Return what ``function(rank, ranks)`` returned on each rank. A rank that fails fails the test.

    The rank ``killed`` must end by SIGKILL, and returns nothing.

    NVLink multicast stays off: not every machine that is shared allows it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    processes = []
    for rank in range(ranks):
        environment = {
            **os.environ, "PYTHONPATH": python_path(ROOT / "src", ROOT), "RANK": str(rank), "WORLD_SIZE": str(ranks),
            "STORE": str(folder / "store"), "OUT": str(folder / f"{rank}.json"), "OMP_NUM_THREADS": "1",
            "BACKEND": backend, "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
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
    assert codes == [-signal.SIGKILL if rank == killed else 0 for rank in range(ranks)], logs
    files = [folder / f"{rank}.json" for rank in range(ranks) if rank != killed]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


@contextlib.contextmanager
def fake_ranks(ranks: int, rank: int = 0) -> Iterator[None]:
    """Be one rank of many: collectives send nothing, and leave what they return as it was allocated."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
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
    # A functional collective of torch 2.13 keeps the process group: gloo's threads outlive destroy_process_group, and
    # abort a process that shuts down under them (DTensors on CPUs: one run of six). What main() raises ended it before.
    sys.stdout.flush()
    os._exit(0)
