"""Consistency of a record: what it says in one place has to follow from what it says in another, and from git.

A record that contradicts itself is believed in nothing. The checks find errors, and edits by hand that forget one of
the places. They cannot find a record that was made up with care: ``docs/explanation/verdicts.md`` says what remains.
"""

from __future__ import annotations

import hashlib
import math
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial, wraps
from itertools import combinations, compress
from pathlib import Path
from statistics import median
from typing import Literal

from ...errors import EvidenceError, FlashmoeError, InputError, ProofError
from ...gpu.specs import find_gpu
from ..measure.schedule import KERNEL_CALLS, balanced_orders, known_set_counts, rounds_seed
from ..records.begun import BegunRun
from ..records.evidence import CLOCK_SKEW, CaseRecord, GateStatus, Gpu, Record, Rounds, TimeKind
from ..records.git import git, is_commit, read_objects
from ..records.signing import SignatureError, envelope_of, signer_of
from ..subject.loading import load_operator
from ..subject.operator import ranks_of
from ..subject.registry import is_user_defined
from ..text import counted
from .alone import alone_faults
from .launch_faults import launch_faults
from .rank_checks import rank_views, ranks_fault
from .roofline import known_spec

Result = Literal["passed", "contradiction", "not checked"]
_FEWEST_COMPARED = 6  # samples: fewer can be equal by chance where a clock is coarse
_MOST_EQUAL = 0.5  # of a control's samples; 0.27 was the most of 12,000 real columns
_CONSTANT = 1e-9  # range of a log-ratio that does not vary: real ones have 1e-3 and more
_DIGITS = 9  # by which scaled columns are compared
# A share of the highest clock. Under power limits the median of a case was 0.72, and locked clocks may be half of that.
_FEWEST_CLOCK = 0.25
_MOST_POWER = 1.5  # of the limit: 1.02 is the most of real runs
_SLACK_S = 1.0
_COMMIT_SKEW = timedelta(minutes=10)  # of the clocks of two machines
_MOMENT_OF_ID = re.compile(r"(\d{8}T\d{6})Z-")
SIGNATURE = "signature"  # the name of the check
SIGNERS = "evidence/allowed_signers"


class UncheckedError(Exception):
    """A check cannot be made here, and why. ``is_note``: a reader of a verdict has to know it."""

    def __init__(self, why: str, *, is_note: bool = False) -> None:
        super().__init__(why)
        self.is_note = is_note


@dataclass(frozen=True)
class Check:
    """What one check found in one record."""

    name: str
    result: Result
    detail: str = ""  # what contradicts what, or why it could not be checked
    note: str = ""  # that a reader of a verdict has to know


def contradiction(checks: Iterable[Check]) -> str:
    """Return what the first failed check says, with its name; empty: none failed."""
    return next((f"check {c.name}: {c.detail}" for c in checks if c.result == "contradiction"), "")


def unique_notes(checks: Iterable[Check]) -> list[str]:
    """Return what a reader of a verdict has to know of checks that could not be made, each once."""
    return list(dict.fromkeys(check.note for check in checks if check.note))


def signer_in(checks: Iterable[Check]) -> str:
    """Return who signed the record, e.g. ``signed by me@example.org``, or that nobody did, as far as is known."""
    return next((check.detail for check in checks if check.name == SIGNATURE), "")


