"""What changed since a run: its source files, how times are taken, and what the GPU runs in the cases of a claim.

A record hashes the files of its subject, and, where the operator can tell, all that decides what each arm runs in each
case. A file that changed says that something may be another; equal fingerprints say that to the GPU nothing is, and
for wall time the operator says which files they leave out that run on the host at each call. For memory it says what a
call allocates: it has to be what was counted. A change of the code that takes times counts whatever the files say.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from ..errors import InputError
from ..gpu.specs import GpuSpec
from ..gpu.untold import acts_at_import
from .claims import Claim
from .evidence import Arm, CaseRecord, Gpu, Record
from .method import takes_alike
from .subject import PACKAGE_FOLDER, is_builtin
from .words import counted

FINGERPRINTS_EQUAL = "(fingerprints equal)"  # ends a note that says of changed files that they do not count
ANOTHER_COPY = "another copy of the package runs here than the repository's own"
OWN_COPY = "pip install -e . takes that one"
_SHOWN = 3  # files, and cases, that a reason lists
# How torch's allocator of CUDA memory counts a tensor: in blocks of 512 bytes. Of one above 1 MiB a cached block is
# taken whole if no more than 1 MiB of it would be left.
_BLOCK_BYTES, _WHOLE_BYTES = 512, 1 << 20


@dataclass(frozen=True)
class Sources:
    """How the sources of a record compare with those of the repository now."""

    changed: str = ""  # which differ, and in what; empty: nothing that counts, or none that can be seen
    notes: Sequence[str] = ()  # what a reader of a verdict has to know besides
    differ: Sequence[str] = ()  # the files that do, as the record names them
    absent: int = 0  # of those, how many there are none of

    @property
    def count(self) -> int:
        """How many files differ."""
        return len(self.differ)

    @property
    def differing(self) -> str:
        """How many files differ, in words."""
        if self.absent == self.count:
            return f"{self.count} of its source files are not in this repository"
        return f"{self.count} of its source files changed since" + (" or are gone" if self.absent else "")


def compare_sources(record: Record, repository: Path) -> Sources:
    """Compare the sources that ran with those in ``repository`` now."""
    subject = record.subject
    folders = [repository / subject.folder] if subject.folder is not None else _package_folders(repository)
    now = {source.path: _digest(folders, source.path) for source in subject.sources}
    if now and not any(now.values()) and subject.folder is None:
        return Sources(notes=["its sources are not in this repository, so nobody compared them"])
    differ = tuple(source.path for source in subject.sources if now[source.path] != source.sha256)
    absent = sum(now[path] is None for path in differ)
    some = f" ({absent} of them not in this repository)" if absent else ""
    changed = f"{len(differ)} of {len(now)}{some}, {_few(differ)}" if differ else ""
    return Sources(changed, differ=differ, absent=absent)


def changes_since(claim: Claim, record: Record, repository: Path) -> Sources:
    """Compare what ``claim`` rests on with what is in ``repository`` now.

    Files that differ do not count where the fingerprints of all its cases are those recorded, and, for wall time,
    where they are none of those that the host runs at each call, for memory, where what the subject allocates is known
    and makes the peaks that were counted. They count where a fingerprint is missing, or cannot be made now.
    """
    sources = compare_sources(record, repository)
    if beyond := _beyond_its_files(record, repository):
        return replace(sources, changed="; ".join(filter(None, [sources.changed, beyond])), notes=())
    elsewhere = is_builtin(record.subject) and not _is_of_this_package(record, repository)
    recorded = any(arm.code for case in claim.cases_of(record) for arm in case.arms)
    if sources.changed and elsewhere and recorded:
        note = f"what runs on the GPU was not compared: {ANOTHER_COPY} ({OWN_COPY})"
        return replace(sources, notes=[*sources.notes, note])
    told = sources.changed and _is_of_this_package(record, repository)
    if not told or record.environment.gpu is None:
        return sources
    cases, spec = claim.cases_of(record), _spec_of(record.environment.gpu)
    if claim.metric == "wall" and _runs_at_each_call(record, cases, sources.differ):
        return sources
    if claim.metric == "memory" and (
        untold := [case.name for case in cases if not _is_told(claim, record, case, spec)]
    ):
        which = f"in {len(untold)} of {counted(len(cases), 'case')}: {_few(untold)}"
        peaks = f"nothing tells that a call allocates now what was counted {which}"
        return replace(sources, changed=f"{sources.changed}; {peaks}")
    compared = {case.name: _fingerprints(claim, record, case, spec) for case in cases}
    pairs = [pair for arms in compared.values() for pair in arms.values()]
    if not pairs or not all(recorded for recorded, _ in pairs):
        return sources
    differ = {
        name: arms
        for name, fingerprints in compared.items()
        if (arms := [arm for arm, (recorded, now) in fingerprints.items() if now != recorded])
    }
    if not differ:
        besides = {"wall": ", nor what the host runs at each call", "memory": ", nor what a call allocates"}
        did_not = f"did not{besides.get(claim.metric, '')}"
        ran = f"what runs on the GPU in its {counted(len(cases), 'case')} {did_not} {FINGERPRINTS_EQUAL}"
        return replace(sources, changed="", notes=[f"{sources.differing}; {ran}"])
    told_of = [name if claim.subject in arms else f"{name} ({', '.join(arms)})" for name, arms in differ.items()]
    how = "is another" if all(now for _, now in pairs) else "is another, or cannot be told here,"
    where = f"what runs on the GPU {how} in {len(differ)} of {counted(len(cases), 'case')}: {_few(told_of)}"
    return replace(sources, changed=f"{sources.changed}; {where}", notes=())


def _few(names: Sequence[str]) -> str:
    """Return the first few names, and how many there are besides."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _runs_at_each_call(record: Record, cases: Sequence[CaseRecord], paths: Sequence[str]) -> bool:
    """Return whether the host runs one of these files at each call of a case, as far as fingerprints do not tell."""
    from .operator import host_files_of, load_operator

    operator, subject = load_operator(record.subject.operator), record.subject.name
    of_cases = [host_files_of(operator, subject, operator.parse_case(case.problem)) for case in cases]
    return any(files is None or not files.isdisjoint(paths) for files in of_cases)


