"""The verb ``prove``: run the chain, keep its record, and print its conclusion."""

# ruff: noqa: ARG001 - the parameters of the verb are read from its context

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from ..errors import InputError, OperatorError, SuiteError
from ..proof import gates
from ..proof.cost.cost import Bill, Meter
from ..proof.gates import ProveRequest, check_request, ranks_asked
from ..proof.judge.judge import Verdict
from ..proof.judge.limits import PROCESSES_OF_A_CLAIM
from ..proof.judge.rows import csv_text, kinds_measured
from ..proof.judge.run_verdicts import conclude, run_exit_code, worst_exit_code
from ..proof.judge.verify import verify_claims
from ..proof.records.evidence import GATE_NAMES, Record, Settings
from ..proof.records.store import Archive, Store, find_repository
from ..proof.report.junit import junit_xml, write_junit
from ..proof.report.terminal import case_table, count_line, outcome_table, unmeasured_lines
from ..proof.subject.loading import load_subject, operator_of, subject_text
from ..proof.subject.suites import list_suites, load_suite, suite_beside, suite_text
from ..proof.text import counted
from .names import check_name, gpu_named
from .options import (
    Csv,
    Gpus,
    Json,
    Junit,
    Metric,
    Seed,
    StoreName,
    argument,
    given,
    option,
    split,
    times_of,
)
from .remote import prove_on_hosts
from .run_shared import as_typed, check_budget, make_keeper, make_meter
from .terminal import ChainProgress, Terminal, as_plain, check_writable, short_path, write_file


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
            "cost": self.bill and self.bill.as_plain(),
            "exit_code": self.exit_code,
        }