class Consistency:
    """The checks of records of one repository. Each record is checked once, however many claims cite it.

    Args:
        repository: whose git knows the commits. None: git is not asked.
        records: all that may hold copied samples, by path.
        begun: the lines of the ledger of runs begun that is here, which may be another one than a record's.
    """

    def __init__(
        self, repository: Path | None, records: Mapping[str, Record], begun: Sequence[tuple[str, BegunRun]] = ()
    ) -> None:
        self.begun = begun
        self._repository = repository
        self._records = records
        self._found: dict[str, list[Check]] = {}
        self._columns: dict[_Key, list[_Column]] | None = None

    def of(self, record: Record) -> list[Check]:
        """Return the checks of ``record``, in a fixed order."""
        if record.id not in self._found:
            copied = _run("copied runs", self._copied_runs, record)
            begun = _run("runs begun", self._line_of, record)
            with_git = self._check_with_git(record)
            self._found[record.id] = [*check_alone(record), copied, begun, *with_git, self._check_signature(record)]
        return self._found[record.id]

    def _check_with_git(self, record: Record) -> list[Check]:
        try:
            at_commit = _AtCommit.of(record, self._repository)
        except UncheckedError as why:
            note = f"its sources and its date were not compared with git: {why}" if why.is_note else ""
            return [Check(name, "not checked", str(why), note) for name in _WITH_GIT]
        return [_run(name, partial(check, at_commit), record) for name, check in _WITH_GIT.items()]

    def _check_signature(self, record: Record) -> Check:
        path = next((path for path, other in self._records.items() if other.id == record.id), None)
        if self._repository is None or path is None or not envelope_of(self._repository / path).is_file():
            return Check(SIGNATURE, "not checked", "it is not signed")
        signers = self._repository / SIGNERS
        if not signers.is_file():
            return Check(SIGNATURE, "not checked", f"nobody said who may sign: there is no {SIGNERS}")
        try:
            return Check(SIGNATURE, "passed", f"signed by {signer_of(self._repository / path, signers)}")
        except SignatureError as error:
            return Check(SIGNATURE, "contradiction", str(error))
        except EvidenceError as error:
            return Check(SIGNATURE, "not checked", str(error).partition("\n")[0])

    def _copied_runs(self, record: Record) -> _Found:
        """Find columns of samples that another run has too."""
        if self._columns is None:
            self._columns = {}
            for other in self._records.values():
                for key, column in _columns(other):
                    self._columns.setdefault(key, []).append(column)
        for resumed in record.resumed:
            if any(other.id == resumed.run and other.complete for other in self._records.values()):
                yield f"it goes on with run {resumed.run}, which is complete"
        for key, here in _columns(record):
            for there in self._columns.get(key, ()):
                if not _may_share(here, there) and here.is_copy_of(there):
                    yield f"{here} has the samples of {there} in run {there.record.id}"

    def _line_of(self, record: Record) -> _Found:
        """Compare the record with its line of the ledger of runs begun, which no other run may name."""
        if record.begun is None:
            raise UncheckedError("it is of before the ledger of runs begun, or of another machine's")
        for other in self._records.values():
            if other.id != record.id and other.begun is not None and other.begun.line == record.begun.line:
                yield f"run {other.id} has the same line of the ledger of runs begun"
        if self.begun and self.begun[0][0] == record.begun.ledger:  # else the ledger is elsewhere
            line = dict(self.begun).get(record.begun.line)
            yield line.difference(record) if line else "the ledger of runs begun lacks its line: it was taken out"


def check_pair(a: Record, b: Record) -> list[str]:
    """Return what contradicts what in each of two records that are compared, samples of the other included."""
    both = Consistency(None, {"a": a, "b": b})
    return [
        contradiction([*check_alone(run, counts_work=False), _run("copied runs", both._copied_runs, run)])  # noqa: SLF001 - its own
        for run in (a, b)
    ]


def _may_share(one: _Column, other: _Column) -> bool:
    """Return whether one is of a run that goes on with the other's and did not take it itself, or of the same run."""
    a, b = one.record, other.record
    follow = b.id in {older.run for older in a.resumed} or a.id in {older.run for older in b.resumed}
    return a.id == b.id or (follow and not (one.own and other.own))


def check_alone(record: Record, *, counts_work: bool = True) -> list[Check]:
    """Return the checks that need nothing but the record. To count its work, operators are loaded, and torch."""
    return [_run(name, check, record) for name, check in _OF_A_RECORD.items() if counts_work or check is not _work]


_Found = Iterator[str]  # what contradicts what; an empty text is nothing


