"""The command line of ``flashmoe``: its verbs, each imported when it is called, so ``--help`` is quick."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

from .. import __version__
from .names import check_name

# Verb: its function, or the Typer of a group of verbs, and its line of help.
VERBS = {
    "prove": ("prove:prove", "Take a kernel from its sources to a verdict."),
    "init": ("init:init", "Write the files of a first trial."),
    "compare": ("compare:compare", "Compare two revisions, or two runs."),
    "diagnose": ("diagnose:diagnose", "Find out why a kernel is slow."),
    "history": ("history:history", "Find where a subject became faster or slower."),
    "verify": ("show:verify", "Judge every claim of this repository."),
    "claim": ("claim:app", "Write a claim from a run."),
    "lint": ("lint:lint", "Find figures in Markdown that name no claim."),
    "show": ("show:show", "Show a run again."),
    "report": ("report:report", "Make a page about a run, or several."),
    "runs": ("show:runs", "List the runs that are kept here."),
    "import": ("records:import_", "Take records into the store."),
    "export": ("records:export", "Write runs to files."),
    "sign": ("records:sign", "Sign records with an SSH key."),
    "cost": ("cost:app", "Show what runs have cost."),
    "explain": ("explain:explain", "Show the kernel that serves a call, on any GPU."),
    "doctor": ("show:doctor", "Show what this machine has and lacks."),
    "suites": ("show:suites", "List the suites, or the cases of one."),
    "baselines": ("show:baselines", "List the baselines, and which can run here."),
    "readme": ("show:readme", "Write the tables of speeds into README.md and pages."),
}


class _Verbs(TyperGroup):
    """Imports the module of a verb when the verb is called, and lists all verbs without importing any."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        if cmd_name not in VERBS:
            check_name("verb", cmd_name, VERBS)
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
