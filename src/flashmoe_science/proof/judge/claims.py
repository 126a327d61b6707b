"""Claims about speed or memory in ``claims/*.toml``, and the records that are their evidence.

The format is in ``docs/reference/claims.md``. ``judge`` decides whether a claim holds. ``flashmoe claim new`` makes the
sentence of a claim from its fields, and ``verify`` accepts no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

import tomlkit
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from ...errors import ClaimError, InputError, page
from ...gpu.specs import find_gpu, name_words
from ..records.evidence import CaseRecord, Record
from ..records.files import write_atomically
from ..records.toml_files import parse_toml, read_toml
from ..subject.loading import builtin_names, is_builtin
from ..text import counted

_HINT = f"the format is in {page('reference/claims')}"

Scope = Literal["each case", "geometric mean"]
Metric = Literal["kernel", "graph", "wall", "memory"]  # the three times, and the peak bytes that a call allocates


def _names(value: object) -> object:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name.strip() for name in names):
        raise ValueError("expected a name or a list of different names")
    if len(set(names)) != len(names):
        raise ValueError("expected different names")
    return tuple(names)


def _at_least_one(value: object) -> object:
    if not value:
        raise ValueError("expected a name or a list of different names")
    return value


def _tables(value: object) -> object:
    if isinstance(value, dict):
        raise ValueError("expected tables [[claim]], with two brackets")  # noqa: TRY004 - what pydantic collects
    return value


def _words_of_names(value: tuple[str, ...]) -> tuple[str, ...]:
    if not all(map(name_words, value)):
        raise ValueError("expected words of the GPU's name, or a list of such names")
    return value


def _specifiers(value: str) -> str:
    try:
        SpecifierSet(value)
    except InvalidSpecifier:
        raise ValueError("expected versions such as '>=3.6,<3.10'") from None
    return value


_Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
_Names = Annotated[tuple[_Text, ...], BeforeValidator(_names)]
_SomeNames = Annotated[_Names, BeforeValidator(_at_least_one)]
_Gpus = Annotated[_SomeNames, AfterValidator(_words_of_names)]
_Versions = Annotated[_Text, AfterValidator(_specifiers)]


NO_GPU = "a machine with no GPU"


class Claim(BaseModel):
    """One sentence about speed: ``subject`` is at least ``factor`` times as fast as ``baseline``.

    Or, where ``metric`` is memory, about what a call allocates: ``baseline`` at least ``factor`` times what ``subject``
    does.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(
        pattern=r"^[a-z0-9][a-z0-9_.-]*$", description="an id of lower-case letters, digits, '-', '_' and '.'"
    )
    sentence: _Text = Field(description="the sentence that `flashmoe claim new` makes from the other keys")
    subject: _Text = Field(description="the name of the subject")
    baseline: _SomeNames = Field(description="the name of a baseline, or a list of names: the fastest in each case")
    suite: _Text = Field(description="the name of a suite")
    metric: Metric = Field(description="'kernel', 'graph', 'wall' or 'memory'")
    factor: float = Field(strict=True, gt=0, allow_inf_nan=False, description="a number above 0")
    gpu: _Gpus = Field(description="words of the GPU's name, e.g. 'H200', or a list of such names: on each of them")
    ranks: int = Field(default=1, strict=True, ge=1, description="how many GPUs of one host make each call together")
    link: str = Field(default="", description="what links them, e.g. 'NVLink'")
    scope: Scope = Field(description="'each case' or 'geometric mean'")
    cases: _Names = Field(
        default=(), description="patterns on the names of cases, '*' and '?' as in file names: only these cases"
    )
    versions: dict[_Text, _Versions] = Field(
        default_factory=dict, description="a table of versions that it holds for, e.g. {torch = '>=2.9'}"
    )
    max_age_days: float | None = Field(
        default=None, strict=True, gt=0, allow_inf_nan=False, description="a number of days above 0"
    )
    evidence: _Names = Field(
        default=(), description="ids of records, or their paths from the repository's root; each has to show the claim"
    )

    @property
    def best(self) -> str:
        """Which of several baselines decides."""
        return "thriftiest" if self.metric == "memory" else "fastest"

    def fits_gpu(self, name: str) -> bool:
        """Return whether the claim is about the GPU called ``name``: by whole words, and H100 NVL is no H100."""
        return any(_fits(claimed, name) for claimed in self.gpu)

    def on_gpu(self, name: str) -> Claim:
        """Return what is claimed for one GPU alone: the first of those named that the GPU called ``name`` fits."""
        claimed = next(claimed for claimed in self.gpu if _fits(claimed, name))
        return self.model_copy(update={"gpu": (claimed,)})

    def is_about(self, case: str) -> bool:
        """Return whether the claim is about the case of this name."""
        return not self.cases or any(fnmatchcase(case, pattern) for pattern in self.cases)

    def cases_of(self, record: Record) -> list[CaseRecord]:
        """Return the cases of ``record`` that the claim is about."""
        return [case for case in record.cases if self.is_about(case.name)]

    def idle_patterns(self, names: Iterable[str]) -> list[str]:
        """Return the patterns that fit none of these cases."""
        names = list(names)
        return [pattern for pattern in self.cases if not any(fnmatchcase(name, pattern) for name in names)]


