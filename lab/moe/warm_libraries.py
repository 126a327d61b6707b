"""Compile and tune what libraries' experts need, before a run: warm_libraries.py SUITE compile|tune LIBRARY[,...].

Liger-Kernel tries 104 configurations for each hidden and intermediate size, and once they are chosen takes them for any number of tokens. They are
compiled here by 15 processes at once and then tuned with 64 tokens, or what a suite has next to that. With TRITON_CACHE_AUTOTUNING=1, here and in
the run, the processes of a run find the choice; TRITON_CACHE_DIR says where. The rest of a cache holds what triton_kernels needs of each case.
"""
import concurrent.futures, multiprocessing, os, sys, time
suite_name, mode = sys.argv[1], sys.argv[2]
arms = sys.argv[3].split(",")
N = int(os.environ.get("WARM_PROCESSES", "15"))
TUNE_TOKENS = int(os.environ.get("TUNE_TOKENS", "64"))

def cases():
    from flashmoe_science.proof.subject.suites import load_suite
    return [case.problem for case in load_suite(suite_name).cases]

def shapes():
    """One case for each (hidden, inter) that liger tunes for."""
    found = {}
    for case in cases():
        p = case.problem
        if not [f for f in p.features if f != "shared experts"]:
            key = (p.hidden, p.inter, p.top_k)
            if key not in found or abs(p.tokens - TUNE_TOKENS) < abs(found[key].problem.tokens - TUNE_TOKENS):
                found[key] = case
    return [*found.values()]

def work(i):
    import torch
    from flashmoe_science.operators.moe import MoeOperator
    op, said, begin = MoeOperator(), [], time.perf_counter()
    if mode == "compile":
        import liger_kernel.ops.fused_moe_kernels as k
        from triton.runtime.autotuner import Autotuner
        for tuner in vars(k).values():
            if isinstance(tuner, Autotuner):
                tuner.configs = tuner.configs[i::N] or tuner.configs[:1]
                tuner.cache_results = False
                tuner.do_bench = lambda fn, **_: (fn(), (1.0, 1.0, 1.0))[1]
                tuner._do_bench = tuner.do_bench
    jobs = [("liger", c) for c in shapes()] if "liger" in arms else []
    if mode == "compile":
        jobs += [(a, c) for a in arms if a != "liger" for c in cases()[i::N]]
    for name, case in jobs:
        try:
            if MoeOperator.known_baselines[name].refusal(case):
                continue
            inputs = op.make_inputs(case, seed=1, device="cuda")
            op.bind(MoeOperator.known_baselines[name].load(), case, inputs)()
            torch.cuda.synchronize()
        except Exception as error:
            said.append(f"{name} {case}: {type(error).__name__} {str(error)[:200]}")
        inputs = None
        torch.cuda.empty_cache()
    return f"{i}: {time.perf_counter() - begin:.0f} s {said}"

if __name__ == "__main__":
    begin = time.perf_counter()
    if mode == "tune":
        print(work(0))
        import liger_kernel.ops.fused_moe_kernels as k
        for name, tuner in vars(k).items():
            for key, config in getattr(tuner, "cache", {}).items() if hasattr(tuner, "configs") else ():
                print(name, key, config)
    else:
        with concurrent.futures.ProcessPoolExecutor(N, mp_context=multiprocessing.get_context("spawn")) as pool:
            for said in pool.map(work, range(N)):
                if not said.endswith("[]"):
                    print(said)
    print(f"{mode}: {time.perf_counter() - begin:.0f} s", flush=True)
