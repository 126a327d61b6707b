"""A study counts right: on times that are made up, where the answer is known, and on a simulated GPU as a whole."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from flashmoe_science.errors import EvidenceError, InputError, ProofError
from flashmoe_science.proof.compare import Effect, compare_revisions
from flashmoe_science.proof.evidence import read_text
from flashmoe_science.proof.schedule import derived_seed
from flashmoe_science.proof.statistics import proportion_interval
from flashmoe_science.proof.study.report import study_lines
from flashmoe_science.proof.study.run import run_study
from flashmoe_science.proof.study.trials import (
    Calibration,
    Study,
    as_record,
    is_study,
    read_study,
    study_files,
    write_study,
)

from .builders import H200
from .chain import environment_with
from .studies import CALL_S, CYCLE_S, MadeUp, OnSimulatedGpu, request, series, study_of


def number(trial):
    return int(trial.rpartition("-")[2])


def biased(*numbers, by=1.03, arm="b"):
    """Make one arm slower in these trials of every batch, though nothing was planted."""
    return lambda trial, process, name: (
        by if name == arm and trial != "calibration" and number(trial) in numbers else 1.0
    )


def test_the_interval_of_clopper_and_pearson():
    found = proportion_interval(10, 200)
    assert (found.estimate, found.n) == (0.05, 200)
    assert (found.low, found.high) == pytest.approx((0.02423, 0.09003), abs=1e-5)  # of published tables
    assert proportion_interval(0, 20).low == 0.0
    assert proportion_interval(0, 20).high == pytest.approx(1 - 0.025 ** (1 / 20))
    assert proportion_interval(20, 20).high == 1.0
    assert proportion_interval(20, 20).low == pytest.approx(0.025 ** (1 / 20))
    with pytest.raises(InputError, match="got 3 of 2"):
        proportion_interval(3, 2)


def test_what_is_shown_of_a_study_can_be_read():
    study, _ = study_of(MadeUp(), series(4))
    written = io.StringIO()
    Console(width=200, file=written).print(study_lines(study))
    text = written.getvalue()
    assert "3 processes x 10 rounds of graph time a trial, in 2 batches; 60 s of the GPU" in text
    assert "comparisons of a kernel with itself gave a wrong verdict" in text


def test_a_kernel_with_itself_and_planted_work_are_counted_apart():
    study, _ = study_of(MadeUp(), series(40, 10, 10))
    same, three, one = study.tallies
    assert study.complete
    assert study.holds
    assert same.sound >= 40
    assert same.counted <= 2
    assert (three.counted, one.counted) == (three.sound, one.sound)
    assert three.slowdown == pytest.approx(0.03, abs=1e-3)
    assert one.slowdown == pytest.approx(0.01, abs=1e-3)
    assert same.slowdown == pytest.approx(0.0, abs=1e-3)
    # Within the tolerance of compare half of the 1 % is "the same".
    assert three.counted_by_default == three.sound
    assert one.counted_by_default <= one.counted


def test_wrong_verdicts_are_counted_in_both_directions_and_nothing_else_is():
    factor = biased(0, 1)
    faster = biased(2, by=0.97)
    study, _ = study_of(MadeUp(lambda *at: factor(*at) * faster(*at), spread=1e-4), series(20))
    (same,) = study.tallies
    wrong = [trial for trial in study.trials if number(trial.name) in (0, 1, 2)]
    assert [trial.effect for trial in wrong] == [Effect.SLOWER, Effect.SLOWER, Effect.FASTER] * 2
    others = sum(t.effect in (Effect.SLOWER, Effect.FASTER) for t in study.trials if t.sound and t not in wrong)
    assert same.counted == 6 + others
    assert same.share is not None
    assert same.share.estimate == same.counted / same.sound
    assert not same.holds
    assert not study.holds
    assert study.complete


def test_planted_work_that_makes_it_faster_is_not_seen():
    study, _ = study_of(MadeUp(lambda _trial, _process, arm: 0.9 if arm == "b" else 1.0), series(0, 10))
    (three,) = study.tallies
    assert (three.counted, three.effects[Effect.FASTER]) == (0, three.sound)
    assert not three.holds


def test_a_trial_whose_control_fails_is_unsound_and_made_up_for():
    first_batch = biased(0, 1, by=1.05, arm="a#2")
    run = MadeUp(lambda trial, *at: first_batch(trial, *at) if trial[0] in "01" else 1.0, spread=1e-3)
    study, _ = study_of(run, series(20))
    (same,) = study.tallies
    unsound = [trial for trial in study.trials if not trial.sound]
    assert {"0-0-0", "0-0-1", "1-0-0", "1-0-1"} <= {trial.name for trial in unsound}
    assert all(trial.effect is Effect.UNDECIDED for trial in unsound)
    assert "the control failed" in unsound[0].reason
    assert same.unsound == len(unsound)
    assert max(trial.batch for trial in study.trials) == 2  # a further one
    assert same.sound >= 20
    assert study.complete


def test_a_study_whose_trials_stay_unsound_is_incomplete():
    study, saved = study_of(MadeUp(biased(*range(99), by=1.05, arm="a#2")), series(6))
    assert not study.complete
    assert study.incomplete_reason.startswith("too many trials were unsound: there are 0 of 6")
    assert saved[-1] == study
    assert max(trial.batch for trial in study.trials) == 3


def test_the_verdict_of_a_trial_is_that_of_compare():
    study, _ = study_of(MadeUp(), series(6, 2))
    for trial in study.trials:
        comparison = compare_revisions(as_record(study, trial), ["graph"], tolerance=0.0)
        assert (trial.effect, trial.ratio) == (comparison.effect, comparison.cases[0].ratio)


def test_an_offset_of_processes_that_is_larger_than_the_noise_makes_no_verdicts():
    """Of rounds alone nearly every trial would be faster or slower; compare looks at the processes too."""

    def offset(trial, process, arm):
        return 1.0 + 0.01 * (derived_seed(trial, process, 7) % 3 - 1) if arm == "b" else 1.0

    study, _ = study_of(MadeUp(offset, spread=1e-3), series(30))
    assert study.tallies[0].counted <= 3


def test_batches_share_no_process_and_every_process_has_an_order_of_its_own():
    run = MadeUp()
    study, _ = study_of(run, series(20))
    orders = {payload["process"]: [trial["name"] for trial in payload["trials"]] for payload in run.payloads}
    assert sorted(orders) == [0, 1, 2, 3, 4, 5]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]
    assert not set(orders[0]) & set(orders[3])
    for trial in study.trials:
        assert trial.rounds is not None
        assert set(trial.rounds.process) == {3 * trial.batch + number for number in range(3)}


def test_nothing_spins_where_nothing_is_planted_and_both_do_elsewhere():
    run = MadeUp()
    study_of(run, series(2, 2))
    cycles = {trial["name"]: trial["cycles"] for payload in run.payloads for trial in payload["trials"]}
    assert cycles["0-0-0"] == (0, 0)
    a, b = cycles["0-0.03-0"]
    assert a == 2_000
    assert (b - a) * CYCLE_S == pytest.approx(0.03 * (CALL_S + a * CYCLE_S), rel=0.02)


def test_a_calibration_that_shows_nothing_is_an_error():
    assert Calibration(extra_cycles=100, seconds=1.0, seconds_with=2.0).cycles_for(0.5) == 50
    with pytest.raises(ProofError, match="40000 clock cycles more must take longer"):
        study_of(MadeUp(lambda _t, _p, arm: 0.1 if arm == "b" else 1.0), series(0, 2))


def test_a_crash_keeps_what_was_finished_and_the_study_goes_on_with_the_rest(tmp_path):
    broken, _ = study_of(MadeUp(crash_at=4), series(12))
    assert (broken.complete, broken.incomplete_reason) == (False, "process 4: killed by SIGKILL")
    done = {trial.name: trial for trial in broken.trials if trial.effect is not None}
    assert {trial.batch for trial in done.values()} == {0}
    again = read_study(write_study(broken, tmp_path))
    run = MadeUp()
    whole, _ = study_of(run, series(12), resume=again)
    assert [payload["process"] for payload in run.payloads] == [4, 5]
    assert len(run.payloads[0]["trials"]) == len(run.payloads[1]["trials"]) - 2  # two came before the crash
    assert whole.complete
    assert whole.id == broken.id
    assert {trial.name: trial for trial in whole.trials if trial.batch == 0} == done


def test_an_interrupted_study_is_saved_with_what_came_before():
    def interrupted(task, payload, *, timeout_s, on_event):
        if payload["process"] == 1:
            raise KeyboardInterrupt
        return MadeUp()(task, payload, timeout_s=timeout_s, on_event=on_event)

    saved: list[Study] = []
    with pytest.raises(KeyboardInterrupt):
        run_study(request(series(4)), environment_with(H200), say=lambda _: None, save=saved.append, run=interrupted)
    assert saved[-1].incomplete_reason == "interrupted"
    assert all(trial.rounds is not None for trial in saved[-1].trials if trial.batch == 0)


def test_no_process_begins_that_would_pass_the_seconds():
    run = MadeUp()
    study, _ = study_of(run, series(12), seconds=35.0)
    assert [payload["process"] for payload in run.payloads] == [0, 1, 2]  # 10 s each
    assert study.incomplete_reason == "a further process would pass its 35 s of a GPU, of which 5 s are left"
    assert study.gpu_seconds == 30.0


def test_a_study_of_another_kernel_or_card_is_not_gone_on_with():
    study, _ = study_of(MadeUp(), series(4))
    other = study.model_copy(update={"subject": study.subject.model_copy(update={"sources": []})})
    with pytest.raises(EvidenceError, match=r"cannot be gone on with: sources is another one here"):
        study_of(MadeUp(), series(4), resume=other)
    card = study.environment.model_copy(update={"gpu": H200.model_copy(update={"uuid_hash": "other"})})
    with pytest.raises(EvidenceError, match="card is another one here"):
        study_of(MadeUp(), series(4), resume=study.model_copy(update={"environment": card}))


def test_a_study_needs_a_gpu():
    with pytest.raises(InputError, match="no NVIDIA GPU here"):
        run_study(request(series(2)), environment_with(None), say=lambda _: None, save=lambda _: None, run=MadeUp())


@pytest.fixture
def written(tmp_path):
    """Return a study as its file, and a way to change what the file says."""
    study, _ = study_of(MadeUp(), series(8, 2))
    path = write_study(study, tmp_path / "evidence" / "studies")

    def change(edit):
        document = json.loads(read_text(path))
        edit(document)
        path.write_text(json.dumps(document))

    return study, path, change


def test_a_study_reads_back_as_it_was(written, tmp_path):
    study, path, _ = written
    assert read_study(path) == study
    assert is_study(path)
    assert study_files(tmp_path) == [path]


def test_a_verdict_that_the_samples_do_not_show_is_found(written):
    _, path, change = written
    change(lambda document: document["trials"][0].update(effect="slower"))
    with pytest.raises(EvidenceError, match=r"trial 0-0-0 says slower .*, and its samples show (undecided|faster)"):
        read_study(path)


def test_a_count_that_the_samples_do_not_show_is_found(written):
    _, path, change = written
    change(lambda document: document["tallies"][0].update(counted=7))
    with pytest.raises(EvidenceError, match="it counts 7 of"):
        read_study(path)


def test_trials_that_were_left_out_are_missed(written):
    _, path, change = written

    def leave_out(document):
        document["trials"] = [trial for trial in document["trials"] if trial["planted"]]
        document["tallies"][0].update(counted=0, sound=0)

    change(leave_out)
    with pytest.raises(EvidenceError, match="said to be complete with 0 of 8 sound trials"):
        read_study(path)


def test_a_file_that_is_no_study_says_which_key(tmp_path):
    path = tmp_path / "study.json"
    path.write_text('{"kind":"study"}')
    with pytest.raises(EvidenceError, match=r"study\.json: key \w+: Field required"):
        read_study(path)


def test_the_whole_path_on_a_simulated_gpu():
    """The harness's own rounds, captures, checks of answers, intervals and verdicts, on kernels that vary by 0.3 %."""
    study, _ = study_of(OnSimulatedGpu(), series(10, 4, 4), batches=1)
    same, three, one = study.tallies
    assert study.complete
    assert study.calibration is not None
    assert study.calibration.seconds_per_cycle == pytest.approx(CYCLE_S, rel=0.05)
    assert same.counted <= 1
    assert three.counted == three.sound
    assert three.slowdown == pytest.approx(0.03, abs=4e-3)
    assert one.slowdown == pytest.approx(0.01, abs=4e-3)
    assert study.case.input_sets > 1


def test_a_trial_whose_answers_are_wrong_is_unsound_with_the_reason():
    def wrong(gpu):
        def entry(x):
            return 3 * x

        return entry

    study, _ = study_of(OnSimulatedGpu(entry=wrong), series(1), batches=1)
    assert {trial.effect for trial in study.trials} == {Effect.UNDECIDED}
    assert "its answer is off by" in study.trials[0].reason
    assert study.trials[0].rounds is None
    assert not study.complete
