"""An operator over ranks in plain torch, and subjects that are right on all ranks or go wrong on one of them.

Each rank has a span of a vector. Its answer is the span plus the sum of all spans.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flashmoe_science.proof.subject.custom_operator import CustomOperator, Work

NAME = "tests.proof.ranked"
LATE_S = 0.03


@dataclass(frozen=True)
class Problem:
    ranks: int
    length: int  # of a rank


def rank_here():
    return dist.get_rank() if dist.is_initialized() else 0


class Sums(CustomOperator):
    name = f"{NAME}:OPERATOR"

    def parse_case(self, table):
        return Problem(**table)

    def as_table(self, problem):
        return {"ranks": problem.ranks, "length": problem.length}

    def describe(self, problem):
        return f"w{problem.ranks}_n{problem.length}"

    def ranks(self, problem):
        return problem.ranks

    def layout(self, entry):
        return getattr(entry, "layout", "straight")

    def shard(self, problem, layout, rank, output, tensor):
        spans = tensor.view(problem.ranks, problem.length, *tensor.shape[1:])
        return spans[rank if layout == "straight" else problem.ranks - 1 - rank]

    def work(self, problem):
        return Work(2.0 * problem.length, 8.0 * problem.length, problem.length)

    def make_inputs(self, problem, *, seed, device):
        generator = torch.Generator(device).manual_seed(seed)
        return {"x": torch.randn(problem.ranks * problem.length, generator=generator, device=device)}

    def bind(self, entry, problem, inputs):
        mine = self.shard(problem, self.layout(entry), rank_here(), "", inputs["x"])
        return lambda: entry(mine)

    def exact(self, problem, inputs):
        spans = inputs["x"].double().view(problem.ranks, problem.length)
        return (spans + spans.sum(0)).flatten()

    def low_precision(self, problem, inputs):
        spans = inputs["x"].view(problem.ranks, problem.length)
        return (spans.half() + spans.half().sum(0)).float().flatten()

    def baselines(self):
        return {each.name: each for each in ENTRIES}


class Summing:
    """A baseline that is one of the entry points below."""

    kernels = ()

    def __init__(self, name, entry):
        self.name, self.load = name, lambda: entry

    def version(self):
        return "1.0"

    def refusal(self, problem):
        return None

    def context(self):
        return contextlib.nullcontext()


class OfEachRank(Sums):
    """Ranks read different problems out of one case."""

    name = f"{NAME}:OF_EACH_RANK"

    def parse_case(self, table):
        return Problem(table["ranks"], table["length"] + rank_here())


def right(x):
    total = x.clone()
    dist.all_reduce(total)
    return x + total


def needs_a_gpu(x):
    raise RuntimeError("Found no NVIDIA driver on your system")


def turned(x):
    """Answer as ``right`` does, of a span that the other layout gives."""
    return right(x)


turned.layout = "turned"  # type: ignore[attr-defined]


def late(x):
    answer = right(x)
    time.sleep(LATE_S * rank_here())
    return answer


def wrong_on_rank_1(x):
    answer = right(x)
    answer[3] += rank_here()
    return answer


def raises_on_rank_1(x):
    if rank_here():
        raise ValueError("no more")
    return right(x)


_calls = itertools.count()


def dies_on_rank_1(x):
    if rank_here() and next(_calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return right(x)


def hangs_on_rank_1(x):
    time.sleep(600 * rank_here())
    return right(x)


ENTRIES = (
    Summing("plain", right),
    Summing("late", late),
    Summing("turned", turned),
    Summing("wrong", wrong_on_rank_1),
)
OPERATOR, OF_EACH_RANK = Sums(), OfEachRank()