def _run(name: str, check: Callable[[Record], _Found], record: Record) -> Check:
    try:
        said = next(filter(None, check(record)), "")
    except UncheckedError as why:
        return Check(name, "not checked", str(why), str(why) if why.is_note else "")
    return Check(name, "contradiction", said) if said else Check(name, "passed")


def _work(record: Record) -> _Found:
    """Compare the work of each case with that of its problem, as the operator counts it."""
    if is_user_defined(record.subject.operator):
        raise UncheckedError(f"operator {record.subject.operator} is code of a repository, which does not run here")
    operator = load_operator(record.subject.operator)
    made_by = 1 if record.environment.ranks is None else record.environment.ranks.count
    for case in record.cases:
        try:
            problem = operator.parse_case(case.problem)
        except FlashmoeError as error:
            yield f"case {case.name}: its problem is none of operator {record.subject.operator}: {error}"
            return
        if (ranks := ranks_of(operator, problem)) != made_by:
            yield f"case {case.name}: its calls were made by {counted(made_by, 'rank')}, and its problem needs {ranks}"
        work, said = operator.work(problem), case.work
        for name in ("flops", "bytes", "tokens"):
            if (value := getattr(work, name)) != getattr(said, name):
                yield f"case {case.name}: it says {getattr(said, name):g} {name}, and its problem needs {value:g}"
        if said.peak not in ("", peak := operator.peak_tflops_key(problem)):
            yield f"case {case.name}: it says that {said.peak} bounds it, and its problem that {peak} does"


def _samples(record: Record) -> _Found:
    """Compare the number of rounds, processes and kinds of time with the settings."""
    settings = record.settings
    most = settings.processes * (1 if settings.width is None else 2)
    for case, rounds in _all_rounds(record):
        for kind in rounds.seconds:
            if kind not in settings.times:
                yield f"case {case.name} has {kind} times, which the settings did not ask for"
    for case in record.cases:
        for mode, cells in _cells(record, case).items():
            told = f"case {case.name}, {'+'.join(mode)} time"
            for process, rows in cells.items():
                if not 0 <= process < most:
                    yield f"{told}: it has process {process}, and the settings have {settings.processes}"
                if len(rows) != settings.rounds:
                    said = f"has {len(rows)} rounds, and the settings have {settings.rounds}"
                    yield f"{told}: process {process} {said}"
            for process in range(settings.processes):
                if record.complete and process not in cells:
                    yield f"{told}: process {process} of {settings.processes} is missing in a complete run"


def _arms(record: Record) -> _Found:
    """Compare which arms are said to be measured with those that have samples."""
    for case, rounds in _all_rounds(record):
        status = {arm.name: arm.status for arm in case.arms}
        for kind, columns in rounds.seconds.items():
            for name in columns:
                if name not in status:
                    yield f"case {case.name}: {name} has {kind} times and is no arm of it"
            for name, said in status.items():
                if said == "measured" and name not in columns:
                    yield f"case {case.name}: {name} is said to be measured and has no {kind} times"
                if said == "refused" and any(name in order for order in rounds.order):  # claims leave it out
                    yield f"case {case.name}: {name} is said to refuse it, and ran"


def _accuracy(record: Record) -> _Found:
    """Compare the errors of arms with samples with their budgets."""
    for case in record.cases:
        for arm in case.arms if case.rounds else ():
            if arm.status != "measured":
                continue
            if arm.accuracy is None and arm.role == "subject":
                yield f"case {case.name}: {arm.name} was measured and has no error"
            for output in (arm.accuracy, *arm.accuracy.outputs.values()) if arm.accuracy else ():
                shares = (output.share, output.element_share or 0.0, output.row_share or 0.0)
                if not all(share <= 1.0 for share in shares) or not math.isfinite(output.budget):
                    what = f"an error of {output.max_error:.3g}, {output.share:.3g} times its budget"
                    yield f"case {case.name}: {arm.name} was measured and has {what}"


