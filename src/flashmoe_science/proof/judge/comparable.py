"""Which runs may be held against one another: what has to agree between two records, and what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ...errors import EvidenceError
from ..records.evidence import Environment, Record, TimeKind
from ..text import counted, few

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
    "ranks": lambda record: _ranks(record.environment),
}
_METHOD: dict[str, _Field] = {
    name: _setting(name) for name in ("method", "cache", "graph_seconds", "graph_calls", "graph_replays", "wall_calls")
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
    "harness": _version("flashmoe-science"),
    # Older records have a hash of the source that took times besides.
    "method": lambda record: f"{record.settings.method} {record.method}".strip(),
}
# The last three are not plain fields: the first two are of what both records share.
ALLOWED = (*FIELDS, "baseline_version", "problem", "uncommitted")


def _ranks(environment: Environment) -> str:
    """Return how many GPUs made each call, and what links them."""
    ranks = environment.ranks
    return "1" if ranks is None else f"{ranks.count} over {ranks.link}"


def _variables(environment: Environment) -> str:
    """Return the environment variables and flags that change results, as one text."""
    return ", ".join(f"{name}={value}" for name, value in sorted(environment.settings.items()))


def differences(a: Record, b: Record, fields: Iterable[str]) -> dict[str, tuple[object, object]]:
    """Return of ``fields`` those in which two records differ, with both values."""
    pairs = {name: (FIELDS[name](a), FIELDS[name](b)) for name in fields}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def traits(record: Record) -> dict[str, dict[str, object]]:
    """Return what a run's times may depend on, by kind: code, method, hardware."""
    sources = tuple((source.path, source.sha256) for source in record.subject.sources)
    first = record.baselines[:1]
    settings = record.settings
    return {
        "code": {"sources": sources} if sources else {"commit": record.tree.commit},
        "method": {
            **{name: of(record) for name, of in {**_METHOD, **_HOST}.items()},
            **{name: of(record) for name, of in _SOFTWARE.items() if name != "driver"},
            "harness": record.environment.versions.get("flashmoe-science"),
            "schema": record.schema_version,
            "rounds": f"{settings.processes} x {settings.rounds}",
            "baseline": ", ".join(first),
            "baseline_version": _versions_of(record, first[0]) if first else "",
            "variables": _variables(record.environment),
        },
        "hardware": {
            **{name: of(record) for name, of in _HARDWARE.items()},
            "driver": record.environment.driver,
            "card": record.environment.gpu.uuid_hash if record.environment.gpu else None,
        },
    }


def describe_change(name: str, before: Record, after: Record, kind: str) -> str:
    """Return how one of ``traits`` changed from one run to another, e.g. ``driver 580.00 -> 590.00``."""
    if name != "sources":
        return f"{name} {traits(before)[kind].get(name)} -> {traits(after)[kind].get(name)}"
    old, new = ({source.path: source.sha256 for source in run.subject.sources} for run in (before, after))
    changed = sorted(path for path in old.keys() | new.keys() if old.get(path) != new.get(path))
    commits = [(run.tree.commit or "unknown")[:12] for run in (before, after)]
    return (
        f"{len(changed)} of {counted(len(old | new), 'source')} ({few(changed)}), commit {commits[0]} -> {commits[1]}"
    )


def common_baseline(a: Record, b: Record) -> str:
    """Return the first baseline of ``a`` that both runs measured, or an empty text."""
    measured = [
        {arm.name for case in record.cases for arm in case.arms if arm.role == "baseline" and arm.status == "measured"}
        for record in (a, b)
    ]
    return next((name for name in a.baselines if name in measured[0] & measured[1]), "")


def check_comparable(a: Record, b: Record, kinds: Sequence[TimeKind], *, allowed: Iterable[str] = ()) -> list[str]:
    """Return a note for each field that differs on purpose: one of ``allowed``.

    CPU and Python count for wall time only. Raises ``EvidenceError``: a field differs that may not, or an unknown one
    is allowed.
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
    dirt = (_uncommitted(a), _uncommitted(b))
    found |= {"uncommitted": dirt} if dirt != ("none", "none") else {}  # two unknown trees may differ
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


def _uncommitted(record: Record) -> str:
    """Return whether the code that ran was the commit's: the subject's, and the harness's where it is in another."""
    trees = [(record.environment.commit, record.environment.dirty), (record.tree.commit, record.tree.dirty)]
    if any(dirty for _, dirty in trees):
        return "some changes"
    return "not known" if any(commit is None or dirty is None for commit, dirty in trees) else "none"


def _versions_of(record: Record, arm: str) -> str:
    return ", ".join(sorted({a.version for case in record.cases for a in case.arms if a.name == arm and a.version}))


def _told(name: str, pair: tuple[object, object]) -> str:
    return f"{name} is {pair[0]} in A and {pair[1]} in B"
