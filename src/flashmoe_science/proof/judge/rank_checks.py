"""What a record of several ranks says of them in one place has to follow from what it says in another."""

from __future__ import annotations

from ..records.evidence import Record
from ..text import counted


def ranks_fault(record: Record) -> str:
    """Return how ranks, their cards, their times and their launches contradict one another, or an empty text."""
    group = record.environment.ranks
    count = 0 if group is None else group.count
    if group is not None and group.gpus:
        cards = {gpu.uuid_hash or str(rank) for rank, gpu in enumerate(group.gpus)}
        names = {gpu.name for gpu in (*group.gpus, record.environment.gpu) if gpu is not None}
        if len(group.gpus) != count or len(cards) != count or len(names) > 1:
            return f"{counted(count, 'rank')} of {counted(len(cards), 'card')}, {' and '.join(sorted(names))}"
    for case in record.cases:
        for arm in case.arms:
            if arm.rank_launches and len(arm.rank_launches) != count - 1:
                return f"case {case.name}: {arm.name} has launches of {len(arm.rank_launches) + 1} of {count} ranks"
        for rounds in case.rounds:
            if len(rounds.ranks) != count:
                return f"case {case.name}: rounds of {len(rounds.ranks)} ranks, and the calls were made by {count}"
            for kind, columns in rounds.seconds.items():
                for name, column in columns.items() if count else ():
                    slowest = [max(row) for row in zip(*(r.seconds[kind][name] for r in rounds.ranks), strict=True)]
                    if slowest != column:
                        return f"case {case.name}: the {kind} times of {name} are not those of the slowest rank"
    return ""