def _orders(record: Record) -> _Found:
    """Compare the orders of arms with those that the seed gives."""
    settings = record.settings
    for case in record.cases:
        for mode, cells in _cells(record, case).items():
            for process, rows in cells.items():
                names = [arm.name for arm in case.arms if arm.name in rows[0]]
                if not names:
                    yield f"case {case.name}, process {process}: its orders name none of its arms"
                    continue
                seed = rounds_seed(settings.seed, case.name, process, mode, method=settings.method)
                expected = balanced_orders(names, len(rows), seed=seed)
                for number, (row, order) in enumerate(zip(rows, expected, strict=False)):
                    if row != order:
                        what = f"round {number} ran {', '.join(row)}, and the seed gives {', '.join(order)}"
                        yield f"case {case.name}, process {process}: {what}"


def _on_each_rank(check: Callable[[Record], _Found]) -> Callable[[Record], _Found]:
    """Return a check of what is said of all ranks, and of each one's card and sensors."""

    @wraps(check)
    def check_all(record: Record) -> _Found:
        unchecked: UncheckedError | None = None
        for whose, view in rank_views(record):
            try:
                yield from (f"{whose}{said}" for said in check(view))
            except UncheckedError as why:
                unchecked = why
        if unchecked is not None:
            raise unchecked

    return check_all


@_on_each_rank
def _sensors(record: Record) -> _Found:
    """Compare what the card is and what its sensors read with what its model can be."""
    gpu = _gpu_of(record)
    try:
        most = find_gpu(gpu.name).sms
    except InputError:
        most = gpu.sms
    if gpu.sms > most:
        yield f"it has {gpu.sms} SMs, and {gpu.name} has at most {most}"
    for case, rounds in _all_rounds(record):
        for degrees in rounds.temperature_c:
            if degrees is not None and not 0 < degrees < 125:
                yield f"case {case.name}: the card had {degrees} degrees Celsius"
        power = max((watts for watts in rounds.power_w if watts is not None), default=0.0)
        if gpu.power_limit_w and power > _MOST_POWER * gpu.power_limit_w:
            yield f"case {case.name}: the card took {power:g} W, and its limit is {gpu.power_limit_w:g} W"


def _gpu_of(record: Record) -> Gpu:
    if record.environment.gpu is None:
        raise UncheckedError("no GPU")
    return record.environment.gpu


@_on_each_rank
def _clocks(record: Record) -> _Found:
    """Compare clocks with the card's highest, and times with what the card can do at these clocks."""
    gpu = record.environment.gpu
    if gpu is None or not any(case.rounds for case in record.cases):
        raise UncheckedError("nothing was timed on a GPU")
    spec = known_spec(gpu)
    highest = gpu.max_sm_clock_mhz or (spec.max_sm_clock_mhz if spec is not None else None)
    if highest is None:
        raise UncheckedError(f"the highest clock of {gpu.name} is not known", is_note=True)
    if not any(clock for _, rounds in _all_rounds(record) for clock in rounds.sm_clock_mhz):
        raise UncheckedError("the clocks of the card were not read", is_note=True)
    for case, rounds in _all_rounds(record):
        clocks = [clock for clock in rounds.sm_clock_mhz if clock is not None]
        if not clocks:
            continue
        if gpu.max_sm_clock_mhz is not None and max(clocks) > highest:  # boards may be faster than their model
            yield f"case {case.name}: a clock of {max(clocks)} MHz, and the card's highest is {highest} MHz"
        if (middle := median(clocks)) < _FEWEST_CLOCK * highest:
            reasons = sorted({reason for reason in rounds.throttle if reason}) or ["no reason given"]
            told = f"{middle:g} of {highest} MHz ({', '.join(reasons)})"
            yield f"case {case.name}: the clock was {told}, so its times are not those of a {gpu.name}"
        if spec is None or not case.work.flops:
            continue
        peak = spec.peak_tflops.get(case.work.peak, max(spec.peak_tflops.values())) * 1e12
        fewest = case.work.flops / (peak * max(clocks) / spec.boost_sm_clock_mhz)  # a copy has no answer to compute
        arms = {arm.name for arm in case.arms if arm.status == "measured" and (arm.accuracy or arm.role == "subject")}
        for kind, arm, column in _arm_columns(rounds):
            if arm in arms and column and median(column) < fewest:
                took = f"{arm} took {median(column) * 1e6:.3g} us of {kind} time"
                yield f"case {case.name}: {took}, and {max(clocks)} MHz need at least {fewest * 1e6:.3g} us"


