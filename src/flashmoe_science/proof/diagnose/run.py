"""One diagnosis from its request to its findings."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from ...errors import InputError, SuiteError
from ..judge.roofline import known_spec
from ..records.evidence import Environment
from ..subject.subject import Subject
from ..subject.suites import Suite, SuiteCase, check_operator
from .gather import CannotObserveError, Request, build, observe_here, plan_for
from .observations import Diagnosis, Observations
from .reason import diagnose_case

NO_GPU = "no GPU here"

# The rough model of the time, in seconds: processes of launches, of graph and wall time, and of kernel time, then the
# counters.
_PROCESSES, _START, _CALLS_OF_CASE, _CALL_OF_ARM, _COUNTERS_OF_CASE = 3, 4.0, 8, 0.4, 15.0


def observes_here(request: Request, environment: Environment) -> bool:
    """Return whether the GPU of this machine is observed, or only what compiling tells."""
    here = environment.gpu
    return here is not None and (request.gpu is None or request.gpu == known_spec(here))


def expected_seconds(request: Request) -> float:
    """Return roughly how long observing holds a GPU: three processes, each with every case and its longer ones."""
    calls = len(request.cases) * _CALLS_OF_CASE
    arms = 1 + len(request.baselines) + bool(request.baselines)
    counted = _COUNTERS_OF_CASE * len(request.cases) if request.counters else 0.0
    return _PROCESSES * _START + calls * arms * _CALL_OF_ARM + counted


def choose_cases(suite: Suite, subject: Subject, names: Sequence[str]) -> list[SuiteCase]:
    """Return the cases called ``names``, or all.

    Raises:
        SuiteError: the suite is of another operator, or has no such case.
    """
    check_operator(suite, subject)
    known = {case.name: case for case in suite.cases}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            listing = f"`flashmoe suites {suite.name or 'SUITE'}` lists the cases"
            where = f"suite {suite.name} has" if suite.name else f"the packaged suites of {suite.operator} have"
            hint = f"did you mean {near[0]}? {listing}" if near else listing
            raise SuiteError(f"{where} no case {name!r}", hint=hint)
    return [known[name] for name in names] or list(suite.cases)


def diagnose(request: Request, environment: Environment, *, say: Callable[[str], None]) -> Diagnosis:
    """Observe and reason; ``say`` gets a line for each step. Raises ``InputError``: no GPU here, and none was named.

    ``failed`` of the diagnosis says where nothing could be observed because the subject cannot be built or imported.
    """
    if request.seed is None:
        request = replace(request, seed=secrets.randbits(31))
    result = Diagnosis(subject=request.subject.name, command=request.command, environment=environment)
    try:
        observations = _observe(request, environment, say)
    except CannotObserveError as error:
        return result.model_copy(update={"failed": error.gate})
    return result.model_copy(update={"cases": [diagnose_case(each) for each in observations]})


def _observe(request: Request, environment: Environment, say: Callable[[str], None]) -> list[Observations]:
    here = environment.gpu
    if here is None and request.gpu is None:
        raise InputError("there is no NVIDIA GPU here", hint="name one to see what compiling alone tells: --gpu H200")
    if here is not None and observes_here(request, environment):
        if "cuda" not in request.subject.devices:
            raise InputError(f"{request.subject.name} runs on the CPU only: there is no kernel to diagnose")
        build(request.subject, here, say)
        return observe_here(request, here, say=say)
    assert request.gpu is not None
    why = NO_GPU if here is None else f"the GPU here is another one: {here.name}"
    return plan_for(request, request.gpu, why, say=say)
