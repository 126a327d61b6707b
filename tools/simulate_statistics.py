"""Print the figures of docs/explanation/statistics.md: how often intervals and verdicts are right, on simulated noise.

``PYTHONPATH=src python tools/simulate_statistics.py`` takes some minutes. The tests check the same with fewer runs.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtri
from scipy.stats import binomtest

from flashmoe_science.proof.compare.change_points import change_points
from flashmoe_science.proof.judge.familywise import comparison_intervals
from flashmoe_science.proof.judge.statistics import (
    Interval,
    clustered_interval,
    family_intervals,
    hodges_lehmann,
    interval,
    suite_interval,
)
from flashmoe_science.proof.records.documents import read_record
from flashmoe_science.proof.records.evidence import Record, TimeKind

OFFSETS = (0.0, 0.2, 0.5, 1.0)  # of processes, in the same unit
MOST = 36  # cases
MANY = 13  # cases; more of them take so long that half of the runs have to do
SPREAD = 0.008  # the largest seen of graph time


def draw_groups(
    rng: np.random.Generator, *, processes: int = 3, rounds: int = 10, offset: float = 0.0, bias: float = 0.0
) -> list[list[float]]:
    """Return rounds of spread 1 in processes whose own offsets have the spread ``offset``."""
    values = rng.normal(bias, offset, (processes, 1)) + rng.normal(0.0, 1.0, (processes, rounds))
    groups: list[list[float]] = values.tolist()
    return groups


def share(events: Sequence[bool]) -> str:
    """Return how many of ``events`` are true, as a percentage."""
    return f"{100 * sum(events) / len(events):.1f} %"


def print_row(*cells: object) -> None:
    """Print one row of a Markdown table."""
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def one_sample(rng: np.random.Generator, runs: int) -> None:
    """Coverage of ``interval``."""
    noises: dict[str, Callable[[int], NDArray[np.float64]]] = {
        "normal": lambda n: rng.normal(size=n),
        "heavy tails (t, 3 degrees)": lambda n: rng.standard_t(3, n),
        "1 in 10 ten times as noisy": lambda n: rng.normal(size=n) * np.where(rng.random(n) < 0.1, 10.0, 1.0),
    }
    counts = (10, 20, 30)
    print_row("noise", *(f"{n} rounds" for n in counts))
    for name, noise in noises.items():
        print_row(name, *(share([interval(noise(n).tolist()).contains(0.0) for _ in range(runs)]) for n in counts))


def clustered(rng: np.random.Generator, runs: int) -> None:
    """Coverage and width of rounds alone and of ``clustered_interval``."""
    print_row("processes x rounds", "offsets", "rounds alone", "width", "clustered", "width")
    for processes, rounds in ((3, 10), (3, 20), (6, 10)):
        for offset in OFFSETS:
            drawn = [draw_groups(rng, processes=processes, rounds=rounds, offset=offset) for _ in range(runs)]
            alone = [interval([v for group in groups for v in group]) for groups in drawn]
            both = [clustered_interval(groups) for groups in drawn]
            cells = [(share([i.contains(0.0) for i in found]), mean_width(found)) for found in (alone, both)]
            print_row(f"{processes} x {rounds}", offset, *cells[0], *cells[1])


def widened_on_suspicion(rng: np.random.Generator, runs: int) -> None:
    """Coverage of the rejected rule that looks at processes only where an F test at 20 % says that they differ."""
    print_row("processes x rounds", *OFFSETS)
    for processes, rounds in ((3, 10), (3, 20)):
        limit = fdtri(processes - 1, processes * (rounds - 1), 0.8)
        cells = []
        for offset in OFFSETS:
            covered = []
            for _ in range(runs):
                groups = draw_groups(rng, processes=processes, rounds=rounds, offset=offset)
                table = np.array(groups)
                ratio = rounds * table.mean(axis=1).var(ddof=1) / table.var(axis=1, ddof=1).mean()
                found = clustered_interval(groups) if ratio > limit else interval(table.ravel().tolist())
                covered.append(found.contains(0.0))
            cells.append(share(covered))
        print_row(f"{processes} x {rounds}", *cells)


def mean_width(intervals: Sequence[Interval]) -> str:
    """Return half of the mean width."""
    return f"±{sum(i.high - i.low for i in intervals) / len(intervals) / 2:.2f}"


def controls(rng: np.random.Generator, runs: int) -> None:
    """False alarms of 13 controls, and how often a real bias in one of them is seen."""
    print_row("offsets", "each at 95 %", "family", "family, bias 0.5 in one", "family, bias 1 in one")
    for offset in OFFSETS:
        cells = []
        for bias in (0.0, 0.5, 1.0):
            alarms, alone = [], []
            for _ in range(runs):
                cases = [draw_groups(rng, offset=offset, bias=bias if n == 0 else 0.0) for n in range(13)]
                alarms.append(any(not i.contains(0.0) for i in family_intervals(cases)))
                alone.append(any(not interval([v for g in c for v in g]).contains(0.0) for c in cases))
            cells += [share(alone), share(alarms)] if bias == 0 else [share(alarms)]
        print_row(offset, *cells)


def cases_at_the_factor(rng: np.random.Generator, runs: int) -> None:
    """How often 13 cases exactly at a claim's factor refute it, by one interval above or below; and all contain it."""
    print_row("processes x rounds", "offsets", "refuted", "all contain it")
    for (processes, rounds), offset in itertools.product(((3, 10), (5, 6)), (0.0, 0.5)):
        found = [
            [
                clustered_interval(draw_groups(rng, processes=processes, rounds=rounds, offset=offset))
                for _ in range(MANY)
            ]
            for _ in range(runs)
        ]
        refuted = [any(each.high < 0.0 for each in cases) for cases in found]
        contain = [all(each.contains(0.0) for each in cases) for cases in found]
        print_row(f"{processes} x {rounds}", offset, share(refuted), share(contain))