def _gates(record: Record) -> _Found:
    """Compare the time of each passed gate with what it had to do."""
    samples = sum(_sampled_seconds(rounds) for _, rounds in _all_rounds(record))
    for gate in record.gates:
        kept = any(f"as run {resumed.run} showed it" in gate.details for resumed in record.resumed)
        if gate.status is not GateStatus.PASSED or (kept and not (gate.name == "bench" and samples)):
            continue
        if not gate.seconds > 0:
            yield f"gate {gate.name} passed in {gate.seconds:g} s"
        if not 0 <= gate.gpu_seconds <= gate.seconds + _SLACK_S:
            yield f"gate {gate.name} took {gate.seconds:.4g} s and held the GPU for {gate.gpu_seconds:.4g} s"
        if gate.name == "bench" and gate.seconds < samples:
            yield f"gate bench took {gate.seconds:.4g} s, and its samples alone took {samples:.4g} s"


def _sampled_seconds(rounds: Rounds) -> float:
    """Return how long the calls behind these samples took at the least, of those that the run took itself."""
    own = [session == 0 for session in rounds.session] or [True] * len(rounds.process)
    return sum(
        (KERNEL_CALLS if kind == "kernel" else 1) * sum(compress(column, own))
        for kind, _, column in _arm_columns(rounds)
    )


def _inputs(record: Record) -> _Found:
    """Compare the number of input sets with their size."""
    gpu = _gpu_of(record)
    for case in record.cases:
        if case.rounds and case.input_set_bytes:
            over_ranks, method = record.environment.ranks is not None, record.settings.method
            needed = known_set_counts(case.input_set_bytes, gpu.l2_bytes, method=method, over_ranks=over_ranks)
            if case.input_sets not in needed:
                sets = f"{case.input_sets} sets of {case.input_set_bytes} bytes"
                yield f"case {case.name}: {sets}, and an L2 of {gpu.l2_bytes} bytes needs {needed[-1]}"


def _copied_processes(record: Record) -> _Found:
    """Find the samples of one process in another one, or in another case: whole, scaled or in another order."""
    seen: dict[_Key, _Column] = {}
    for key, column in _columns(record):
        if (first := seen.setdefault(key, column)) is not column and column.is_copy_of(first):
            yield f"{column} has the samples of {first}"
    for case, rounds in _all_rounds(record):  # of few rounds one column says little, and all arms together enough
        whole: dict[tuple[float, ...], int] = {}
        for process, picked in _processes(rounds):
            values = tuple(s for _, _, column in _arm_columns(rounds) for s in compress(column, picked))
            if len(values) >= _FEWEST_COMPARED and (other := whole.setdefault(values, process)) != process:
                yield f"case {case.name}: process {process} has the samples of process {other}, of all arms"


def _copied_control(record: Record) -> _Found:
    """Find a control whose times are those of the baseline that it repeats."""
    for case, rounds in _all_rounds(record):
        for control in [arm.name for arm in case.arms if arm.role == "control"]:
            original = control.rpartition("#")[0]
            for kind, columns in rounds.seconds.items():
                times = columns.get(control, [])
                equal = sum(a == b for a, b in zip(times, columns.get(original, []), strict=False))
                if len(times) >= _FEWEST_COMPARED and equal > _MOST_EQUAL * len(times):
                    which = f"{equal} of {len(times)} {kind} times"
                    yield f"case {case.name}: {control} and {original} have {which} in common, to the last bit"


