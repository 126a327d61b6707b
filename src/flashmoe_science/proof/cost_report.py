"""Costs for the terminal: what a run is going to cost and has cost, and the sums of the ledger. It computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .cost import Saving, Sum, format_dollars, format_duration
from .meter import Bill
from .rates import Rate
from .words import counted


def announcement(bill: Bill) -> str:
    """Return what a run is going to cost, and how that is known."""
    expected = bill.estimate
    assert expected is not None  # it is announced when it was made
    off = f"; such estimates missed by {expected.off_by - 1:.0%} (median)" if expected.off_by is not None else ""
    price = f" at {format_dollars(bill.dollars_per_hour)} an hour" if bill.dollars_per_hour is not None else ""
    time = f"{format_duration(expected.total)} of {bill.gpu}{price}"
    return f"cost: about {_priced(bill, expected.total, time)}, by {expected.source}{off}"


def receipt(bill: Bill) -> str:
    """Return what a run has cost."""
    spent = bill.spent_seconds or 0.0
    text = f"cost: {_priced(bill, spent, f'{format_duration(spent)} of {bill.gpu}')}"
    if bill.estimate is None:
        return text
    about = bill.dollars(bill.estimate.total)
    return f"{text}; estimated {format_duration(bill.estimate.total) if about is None else format_dollars(about)}"


def _priced(bill: Bill, seconds: float, time: str) -> str:
    amount = bill.dollars(seconds)
    return f"{time} (no rate for it in rates.toml)" if amount is None else f"{format_dollars(amount)} ({time})"


def bill_as_plain(bill: Bill | None) -> dict[str, Any] | None:
    """Return a bill as plain JSON values."""
    if bill is None:
        return None
    spent, expected = bill.spent_seconds or 0.0, bill.estimate
    about = expected and {
        "gpu_seconds": expected.total,
        "dollars": bill.dollars(expected.total),
        "gates": dict(expected.gpu_seconds),
        "source": expected.source,
        "runs": expected.runs,
        "off_by": expected.off_by,
    }
    price = {"gpu": bill.gpu, "dollars_per_hour": bill.dollars_per_hour}
    return {**price, "gpu_seconds": spent, "dollars": bill.dollars(spent), "estimate": about}


def sums_table(groups: Mapping[str, Mapping[str, Sum]]) -> RenderableType:
    """Return one row for every sum, under the name of its group."""
    table = Table(box=None, show_edge=False, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(overflow="fold")
    for _ in range(2):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
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


def savings_line(savings: Sequence[Saving], dollars: float, seconds: float) -> str:
    """Return what gates that failed early saved."""
    gates = ", ".join(sorted({saving.gate for saving in savings}))
    return (
        f"saved: about {format_dollars(dollars)} ({format_duration(seconds)}) in {counted(len(savings), 'run')} "
        f"that failed at {gates}: the estimated time of the gates after those"
    )


def rates_table(rates: Sequence[Rate]) -> RenderableType:
    """Return one row for every price."""
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("rate", "dollars an hour", "date", "source"):
        table.add_column(column, justify="right" if "hour" in column else "left", overflow="fold")
    for rate in rates:
        table.add_row(rate.name, format_dollars(rate.dollars_per_hour), rate.date, rate.source)
    return table
