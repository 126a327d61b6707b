"""The verb ``study``: how often comparisons are wrong on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import EvidenceError, InputError
from ..proof.environment import describe_apart
from ..proof.evidence import Settings
from ..proof.store import find_repository, is_path
from ..proof.study.report import study_lines
from ..proof.study.run import StudyRequest, asked, run_study
from ..proof.study.trials import FOLDER, SERIES, Study, read_study, study_files, write_study
from ..proof.subject import is_builtin, load_subject
from ..proof.suites import SuiteCase, check_operator, load_suite
from . import HOLDS, INCONCLUSIVE
from .names import check_name
from .running import as_typed
from .terminal import Terminal, as_plain, short_path

DEFAULT_CASE = "b2_h16_s1024_d128_bf16"  # of suite scaling: few sets of inputs, and a call of some 50 us
FAILS = 1


@dataclass(frozen=True)
class StudyWanted:
    """What the command line asks of ``study``."""

    subject: str
    suite: str = "scaling"
    case: str | None = None
    same: int = 200
    planted: int = 20
    processes: int = 3
    rounds: int = 10
    batches: int = 3
    tolerance: float = 0.0
    seconds: float | None = None
    seed: int | None = None
    resume: str | None = None
    args: Sequence[str] = field(default_factory=list)


def run_study_verb(wanted: StudyWanted, *, as_json: bool) -> int:
    """Study this machine, print what it shows, and return the exit code."""
    terminal = Terminal(as_json=as_json)
    repository = find_repository()
    folder = (repository or Path.cwd()) / FOLDER
    earlier = find_study(wanted.resume, repository) if wanted.resume is not None else None
    request = _request(wanted, earlier)
    paths: list[Path] = []

    def save(study: Study) -> None:
        paths[:] = [write_study(study, folder)]

    def say(line: str) -> None:
        terminal.log.print(line, style="dim", soft_wrap=True)

    terminal.say(f"studying comparisons of {request.subject.name} with itself: {request.case.name}")
    try:
        study = run_study(request, describe_apart(), say=say, save=save)
    except KeyboardInterrupt:
        if paths:
            terminal.log.print(f"what was finished is in {short_path(paths[0])}", soft_wrap=True)
        raise
    code = exit_code(study)
    terminal.show("", study_lines(study), "", f"study: {short_path(paths[0])}")
    if not study.complete:
        terminal.log.print(f"hint: flashmoe study --resume {study.id}", soft_wrap=True)
    terminal.document({"study": as_plain(study), "path": short_path(paths[0]), "exit_code": code})
    return code


def exit_code(study: Study) -> int:
    """Return 0 where a study shows what is required, 1 where it does not, 4 where it is not at its end."""
    if not study.complete:
        return INCONCLUSIVE
    return HOLDS if study.holds else FAILS


def find_study(key: str, repository: Path | None) -> Study:
    """Return the study in the file ``key``, or whose id begins with it. Raises ``EvidenceError``."""
    if is_path(key):
        return read_study(Path(key))
    found = [path for path in study_files(repository or Path.cwd()) if path.stem.startswith(key)]
    if len(found) != 1:
        what = f"begins {len(found)} ids" if found else "is no study here"
        raise EvidenceError(f"{key!r} {what}", hint=f"they are in {FOLDER}/")
    return read_study(found[0])


def _request(wanted: StudyWanted, earlier: Study | None) -> StudyRequest:
    """Return what is asked for; a study that is gone on with stays as it was."""
    if earlier is not None:
        # A file is found again only where it is named again; what is another one is refused before anything runs.
        subject = load_subject(earlier.subject.name if is_builtin(earlier.subject) else wanted.subject)
        suite = wanted.suite if load_suite(wanted.suite).name == earlier.suite else earlier.suite
        case = _case(suite, earlier.case.name)
        return StudyRequest(subject, earlier.suite, case, seconds=wanted.seconds, resume=earlier)
    subject_found = load_subject(wanted.subject)
    suite_found = load_suite(wanted.suite)
    check_operator(suite_found, subject_found)
    names = [each.name for each in suite_found.cases]
    if wanted.case is None and DEFAULT_CASE not in names and len(names) > 1:
        hint = f"`flashmoe suites {wanted.suite}` lists its cases; one of 50 to 500 us a call is best"
        raise InputError(f"a study is of one case, and suite {suite_found.name} has {len(names)}: name one", hint=hint)
    default = DEFAULT_CASE if DEFAULT_CASE in names else names[0]
    if wanted.same + wanted.planted == 0:
        raise InputError("a study needs comparisons, got --same 0 and --planted 0")
    return StudyRequest(
        subject_found,
        suite_found.name,
        _case(wanted.suite, wanted.case or default),
        series=[each for each in asked(SERIES, same=wanted.same, planted=wanted.planted) if each.wanted],
        settings=Settings(times=["graph"], processes=wanted.processes, rounds=wanted.rounds, seed=wanted.seed),
        batches=wanted.batches,
        tolerance=wanted.tolerance,
        seconds=wanted.seconds,
        command=as_typed(wanted.args),
    )


def _case(suite: str, name: str) -> SuiteCase:
    cases = {case.name: case for case in load_suite(suite).cases}
    check_name("case", name, cases)
    return cases[name]
