"""Made-up records for tests, drawn from a seeded model of noise. Nothing here was measured.

The log of one time is the sum of the arm's true speed, an offset of its worker process, and noise of its own::

    log seconds[case, arm, round] = log base[case, arm] + process_offset[case, arm, process] + noise[case, arm, round]

Both kinds of noise are given as the spread of one *paired* log-ratio: each arm has the spread divided by the square
root of two.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import numpy as np

from flashmoe_science.proof.measure.schedule import balanced_orders, known_set_counts, rounds_seed
from flashmoe_science.proof.records.evidence import (
    GATE_NAMES,
    Accuracy,
    Arm,
    CaseRecord,
    Environment,
    Gate,
    GateName,
    GateStatus,
    Gpu,
    Launch,
    Record,
    Rounds,
    Settings,
    SourceFile,
    SubjectInfo,
    TimeKind,
    Work,
    rates_of,
)

H200 = Gpu(name="NVIDIA H200", arch=90, sms=132, l2_bytes=50 << 20, memory_bytes=141 << 30, max_sm_clock_mhz=1980)
L4 = Gpu(name="NVIDIA L4", arch=89, sms=58, l2_bytes=48 << 20, memory_bytes=24 << 30, max_sm_clock_mhz=2040)

ENTRY_POINT = "flashmoe_science.attention.api:flash_attention"  # of the subject that most records are of

FIRST_DAY = datetime(2026, 1, 1, tzinfo=timezone.utc)

_PLAIN_KERNEL = Launch(
    name="made_up_kernel", grid=(16, 1, 1), block=(128, 1, 1), registers=64, shared_memory_bytes=16384
)


def build_gates(failed: GateName | None = None, *, not_possible: Sequence[GateName] = ()) -> list[Gate]:
    """Return the seven gates: all passed, or ``failed`` failed and the later ones not reached."""
    gates = []
    status = GateStatus.PASSED
    for name in GATE_NAMES:
        if status is GateStatus.FAILED:
            status = GateStatus.NOT_REACHED
        if name == failed:
            status = GateStatus.FAILED
        this = GateStatus.NOT_POSSIBLE if name in not_possible else status
        gates.append(Gate(name=name, status=this, summary=f"made up: {this.value}", seconds=1.0))
    return gates


def _draw(
    true_seconds: Mapping[str, float], times: Sequence[TimeKind], rng: np.random.Generator, case: str, **model: Any
) -> Rounds:
    """Draw ``processes * rounds`` rounds of the arms whose true seconds are given."""
    arms, processes, rounds = list(true_seconds), model["processes"], model["rounds"]
    process = [p for p in range(processes) for _ in range(rounds)]
    n = len(process)
    seconds: dict[TimeKind, dict[str, list[float]]] = {}
    for kind in times:
        seconds[kind] = {}
        for arm in arms:
            offsets = rng.normal(0.0, model.get("process_spread", 0.0) / math.sqrt(2), processes)
            noise = rng.normal(0.0, model.get("spread", 0.01) / math.sqrt(2), n)
            seconds[kind][arm] = (true_seconds[arm] * np.exp(offsets[process] + noise)).tolist()
    for _ in range(n):
        rng.permutation(len(arms))  # not used: it keeps the noise of the cases that follow as tests know it
    seeds = [rounds_seed(model["seed"], case, p, times, method=1) for p in range(processes)]
    return Rounds(
        process=process,
        order=[order for seed in seeds for order in balanced_orders(arms, rounds, seed=seed)],
        sm_clock_mhz=[1980] * n,
        power_w=[400.0] * n,
        temperature_c=[50] * n,
        throttle=[""] * n,
        seconds=seconds,
    )


def build_case(
    name: str,
    rng: np.random.Generator,
    *,
    subject: str = "flash_attention",
    speedup: float = 2.0,
    baselines: Mapping[str, float] | None = None,
    times: Sequence[TimeKind] = ("kernel", "graph", "wall"),
    baseline_seconds: float = 20e-6,
    control_bias: float = 0.0,
    l2_bytes: int = H200.l2_bytes,
    **model: Any,
) -> CaseRecord:
    """Return one case: 1 sequence of 512 positions, 16 heads of size 64 in fp16.

    Args:
        name: Name of the case.
        rng: Where the noise comes from.
        subject: Name of the subject.
        speedup: True time of the first baseline divided by the subject's.
        baselines: Names, each with its true time as a multiple of ``baseline_seconds``. Default: sdpa, 1.
        times: Kinds of time; kernel time gets rounds of its own, as in a real run.
        baseline_seconds: True time of a baseline whose multiple is 1.
        control_bias: True log-ratio of the control's time to the first baseline's.
        l2_bytes: The card's L2, of which the number of input sets follows.
        model: ``processes``, ``rounds`` in each and the run's ``seed``; ``spread``, the standard deviation of one
            paired log-ratio within a process, by default 0.01, and ``process_spread``, that of a process's own offset.
    """
    model = {"processes": 3, "rounds": 10, "seed": 0, **model}
    baselines = {"sdpa": 1.0} if baselines is None else baselines
    first = next(iter(baselines))
    true_seconds = {name_: baseline_seconds * multiple for name_, multiple in baselines.items()}
    true_seconds[subject] = true_seconds[first] / speedup
    true_seconds[f"{first}#2"] = true_seconds[first] * math.exp(control_bias)
    together: list[list[TimeKind]] = [["kernel"], ["graph", "wall"]]
    modes = [[kind for kind in mode if kind in times] for mode in together]
    tensor_bytes = 16 * 512 * 64 * 2
    roles = {subject: "subject", f"{first}#2": "control"}
    case = CaseRecord(
        name=name,
        problem={"batch": 1, "heads": 16, "seqlen_q": 512, "head_dim": 64, "dtype": "fp16", "causal": False},
        origin="made up",
        work=Work(flops=4.0 * 16 * 512 * 512 * 64, bytes=4.0 * tensor_bytes, tokens=512),
        correct=True,
        input_sets=known_set_counts(3 * tensor_bytes, l2_bytes, method=1)[0],
        input_set_bytes=3 * tensor_bytes,
        rounds=[_draw(true_seconds, mode, rng, name, **model) for mode in modes if mode],
    )
    arms = [
        Arm.model_validate({
            "name": arm,
            "role": roles.get(arm, "baseline"),
            "status": "measured" if case.rounds else "not measured",
            "reason": "" if case.rounds else "no GPU",
            "version": "0.0",
            "launches": [_PLAIN_KERNEL],
            "accuracy": Accuracy(max_error=1e-4, budget=1e-3, low_precision_error=5e-4, deterministic=True),
            "peak_bytes": 1 << 20,
            "rates": rates_of(case, arm),
        })
        for arm in true_seconds
    ]  # fmt: skip
    return case.model_copy(update={"arms": arms})


def build_record(
    *,
    speedups: Sequence[float] = (2.0, 2.5, 3.0),
    subject: str = "flash_attention",
    suite: str = "seed",
    baselines: Mapping[str, float] | None = None,
    processes: int = 3,
    rounds: int = 10,
    times: Sequence[TimeKind] = ("kernel", "graph", "wall"),
    gpu: Gpu | None = H200,
    gates: Sequence[Gate] | None = None,
    complete: bool = True,
    sources: Sequence[SourceFile] = (),
    day: int = 0,
    seed: int = 0,
    names: Sequence[str] = (),
    **model: float,
) -> Record:
    """Return a valid record with one case for each of ``speedups``; a later ``day`` is a newer record.

    The cases have ``names``. Default: case0, case1 and so on.

    The other arguments are those of ``build_case``. Without a GPU there are no times.
    """
    usual = (day, subject, gpu) in ((0, "flash_attention", H200), (0, "flash_attention", None))
    # Two runs never take the same samples.
    rng = np.random.default_rng(seed if usual else [seed, day, *f"{subject} {gpu.name if gpu else ''}".encode()])
    baselines = {"sdpa": 1.0} if baselines is None else baselines
    about: dict[str, Any] = {"subject": subject, "baselines": baselines, "processes": processes, "rounds": rounds}
    about |= {"times": times if gpu else (), "seed": seed, "l2_bytes": (gpu or H200).l2_bytes, **model}
    cases = [
        build_case(
            names[number] if names else f"case{number}",
            rng,
            speedup=speedup,
            **about,
        )
        for number, speedup in enumerate(speedups)
    ]
    created = FIRST_DAY + timedelta(days=day)
    timing_gates: tuple[GateName, ...] = () if gpu else ("launch", "quick", "bench")
    return Record(
        id=re.sub(r"[^\w.@-]", "_", f"{created:%Y%m%dT%H%M%SZ}-{suite}-{subject}-{seed:06x}", flags=re.ASCII),
        created_at=created,
        command=f"flashmoe prove {subject} --suite {suite}",
        complete=complete,
        incomplete_reason="" if complete else "interrupted",
        subject=SubjectInfo(
            name=subject,
            operator="attention",
            entry_point=ENTRY_POINT if subject == "flash_attention" else "made_up:entry",
            sources=list(sources),
        ),
        suite=suite,
        baselines=list(baselines),
        environment=Environment(
            gpu=gpu,
            driver="580.00" if gpu else None,
            cuda="13.0" if gpu else None,
            python="3.12.0",
            platform="Linux-x86_64",
            versions={"torch": "2.11.0", "triton": "3.6.0"},
            commit="0" * 40,
            dirty=False,
        ),
        settings=Settings(times=list(times), processes=processes, rounds=rounds, seed=seed),
        gates=list(gates) if gates is not None else build_gates(not_possible=timing_gates),
        cases=cases,
    )


def with_case(record: Record, number: int, **changes: Any) -> Record:
    """Return ``record`` with one case changed."""
    cases = list(record.cases)
    cases[number] = cases[number].model_copy(update=changes)
    return record.model_copy(update={"cases": cases})


def with_arm(record: Record, number: int, name: str, **changes: Any) -> Record:
    """Return ``record`` with one arm of one case changed."""
    arms = [arm.model_copy(update=changes) if arm.name == name else arm for arm in record.cases[number].arms]
    return with_case(record, number, arms=arms)
