"""A study for the terminal. It computes nothing: numbers come from the study."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..compare import TOLERANCE, Effect
from ..report import new_table
from ..words import counted
from .suites import SuiteTally
from .trials import Study, Tally, Trial


def study_lines(study: Study, *, verbose: bool = False) -> RenderableType:
    """Return what was studied, a row for every kind of trial, and whether it shows what is required."""
    head = Table.grid(padding=(0, 2, 0, 0))
    head.add_column(no_wrap=True)
    head.add_column(overflow="fold")
    gpu = study.environment.gpu
    settings = study.settings
    how = (
        f"{counted(settings.processes, 'process')} x {counted(settings.rounds, 'round')} of graph time a trial, "
        f"in {counted(len({trial.batch for trial in study.trials}), 'batch')}"
    )
    for label, text in (
        ("study", study.id),
        ("subject", f"{study.subject.name}, {study.case.name} of suite {study.suite}"),
        ("GPU", gpu.name if gpu else "none"),
        ("commit", _commit(study)),
        ("trials", f"{how}; {study.gpu_seconds:.0f} s of the GPU"),
    ):
        head.add_row(Text(label, "dim"), text)
    table = new_table("planted", "as measured", "trials", "what counts", "share", "95 %", "required", "", left=2)
    for tally in study.tallies:
        table.add_row(*_cells(tally))
    parts: list[RenderableType] = [head, "", table, ""]
    parts += [Text(line, "dim") for line in _notes(study)]
    if verbose:
        parts += ["", *study.method, "", _trials(study)]
    return Group(*parts, study_line(study))


def study_line(study: Study) -> RenderableType:
    """Return one line: whether a study shows what is required, and what it shows."""
    word, style = ("holds", "bold green") if study.holds else ("does not hold", "bold red")
    if not study.complete:
        word, style = "incomplete", "bold yellow"
    return Text.assemble((word, style), f"  {last_word(study)} ({study.id})")


def last_word(study: Study) -> str:
    """Return what a study shows, in one line."""
    gpu = study.environment.gpu.name if study.environment.gpu else "no GPU"
    shown = "; ".join(_said(tally) for tally in study.tallies if tally.share)
    reason = "" if study.complete else f"{study.incomplete_reason}; "
    return f"{reason}{gpu}: {shown or 'no trial is finished'}"


def _said(tally: Tally) -> str:
    of = f"{tally.counted} of {tally.sound}"
    if not tally.planted:
        return f"{of} comparisons of a kernel with itself gave a wrong verdict"
    return f"{tally.planted:.0%} more work was seen in {of}"


def _cells(tally: Tally) -> list[str]:
    what = "seen as slower" if tally.planted else "wrong verdicts"
    share = tally.share
    bound = f"at least {tally.required:.0%}" if tally.planted else f"at most {tally.required:.0%}"
    return [
        f"{tally.planted:.0%}" if tally.planted else "nothing",
        "" if tally.slowdown is None else f"{tally.slowdown:+.2%}",
        f"{tally.sound} of {tally.wanted}",
        f"{tally.counted} {what}",
        f"{share.estimate:.1%}" if share else "",
        f"{share.low:.1%} to {share.high:.1%}" if share else "",
        bound,
        "holds" if tally.holds else "too few trials" if tally.sound < tally.wanted else "does not hold",
    ]


def _notes(study: Study) -> list[str]:
    unsound = sum(tally.unsound for tally in study.tallies)
    by_default = "; ".join(
        f"{'nothing' if not tally.planted else f'{tally.planted:.0%}'} {tally.counted_by_default}"
        for tally in study.tallies
    )
    notes = [f"Verdicts with a tolerance of {study.tolerance:.2g}; with that of compare, {TOLERANCE:g}: {by_default}."]
    if unsound:
        notes.append(f"{counted(unsound, 'trial')} unsound and not counted: a control failed, or an arm was not timed.")
    return notes


def _trials(study: Study) -> RenderableType:
    table = new_table("trial", "planted", "A / B", "95 %", "B is", "", left=1)
    for trial in study.trials:
        table.add_row(*_trial_cells(trial))
    return table


def _trial_cells(trial: Trial) -> list[str]:
    found = trial.ratio
    effect = trial.effect.value if trial.effect is not None else "not finished"
    return [
        trial.name,
        f"{trial.planted:.0%}",
        f"{found.estimate:.4f}" if found else "",
        f"{found.low:.4f} to {found.high:.4f}" if found else "",
        effect if found or trial.effect is None else "unsound",
        trial.reason if trial.effect is Effect.UNDECIDED and not found else "",
    ]


def suite_lines(tally: SuiteTally) -> RenderableType:
    """Return a row for every comparison of a baseline with its copy over a whole suite, and what they show."""
    table = new_table("run", "GPU", "time", "cases", "processes", "wrong", "the same", left=3)
    for trial in tally.trials:
        counts = (trial.cases, trial.processes, len(trial.wrong), trial.same)
        table.add_row(trial.run, trial.gpu, trial.metric, *map(str, counts))
    return Group(table, "", suite_line(tally))


def suite_line(tally: SuiteTally) -> RenderableType:
    """Return one line: in how many comparisons over a suite any verdict is wrong."""
    if tally.share is None:
        return Text("no run has a control in two cases or more, with enough rounds")
    words = {True: ("holds", "bold green"), False: ("does not hold", "bold red"), None: ("too few", "bold yellow")}
    of = counted(len(tally.trials), "comparison")
    between = f"95 %: {tally.share.low:.1%} to {tally.share.high:.1%}; required: at most {tally.required:.0%}"
    said = f"{tally.counted} of {of} of a baseline with itself over a suite gave a wrong verdict ({between})"
    same = f"in {tally.same} all cases were shown to be the same within {TOLERANCE:.0%}"
    return Text.assemble(words[tally.holds], f"  {counted(tally.runs, 'run')}: {said}; {same}")


def _commit(study: Study) -> str:
    commit = study.environment.commit or "not known"
    dirty = {True: ", with uncommitted changes", False: "", None: ", not known whether clean"}[study.environment.dirty]
    return f"{commit[:12]}{dirty if study.environment.commit else ''}"
