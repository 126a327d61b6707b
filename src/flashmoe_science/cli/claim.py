"""The verb ``claim``: write claims from a run, and judge them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ClaimError
from ..proof.judge import claims as claim_files
from ..proof.judge.claims import add_claims, load_claims
from ..proof.judge.consistency import Consistency
from ..proof.judge.judge import Verdict, exit_code
from ..proof.judge.limits import PROCESSES_OF_A_CLAIM, fewest_processes
from ..proof.judge.new_claim import ClaimRequest, make_claims, way_out
from ..proof.judge.verify import read_records, verify_claim
from ..proof.records.documents import record_path, write_record
from ..proof.records.store import Archive, Store, find_repository
from ..proof.report.terminal import count_line
from .exit_codes import INCONCLUSIVE
from .options import Json, Metric, Run, StoreName, flag, option, split
from .terminal import Terminal, as_plain, short_path

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.callback()
def claim() -> None:
    """Write claims, which `flashmoe verify` judges.

    \b
    Example:
      flashmoe claim new 20261120 --time graph --time wall
    """


@app.command("new", short_help="Write a claim from a run.")
def new(
    run: Run,
    metric: Annotated[
        list[Metric] | None, option("--time", "KIND", "Claim kernel, graph or wall time; repeat it. Default: graph.")
    ] = None,
    factor: Annotated[
        float | None, option("--factor", "X", "The speedup. Default: the largest round figure that the run shows.")
    ] = None,
    baseline: Annotated[
        list[str] | None, option("--baseline -b", "NAME", "Repeat it for the fastest of several. Default: the first.")
    ] = None,
    cases: Annotated[
        list[str] | None, option("--cases", "PATTERN", "Only cases whose names match, e.g. '*_d64_*'; repeat it.")
    ] = None,
    mean: Annotated[bool, flag("--mean", "Claim the geometric mean over the cases, not each case.")] = False,
    memory: Annotated[
        bool, flag("--memory", "Claim the peak bytes that a call allocates, besides any --time.")
    ] = False,
    gpu: Annotated[str, option("--gpu", "NAME", "Words of the GPU's name. Default: its model.")] = "",
    claim_id: Annotated[str, option("--id", "ID", "Default: made from subject, suite, time and GPU.")] = "",
    file: Annotated[
        Path | None, option("--file", "FILE", "In claims/; default: the subject's name.", show_default=False)
    ] = None,
    asserted: Annotated[bool, flag("--asserted", "Write it although the evidence does not demonstrate it.")] = False,
    store: StoreName = None,
    as_json: Json = False,
) -> None:
    """Write claims from a run into claims/, and print the verdict of `flashmoe verify`.

    A claim that the evidence does not demonstrate is not written. The default factor is the largest round figure
    (1, 1.1 ... 1.9, 2, 2.5 ... 4.5, 5, 6 ... 9, times a power of ten) below the lower end of the interval.

    \b
    Examples:
      flashmoe claim new 20261120
      flashmoe claim new 20261120 --time wall --factor 1.5 --id my-kernel-wall

    \b
    Exit codes:
      0  written                       3  a gate failed in the run
      1  refuted: not written          4  not demonstrated: not written
      2  wrong usage                      (--asserted writes it, and returns the same)
    """
    times: list[claim_files.Metric] = [m.value for m in metric or ()]
    request = ClaimRequest(
        kinds=[*times, "memory"] if memory else times,
        baselines=split(baseline),
        scope="geometric mean" if mean else "each case",
        cases=cases or (),
        factor=factor,
        gpu=gpu,
        id=claim_id,
    )
    raise typer.Exit(_write_claims(run, request, file=file, asserted=asserted, store=store, as_json=as_json))


def _write_claims(
    key: str, request: ClaimRequest, *, file: Path | None, asserted: bool, store: str | None, as_json: bool
) -> int:
    """Write claims from a run and return what ``verify`` would return for them alone."""
    terminal = Terminal(as_json=as_json)
    repository = find_repository() or Path.cwd()
    record = Archive(Store(store), repository).load(key)
    claims = make_claims(record, request)
    path = _claim_file(file, repository, record.subject.name)
    records = read_records(repository)
    kept = next((where for where, other in records.items() if other.id == record.id), None)
    records[kept or record_path(Path("evidence"), record.id).as_posix()] = record
    taken = {claim.id for claim in load_claims(repository / "claims")}
    if known := [claim.id for claim in claims if claim.id in taken]:
        raise ClaimError(f"there is a claim {known[0]!r} in claims/ already", hint="--id names another")
    consistency = Consistency(repository, records, Store(store).begun())
    verdicts = [verify_claim(claim, records, repository, consistency=consistency) for claim in claims]
    few = min(filter(None, (fewest_processes(claim, record) for claim in claims)), default=PROCESSES_OF_A_CLAIM)
    code = exit_code(verdicts, strict=True)
    too_few = code == 0 and few < PROCESSES_OF_A_CLAIM
    code = INCONCLUSIVE if too_few else code
    written = asserted or code == 0
    if written:
        if kept is None:  # a claim is judged by the records of the repository, and this one was in the store alone
            write_record(record, record_path(repository / "evidence", record.id))
        add_claims(path, claims)
    terminal.show_verdicts(verdicts, why=True)
    terminal.show(*_judged_by_another(verdicts, record.id))
    where, ids = short_path(path), ", ".join(claim.id for claim in claims)
    terminal.show("", f"{where}: {ids} written" if written else f"nothing was written to {where}", count_line(verdicts))
    if not written:
        hints = dict.fromkeys(filter(None, (way_out(verdict, record, repository) for verdict in verdicts)))
        if too_few:
            said = (
                f"a new claim needs {PROCESSES_OF_A_CLAIM} processes, as fewer miss slow modes, and the run has {few}"
            )
            hints[f"{said}: prove --processes {PROCESSES_OF_A_CLAIM}"] = None
        terminal.log.print(f"hint: {'; '.join([*hints, '--asserted writes it all the same'])}", soft_wrap=True)
    plain = [as_plain(verdict) for verdict in verdicts]
    terminal.document({"path": where, "written": written, "verdicts": plain, "exit_code": code})
    return code


def _claim_file(file: Path | None, repository: Path, subject: str) -> Path:
    """Return the claim file: the one that was named, in claims/ where it is a bare name, or one for the subject."""
    folder = repository / "claims"
    if file is None:
        return folder / (re.sub(r"[^a-z0-9_.-]+", "-", subject.lower()) + ".toml")
    path = file.with_suffix(".toml") if file.suffix != ".toml" else file
    path = folder / path if path.parent == Path() else Path.cwd() / path
    if path.parent.resolve() != folder.resolve():
        raise ClaimError(f"file must be in {short_path(folder)}, got {file}", hint="flashmoe verify reads no other")
    return path


def _judged_by_another(verdicts: list[Verdict], run: str) -> list[str]:
    """Return a note for each other run that decides: the newest run that fits a claim does."""
    others = dict.fromkeys(verdict.record for verdict in verdicts if verdict.record not in (None, run))
    said = "a claim goes by the newest complete run that fits it, unless it pins others (key evidence)"
    return [f"judged by run {other}, and not by {run}: {said}" for other in others]
