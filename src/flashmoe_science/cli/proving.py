"""The verb ``prove``: run the chain, keep its record, and say what it showed."""

from __future__ import annotations

import math
import secrets
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

from ..errors import EvidenceError, InputError, OperatorError, SubjectError, SuiteError
from ..proof.conclude import conclude, run_exit_code, worst_exit_code
from ..proof.cost import Budget, RunSize, format_dollars, format_duration
from ..proof.cost_report import bill_as_plain, receipt
from ..proof.evidence import GATE_NAMES, Record, Settings, TimeKind
from ..proof.gates import ProveRequest, check_request, prove
from ..proof.judge import Verdict
from ..proof.junit import write_junit
from ..proof.ledger import Entry, dollars
from ..proof.loading import load_subject, operator_of, subject_text
from ..proof.meter import Bill, Meter
from ..proof.rates import load_rates
from ..proof.report import case_table, count_line, outcome_table, unmeasured_lines
from ..proof.rows import kinds_measured
from ..proof.store import Archive, Store, find_repository
from ..proof.suites import list_suites, load_suite, suite_text
from ..proof.verify import verify_claims
from ..proof.words import counted
from .names import check_name, gpu_named
from .running import as_typed, check_budget, make_keeper, make_meter
from .terminal import ChainProgress, Terminal, as_plain, check_writable, short_path, write_csv_file


@dataclass(frozen=True)
class Wanted:
    """What the command line asks of ``prove``."""

    subjects: Sequence[str]
    suite: str
    baselines: Sequence[str] = ()
    gpus: Sequence[str] = ()
    until: str | None = None
    expect: float | None = None
    times: Sequence[str] = ()
    processes: int = 3
    rounds: int = 10
    width: float | None = None
    seed: int | None = None
    budget: float | None = None  # dollars
    time_limit: float | None = None  # seconds
    store: str | None = None
    args: Sequence[str] = field(default_factory=list)  # as they were typed, for the record
    resume: str | None = None  # the run to go on with
    hosts: Sequence[str] = ()  # borrowed machines to run on; none: this one
    python: str = ""  # theirs
    given: Collection[str] = ()  # the parameters that were typed: the others are as in the run to go on with


@dataclass(frozen=True)
class Proof:
    """What one run showed."""

    record: Record
    path: Path
    verdicts: Sequence[Verdict]
    bill: Bill | None
    exit_code: int

    @property
    def dollars(self) -> float:
        """What it cost, as far as that is known."""
        spent = self.bill.dollars(self.bill.spent_seconds or 0.0) if self.bill else None
        return spent or 0.0

    def document(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "record": as_plain(self.record),
            "path": short_path(self.path),
            "verdicts": [as_plain(verdict) for verdict in self.verdicts],
            "cost": bill_as_plain(self.bill),
            "exit_code": self.exit_code,
        }


def run_prove(wanted: Wanted, *, csv: Path | None, junit: Path | None, as_json: bool) -> int:
    """Run the chain on every subject, one after another, and return the worst exit code."""
    terminal = Terminal(as_json=as_json)
    check_writable(csv)
    check_writable(junit, makes_folder=True)
    repository = find_repository()
    wanted, resume = as_resumed(wanted, repository)
    store = Store(wanted.store)
    requests = [replace(_request(wanted, subject, repository), resume=resume) for subject in wanted.subjects]
    for request in requests:  # what is wrong with one is said before any of them runs
        check_request(request)
    if wanted.hosts or wanted.python:
        return _prove_on_hosts(requests, wanted, terminal, store, csv=csv, junit=junit)
    proofs: list[Proof] = []
    for request in requests:
        if proofs:
            terminal.say("")
        spent = sum(proof.dollars for proof in proofs)  # the budget is that of all of them
        budget = None if wanted.budget is None else max(0.0, wanted.budget - spent)
        meter = make_meter(terminal, Archive(store, repository), budget)
        proofs.append(_prove(replace(request, meter=meter), meter, terminal, store, alone=len(requests) == 1))
    if csv is not None:
        write_csv_file([proof.record for proof in proofs], csv)
    if junit is not None:
        verdicts = [verdict for proof in proofs for verdict in proof.verdicts]
        write_junit(junit, verdicts, [proof.record for proof in proofs])
    if len(proofs) == 1:
        terminal.document(proofs[0].document())
        return proofs[0].exit_code
    code = worst_exit_code([proof.exit_code for proof in proofs])
    terminal.show("", outcome_table([(proof.record, proof.verdicts) for proof in proofs]))
    terminal.document({"runs": [proof.document() for proof in proofs], "exit_code": code})
    return code


