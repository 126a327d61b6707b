@@@V
"""The verb ``cost`` and those under it: add, rates."""

# ruff: noqa: D301 - the character \b in a docstring tells typer to keep the lines of a paragraph apart

from __future__ import annotations

from typing import Annotated, Optional

import typer

from .options import Json, StoreName

@@@I
"""The verb ``cost``: sum the ledger, enter a cost, list the prices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from ..errors import InputError
from ..proof.cost import (
    HISTORY,
    Entry,
    PastRun,
    Saving,
    Sum,
    add_up,
    dollars,
    format_dollars,
    saving,
    spent_seconds,
)
from ..proof.cost_report import rates_table, savings_line, sums_table
from ..proof.evidence import GATE_NAMES, Record
from ..proof.kinds import kinds_of
from ..proof.meter import history_of
from ..proof.rates import PACKAGED, Rate, Rates, load_rates
from ..proof.soundness import failed_gate
from ..proof.store import Archive, Store, entries_of, find_repository, summarize
from ..proof.words import counted
from .names import moment_named
from .terminal import Terminal, short_path

_BY_HAND = "entered by hand"

_KEYS: dict[str, Callable[[Entry], str]] = {
    "day": lambda entry: entry.at[:10],
    "subject": lambda entry: entry.subject or _BY_HAND,
    "gate": lambda entry: entry.gate or _BY_HAND,
}
@@@B
app = typer.Typer(add_completion=False, rich_markup_mode=None, invoke_without_command=True)

Since = Annotated[
    str | None,
    typer.Option("--since", metavar="DATE", help="Only costs since this date (UTC), or since 7d, 12h or 2w ago."),
]


@app.callback()
def cost(
    context: typer.Context,
    since: Since = None,
    store: StoreName = None,
    as_json: Json = False,
) -> None:
    """Sum the ledger by day, subject and gate: the time that runs held a GPU, at its price, and costs entered by hand.

    Then what early gates saved: for every run that failed at a gate, the estimated time of the gates after it.

    \b
    Examples:
      flashmoe cost
      flashmoe cost --since 30d --json | jq .total

    \b
    Exit codes:
      0  summed    2  the store or a rates.toml cannot be read
    """
    if context.invoked_subcommand is not None:
        return
    from .costing import run_cost

    raise typer.Exit(run_cost(since=since, store=store, as_json=as_json))


@app.command(short_help="Enter a cost by hand.")
def add(
    dollars: Annotated[float, typer.Option("--dollars", metavar="X", help="How much; less than 0 for a refund.")],
    note: Annotated[str, typer.Option("--note", metavar="TEXT", help="What for.")],
    gpu: Annotated[str, typer.Option("--gpu", metavar="NAME", help="The GPU that it was for, if any.")] = "",
    date: Annotated[
        str | None,
        typer.Option("--date", metavar="DATE", help="When (UTC), or 7d, 12h or 2w ago.", show_default="now"),
    ] = None,
    store: StoreName = None,
    as_json: Json = False,
) -> None:
    """Enter a cost that no run can know of: a machine that was rented by the hour and stood idle, a disk, a licence.

    \b
    Example:
      flashmoe cost add --dollars 3.20 --note "an H200 for an hour, idle" --gpu H200

    \b
    Exit codes:
      0  entered    2  wrong usage, or the store cannot be written
    """
    from .costing import run_cost_add

    raise typer.Exit(run_cost_add(dollars, note=note, gpu=gpu, date=date, store=store, as_json=as_json))


@app.command(short_help="List the prices that hold here.")
def rates(as_json: Json = False) -> None:
    """List what an hour of each GPU costs, and which file says so.

    Asked first is rates.toml of this repository, then ~/.config/flashmoe/rates.toml, then what comes with flashmoe.

    \b
    Example:
      flashmoe cost rates

    \b
    Exit codes:
      0  listed    2  a rates.toml is wrong
    """
    from .costing import run_cost_rates

    raise typer.Exit(run_cost_rates(as_json=as_json))


def run_cost(*, since: str | None, store: str | None, as_json: bool) -> int:
    """Print the sums of the ledger, and what early gates saved."""
    terminal = Terminal(as_json=as_json)
    repository = find_repository()
    rates = load_rates(repository)
    moment = moment_named(since) if since else None
    kept = Store(store)
    archive = Archive(kept, repository)
    loose = _not_stored(archive, moment, terminal)
    entries = [*kept.ledger(since=moment), *(entry for record in loose for entry in entries_of(record))]
    sums = {name: _in_order(add_up(entries, key, rates.dollars_per_hour)) for name, key in _KEYS.items()}
    total = add_up(entries, lambda _: "total", rates.dollars_per_hour).get("total", Sum())
    savings = _savings(archive, moment, loose)
    if not entries:
        terminal.log.print("nothing was spent: no run held a GPU, and nothing was entered by hand")
    else:
        terminal.show(sums_table({**sums, "": {"total": total}}))
    if savings:
        amount, seconds = _worth(savings, rates)
        terminal.show("", savings_line(savings, amount, seconds))
    if loose:
        what = f"{counted(len(loose), 'run')} of evidence/ that the store does not have"
        terminal.log.print(f"{what}, at the prices of now\nhint: flashmoe import evidence/ keeps them there")
    terminal.document(
        {
            "total": vars(total),
            **{f"by_{name}": {k: vars(v) for k, v in of_name.items()} for name, of_name in sums.items()},
            "saved": [vars(one) for one in savings],
            "not_in_store": [record.id for record in loose],
        }
    )
    return 0


def _in_order(sums: dict[str, Sum]) -> dict[str, Sum]:
    """Return sums as they are listed: gates as they run, the rest by name, and what was entered by hand last."""
    order: dict[str, int] = {name: number for number, name in enumerate(GATE_NAMES)}
    return dict(sorted(sums.items(), key=lambda item: (item[0] == _BY_HAND, order.get(item[0], 0), item[0])))


def _not_stored(archive: Archive, since: datetime | None, terminal: Terminal) -> list[Record]:
    """Return the runs that held a GPU and are in evidence/ alone."""
    records = archive.only_in_files(on_trouble=terminal.warn_of)
    return [r for r in records if spent_seconds(r) > 0 and (since is None or r.created_at >= since)]


def _savings(archive: Archive, since: datetime | None, loose: Sequence[Record]) -> list[Saving]:
    """Return what every run saved that failed early, by the times of all runs that are known here."""
    store = archive.store
    histories: dict[tuple[str, str, str], list[PastRun]] = {}
    found = []
    stored = [store.document(run.id) for run in store.runs(since=since) if run.gpu and run.result.endswith(" failed")]
    for record in [*stored, *(one for one in loose if failed_gate(one.gates))]:
        run = summarize(record)
        alike = (run.subject, run.suite, run.gpu)
        if alike not in histories:
            histories[alike] = history_of(archive, record, most=HISTORY)
        if (saved := saving(record, histories[alike], kinds_of(record))) is not None:
            found.append(saved)
    return found


def _worth(savings: list[Saving], rates: Rates) -> tuple[float, float]:
    """Return the dollars and the seconds of all savings. Time on a GPU without a rate is worth nothing known."""
    priced = [(one.gpu_seconds, rates.dollars_per_hour(one.gpu)) for one in savings]
    return sum(dollars(seconds, rate) for seconds, rate in priced if rate), sum(seconds for seconds, _ in priced)


def run_cost_add(amount: float, *, note: str, gpu: str, date: str | None, store: str | None, as_json: bool) -> int:
    """Enter a cost by hand."""
    terminal = Terminal(as_json=as_json)
    if not math.isfinite(amount):
        raise InputError(f"dollars must be a number, got {amount}")
    kept = Store(store)
    entry = kept.add_cost(amount, note=note, gpu=gpu, at=moment_named(date, what="date") if date else None)
    terminal.show(f"{kept}: {format_dollars(amount)} on {entry.at[:10]}, {note}")
    terminal.document({"entry": vars(entry)})
    return 0


def run_cost_rates(*, as_json: bool) -> int:
    """Print the prices that hold here."""
    terminal = Terminal(as_json=as_json)
    rates = load_rates(find_repository())
    for group in (*rates.gpus, *([one] for one in rates.others)):
        if group:
            terminal.show(f"{_place(group[0])}:", rates_table(group), "")
    gpus = [_plain(one) for file in rates.gpus for one in file]
    terminal.document({"gpus": gpus, "other": [_plain(one) for one in rates.others]})
    return 0


def _place(rate: Rate) -> str:
    return "of flashmoe" if rate.file == PACKAGED else short_path(rate.file)


def _plain(rate: Rate) -> dict[str, Any]:
    return {**vars(rate), "file": _place(rate)}
