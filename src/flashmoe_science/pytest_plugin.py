"""Claims as tests: a plugin of pytest, found by its entry point.

::

    @pytest.mark.flashmoe(claim="seed-graph-h200")
    def test_speed(): ...

passes where the claim holds, fails where it is refuted (under ``--flashmoe-strict`` also where it is stale), and is
skipped where nobody knows. The fixture ``flashmoe_claim`` does the same within a test and returns the verdict.

Importing this file needs pytest alone: the harness is imported by the first test that asks for a claim.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .proof.judge.claims import Claim
    from .proof.judge.judge import Verdict
    from .proof.records.evidence import Record

_MARKER = "flashmoe(claim, ...): passes where this claim of claims/ holds, fails where it is refuted, else is skipped"

_EXPECTED = 'flashmoe expects the id of a claim, e.g. @pytest.mark.flashmoe(claim="seed-graph")'


class _Claims:
    """The claims and the evidence of a repository, read once in a session."""

    def __init__(self, start: Path, *, strict: bool) -> None:
        self._start = start
        self._strict = strict
        self._repository: Path | None = None
        self._claims: dict[str, Claim] = {}
        self._records: dict[str, Record] = {}
        self._verdicts: dict[str, Verdict] = {}

    def judge(self, name: str) -> Verdict:
        """Return the verdict on one claim. Raises ``FlashmoeError`` when there is none of this name."""
        from .errors import ClaimError
        from .proof.judge.claims import load_claims
        from .proof.judge.verify import read_records, verify_claim
        from .proof.records.store import find_repository

        if self._repository is None:
            repository = find_repository(self._start)
            if repository is None:
                where = f"{self._start} is in no folder with claims/ or evidence/"
                raise ClaimError(f"there is no folder claims/ here: {where}")
            self._claims = {claim.id: claim for claim in load_claims(repository / "claims")}
            self._records = read_records(repository)
            self._repository = repository
        if name not in self._claims:
            near = difflib.get_close_matches(name, self._claims, n=1)
            hint = f"did you mean {near[0]}?" if near else f"claims/ has {', '.join(self._claims) or 'none'}"
            raise ClaimError(f"there is no claim {name!r}", hint=hint)
        if name not in self._verdicts:
            self._verdicts[name] = verify_claim(self._claims[name], self._records, self._repository)
        return self._verdicts[name]

    def check(self, *names: str) -> list[Verdict]:
        """Return the verdicts where all hold; else fail or skip the test that runs. A failure goes before a skip."""
        from .errors import FlashmoeError

        failure = ""
        try:
            from .proof.report.junit import outcome

            verdicts = [self.judge(name) for name in names]
        except ModuleNotFoundError as error:
            failure = _missing(error)
        except FlashmoeError as error:
            failure = str(error)
        if failure:  # out of the handler: a failure within it would be printed with what led to it
            pytest.fail(failure, pytrace=False)
        results = [(verdict, *outcome(verdict, strict=self._strict)) for verdict in verdicts]
        for wanted in ("failed", "skipped"):
            said = [f"claim {verdict.claim.id}: {text}" for verdict, result, text in results if result == wanted]
            if said and wanted == "failed":
                pytest.fail("\n".join(said), pytrace=False)
            elif said:
                pytest.skip("; ".join(said))
        return verdicts


def _missing(error: ModuleNotFoundError) -> str:
    """Return what to say of a module that is not there: the harness's, or one that an operator of the user's needs."""
    from .cli import EXTRA, KERNELS, missing_hint

    name = error.name or "a module"
    if name in EXTRA | KERNELS:
        return f"{name} is not installed\nhint: {missing_hint(name)}"
    hint = "a suite or a record names an operator that needs it: put its folder on the option pythonpath of pytest"
    return f"there is no module {name}\nhint: {hint}"


_CLAIMS = pytest.StashKey[_Claims]()
_FAILED = pytest.StashKey[bool]()  # of a test: a claim of its markers does not hold


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--flashmoe-strict``."""
    group = parser.getgroup("flashmoe")
    group.addoption("--flashmoe-strict", action="store_true", help="a stale claim fails its test, as it does not hold")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker; nothing is read before a test asks for it."""
    config.addinivalue_line("markers", _MARKER)
    config.stash[_CLAIMS] = _Claims(config.rootpath, strict=config.getoption("--flashmoe-strict"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Judge the claims of a marked test before its fixtures, which may be dear, and before its body."""
    try:
        names = list(_named(item))
        if names:
            item.config.stash[_CLAIMS].check(*names)
    except pytest.fail.Exception:
        item.stash[_FAILED] = True
        raise


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Report a claim that does not hold as a test that failed: pytest calls what goes wrong before a body an error."""
    outcome = yield
    report = outcome.get_result()
    if report.when == "setup" and report.failed and item.stash.get(_FAILED, default=False):
        report.when = "call"


def _named(item: pytest.Item) -> Iterator[str]:
    """Yield the ids in the markers of a test; the nearest marker comes first."""
    for marker in item.iter_markers("flashmoe"):
        given = (*marker.args, *([marker.kwargs["claim"]] if "claim" in marker.kwargs else ()))
        if not given or set(marker.kwargs) - {"claim"} or not all(isinstance(name, str) for name in given):
            pytest.fail(_EXPECTED, pytrace=False)
        yield from given


@pytest.fixture
def flashmoe_claim(pytestconfig: pytest.Config) -> Callable[[str], Verdict]:
    """Return a function that takes the id of a claim, and returns the verdict on it where it holds."""

    def claim(name: str) -> Verdict:
        (verdict,) = pytestconfig.stash[_CLAIMS].check(name)
        return verdict

    return claim
