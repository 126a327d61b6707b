"""The verb ``cost``: what the runs of the store have cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..proof.cost.cost import Sum, add_up, format_dollars, format_duration, load_rates
from ..proof.records.evidence import GATE_NAMES
from ..proof.records.store import Archive, RunSummary, Store, find_repository
from .names import moment_named
from .options import Json, Since, StoreName
from .terminal import Terminal, short_path

_KEYS: dict[str, Callable[[RunSummary, str], str]] = {
    "day": lambda run, _: run.created_at[:10],
    "subject": lambda run, _: run.subject,
    "gate": lambda _, gate: gate,
}


def cost(since: Since = None, store: StoreName = None, as_json: Json = False) -> None:
    """Sum by day, subject and gate: the time that the runs of the store held a GPU, and its price.

    Prices come from rates.toml of this repository, ~/.config/flashmoe/rates.toml, and the list that comes with
    flashmoe, in this order.

    \b
    Examples:
      flashmoe cost
      flashmoe cost --since 30d --json | jq .total
    """
    terminal, rates = Terminal(as_json=as_json), load_rates(find_repository())
    runs = Archive(Store(store), None).runs(since=moment_named(since) if since else None, on_trouble=terminal.warn_of)
    rate = rates.dollars_per_hour
    sums = {name: _in_order(add_up(runs, key, rate)) for name, key in _KEYS.items()}
    total = add_up(runs, lambda *_: "total", rate).get("total")
    if total:
        terminal.show(_sums_table({**sums, "": {"total": total}}))
        used = {gpu: rates.file_of(gpu) for gpu in dict.fromkeys(run.gpu for run in runs if run.gpu_seconds)}
        terminal.show("", *(f"price of {gpu}: {short_path(file)}" for gpu, file in used.items() if file))
    else:
        terminal.log.print("nothing was spent: no run held a GPU")
    by_key = {f"by_{name}": {key: vars(sum_) for key, sum_ in of_name.items()} for name, of_name in sums.items()}
    terminal.document({"total": vars(total or Sum()), **by_key})


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
            unpriced = f"and {format_duration(total.unpriced_seconds)} without a rate" if total.unpriced_seconds else ""
            table.add_row(name, format_duration(total.gpu_seconds), format_dollars(total.dollars), unpriced)
    return table


def _in_order(sums: dict[str, Sum]) -> dict[str, Sum]:
    """Return sums as they are listed: gates as they run, the rest by name."""
    order: dict[str, int] = {name: number for number, name in enumerate(GATE_NAMES)}
    return dict(sorted(sums.items(), key=lambda item: (order.get(item[0], 0), item[0])))