def _prove(request: ProveRequest, meter: Meter, terminal: Terminal, store: Store, *, alone: bool) -> Proof:
    """Run the chain on one subject, and say what it showed."""
    repository = request.repository
    keeper = make_keeper(terminal, store, repository, meter)
    progress = ChainProgress(terminal)
    terminal.say(_title(request))
    try:
        record = prove(request, progress=progress, save=keeper.save)
    except OperatorError:
        progress.close()
        if keeper.path is not None:
            terminal.log.print(f"what was shown until then is in {keeper.place}", soft_wrap=True)
        raise
    except KeyboardInterrupt:
        progress.close()
        if keeper.path is not None and keeper.record is not None:
            terminal.log.print(f"what was finished is in {keeper.place}", soft_wrap=True)
            terminal.log.print(f"hint: {_way_on(request, keeper.record)} goes on from here", soft_wrap=True)
        raise
    finally:
        progress.close()  # the bar goes before anything else is printed
    assert keeper.path is not None
    keeper.remind()
    return _conclude(terminal, record, repository, keeper.path, meter.bill(record), alone=alone)


def _way_on(request: ProveRequest, record: Record) -> str:
    """Return the command that goes on with an interrupted run: it names the files that the record does not tell."""
    words, repository = ["flashmoe", "prove"], find_repository()  # the run itself may have made one
    try:
        subject_text(record, repository)
    except SubjectError:
        words.append(short_path(request.subject.folder / request.subject.sources[0]))
    words += ["--resume", record.id]
    suite = suite_text(record, repository)
    if list_suites().get(suite, Path(suite)).resolve() != request.suite.path.resolve():
        words += ["--suite", short_path(request.suite.path.absolute())]
    return shlex.join(words)


def _prove_on_hosts(
    requests: Sequence[ProveRequest],
    wanted: Wanted,
    terminal: Terminal,
    store: Store,
    *,
    csv: Path | None,
    junit: Path | None,
) -> int:
    """Run the chain on borrowed machines, and return the exit code."""
    from .borrowing import Borrowed, run_on_hosts

    if not wanted.hosts:
        hint = "PYTHON -m flashmoe_science prove"
        raise InputError("--python is of a borrowed machine, and --host names none", hint=hint)
    if len(requests) > 1:
        raise InputError(f"--host takes one subject, got {len(requests)}", hint="run it once for each")
    (request,) = requests
    repository = request.repository
    share = None if wanted.budget is None else wanted.budget / len(set(wanted.hosts))  # they run at the same time
    meters = {host: make_meter(terminal, Archive(store, repository), share, host=host) for host in wanted.hosts}

    def begin(host: str, record: Record, size: RunSize) -> Budget | None:
        meters[host].start(record, size)
        return meters[host].budget

    def conclude_one(record: Record, path: Path) -> int:
        bill = meters[wanted.hosts[0]].bill(record)
        proof = _conclude(terminal, record, repository, path, bill, alone=True)
        terminal.document(proof.document())
        return proof.exit_code

    def book_set_up(record: Record | None, seconds: float) -> None:
        """Book the time of a machine in which its GPU was held and no gate had it: wheels, environment, build."""
        gpu = record.environment.gpu.name if record is not None and record.environment.gpu else ""
        if seconds <= 0 or (record is not None and not gpu):
            return
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        run = record.id if record is not None else f"set-up-{secrets.token_hex(8)}"
        rate = load_rates(repository).dollars_per_hour(gpu) if gpu else None
        about = Entry(now, run, "set-up", request.subject.name, request.suite.name, gpu, seconds, rate)
        try:
            store.book(about)
        except EvidenceError as error:
            terminal.warn_of(error)
        price = f"{format_dollars(dollars(seconds, rate))} ({format_duration(seconds)})" if rate is not None else ""
        terminal.say(f"set-up: {price or format_duration(seconds)} more, in which no gate had the GPU")

    terminal.say(_title(request))
    return run_on_hosts(
        request,
        Borrowed(wanted.hosts, wanted.python),
        terminal,
        keeper_of=lambda host: make_keeper(terminal, store, repository, meters[host]),
        begin=begin,
        bill_of=lambda host, record: meters[host].bill(record),
        book_set_up=book_set_up,
        conclude_one=conclude_one,
        csv=csv,
        junit=junit,
    )


