"""How many kinds of problems a run has: what a library compiles or chooses anew, whatever the lengths."""

from __future__ import annotations

from typing import Any

from .evidence import Record
from .loading import load_operator
from .operator import Operator, Scalable
from .registry import is_user_defined

# What operators that offer no longer problems, all of them of attention, call what gets longer.
_LENGTHS = frozenset(("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k", "lengths", "lengths_k"))


def kinds_of(record: Record) -> int:
    """Return how many kinds the cases of a record are of; 1 for a user's own operator, which may not be here."""
    name = record.subject.operator
    if is_user_defined(name):
        return 1
    operator = load_operator(name)
    return len({tuple(sorted(_without_lengths(operator, case.problem).items())) for case in record.cases})


def _without_lengths(operator: Operator, table: dict[str, Any]) -> dict[str, Any]:
    """Return what of a problem stays when any of its axes gets longer."""
    problem = operator.parse_case(table)
    tables = [operator.as_table(problem)]
    if not isinstance(operator, Scalable):
        return {key: str(value) for key, value in tables[0].items() if key not in _LENGTHS}
    for axis in operator.axes():
        longer = operator.scaled(problem, axis.name, 2)
        if longer is not None:
            tables.append(operator.as_table(longer))
    return {key: str(value) for key, value in tables[0].items() if all(each.get(key) == value for each in tables)}
