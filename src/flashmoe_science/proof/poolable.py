"""Which runs may be held against one another: what has to agree between two records, and what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ..errors import EvidenceError
from .evidence import Environment, Record, TimeKind
from .words import counted

_Field = Callable[[Record], object]


def _gpu(attribute: str) -> _Field:
    return lambda record: getattr(record.environment.gpu, attribute, None)


def _version(package: str) -> _Field:
    return lambda record: record.environment.versions.get(package)


def _setting(name: str) -> _Field:
    return lambda record: getattr(record.settings, name)


# Name of a field, as --allow-different takes it -> its value in a record.
_SOFTWARE: dict[str, _Field] = {
    "driver": lambda record: record.environment.driver,
    "cuda": lambda record: record.environment.cuda,
    "torch": _version("torch"),
    "triton": _version("triton"),
    "cudnn": _version("cudnn"),
}
_HARDWARE: dict[str, _Field] = {
    "gpu": _gpu("name"),
    "max_sm_clock": _gpu("max_sm_clock_mhz"),
    "power_limit": _gpu("power_limit_w"),
}
_METHOD: dict[str, _Field] = {
    name: _setting(name) for name in ("cache", "graph_seconds", "graph_calls", "graph_replays", "wall_calls")
}
_HOST: dict[str, _Field] = {
    "cpu": lambda record: record.environment.cpu,
    "python": lambda record: record.environment.python,
}
FIELDS: dict[str, _Field] = {
    "subject": lambda record: record.subject.name,
    "suite": lambda record: record.suite,
    **_HARDWARE,
    **_SOFTWARE,
    **_METHOD,
    **_HOST,
    "variables": lambda record: _variables(record.environment),
}
ALLOWED = (*FIELDS, "baseline_version", "problem")  # the last two are of what both records share


def _variables(environment: Environment) -> str:
    """Return the environment variables and flags that change results, as one text."""
    return ", ".join(f"{name}={value}" for name, value in sorted(environment.settings.items()))


def differences(a: Record, b: Record, fields: Iterable[str]) -> dict[str, tuple[object, object]]:
    """Return of ``fields`` those in which two records differ, with both values."""
    pairs = {name: (FIELDS[name](a), FIELDS[name](b)) for name in fields}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def hardware_changes(a: Record, b: Record) -> list[str]:
    """Return what changed from ``a`` to ``b`` in GPU, card, clocks and driver."""
    found = differences(a, b, (*_HARDWARE, "driver"))
    cards = [record.environment.gpu.uuid_hash if record.environment.gpu else "" for record in (a, b)]
    return _changes(found | ({"card": (cards[0], cards[1])} if cards[0] != cards[1] else {}))


def method_changes(a: Record, b: Record) -> list[str]:
    """Return what changed in how was measured: settings, versions of the harness and of what it stands on."""
    found = differences(a, b, (*_METHOD, "cuda", "torch", "triton", "cudnn", *_HOST, "variables"))
    more: dict[str, _Field] = {
        "harness": _version("flashmoe-science"),
        "schema": lambda record: record.schema_version,
        "rounds": lambda record: f"{record.settings.processes} x {record.settings.rounds}",
        "baseline": lambda record: ", ".join(record.baselines[:1]),
        "baseline version": lambda record: _versions_of(record, record.baselines[0]) if record.baselines else "",
    }
    pairs = {name: (of(a), of(b)) for name, of in more.items()}
    return _changes(found | {name: pair for name, pair in pairs.items() if pair[0] != pair[1]})


def code_changes(a: Record, b: Record) -> list[str]:
    """Return what changed in the sources that decide the result; the commit only where no sources were recorded."""
    before, after = ({s.path: s.sha256 for s in record.subject.sources} for record in (a, b))
    if before or after:
        changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
        commits = f", commit {_short(a.environment.commit)} -> {_short(b.environment.commit)}"
        return [f"{len(changed)} of {counted(len(before | after), 'source')}: {_names(changed)}{commits}"] * bool(
            changed
        )
    commit = a.environment.commit, b.environment.commit
    return [f"commit {_short(commit[0])} -> {_short(commit[1])}"] if commit[0] != commit[1] else []


def _changes(pairs: Mapping[str, tuple[object, object]]) -> list[str]:
    return [f"{name} {before} -> {after}" for name, (before, after) in pairs.items()]


def _short(commit: str | None) -> str:
    return (commit or "unknown")[:12]


def _names(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def common_baseline(a: Record, b: Record) -> str:
    """Return the first baseline of ``a`` that both runs measured, or an empty text."""
    measured = [
        {arm.name for case in record.cases for arm in case.arms if arm.role == "baseline" and arm.status == "measured"}
        for record in (a, b)
    ]
    return next((name for name in a.baselines if name in measured[0] & measured[1]), "")


def check_comparable(a: Record, b: Record, kinds: Sequence[TimeKind], *, allowed: Iterable[str] = ()) -> list[str]:
    """Return a note for each field that differs on purpose.

    Args:
        a: One run.
        b: The other.
        kinds: The times to compare: CPU and Python count for wall time only.
        allowed: Fields that may differ.

    Raises:
        EvidenceError: a field differs that may not, or an unknown one is allowed.
    """
    allowed = list(allowed)
    if unknown := [name for name in allowed if name not in ALLOWED]:
        raise EvidenceError(f"field must be one of {', '.join(ALLOWED)}, got {unknown[0]!r}")
    if a.subject.operator != b.subject.operator:
        message = f"the runs are of different operators: {a.subject.operator} in A, {b.subject.operator} in B"
        raise EvidenceError(message, hint="what they compute differs, so no time of one says anything of the other")
    found = differences(a, b, (name for name in FIELDS if name not in _HOST or "wall" in kinds))
    baseline = common_baseline(a, b)
    if baseline:
        versions = tuple(_versions_of(record, baseline) for record in (a, b))
        found |= {"baseline_version": (versions[0], versions[1])} if versions[0] != versions[1] else {}
    problems = {case.name: case.problem for case in b.cases}
    for case in a.cases:
        if case.name in problems and case.problem != problems[case.name]:
            found["problem"] = (f"{case.name}: {case.problem}", problems[case.name])
    refused = {name: pair for name, pair in found.items() if name not in allowed}
    if refused:
        lines = "; ".join(_told(name, pair) for name, pair in refused.items())
        flags = " ".join(f"--allow-different {name}" for name in refused)
        raise EvidenceError(f"the runs may not be compared: {lines}", hint=f"where that is on purpose: {flags}")
    cards = {record.environment.gpu.uuid_hash if record.environment.gpu else "" for record in (a, b)}
    if not baseline and (len(cards) > 1 or "" in cards):
        raise EvidenceError(
            "the runs have no baseline in common, and are not known to be of one card: absolute times belong to a card",
            hint="measure both against the same baseline, or `flashmoe compare` two revisions in one run",
        )
    return [f"different on purpose: {_told(name, pair)}" for name, pair in found.items()]


def _versions_of(record: Record, arm: str) -> str:
    return ", ".join(sorted({a.version for case in record.cases for a in case.arms if a.name == arm and a.version}))


def _told(name: str, pair: tuple[object, object]) -> str:
    return f"{name} is {pair[0]} in A and {pair[1]} in B"
