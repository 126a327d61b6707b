"""The verb ``prove``: run the chain, keep its record, and print its conclusion."""

# ruff: noqa: ARG001 - the parameters of the verb are read from its context

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from ..errors import InputError, OperatorError, SuiteError
from ..proof import gates
from ..proof.cost.cost import Bill, Meter
from ..proof.gates import ProveRequest, check_request, ranks_asked
from ..proof.judge.judge import Verdict
from ..proof.judge.limits import PROCESSES_OF_A_CLAIM
from ..proof.judge.rows import csv_text, kinds_measured
from ..proof.judge.run_verdicts import conclude, run_exit_code
from ..proof.judge.verify import verify_claims
from ..proof.records.evidence import GATE_NAMES, Record, Settings
from ..proof.records.store import Archive, Store, find_repository
from ..proof.remote import Host
from ..proof.report.junit import junit_xml, write_junit
from ..proof.report.terminal import case_table, count_line, unmeasured_lines
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
from .remote import prove_on_host
from .run_shared import as_typed, check_budget, make_keeper, make_meter
from .terminal import ChainProgress, Terminal, as_plain, check_writable, short_path, write_file


def prove(
    context: typer.Context,
    subject: Annotated[str, argument("SUBJECT", "One of ours, or a kernel.toml.")] = "flash_attention",
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
    host: Annotated[str, option("--host", "USER@MACHINE", "Run on this machine over SSH.")] = "",
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
      flashmoe prove --resume 20261120T235959Z
      flashmoe prove my_kernel.toml --host me@rented-h200

    \b
    Exit codes:
      0  every gate that is possible here passed, and its claims hold; without a GPU nothing is timed
      1  a claim is refuted            3  a gate failed
      2  wrong usage                   4  inconclusive
    """
    terminal = Terminal(as_json=as_json)
    if python and not host:
        hint = "PYTHON -m flashmoe_science prove"
        raise InputError("--python is for a borrowed machine, and --host names none", hint=hint)
    check_writable(csv)
    check_writable(junit, makes_folder=True)
    repository, kept = find_repository(), Store(store)
    wanted, resumed = _as_resumed(context, repository, kept)
    request = _request(wanted, repository, resumed)
    check_request(request)
    meter = make_meter(terminal, Archive(kept, repository), budget)
    terminal.say(_title(request))
    if host:
        record, path, bill = prove_on_host(request, Host(host, python), terminal, kept, meter, junit=junit)
    else:
        record, path, bill = _prove(request, terminal, kept, meter)
    verdicts = _conclude(terminal, repository, record)
    code = run_exit_code(record, verdicts)
    terminal.show("", *([bill.receipt()] if bill else []), f"record: {short_path(path)}")
    if csv is not None:
        write_file(csv, csv_text([record]))
    if junit is not None:
        write_junit(junit, junit_xml(verdicts, [record]))
    document = {"record": as_plain(record), "path": short_path(path), "verdicts": [as_plain(each) for each in verdicts]}
    terminal.document({**document, "cost": bill and bill.as_plain(), "exit_code": code})
    raise typer.Exit(code)


def _prove(request: ProveRequest, terminal: Terminal, store: Store, meter: Meter) -> tuple[Record, Path, Bill | None]:
    """Run the chain on one subject here; return the record, where it is kept, and its bill."""
    keeper = make_keeper(terminal, store, request.repository)
    progress = ChainProgress(terminal, on_start=keeper.begin_gate)
    try:
        gates.prove(replace(request, meter=meter), progress=progress, save=keeper.save)
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
    assert keeper.record is not None  # which has its line of the ledger
    return keeper.record, keeper.path, meter.bill(keeper.record)


def _as_resumed(context: typer.Context, repository: Path | None, store: Store) -> tuple[SimpleNamespace, Record | None]:
    """Return what is wanted and the run to continue: options that were not typed are those of that run."""
    wanted = SimpleNamespace(**context.params, args=context.obj or [], given=given(context))
    if wanted.resume is None:
        return wanted, None
    record = Archive(store, repository).load(wanted.resume)
    if record.compared is not None:
        raise InputError(f"run {record.id} compares two revisions", hint="run its `flashmoe compare` again")
    settings = record.settings
    as_it_was = {
        "baseline": record.baselines,
        "expect": record.subject.expected_speedup,
        "metric": [Metric(kind) for kind in settings.times],
        **{name: getattr(settings, name) for name in ("processes", "rounds", "seed")},
    }
    if "subject" not in wanted.given:
        as_it_was["subject"] = subject_text(record, repository)
    if "suite" not in wanted.given:
        suite = suite_text(record, repository)
        if suite == record.suite and suite not in list_suites():
            hint = f"name its file: flashmoe prove --resume {wanted.resume} --suite FILE"
            raise SuiteError(f"the file of suite {suite}, which run {record.id} is of, is not known here", hint=hint)
        as_it_was["suite"] = suite
    wanted.__dict__.update({name: value for name, value in as_it_was.items() if name not in wanted.given})
    return wanted, record


def _request(wanted: SimpleNamespace, repository: Path | None, resume: Record | None) -> ProveRequest:
    if wanted.time_limit is not None and not 0 < wanted.time_limit < math.inf:
        hint = "e.g. --time-limit 60"
        raise InputError(f"time limit must be a number of seconds above 0, got {wanted.time_limit:g}", hint=hint)
    subject = load_subject(wanted.subject, time_limit=wanted.time_limit)
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
    settings = Settings(**{key: getattr(wanted, key) for key in ("processes", "rounds", "seed")})
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


def _conclude(terminal: Terminal, repository: Path | None, record: Record) -> Sequence[Verdict]:
    """Print the table and the verdicts, and return these."""
    if kinds_measured(record):
        unmeasured = unmeasured_lines(record)
        terminal.show("", case_table(record), *([unmeasured] if unmeasured else []))
    verdicts = conclude(record, repository)
    terminal.show("")
    terminal.show_conclusion(record, verdicts)
    if record.environment.gpu is None and repository is not None and not run_exit_code(record, verdicts):
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
    return verdicts
