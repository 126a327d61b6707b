"""Tests of the progress of a long run, with and without a terminal."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from flashmoe_science.cli.terminal import ChainProgress, Terminal
from flashmoe_science.proof.records.evidence import Gate, GateStatus

from ..proof.builders import build_gates


def test_what_is_being_done_is_shown_on_a_terminal_and_nowhere_else(capsys):
    terminal = Terminal()
    with terminal.doing() as say:
        say("judging claim 1 of 2")
    assert capsys.readouterr() == ("", "")
    written = on_a_terminal(terminal)
    with terminal.doing() as say:
        say("judging claim 1 of 2")
        terminal.log.print("a warning")
    assert "judging claim 1 of 2" in written.getvalue()
    assert "a warning" in written.getvalue()


class Clock:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def on_a_terminal(terminal):
    """Give ``terminal`` a log of 100 columns that takes itself for a terminal; return what is written there."""
    file = io.StringIO()
    terminal.log = Console(file=file, width=100, force_terminal=True, color_system=None, legacy_windows=False)
    return file


def test_without_a_terminal_a_line_says_how_far_it_is_every_ten_seconds(capsys, clock):
    progress = ChainProgress(Terminal(), clock=clock)
    progress.start("build")
    for step in range(1, 61):
        clock.now += 1
        progress.advance(step, 60, f"kernel {step}")
    assert capsys.readouterr().err.splitlines() == [
        "build: 10/60 (50 s left) kernel 10",
        "build: 20/60 (40 s left) kernel 20",
        "build: 30/60 (30 s left) kernel 30",
        "build: 40/60 (20 s left) kernel 40",
        "build: 50/60 (10 s left) kernel 50",
        "build: 60/60 kernel 60",
    ]


def test_a_hint_is_said_once(capsys):
    gates = [Gate(name=name, status=GateStatus.NOT_POSSIBLE, hint="look here") for name in ("quick", "bench")]
    progress = ChainProgress(Terminal())
    for gate in gates:
        progress.start(gate.name)
        progress.finish(gate)
    assert capsys.readouterr().out.count("hint: look here") == 1


def test_under_json_the_gates_are_log(capsys):
    progress = ChainProgress(Terminal(as_json=True))
    progress.start("sources")
    progress.finish(build_gates()[0])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sources  passed")


def test_on_a_terminal_a_bar_shows_count_time_left_and_label(capsys):
    terminal = Terminal()
    file = on_a_terminal(terminal)
    progress = ChainProgress(terminal)
    progress.start("build")
    progress.advance(12, 48, "forward D=64 fp16, with a label that is too long for what is left of one hundred columns")
    assert progress._bar is not None
    progress._bar.refresh()
    bar = file.getvalue().splitlines()[-1]
    progress.finish(build_gates()[1])
    assert "build" in bar
    assert re.search(r"12/48 +[\d-]+:[\d-]{2} ", bar)
    assert "forward D=64" in bar
    assert bar.rstrip().endswith("…")
    assert len(bar.rpartition("\r")[2].replace("\033[2K", "")) <= 100
    assert capsys.readouterr().out.startswith("build    passed")


def test_square_brackets_are_text_and_not_markup(capsys):
    Terminal().show("2.31x [2.28, 2.35] [bold]")
    assert capsys.readouterr().out == "2.31x [2.28, 2.35] [bold]\n"
