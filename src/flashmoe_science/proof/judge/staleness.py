"""Find changes since a run that make a claim stale.

A claim of device time is stale when the launches of its subject differ, by their identities (``gpu/identity.py``), in
a case of the claim. A claim of wall time or peak memory is stale also when a function that a call ran on the host
differs; by older records, when a file does that has one.
Versions do not count: the record names them, as it does those of baselines and the kernels that these ran.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from ...errors import InputError, UnsupportedError
from ...gpu.specs import GpuSpec
from ..records.evidence import Arm, Gpu, Record
from ..subject.loading import is_builtin, is_inside
from ..subject.subject import PACKAGE_FOLDER
from ..text import counted, few
from .claims import Claim

ANOTHER_COPY = "another copy of the package runs here than the repository's own"
OWN_COPY = "pip install -e . takes that one"


@dataclass(frozen=True)
class Sources:
    """How what a record measured compares with what is here now."""

    changed: str = ""  # what differs; empty: nothing that counts, or nothing that can be seen
    notes: Sequence[str] = ()  # what a reader of a verdict has to know besides


def compare_sources(record: Record, repository: Path) -> Sources:
    """Compare the source files that ran with those in ``repository`` now."""
    subject = record.subject
    folders = [repository / subject.folder] if subject.folder is not None else _package_folders(repository)
    now = {source.path: _sha256(folders, source.path, repository) for source in subject.sources}
    if now and not any(now.values()) and subject.folder is None:
        return Sources(notes=["its sources are not in this repository, so nobody compared them"])
    differ = [source.path for source in subject.sources if now[source.path] != source.sha256]
    absent = sum(now[path] is None for path in differ)
    some = f" ({absent} of them not in this repository)" if absent else ""
    return Sources(f"{len(differ)} of {len(now)}{some}, {few(differ)}" if differ else "")


def changes_since(claim: Claim, record: Record, repository: Path) -> Sources:
    """Compare what ``claim`` rests on with what is here now.

    For a subject of ours, its launches count. For its wall time and memory, what a call runs on the host counts
    too. For a user's own subject, and where a record has neither, its source files count.
    """
    gpu = record.environment.gpu
    if gpu is None or not is_builtin(record.subject):
        return compare_sources(record, repository)
    cases = [(case, arm) for case in claim.cases_of(record) for arm in case.arms if _is_measured(arm, record)]
    if is_of_another_copy(repository):
        sources = compare_sources(record, repository)
        note = f"what runs on the GPU was not compared: {ANOTHER_COPY} ({OWN_COPY})"
        is_recorded = any(arm.identities for _, arm in cases)
        return replace(sources, notes=[*sources.notes, note]) if sources.changed and is_recorded else sources
    changed = []
    if all(arm.identities for _, arm in cases):
        spec, operator = _spec_of(gpu), record.subject.operator
        problems = [json.dumps(case.problem, sort_keys=True) for case, _ in cases]
        now = [_identities_now(operator, record.subject.name, problem, spec) for problem in problems]
        differ = [case.name for (case, arm), found in zip(cases, now, strict=True) if tuple(arm.identities) != found]
        if differ:
            changed.append(f"launches differ in {len(differ)} of {counted(len(cases), 'case')}: {few(differ)}")
    elif files := compare_sources(record, repository).changed:
        changed.append(f"its launches are not recorded, and files changed: {files}")
    if claim.metric in ("wall", "memory"):
        if all(arm.host_files for _, arm in cases):
            if paths := _changed_on_the_host(arm for _, arm in cases):
                changed.append(f"files that a call runs on the host changed: {few(paths)}")
        elif files := compare_sources(record, repository).changed:
            changed.append(f"the files that a call runs are not recorded, and files changed: {files}")
    return Sources("; ".join(changed))


def is_of_another_copy(repository: Path) -> bool:
    """Return whether the repository holds the package, and another copy of it runs here."""
    own = repository / "src" / PACKAGE_FOLDER.name
    return own.exists() and not own.samefile(PACKAGE_FOLDER)


def _is_measured(arm: Arm, record: Record) -> bool:
    return arm.name == record.subject.name and arm.status == "measured"


def _changed_on_the_host(arms: Iterable[Arm]) -> list[str]:
    """Return the files that ran in calls of these arms and do something else now, as records name them."""
    from ..measure.host_files import changed_files

    ran = {json.dumps(arm.host_files, sort_keys=True) for arm in arms}
    return sorted({path for files in ran for path in changed_files(json.loads(files))})


def _spec_of(gpu: Gpu) -> GpuSpec:
    """Return what a run on this card would know of it."""
    from ...gpu.device import gpu_of_properties  # imports torch, as operators do: verbs that judge nothing do without

    properties = SimpleNamespace(
        name=gpu.name,
        major=gpu.arch // 10,
        minor=gpu.arch % 10,
        multi_processor_count=gpu.sms,
        L2_cache_size=gpu.l2_bytes,
    )
    return gpu_of_properties(properties)


@functools.lru_cache(maxsize=65536)
def _identities_now(operator: str, subject: str, problem: str, gpu: GpuSpec) -> tuple[str, ...]:
    """Return the identities of a call's launches by the code here; nothing where there is no such call any more."""
    from ..subject.loading import load_operator
    from ..subject.operator import identities_of

    found = load_operator(operator)
    try:
        return tuple(identities_of(found, subject, found.parse_case(json.loads(problem)), gpu))
    except (InputError, UnsupportedError, ImportError):  # no problem any more, one that is not served, or no Triton
        return ()


def _package_folders(repository: Path) -> list[Path]:
    """Return where the sources of a built-in subject may be: this repository's own package, or the installed one."""
    return [repository / "src" / PACKAGE_FOLDER.name, PACKAGE_FOLDER]


def _sha256(folders: list[Path], path: str, repository: Path) -> str | None:
    """Return the SHA-256 of the first file of this path, or None where there is none in repository or package."""
    files = (folder / path for folder in folders if (folder / path).is_file())
    file = next((each for each in files if is_inside(each, repository) or is_inside(each, PACKAGE_FOLDER)), None)
    return hashlib.sha256(file.read_bytes()).hexdigest() if file else None
