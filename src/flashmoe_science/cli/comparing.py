"""The verbs ``compare``, of two revisions or two runs, and ``history``, of all runs of a subject."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from ..errors import InputError, ProofError
from ..proof.compare import TOLERANCE, TOLERANCE_OF_RUNS, Comparison, compare_records, compare_revisions, exit_code
from ..proof.cost_report import bill_as_plain, receipt
from ..proof.evidence import Record, Settings, TimeKind, is_document
from ..proof.gates import ProveRequest
from ..proof.history import look_back
from ..proof.meter import Bill
from ..proof.report_compare import comparison_lines, history_lines
from ..proof.revisions import (
    Asked,
    checked_out,
    find_revision,
    find_toplevel,
    has_uncommitted_changes,
    prove_revisions,
    subjects_at,
)
from ..proof.store import Archive, Store, find_repository
from ..proof.suites import load_suite
from ..proof.words import counted
from . import HOLDS, INCONCLUSIVE
from .compare_verbs import PROCESSES
from .names import gpu_named, moment_named
from .running import as_typed, check_budget, make_keeper, make_meter
from .terminal import ChainProgress, Terminal, as_plain, short_path


@dataclass(frozen=True)
class Wanted:
    """What the command line asks of ``compare``."""

    a: str
    b: str
    subject: str | None = None  # None: flash_attention
    suite: str | None = None  # None: seed
    times: Sequence[str] = ()
    tolerance: float | None = None  # a share; None: the default of revisions, or of runs
    allowed: Sequence[str] = ()
    gpus: Sequence[str] = ()
    processes: int = PROCESSES
    rounds: int = 10
    seed: int | None = None
    budget: float | None = None  # dollars, of both revisions
    store: str | None = None
    args: Sequence[str] = field(default_factory=list)  # as they were typed, for the record


def run_compare(wanted: Wanted, *, as_json: bool) -> int:
    """Compare, and return the exit code."""
    terminal = Terminal(as_json=as_json)
    kinds = cast("list[TimeKind]", list(dict.fromkeys(wanted.times)))
    runs = _find_runs(wanted)
    if runs is not None:
        tolerance = TOLERANCE_OF_RUNS if wanted.tolerance is None else wanted.tolerance
        comparison = compare_records(*runs, kinds or None, tolerance=tolerance, allowed=wanted.allowed)
        return _conclude(terminal, comparison)
    if wanted.allowed:
        raise InputError("--allow-different is for two runs: two revisions are measured in one")
    record, path, bill = _compare_revisions(wanted, kinds or ["graph"], terminal)
    return _conclude(terminal, compare_revisions(record), record, path, bill)


def _conclude(
    terminal: Terminal,
    comparison: Comparison,
    record: Record | None = None,
    path: Path | None = None,
    bill: Bill | None = None,
) -> int:
    code = exit_code(comparison)
    terminal.show(*([""] if record else []), comparison_lines(comparison))
    if path is not None:
        terminal.show("", *([receipt(bill)] if bill else []), f"record: {short_path(path)}")
    document = {"comparison": as_plain(comparison), "exit_code": code}
    if record is not None and path is not None:
        document |= {"record": as_plain(record), "path": short_path(path), "cost": bill_as_plain(bill)}
    terminal.document(document)
    return code


def _find_runs(wanted: Wanted) -> tuple[Record, Record] | None:
    """Return the two runs that are meant, or None where two revisions are.

    Raises:
        InputError: one is a run and the other a revision, or it can be either.
        EvidenceError: a run is named that is not there.
    """
    archive = Archive(Store(wanted.store), find_repository())
    keys = (wanted.a, wanted.b)
    found = [archive.load(key) if archive.has(key) or is_document(key) else None for key in keys]
    try:
        toplevel = find_toplevel(Path.cwd())
    except ProofError:
        toplevel = None
    for key, run in zip(keys, found, strict=True):
        is_revision = toplevel is not None and find_revision(toplevel, key) is not None
        if run is not None and is_revision:
            hint = "give more of the id, the path of the record, or e.g. refs/heads/NAME"
            raise InputError(f"{key!r} is a run and a revision", hint=hint)
        if run is None and not is_revision:
            where = "" if toplevel else ", and there is no git repository here"
            raise InputError(
                f"{key!r} is neither a run nor a revision{where}",
                hint="flashmoe runs lists the runs; git log the revisions",
            )
    a, b = found
    if (a is None) != (b is None):
        raise InputError(
            f"A and B must be two runs or two revisions, got {wanted.a!r} and {wanted.b!r}: one of each",
            hint="the revisions that runs were made of are in `flashmoe runs --json`",
        )
    if a is None or b is None:
        return None
    if a.id == b.id:
        raise InputError(f"A and B are the same run, {a.id}")
    if wanted.subject or wanted.suite:
        raise InputError("--subject and --suite are for two revisions: a run has its own")
    if wanted.budget is not None:
        raise InputError("--budget is for two revisions: to compare two runs costs nothing")
    return a, b


def _compare_revisions(wanted: Wanted, kinds: list[TimeKind], terminal: Terminal) -> tuple[Record, Path, Bill | None]:
    """Check both revisions out, prove them, and return the record, where it is, and what it cost."""
    toplevel = find_toplevel(Path.cwd())
    a, b = (cast("Asked", find_revision(toplevel, label)) for label in (wanted.a, wanted.b))
    suite = load_suite(wanted.suite or "seed")
    for gpu in wanted.gpus:
        gpu_named(gpu)
    if has_uncommitted_changes(toplevel):
        terminal.warn("there are uncommitted changes, which are in neither revision", "commit them, and compare HEAD")
    if a.commit == b.commit:
        terminal.warn(f"both are commit {a.commit[:12]}", "what differs between them is noise")
    repository, store = find_repository(), Store(wanted.store)
    meter = make_meter(terminal, Archive(store, repository), check_budget(wanted.budget))
    keeper = make_keeper(terminal, store, repository, meter)
    progress = ChainProgress(terminal)
    tolerance = TOLERANCE if wanted.tolerance is None else wanted.tolerance
    settings = Settings(times=kinds, processes=wanted.processes, rounds=wanted.rounds, seed=wanted.seed)
    try:
        with checked_out(toplevel, a, b) as checkouts:
            subject, _ = subjects_at(wanted.subject or "flash_attention", *checkouts)
            request = ProveRequest(
                subject=subject,
                suite=suite,
                baselines=[],
                gpus=list(wanted.gpus),
                settings=settings,
                meter=meter,
                command=as_typed(wanted.args),
            )
            name = wanted.subject or "flash_attention"
            cases = counted(len(suite.cases), "case")
            terminal.say(f"comparing {name} on suite {suite.name} ({cases}): B {b.label} against A {a.label}")
            record = prove_revisions(
                request, tolerance=tolerance, progress=progress, announce=terminal.say, save=keeper.save
            )
    except KeyboardInterrupt:
        progress.close()
        if keeper.path is not None:
            terminal.log.print(f"what was finished is in {keeper.place}", soft_wrap=True)
        raise
    finally:
        progress.close()
    assert keeper.path is not None
    keeper.remind()
    return record, keeper.path, meter.bill(record)


@dataclass(frozen=True)
class Only:
    """Of which runs ``history`` is."""

    subject: str
    suite: str = ""
    gpu: str = ""
    since: str | None = None  # a date, or how long ago


def run_history(only: Only, *, metric: TimeKind, case: str | None, store: str | None, as_json: bool) -> int:
    """Look back over the runs of a subject."""
    terminal = Terminal(as_json=as_json)
    archive = Archive(Store(store), find_repository())
    moment = moment_named(only.since) if only.since else None
    listed = archive.runs(
        subject=only.subject, suite=only.suite, gpu=only.gpu, since=moment, on_trouble=terminal.warn_of
    )
    if not listed:
        known = archive.runs(on_trouble=lambda _: None)
        names = sorted({run.subject for run in known})
        hint = f"there are runs of {', '.join(names)}" if names else "flashmoe prove makes the first"
        if own := [run for run in known if run.subject == only.subject]:
            suites, gpus = (
                sorted({run.suite for run in own}),
                sorted({run.gpu or "machines without a GPU" for run in own}),
            )
            hint = f"its runs are of {', '.join(suites)} on {', '.join(gpus)}, the newest of {own[0].created_at[:10]}"
        asked = {"of suite": only.suite, "on": only.gpu, "since": only.since}
        which = "".join(f" {word} {value}" for word, value in asked.items() if value)
        raise InputError(f"there is no run of {only.subject}{which}", hint=hint)
    history = look_back([archive.load(run.id) for run in listed], metric, case=case)
    terminal.show(history_lines(history))
    code = HOLDS if history.enough else INCONCLUSIVE
    terminal.document({"history": as_plain(history), "exit_code": code})
    return code
