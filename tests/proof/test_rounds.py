"""Rounds on a simulated GPU: what is sampled, and what becomes of an arm that misbehaves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import pytest
import torch

from flashmoe_science.errors import ProofError
from flashmoe_science.proof.measure import arms, rounds
from flashmoe_science.proof.measure.allowed_error import Allowed
from flashmoe_science.proof.subject.operator import Operator
from flashmoe_science.proof.subject.subject import Subject

from .bench import Bench
from .simulated import HOST_SECONDS, Doubling, implementation, loaded, make_baseline


def test_graph_and_wall_time_of_every_arm_in_every_round():
    bench = Bench().run(process=2)
    assert [(arm.name, arm.role, arm.status, arm.version) for arm in bench.arms.values()] == [
        ("ours", "subject", "measured", "1.0"),
        ("sdpa", "baseline", "measured", "1.0"),
        ("sdpa#2", "control", "measured", "1.0"),
    ]
    assert set(bench.rounds.seconds) == {"graph", "wall"}
    assert bench.seconds("graph")["ours"] == pytest.approx([2e-6] * 4)
    assert bench.seconds("graph")["sdpa"] == pytest.approx([6e-6] * 4)
    assert bench.seconds("graph")["sdpa#2"] == pytest.approx([6e-6] * 4)
    assert bench.seconds("wall")["ours"] == pytest.approx([2e-6 + HOST_SECONDS] * 4)
    assert bench.rounds.process == [2] * 4
    assert bench.rounds.sm_clock_mhz == [1980] * 4
    assert bench.rounds.throttle == [""] * 4
    assert all(sorted(order) == ["ours", "sdpa", "sdpa#2"] for order in bench.rounds.order)
    assert bench.progress == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_baselines_alone_are_timed_whichever_of_them_is_refused():
    bench = Bench()
    refused = make_baseline("picky", implementation(bench.gpu), refusal="odd sizes")
    bench.subject = loaded("picky", refused.load(), baseline=refused)
    bench.run(control=False, thorough=False)
    assert {arm.name: arm.status for arm in bench.arms.values()} == {"picky": "refused", "sdpa": "measured"}
    assert set(bench.seconds("graph")) == {"sdpa"}


def test_a_graph_is_captured_anew_for_every_arm_in_every_round():
    bench = Bench().run(["graph"])
    trials, captures = bench.timer.captures[:3], bench.timer.captures[3:]
    assert trials == [64, 64, 64]
    assert captures == [64] * 12  # 64 sets, 200 calls wanted: each has a set of its own, the same for all arms


def test_inputs_rotate_over_sets_that_hold_twenty_times_the_cache():
    result = Bench(length=512).run(rounds=1).result
    assert (result["input_sets"], result["input_set_bytes"]) == (10, 2048)
    assert Bench(length=8192).run(rounds=1).result["input_sets"] == 2


def test_all_ranks_have_as_many_sets_as_the_one_with_the_least_memory(monkeypatch):
    """Ranks that make different numbers of calls wait for one another without end."""
    bench = Bench(length=8192)
    bench.timer.memory_bytes = 1 << 30
    monkeypatch.setattr(rounds, "ranks_here", lambda: 2)
    monkeypatch.setattr(rounds, "meet", lambda value, step: [value, 7] if step == "sets counted" else [value])
    assert bench.run(rounds=1).result["input_sets"] == 7


@pytest.mark.parametrize("times", [["graph"], ["wall"], ["kernel"]])
@pytest.mark.parametrize("length", [64, 2048])  # 64 sets, and 3
def test_no_timed_call_reads_values_that_a_call_before_it_has_read(times, length):
    bench = Bench(length=length)
    plain = implementation(bench.gpu)
    read: list[list[float]] = []

    def entry(x):
        out = torch.empty(x.shape)

        def work():
            if bench.gpu.timing:
                read.append(x.tolist())
            out.copy_(2 * x)

        bench.gpu.launch(work, seconds=2e-6)
        return out

    bench.subject = loaded("ours", entry, role="subject")
    bench.baselines = [loaded("sdpa", plain)]
    bench.run(times)
    assert bench.arms["ours"].status == "measured"
    assert len(read) >= 4 * 3
    assert len({tuple(values) for values in read}) == len(read)


def test_all_arms_of_a_round_read_the_same_values():
    bench = Bench(length=2048)
    seen: dict[str, set[float]] = {"ours": set(), "sdpa": set()}

    def telling(name):
        plain = implementation(bench.gpu)

        def entry(x):
            seen[name].add(x[0].item())
            return plain(x)

        return entry

    bench.subject = loaded("ours", telling("ours"), role="subject")
    bench.baselines = [loaded("sdpa", telling("sdpa"))]
    bench.run(["wall"], control=False)
    assert len(seen["sdpa"]) > 4 * 3 * 3
    assert len(seen["sdpa"] - seen["ours"]) == 0


def test_seeds_are_asked_for_one_at_a_time_when_a_round_begins():
    given = iter(range(1000, 2000))
    asked: list[int] = []

    def new_seed():
        asked.append(next(given))
        return asked[-1]

    bench = Bench()
    begun: list[int] = []
    plain = implementation(bench.gpu)

    def entry(x):
        begun.append(len(asked))
        return plain(x)

    bench.subject = loaded("ours", entry, role="subject")
    bench.run(["wall"], new_seed=new_seed)
    assert len(set(begun)) >= 6  # before, four rounds, and after
    assert asked == list(range(1000, 1000 + len(asked)))


def test_accuracy_and_peak_memory_are_recorded():
    arm = Bench().run().arms["ours"]
    assert arm.accuracy.max_error == 0.0
    assert 0 < arm.accuracy.low_precision_error <= arm.accuracy.budget
    assert arm.accuracy.deterministic is True
    assert arm.peak_bytes == 256


def test_orders_differ_between_processes_and_repeat_within_one():
    first, again, other = (Bench().run(process=process, rounds=10).rounds.order for process in (0, 0, 1))
    assert first == again
    assert first != other


def test_kernel_time_is_the_median_of_cold_calls():
    bench = Bench().run(["kernel"])
    assert bench.seconds("kernel")["ours"] == pytest.approx([2e-6] * 4)
    assert bench.seconds("kernel")["sdpa#2"] == pytest.approx([6e-6] * 4)
    assert bench.timer.flushes == 4 * 3 * 5  # rounds, arms, calls
    assert bench.timer.recordings == 1
    assert bench.timer.captures == []
    assert [launch.name for launch in bench.arms["ours"].launches] == ["kernel"]


def test_kernel_time_over_rotating_inputs_is_flushed_only_after_values_were_written():
    bench = Bench().run(["kernel"], cache="rotating", rounds=12)
    assert bench.seconds("kernel")["ours"] == pytest.approx([2e-6] * 12)
    assert bench.timer.flushes == 12 * 3
    assert bench.timer.recordings == 2  # a profiler session for at most ten rounds


def test_profiling_and_clocks_are_never_mixed():
    with pytest.raises(ProofError, match="times must be kernel alone"):
        Bench().run(["kernel", "wall"])
    with pytest.raises(ProofError, match="times must be kernel alone"):
        Bench().run([])


def test_the_control_copies_the_first_baseline_that_runs_here():
    bench = Bench()
    bench.baselines = [
        arms.Loaded("fa3", "baseline", None, "unavailable", "no module named fa3"),
        loaded("flash", bench.baselines[0].entry, baseline=make_baseline("flash", refusal="head dimension above 256")),
        loaded("sdpa", bench.baselines[0].entry),
    ]
    bench.run()
    assert list(bench.arms) == ["ours", "fa3", "flash", "sdpa", "sdpa#2"]
    assert (bench.arms["fa3"].status, bench.arms["fa3"].reason) == ("unavailable", "no module named fa3")
    assert (bench.arms["flash"].status, bench.arms["flash"].reason) == ("refused", "head dimension above 256")
    assert set(bench.seconds("wall")) == {"ours", "sdpa", "sdpa#2"}


def test_the_control_has_closures_of_its_own(monkeypatch):
    bench = Bench()
    bound = []
    bind = bench.operator.bind

    def counting(entry, problem, inputs):
        bound.append(entry)
        return bind(entry, problem, inputs)

    monkeypatch.setattr(bench.operator, "bind", counting)
    bench.run()
    # 64 sets for each; the subject also once for the stream check.
    assert [bound.count(each.entry) for each in (bench.subject, bench.baselines[0])] == [65, 128]


def test_a_baseline_out_of_memory_fails_alone():
    bench = Bench()

    def greedy(x):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.\nmore")

    bench.baselines.append(loaded("math", greedy))
    bench.run()
    assert (bench.arms["math"].status, bench.arms["math"].role) == ("failed", "baseline")
    reason = bench.arms["math"].reason
    assert reason.startswith("GPU out of memory: OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 GiB.")
    assert set(bench.seconds("graph")) == {"ours", "sdpa", "sdpa#2"}


def test_a_lost_context_ends_the_process_and_names_the_arm():
    bench = Bench()
    working = bench.baselines[0].entry

    def crashes(x):
        bench.gpu.lost = True
        return working(x)

    bench.baselines.append(loaded("wild", crashes))
    with pytest.raises(
        ProofError, match="the GPU context is lost after arm wild: RuntimeError: CUDA error: an illegal"
    ):
        bench.run()


def test_a_baseline_that_answers_otherwise_after_timing_loses_its_times_alone():
    bench = Bench()
    plain = implementation(bench.gpu)
    calls = []

    def entry(x):
        calls.append(x)
        return plain(x) if len(calls) < 500 else torch.zeros_like(x)

    bench.baselines.append(loaded("tires", entry))
    bench.run(["wall"])
    assert "its answer after timing is wrong: it is off: error" in bench.arms["tires"].reason
    assert set(bench.seconds("wall")) == {"ours", "sdpa", "sdpa#2"}


def test_an_arm_that_cannot_be_captured_keeps_its_wall_time():
    bench = Bench()
    plain = implementation(bench.gpu)

    def entry(x):
        if bench.gpu.capturing is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nhint")
        return plain(x)

    bench.baselines.append(loaded("syncs", entry))
    bench.run()
    arm = bench.arms["syncs"]
    assert arm.status == "failed"
    assert arm.reason.startswith("graph time: it cannot be captured: RuntimeError: CUDA error: operation not permitted")
    assert "syncs" not in bench.seconds("graph")
    assert len(bench.seconds("wall")["syncs"]) == 4


def test_a_kernel_that_is_absent_from_the_graph_gives_no_graph_time():
    bench = Bench()
    plain = implementation(bench.gpu)

    def entry(x):  # computed while capturing, so the memory holds the right answer until it is poisoned
        return 2 * x if bench.gpu.capturing is not None else plain(x)

    bench.subject = loaded("ours", entry, role="subject")
    bench.run()
    assert "graph time: a replay of its graph is wrong: it has NaN" in bench.arms["ours"].reason
    assert "ours" not in bench.seconds("graph")
    assert set(bench.seconds("graph")) == {"sdpa", "sdpa#2"}


def test_calls_without_work_on_the_gpu_have_no_kernel_time():
    bench = Bench()
    bench.baselines.append(loaded("host", lambda x: 2 * x))
    bench.run(["kernel"])
    assert bench.arms["host"].reason == "kernel time: the profiler saw a call without any work on the GPU"
    assert "host" not in bench.seconds("kernel")


@pytest.mark.parametrize("cache", ["cold", "rotating"])
def test_work_that_is_skipped_under_the_profiler_gives_no_kernel_time(cache):
    bench = Bench()
    plain = implementation(bench.gpu)

    def entry(x):
        if not bench.gpu.listeners:
            return plain(x)
        bench.gpu.launch(lambda: None, seconds=1e-6)
        return torch.zeros(x.shape)

    bench.subject = loaded("ours", entry, role="subject", deterministic=True)
    bench.run(["kernel"], cache=cache)
    assert "kernel time: an answer of a timed sample is wrong: it is off: error" in bench.arms["ours"].reason
    assert set(bench.seconds("kernel")) == {"sdpa", "sdpa#2"}


def test_answers_kept_for_the_length_of_a_sample_give_no_kernel_time():
    """Two sets of inputs come round within a sample: an answer that was kept by address is that to other values."""
    bench = Bench(length=8192)
    plain = implementation(bench.gpu)
    kept: dict[int, tuple[float, torch.Tensor]] = {}

    def entry(x):
        if bench.gpu.listeners:
            since, answer = kept.get(x.data_ptr(), (-1.0, x))
            if bench.gpu.now - since < 150e-6:
                bench.gpu.launch(lambda: None, seconds=1e-6)
                return answer
        kept[x.data_ptr()] = (bench.gpu.now, plain(x))
        return kept[x.data_ptr()][1]

    bench.subject = loaded("ours", entry, role="subject", deterministic=True)
    bench.run(["kernel"], rounds=10)
    assert "kernel time: an answer of a timed sample is wrong" in bench.arms["ours"].reason


def test_calls_whose_work_varies_have_no_kernel_time():
    bench = Bench()
    plain = implementation(bench.gpu)
    calls = []

    def entry(x):
        calls.append(x)
        if len(calls) % 7 == 0:
            bench.gpu.launch(lambda: None)
        return plain(x)

    bench.baselines.append(loaded("varies", entry))
    assert "its calls gave the GPU 1 to 2 pieces of work" in bench.run(["kernel"]).arms["varies"].reason


def test_an_arm_that_fails_in_a_late_round_loses_that_time_only():
    bench = Bench()
    plain = implementation(bench.gpu)
    captures = []

    def entry(x):
        if bench.gpu.capturing is not None and not bench.gpu.capturing:
            captures.append(1)
            if len(captures) == 4:  # the trial, rounds 0 and 1, round 2
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return plain(x)

    bench.baselines.append(loaded("late", entry))
    bench.run()
    assert bench.arms["late"].reason.startswith("graph time: round 2: GPU out of memory: OutOfMemoryError")
    assert "late" not in bench.seconds("graph")
    assert len(bench.seconds("wall")["late"]) == 4


def test_a_case_that_cannot_be_set_up_fails_with_all_its_arms(monkeypatch):
    bench = Bench()

    def greedy(problem, inputs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(bench.operator, "exact", greedy)
    bench.run()
    assert {arm.status for arm in bench.arms.values()} == {"failed"}
    assert bench.arms["ours"].reason.startswith("the case cannot be set up: GPU out of memory: OutOfMemoryError")
    assert bench.rounds is None


def test_slow_calls_make_few_calls_a_sample():
    bench = Bench()
    count = []
    slow = implementation(bench.gpu, seconds=20e-3)

    def entry(x):
        count.append(x)
        return slow(x)

    bench.baselines = [loaded("slow", entry)]
    bench.run()
    assert bench.seconds("graph")["slow"] == pytest.approx([20e-3] * 4)
    # Two arms, 64 sets. Before: first call, peak, 64 sets, again, who follows = 68. Estimate 1 + 3, trial 2. After: 64
    # and 2 again. A round: 1 warm and 3 timed wall calls and 1 again, 2 in the graph and 2 again.
    assert len(count) == 2 * (68 + 4 + 2 + 66 + 4 * (1 + 3 + 1 + 2 + 2))


def test_a_baseline_that_copied_its_inputs_when_it_was_bound_is_measured(monkeypatch):
    bench = Bench()
    bind = bench.operator.bind

    def copying(entry, problem, inputs):
        mine = {"x": inputs["x"].clone()} if entry is bench.baselines[0].entry else inputs
        return bind(entry, problem, mine)

    monkeypatch.setattr(bench.operator, "bind", copying)
    bench.run()
    assert {arm.status for arm in bench.arms.values()} == {"measured"}, bench.arms


def test_a_subject_that_answers_to_the_values_of_before_fails(monkeypatch):
    bench = Bench()
    bind = bench.operator.bind
    monkeypatch.setattr(
        bench.operator, "bind", lambda entry, problem, inputs: bind(entry, problem, {"x": inputs["x"].clone()})
    )
    bench.run(thorough=False)
    assert bench.arms["ours"].reason == "its answer to new values at the same addresses is the old one"
    assert bench.rounds is None
    assert {arm.status for arm in bench.arms.values()} == {"failed", "not measured"}


def test_an_arm_that_confuses_its_inputs_fails():
    bench = Bench()
    plain = implementation(bench.gpu)
    calls = []

    def entry(x):
        calls.append(x)
        return plain(x) if len(calls) < 68 else torch.zeros_like(x)

    bench.baselines.append(loaded("confused", entry))
    assert bench.run().arms["confused"].reason == "its answer to new values at the same addresses is wrong"


def of_size(largest):
    return (Allowed(torch.tensor(largest)),)


def test_late_answers_have_a_tolerance_of_each_row():
    right = torch.ones(2, 32)
    allowed = Allowed(torch.tensor([[1e-2], [1e-4]]), torch.tensor([[1e-2], [3e-5]]))
    assert arms.mismatch([right + 5e-3 * torch.eye(2, 32)[:1]], [right], None)
    for row, element, wrong in ((0, 9e-3, False), (0, 1.1e-2, True), (1, 9e-5, False), (1, 1.1e-4, True)):
        late = right.clone()
        late[row, 5] += element
        assert bool(arms.mismatch([late], [right], (allowed,))) == wrong, (row, element)
    all_of_row = right + torch.tensor([[0.0], [5e-5]])  # each element is right, and the row as a whole is not
    assert arms.mismatch([all_of_row], [right], (allowed,))


def test_mismatch_counts_answers_and_never_accepts_nan():
    ones, more = torch.ones(3), torch.ones(3) + 1e-3
    nan = torch.tensor([1.0, 1.0, math.nan])
    assert arms.mismatch([ones, ones], [ones.clone(), ones], None) == ""
    assert arms.mismatch([ones, more], [ones, ones], None) == "1 of 2 answers differ, expected the same bits"
    assert arms.mismatch([more], [ones], of_size(2e-3)) == ""
    assert "expected a difference up to 0.0005" in arms.mismatch([more], [ones], of_size(5e-4))
    assert arms.mismatch([nan], [nan], None)
    assert arms.mismatch([nan], [nan], of_size(1.0))
    assert arms.mismatch([-torch.zeros(1)], [torch.zeros(1)], None)  # other bits, if equal numbers
    assert arms.mismatch([ones.half()], [ones], None) == "expected torch.float32 of shape [3], got torch.float16 of [3]"
    assert arms.mismatch([torch.ones(0)], [torch.ones(0)], None) == ""
    transposed = torch.arange(6.0).reshape(2, 3)
    assert arms.mismatch([transposed.t().contiguous().t()], [transposed], None) == ""


def test_loading_says_what_is_missing():
    operator = Doubling(
        [
            make_baseline("sdpa", lambda x: 2 * x),
            make_baseline("fa3", error=ImportError("no module named flash_attn_interface")),
            make_baseline("broken", error=RuntimeError("bad build\ndetails")),
        ]
    )
    found = [arms.load_baseline(each) for each in operator.baselines().values()]
    assert [(each.status, each.reason) for each in found] == [
        ("loaded", ""),
        ("unavailable", "no module named flash_attn_interface"),
        ("failed", found[2].reason),
    ]
    assert found[2].reason.startswith("RuntimeError: bad build (")


def test_arms_have_names_of_their_own():
    operator = cast("Operator", Doubling([make_baseline("sdpa", lambda x: 2 * x)]))
    subject = Subject("ours", "doubling", "no_such_module:f", Path(), ())
    ours, sdpa = arms.load_arms(subject, operator, ["sdpa"])
    assert (ours.status, ours.role, sdpa.status, sdpa.role) == ("failed", "subject", "loaded", "baseline")
    assert ours.reason.startswith("ModuleNotFoundError")
    with pytest.raises(ProofError, match="names of their own, got ours, sdpa, sdpa"):
        arms.load_arms(subject, operator, ["sdpa", "sdpa"])
    with pytest.raises(ProofError, match="baseline must be one of sdpa, got 'fa9'"):
        arms.load_arms(subject, operator, ["fa9"])
