"""The verb ``cost`` and those under it: add, rates."""

# ruff: noqa: D301 - the character \b in a docstring tells typer to keep the lines of a paragraph apart

from __future__ import annotations

from typing import Annotated, Optional

import typer

from .options import Json, StoreName

app = typer.Typer(add_completion=False, rich_markup_mode=None, invoke_without_command=True)

Since = Annotated[
    Optional[str],  # noqa: UP045 - typer reads this on Python 3.10
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
        Optional[str],  # noqa: UP045
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
