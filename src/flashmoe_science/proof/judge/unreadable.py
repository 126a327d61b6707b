"""Records that cannot be read, and which claims may rest on one: what is said of those is never better than open."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import EvidenceError, FlashmoeError, ProofError
from ..records.documents import read_text
from ..records.files import load_json
from .claims import Claim


@dataclass(frozen=True)
class Unreadable:
    """A file in ``evidence/`` that is meant as a record. What it is of is empty where the file does not tell it."""

    path: str  # from the repository's root
    run: str  # its id
    why: str
    subject: str = ""
    suite: str = ""
    gpu: str = ""

    @classmethod
    def of(cls, path: str, run: str, file: Path, error: EvidenceError) -> Unreadable:
        """Return what can be said of the file that gave this error."""
        why = error.message.removeprefix(f"{file}: ")
        try:
            document = load_json(read_text(file))
        except (EvidenceError, ValueError):
            return cls(path, run, why)
        subject, suite = _text(document, "subject", "name"), _text(document, "suite")
        return cls(path, run, why, subject, suite, _text(document, "environment", "gpu", "name"))

    def is_pinned_by(self, claim: Claim) -> bool:
        """Return whether the claim names it as its evidence."""
        return any(name in claim.evidence for name in (self.path, self.path.removesuffix(".gz"), self.run))

    def may_be_about(self, claim: Claim) -> bool:
        """Return whether the claim may rest on it: nothing that the file tells is of something else."""
        return (
            self.subject in ("", claim.subject)
            and self.suite in ("", claim.suite)
            and (not self.gpu or claim.fits_gpu(self.gpu))
        )


def unreadable_doubts(claim: Claim, unreadable: Iterable[Unreadable]) -> list[str]:
    """Return what keeps a claim from being demonstrated: one of these may be the run that decides it."""
    return [
        f"{one.path} cannot be read, and may be of a run that decides it ({one.why})"
        for one in unreadable
        if one.may_be_about(claim)
    ]


@contextlib.contextmanager
def naming(record: str) -> Iterator[None]:
    """Name the record, a file or an id, by whose values something fails. Raises ``EvidenceError``."""
    try:
        yield
    except ProofError:
        raise
    except (FlashmoeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        said = error.message if isinstance(error, FlashmoeError) else f"{error!r}"
        raise EvidenceError(f"{record}: holds a value that cannot be judged: {said}") from error


def _text(document: object, *keys: str) -> str:
    found: Any = document
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, str) else ""