def unlike_controls(rng: np.random.Generator, runs: int) -> None:
    """False alarms of 13 controls when the processes have offsets in one case only."""
    print_row("offsets in one case of 13", "family")
    for offset in (*OFFSETS[1:], 2.0):
        alarms = []
        for _ in range(runs):
            cases = [draw_groups(rng, offset=offset if n == 0 else 0.0) for n in range(13)]
            alarms.append(any(not i.contains(0.0) for i in family_intervals(cases)))
        print_row(offset, share(alarms))


def biases(rng: np.random.Generator, runs: int) -> None:
    """Coverage with and without the widening by what the control shows, when the baseline itself is biased."""
    print_row("processes", "bias of the baseline", "not widened", "widened", "more width")
    for processes in (3, 6):
        for spread in (0.0, 0.2, 0.5, 1.0):
            plain, wide = [], []
            for _ in range(runs):
                noise = rng.normal(0.0, 2**-0.5, (3, processes, 10))
                baseline, copy, subject = noise[0] + rng.normal(0.0, spread), noise[1], noise[2]
                control = interval((copy - baseline).ravel().tolist())
                plain.append(clustered_interval((baseline - subject).tolist()))
                wide.append(plain[-1].widened(0.0 if control.contains(0.0) else abs(control.estimate)))
            widths = [sum(i.high - i.low for i in found) for found in (plain, wide)]
            covered = (share([i.contains(0.0) for i in found]) for found in (plain, wide))
            print_row(processes, spread, *covered, f"{100 * (widths[1] / widths[0] - 1):.0f} %")


def effects(rng: np.random.Generator, runs: int) -> None:
    """How often a true difference, in units of the spread, is told from none."""
    sizes = (0.0, 0.5, 1.0, 2.0, 3.0)
    print_row("processes x rounds", "offsets", *(f"difference {size:g}" for size in sizes))
    for processes, rounds in ((3, 10), (6, 10)):
        for offset in (0.0, 0.5):
            cells = []
            for size in sizes:
                drawn = [
                    clustered_interval(draw_groups(rng, processes=processes, rounds=rounds, offset=offset, bias=size))
                    for _ in range(runs)
                ]
                cells.append(share([not i.contains(0.0) for i in drawn]))
            print_row(f"{processes} x {rounds}", offset, *cells)