def prove(
    context: typer.Context,
    subject: Annotated[
        list[str] | None, argument("SUBJECT", "One of ours, or a kernel.toml.", show_default="flash_attention")
    ] = None,
    suite: Annotated[
        str | None,
        option(
            "--suite -s", "SUITE", "A packaged suite, or a file. Default: suite.toml beside kernel.toml, else seed."
        ),
    ] = None,
    baseline: Annotated[
        list[str] | None, option("--baseline -b", "NAME", "Repeat it for more. Default: the operator's first.")
    ] = None,
    gpu: Gpus = None,
    until: Annotated[str | None, option("--until", "GATE", "The last gate to run, e.g. correct.")] = None,
    expect: Annotated[
        float | None, option("--expect", "X", "The expected speedup over the first baseline.", min=0)
    ] = None,
    metric: Annotated[
        list[Metric] | None, option("--time", "KIND", "Take only kernel, graph or wall time; repeat it. Default: all.")
    ] = None,
    processes: Annotated[
        int, option("", "N", f"Worker processes that measure. A claim needs {PROCESSES_OF_A_CLAIM}.", min=1)
    ] = PROCESSES_OF_A_CLAIM,
    rounds: Annotated[int, option("", "N", "Rounds in each process. A claim needs 30 in all.", min=1)] = 10,
    width: Annotated[
        float | None,
        option("--width", "SHARE", "Add processes while an interval is wider to either side, e.g. 0.02.", min=0),
    ] = None,
    seed: Seed = None,
    resume: Annotated[
        str | None, option("--resume", "RUN", "Continue an interrupted run; its options are the defaults.")
    ] = None,
    budget: Annotated[float | None, option("--budget", "DOLLARS", "Stop before this is exceeded.", min=0)] = None,
    time_limit: Annotated[
        float | None,
        option("--time-limit", "SECONDS", "Longest silence of a worker. Default: [limits] of the file.", min=0),
    ] = None,
    store: StoreName = None,
    host: Annotated[
        list[str] | None, option("--host", "USER@MACHINE", "Run on this machine over SSH; repeat it for several.")
    ] = None,
    python: Annotated[str, option("--python", "PATH", "Python of that machine, with torch and triton.")] = "",
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
    terminal = Terminal(as_json=as_json)
    check_writable(csv)
    check_writable(junit, makes_folder=True)
    repository, kept = find_repository(), Store(store)
    wanted, resumed = _as_resumed(context, repository, kept)
    requests = [_request(wanted, one, repository, resumed) for one in wanted.subject or ["flash_attention"]]
    for request in requests:  # report a wrong request before any of them runs
        check_request(request)
    if host or python:
        files = {"csv": csv, "junit": junit}
        raise typer.Exit(_prove_on_hosts(requests, wanted, terminal, kept, files))
    proofs: list[Proof] = []
    for request in requests:
        if proofs:
            terminal.say("")
        spent = sum(proof.dollars for proof in proofs)  # the budget is that of all of them
        left = None if budget is None else max(0.0, budget - spent)
        meter = make_meter(terminal, Archive(kept, repository), left)
        proofs.append(_prove(replace(request, meter=meter), meter, terminal, kept, alone=len(requests) == 1))
    records = [proof.record for proof in proofs]
    if csv is not None:
        write_file(csv, csv_text(records))
    if junit is not None:
        write_junit(junit, junit_xml([verdict for proof in proofs for verdict in proof.verdicts], records))
    code = worst_exit_code([proof.exit_code for proof in proofs])
    if len(proofs) == 1:
        terminal.document(proofs[0].document())
    else:
        terminal.show("", outcome_table([(proof.record, proof.verdicts) for proof in proofs]))
        terminal.document({"runs": [proof.document() for proof in proofs], "exit_code": code})
    raise typer.Exit(code)


def _prove(request: ProveRequest, meter: Meter, terminal: Terminal, store: Store, *, alone: bool) -> Proof:
    """Run the chain on one subject, and print its conclusion."""
    repository = request.repository
    keeper = make_keeper(terminal, store, repository)
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
            terminal.log.print(f"hint: flashmoe prove --resume {keeper.record.id} goes on from here", soft_wrap=True)
        raise
    finally:
        progress.close()  # the bar goes before anything else is printed
    assert keeper.path is not None
    assert keeper.record is not None
    record = keeper.record  # which has its line of the ledger
    return _conclude(terminal, record, repository, keeper.path, meter.bill(record), alone=alone)


def _prove_on_hosts(
    requests: Sequence[ProveRequest],
    wanted: SimpleNamespace,
    terminal: Terminal,
    store: Store,
    files: dict[str, Path | None],
) -> int:
    """Run the chain on borrowed machines, and return the exit code."""
    hosts = split(wanted.host)
    if not hosts:
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
    about = {"python": wanted.python, "budget": wanted.budget, **files}
    return prove_on_hosts(request, hosts, terminal, store, **about, conclude_one=conclude_one)


def _as_resumed(context: typer.Context, repository: Path | None, store: Store) -> tuple[SimpleNamespace, Record | None]:
    """Return what is wanted and the run to continue: options that were not typed are those of that run."""
    wanted = SimpleNamespace(**context.params, args=context.obj or [], given=given(context))
    if wanted.resume is None:
        return wanted, None
    if len(wanted.subject or ()) > 1:
        raise InputError(f"resume goes on with one run, got {len(wanted.subject)} subjects", hint="name one, or none")
    record = Archive(store, repository).load(wanted.resume)
    if record.compared is not None:
        raise InputError(f"run {record.id} compares two revisions", hint="run its `flashmoe compare` again")
    settings = record.settings
    as_it_was = {
        "baseline": record.baselines,
        "expect": record.subject.expected_speedup,
        "metric": [Metric(kind) for kind in settings.times],
        **{name: getattr(settings, name) for name in ("processes", "rounds", "width", "seed")},
    }
    if "subject" not in wanted.given:
        as_it_was["subject"] = [subject_text(record, repository)]
    if "suite" not in wanted.given:
        suite = suite_text(record, repository)
        if suite == record.suite and suite not in list_suites():
            hint = f"name its file: flashmoe prove --resume {wanted.resume} --suite FILE"
            raise SuiteError(f"the file of suite {suite}, which run {record.id} is of, is not known here", hint=hint)
        as_it_was["suite"] = suite
    wanted.__dict__.update({name: value for name, value in as_it_was.items() if name not in wanted.given})
    return wanted, record


def _request(wanted: SimpleNamespace, name: str, repository: Path | None, resume: Record | None) -> ProveRequest:
    if wanted.time_limit is not None and not 0 < wanted.time_limit < math.inf:
        hint = "e.g. --time-limit 60"
        raise InputError(f"time limit must be a number of seconds above 0, got {wanted.time_limit:g}", hint=hint)
    subject = load_subject(name, time_limit=wanted.time_limit)
    beside = suite_beside(subject) if resume is None and "suite" not in wanted.given else None
    suite = load_suite(str(beside or wanted.suite or "seed"))
    baselines, known = list(dict.fromkeys(split(wanted.baseline))), list(operator_of(subject).baselines())
    for baseline in baselines:
        check_name("baseline", baseline, known)
    if wanted.expect is not None and not 0 < wanted.expect < math.inf:
        raise InputError(f"expect must be a number above 0, got {wanted.expect:g}", hint="e.g. --expect 1.7")
    if wanted.until is not None:
        check_name("until", wanted.until, GATE_NAMES)
    for gpu in split(wanted.gpu):
        gpu_named(gpu)
    check_budget(wanted.budget)
    settings = Settings(**{key: getattr(wanted, key) for key in ("processes", "rounds", "width", "seed")})
    if wanted.metric:
        settings = settings.model_copy(update={"times": times_of(wanted.metric)})
    return ProveRequest(
        subject=subject,
        suite=suite,
        baselines=baselines or known[:1],
        gpus=split(wanted.gpu),
        until=wanted.until,
        expect=wanted.expect,
        settings=settings,
        command=as_typed(wanted.args),
        repository=repository,
        time_limit=wanted.time_limit,
        resume=resume,
    )


def _title(request: ProveRequest) -> str:
    cases = len(request.suite.cases)
    against = f", against {', '.join(request.baselines)}" if request.baselines else ""
    over = f" over {ranks} ranks" if (ranks := ranks_asked(request)) > 1 else ""
    return f"proving {request.subject.name}{over} on suite {request.suite.name} ({counted(cases, 'case')}){against}"


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
            terminal.explain_stale(verdicts, repository)
        elif judged:  # a run outside of a repository makes evidence/, and that a repository without claims
            terminal.show("", f"No claim of this repository is about {name}.")
    terminal.show("", *([bill.receipt()] if bill else []), f"record: {short_path(path)}")
    return Proof(record, path, verdicts, bill, code)
