"""The command line of ``flashmoe``: its verbs, each imported when it is called, so ``--help`` is quick."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

from .. import __version__
from .options import Csv, Json, Junit, Metric, Run, Since, StoreName, Trust
from .verbs import VERBS


class _Verbs(TyperGroup):
    """Imports the module of a verb when the verb is called, and lists all verbs without importing any."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        if cmd_name not in VERBS:
            return None
        module, _, name = VERBS[cmd_name][0].partition(":")
        found = getattr(import_module(f".{module}", __package__), name)
        if not isinstance(found, typer.Typer):
            verb, found = found, typer.Typer(add_completion=False, rich_markup_mode=None)
            found.command()(verb)
        command = typer.main.get_command(found)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, text) in VERBS.items()])


app = typer.Typer(
    cls=_Verbs,
    add_completion=False,
    rich_markup_mode=None,  # plain text, as wide as the terminal and the same in a file
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flashmoe {__version__}")
        raise typer.Exit


@app.callback()
def flashmoe(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Prove what a GPU kernel does, and how fast it is.

    \b
    Start here:
      flashmoe prove                  the whole chain for flash_attention, on this machine
      flashmoe prove my_kernel.toml   the same chain for yours
      flashmoe verify                 what this repository claims, and what of it is shown
      flashmoe doctor                 what this machine lacks

    \b
    Exit codes:
      0  everything asked for holds        3  a gate failed
      1  a claim is refuted                4  inconclusive, or without evidence
      2  wrong usage                       130  interrupted
    """


def verify(
    why: Annotated[bool, typer.Option("--why", help="Give the reason of every verdict, also of good ones.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="A stale claim does not hold: 4, and not 0, where one is.")
    ] = False,
    trust: Trust = False,
    as_json: Json = False,
    junit: Junit = None,
) -> None:
    """Judge every claim in claims/ by the records in evidence/. Needs no GPU.

    One line a claim: verdict, sentence, the figure with its 95 % interval, the run that shows it. A claim is
    stale when what it measured has changed since the run that demonstrates it: sources of its subject, unless
    it is about device time and the GPU runs the same.

    \b
    Examples:
      flashmoe verify
      flashmoe verify --strict
      flashmoe verify --json | jq '.verdicts[] | {id: .claim.id, status}'

    \b
    Exit codes:
      0  all hold (or are stale)       3  a gate failed in the run that should show one
      1  one is refuted                4  one is inconclusive, invalid, without evidence,
      2  wrong usage                      or stale under --strict; or there is no claim
    """
    from .show import run_verify

    raise typer.Exit(run_verify(why=why, strict=strict, trusted=trust, junit=junit, as_json=as_json))


def show(
    run: Run,
    metric: Annotated[
        Metric | None,
        typer.Option("--time", metavar="KIND", help="Show speedups of kernel, graph or wall time. Default: graph."),
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Show the peak bytes that a call allocates, in place of times.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also the details of every gate, and the kernels that ran.")
    ] = False,
    store: StoreName = None,
    as_json: Json = False,
    csv: Csv = None,
) -> None:
    """Show a run from the store or from evidence/: its gates, its times, its verdict.

    \b
    Examples:
      flashmoe show 20261120
      flashmoe show evidence/20261120T235959Z-seed-flash_attention-1a2b3c.json.gz --verbose
      flashmoe show 20261120 --time wall
      flashmoe show 20261120 --csv times.csv

    \b
    Exit codes:
      0  shown    2  there is no such run, or it cannot be read
    """
    from .show import run_show

    kind = metric.value if metric else None
    raise typer.Exit(run_show(run, kind=kind, memory=memory, verbose=verbose, csv=csv, store=store, as_json=as_json))


def runs(
    subject: Annotated[str, typer.Option(metavar="NAME", help="Only runs of this subject.")] = "",
    suite: Annotated[str, typer.Option(metavar="NAME", help="Only runs of this suite.")] = "",
    gpu: Annotated[str, typer.Option(metavar="NAME", help="Only runs on a GPU with this in its name.")] = "",
    since: Since = None,
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="At most this many, newest first; 0 for all.")] = 20,
    store: StoreName = None,
    as_json: Json = False,
) -> None:
    """List the runs in the store and in evidence/ of this repository, newest first.

    The store is the folder ~/.local/share/flashmoe/runs, or the one that --store or FLASHMOE_STORE names.

    \b
    Examples:
      flashmoe runs --gpu H200 --suite seed
      flashmoe runs --since 7d --store ~/runs

    \b
    Exit codes:
      0  listed    2  the store cannot be read
    """
    from .show import run_runs

    raise typer.Exit(
        run_runs(subject=subject, suite=suite, gpu=gpu, since=since, limit=limit, store=store, as_json=as_json)
    )


def doctor(as_json: Json = False) -> None:
    """Check GPU, driver, torch, triton, nvcc, Nsight Compute, baselines and clocks; every trouble with a hint.

    \b
    Example:
      flashmoe doctor

    \b
    Exit codes:
      0  checked: a machine that lacks something is no error
    """
    from .show import run_doctor

    raise typer.Exit(run_doctor(as_json=as_json))


def suites(
    name: Annotated[str | None, typer.Argument(metavar="SUITE", help="A packaged suite, or a file.")] = None,
    as_json: Json = False,
) -> None:
    """List the packaged suites, or the cases of one and where each comes from.

    \b
    Examples:
      flashmoe suites
      flashmoe suites seed

    \b
    Exit codes:
      0  listed    2  there is no such suite, or its file is wrong
    """
    from .show import run_suites

    raise typer.Exit(run_suites(name, as_json=as_json))


def baselines(
    operator: Annotated[str, typer.Option(metavar="NAME", help="Baselines of this operator.")] = "attention",
    as_json: Json = False,
) -> None:
    """List the baselines of an operator, each tried in a process of its own: its version, or why it cannot run here.

    \b
    Example:
      flashmoe baselines

    \b
    Exit codes:
      0  listed    2  there is no such operator
    """
    from .show import run_baselines

    raise typer.Exit(run_baselines(operator, as_json=as_json))


def readme(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE",
            help="Default: README.md of this repository, and the pages below docs/ that have marks.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; say whether the tables are current.")] = False,
    as_json: Json = False,
) -> None:
    """Write the tables of speeds, made from claims/ and evidence/, between two marks in README.md and other pages.

    \b
    Each mark is a line of its own:
      <!-- summary:begin -->   <!-- summary:end -->    a row for every run and kind of time that claims are about
      <!-- slower:begin -->    <!-- slower:end -->     a row for every suite in which a baseline is faster somewhere
      <!-- verdicts:begin -->  <!-- verdicts:end -->   a row for every claim
      <!-- cases:begin -->     <!-- cases:end -->      a row for every case, below a heading for each run and baseline

    \b
    Examples:
      flashmoe readme
      flashmoe readme --check
      flashmoe readme docs/results.md

    \b
    Exit codes:
      0  the tables are current    1  --check found one out of date    2  a file lacks the marks
    """
    from .show import run_readme

    raise typer.Exit(run_readme(paths or [], check=check, as_json=as_json))
