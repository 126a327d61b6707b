"""The verb ``compare``: two revisions of this repository."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InputError
from ..proof.compare.compare import TOLERANCE, compare_revisions, exit_code
from ..proof.compare.revisions import (
    Asked,
    checked_out,
    find_revision,
    find_toplevel,
    has_uncommitted_changes,
    prove_revisions,
    subjects_at,
)
from ..proof.gates import ProveRequest
from ..proof.measure.nvml import NoSensors, list_sensors
from ..proof.records.evidence import Record, Settings
from ..proof.records.store import Archive, Store, find_repository
from ..proof.report.terminal import comparison_lines
from ..proof.subject.suites import load_suite
from ..proof.text import counted
from .names import gpu_named
from .options import Gpus, Json, Metric, Seed, StoreName, SuiteName, argument, option, split, times_of
from .run_shared import as_typed, check_budget, make_keeper, make_meter
from .terminal import ChainProgress, Terminal, as_plain, short_path

# Three show a large difference. Fewer than six rarely show that a dozen cases are the same within 1 %.
PROCESSES = 6


def compare(
    context: typer.Context,
    a: Annotated[str, argument("A", "A revision of this git repository.")],
    b: Annotated[str, argument("B", "The one that is compared with A.")],
    # By name: typer 0.27.0 takes the metavar for the name where they differ only in case.
    subject: Annotated[str, option("--subject", "SUBJECT", "One of ours, or a kernel.toml.")] = "flash_attention",
    suite: SuiteName = "seed",
    metric: Annotated[
        list[Metric] | None, option("--time", "KIND", "kernel, graph or wall; repeat it. Default: graph.")
    ] = None,
    tolerance: Annotated[float, option("", "SHARE", "The smallest effect that matters.", min=0, max=1)] = TOLERANCE,
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

    Both are checked out and built apart, both must be correct, and their rounds are interleaved in one run.

    \b
    Examples:
      flashmoe compare main HEAD
      flashmoe compare HEAD~1 HEAD --subject my_kernel/kernel.toml --time graph --time wall

    \b
    Exit codes:
      0  nothing is slower             3  a revision failed a gate
      1  something is slower           4  undecided, or nothing was measured
      2  wrong usage                   130  interrupted
    """
    terminal, archive = Terminal(as_json=as_json), Archive(Store(store), find_repository())
    toplevel = find_toplevel(Path.cwd())
    asked = _find(toplevel, a), _find(toplevel, b)
    settings = Settings(times=times_of(metric) or ["graph"], processes=processes, rounds=rounds, seed=seed)
    about = {"suite": load_suite(suite), "gpus": split(gpu), "command": as_typed(context.obj or [])}
    meter = make_meter(terminal, archive, check_budget(budget))
    wanted = {**about, "baselines": [], "settings": settings, "meter": meter}
    record, path = _compare_revisions(toplevel, asked, subject, wanted, tolerance, archive, terminal)
    comparison, bill = compare_revisions(record), meter.bill(record)
    code = exit_code(comparison)
    terminal.show("", comparison_lines(comparison), "")
    terminal.show(*([bill.receipt()] if bill else []), f"record: {short_path(path)}")
    document = {"comparison": as_plain(comparison), "exit_code": code, "record": as_plain(record)}
    terminal.document({**document, "path": short_path(path), "cost": bill and bill.as_plain()})
    raise typer.Exit(code)


def _find(repository: Path, label: str) -> Asked:
    """Return a revision. Raises ``InputError`` where there is none."""
    if (found := find_revision(repository, label)) is None:
        hint = "git log lists the revisions; `flashmoe report RUN RUN` shows two runs on one page"
        raise InputError(f"{label!r} is no revision of {repository}", hint=hint)
    return found


def _compare_revisions(
    toplevel: Path,
    asked: tuple[Asked, Asked],
    name: str,
    wanted: dict[str, Any],
    tolerance: float,
    archive: Archive,
    terminal: Terminal,
) -> tuple[Record, Path]:
    """Check both revisions out, prove them, and return the record and where it is."""
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
            request = ProveRequest(subject=subject, **wanted)
            cases = f"({counted(len(request.suite.cases), 'case')})"
            terminal.say(
                f"comparing {name} on suite {request.suite.name} {cases}: B {asked[1].label} against A {asked[0].label}"
            )
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
