"""Foresee the rate of a GPU where sequences and experts are split over ranks, from runs on two GPUs.

    python tools/simulate_ranks.py            # the tables of docs/explanation/scaling.md
    python tools/simulate_ranks.py --check    # exit 1 where the page has other tables

Time of a rank is its kernels' at the rate of one GPU, and what of its exchanges nothing hides. An exchange takes a
start and its bytes over a bandwidth, copies before and after included, which is fitted to the recorded runs. Links
between hosts are assumed (``NETWORK``, ``HOP``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "lab" / "several_gpus"
FITTED = ("1_attention_2xh200.json", "2_experts_2xh200.json")
LATER = (("two H200", "3_groups_2xh200.json"), ("four H200, idle before a call", "5_idle_4xh200.json"))
PAGE = ROOT / "docs" / "explanation" / "scaling.md"
BEGIN, END = "<!-- simulate_ranks: begin -->", "<!-- simulate_ranks: end -->"
HEADS, HEADS_KV, D, BYTES = 32, 8, 128, 2
GATHER_BYTES = 12  # an element of K and V, that gradients by gather hold at most: sums in fp32, sent and received
EXPERTS = {"mixtral": (8, 2, 4096), "qwen3-30b": (128, 8, 2048)}  # experts, of a token, hidden
TOKENS = 8192  # of a GPU
HOST = 8  # GPUs that NVLink joins
NETWORK = 45e6  # bytes a ms, a GPU and direction across hosts: 400 Gbit/s, assumed
HOP = 0.004  # ms that each further rank adds to the start of a collective, assumed
# Of two H100: bytes a ms (all-to-all of 256 MB, copies of symmetric memory), ms of a small all-to-all, and of a barrier
LINKS = {"collectives": 261e6, "symmetric": 369e6}
STARTS = {"collectives": 0.07, "symmetric": 0.032}
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Pass:
    """One pass on one rank: its kernels, and what goes before and after them."""

    kernels: float  # ms
    sent: float  # bytes of all exchanges
    exchanges: int


@dataclass(frozen=True)
class Exchange:
    """What was fitted."""

    bandwidth: float  # bytes a ms

    def time(self, each: Pass, ranks: int = 2, *, one_host: bool | None = None) -> float:
        """Return the time of a pass with nothing hidden, by default on one host where the ranks fit on it."""
        near = ranks <= HOST if one_host is None else one_host
        across = 1.0 if near else max(1.0, self.bandwidth / NETWORK)
        start = STARTS["collectives"] + HOP * (ranks - 2)
        return each.kernels + each.exchanges * start + each.sent * across / self.bandwidth

    def time_in_groups(self, each: Pass, groups: int, transport: str) -> float:
        """Return the time of a pass whose exchanges, one there and one back, go beside kernels but for copies."""
        copies = each.sent * (1 / self.bandwidth - 1 / LINKS["collectives"])
        part = each.sent / LINKS[transport] / 2 / groups + STARTS[transport]
        link = part * groups
        arrived, attended = [part * (group + 1) for group in range(groups)], 0.0
        for group in range(groups):
            attended = max(attended, arrived[group]) + each.kernels / groups
            link = max(link, attended) + part
        return copies + link


def rate(record: Any, tokens: int, which: str) -> float:
    """Return flops a ms of one GPU. From 64k tokens on it is that of 64k: one GPU alone slows down beyond."""
    measured = [int(name.split()[1]) for name in record if name.startswith("causal")]
    near = min(measured, key=lambda each: abs(each - min(tokens, 65536)))
    return float(record[f"causal {near}"]["one GPU"][which]) * 1e9


def attention(record: Any, tokens: int, ranks: int, strategy: str) -> dict[str, Pass]:
    """Return the passes of causal attention over ``tokens`` in all."""
    own, away = tokens / ranks, (ranks - 1) / ranks
    found = {}
    for which, work in zip(PASSES, (1.0, 2.5), strict=True):
        kernels = work * 2.0 * tokens**2 * HEADS * D / ranks / rate(record, tokens, which)
        if strategy == "heads":  # q, k, v there and o back; do there and dq, dk, dv back
            found[which] = Pass(kernels, own * 2 * (HEADS + HEADS_KV) * D * BYTES * away, 2)
        else:  # K and V, and for gradients again, and theirs in fp32
            sent = tokens * 2 * HEADS_KV * D * away
            found[which] = Pass(kernels, sent * (BYTES if which == "forward" else BYTES + 4), 1 + (which == "backward"))
    return found


def experts(record: Any, model: str, ranks: int, *, once: bool = False) -> dict[str, Pass]:
    """Return the passes of experts by gather, with as many tokens a GPU as were measured.

    By ``once`` the capacity is a quarter more than even routing needs.
    """
    _, top_k, hidden = EXPERTS[model]
    capacity = min(1.0, 1.25 * (1 - (1 - 1 / ranks) ** top_k)) if once else 1.0
    sent = 2 * capacity * TOKENS * (ranks - 1) * hidden * BYTES  # there, and what became of them back
    return {which: Pass(record[f"experts {model}"]["one GPU"]["ms"][which], sent, 2) for which in PASSES}


def measured(record: Any) -> dict[str, tuple[Pass, float]]:
    """Return the runs on two GPUs: a pass, and its time."""
    found = {}
    for strategy in ("heads", "gather"):
        for tokens in (16384, 32768, 65536):
            for which, each in attention(record, tokens, 2, strategy).items():
                ms = record[f"causal {tokens}"][strategy]["ms"][which]
                found[f"{strategy}, {tokens // 1024}k, {which}"] = each, ms
    for model in EXPERTS:
        for which, each in experts(record, model, 2).items():
            ms = record[f"experts {model}"]["experts of each rank"]["ms"][which]
            found[f"{model}, {which}"] = each, ms
    return found


def fit(runs: Iterable[tuple[Pass, float]]) -> Exchange:
    """Return the bandwidth with the least squared error of times, as shares of them."""
    start = STARTS["collectives"]
    rows = [(each.sent / ms, (ms - each.kernels - each.exchanges * start) / ms) for each, ms in runs]
    return Exchange(sum(sent * sent for sent, _ in rows) / sum(sent * left for sent, left in rows))


def share(passes: dict[str, Pass], exchange: Exchange, ranks: int) -> float:
    """Return the rate of a rank, both passes together, as a share of its kernels' rate."""
    return sum(each.kernels for each in passes.values()) / sum(exchange.time(each, ranks) for each in passes.values())


