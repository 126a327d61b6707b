"""Launches that no GPU can make, and those that are missing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

from ...gpu.specs import shared_memory_limit
from ..records.evidence import GateStatus, Record
from ..text import counted

_MOST_THREADS, _MOST_REGISTERS = 1024, 255  # of a block, and of a thread, on every architecture


def launch_faults(record: Record) -> Iterator[str]:
    """Compare launches with what a GPU can launch, and with what gate *launch* saw."""
    gate = record.gate("launch")
    if gate is not None and gate.status is GateStatus.PASSED:
        for case in record.cases:
            for arm in case.arms:
                if arm.role != "subject" or arm.status != "measured":
                    continue
                if not arm.launches:
                    yield f"case {case.name}: gate launch passed, and no launch of {arm.name} is recorded"
                calls = sum(launch.count for launch in arm.launches)
                # Over ranks, kernels of NCCL have no identity.
                if arm.identities and record.environment.ranks is None and len(arm.identities) != calls:
                    known = counted(len(arm.identities), "launch")
                    yield f"case {case.name}: {arm.name} makes {calls} launches, and has identities of {known}"
    gpu = record.environment.gpu
    memory = shared_memory_limit(gpu.arch) if gpu else None
    arms = [(case, arm) for case in record.cases for arm in case.arms]
    launched = ((*of, launch) for of in arms for launch in chain(of[1].launches, *of[1].rank_launches))
    for case, arm, launch in launched:
        told = f"case {case.name}: {arm.name} launches {launch.name[:60]}"
        if not 0 < math.prod(launch.block) <= _MOST_THREADS:
            yield f"{told} with {math.prod(launch.block)} threads in a block"
        if not 0 <= launch.registers <= _MOST_REGISTERS:
            yield f"{told} with {launch.registers} registers in a thread"
        if memory is not None and not 0 <= launch.shared_memory_bytes <= memory:
            yield f"{told} with {launch.shared_memory_bytes} bytes of shared memory, at most {memory} fit"
        if min(launch.grid) < 1 or launch.count < 1:
            yield f"{told} in a grid of {launch.grid}, {launch.count} times"
