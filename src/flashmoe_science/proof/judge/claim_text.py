"""The sentence of a claim, made from its fields. ``flashmoe claim new`` writes it, and ``verify`` accepts no other."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..records.evidence import Record
from .claims import Claim, Metric

_MEASURED: dict[Metric, str] = {"kernel": "in kernel time", "graph": "in a CUDA graph", "wall": "in wall time"}


def claim_sentence(claim: Claim, record: Record | None) -> str:
    """Return the sentence of ``claim``.

    Args:
        claim: every field but ``id``, ``sentence``, ``max_age_days`` and ``evidence`` is in it.
        record: a run of the suite, whose cases are counted. None: no counts.
    """
    baseline = claim.baseline[0] if len(claim.baseline) == 1 else f"the {claim.best} of {_listed(claim.baseline)}"
    if claim.metric == "memory":
        share = f"at most {math.ceil(100 / claim.factor)} % of the" if claim.factor != 1 else "no more than the"
        what = f"{claim.subject} needs {share} peak memory of {baseline}"
    else:
        times = f"{claim.factor:g} times " if claim.factor != 1 else ""
        what = f"{claim.subject} is at least {times}as fast as {baseline} {_MEASURED[claim.metric]}"
    versions = "".join(f", with {name} {wanted}" for name, wanted in claim.versions.items())
    return f"On {_listed(claim.gpu)}, {what}, {_scope(claim, record)}{versions}."


def sentence_fault(claim: Claim, record: Record) -> str:
    """Return why the sentence of ``claim`` is not the one of its fields; empty: it is."""
    expected, got = claim_sentence(claim, record), " ".join(claim.sentence.split())
    if got == expected:
        return ""
    return f"key sentence must be as `flashmoe claim new` words it: expected {expected!r}, got {got!r}"


def _scope(claim: Claim, record: Record | None) -> str:
    """Return over which cases the claim is, e.g. ``in each of 2 of 12 cases of suite features (`*_sinks`)``."""
    each = claim.scope == "each case"
    selection = f" ({_listed([f'`{pattern}`' for pattern in claim.cases], 'or')})" if claim.cases else ""
    suite = f"suite {claim.suite}{selection}"
    if record is None:
        return f"in each case of {suite}" if each else f"in the geometric mean over {suite}"
    total, selected = len(record.cases), len(claim.cases_of(record))
    whole = "the one case" if total == 1 else f"the {total} cases"
    cases = f"{selected} of {total} cases" if claim.cases else whole
    over = "in the geometric mean over" if not each else "in each of" if selected > 1 else "in"
    return f"{over} {cases} of {suite}"


def _listed(names: Sequence[str], joint: str = "and") -> str:
    return f" {joint} ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
