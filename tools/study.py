"""Measure how often comparisons are wrong on this GPU: compare a kernel with itself, and with planted work on top.

    python tools/study.py                    200 comparisons of equal kernels, 20 with 3 % and 20 with 1 % more work
    python tools/study.py --same 40 --planted 0
    python tools/study.py --read evidence/studies/ID.json.gz
    python tools/study.py --runs evidence    the controls of recorded runs, over whole suites; needs no GPU

A trial is one comparison as ``flashmoe compare`` makes it: graph time, interleaved rounds of A, B and a second copy of
A (the control), several processes, a tolerance of 0. Equal arms are the same function, captured apart. Planted work is
a spin of known clock cycles after the kernel. A trial whose control fails is unsound and does not count.

Exit codes: 0 the shares of wrong and seen verdicts are as required, 1 they are not, 4 too few sound trials.
"""

from __future__ import annotations

import argparse
import math
import random
import secrets
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field
from scipy.stats import binomtest

from flashmoe_science.errors import FlashmoeError, InputError, ProofError, TooFewRoundsError
from flashmoe_science.proof.compare.compare import Effect, compare_revisions
from flashmoe_science.proof.gates.speed import pool_rounds
from flashmoe_science.proof.judge.familywise import comparison_intervals
from flashmoe_science.proof.judge.judge import paired_log_ratios
from flashmoe_science.proof.judge.rows import kinds_measured
from flashmoe_science.proof.judge.statistics import hodges_lehmann, log_ratios
from flashmoe_science.proof.measure.environment import describe_apart
from flashmoe_science.proof.processes import TaskResult
from flashmoe_science.proof.records.documents import read_record, read_text, record_path, write_document
from flashmoe_science.proof.records.evidence import (
    Arm,
    CaseRecord,
    Compared,
    Environment,
    Model,
    Moment,
    Record,
    Revision,
    Rounds,
    Settings,
    SubjectInfo,
    Work,
)
from flashmoe_science.proof.records.store import record_files
from flashmoe_science.proof.subject.loading import load_subject, operator_of
from flashmoe_science.proof.subject.subject import Subject, hash_sources
from flashmoe_science.proof.subject.suites import SuiteCase, load_suite
from flashmoe_science.proof.worker import Emit, run_task

HOLDS, FAILS, INCONCLUSIVE = 0, 1, 4
A, B, CONTROL = "a", "b", "a#2"  # A is the baseline, B the subject
DEFAULT_CASE = "b2_h16_s1024_d128_bf16"  # some 50 us a call on an H200
BASE_CYCLES = 2_000  # A spins too where B has extra work: then both launch a second kernel
CALIBRATION_CYCLES = 40_000  # 20 us at 2 GHz
SPARE = 0.05  # more trials than wanted, for those that are unsound
WRONG, SEEN = 0.05, {0.03: 0.95, 0.01: 0.5}  # the largest share of wrong verdicts; the smallest of seen work
_TIMEOUT_S = 600.0

Run = Callable[..., TaskResult]


class _Kept(Model):
    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_inf_nan="strings")  # older studies hold more


class Trial(_Kept):
    """One comparison."""

    name: str
    batch: int  # trials of a batch share its processes, and no two batches share one
    planted: float  # the share of A's time that B works longer
    extra_cycles: int = 0
    trouble: str = ""  # why an arm was not measured
    rounds: Rounds | None = None


class Study(_Kept):
    """The trials of one kernel on one GPU."""

    kind: str = "study"
    id: str
    created_at: Moment
    command: str
    incomplete_reason: str = ""
    subject: SubjectInfo
    suite: str
    case: CaseRecord  # without arms and rounds
    environment: Environment
    settings: Settings
    batches: int
    trials: list[Trial] = Field(default_factory=list)


