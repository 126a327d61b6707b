"""Claims: one sentence about speed each, in ``claims/*.toml``, and the records that are their evidence.

The format is in ``docs/claims.md``. Whether a claim holds is the business of ``judge``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from ..errors import ClaimError, InputError
from ..gpu.specs import find_gpu, name_words
from .evidence import Record, TimeKind
from .subject import builtin_names, is_builtin
from .toml_files import read_toml

_HINT = "the format is in docs/claims.md"

Scope = Literal["each case", "geometric mean"]


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


def _words_of_a_name(value: str) -> str:
    if not name_words(value):
        raise ValueError("expected words of the GPU's name")
    return value


_Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
_Gpu = Annotated[_Text, AfterValidator(_words_of_a_name)]
_Names = Annotated[tuple[_Text, ...], BeforeValidator(_names)]
_SomeNames = Annotated[_Names, BeforeValidator(_at_least_one)]


class Claim(BaseModel):
    """One sentence about speed: ``subject`` is at least ``factor`` times as fast as ``baseline``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(
        pattern=r"^[a-z0-9][a-z0-9_.-]*$", description="an id of lower-case letters, digits, '-', '_' and '.'"
    )
    sentence: _Text = Field(description="the sentence that is claimed")
    subject: _Text = Field(description="the name of the subject")
    baseline: _SomeNames = Field(description="the name of a baseline, or a list of names: the fastest in each case")
    suite: _Text = Field(description="the name of a suite")
    metric: TimeKind = Field(description="'kernel', 'graph' or 'wall'")
    factor: float = Field(strict=True, gt=0, allow_inf_nan=False, description="a number above 0")
    gpu: _Gpu = Field(description="words of the GPU's name, e.g. 'H200'")
    scope: Scope = Field(description="'each case' or 'geometric mean'")
    evidence: _Names = Field(
        default=(), description="ids of records, or their paths from the repository's root; each has to show the claim"
    )

    def describe(self) -> str:
        """Return what is claimed, in the words of its keys."""
        rivals = self.baseline[0] if len(self.baseline) == 1 else f"the fastest of {', '.join(self.baseline)}"
        where = "in each case" if self.scope == "each case" else "in the geometric mean over the cases"
        what = f"{self.subject} at least {self.factor:g}x as fast as {rivals}"
        return f"{what}, {self.metric} time, {where} of {self.suite}, {self.gpu}"

    def fits_gpu(self, name: str) -> bool:
        """Return whether the claim is about the GPU called ``name``: by whole words, and H100 NVL is no H100."""
        if not name_words(self.gpu) <= name_words(name):
            return False
        claimed, ran = _model(self.gpu), _model(name)
        return claimed is None or claimed == ran


def _model(name: str) -> str | None:
    """Return which GPU of the table this is, or None where it has none of this name."""
    try:
        return find_gpu(name).name
    except InputError:
        return None


_Claims = Annotated[list[Claim], BeforeValidator(_tables)]


class _ClaimFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    claim: Annotated[list[Claim], BeforeValidator(_tables)] = Field(
        min_length=1, description="one table [[claim]] or more"
    )


def load_claims(folder: Path) -> list[Claim]:
    """Return the claims of all ``*.toml`` files in ``folder``, by file and then in their order there.

    Raises:
        ClaimError: a file is wrong (names file, key, expected and got), or two claims have the same id.
    """
    claims: list[Claim] = []
    file_of: dict[str, Path] = {}
    for path in sorted(folder.glob("*.toml")):
        for claim in read_toml(path, _ClaimFile, ClaimError, hint=_HINT).claim:
            if claim.id in file_of:
                other = file_of[claim.id]
                raise ClaimError(f"{path}: key claim.id: expected an id of its own, got {claim.id!r}, as in {other}")
            file_of[claim.id] = path
            claims.append(claim)
    return claims


def find_evidence(claim: Claim, records: Mapping[str, Record]) -> dict[str, Record]:
    """Return the records that decide ``claim``, out of ``records`` (path from the repository's root -> record).

    Those that the claim pins; else one: the newest complete record of this subject, suite, GPU and baselines that has
    times of this metric; else the newest incomplete one; else none.

    Raises:
        ClaimError: a record that the claim pins is not there.
    """
    if claim.evidence:
        return dict(_pinned(claim, key, records) for key in claim.evidence)
    fitting = [item for item in records.items() if why_not(claim, item[1]) is None]
    newest = max(fitting, key=lambda item: (item[1].complete, item[1].created_at), default=None)
    return dict([newest]) if newest else {}


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
    if gpu is None or not claim.fits_gpu(gpu.name):
        return f"the record is of {gpu.name if gpu else 'a machine with no GPU'}, the claim of {claim.gpu}"
    if missing := [name for name in claim.baseline if name not in record.baselines]:
        return f"the record was not asked for baseline {', '.join(missing)}"
    if not any(claim.subject in r.seconds.get(claim.metric, {}) for case in record.cases for r in case.rounds):
        return f"the record has no {claim.metric} times"
    return None


def _pinned(claim: Claim, key: str, records: Mapping[str, Record]) -> tuple[str, Record]:
    for path, record in records.items():
        if key in (path, record.id):
            return path, record
    raise ClaimError(
        f"claim {claim.id}: key evidence: expected the id or path of a record in evidence/, got {key!r}",
        hint="flashmoe runs lists the records",
    )
