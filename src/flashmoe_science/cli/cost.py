"""The verb ``cost``: sum the ledger, enter a cost, list the prices."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InputError
from ..proof.cost.cost import PACKAGED, Rate, Sum, add_up, format_dollars, load_rates, spent_seconds
from ..proof.cost.terminal import rates_table, sums_table
from ..proof.records.evidence import GATE_NAMES
from ..proof.records.ledger import Entry
from ..proof.records.store import Archive, Store, find_repository
from ..proof.text import counted
from .names import moment_named
from .options import Json, Since, StoreName
from .terminal import Terminal, short_path

_BY_HAND = "entered by hand"
_KEYS: dict[str, Callable[[Entry], str]] = {
    "day": lambda entry: entry.at[:10],
    "subject": lambda entry: entry.subject or _BY_HAND,
    "gate": lambda entry: entry.gate or _BY_HAND,
}

app = typer.Typer(add_completion=False, rich_markup_mode=None, invoke_without_command=True)


@app.callback()
def cost(context: typer.Context, since: Since = None, store: StoreName = None, as_json: Json = False) -> None:
    """Sum the ledger by day, subject and gate: the time that runs held a GPU, its price, and costs entered by hand.

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
    terminal = Terminal(as_json=as_json)
    repository = find_repository()
    rate = load_rates(repository).dollars_per_hour
    moment = moment_named(since) if since else None
    archive = Archive(Store(store), repository)
    unstored = [
        record
        for record in archive.only_in_files(on_trouble=terminal.warn_of)
        if spent_seconds(record) > 0 and (moment is None or record.created_at >= moment)
    ]
    entries = archive.store.ledger(since=moment)
    sums = {name: _in_order(add_up(entries, key, rate)) for name, key in _KEYS.items()}
    total = add_up(entries, lambda _: "total", rate).get("total", Sum())
    if entries:
        terminal.show(sums_table({**sums, "": {"total": total}}))
    else:
        terminal.log.print("nothing was spent: no run held a GPU, and nothing was entered by hand")
    if unstored:
        text = f"not counted: {counted(len(unstored), 'run')} of evidence/ that your store lacks"
        terminal.log.print(f"{text}\nhint: flashmoe import evidence/ takes them into it, if you paid for them")
    by_key = {f"by_{name}": {key: vars(sum_) for key, sum_ in of_name.items()} for name, of_name in sums.items()}
    terminal.document({"total": vars(total), **by_key, "not_in_store": [record.id for record in unstored]})


def _in_order(sums: dict[str, Sum]) -> dict[str, Sum]:
    """Return sums as they are listed: gates as they run, the rest by name, and costs entered by hand last."""
    order: dict[str, int] = {name: number for number, name in enumerate(GATE_NAMES)}
    return dict(sorted(sums.items(), key=lambda item: (item[0] == _BY_HAND, order.get(item[0], 0), item[0])))


@app.command(short_help="Enter a cost by hand.")
def add(
    dollars: Annotated[float, typer.Option("--dollars", metavar="X", help="The amount; below 0 for a refund.")],
    note: Annotated[str, typer.Option("--note", metavar="TEXT", help="What it paid for.")],
    gpu: Annotated[str, typer.Option("--gpu", metavar="NAME", help="The GPU that it paid for, if any.")] = "",
    date: Annotated[
        str | None,
        typer.Option("--date", metavar="DATE", help="When (UTC), or 7d, 12h or 2w ago.", show_default="now"),
    ] = None,
    store: StoreName = None,
    as_json: Json = False,
) -> None:
    """Enter a cost that no run knows: a machine that was rented by the hour and idle, a disk, a licence.

    \b
    Example:
      flashmoe cost add --dollars 3.20 --note "an H200 for an hour, idle" --gpu H200

    \b
    Exit codes:
      0  entered    2  wrong usage, or the store cannot be written
    """
    if not math.isfinite(dollars):
        raise InputError(f"dollars must be a number, got {dollars}")
    terminal = Terminal(as_json=as_json)
    kept = Store(store)
    entry = kept.add_cost(dollars, note=note, gpu=gpu, at=moment_named(date, what="date") if date else None)
    terminal.show(f"{kept}: {format_dollars(dollars)} on {entry.at[:10]}, {note}")
    terminal.document({"entry": vars(entry)})


@app.command(short_help="List the prices that apply here.")
def rates(as_json: Json = False) -> None:
    """List the price of an hour of each GPU, and the file that sets it.

    The order is rates.toml of this repository, ~/.config/flashmoe/rates.toml, the list that comes with flashmoe.

    \b
    Example:
      flashmoe cost rates

    \b
    Exit codes:
      0  listed    2  a rates.toml is wrong
    """
    terminal = Terminal(as_json=as_json)
    files = load_rates(find_repository()).files
    for path, file in files.items():
        terminal.show(f"{_place(path)}:", rates_table(file.gpu | file.other), "")
    terminal.document(
        {
            "gpus": [_plain(name, rate, path) for path, file in files.items() for name, rate in file.gpu.items()],
            "other": [_plain(name, rate, path) for path, file in files.items() for name, rate in file.other.items()],
        }
    )


def _place(path: Path) -> str:
    return "of flashmoe" if path == PACKAGED else short_path(path)


def _plain(name: str, rate: Rate, path: Path) -> dict[str, Any]:
    return {"name": name, **rate.model_dump(mode="json"), "file": _place(path)}
