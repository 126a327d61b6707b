"""Decoding beside FlexAttention, each case of suite decode that it serves: times in CUDA graphs, ours and its.

    python lab/decode/flex.py compile    # in 14 processes, into torch's cache on the disk
    python lab/decode/flex.py            # then one process times all cases

FlexAttention compiles each case anew in each process, so a run of the harness beside it is a long one.
A graph has ten calls on one set of inputs (so where K and V fit into L2 they are there, for both); replays of ours and
of FlexAttention take turns, fifteen of each. Shown are medians, and the ratio of FlexAttention's to ours.
"""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import statistics
import sys

import torch
from torch._inductor.exc import InductorError

from flashmoe_science import flash_attention_with_kv_cache
from flashmoe_science.operators.attention_decode import DecodeOperator
from flashmoe_science.operators.baselines.attention_decode import BASELINES
from flashmoe_science.proof.subject.suites import load_suite

PROCESSES, CALLS, REPLAYS = 14, 10, 15
OPERATOR, FLEX = DecodeOperator(), BASELINES["flex"]


def served():
    """Return the cases that FlexAttention serves, with their names."""
    cases = [(case.name, case.problem) for case in load_suite("decode").cases]
    return [(name, problem) for name, problem in cases if FLEX.refusal(problem) is None]


def bind(problem):
    """Return the calls, ours and FlexAttention's, on the same inputs."""
    inputs = OPERATOR.make_inputs(problem, seed=1, device="cuda")
    return OPERATOR.bind(flash_attention_with_kv_cache, problem, inputs), OPERATOR.bind(FLEX.load(), problem, inputs)


def reason(error):
    """Return the last line of what the compiler says."""
    return [*filter(None, str(error).splitlines())][-1]


def compile_some(first):
    """Call FlexAttention once in every fourteenth case, so that its kernels are on the disk."""
    for name, problem in served()[first::PROCESSES]:
        try:
            with FLEX.context():
                bind(problem)[1]()
            torch.cuda.synchronize()
            print("compiled", name, flush=True)
        except InductorError as error:
            print(f"{name}: {reason(error)}", flush=True)
        torch.cuda.empty_cache()


def capture(call):
    """Return a graph of ten calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
    torch.cuda.synchronize()
    return graph


def microseconds(graph):
    """Return how long one call of a graph takes."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / CALLS


def main():
    """Time every case."""
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    ratios = []
    for name, problem in served():
        with FLEX.context():
            ours, theirs = bind(problem)
            try:
                a, b = ours(), theirs()
            except InductorError as error:  # torch 2.11, where K has 2**31 elements
                print(f"{name:60} flex does not compile: {reason(error)}", flush=True)
                continue
            a, b = (x[0] if isinstance(x, tuple) else x for x in (a, b))
            off = ((a.float() - b.float().view(a.shape)).abs().max() / a.float().abs().max()).item()
            graphs = capture(ours), capture(theirs)
            times = [[microseconds(graph) for graph in graphs] for _ in range(REPLAYS)]
        one, other = (statistics.median(column) for column in zip(*times, strict=True))
        ratios.append(other / one)
        print(
            f"{name:60} ours {one:9.2f} us  flex {other:9.2f} us  {other / one:6.3f}  differ by {off:.1e}", flush=True
        )
        del ours, theirs, graphs, a, b
        torch.cuda.empty_cache()
    print(f"{len(ratios)} cases, geometric mean {statistics.geometric_mean(ratios):.3f}, lowest {min(ratios):.3f}")


if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        make = functools.partial(
            concurrent.futures.ProcessPoolExecutor, mp_context=multiprocessing.get_context("spawn")
        )
        with make(PROCESSES) as pool:
            list(pool.map(compile_some, range(PROCESSES)))
    else:
        main()