def _fits(claimed: str, name: str) -> bool:
    if not name_words(claimed) <= name_words(name):
        return False
    model = _model(claimed)
    return model is None or model == _model(name)


def _model(name: str) -> str | None:
    """Return which GPU of the table this is, or None where it has none of this name."""
    try:
        return find_gpu(name).name
    except InputError:
        return None


class _ClaimFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    claim: Annotated[list[Claim], BeforeValidator(_tables)] = Field(
        min_length=1, description="one table [[claim]] or more"
    )


def load_claims(folder: Path, *, on_trouble: Callable[[ClaimError], None] | None = None) -> list[Claim]:
    """Return the claims of all ``*.toml`` files in ``folder``, by file and then in their order there.

    ``on_trouble`` gets what is wrong with a file, and the claims of the others are returned. Default: it is raised.

    Raises:
        ClaimError: a file is wrong (names file, key, expected and got), or two claims have the same id.
    """
    claims: list[Claim] = []
    file_of: dict[str, Path] = {}
    for path in sorted(folder.glob("*.toml")):
        try:
            found = read_toml(path, _ClaimFile, ClaimError, hint=_HINT).claim
        except ClaimError as error:
            if on_trouble is None:
                raise
            on_trouble(error)
            continue
        for claim in found:
            if claim.id in file_of:
                other = file_of[claim.id]
                raise ClaimError(f"{path}: key claim.id: expected an id of its own, got {claim.id!r}, as in {other}")
            file_of[claim.id] = path
            claims.append(claim)
    return claims


def add_claims(path: Path, claims: Sequence[Claim]) -> None:
    """Append ``claims`` to the file ``path``, or make it. What is there stays as it is, byte for byte.

    Raises:
        ClaimError: one of the ids is taken in this folder, or the file is wrong or cannot be written. Then nothing
            is written.
    """
    taken = {claim.id for claim in load_claims(path.parent)}
    for claim in claims:
        if claim.id in taken:
            raise ClaimError(f"there is a claim {claim.id!r} in {path.parent.name}/ already", hint="--id names another")
        taken.add(claim.id)
    before = ""
    if path.exists():
        before = path.read_text(encoding="utf-8")
        before += "\n" if before.endswith("\n") else "\n\n"
    text = before + tomlkit.dumps({"claim": [_as_table(claim) for claim in claims]})
    parse_toml(text, path, _ClaimFile, ClaimError, hint=_HINT)
    try:
        write_atomically(path, text)
    except OSError as error:
        raise ClaimError(f"{path}: cannot be written: {error.strerror}") from error


def _as_table(claim: Claim) -> dict[str, Any]:
    """Return a claim as a claim file has it: one name is no list."""
    table = claim.model_dump(mode="json", exclude_defaults=True)
    for key in ("baseline", "gpu", "cases", "evidence"):
        if len(table.get(key, ())) == 1:
            table[key] = table[key][0]
    return table


def find_evidence(claim: Claim, records: Mapping[str, Record]) -> dict[str, Record]:
    """Return the records that decide ``claim``, out of ``records`` (path from the repository's root -> record).

    Those that the claim pins; else the newest complete record of this subject, suite, GPU and baselines that has
    what this metric measures, or all those of the same moment; else the newest incomplete one; else none.

    Raises:
        ClaimError: a record that the claim pins is not there.
    """
    if claim.evidence:
        return dict(_pinned(claim, key, records) for key in claim.evidence)
    fitting = [item for item in records.items() if why_not(claim, item[1]) is None]
    rank = max(((record.complete, record.created_at) for _, record in fitting), default=None)
    return {path: record for path, record in fitting if (record.complete, record.created_at) == rank}