def suites(rng: np.random.Generator, runs: int) -> None:
    """Coverage of ``suite_interval``: the unit is the spread of one round."""
    print_row("cases", "spread of cases", "offsets shared by the cases of a process", "percentiles", "covered")
    for cases, case_spread, offset in ((13, 30.0, 0.0), (13, 1.0, 0.5), (13, 0.0, 0.5), (5, 30.0, 0.0), (36, 1.0, 0.5)):
        covered, plain = [], []
        for _ in range(runs):
            shared = rng.normal(0.0, offset, (1, 3, 1))
            values = rng.normal(0.0, case_spread, (cases, 1, 1)) + shared + rng.normal(0.0, 1.0, (cases, 3, 10))
            covered.append(suite_interval(values.tolist(), resamples=1000).contains(0.0))
            drawn = rng.integers(0, cases, (1000, cases, 1)), rng.integers(0, 3, (1000, 1, 3))
            low, high = np.quantile(values.mean(axis=2)[drawn].mean(axis=(1, 2)), [0.025, 0.975])
            plain.append(bool(low <= 0 <= high))
        print_row(cases, case_spread, offset, share(plain), share(covered))


def processes_again(rng: np.random.Generator, runs: int) -> None:
    """Coverage where wide intervals get more processes: once as many again, or one by one, up to 9, until narrow."""
    print_row("width", *(f"offsets {offset:g}: once, one by one" for offset in OFFSETS))
    for width in (0.4, 0.7, 1.0, 2.0):
        cells = []
        for offset in OFFSETS:
            drawn = [draw_groups(rng, processes=9, offset=offset) for _ in range(runs)]
            once = [_until_narrow(groups, width, (3, 6)).contains(0.0) for groups in drawn]
            one_by_one = [_until_narrow(groups, width, range(3, 10)).contains(0.0) for groups in drawn]
            cells.append(f"{share(once)}, {share(one_by_one)}")
        print_row(f"\u00b1{width:g}", *cells)


def _until_narrow(groups: Sequence[Sequence[float]], width: float, counts: Sequence[int]) -> Interval:
    """Return the interval of the first count of processes at which it is no wider than ``width``, or of the last."""
    for count in counts:
        found = clustered_interval(groups[:count])
        if (found.high - found.low) / 2 <= width:
            break
    return found


def comparisons(rng: np.random.Generator, runs: int, *, processes: int = 3) -> None:
    """Share of comparisons of a revision with itself in which a case is called faster or slower.

    Offsets are those of each case and process, or of a process in all its cases.
    """
    for common in (False, True):
        print_row(f"cases, offsets {'common' if common else 'independent'}", *(f"offsets {o:g}" for o in OFFSETS))
        for cases in (1, 2, 3, 5, 13, 36):
            few = runs if cases <= MANY else runs // 2
            cells = []
            for offset in OFFSETS:
                drawn = (_draw_cases(rng, cases, offset, common=common, processes=processes) for _ in range(few))
                wrong = [any(not i.contains(0.0) for i in comparison_intervals(sample)) for sample in drawn]
                bound = binomtest(sum(wrong), few).proportion_ci(0.9).high  # one-sided, at 95 %
                cells.append(f"{share(wrong)} (up to {100 * bound:.1f} %)")
            print_row(cases, *cells)


def comparisons_by_default(rng: np.random.Generator, runs: int) -> None:
    """Share of such comparisons with a wrong verdict, in six processes, as ``compare`` has without ``--processes``."""
    comparisons(rng, runs, processes=6)


def powers(rng: np.random.Generator, runs: int) -> None:
    """How often a slowdown of one case is seen, and how wide the intervals are, at a spread of 0.8 %."""
    sizes = (0.03, 0.01)
    print_row("processes", "cases", "common offsets", "width", *(f"{size:.0%} seen" for size in sizes), "all the same")
    for processes in (3, 6):
        for cases, offset in itertools.product((2, 5, 13, 36), OFFSETS):
            drawn = (_draw_cases(rng, cases, offset, common=True, processes=processes) for _ in range(runs))
            found = [comparison_intervals(sample) for sample in drawn]
            # A slowdown moves the interval of its case, and hardly changes its width.
            first = [intervals[0] for intervals in found]
            seen = [share([i.high * SPREAD < math.log1p(size) for i in first]) for size in sizes]
            limit = math.log1p(0.01) / SPREAD
            same = [all(-limit <= i.low and i.high <= limit for i in intervals) for intervals in found]
            width = sum(i.high - i.low for i in first) / len(first) / 2 * SPREAD
            print_row(processes, cases, offset, f"±{width:.2%}", *seen, share(same))