def _copied_arms(record: Record) -> _Found:
    """Find two arms whose times have one ratio in all rounds: one was made from the other."""
    for case, rounds in _all_rounds(record):
        for kind, columns in rounds.seconds.items():
            for (one, a), (other, b) in combinations(columns.items(), 2):
                if len(a) >= _FEWEST_COMPARED and all(0 < seconds < math.inf for seconds in (*a, *b)):
                    logs = [math.log(x / y) for x, y in zip(a, b, strict=True)]
                    if max(logs) - min(logs) < _CONSTANT:
                        ratio = f"{math.exp(logs[0]):.4g} times"
                        yield f"case {case.name}: {one} takes {ratio} the {kind} time of {other} in every round"


def _dates(record: Record) -> _Found:
    """Compare the moment of the run with the one in its id, and with those of the runs that it goes on with."""
    made = record.created_at
    words = f"{made:%Y%m%dT%H%M%S}"
    found = _MOMENT_OF_ID.match(record.id)
    if found and abs(_seconds_of(found[1]) - _seconds_of(words)) > CLOCK_SKEW.total_seconds():
        yield f"its id is of {found[1]}Z, and it was made at {words}Z"
    for resumed in record.resumed:
        if resumed.created_at > made + CLOCK_SKEW:
            yield f"it goes on with run {resumed.run}, which is younger"


def _seconds_of(moment: str) -> float:
    """Return the seconds since 1970 of a moment in an id: infinite where no calendar has it."""
    try:
        return datetime.strptime(f"{moment}+0000", "%Y%m%dT%H%M%S%z").timestamp()
    except ValueError:
        return math.inf


def _commit(at_commit: _AtCommit, record: Record) -> _Found:
    """Compare the moment of the run with that of the commit that it names."""
    found = re.search(rb"^committer .*> (\d+) ", at_commit.commit, re.MULTILINE)
    early = int(found[1]) - record.created_at.timestamp() if found else 0.0
    if found is None:
        yield f"{record.tree.commit} is no commit"
    if early > _COMMIT_SKEW.total_seconds():
        yield f"it was made {timedelta(seconds=round(early))} before commit {record.tree.commit}, which it names"


def _sources(at_commit: _AtCommit, record: Record) -> _Found:
    """Compare the hashes of the subject's sources with the files at the commit that the record names."""
    subject, commit = record.subject, record.tree.commit
    if record.tree.dirty:
        raise UncheckedError("the tree had uncommitted changes, as the verdict says")
    if subject.folder is None:
        raise UncheckedError("its sources are not in this repository")
    for source, path, data in zip(subject.sources, _paths(record), at_commit.sources, strict=True):
        if path and data is None:
            yield f"commit {commit} has no file {subject.folder}/{source.path}"
        if path and data is not None and hashlib.sha256(data).hexdigest() != source.sha256:
            yield f"the hash of {source.path} is not that of the file at commit {commit}"


def _paths(record: Record) -> list[str]:
    """Return where the sources of a record are in its repository; empty texts: outside of it."""
    subject = record.subject
    paths = [posixpath.normpath(f"{subject.folder}/{source.path}") for source in subject.sources]
    return ["" if path.startswith("..") else path for path in paths]


@dataclass(frozen=True)
class _AtCommit:
    """What git has of a record."""

    commit: bytes
    sources: Sequence[bytes | None]  # the subject's, in the order of the record; None: not there

    @classmethod
    def of(cls, record: Record, repository: Path | None) -> _AtCommit:
        """Ask git. Raises ``UncheckedError`` where it cannot tell."""
        commit = record.tree.commit
        if repository is None or commit is None:
            why = "there is no repository here" if commit else "it names no commit"
            raise UncheckedError(why, is_note=commit is None)
        if not is_commit(commit):
            raise UncheckedError(f"{commit!r} is no hash of a commit")
        # Asked for a path outside of its repository, git answers nothing at all.
        names = [f"{commit}:./{path}" if path else "" for path in _paths(record)]
        try:
            found, *sources = read_objects(repository, [commit, *names])
        except ProofError as error:
            raise UncheckedError(str(error).partition("\n")[0]) from error
        if found is None:
            shallow = git(repository, "rev-parse", "--is-shallow-repository") == "true"
            why = "this clone is shallow" if shallow else "it was rebased, or never pushed"
            raise UncheckedError(f"git has no commit {commit} here: {why}", is_note=not shallow)
        return cls(found, sources)


