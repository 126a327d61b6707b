"""Rounds on a simulated GPU: a subject whose answers are wrong, cached, late or never computed gets no times."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from flashmoe_science.proof.measure import allowed_error, rounds
from flashmoe_science.proof.measure.fresh_values import FreshValues

from .bench import Bench
from .chain import SUBJECTS
from .fake_operator import FakeOperator, Problem
from .simulated import Doubling, implementation, loaded, make_baseline


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda out: out + 1, "its answer is off: error 1"),
        (lambda out: out * math.nan, "its answer has NaN"),
        (torch.zeros_like, "its answer is off: error"),
    ],
)
def test_a_subject_that_answers_wrongly_has_no_times(change, reason):
    bench = Bench()
    bench.subject = loaded("ours", implementation(bench.gpu, change=change), role="subject")
    bench.run()
    assert bench.rounds is None
    assert bench.arms["ours"].status == "failed"
    assert bench.arms["ours"].reason.startswith(reason)
    assert bench.arms["sdpa"].status == "not measured"


def test_answers_to_other_sets_than_the_first_are_compared_with_the_exact_ones_too():
    bench = Bench(length=8192)  # two sets
    plain = implementation(bench.gpu)
    seen: list[int] = []

    def entry(x):
        if x.data_ptr() not in seen:
            seen.append(x.data_ptr())
        return plain(x) + (x.data_ptr() != seen[0])

    bench.subject = loaded("ours", entry, role="subject")
    assert bench.run().arms["ours"].reason.startswith("its answer is off: error 1")


def test_the_sets_that_are_compared_with_the_exact_answer_are_drawn(monkeypatch):
    drawn = []
    whole = allowed_error.Whole

    def watched(operator, problem, inputs):
        drawn.append(inputs["x"][0].item())
        return whole(operator, problem, inputs)

    monkeypatch.setattr(rounds, "Whole", watched)
    for seed in range(4):
        Bench().run(["wall"], seed=seed, rounds=1)
    assert len(set(drawn)) == 8  # two sets in each run


def test_an_answer_of_another_shape_is_refused():
    bench = Bench()
    bench.subject = loaded("ours", lambda x: x[:3] * 2, role="subject")
    assert "its answer must have shape [64], got [3]" in bench.run().arms["ours"].reason


def test_a_yardstick_is_timed_though_its_answer_is_none_to_the_problem():
    bench = Bench()
    work = implementation(bench.gpu, seconds=4e-6, change=lambda out: -out)
    measure = make_baseline("product", work)
    measure.speed_of_light = True
    bench.baselines.append(loaded("product", work, baseline=measure))
    product = bench.run().arms["product"]
    assert (product.status, product.accuracy, product.speed_of_light) == ("measured", None, True)
    assert bench.arms["sdpa"].speed_of_light is False
    assert bench.seconds("graph")["product"] == pytest.approx([4e-6] * 4)
    measure.speed_of_light = False
    assert "its answer is off: error" in bench.run().arms["product"].reason


def test_a_subject_that_raises_has_no_times():
    bench = Bench()
    bench.subject = loaded("ours", lambda x: x.no_such_method(), role="subject")
    assert bench.run().arms["ours"].reason.startswith("AttributeError: ")
    assert bench.rounds is None


def test_bits_that_vary_fail_only_where_the_same_bits_are_promised():
    bench = Bench()
    jitter = iter(range(1_000_000))
    varying = implementation(bench.gpu, change=lambda out: out + 1e-6 * (next(jitter) % 3))
    bench.baselines = [loaded("atomics", varying)]
    bench.run()
    assert bench.arms["atomics"].status == "measured"
    accuracy = bench.arms["atomics"].accuracy
    assert accuracy is not None
    assert accuracy.deterministic is False
    bench.subject = loaded("ours", varying, role="subject", deterministic=True)
    assert "gave other bits" in bench.run().arms["ours"].reason


def test_work_on_a_stream_that_nobody_waits_for_is_found_before_timing():
    bench = Bench()
    bench.subject = loaded("ours", implementation(bench.gpu, stream="other"), role="subject")
    assert "its work is not ordered with the stream that it is called on" in bench.run().arms["ours"].reason
    assert bench.rounds is None


def test_the_stream_check_can_be_left_to_a_later_gate():
    bench = Bench()
    bench.subject = loaded("ours", implementation(bench.gpu, stream="other"), role="subject")
    assert "not ordered with the stream" not in bench.run(["wall"], thorough=False).arms["ours"].reason


def test_results_cached_by_pointer_are_found_after_timing():
    bench = Bench()
    plain = implementation(bench.gpu)
    cache: dict[int, torch.Tensor] = {}
    calls = []

    def entry(x):
        calls.append(x)
        if len(calls) < 200:  # honest while the harness looks
            return plain(x)
        if x.data_ptr() not in cache:
            cache[x.data_ptr()] = plain(x)
        return cache[x.data_ptr()]

    bench.subject = loaded("ours", entry, role="subject")
    assert bench.run(["wall"]).arms["ours"].reason.startswith("its answer after timing is wrong: it is off: error")
    assert bench.rounds is None


def cached_late(gpu, honest_calls):
    """Return an entry point that, after so many calls, remembers results by address and version of its input."""
    plain = implementation(gpu)
    cache: dict[tuple[int, int], torch.Tensor] = {}
    calls = []

    def entry(x):
        calls.append(x)
        if len(calls) < honest_calls:
            return plain(x)
        key = (x.data_ptr(), x._version)
        if key not in cache:
            cache[key] = plain(x)
        return cache[key]

    return entry


@pytest.mark.parametrize("honest_calls", [80, 200, 400])  # the last one: in the last blocks
@pytest.mark.parametrize("length", [64, 512, 8192])  # 64, 10 and 2 sets, 2 however large
def test_results_cached_late_by_pointer_and_version_are_found(honest_calls, length):
    bench = Bench(length=length)
    bench.subject = loaded("ours", cached_late(bench.gpu, honest_calls), role="subject")
    assert "its answer after timing is wrong: it is off: error" in bench.run(["wall"]).arms["ours"].reason
    assert bench.rounds is None


def test_the_subject_that_caches_late_begins_after_gate_quick_and_before_gate_bench_has_ended():
    source = (SUBJECTS / "cached_late" / "cached_late.py").read_text()
    honest = int(re.search(r"^HONEST_CALLS = (\d+)", source, re.MULTILINE)[1])  # type: ignore[index]
    made = []
    for times, count in ((["graph"], 5), (["graph", "wall"], 10)):  # as gate quick, and as its test on a GPU
        bench = Bench()
        plain = implementation(bench.gpu, seconds=2e-6)
        calls: list[Any] = []

        def entry(x, bench=bench, plain=plain, calls=calls):
            calls.append(bench.gpu.capturing is None)
            return plain(x)

        bench.subject = loaded("ours", entry, role="subject")
        assert bench.run(times, rounds=count).result["input_sets"] == 64
        made.append(sum(calls))
    quick, bench_calls = made
    assert 1.2 * quick < honest < bench_calls - 2 * 64  # each set's result is kept once, and asked for again


def test_results_that_are_cached_while_the_clock_runs_are_found(monkeypatch):
    bench = Bench()
    plain, cached = implementation(bench.gpu), cached_late(bench.gpu, 0)
    timing = []
    wall_seconds = bench.timer.wall_seconds

    def telling(sequence):
        timing.append(1)
        seconds = wall_seconds(sequence)
        timing.clear()
        return seconds

    monkeypatch.setattr(bench.timer, "wall_seconds", telling)
    bench.subject = loaded("ours", lambda x: cached(x) if timing else plain(x), role="subject")
    reason = bench.run(["wall"]).arms["ours"].reason
    assert reason.startswith("wall time: the last answer of a timed block is wrong: it is off: error")


def test_results_computed_while_capturing_and_copied_by_the_graph_are_found():
    bench = Bench()
    plain = implementation(bench.gpu)

    def entry(x):
        if bench.gpu.capturing is None:
            return plain(x)
        out, cached = torch.empty(x.shape), 2 * x  # on a stream that is not captured
        bench.gpu.launch(lambda: out.copy_(cached), name="memcpy")
        return out

    bench.subject = loaded("ours", entry, role="subject")
    bench.run(["graph"])
    assert "graph time: a replay of its graph is wrong: it is off: error" in bench.arms["ours"].reason


def keyed_by_content(gpu, *, plain_seconds=6e-6, elements=16):
    """Return an entry point whose kernel keeps its results on the device, keyed by 16 elements of what it reads.

    What it finds there it hands out in a tenth of the time, in a graph too.
    """
    kept: dict[tuple[float, ...], torch.Tensor] = {}

    def entry(x):
        out = torch.empty(x.shape)
        places = torch.linspace(0, x.numel() - 1, elements).long()

        def work():
            key = tuple(x[places].tolist())
            if key in kept:
                gpu.now -= plain_seconds * 0.9
            else:
                kept[key] = 2 * x
            out.copy_(kept[key])

        gpu.launch(work, seconds=plain_seconds)
        return out

    return entry


@pytest.mark.parametrize("times", [["graph", "wall"], ["kernel"]])
@pytest.mark.parametrize("length", [64, 2048, 8192])  # 64 sets, 3 and 2
def test_a_kernel_that_keeps_results_by_16_elements_is_found(times, length):
    for seed in range(3):
        bench = Bench(length=length)
        bench.subject = loaded("ours", keyed_by_content(bench.gpu), role="subject", deterministic=True)
        reason = bench.run(times, seed=seed).arms["ours"].reason
        assert reason.startswith("its answer is wrong where most values are those of the call before: it is off: error")
        assert bench.rounds is None


def test_gate_quick_leaves_values_of_which_few_are_new_to_gate_bench():
    bench = Bench()
    bench.subject = loaded("ours", keyed_by_content(bench.gpu), role="subject", deterministic=True)
    assert bench.run(["graph"], thorough=False).arms["ours"].status == "measured"
    assert bench.seconds("graph")["ours"] == pytest.approx(bench.seconds("graph")["sdpa"])  # and nothing is gained


@pytest.mark.parametrize("times", [["graph", "wall"], ["kernel"]])
@pytest.mark.parametrize("length", [64, 2048, 8192])
def test_a_kernel_that_keeps_results_by_all_elements_gains_nothing(times, length):
    bench = Bench(length=length)
    bench.subject = loaded("ours", keyed_by_content(bench.gpu, elements=length), role="subject", deterministic=True)
    bench.run(times)
    assert bench.arms["ours"].status == "measured"
    for kind in times:
        assert bench.seconds(kind)["ours"] == pytest.approx(bench.seconds(kind)["sdpa"])


def test_values_that_are_new_in_part_are_those_of_before_elsewhere():
    operator = Doubling()
    sets = [{"x": torch.randn(640)}]
    values = FreshValues(operator, 640, sets, "cpu")
    values.begin_round(7)
    before, version = sets[0]["x"].clone(), sets[0]["x"]._version
    values.write_part(0)
    assert int((sets[0]["x"] != before).sum()) == 10
    assert sets[0]["x"]._version == version
    assert torch.equal(values.expected(0)[0].exact, 2 * sets[0]["x"].double())


def test_an_operator_that_cannot_refresh_makes_its_inputs_anew():
    class Plain(FakeOperator):
        made = 0

        def make_inputs(self, problem, *, seed, device):
            self.made += 1
            return super().make_inputs(problem, seed=seed, device=device)

    operator, problem = Plain(), Problem(1, 1, 4, 8)
    inputs = operator.make_inputs(problem, seed=0, device="cpu")
    places = [tensor.data_ptr() for tensor in inputs.values()]
    values = FreshValues(operator, problem, [inputs], "cpu")
    old = inputs["q"].clone()
    values.write([0])
    assert operator.made == 2
    assert not values.writes_parts
    assert [tensor.data_ptr() for tensor in inputs.values()] == places
    assert not torch.equal(inputs["q"], old)


class Counting(Doubling):
    """Counts what is worked out exactly."""

    def __init__(self):
        super().__init__()
        self.worked_out = 0

    def exact(self, problem, inputs):
        self.worked_out += 1
        return super().exact(problem, inputs)


def slow_bench(*, drawn):
    bench = Bench(length=2048)
    bench.operator = Counting()
    bench.plan = {"slow": frozenset({"n64"}), "is_drawn": lambda _case: drawn}
    return bench


@pytest.mark.parametrize(("drawn", "thorough", "worked_out"), [(True, True, 3), (False, True, 0), (True, False, 0)])
def test_what_takes_long_is_worked_out_after_the_rounds_of_one_process(drawn, thorough, worked_out):
    bench = slow_bench(drawn=drawn).run(["wall"], thorough=thorough)
    assert {arm.status for arm in bench.arms.values()} == {"measured"}
    # Once after the rounds, once for an answer that was timed, and once where few values are new.
    assert bench.operator.worked_out == worked_out
    assert {arm.accuracy is not None for arm in bench.arms.values()} == {worked_out > 0}


def test_a_process_is_told_after_the_rounds_whether_it_compares():
    bench = slow_bench(drawn=True)
    told = []

    def is_drawn(case):
        told.append((case, len(bench.progress)))
        return True

    bench.plan["is_drawn"] = is_drawn
    bench.run(["wall"])
    assert told == [("n64", 4)]


def test_a_wrong_answer_of_a_slow_case_is_found_in_the_process_that_is_drawn():
    reasons = []
    for drawn in (True, False):
        bench = slow_bench(drawn=drawn)
        bench.subject = loaded("ours", implementation(bench.gpu, change=lambda out: out * 1.01), role="subject")
        reasons.append(bench.run(["wall"]).arms["ours"].reason)
    assert reasons[0].startswith("its answer after timing is wrong: it is off: error")
    assert reasons[1] == ""


@pytest.mark.parametrize("honest_calls", [0, 80])
def test_an_old_answer_of_a_slow_case_is_found_in_every_process(honest_calls):
    bench = slow_bench(drawn=False)
    bench.subject = loaded("ours", cached_late(bench.gpu, honest_calls), role="subject")
    reason = bench.run(["wall"]).arms["ours"].reason
    expected = "its answer after timing is wrong: it is the old one"
    if honest_calls == 0:
        expected = (
            "its work is not ordered with the stream that it is called on: it is nearer to that to the old values"
        )
    assert reason == expected
    bench.subject = loaded("ours", cached_late(bench.gpu, honest_calls), role="subject", deterministic=True)
    assert bench.run(["wall"]).arms["ours"].status == "failed"


def test_an_arm_without_equal_bits_may_vary_where_nothing_exact_is_known():
    bench = slow_bench(drawn=False)
    noise = torch.Generator().manual_seed(1)
    vary = implementation(bench.gpu, change=lambda out: out + 1e-6 * torch.rand(out.shape, generator=noise))
    bench.baselines = [loaded("varies", vary)]
    assert bench.run(["graph", "wall"]).arms["varies"].status == "measured"
    bench.baselines = [loaded("varies", vary, deterministic=True)]
    assert "other bits the second time" in bench.run(["graph", "wall"]).arms["varies"].reason


def test_a_long_call_is_a_block_of_its_own():
    for seconds, count in ((0.2, 1), (0.09, 2)):
        bench = Bench(length=8192)
        bench.subject = loaded("ours", implementation(bench.gpu, seconds=seconds), role="subject")
        bench.baselines = [loaded("sdpa", implementation(bench.gpu, seconds=seconds))]
        bench.run(["wall"], rounds=1)
        assert max(bench.timer.blocks[-6:]) == count


@pytest.mark.parametrize("times", [["wall"], ["graph"], ["kernel"]])
@pytest.mark.parametrize("deterministic", [False, True])
def test_work_that_a_slow_case_skips_while_it_is_timed_is_found_in_the_process_that_is_drawn(times, deterministic):
    bench = slow_bench(drawn=True)

    def entry(x):
        out = torch.empty(x.shape)
        bench.gpu.launch(lambda: out.copy_(torch.zeros_like(x) if bench.gpu.timing else 2 * x))
        return out

    bench.subject = loaded("ours", entry, role="subject", deterministic=deterministic)
    reason = bench.run(times).arms["ours"].reason
    assert f"an answer that was timed ({times[0]} time) is wrong" in reason or "gives another one afterwards" in reason
    assert bench.rounds is None or "ours" not in bench.seconds(times[0])


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_slow_case_that_reads_old_values_behind_a_sleep_is_found(monkeypatch, deterministic):
    bench = slow_bench(drawn=False)
    asleep: list[bool] = []
    seen: dict[int, torch.Tensor] = {}
    monkeypatch.setattr(bench.timer, "sleep", lambda: asleep.append(True))
    synchronize = bench.gpu.synchronize

    def wake():
        synchronize()
        asleep.clear()

    monkeypatch.setattr(bench.gpu, "synchronize", wake)

    def entry(x):
        out = torch.empty(x.shape)
        read = seen.get(x.data_ptr(), x).clone() if asleep else x
        bench.gpu.launch(lambda: out.copy_(2 * read))
        if not asleep:
            seen[x.data_ptr()] = x.clone()
        return out

    bench.subject = loaded("ours", entry, role="subject", deterministic=deterministic)
    assert "its work is not ordered with the stream" in bench.run(["wall"]).arms["ours"].reason


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("noise", [0.0, 1e-6])
def test_a_baseline_of_a_slow_case_may_answer_to_the_values_that_it_was_bound_with(drawn, noise):
    bench = slow_bench(drawn=drawn)
    generator = torch.Generator().manual_seed(1)
    entry = implementation(bench.gpu, change=lambda out: out + noise * torch.rand(out.shape, generator=generator))
    copier = loaded("copier", entry)
    bind = bench.operator.bind
    bench.operator.bind = lambda function, problem, inputs: bind(
        function, problem, {"x": inputs["x"].clone()} if function is entry else inputs
    )
    bench.baselines = [copier]
    assert bench.run(["wall"]).arms["copier"].status == "measured"


@pytest.mark.parametrize("slow", [False, True])
def test_a_baseline_that_is_refused_first_ends_no_process_without_the_subject(slow):
    bench = slow_bench(drawn=False) if slow else Bench(length=2048)
    refused = make_baseline("picky", implementation(bench.gpu), refusal="odd sizes")
    bench.subject = loaded("picky", refused.load(), baseline=refused)
    bench.run(["graph"], control=False, thorough=False)
    assert {name: arm.status for name, arm in bench.arms.items()} == {"picky": "refused", "sdpa": "measured"}


def test_a_graph_has_as_many_calls_as_beside_a_slow_arm():
    bench = Bench()
    bench.plan = {"beside": {"n64": [2e-6, 0.03]}}
    bench.run(["graph"], rounds=1)
    assert bench.timer.captures[3:] == [1, 1, 1]
