"""The verbs of the command line, by names alone: `flashmoe --help` needs the standard library only."""

from __future__ import annotations

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