class Tally:
    """The verdicts of all trials with the same planted work."""

    def __init__(self, study: Study, planted: float) -> None:
        trials = [trial for trial in study.trials if trial.planted == planted]
        found = [verdict for trial in trials if (verdict := judge(study, trial)) is not None]
        counted = (Effect.SLOWER,) if planted else (Effect.FASTER, Effect.SLOWER)
        self.planted = planted
        self.unsound = len(trials) - len(found)
        self.sound = len(found)
        self.counted = sum(effect in counted for effect in found)  # wrong verdicts, or work that was seen
        self.share = binomtest(self.counted, self.sound) if self.sound else None
        sampled = [trial.rounds.seconds["graph"] for trial in trials if trial.rounds]
        logs = [value for columns in sampled for value in log_ratios(columns[B], columns[A])]
        tens = [statistics.fmean(logs[i : i + 10]) for i in range(0, len(logs), 10)]
        self.slowdown = math.expm1(hodges_lehmann(tens)) if tens else None

    @property
    def holds(self) -> bool:
        """Return whether the share is as required."""
        if self.share is None:
            return False
        return bool(self.share.statistic >= SEEN[self.planted] if self.planted else self.share.statistic <= WRONG)

    def line(self) -> str:
        """Return the result in one line."""
        what = f"{self.planted:.0%} more work was seen" if self.planted else "equal kernels: a wrong verdict"
        share = "none"
        if self.share is not None:
            between = self.share.proportion_ci()
            share = f"{self.share.statistic:.1%} [{between.low:.1%}, {between.high:.1%}]"
        required = f"at least {SEEN[self.planted]:.0%}" if self.planted else f"at most {WRONG:.0%}"
        measured = "" if self.slowdown is None else f", measured slowdown {self.slowdown:+.2%}"
        verdict = "holds" if self.holds else "does not hold"
        unsound = f", {self.unsound} unsound" if self.unsound else ""
        return f"{what} in {self.counted} of {self.sound}{unsound}: {share}, required {required}: {verdict}{measured}"


def judge(study: Study, trial: Trial) -> Effect | None:
    """Return the verdict of ``flashmoe compare`` on a trial; None: it is unsound, or not finished."""
    processes = range(trial.batch * study.settings.processes, (trial.batch + 1) * study.settings.processes)
    if trial.rounds is None or set(trial.rounds.process) != set(processes):
        return None
    (case,) = compare_revisions(as_record(study, trial), ["graph"], tolerance=0.0).cases
    return case.effect if case.ratio is not None else None


def as_record(study: Study, trial: Trial) -> Record:
    """Return the record that a comparison of two revisions would have left of this trial."""
    arms = [
        Arm(name=B, role="subject", status="measured"),
        Arm(name=A, role="baseline", status="measured"),
        Arm(name=CONTROL, role="control", status="measured"),
    ]
    measured = {"name": trial.name, "correct": True, "arms": arms, "rounds": [trial.rounds]}
    case = CaseRecord(**{**dict(study.case), **measured})
    return Record(
        id=study.id,
        created_at=study.created_at,
        command=study.command,
        complete=True,
        subject=study.subject,
        suite=study.suite,
        baselines=[A],
        environment=study.environment,
        settings=study.settings,
        cases=[case],
        compared=Compared(
            a=Revision(label="A", commit="", arm=A), b=Revision(label="B", commit="", arm=B), tolerance=0.0
        ),
    )


def tallies(study: Study) -> list[Tally]:
    """Return a tally for each amount of planted work, none first."""
    return [Tally(study, planted) for planted in sorted({trial.planted for trial in study.trials})]