def why_not(claim: Claim, record: Record) -> str | None:
    """Return why ``record`` says nothing about ``claim``, or None when it does."""
    gpu = record.environment.gpu
    if record.subject.name != claim.subject:
        return f"the record is of subject {record.subject.name}, the claim of {claim.subject}"
    if claim.subject in builtin_names() and not is_builtin(record.subject):
        where = f" in {record.subject.folder}" if record.subject.folder is not None else ""
        return f"the record is of {record.subject.entry_point}{where}, the claim of our own {claim.subject}"
    if record.suite != claim.suite:
        return f"the record is of suite {record.suite}, the claim of {claim.suite}"
    name = gpu.name if gpu else NO_GPU
    if name not in claim.gpu and (gpu is None or not claim.fits_gpu(name)):
        return f"the record is of {name}, the claim of {', '.join(claim.gpu)}"
    if other := _other_ranks(claim, record) or other_versions(claim, record):
        return other
    if missing := [name for name in claim.baseline if name not in record.baselines]:
        return f"the record was not asked for baseline {', '.join(missing)}"
    cases = claim.cases_of(record)
    if not any(_has(claim.metric, case, claim.subject) for case in cases):
        what = "peak memory" if claim.metric == "memory" else f"{claim.metric} times"
        return f"the record has no {what}{' of the cases that are claimed' if claim.cases else ''}"
    return None


def _other_ranks(claim: Claim, record: Record) -> str:
    """Return how the ranks of a record are others than those of a claim, or an empty text."""
    ranks = record.environment.ranks
    here, link = (1, "") if ranks is None else (ranks.count, ranks.link)
    if here != claim.ranks:
        return f"the record is of {counted(here, 'GPU')}, the claim of {claim.ranks}"
    return "" if link == claim.link else f"the record is of GPUs over {link}, the claim of {claim.link or 'no link'}"


def _has(metric: Metric, case: CaseRecord, subject: str) -> bool:
    if metric == "memory":
        return any(arm.name == subject and arm.peak_bytes is not None for arm in case.arms)
    return any(subject in rounds.seconds.get(metric, {}) for rounds in case.rounds)


def other_versions(claim: Claim, record: Record) -> str | None:
    """Return which version of ``record`` is none of those that the claim holds for, or None."""
    environment = record.environment
    ran = {"python": environment.python, "driver": environment.driver, "cuda": environment.cuda}
    for name, wanted in claim.versions.items():
        version = environment.versions.get(name) or ran.get(name)
        if version is None:
            return f"the record names no version of {name}, the claim is of {name} {wanted}"
        try:
            fits = SpecifierSet(wanted).contains(Version(version), prereleases=True)
        except InvalidVersion:
            return f"the record's version of {name}, {version!r}, cannot be compared with {wanted}"
        if not fits:
            return f"the record is of {name} {version}, the claim of {name} {wanted}"
    return None


def too_old(claim: Claim, record: Record, now: datetime) -> str | None:
    """Return that ``record`` is older than the claim allows, or None."""
    days = (now - record.created_at).total_seconds() / 86400
    if claim.max_age_days is None or days <= claim.max_age_days:
        return None
    return f"the evidence is {days:.0f} days old, and the claim allows {claim.max_age_days:g} (max_age_days)"


def _pinned(claim: Claim, key: str, records: Mapping[str, Record]) -> tuple[str, Record]:
    for path, record in records.items():
        if key in (path, path.removesuffix(".gz"), record.id):
            return path, record
    raise ClaimError(
        f"claim {claim.id}: key evidence: expected the id or path of a record in evidence/, got {key!r}",
        hint="flashmoe runs lists the records",
    )


_ONE_GPU = "one-gpu"  # as operators over ranks call the baseline that does the whole problem on each card
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
    return f"On {_where(claim)}, {what}{_share(claim)}, {_scope(claim, record)}{versions}."


def _where(claim: Claim) -> str:
    """Return the GPUs, e.g. ``2 H100 over NVLink``."""
    if claim.gpu == (NO_GPU,):
        return f"{claim.ranks} ranks of {NO_GPU}"
    return _listed(claim.gpu) if claim.ranks == 1 else f"{claim.ranks} {_listed(claim.gpu)} over {claim.link}"


def _share(claim: Claim) -> str:
    """Return what part of one GPU's rate each of several has: the baseline does the whole problem on one."""
    if claim.ranks == 1 or claim.baseline != (_ONE_GPU,) or claim.metric == "memory":
        return ""
    return f" ({math.floor(100 * claim.factor / claim.ranks + 1e-9)} % of one GPU's rate on each)"


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
