"""The verb ``compare``: two revisions of this repository, or two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

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
from ..proof.cost.cost import Bill, Meter
from ..proof.gates import ProveRequest
from ..proof.measure.nvml import NoSensors, list_sensors
from ..proof.records.documents import is_document
from ..proof.records.evidence import Record, Settings
from ..proof.records.store import Archive, Store, find_repository
from ..proof.report.terminal import comparison_lines
from ..proof.subject.suites import load_suite
from ..proof.text import counted
from .names import gpu_named
from .options import Gpus, Json, Metric, Seed, StoreName, argument, option, split, times_of
from .run_shared import as_typed, check_budget, make_keeper, make_meter
from .terminal import ChainProgress, Terminal, as_plain, short_path

# Three show a large difference. Fewer than six rarely show that a dozen cases are the same within 1 %.
PROCESSES = 6


def compare(
    context: typer.Context,
    a: Annotated[str, argument("A", "A revision of this git repository, or a run.")],
    b: Annotated[str, argument("B", "The one that is compared with A.")],
    subject: Annotated[
        str | None,
        # By name: typer 0.27.0 takes the metavar for the name where they differ only in case.
        option("--subject", "SUBJECT", "One of ours, or a kernel.toml. Default: flash_attention."),
    ] = None,
    suite: Annotated[str | None, option("--suite -s", "SUITE", "A packaged suite, or a file. Default: seed.")] = None,
    metric: Annotated[
        list[Metric] | None, option("--time", "KIND", "kernel, graph or wall; repeat it. Default: graph, or all.")
    ] = None,
    tolerance: Annotated[
        float | None,
        option("", "SHARE", "The smallest effect that matters. Default: 0.01; for two runs 0.02.", min=0, max=1),
    ] = None,
    allow_different: Annotated[
        list[str] | None, option("", "FIELD", "For two runs: a field that may differ, e.g. driver; repeat it.")
    ] = None,
    gpu: Gpus = None,
    processes: Annotated[int, option("", "N", "Worker processes that measure.", min=1)] = PROCESSES,
    rounds: Annotated[int, option("", "N", "Rounds in each process.", min=1)] = 10,
    seed: Seed = None,
    budget: Annotated[
        float | None, option("--budget", "DOLLARS", "For both revisions: stop before this is exceeded.", min=0)
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
    terminal = Terminal(as_json=as_json)
    allowed, archive = split(allow_different), Archive(Store(store), find_repository())
    if (runs := _find_runs(a, b, archive)) is not None:
        if subject or suite:
            raise InputError("--subject and --suite are for two revisions: a run has its own")
        if budget is not None:
            raise InputError("--budget is for two revisions: to compare two runs costs nothing")
        share = TOLERANCE_OF_RUNS if tolerance is None else tolerance
        comparison = compare_records(*runs, times_of(metric) or None, tolerance=share, allowed=allowed)
        raise typer.Exit(_conclude(terminal, comparison))
    if allowed:
        raise InputError("--allow-different is for two runs: two revisions are measured in one")
    settings = Settings(times=times_of(metric) or ["graph"], processes=processes, rounds=rounds, seed=seed)
    about = {"suite": load_suite(suite or "seed"), "gpus": split(gpu), "command": as_typed(context.obj or [])}
    wanted = {**about, "baselines": [], "settings": settings}
    meter = make_meter(terminal, archive, check_budget(budget))
    share = TOLERANCE if tolerance is None else tolerance
    record, path = _compare_revisions(a, b, subject or "flash_attention", wanted, share, meter, archive, terminal)
    raise typer.Exit(_conclude(terminal, compare_revisions(record), record, path, meter.bill(record)))


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
        terminal.show("", *([bill.receipt()] if bill else []), f"record: {short_path(path)}")
    document = {"comparison": as_plain(comparison), "exit_code": code}
    if record is not None and path is not None:
        document |= {"record": as_plain(record), "path": short_path(path), "cost": bill and bill.as_plain()}
    terminal.document(document)
    return code


def _find_runs(a: str, b: str, archive: Archive) -> tuple[Record, Record] | None:
    """Return the two runs that are meant, or None where two revisions are.

    Raises:
        InputError: one is a run and the other a revision, or it can be either.
        EvidenceError: a run is named that is not there.
    """
    found = [archive.load(key) if archive.has(key) or is_document(key) else None for key in (a, b)]
    try:
        toplevel = find_toplevel(Path.cwd())
    except ProofError:
        toplevel = None
    for key, run in zip((a, b), found, strict=True):
        is_revision = toplevel is not None and find_revision(toplevel, key) is not None
        if run is not None and is_revision:
            hint = "give more of the id, the path of the record, or e.g. refs/heads/NAME"
            raise InputError(f"{key!r} is a run and a revision", hint=hint)
        if run is None and not is_revision:
            where = "" if toplevel else ", and there is no git repository here"
            hint = "flashmoe runs lists the runs; git log the revisions"
            raise InputError(f"{key!r} is neither a run nor a revision{where}", hint=hint)
    one, other = found
    if (one is None) != (other is None):
        hint = "the revisions that runs were made of are in `flashmoe runs --json`"
        raise InputError(f"A and B must be two runs or two revisions, got {a!r} and {b!r}: one of each", hint=hint)
    if one is None or other is None:
        return None
    if one.id == other.id:
        raise InputError(f"A and B are the same run, {one.id}")
    return one, other


def _compare_revisions(
    a: str,
    b: str,
    name: str,
    wanted: dict[str, Any],
    tolerance: float,
    meter: Meter,
    archive: Archive,
    terminal: Terminal,
) -> tuple[Record, Path]:
    """Check both revisions out, prove them, and return the record and where it is."""
    toplevel = find_toplevel(Path.cwd())
    asked = [cast("Asked", find_revision(toplevel, label)) for label in (a, b)]
    for gpu in wanted["gpus"]:
        gpu_named(gpu)
    if has_uncommitted_changes(toplevel):
        terminal.warn("there are uncommitted changes, which are in neither revision", "commit them, and compare HEAD")
    if asked[0].commit == asked[1].commit:
        terminal.warn(f"both are commit {asked[0].commit[:12]}", "what differs between them is noise")
    if isinstance(list_sensors(), NoSensors):
        terminal.warn("no NVIDIA GPU here: both revisions are checked, and no time is compared", "run it on a GPU")
    keeper = make_keeper(terminal, archive.store, archive.repository)
    progress = ChainProgress(terminal, on_start=keeper.begin_gate)
    try:
        with checked_out(toplevel, *asked) as checkouts:
            subject, _ = subjects_at(name, *checkouts)
            request = ProveRequest(subject=subject, meter=meter, **wanted)
            cases = f"({counted(len(request.suite.cases), 'case')})"
            terminal.say(f"comparing {name} on suite {request.suite.name} {cases}: B {b} against A {a}")
            prove_revisions(request, tolerance=tolerance, progress=progress, announce=terminal.say, save=keeper.save)
    except KeyboardInterrupt:
        progress.close()
        if keeper.path is not None:
            terminal.log.print(f"what was finished is in {keeper.place}", soft_wrap=True)
        raise
    finally:
        progress.close()
    assert keeper.path is not None
    assert keeper.record is not None  # which has its line of the ledger of runs begun
    return keeper.record, keeper.path