def share_in_two_dimensions(record: Any, tokens: int, exchange: Exchange, ranks: int) -> float:
    """Return the rate of a rank by heads within hosts and gather between them, as ``share`` does."""
    hosts = ranks // HOST
    passes = attention(record, tokens, ranks, "gather")
    within, across = attention(record, tokens // hosts, HOST, "heads"), attention(record, tokens, hosts, "gather")
    time = 0.0
    for which in PASSES:
        time += exchange.time(replace(within[which], kernels=passes[which].kernels), HOST)
        between = replace(across[which], kernels=0.0, sent=across[which].sent / HOST)  # of a part of the heads
        time += exchange.time(between, hosts, one_host=False)
    return sum(each.kernels for each in passes.values()) / time


def check_table(record: Any) -> list[str]:
    """Return each run as foreseen by a fit to the others."""
    runs = measured(record)
    lines = ["| two H200 | measured, ms | foreseen from the other runs, ms | error |", "| --- | --- | --- | --- |"]
    errors = []
    for name, (each, ms) in runs.items():
        foreseen = fit(run for other, run in runs.items() if other != name).time(each)
        errors.append(foreseen / ms - 1)
        lines.append(f"| {name} | {ms:.2f} | {foreseen:.2f} | {errors[-1]:+.1%} |")
    return [*lines, "", f"The largest error is {max(map(abs, errors)):.1%}."]


def group_table(record: Any, exchange: Exchange) -> list[str]:
    """Return what groups of heads are foreseen to give on two GPUs."""
    lines = ["| tokens in all | one group | 2, NCCL | 4, NCCL | 2, symmetric | 4, symmetric |", "| --- " * 6 + "|"]
    for tokens in (16384, 32768, 65536):
        passes = attention(record, tokens, 2, "heads")
        kernels = sum(each.kernels for each in passes.values())
        row = [share(passes, exchange, 2)]
        for transport in LINKS:
            for groups in (2, 4):
                times = (exchange.time_in_groups(each, groups, transport) for each in passes.values())
                row.append(kernels / sum(times))
        lines.append(f"| {tokens // 1024}k | " + " | ".join(f"{each:.0%}" for each in row) + " |")
    return lines


def rank_table(record: Any, exchange: Exchange) -> list[str]:
    """Return rates from 2 to 1,024 ranks, and what gradients by gather need of memory."""
    names = ("ranks", "tokens in all", "heads", "gather", "it holds, GB", "heads+gather", "Mixtral", "Qwen3-30B")
    lines = [f"| {' | '.join(names)} |", "| --- " * len(names) + "|"]
    for ranks in (2, 4, 8, 16, 64, 256, 1024):
        for tokens in sorted({TOKENS * ranks, 131072 if ranks <= HOST else min(65536 * ranks, 10_485_760)}):
            row = [str(ranks), f"{tokens // 1024:,}k"]
            for strategy in ("heads", "gather"):
                served = strategy == "gather" or HEADS_KV % ranks == 0
                passes = attention(record, tokens, ranks, strategy)
                row.append(f"{share(passes, exchange, ranks):.0%}" if served else "-")
            row.append(f"{tokens * 2 * HEADS_KV * D * GATHER_BYTES / 1e9:.1f}")
            row.append(f"{share_in_two_dimensions(record, tokens, exchange, ranks):.0%}" if ranks > HOST else "-")
            for model, sizes in EXPERTS.items():
                ways = [share(experts(record, model, ranks, once=once), exchange, ranks) for once in (False, True)]
                row.append(
                    ", ".join(f"{each:.0%}" for each in ways) if ranks <= sizes[0] and tokens == TOKENS * ranks else "-"
                )
            lines.append("| " + " | ".join(row) + " |")
    return lines


def read(name: str) -> Any:
    """Return what a file of runs holds."""
    return json.loads((RECORDS / name).read_text(encoding="utf-8"))


def later_table(record: Any, exchange: Exchange) -> list[str]:
    """Return runs of heads that were made after all was foreseen, beside it."""
    lines = ["| run | tokens in all | groups, transport | foreseen | measured | error |", "| --- " * 6 + "|"]
    for title, file in LATER:
        runs = read(file)
        for tokens in (16384, 65536):
            passes = attention(record, tokens, runs["ranks"], "heads")
            kernels = sum(each.kernels for each in passes.values())
            for way, row in runs[f"causal {tokens}"].items():
                if not way.startswith("heads"):
                    continue
                groups, transport = (1, "collectives") if way == "heads" else (int(way.split()[1]), way.split()[-1])
                if groups == 1:
                    foreseen = share(passes, exchange, runs["ranks"])
                else:
                    times = [exchange.time_in_groups(each, groups, transport) for each in passes.values()]
                    foreseen = kernels / sum(times)
                error = foreseen / row["share"] - 1
                lines.append(
                    f"| {title} | {tokens // 1024}k | {groups}, {transport} | {foreseen:.0%} | {row['share']:.0%} "
                    f"| {error:+.0%} |"
                )
    return lines


def tables() -> str:
    """Return the block of the page."""
    record = {key: value for name in FITTED for key, value in read(name).items()}
    exchange = fit(measured(record).values())
    fitted = f"With copies, an exchange moves {exchange.bandwidth / 1e6:.0f} GB/s. <!-- no claim: fitted to runs -->"
    later = ["Runs made after these forecasts:", "", *later_table(record, exchange)]
    parts = (check_table(record), [fitted], group_table(record, exchange), later, rank_table(record, exchange))
    return "\n\n".join(map("\n".join, parts))


def main() -> None:
    """Print the tables, or compare them with the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the page")
    if not parser.parse_args().check:
        print(tables())
        return
    if PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip() != tables():
        sys.exit(f"{PAGE.name} has other tables: put in those that this prints without --check")


if __name__ == "__main__":
    main()