def as_resumed(wanted: Wanted, repository: Path | None) -> tuple[Wanted, Record | None]:
    """Return the run to go on with, and what is wanted: what was not typed is as it was in that run."""
    if wanted.resume is None:
        return wanted, None
    if len(wanted.subjects) > 1:
        raise InputError(f"resume goes on with one run, got {len(wanted.subjects)} subjects", hint="name one, or none")
    record = Archive(Store(wanted.store), repository).load(wanted.resume)
    if record.compared is not None:
        raise InputError(f"run {record.id} compares two revisions", hint="run its `flashmoe compare` again")
    settings = record.settings
    as_it_was: dict[str, tuple[str, Any]] = {  # the parameter, and what it decides
        "baseline": ("baselines", record.baselines),
        "expect": ("expect", record.subject.expected_speedup),
        "metric": ("times", settings.times),
        "processes": ("processes", settings.processes),
        "rounds": ("rounds", settings.rounds),
        "width": ("width", settings.width),
        "seed": ("seed", settings.seed),
    }
    if "subject" not in wanted.given:
        as_it_was["subject"] = ("subjects", [subject_text(record, repository)])
    if "suite" not in wanted.given:
        suite = suite_text(record, repository)
        if suite == record.suite and suite not in list_suites():
            hint = f"name its file: flashmoe prove --resume {wanted.resume} --suite FILE"
            raise SuiteError(f"the file of suite {suite}, which run {record.id} is of, is not known here", hint=hint)
        as_it_was["suite"] = ("suite", suite)
    changes = dict(change for name, change in as_it_was.items() if name not in wanted.given)
    return replace(wanted, **changes), record


def _request(wanted: Wanted, name: str, repository: Path | None) -> ProveRequest:
    if wanted.time_limit is not None and not 0 < wanted.time_limit < math.inf:
        hint = "e.g. --time-limit 60"
        raise InputError(f"time limit must be a number of seconds above 0, got {wanted.time_limit:g}", hint=hint)
    subject = load_subject(name, time_limit=wanted.time_limit)
    suite = load_suite(wanted.suite, timeout_s=subject.limits.import_s)
    rivals = list(operator_of(subject).rivals())
    for baseline in wanted.baselines:
        check_name("baseline", baseline, rivals)
    if wanted.expect is not None and not 0 < wanted.expect < math.inf:
        raise InputError(f"expect must be a number above 0, got {wanted.expect:g}", hint="e.g. --expect 1.7")
    if wanted.until is not None:
        check_name("until", wanted.until, GATE_NAMES)
    for gpu in wanted.gpus:
        gpu_named(gpu)
    check_budget(wanted.budget)
    settings = Settings(processes=wanted.processes, rounds=wanted.rounds, width=wanted.width, seed=wanted.seed)
    if wanted.times:
        kinds = cast("list[TimeKind]", list(dict.fromkeys(wanted.times)))
        settings = settings.model_copy(update={"times": kinds})
    return ProveRequest(
        subject=subject,
        suite=suite,
        baselines=list(dict.fromkeys(wanted.baselines)) or rivals[:1],
        gpus=list(wanted.gpus),
        until=wanted.until,
        expect=wanted.expect,
        settings=settings,
        command=as_typed(wanted.args),
        repository=repository,
        time_limit=wanted.time_limit,
    )


def _title(request: ProveRequest) -> str:
    cases = len(request.suite.cases)
    against = f", against {', '.join(request.baselines)}" if request.baselines else ""
    return f"proving {request.subject.name} on suite {request.suite.name} ({counted(cases, 'case')}){against}"


def _conclude(
    terminal: Terminal, record: Record, repository: Path | None, path: Path, bill: Bill | None, *, alone: bool
) -> Proof:
    """Print the table, the verdicts, what it cost and where the record is."""
    if kinds_measured(record):
        unmeasured = unmeasured_lines(record)
        terminal.show("", case_table(record), *([unmeasured] if unmeasured else []))
    verdicts = conclude(record, repository)
    code = run_exit_code(record, verdicts)
    terminal.show("")
    terminal.show_conclusion(record, verdicts)
    if record.environment.gpu is None and repository is not None and code == 0 and alone:
        # Nothing could be timed here, so what can be said of speed is what the repository's evidence says.
        name = record.subject.name
        with terminal.doing() as say:
            judged = verify_claims(repository, on_trouble=terminal.warn_of, say=say)
        verdicts = [verdict for verdict in judged if verdict.claim.subject == name]
        if verdicts:
            terminal.show("", f"The claims of this repository about {name}, by the evidence that it carries:", "")
            terminal.show_verdicts(verdicts)
            terminal.show("", count_line(verdicts))
        elif judged:  # a run outside of a repository makes evidence/, and that a repository without claims
            terminal.show("", f"No claim of this repository is about {name}.")
    terminal.show("", *([receipt(bill)] if bill else []), f"record: {short_path(path)}")
    return Proof(record, path, verdicts, bill, code)
