"""Call each baseline once for each case of a suite, in many processes at once, so that a run finds it compiled.

    python lab/warm_baselines.py SUITE BASELINE[,...] [PROCESSES]

FlashAttention-4 compiles a kernel in some 5 s, one after another, and keeps it on disk if its environment says so
(FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED, _DIR). Of suite train-packed with two baselines gate launch took 148 s for that.
"""

import concurrent.futures
import multiprocessing
import sys
import time


def work(job: tuple[str, str, int, int]) -> list[str]:
    suite_name, baselines, first, step = job
    import torch

    from flashmoe_science.proof.subject.loading import load_operator
    from flashmoe_science.proof.subject.suites import load_suite

    suite, said = load_suite(suite_name), []
    operator = load_operator(suite.operator)
    pairs = [(name, case.problem) for case in suite.cases for name in baselines.split(",")]
    for name, problem in pairs[first::step]:
        baseline = operator.known_baselines[name]
        try:
            if not baseline.refusal(problem):
                operator.bind(baseline.load(), problem, operator.make_inputs(problem, seed=1, device="cuda"))()
                torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - the run says why
            said.append(f"{name} {operator.describe(problem)}: {type(error).__name__} {str(error)[:200]}")
        torch.cuda.empty_cache()
    return said


if __name__ == "__main__":
    begun = time.monotonic()
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 12
    jobs = [(*sys.argv[1:3], first, count) for first in range(count)]
    with concurrent.futures.ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        for lines in pool.map(work, jobs):
            print(*lines, sep="\n", end="\n" if lines else "")
    print(f"{time.monotonic() - begun:.0f} s")