def counted_as_independent(rng: np.random.Generator, runs: int) -> None:
    """False alarms of ``family_intervals``, whose degrees of freedom count every case, where offsets are common."""
    print_row("cases, offsets common", *(f"offsets {offset:g}" for offset in OFFSETS))
    for cases in (5, 13, 36):
        print_row(cases, *(_wrong(rng, cases, offset, runs, family_intervals) for offset in OFFSETS))


def offsets_of_unlike_size(rng: np.random.Generator, runs: int) -> None:
    """Share of wrong comparisons of 36 cases, where cases have different shares of a process's offset."""
    print_row("36 cases: share of the offset", *(f"offsets {offset:g}" for offset in (*OFFSETS[2:], 2.0)))
    for name, draw in (
        ("half or twice, at random", lambda: 2.0 ** rng.uniform(-1, 1, MOST)),
        ("all in one half of the cases, none in the other", lambda: (np.arange(MOST) % 2).astype(float)),
    ):
        cells = [_wrong(rng, MOST, offset, runs, comparison_intervals, draw) for offset in (*OFFSETS[2:], 2.0)]
        print_row(name, *cells)


def _wrong(
    rng: np.random.Generator,
    cases: int,
    offset: float,
    runs: int,
    intervals: Callable[[list[list[list[float]]]], list[Interval]],
    loads: Callable[[], NDArray[np.float64]] | None = None,
) -> str:
    """Return how often an interval of any case excludes 0, with its one-sided upper bound at 95 %."""
    wrong = []
    for _ in range(runs):
        sample = _draw_cases(rng, cases, offset, common=True, loads=None if loads is None else loads())
        wrong.append(any(not i.contains(0.0) for i in intervals(sample)))
    return f"{share(wrong)} (up to {100 * binomtest(sum(wrong), runs).proportion_ci(0.9).high:.1f} %)"


def _draw_cases(
    rng: np.random.Generator,
    cases: int,
    offset: float,
    *,
    common: bool,
    processes: int = 3,
    loads: NDArray[np.float64] | None = None,
) -> list[list[list[float]]]:
    """Return cases of 10 rounds, whose processes have the same offset in all of them, times loads, or one in each."""
    offsets = rng.normal(0.0, offset, (1 if common else cases, processes, 1))
    if loads is not None:
        offsets = loads[:, None, None] * offsets
    drawn: list[list[list[float]]] = (offsets + rng.normal(0.0, 1.0, (cases, processes, 10))).tolist()
    return drawn


def offsets_in_evidence() -> None:
    """Variance of a process's mean over the cases, against that of independent cases: subject over SDPA, suite seed.

    Not simulated: of the records in evidence/.
    """
    print_row("run", "kernel", "graph", "wall")
    for path in sorted((Path(__file__).resolve().parent.parent / "evidence").glob("*-seed-flash_attention-*.json*")):
        record = read_record(path)
        if record.environment.gpu is not None:
            print_row(path.name.partition("-")[0], *(_common_part(record, kind) for kind in get_args(TimeKind)))


def _common_part(record: Record, kind: TimeKind) -> str:
    """Return the variance over processes of their means over the cases, times the cases, over that within a case."""
    centres = []
    for case in record.cases:
        (rounds,) = (rounds for rounds in case.rounds if kind in rounds.seconds)
        seconds = rounds.seconds[kind]
        ratios = np.log(np.array(seconds["sdpa"]) / np.array(seconds[record.subject.name]))
        process = np.array(rounds.process)
        centres.append([ratios[process == one].mean() for one in np.unique(process)])
    table = np.array(centres)
    return f"{len(table) * table.mean(axis=0).var(ddof=1) / table.var(axis=1, ddof=1).mean():.1f}"


