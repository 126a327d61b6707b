"""Make claims from a run: what its intervals show, and no more."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from pydantic import ValidationError

from ...errors import ClaimError, InputError
from ...gpu.specs import find_gpu
from ..records.evidence import Record
from ..records.toml_files import explain_validation
from .claims import Claim, Metric, Scope, claim_sentence, why_not
from .judge import Verdict, VerdictStatus, judge
from .rows import METRICS, default_kind, kinds_measured
from .verify import suite_now

_LITTLE = 1e-9  # a factor below every interval

# Tenths of a power of ten: fine enough to be useful, coarse enough to remember.
_ROUND = (*range(10, 20), *range(20, 50, 5), *range(50, 100, 10))


@dataclass(frozen=True)
class ClaimRequest:
    """The fields of claims to make from a run. The run decides what is left empty."""

    kinds: Sequence[Metric] = ()  # a claim for each; empty: graph, or the first that was taken
    baselines: Sequence[str] = ()  # the fastest of them; empty: the first of the run
    scope: Scope = "each case"
    cases: Sequence[str] = ()
    factor: float | None = None  # None: the largest round figure that the intervals lie above
    gpu: str = ""
    id: str = ""


def make_claims(record: Record, request: ClaimRequest) -> list[Claim]:
    """Return the claims that ``request`` asks for, one for each kind of time.

    Raises ``ClaimError``: the run ``record`` cannot show one of them with any factor; the reason is the judge's.
    """
    measured, default = kinds_measured(record), default_kind(record)
    if default is None or not record.baselines or record.environment.gpu is None:
        raise ClaimError(
            f"run {record.id} timed nothing, so it shows no speed", hint="flashmoe prove on a GPU takes times"
        )
    kinds: list[Metric] = [kind for kind in METRICS if kind in request.kinds] or [default]
    if missing := [kind for kind in kinds if kind not in (*measured, "memory")]:
        raise ClaimError(f"time must be one of {', '.join(measured)} in run {record.id}, got {missing[0]}")
    if len(kinds) > 1 and request.id:
        raise ClaimError("an id names one claim, expected one --time")
    return [_make_claim(record, request, kind) for kind in kinds]


def _make_claim(record: Record, request: ClaimRequest, kind: Metric) -> Claim:
    assert record.environment.gpu is not None  # checked by make_claims
    gpu = request.gpu or _short_name(record.environment.gpu.name)
    name = f"{record.subject.name}-{record.suite}-{kind}-{gpu}"
    keys = {
        "id": request.id or re.sub(r"[^a-z0-9_.-]+", "-", name.lower()),
        "sentence": "made below",
        "subject": record.subject.name,
        "baseline": tuple(request.baselines) or record.baselines[:1],
        "suite": record.suite,
        "metric": kind,
        "factor": _LITTLE if request.factor is None else request.factor,
        "gpu": gpu,
        **({"ranks": ranks.count, "link": ranks.link} if (ranks := record.environment.ranks) is not None else {}),
        "scope": request.scope,
        "cases": tuple(request.cases),
    }
    try:
        claim = Claim.model_validate(keys)
    except ValidationError as error:
        raise ClaimError("\n".join(explain_validation(error, Claim))) from error
    if mismatch := why_not(claim, record):
        raise ClaimError(f"run {record.id} cannot show it: {mismatch}")
    if request.factor is None:
        claim = claim.model_copy(update={"factor": _largest_factor(claim, record)})
    return claim.model_copy(update={"sentence": claim_sentence(claim, record)})


def _largest_factor(claim: Claim, record: Record) -> float:
    """Return the largest round figure below every lower end: another factor may be decided by another baseline."""
    factor, lower = math.inf, round_below(_lower_end(claim, record))
    while lower < factor:
        factor = lower
        lower = round_below(_lower_end(claim.model_copy(update={"factor": factor}), record))
    return factor


def _lower_end(claim: Claim, record: Record) -> float:
    """Return the lower end that decides ``claim``."""
    verdict = judge(claim, record)
    intervals = [case.interval for case in verdict.cases]
    if claim.scope == "geometric mean":
        intervals = [verdict.geometric_mean]
    lows = [found.low for found in intervals if found is not None]
    if not lows or len(lows) < len(intervals):
        raise ClaimError(f"run {record.id} has no interval to claim a factor by: {verdict.reason}")
    return min(lows)


def round_below(value: float) -> float:
    """Return the largest of 1, 1.1 ... 1.9, 2, 2.5 ... 4.5, 5, 6 ... 9, times a power of ten, that is below ``value``.

    Raises ``InputError``: the value is not positive and finite.
    """
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"value must be positive and finite, got {value}")
    exponent = math.floor(math.log10(value))
    powers = (exponent - 1, exponent)
    figures = (float(Fraction(tenths, 10) * Fraction(10) ** power) for power in powers for tenths in _ROUND)
    return max(figure for figure in figures if figure < value)


def _short_name(gpu: str) -> str:
    """Return the name of a GPU in the table of models, or the driver's name."""
    try:
        return find_gpu(gpu).name
    except InputError:
        return gpu


def way_out(verdict: Verdict, record: Record, repository: Path) -> str:
    """Return what may get a claim demonstrated; empty: the reason of its verdict says all that is known."""
    if verdict.status is VerdictStatus.DEMONSTRATED:
        return ""
    if verdict.status is VerdictStatus.STALE:
        return "a new run shows it of the sources as they are"
    if verdict.gate_failed is not None:
        return f"a run that passes gate {verdict.gate_failed} is needed"
    suite = suite_now(record, repository)
    if suite.doubt:
        return suite.mend or "its reason says what is wrong with the suite"
    return "a lower --factor, or more rounds, may show it" if verdict.cases else ""
