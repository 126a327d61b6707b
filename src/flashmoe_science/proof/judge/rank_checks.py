"""What a record of several ranks says of them in one place has to follow from what it says in another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from ..ranks.merge import merge_seen
from ..records.evidence import RankGroup, RankRounds, Record, Rounds, TimeKind
from ..text import counted

_SENSORS = ("sm_clock_mhz", "power_w", "temperature_c", "throttle")
_FEWEST_COMPARED = 6  # samples: fewer can be equal by chance where a clock is coarse
_CONSTANT = 1e-9  # range of a ratio that does not vary


def rank_views(record: Record) -> Iterator[tuple[str, Record]]:
    """Yield the record, and of several cards one for each rank, with its card and its sensors; before, whose it is."""
    yield "", record
    group = record.environment.ranks
    for rank, gpu in enumerate(group.gpus if group is not None else ()):
        environment = record.environment.model_copy(update={"gpu": gpu})
        cases = [
            case.model_copy(update={"rounds": [_seen_by(rank, each) for each in case.rounds if rank < len(each.ranks)]})
            for case in record.cases
        ]
        yield f"rank {rank}: ", record.model_copy(update={"environment": environment, "cases": cases})


def _seen_by(rank: int, rounds: Rounds) -> Rounds:
    return rounds.model_copy(update={name: getattr(rounds.ranks[rank], name) for name in _SENSORS})


def ranks_fault(record: Record) -> str:
    """Return how ranks, their cards, their times and their launches contradict one another, or an empty text."""
    group = record.environment.ranks
    count = 0 if group is None else group.count
    if group is not None and (fault := _cards_fault(group, record)):
        return fault
    for case in record.cases:
        for arm in case.arms:
            others = max(count - 1, 0) if arm.launches else 0
            told = sum(map(bool, arm.rank_launches))  # a refused arm has none, on any rank
            if told != others:
                said = f"has launches of {told + bool(arm.launches)} of {max(count, 1)} ranks"
                return f"case {case.name}: {arm.name} {said}"
        for rounds in case.rounds:
            if len(rounds.ranks) != count:
                return f"case {case.name}: rounds of {len(rounds.ranks)} ranks, and the calls were made by {count}"
            if count and (fault := _rounds_fault(rounds)):
                return f"case {case.name}: {fault}"
    return ""


def _cards_fault(group: RankGroup, record: Record) -> str:
    gpu = record.environment.gpu
    cards = {card.uuid_hash or str(rank) for rank, card in enumerate(group.gpus)}
    names = {card.name for card in (*group.gpus, gpu) if card is not None}
    needed = group.count if group.backend == "nccl" else 0
    if len(group.gpus) != needed or len(cards) != needed or len(names) > 1:
        return f"{counted(group.count, 'rank')} of {counted(len(cards), 'card')}, {' and '.join(sorted(names))}"
    if (gpu is not None) != (group.backend == "nccl"):
        return f"ranks that meet by {group.backend}, on {gpu.name if gpu is not None else 'no GPU'}"
    return ""


def _rounds_fault(rounds: Rounds) -> str:
    """Return how what ranks saw differs from what is said of all, or is one rank's twice."""
    if any(_arms_of(each) != _arms_of(rounds) for each in rounds.ranks):
        return "its ranks have times of other arms"
    merged = merge_seen([each.model_dump() for each in rounds.ranks])
    for name in _SENSORS:
        if getattr(rounds, name) != merged[name]:
            return f"its {name} is not that of the worst rank"
    for kind, arm in sorted(_arms_of(rounds)):
        if rounds.seconds[kind][arm] != merged["seconds"][kind][arm]:
            return f"the {kind} times of {arm} are not those of the slowest rank"
        columns = [each.seconds[kind][arm] for each in rounds.ranks]
        for (one, a), (other, b) in combinations(enumerate(columns), 2):
            if _has_one_ratio(a, b):
                return f"the {kind} times of {arm} have one ratio between ranks {one} and {other} in every round"
    return ""


def _arms_of(rounds: Rounds | RankRounds) -> set[tuple[TimeKind, str]]:
    return {(kind, arm) for kind, columns in rounds.seconds.items() for arm in columns}


def _has_one_ratio(a: Sequence[float], b: Sequence[float]) -> bool:
    if len(a) < _FEWEST_COMPARED or min(b) <= 0:
        return False
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    return max(ratios) - min(ratios) < _CONSTANT
