"""Costs for the terminal: estimate and bill of a run, sums of the ledger, rates. It computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .cost import Bill, Rate, Sum, format_dollars, format_duration


def announcement(bill: Bill) -> str:
    """Return the estimated cost of a run, and its source."""
    expected = bill.estimate
    assert expected is not None  # it is announced when it was made
    price = f" at {format_dollars(bill.dollars_per_hour)} an hour" if bill.dollars_per_hour is not None else ""
    time = f"{format_duration(expected.total)} of {bill.gpu}{price}"
    return f"cost: about {_priced(bill, expected.total, time)}, by {expected.source}"


def receipt(bill: Bill) -> str:
    """Return the cost of a run."""
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
    }
    price = {"gpu": bill.gpu, "dollars_per_hour": bill.dollars_per_hour}
    return {**price, "gpu_seconds": spent, "dollars": bill.dollars(spent), "estimate": about}


def sums_table(groups: Mapping[str, Mapping[str, Sum]]) -> RenderableType:
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


def rates_table(rates: Mapping[str, Rate]) -> RenderableType:
    """Return one row for every price."""
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("rate", "dollars an hour", "date", "source"):
        table.add_column(column, justify="right" if "hour" in column else "left", overflow="fold")
    for name, rate in rates.items():
        table.add_row(name, format_dollars(rate.dollars_per_hour), str(rate.date or ""), rate.source)
    return table
