"""The verb ``compare``: two revisions of this repository, or two runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import typer

from ..errors import InputError, ProofError
from ..proof.compare.compare import (
    TOLERANCE,
    TOLERANCE_OF_RUNS,
    Comparison,
    compare_records,
    compare_revisions,
    exit_code,
)
from ..proof.compare.revisions import (
    Asked,
    checked_out,
    find_revision,
    find_toplevel,
    has_uncommitted_changes,
    prove_revisions,
    subjects_at,
)
from ..proof.cost.cost import Bill
from ..proof.cost.terminal import bill_as_plain, receipt
from ..proof.gates import ProveRequest
from ..proof.measure.nvml import NoSensors, list_sensors
from ..proof.records.evidence import Record, Settings, TimeKind, is_document
from ..proof.records.store import Archive, Store, find_repository
from ..proof.report.compare_terminal import comparison_lines
from ..proof.subject.suites import load_suite
from ..proof.text import counted
from .names import gpu_named
from .options import Gpus, Json, Metric, Seed, StoreName, split
from .run_shared import as_typed, check_budget, make_keeper, make_meter
from .terminal import ChainProgress, Terminal, as_plain, short_path

# Three show a large difference. Fewer than six rarely show that a dozen cases are the same within 1 %.
PROCESSES = 6


@dataclass(frozen=True)
class Wanted:
    """What the command line asks of ``compare``."""

    a: str
    b: str
    subject: str | None  # None: flash_attention
    suite: str | None  # None: seed
    kinds: Sequence[TimeKind]
    tolerance: float | None  # a share; None: the default of revisions, or of runs
    allowed: Sequence[str]
    gpus: Sequence[str]
    processes: int
    rounds: int
    seed: int | None
    budget: float | None  # dollars, for both revisions
    store: str | None
    args: Sequence[str]  # as they were typed, for the record


def compare(
    context: typer.Context,
    a: Annotated[str, typer.Argument(metavar="A", help="A revision of this git repository, or a run.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The one that is compared with A.")],
    subject: Annotated[
        str | None,
        # By name: typer 0.27.0 takes the metavar for the name where they differ only in case.
        typer.Option("--subject", metavar="SUBJECT", help="One of ours, or a kernel.toml. Default: flash_attention."),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option("--suite", "-s", metavar="SUITE", help="A packaged suite, or a file. Default: seed."),
    ] = None,
    metric: Annotated[
        list[Metric] | None,
        typer.Option("--time", metavar="KIND", help="kernel, graph or wall; repeat it. Default: graph, or all."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", min=0, max=1, help="The smallest effect that matters. Default: 0.01; for two runs 0.02."
        ),
    ] = None,
    allow_different: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD", help="For two runs: a field that may differ, e.g. driver; repeat it."),
    ] = None,
    gpu: Gpus = None,
    processes: Annotated[int, typer.Option(min=1, metavar="N", help="Worker processes that measure.")] = PROCESSES,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Rounds in each process.")] = 10,
    seed: Seed = None,
    budget: Annotated[
        float | None,
        typer.Option("--budget", metavar="DOLLARS", min=0, help="For both revisions: stop before this is exceeded."),
    ] = None,
    store: StoreName = None,
    as_json: Json = False,
) -> None:
    """Say whether B is faster than A, slower, the same or undecided: for each case, and for all together.

    Two revisions are checked out and built apart, both must be correct, and their rounds are interleaved in one run.
    Two runs (ids or JSON files) are compared by what each measured against a common baseline.

    \b
    Examples:
      flashmoe compare main HEAD
      flashmoe compare HEAD~1 HEAD --subject my_kernel/kernel.toml --time graph --time wall
      flashmoe compare 20261121T130849Z 20261121T190255Z --time kernel --allow-different driver

    \b
    Exit codes:
      0  nothing is slower             3  a revision failed a gate
      1  something is slower           4  undecided, or nothing was measured
      2  wrong usage                   130  interrupted
    """
    wanted = Wanted(
        a=a,
        b=b,
        subject=subject,
        suite=suite,
        kinds=list(dict.fromkeys(m.value for m in metric or ())),
        tolerance=tolerance,
        allowed=split(allow_different),
        gpus=split(gpu),
        processes=processes,
        rounds=rounds,
        seed=seed,
        budget=budget,
        store=store,
        args=context.obj or [],
    )
    terminal = Terminal(as_json=as_json)
    runs = _find_runs(wanted)
    if runs is not None:
        share = TOLERANCE_OF_RUNS if tolerance is None else tolerance
        comparison = compare_records(*runs, wanted.kinds or None, tolerance=share, allowed=wanted.allowed)
        raise typer.Exit(_conclude(terminal, comparison))
    if wanted.allowed:
        raise InputError("--allow-different is for two runs: two revisions are measured in one")
    record, path, bill = _compare_revisions(wanted, terminal)
    raise typer.Exit(_conclude(terminal, compare_revisions(record), record, path, bill))


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


def _compare_revisions(wanted: Wanted, terminal: Terminal) -> tuple[Record, Path, Bill | None]:
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
    if isinstance(list_sensors(), NoSensors):
        terminal.warn("no NVIDIA GPU here: both revisions are checked, and no time is compared", "run it on a GPU")
    repository, store = find_repository(), Store(wanted.store)
    meter = make_meter(terminal, Archive(store, repository), check_budget(wanted.budget))
    keeper = make_keeper(terminal, store, repository, meter)
    progress = ChainProgress(terminal, on_start=keeper.begin_gate)
    tolerance = TOLERANCE if wanted.tolerance is None else wanted.tolerance
    settings = Settings(
        times=list(wanted.kinds) or ["graph"], processes=wanted.processes, rounds=wanted.rounds, seed=wanted.seed
    )
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
    assert keeper.record is not None
    record = keeper.record  # which has its line of the ledger of runs begun
    keeper.remind()
    return record, keeper.path, meter.bill(record)
