"""What the arms of a run took beside time: memory, and the kernels with their registers and shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .evidence import Arm, CaseRecord, Launch, Record
from .rows import by_role


@dataclass(frozen=True)
class MemoryRow:
    """Peak bytes of one call of each arm in one case."""

    case: CaseRecord
    subject: int | None
    baselines: Mapping[str, int | None]

    def share(self, baseline: str) -> float | None:
        """Return the subject's bytes divided by a baseline's; None where one of them is unknown or the divisor is 0."""
        theirs = self.baselines[baseline]
        return self.subject / theirs if self.subject is not None and theirs else None


@dataclass
class LaunchGroup:
    """One kernel of one arm, launched with the same block and resources in one or more cases."""

    arm: Arm
    launch: Launch  # the first of them
    grids: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # case -> grid


def memory_rows(record: Record) -> list[MemoryRow]:
    """Return a row for every case in which the peak memory of the subject or a baseline is known."""
    rows = []
    for case in record.cases:
        peaks = {arm.name: arm.peak_bytes for arm in case.arms}
        row = MemoryRow(case, peaks.get(record.subject.name), {name: peaks.get(name) for name in record.baselines})
        if any(value is not None for value in (row.subject, *row.baselines.values())):
            rows.append(row)
    return rows


def launch_groups(record: Record) -> list[LaunchGroup]:
    """Return the kernels that the subject and the baselines launched, the subject's first, each with its cases."""
    groups: dict[tuple[object, ...], LaunchGroup] = {}
    arms = [(case, place, arm) for case in record.cases for place, arm in enumerate(by_role(case.arms))]
    for case, _, arm in sorted(arms, key=lambda item: item[1]):  # stable: an arm's cases stay in their order
        for number, launch in enumerate(arm.launches if arm.role != "control" else ()):
            what = (launch.name, launch.block, launch.registers, launch.shared_memory_bytes, launch.count)
            group = groups.setdefault((arm.name, number, *what), LaunchGroup(arm, launch))
            group.grids[case.name] = launch.grid
    return list(groups.values())