def _is_told(claim: Claim, record: Record, case: CaseRecord, spec: GpuSpec) -> bool:
    """Return whether the tensors that a call of the subject makes now take what one was counted to take."""
    sizes = _allocations_now(record.subject.operator, claim.subject, json.dumps(case.problem, sort_keys=True), spec)
    peak = next((arm.peak_bytes for arm in case.arms if arm.name == claim.subject), None)
    if sizes is None or peak is None:
        return False
    least = sum(-(-size // _BLOCK_BYTES) * _BLOCK_BYTES for size in sizes)
    return least <= peak <= least + _WHOLE_BYTES * sum(size > _WHOLE_BYTES for size in sizes)


def is_of_another_copy(repository: Path) -> bool:
    """Return whether the repository holds the package, and another copy of it runs here."""
    return (repository / "src" / PACKAGE_FOLDER.name).exists() and not _has_this_package(repository)


def _has_this_package(repository: Path) -> bool:
    own = repository / "src" / PACKAGE_FOLDER.name
    return own.exists() and own.samefile(PACKAGE_FOLDER)


def _is_of_this_package(record: Record, repository: Path) -> bool:
    """Return whether the record's subject is ours, and the code that would make its fingerprints the repository's."""
    return is_builtin(record.subject) and not is_of_another_copy(repository)


def _beyond_its_files(record: Record, repository: Path) -> str:
    """Return what counts whatever the files of the subject say, or an empty text.

    Where the repository holds the harness, its method is a source like any other; elsewhere it is a version of a
    package, as the record's environment names it.
    """
    if not _has_this_package(repository):
        return ""
    changed = []
    if not takes_alike(record.method):
        changed.append("times are taken in another way")
    if is_builtin(record.subject) and (acting := acts_at_import(PACKAGE_FOLDER.name)):
        changed.append(f"importing the package changes more than its own names: {acting}")
    return "; ".join(changed)


def _fingerprints(claim: Claim, record: Record, case: CaseRecord, spec: GpuSpec) -> dict[str, tuple[str, str]]:
    """Return of each arm that the claim compares in a case the fingerprint recorded, and the one now.

    A baseline that did not serve the case has none. That it still does not is asked of it.
    """
    problem = json.dumps(case.problem, sort_keys=True)
    arms = [arm for arm in case.arms if arm.name in (claim.subject, *claim.baseline)]
    arms.sort(key=lambda arm: arm.name != claim.subject)
    operator = record.subject.operator
    found: dict[str, tuple[str, str]] = {}
    for arm in arms:
        if arm.status == "measured":
            found[arm.name] = arm.code, _code_now(operator, arm.name, problem, spec) if arm.code else ""
        elif _serves_now(operator, arm, problem):
            found[arm.name] = arm.status, ""
    return found


def _spec_of(gpu: Gpu) -> GpuSpec:
    """Return what a run on this card would know of it."""
    from ..gpu.device import gpu_of_properties  # imports torch, as operators do: verbs that judge nothing do without

    properties = SimpleNamespace(
        name=gpu.name,
        major=gpu.arch // 10,
        minor=gpu.arch % 10,
        multi_processor_count=gpu.sms,
        L2_cache_size=gpu.l2_bytes,
    )
    return gpu_of_properties(properties)


def _serves_now(operator: str, arm: Arm, problem: str) -> bool:
    """Return whether a baseline that refused a case would not refuse it now, or is none any more."""
    from .operator import load_operator

    if arm.status != "refused" or arm.role != "baseline":
        return False
    found = load_operator(operator)
    rival = found.rivals().get(arm.name)
    try:
        return rival is None or rival.refusal(found.parse_case(json.loads(problem))) is None
    except InputError:  # it is no problem any more
        return True


@functools.lru_cache(maxsize=65536)
def _code_now(operator: str, arm: str, problem: str, gpu: GpuSpec) -> str:
    """Return the fingerprint that the code here gives, or an empty text where there is none."""
    from .operator import code_of, load_operator

    found = load_operator(operator)
    try:
        return code_of(found, arm, found.parse_case(json.loads(problem)), gpu)
    except Exception:  # noqa: BLE001 - a problem that is none any more, a plan that fails, a Triton of another kind
        return ""


def _allocations_now(operator: str, subject: str, problem: str, gpu: GpuSpec) -> Sequence[int] | None:
    """Return what a call allocates by the code here, or None where that is not known."""
    from .operator import allocations_of, load_operator

    found = load_operator(operator)
    try:
        return allocations_of(found, subject, found.parse_case(json.loads(problem)), gpu)
    except Exception:  # noqa: BLE001 - as above
        return None


def _package_folders(repository: Path) -> list[Path]:
    """Return where the sources of a built-in subject may be: this repository's own package, or the installed one."""
    return [repository / "src" / PACKAGE_FOLDER.name, PACKAGE_FOLDER]


def _digest(folders: list[Path], path: str) -> str | None:
    """Return the SHA-256 of the first file of this path, or None where there is none."""
    file = next((folder / path for folder in folders if (folder / path).is_file()), None)
    return hashlib.sha256(file.read_bytes()).hexdigest() if file else None
