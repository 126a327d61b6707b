"""Tests of the verb diagnose: what it asks for, what it prints, its files and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashmoe_science.proof.diagnose.gather import CannotObserveError
from flashmoe_science.proof.diagnose.observations import Diagnosis, TimedBaseline, Times
from flashmoe_science.proof.records.evidence import Gate, GateStatus

from ..proof.builders import H200
from ..proof.chain import environment_with
from ..proof.diagnose.made_up import observe, serial_story


@pytest.fixture
def wishes():
    """Return what was asked to be observed."""
    return []


@pytest.fixture
def diagnose_with(run, monkeypatch, wishes):
    """Run ``flashmoe diagnose`` on a made-up GPU whose observations are these."""

    def diagnose_with(found, *args, gpu=H200):
        def observe_here(wish, _here, *, say):
            wishes.append(wish)
            say("launches of 8 calls")
            if isinstance(found, CannotObserveError):
                raise found
            return found

        monkeypatch.setattr("flashmoe_science.cli.diagnose.describe_apart", lambda: environment_with(gpu))
        monkeypatch.setattr("flashmoe_science.proof.diagnose.gather.observe_here", observe_here)
        return run("diagnose", *args)

    return diagnose_with


def test_the_causes_come_before_the_hypotheses(diagnose_with):
    story = serial_story().model_copy(
        update={"baselines": [TimedBaseline(name="sdpa", times=Times(graph=9e-6, wall=15e-6))]}
    )
    code, out, err = diagnose_with([story])
    lines = out.splitlines()
    assert (code, err) == (0, "launches of 8 calls\n")
    assert lines[0] == "diagnosing flash_attention: b8_h4_s128_d64_fp16"
    assert lines[2] == "made up on H200: 571.2 us a call, 566.2 us of it the GPU's; sdpa 15.00 us, 9.000 us"
    assert lines[3] == "  attend_kernel: grid 8x1x1, 384 threads, 78 registers, 40.0 KiB shared memory, 566.2 us"
    assert lines[5] == "Causes, by the part of a call that each is shown to explain:"
    assert lines[6].startswith(" 1.  grid too small (93%, 530.8 us): 8 blocks of attend_kernel for 132 SMs")
    assert lines[7].startswith("     try: give the idle SMs work")
    assert lines[8].startswith("     at most: 14.53x (the same work spread evenly over all SMs")
    assert lines[9].startswith(" 2.  serial loop (92%")
    assert "The shares of grid too small, serial loop, no tensor-core instructions overlap" in out
    words = [line.split("  ")[1] for line in lines if line.startswith(("  confirmed", "  cannot", "  ruled"))]
    assert words == sorted(words, key=["confirmed", "cannot tell", "ruled out"].index)
    assert len(words) == 14


def test_the_options_are_passed_on(diagnose_with, wishes):
    args = ("forward_triton", "--suite", "seed", "-b", "sdpa-flash", "--no-counters", "--seed", "7")
    assert diagnose_with([serial_story()], *args)[0] == 0
    (wish,) = wishes
    assert len(wish.cases) == 13
    assert (wish.subject.name, list(wish.baselines), wish.counters, wish.seed) == (
        "forward_triton", ["sdpa-flash"], False, 7
    )  # fmt: skip


def test_json_and_the_file_hold_all_that_was_observed(diagnose_with):
    code, out, err = diagnose_with([serial_story()], "--json", "-o", "why.json")
    document = json.loads(out)
    assert document["exit_code"] == code == 0
    assert document["diagnosis"]["cases"][0]["causes"][0] == "grid too small"
    kept = Diagnosis.model_validate_json(Path("why.json").read_text())
    assert kept.cases[0].observations == serial_story()
    assert kept.command == "flashmoe diagnose --json -o why.json"
    assert err.startswith("diagnosing flash_attention")


def test_a_call_that_was_not_timed_is_inconclusive(diagnose_with):
    lost = observe(device=None, missing={"times": "its answer is off by 0.3, allowed are 0.01"})
    code, out, _ = diagnose_with([serial_story(), lost])
    assert code == 4
    assert "not timed: its answer is off by 0.3" in out


def test_a_kernel_that_cannot_be_built_fails_its_gate(diagnose_with):
    gate = Gate(
        name="build", status=GateStatus.FAILED, summary="the build command exited with status 1", hint="mend it"
    )
    gate = gate.model_copy(update={"details": ["error: no such header"]})
    code, out, _ = diagnose_with(CannotObserveError(gate))
    assert code == 3
    assert out.splitlines()[-3:] == [
        "gate failed   build: the build command exited with status 1",
        "  error: no such header",
        "hint: mend it",
    ]
    code, out, _ = diagnose_with(CannotObserveError(gate), "--json")
    assert json.loads(out)["diagnosis"]["failed"]["name"] == "build"


def test_another_gpu_than_the_one_here_is_planned_for(diagnose_with, monkeypatch):
    asked = []

    def plan_for(wish, spec, why, *, say):
        asked.append((spec.name, why))
        return [observe(device=None, missing={"times": why})]

    monkeypatch.setattr("flashmoe_science.proof.diagnose.gather.plan_for", plan_for)
    assert diagnose_with([serial_story()], "--gpu", "L4")[0] == 4
    assert diagnose_with([serial_story()], "--gpu", "L4", gpu=None)[0] == 4
    assert diagnose_with([serial_story()], "--gpu", "H200")[0] == 0
    assert asked == [("L4", "the GPU here is another one: NVIDIA H200"), ("L4", "no GPU here")]


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        (["flash_atention"], "there is no file or folder 'flash_atention'", "did you mean flash_attention"),
        (
            ["--case", "b1_h1"],
            "the packaged suites of attention have no case 'b1_h1'",
            "`flashmoe suites SUITE` lists the cases",
        ),
        (
            ["--case", "b1_h16_s512", "--suite", "seed"],
            "suite seed has no case 'b1_h16_s512'",
            "did you mean b1_h1_s512_d64_fp16? `flashmoe suites seed` lists the cases",
        ),
        (["--suite", "sede"], "suite must be one of", "did you mean seed?"),
        (["--baseline", "sdap"], "baseline must be one of", "did you mean sdpa?"),
        (["--gpu", "H20"], "gpu must be one of", "no other is known"),
        (["missing.toml"], "missing.toml: cannot be read", ""),
    ],
)
def test_diagnose_suggests_the_nearest_name(run, args, error, hint):
    code, out, err = run("diagnose", *args)
    assert (code, out) == (2, "")
    assert error in err
    assert hint in err
