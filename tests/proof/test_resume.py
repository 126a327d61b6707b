"""Going on with an interrupted run: what is kept, what runs again, and what may not be pooled. No time was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashmoe_science.errors import EvidenceError
from flashmoe_science.proof.gates import chain, run
from flashmoe_science.proof.judge.claims import Claim
from flashmoe_science.proof.judge.judge import VerdictStatus, judge
from flashmoe_science.proof.records.evidence import Record, Settings

from .chain import (
    GPU,
    HONEST,
    SHORT,
    Recorder,
    environment_with,
    gate_of,
    request_of,
    run_chain,
    statuses,
)

CASES = [replace(SHORT, seqlen_q=size) for size in (65, 66, 67)]
FULL = Settings()  # what a claim needs
STEPS = [(process, kinds) for process in range(3) for kinds in (["graph", "wall"], ["kernel"])]


class PreemptedError(Exception):
    """The machine is gone."""


def request(settings=FULL, subject=HONEST, **changes):
    return request_of(subject, *CASES, settings=settings.model_copy(update={"seed": 7}), **changes)


def interrupted(gpu, *, step, case, **changes):
    """Return the last record of a run whose machine is lost before case number ``case`` of measuring step ``step``."""
    steps = 0

    def crash(payload, index):
        nonlocal steps
        if payload["settings"]["rounds"] == 5:  # gate quick
            return ""
        steps += index == 0
        if (steps - 1, index) >= (step, case):
            raise PreemptedError
        return ""

    gpu.crash = crash
    recorder = Recorder()
    with pytest.raises(PreemptedError):
        run_chain(request(**changes), recorder)
    gpu.crash = lambda payload, index: ""
    gpu.calls.clear()
    return recorder.saved[-1]


def cells(record: Record) -> list[list[tuple[int, ...]]]:
    """Return which processes measured each case, a list for each kind of process."""
    return [[tuple(rounds.process) for rounds in case.rounds] for case in record.cases]


def measured(gpu):
    """Return what the bench measured: process, kinds of time, cases."""
    return [
        (payload["process"], payload["times"], [case["name"][6:9] for case in payload["cases"]])
        for name, payload in gpu.calls
        if name == "measure"
    ]


@pytest.mark.parametrize(("step", "case"), [(0, 1), (1, 2), (3, 0), (5, 2)])
def test_only_what_is_missing_is_measured_and_the_whole_is_what_one_run_gives(gpu, step, case):
    old = interrupted(gpu, step=step, case=case)
    assert not old.complete
    record = run_chain(request(resume=old))
    names = ["s65", "s66", "s67"]
    missing = [(*STEPS[step], names[case:]), *((*later, names) for later in STEPS[step + 1 :])]
    assert [(p, kinds, [n.rstrip("_") for n in found]) for p, kinds, found in measured(gpu)] == missing
    assert record.complete
    assert set(statuses(record).values()) == {"passed"}
    assert cells(record) == cells(run_chain(request()))
    assert all(arm.status == "measured" for each in record.cases for arm in each.arms)


def test_processes_that_wide_intervals_asked_for_are_gone_on_with(gpu):
    def unsteady(payload, case):
        shift = 1 + 0.05 * (-1) ** payload["process"]
        for times in case["rounds"]["seconds"].values():
            times["fake_attention"] = [shift * time for time in times["fake_attention"]]
        return case

    gpu.change = unsteady
    settings = Settings(times=["kernel"], width=0.02)
    old = interrupted(gpu, step=4, case=1, settings=settings)  # the second of the three more processes
    record = run_chain(request(resume=old, settings=settings))
    names = ["s65", "s66", "s67"]
    assert [(p, [n.rstrip("_") for n in found]) for p, _, found in measured(gpu)] == [(4, names[1:]), (5, names)]
    assert [sorted(set(rounds)) for (rounds,) in cells(record)] == [[0, 1, 2, 3, 4, 5]] * 3


def test_finished_cases_are_kept_as_they_are_and_rounds_say_which_run_took_them(gpu):
    old = interrupted(gpu, step=5, case=2)  # all of the last case's kernel time in its last process is missing
    gpu.seconds = {"fake_attention": 4e-3, "sdpa": 8e-3, "sdpa#2": 8e-3}
    record = run_chain(request(resume=old))
    assert record.id != old.id
    assert [resumed.run for resumed in record.resumed] == [old.id]
    for kept, before in zip(record.cases[:2], old.cases[:2], strict=True):
        assert kept.arms == before.arms
        assert [r.seconds for r in kept.rounds] == [r.seconds for r in before.rounds]
        assert [r.session for r in kept.rounds] == [[1] * 30, [1] * 30]
    graph, kernel = record.cases[2].rounds
    assert graph.session == [1] * 30
    assert kernel.session == [1] * 20 + [0] * 10
    assert kernel.seconds["kernel"]["sdpa"] == [2e-3] * 20 + [8e-3] * 10


def test_what_proves_the_machine_runs_again_for_the_missing_cases_only(gpu):
    old = interrupted(gpu, step=5, case=2)
    recorder = Recorder()
    record = run_chain(request(resume=old), recorder)
    asked = [(name, len(payload["cases"])) for name, payload in gpu.calls]
    again = [("capture_launches", 1), ("check_correct", 1), ("check_answers", 1), ("measure", 1)]
    assert asked == [*again, ("measure_alone", 3), ("measure_alone", 3)]
    assert recorder.started == [gate.name for gate in record.gates]
    assert f"as run {old.id} showed it" in gate_of(record, "quick").details
    assert gate_of(record, "correct").summary.startswith("3 of 3 cases on the GPU")
    assert gate_of(record, "bench").summary.startswith("3 cases, 30 rounds each in 3 processes")
    assert gate_of(record, "bench").summary.endswith(f"; 2 cases kept from {old.id}")
    assert recorder.notes[0] == f"going on with {old.id}: 2 of 3 cases finished, 17 of 18 measurements"


def test_a_run_that_lacks_nothing_but_its_end_is_finished_without_measuring(gpu):
    old = interrupted(gpu, step=5, case=2)
    whole = run_chain(request(resume=old))
    cut = whole.model_copy(update={"complete": False, "incomplete_reason": "the run has not ended"})
    gpu.calls.clear()
    record = run_chain(request(resume=cut))
    assert gpu.calls == []
    assert record.complete
    assert record.cases[2].rounds[1].session == [2] * 20 + [1] * 10
    assert [resumed.run for resumed in record.resumed] == [whole.id, old.id]


def test_a_resumed_run_can_be_interrupted_and_resumed_again(gpu):
    first = interrupted(gpu, step=1, case=1)
    second = interrupted(gpu, step=2, case=1, resume=first)
    assert not second.complete
    record = run_chain(request(resume=second))
    assert record.complete
    assert cells(record) == cells(run_chain(request()))
    assert {s for case in record.cases for r in case.rounds for s in r.session} == {0, 1, 2}


def test_a_resumed_run_can_demonstrate_a_claim_and_the_interrupted_one_cannot(gpu):
    gpu.seconds = {"fake_attention": 3e-3, "sdpa": 6e-3, "sdpa#2": 6e-3}
    old = interrupted(gpu, step=4, case=1)
    claim = Claim(
        id="it",
        sentence="It is.",
        subject="fake_attention",
        baseline=("sdpa",),
        suite="made-up",
        metric="graph",
        factor=1.5,
        gpu=("H200",),
        scope="each case",
    )
    suite = {case.name: case.problem for case in old.cases}
    assert judge(claim, old, suite=suite).status is VerdictStatus.INCONCLUSIVE
    record = run_chain(request(resume=old))
    assert judge(claim, record, suite=suite).status is VerdictStatus.DEMONSTRATED


def test_a_missing_case_that_is_wrong_loses_the_times_that_it_had(gpu, monkeypatch):
    old = interrupted(gpu, step=5, case=2)
    honest = gpu._check_correct

    def wrong(payload, on_event):
        def failing(event):
            on_event({**event, "case": {**event["case"], "status": "failed", "reason": "wrong"}})

        result = honest(payload, failing)
        cases = [{**case, "status": "failed", "reason": "wrong"} for case in result.data["cases"]]
        return replace(result, data={**result.data, "cases": cases})

    monkeypatch.setattr(gpu, "_check_correct", wrong)
    record = run_chain(request(resume=old))
    assert statuses(record)["correct"] == "failed"
    assert (record.cases[2].correct, record.cases[2].rounds) == (False, [])
    assert {arm.status for arm in record.cases[2].arms} == {"failed", "not measured"}
    assert len(record.cases[0].rounds) == 2


# What may not be pooled.


def refused(gpu, monkeypatch, old, environment=None, **changes):
    if environment is not None:
        monkeypatch.setattr(chain, "_read_environment", lambda: environment)
    recorder = Recorder()
    with pytest.raises(EvidenceError) as caught:
        run_chain(request(resume=old, **changes), recorder)
    assert gpu.calls == []
    assert recorder.saved == []
    return str(caught.value)


def with_gpu(**changes):
    return environment_with(GPU.model_copy(update=changes))


HERE = environment_with(GPU)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (with_gpu(uuid_hash="b2"), "environment.gpu.uuid_hash is absent in it, and b2 here"),
        (with_gpu(power_limit_w=500.0), "environment.gpu.power_limit_w is absent in it, and 500.0 here"),
        (HERE.model_copy(update={"driver": "580.1"}), "environment.driver is absent in it, and 580.1 here"),
        (HERE.model_copy(update={"commit": "a" * 40}), f"environment.commit is absent in it, and {'a' * 40} here"),
        (HERE.model_copy(update={"dirty": True}), "the tree here had uncommitted changes"),
    ],
)
def test_another_machine_is_refused_with_the_field_and_both_values(gpu, monkeypatch, environment, said):
    old = interrupted(gpu, step=1, case=1)
    message = refused(gpu, monkeypatch, old, environment)
    assert message.startswith(f"run {old.id} cannot be resumed: ")
    assert said in message
    assert "`flashmoe prove` without --resume starts anew" in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"settings": FULL.model_copy(update={"rounds": 20})}, "settings.rounds is 10 in it, and 20 here"),
        ({"baselines": ["picky"]}, "baselines is ['sdpa'] in it, and ['picky'] here"),
        ({"expect": 3.0}, "expected speedup is absent in it, and 3.0 here"),
        ({"subject": replace(HONEST, sources=("chain.py",))}, "source fake_operator.py is "),
        ({"subject": replace(HONEST, name="other")}, "subject.name is fake_attention in it, and other here"),
    ],
)
def test_another_run_is_refused_with_the_field_and_both_values(gpu, monkeypatch, changes, said):
    old = interrupted(gpu, step=1, case=1)
    assert said in refused(gpu, monkeypatch, old, **changes)


def test_other_cases_another_seed_and_changed_sources_are_refused(gpu, monkeypatch):
    old = interrupted(gpu, step=1, case=1)
    other = old.model_copy(update={"cases": old.cases[:2], "settings": old.settings.model_copy(update={"seed": 8})})
    message = refused(gpu, monkeypatch, other)
    assert "settings.seed is 8 in it, and 7 here" in message
    assert message.partition("\n")[0].endswith("; case b1_h3_s67_d64_fp16 differs too")
    source = old.subject.sources[0].model_copy(update={"sha256": "0" * 64})
    changed = old.model_copy(update={"subject": old.subject.model_copy(update={"sources": [source]})})
    assert "source fake_operator.py is 000000000000 in it" in refused(gpu, monkeypatch, changed)


def test_a_complete_run_and_one_whose_sources_changed_under_it_are_refused(gpu, monkeypatch):
    old = interrupted(gpu, step=1, case=1)
    whole = old.model_copy(update={"complete": True, "incomplete_reason": ""})
    assert "is complete: nothing is missing" in refused(gpu, monkeypatch, whole)
    reason = f"{run.CHANGED_SOURCES}: a.py"
    changed = old.model_copy(update={"incomplete_reason": reason})
    assert f"its sources {reason}" in refused(gpu, monkeypatch, changed)