_Key = tuple[int, float, float]


@dataclass(frozen=True)
class _Column:
    """The samples of one arm in one process."""

    record: Record
    case: str
    kind: TimeKind
    arm: str
    process: int
    values: tuple[float, ...]
    own: bool  # whether the run took them itself, or those that it goes on with

    def __str__(self) -> str:
        return f"case {self.case}, {self.arm}, {self.kind} time, process {self.process}"

    def is_copy_of(self, other: _Column) -> bool:
        """Return whether both have the same samples, in any order, or those of one times a constant."""
        pairs = zip(sorted(self.values), sorted(other.values), strict=True)
        logs = [math.log(a / b) for a, b in pairs]
        return max(logs) - min(logs) < _CONSTANT


def _columns(record: Record) -> Iterator[tuple[_Key, _Column]]:
    """Yield the samples of each arm and process, with numbers that neither their order nor a factor changes."""
    for case, rounds in _all_rounds(record):
        for process, picked in _processes(rounds):
            own = not any(compress(rounds.session, picked))
            for kind, arm, column in _arm_columns(rounds):
                values = tuple(compress(column, picked))
                # Clocks have steps: few different values come again by chance.
                differ = len(set(values)) >= max(_FEWEST_COMPARED, 0.8 * len(values))
                if differ and (least := min(values)) > 0:
                    key = len(values), round(max(values) / least, _DIGITS), round(sum(values) / least, _DIGITS)
                    yield key, _Column(record, case.name, kind, arm, process, values, own)


def _processes(rounds: Rounds) -> Iterator[tuple[int, list[bool]]]:
    """Yield each process, and which of the rounds are its own."""
    for process in dict.fromkeys(rounds.process):
        yield process, [p == process for p in rounds.process]


def _arm_columns(rounds: Rounds) -> Iterator[tuple[TimeKind, str, Sequence[float]]]:
    return ((kind, arm, column) for kind, arms in rounds.seconds.items() for arm, column in arms.items())


def _cells(record: Record, case: CaseRecord) -> dict[tuple[TimeKind, ...], dict[int, list[list[str]]]]:
    """Return the orders of arms by kinds of time that share a process, and by process."""
    together = tuple(kind for kind in record.settings.times if kind != "kernel")
    cells: dict[tuple[TimeKind, ...], dict[int, list[list[str]]]] = {}
    for rounds in case.rounds:
        mode: tuple[TimeKind, ...] = ("kernel",) if "kernel" in rounds.seconds else together
        for process, order in zip(rounds.process, rounds.order, strict=True):
            cells.setdefault(mode, {}).setdefault(process, []).append(order)
    return cells


def _all_rounds(record: Record) -> Iterator[tuple[CaseRecord, Rounds]]:
    return ((case, rounds) for case in record.cases for rounds in case.rounds)


def _ranks(record: Record) -> _Found:
    """Compare ranks, their cards, their times and their launches with one another."""
    yield ranks_fault(record)


_OF_A_RECORD: dict[str, Callable[[Record], _Found]] = {
    check.__name__[1:].replace("_", " "): check
    for check in (
        *(_work, _samples, _arms, _accuracy, _orders, _sensors, _clocks, _gates, _inputs, _ranks),
        *(_copied_processes, _copied_control, _copied_arms, _dates),
    )
} | {"launches": launch_faults, "alone": alone_faults}
_WITH_GIT: dict[str, Callable[[_AtCommit, Record], _Found]] = {"commit": _commit, "sources": _sources}