def histories(rng: np.random.Generator, runs: int) -> None:
    """Share of series in which a change of level is found (docs/how-to/compare.md); in units of what runs vary by."""
    sizes = (1.0, 2.0, 3.0, 6.0)
    print_row(
        "runs", "no change", *(f"{size:g} in the middle" for size in sizes), "6 in the last three", "second, false"
    )
    for count in (8, 12, 20, 40):
        cells, second = [], []
        for size, first in ((0.0, 0), *((size, count // 2) for size in sizes), (6.0, count - 3)):
            found = []
            for _ in range(runs):
                values = rng.normal(size=count)
                values[first:] += size
                found.append(change_points(values.tolist()))
            cells.append(share([bool(points) for points in found]))
            second += [len(points) > 1 for points in found if size == sizes[-1]]
        print_row(count, *cells, share(second))


def modes(rng: np.random.Generator, runs: int) -> None:
    """Where each process is fast or, with a probability, 3 spreads slow: intervals that miss the mean of processes."""
    print_row("slow processes", "processes", "no slow one is seen", "misses the mean", "width")
    for slow, processes in itertools.product((0.5, 0.2, 0.1), (3, 5, 6, 10)):
        found = []
        for _ in range(runs):
            offsets = 3.0 * (rng.random((processes, 1)) < slow)
            found.append(clustered_interval((offsets + rng.normal(0.0, 1.0, (processes, 10))).tolist()))
        missed = share([not i.contains(3.0 * slow) for i in found])
        print_row(f"{slow:.0%}", processes, f"{100 * (1 - slow) ** processes:.0f} %", missed, mean_width(found))


def selected(rng: np.random.Generator, runs: int) -> None:
    """How often a factor that is exactly true is demonstrated, by one run and by the best of ten."""
    print_row("processes", "offsets", "one run", "best of ten")
    for processes, offset in itertools.product((3, 5, 6), OFFSETS):
        drawn = (draw_groups(rng, processes=processes, offset=offset) for _ in range(5 * runs))
        one = sum(clustered_interval(groups).low > 0 for groups in drawn) / (5 * runs)
        print_row(processes, offset, f"{100 * one:.1f} %", f"{100 * (1 - (1 - one) ** 10):.0f} %")


def spikes(rng: np.random.Generator, runs: int) -> None:
    """What is estimated where some rounds are slower: the middle of 30 rounds by three measures."""
    print_row("slow rounds", "by", "median", "Hodges-Lehmann", "mean")
    for slow, size in itertools.product((0.1, 0.3), (3.0, 10.0)):
        drawn = rng.normal(0.0, 1.0, (runs // 10, 30)) + size * (rng.random((runs // 10, 30)) < slow)
        middle = float(np.median(drawn, axis=1).mean())
        estimate = sum(hodges_lehmann(values) for values in drawn.tolist()) / len(drawn)
        print_row(f"{slow:.0%}", size, *(f"{value:.2f}" for value in (middle, estimate, float(drawn.mean()))))


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=4000, help="simulated runs for each figure")
    parser.add_argument("--only", metavar="NAME", default="", help="only the table of this function, e.g. comparisons")
    asked = parser.parse_args()
    runs: int = asked.runs
    rng = np.random.default_rng(0)
    for simulate, part in (
        (one_sample, 1),
        (clustered, 1),
        (widened_on_suspicion, 1),
        (effects, 1),
        (controls, 4),
        (unlike_controls, 4),
        (biases, 2),
        (suites, 4),
        (modes, 1),
        (selected, 1),
        (spikes, 1),
    ):
        if asked.only in ("", simulate.__name__):
            print(f"\n{simulate.__doc__} {runs // part} runs for each figure.\n")
            simulate(rng, runs // part)
    for simulate, part in (
        (processes_again, 2),
        (comparisons, 5),
        (comparisons_by_default, 10),
        (powers, 20),
        (counted_as_independent, 10),
        (offsets_of_unlike_size, 10),
        (histories, 10),
        (cases_at_the_factor, 10),
    ):  # what comes before leaves them alone
        if asked.only in ("", simulate.__name__):
            print(f"\n{simulate.__doc__} {runs // part} runs for each figure.\n")
            simulate(np.random.default_rng(0), runs // part)
    if asked.only in ("", offsets_in_evidence.__name__):
        print(f"\n{offsets_in_evidence.__doc__}\n")
        offsets_in_evidence()


if __name__ == "__main__":
    main()