class Runner:
    """A study as it grows.

    Args:
        subject: The kernel.
        study: Without trials.
        wanted: How many sound trials, by planted work.
        save: Gets the study after every process.
        run: Runs a task in a process of its own.
    """

    def __init__(
        self,
        subject: Subject,
        study: Study,
        wanted: dict[float, int],
        *,
        save: Callable[[Study], None] = lambda _: None,
        run: Run = run_task,
    ) -> None:
        self.subject, self.study, self.wanted = subject, study, wanted
        self._save, self._run = save, run

    def measure(self) -> Study:
        """Measure all trials, batch after batch. A process that fails ends the study, which says so."""
        cycles = dict.fromkeys(self.wanted, 0)
        if any(self.wanted):
            seconds, per_cycle = self._calibrate()
            cycles = {planted: round(planted * seconds / per_cycle) for planted in self.wanted}
        trials = [
            Trial(name=f"{batch}-{planted:g}-{number}", batch=batch, planted=planted, extra_cycles=cycles[planted])
            for batch in range(self.study.batches)
            for planted, count in self.wanted.items()
            for number in range(math.ceil(count * (1 + SPARE) / self.study.batches))
        ]
        self.study = self.study.model_copy(update={"trials": trials, "incomplete_reason": "it has not ended"})
        try:
            for process in range(self.study.batches * self.study.settings.processes):
                self._measure(process // self.study.settings.processes, process)
                self._save(self.study)
        except (KeyboardInterrupt, ProofError) as error:
            self._end(str(error) or "interrupted")
            return self.study
        short = [tally for tally in tallies(self.study) if tally.sound < self.wanted[tally.planted]]
        reasons = [f"{t.sound} of {self.wanted[t.planted]} trials are sound at {t.planted:.0%}" for t in short]
        self._end("; ".join(reasons))
        return self.study

    def _end(self, reason: str) -> None:
        self.study = self.study.model_copy(update={"incomplete_reason": reason})
        self._save(self.study)

    def _measure(self, batch: int, process: int) -> None:
        todo = [trial for trial in self.study.trials if trial.batch == batch and not trial.trouble]
        random.Random(f"{self.study.settings.seed}/{process}/trials").shuffle(todo)
        found = self._run_trials(todo, process)
        first = next(iter(found.values()))
        case = self.study.case.model_copy(update={key: first[key] for key in ("input_sets", "input_set_bytes")})
        trials = [_with(trial, found[trial.name]) if trial.name in found else trial for trial in self.study.trials]
        self.study = self.study.model_copy(update={"trials": trials, "case": case})
        print(f"process {process}: {len(todo)} trials", file=sys.stderr)

    def _run_trials(self, trials: Sequence[Trial], process: int) -> dict[str, Any]:
        payload = {
            "subject": self.subject.to_json(),
            "problem": self.study.case.problem,
            "trials": [{"name": trial.name, "cycles": _cycles(trial)} for trial in trials],
            "settings": self.study.settings.model_dump(mode="json"),
            "process": process,
        }
        cases: dict[str, Any] = {}

        def on_event(event: dict[str, Any]) -> None:
            cases[event["case"]["name"]] = event["case"]

        task = f"{Path(__file__).stem}:measure_trials"
        result = self._run(task, payload, timeout_s=_TIMEOUT_S, on_event=on_event)
        if not result.ok:
            raise ProofError(f"process {process}: {result.reason}")
        return cases

    def _calibrate(self) -> tuple[float, float]:
        """Return the seconds of a call of A with its short spin, and those of one more clock cycle."""
        trial = Trial(name="calibration", batch=0, planted=1.0, extra_cycles=CALIBRATION_CYCLES)
        trial = _with(trial, self._run_trials([trial], -1)["calibration"])
        if trial.rounds is None:
            raise ProofError(f"the length of a clock cycle cannot be measured: {trial.trouble}")
        a, b = (statistics.median(trial.rounds.seconds["graph"][arm]) for arm in (A, B))
        if b <= a:
            raise ProofError(f"{CALIBRATION_CYCLES} clock cycles must take longer, got {b:.4g} s after {a:.4g} s")
        return a, (b - a) / CALIBRATION_CYCLES


def _cycles(trial: Trial) -> tuple[int, int]:
    """Return the cycles that A and B spin: none in either where nothing is planted."""
    return (BASE_CYCLES, BASE_CYCLES + trial.extra_cycles) if trial.planted else (0, 0)


def _with(trial: Trial, case: dict[str, Any]) -> Trial:
    """Return a trial with the rounds of one more process."""
    failed = [arm for arm in case["arms"] if arm["status"] != "measured"]
    if failed or case["rounds"] is None:
        reason = "; ".join(f"{arm['name']}: {arm['reason'] or arm['status']}" for arm in failed) or "nothing was timed"
        return trial.model_copy(update={"trouble": reason, "rounds": None})
    new = Rounds.model_validate(case["rounds"])
    return trial.model_copy(update={"rounds": new if trial.rounds is None else pool_rounds(trial.rounds, new)})


def measure_trials(payload: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Measure the trials of one process: the task of a worker."""
    import gc

    import torch

    from flashmoe_science.proof.measure.gpu_tasks import open_gpu

    operator, (loaded,), timer = open_gpu({**payload, "baselines": []})
    timer.settle()
    gc.freeze()  # every case begins with a collection, which takes 0.2 s over all that was imported
    # torch has no public way to keep a GPU busy for a known number of cycles.
    measure_here(payload, operator, loaded, timer, torch.cuda._sleep, emit)  # noqa: SLF001
    return {}


def measure_here(payload: dict[str, Any], operator: Any, loaded: Any, timer: Any, spin: Any, emit: Emit) -> None:
    """Measure the trials on ``timer``; ``spin`` keeps the current stream busy for so many clock cycles."""
    from flashmoe_science.proof.measure.rounds import Case, Plan, measure_case

    plan = Plan(Settings.model_validate(payload["settings"]), ["graph"], payload["process"], thorough=False)
    problem = operator.parse_case(payload["problem"])

    def spinning(cycles: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            answer = loaded.entry(*args, **kwargs)
            spin(cycles)
            return answer

        return call if cycles and loaded.entry is not None else loaded.entry

    for trial in payload["trials"]:
        of_a, of_b = (replace(loaded, entry=spinning(cycles)) for cycles in trial["cycles"])
        arms = [replace(of_b, name=B), replace(of_a, name=A, role="baseline")]
        case = Case(trial["name"], operator, problem)
        emit({"event": "case", "case": measure_case(case, arms, plan, timer, on_round=lambda *_: None)})


def wrong_over_suites(records: Iterable[Record]) -> tuple[int, int, Any]:
    """Return in how many comparisons of a baseline with its copy over a suite a verdict is wrong, and of how many."""
    wrong = total = 0
    for record in records:
        for kind in kinds_measured(record) if record.environment.gpu and record.baselines else ():
            groups = [
                found
                for case in record.cases
                for copy in [arm.name for arm in case.arms if arm.role == "control" and arm.status == "measured"]
                if len(found := paired_log_ratios(case, kind, copy, record.baselines[0])) > 1
            ]
            if len(groups) < 2:
                continue
            try:
                # As in compare: values under one label were measured in the same processes.
                labels = [tuple(sorted(found)) for found in groups]
                intervals = comparison_intervals([[found[p] for p in sorted(found)] for found in groups], labels)
            except TooFewRoundsError:
                continue
            total += 1
            wrong += any(not interval.contains(0.0) for interval in intervals)
    return wrong, total, binomtest(wrong, total).proportion_ci() if total else None


def new_study(subject: Subject, suite: str, case: SuiteCase, environment: Environment, **settings: Any) -> Study:
    """Return a study without trials. ``settings`` are ``processes``, ``rounds``, ``seed`` and ``batches``."""
    operator, now = operator_of(subject), datetime.now(timezone.utc)
    work = operator.work(case.problem)
    batches = settings.pop("batches")
    seed = settings.pop("seed")
    return Study(
        id=f"{now:%Y%m%dT%H%M%SZ}-study-{subject.name}-{secrets.token_hex(3)}",
        created_at=now,
        command="tools/study.py",
        subject=SubjectInfo(
            name=subject.name,
            operator=subject.operator,
            entry_point=subject.entry_point,
            sources=hash_sources(subject),
        ),
        suite=suite,
        case=CaseRecord(
            name=case.name,
            problem=operator.as_table(case.problem),
            origin=case.origin,
            work=Work(
                flops=work.flops,
                bytes=work.bytes,
                tokens=work.tokens,
                peak=operator.peak_tflops_key(case.problem),
            ),
        ),
        environment=environment,
        settings=Settings(times=["graph"], seed=secrets.randbits(31) if seed is None else seed, **settings),
        batches=batches,
    )


def report(study: Study) -> int:
    """Print what a study shows, and return the exit code."""
    gpu = study.environment.gpu.name if study.environment.gpu else "no GPU"
    print(f"{study.id}: {study.subject.name}, {study.case.name}, {gpu}")
    found = tallies(study)
    for tally in found:
        print(f"  {tally.line()}")
    if study.incomplete_reason:
        print(f"  incomplete: {study.incomplete_reason}")
        return INCONCLUSIVE
    return HOLDS if all(tally.holds for tally in found) else FAILS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``, and return its exit code."""
    head, _, rest = str(__doc__).partition("\n\n")
    parser = argparse.ArgumentParser(
        description=head, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("subject", nargs="?", default="flash_attention", help="one of ours, or a kernel.toml")
    parser.add_argument("--suite", default="scaling", help="a packaged suite, or a file")
    parser.add_argument("--case", default=DEFAULT_CASE, help="its case; 50 to 500 us a call is best")
    parser.add_argument("--same", type=int, default=200, help="comparisons of equal kernels")
    parser.add_argument("--planted", type=int, default=20, help="comparisons with 3 %%, and with 1 %% more work")
    parser.add_argument("--processes", type=int, default=3, help="worker processes of a comparison")
    parser.add_argument("--rounds", type=int, default=10, help="rounds in each process")
    parser.add_argument("--batches", type=int, default=3, help="groups of comparisons that share processes")
    parser.add_argument("--seed", type=int, help="seed of inputs and orders")
    parser.add_argument("--output", type=Path, default=Path("evidence/studies"), help="the folder for the study")
    parser.add_argument("--read", type=Path, metavar="FILE", help="judge this study again; measure nothing")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="judge the controls of these runs; measure nothing")
    asked = parser.parse_args(argv)
    try:
        if asked.read is not None:
            return report(Study.model_validate_json(read_text(asked.read)))
        if asked.runs is not None:
            wrong, total, share = wrong_over_suites(map(read_record, record_files(asked.runs).values()))
            between = f": [{share.low:.1%}, {share.high:.1%}], required at most {WRONG:.0%}" if share else ""
            print(f"a wrong verdict over a suite of equal kernels in {wrong} of {total}{between}")
            if share is None or share.low <= WRONG < share.high:
                return INCONCLUSIVE
            return HOLDS if share.high <= WRONG else FAILS
        return _measure(asked)
    except FlashmoeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _measure(asked: argparse.Namespace) -> int:
    subject, environment = load_subject(asked.subject), describe_apart()
    if environment.gpu is None:
        raise InputError("there is no NVIDIA GPU here", hint="--read and --runs need none")
    cases = {case.name: case for case in load_suite(asked.suite).cases}
    if asked.case not in cases:
        raise InputError(f"case must be one of {', '.join(cases)}, got {asked.case!r}")
    settings = {name: getattr(asked, name) for name in ("processes", "rounds", "seed", "batches")}
    study = new_study(subject, load_suite(asked.suite).name, cases[asked.case], environment, **settings)
    path = record_path(asked.output, study.id)
    wanted = {0.0: asked.same, **dict.fromkeys(SEEN, asked.planted)}
    runner = Runner(
        subject,
        study,
        {planted: count for planted, count in wanted.items() if count},
        save=lambda study: write_document(path, study.model_dump_json() + "\n"),
    )
    code = report(runner.measure())
    print(f"study: {path}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
