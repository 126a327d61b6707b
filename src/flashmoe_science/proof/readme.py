"""The table of speeds in a README: Markdown made from verdicts and the records behind them, and nothing else.

Times and speedups appear only where a claim is about them, so every number on the page has a verdict beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import ProofError
from .changes import FINGERPRINTS_EQUAL
from .claims import Metric
from .evidence import Arm, Record
from .judge import Verdict
from .rows import METRICS, format_bytes, format_ratio, format_seconds, lowest_case
from .verify import read_records, verify_claims

BEGIN, END = "<!-- speeds:begin -->", "<!-- speeds:end -->"


def render_readme(path: Path) -> str:
    """Return the text of the README at ``path`` with the table of speeds of its repository as it should be now.

    Raises:
        ProofError: the file cannot be read, or lacks the two marks.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ProofError(f"{path}: cannot be read: {error.strerror}") from error
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ProofError(f"{path}: expected the lines {BEGIN} and {END}", hint="the table of speeds goes between them")
    repository = path.resolve().parent
    section = speed_section(verify_claims(repository), read_records(repository))
    return f"{before}{BEGIN}\n{section}{END}{after}"


def speed_section(verdicts: Sequence[Verdict], records: Mapping[str, Record]) -> str:
    """Return the verdicts as a table, and below it the speeds behind them, a table for each record and rival.

    Args:
        verdicts: on all claims of the repository.
        records: by path from the repository's root, as ``Verdict.evidence`` names them.
    """
    if not verdicts:
        return "No claim has been made yet.\n"
    lines = ["| claim | verdict | lowest case | geometric mean | evidence |", "| --- | --- | --- | --- | --- |"]
    lines += [_claim_row(verdict) for verdict in verdicts]
    groups: dict[tuple[str, tuple[str, ...]], dict[Metric, list[Verdict]]] = {}
    for verdict in (part for whole in verdicts for part in whole.by_gpu or [whole]):
        if verdict.evidence and any(case.interval for case in verdict.cases):
            by_kind = groups.setdefault((verdict.evidence, verdict.claim.baseline), {})
            by_kind.setdefault(verdict.claim.metric, []).append(verdict)
    for (path, baseline), by_kind in groups.items():
        kinds = {kind: by_kind[kind] for kind in METRICS if kind in by_kind}
        lines += ["", *_case_table(records[path], baseline, kinds)]
    return "\n".join(lines) + "\n"


def _claim_row(verdict: Verdict) -> str:
    lowest = lowest_case(verdict)
    low = f"{format_ratio(lowest.interval)}, {lowest.name}" if lowest else ""
    parts = verdict.by_gpu or [verdict]
    links = [f"[{(part.record or '').partition('-')[0]}]({part.evidence})" for part in parts if part.evidence]
    link = ", ".join(links) or "none"
    # How many files changed changes with every edit, and takes nothing from the verdict.
    counting = [note for note in verdict.notes if not note.endswith(FINGERPRINTS_EQUAL)]
    notes = "; ".join(note.partition(":")[0] for note in counting)  # the reason has all of it
    status = f"**{verdict.status.value}**" + (f" ({notes})" if notes else "")
    return row(verdict.claim.sentence, status, low, format_ratio(verdict.geometric_mean), link)


def _case_table(record: Record, baseline: tuple[str, ...], verdicts: Mapping[Metric, Sequence[Verdict]]) -> list[str]:
    """Return a table of one record against one rival, or the fastest of several: three columns for a kind of time.

    It is folded, where Markdown is shown as a page. A case has a row if a claim is about it.
    """
    subject = record.subject.name
    rival = baseline[0] if len(baseline) == 1 else "best rival" if "memory" in verdicts else "fastest rival"
    header, rule = ["case"], ["---"]
    for kind in verdicts:
        gain = "times less memory" if kind == "memory" else f"speedup, {kind}"
        header += [f"{subject}, {kind}", f"{rival}, {kind}", gain]
        rule += ["---:"] * 3
    lines = ["<details>", f"<summary>{_caption(record, rival)}</summary>", "", row(*header), row(*rule)]
    left_out = 0
    for case in record.cases:
        arms = {arm.name: arm for arm in case.arms}
        found = {
            kind: next((c for verdict in of_kind for c in verdict.cases if c.name == case.name), None)
            for kind, of_kind in verdicts.items()
        }
        if not any(found.values()):
            left_out += 1
            continue
        cells = [case.name]
        for kind, judged in found.items():
            if judged is None or judged.interval is None:
                cells += ["", "", judged.reason if judged else ""]
                continue
            named = f" ({judged.baseline})" if len(baseline) > 1 else ""
            ours, theirs = (_measured(arms[name], kind) for name in (subject, judged.baseline))
            cells += [ours, theirs + named, format_ratio(judged.interval)]
        lines.append(row(*cells))
    if left_out:
        lines += ["", f"{left_out} of {len(record.cases)} cases are in the record, and no claim is about them."]
    return [*lines, "", "</details>"]


def _measured(arm: Arm, metric: Metric) -> str:
    return format_bytes(arm.peak_bytes or 0) if metric == "memory" else format_seconds(arm.rates[metric].seconds)


def _caption(record: Record, rival: str) -> str:
    environment = record.environment
    gpu = environment.gpu.name if environment.gpu else "no GPU"
    names = ("torch", "triton", "cudnn")
    versions = [f"{name} {environment.versions[name]}" for name in names if name in environment.versions]
    where = ", ".join([gpu, *([f"driver {environment.driver}"] if environment.driver else []), *versions])
    commit = f", commit {record.tree.commit[:12]}" if record.tree.commit else ""
    return f"Suite {record.suite} against {rival} on {where}{commit}. Medians of one call; speedups with 95 % intervals"


def row(*cells: str) -> str:
    """Return a row of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
