"""The verb ``prove``: run the chain, keep its record, and print its conclusion."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InputError, OperatorError, SubjectError, SuiteError
from ..proof import gates
from ..proof.cost.cost import Bill, Meter
from ..proof.cost.terminal import bill_as_plain, receipt
from ..proof.gates import ProveRequest, check_request
from ..proof.judge.judge import Verdict
from ..proof.judge.limits import PROCESSES_OF_A_CLAIM
from ..proof.judge.rows import kinds_measured
from ..proof.judge.run_verdicts import conclude, run_exit_code, worst_exit_code
from ..proof.judge.verify import verify_claims
from ..proof.records.evidence import GATE_NAMES, Record, Settings, TimeKind
from ..proof.records.store import Archive, Store, find_repository
from ..proof.report.junit import write_junit
from ..proof.report.terminal import case_table, count_line, outcome_table, unmeasured_lines
from ..proof.subject.loading import load_subject, operator_of, subject_text
from ..proof.subject.suites import list_suites, load_suite, suite_beside, suite_text
from ..proof.text import counted
from .names import check_name, gpu_named
from .options import Csv, Gpus, Json, Junit, Metric, Seed, StoreName, SuiteName, given, split
from .remote import prove_on_hosts
from .run_shared import as_typed, check_budget, make_keeper, make_meter
from .terminal import ChainProgress, Terminal, as_plain, check_writable, short_path, write_csv_file


@dataclass(frozen=True)
class Wanted:
    """What the command line asks of ``prove``."""

    subjects: Sequence[str]
    suite: str
    baselines: Sequence[str]
    gpus: Sequence[str]
    until: str | None
    expect: float | None
    kinds: Sequence[TimeKind]
    processes: int
    rounds: int
    width: float | None
    seed: int | None
    budget: float | None  # dollars
    time_limit: float | None  # seconds
    store: str | None
    args: Sequence[str]  # as they were typed, for the record
    resume: str | None  # the run to continue
    hosts: Sequence[str]  # borrowed machines to run on; none: this one
    python: str  # theirs
    given: Collection[str]  # the parameters that were typed; the others are as in the run to continue


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


def prove(
    context: typer.Context,
    subject: Annotated[
        list[str] | None,
        typer.Argument(metavar="SUBJECT", help="One of ours, or a kernel.toml.", show_default="flash_attention"),
    ] = None,
    suite: SuiteName = "seed",
    baseline: Annotated[
        list[str] | None,
        typer.Option("--baseline", "-b", metavar="NAME", help="Repeat it for more. Default: the operator's first."),
    ] = None,
    gpu: Gpus = None,
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="GATE", help="The last gate to run, e.g. correct."),
    ] = None,
    expect: Annotated[
        float | None,
        typer.Option("--expect", metavar="X", min=0, help="The expected speedup over the first baseline."),
    ] = None,
    metric: Annotated[
        list[Metric] | None,
        typer.Option("--time", metavar="KIND", help="Take only kernel, graph or wall time; repeat it. Default: all."),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(min=1, metavar="N", help=f"Worker processes that measure. A claim needs {PROCESSES_OF_A_CLAIM}."),
    ] = PROCESSES_OF_A_CLAIM,
    rounds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Rounds in each process. A claim needs 30 in all.")
    ] = 10,
    width: Annotated[
        float | None,
        typer.Option(
            "--width",
            metavar="SHARE",
            min=0,
            help="Add processes while an interval is wider to either side, e.g. 0.02.",
        ),
    ] = None,
    seed: Seed = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="RUN", help="Continue an interrupted run; its options are the defaults."),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option("--budget", metavar="DOLLARS", min=0, help="Stop before this is exceeded."),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit", metavar="SECONDS", min=0, help="Longest silence of a worker. Default: [limits] of the file."
        ),
    ] = None,
    store: StoreName = None,
    host: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="USER@MACHINE", help="Run on this machine over SSH; repeat it for several."),
    ] = None,
    python: Annotated[
        str, typer.Option("--python", metavar="PATH", help="Python of that machine, with torch and triton.")
    ] = "",
    as_json: Json = False,
    csv: Csv = None,
    junit: Junit = None,
) -> None:
    """Take a kernel through the chain of proof: sources, build, import, launch, correct, quick, bench.

    Stops at the first gate that fails. Writes a record to evidence/ of this repository (or folder) and to the store.
    Without a GPU it checks everything that needs none, and ends with the verdicts of `flashmoe verify`.

    \b
    Examples:
      flashmoe prove
      flashmoe prove my_kernel.toml --expect 1.7
      flashmoe prove --suite standard --baseline sdpa --baseline sdpa-flash
      flashmoe prove my_kernel.toml --until correct --json
      flashmoe prove kernels/*.toml
      flashmoe prove --resume 20261120T235959Z
      flashmoe prove my_kernel.toml --host me@rented-h200 --host me@rented-l4

    \b
    Exit codes:
      0  every gate that is possible here passed, and its claims hold; without a GPU nothing is timed
      1  a claim is refuted            3  a gate failed
      2  wrong usage                   4  inconclusive
    Several subjects return the worst code: 3, then 1, then 4.
    """
    wanted = Wanted(
        subjects=subject or ["flash_attention"],
        suite=suite,
        baselines=split(baseline),
        gpus=split(gpu),
        until=until,
        expect=expect,
        kinds=list(dict.fromkeys(m.value for m in metric or ())),
        processes=processes,
        rounds=rounds,
        width=width,
        seed=seed,
        budget=budget,
        time_limit=time_limit,
        store=store,
        args=context.obj or [],
        resume=resume,
        hosts=split(host),
        python=python,
        given=given(context),
    )
    raise typer.Exit(_prove_all(wanted, csv=csv, junit=junit, as_json=as_json))


def _prove_all(wanted: Wanted, *, csv: Path | None, junit: Path | None, as_json: bool) -> int:
    """Run the chain on every subject, one after another, and return the worst exit code."""
    terminal = Terminal(as_json=as_json)
    check_writable(csv)
    check_writable(junit, makes_folder=True)
    repository = find_repository()
    wanted, resume = as_resumed(wanted, repository)
    store = Store(wanted.store)
    requests = [replace(_request(wanted, subject, repository), resume=resume) for subject in wanted.subjects]
    for request in requests:  # report a wrong request before any of them runs
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
    """Run the chain on one subject, and print its conclusion."""
    repository = request.repository
    keeper = make_keeper(terminal, store, repository, meter)
    progress = ChainProgress(terminal, on_start=keeper.begin_gate)
    terminal.say(_title(request))
    try:
        record = gates.prove(request, progress=progress, save=keeper.save)
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
    assert keeper.record is not None
    record = keeper.record  # which has its line of the ledger
    keeper.remind()
    return _conclude(terminal, record, repository, keeper.path, meter.bill(record), alone=alone)


def _way_on(request: ProveRequest, record: Record) -> str:
    """Return the command that continues an interrupted run. It names the files that the record cannot find."""
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
    if not wanted.hosts:
        hint = "PYTHON -m flashmoe_science prove"
        raise InputError("--python is for a borrowed machine, and --host names none", hint=hint)
    if len(requests) > 1:
        raise InputError(f"--host takes one subject, got {len(requests)}", hint="run it once for each")
    (request,) = requests

    def conclude_one(record: Record, path: Path, bill: Bill | None) -> int:
        proof = _conclude(terminal, record, request.repository, path, bill, alone=True)
        terminal.document(proof.document())
        return proof.exit_code

    terminal.say(_title(request))
    return prove_on_hosts(
        request,
        wanted.hosts,
        terminal,
        store,
        python=wanted.python,
        budget=wanted.budget,
        csv=csv,
        junit=junit,
        conclude_one=conclude_one,
    )


def as_resumed(wanted: Wanted, repository: Path | None) -> tuple[Wanted, Record | None]:
    """Return what is wanted and the run to continue: options that were not typed are those of that run."""
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
        "metric": ("kinds", settings.times),
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
    beside = suite_beside(subject) if wanted.resume is None and "suite" not in wanted.given else None
    suite = load_suite(str(beside or wanted.suite), timeout_s=subject.limits.import_s)
    known = list(operator_of(subject).baselines())
    for baseline in wanted.baselines:
        check_name("baseline", baseline, known)
    if wanted.expect is not None and not 0 < wanted.expect < math.inf:
        raise InputError(f"expect must be a number above 0, got {wanted.expect:g}", hint="e.g. --expect 1.7")
    if wanted.until is not None:
        check_name("until", wanted.until, GATE_NAMES)
    for gpu in wanted.gpus:
        gpu_named(gpu)
    check_budget(wanted.budget)
    settings = Settings(processes=wanted.processes, rounds=wanted.rounds, width=wanted.width, seed=wanted.seed)
    if wanted.kinds:
        settings = settings.model_copy(update={"times": list(wanted.kinds)})
    return ProveRequest(
        subject=subject,
        suite=suite,
        baselines=list(dict.fromkeys(wanted.baselines)) or known[:1],
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
        # Nothing could be timed here; the evidence of the repository is all that is known about speed.
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
