"""The verb ``cost``: sum what runs cost, enter a cost, list the prices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..errors import InputError
from ..proof.cost.cost import (
    PACKAGED,
    Rate,
    Sum,
    add_up,
    format_dollars,
    format_duration,
    load_rates,
)
from ..proof.records.evidence import GATE_NAMES
from ..proof.records.ledger import Entry
from ..proof.records.store import Store, find_repository
from .names import moment_named
from .options import Json, Since, StoreName, option
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
    """Sum by day, subject and gate: the time that the runs of the store held a GPU, its price, and costs by hand.

    \b
    Examples:
      flashmoe cost
      flashmoe cost --since 30d --json | jq .total
    """
    if context.invoked_subcommand is not None:
        return
    terminal = Terminal(as_json=as_json)
    rate = load_rates(find_repository()).dollars_per_hour
    entries = Store(store).costs(since=moment_named(since) if since else None, on_trouble=terminal.warn_of)
    sums = {name: _in_order(add_up(entries, key, rate)) for name, key in _KEYS.items()}
    total = add_up(entries, lambda _: "total", rate).get("total", Sum())
    if entries:
        terminal.show(_sums_table({**sums, "": {"total": total}}))
    else:
        terminal.log.print("nothing was spent: no run held a GPU, and nothing was entered by hand")
    by_key = {f"by_{name}": {key: vars(sum_) for key, sum_ in of_name.items()} for name, of_name in sums.items()}
    terminal.document({"total": vars(total), **by_key})


def _sums_table(groups: Mapping[str, Mapping[str, Sum]]) -> RenderableType:
    """Return one row for every sum, under the name of its group."""
    table = Table(box=None, show_edge=False, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for right in (False, True, True, False):
        table.add_column(justify="right" if right else "left", no_wrap=right, overflow="fold")
    for heading, sums in groups.items():
        if table.row_count:
            table.add_row()
        if heading:
            table.add_row(*(Text(word, "bold") for word in (heading, "GPU time", "dollars")))
        for name, total in sums.items():
            time = format_duration(total.gpu_seconds) if total.gpu_seconds else ""
            unpriced = f"and {format_duration(total.unpriced_seconds)} without a rate" if total.unpriced_seconds else ""
            table.add_row(name, time, format_dollars(total.dollars), unpriced)
    return table


def _in_order(sums: dict[str, Sum]) -> dict[str, Sum]:
    """Return sums as they are listed: gates as they run, the rest by name, and costs entered by hand last."""
    order: dict[str, int] = {name: number for number, name in enumerate(GATE_NAMES)}
    return dict(sorted(sums.items(), key=lambda item: (item[0] == _BY_HAND, order.get(item[0], 0), item[0])))


@app.command(short_help="Enter a cost by hand.")
def add(
    dollars: Annotated[float, option("--dollars", "X", "The amount; below 0 for a refund.")],
    note: Annotated[str, option("--note", "TEXT", "What it paid for.")],
    gpu: Annotated[str, option("--gpu", "NAME", "The GPU that it paid for, if any.")] = "",
    date: Annotated[
        str | None, option("--date", "DATE", "When (UTC), or 7d, 12h or 2w ago.", show_default="now")
    ] = None,
    store: StoreName = None,
    as_json: Json = False,
) -> None:
    """Enter a cost that no run knows: a machine that was rented by the hour and idle, a disk, a licence.

    \b
    Example:
      flashmoe cost add --dollars 3.20 --note "an H200 for an hour, idle" --gpu H200
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
    """
    terminal = Terminal(as_json=as_json)
    files = load_rates(find_repository()).files
    for path, file in files.items():
        terminal.show(f"{_place(path)}:", _rates_table(file.gpu | file.other), "")
    gpus, other = (
        [_plain(name, rate, path) for path, file in files.items() for name, rate in getattr(file, kind).items()]
        for kind in ("gpu", "other")
    )
    terminal.document({"gpus": gpus, "other": other})


def _rates_table(rates: Mapping[str, Rate]) -> RenderableType:
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("rate", "dollars an hour", "date", "source"):
        table.add_column(column, justify="right" if "hour" in column else "left", overflow="fold")
    for name, rate in rates.items():
        table.add_row(name, format_dollars(rate.dollars_per_hour), str(rate.date or ""), rate.source)
    return table


def _place(path: Path) -> str:
    return "of flashmoe" if path == PACKAGED else short_path(path)


def _plain(name: str, rate: Rate, path: Path) -> dict[str, Any]:
    return {"name": name, **rate.model_dump(mode="json"), "file": _place(path)}
