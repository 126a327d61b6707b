"""Calls that give several tensors by name: each is judged by itself, in the gates and beside every sample."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from flashmoe_science.errors import ProofError
from flashmoe_science.proof.measure import allowed_error, arms
from flashmoe_science.proof.measure.allowed_error import Allowed, find_expected, max_error
from flashmoe_science.proof.measure.correctness import WrongResultError, check_case
from flashmoe_science.proof.measure.gpu_tasks import capture_case
from flashmoe_science.proof.measure.rounds import Case
from flashmoe_science.proof.records.evidence import Accuracy
from flashmoe_science.proof.subject.subject import Subject
from tests.proof.fake_operator import OPERATOR, FakeOperator, Problem, attend

from .bench import Bench
from .simulated import Doubling, loaded

SHORT = Problem(1, 2, 33, 16)


class Gradients(FakeOperator):
    """Attention, and the sum over its columns a hundred times as large: two outputs of their own shapes and sizes."""

    def outputs(self, problem):
        return ("o", "total")

    def exact(self, problem, inputs):
        o = super().exact(problem, inputs)
        return o, 100 * o.sum(-1)

    def low_precision(self, problem, inputs):
        o = super().low_precision(problem, inputs)
        return o, 100 * o.sum(-1)


def right(q, k, v, **options):
    o = attend(q, k, v, **options)
    return o, 100 * o.sum(-1)


def check(entry, *, operator: Any = None, deterministic=True):
    return check_case(operator or Gradients(), entry, SHORT, device="cpu", seed=7, deterministic=deterministic)


def changed(**changes):
    """Return an entry point of which some outputs are spoilt."""

    def entry(q, k, v, **options):
        o, total = right(q, k, v, **options)
        return changes.get("o", lambda x: x)(o), changes.get("total", lambda x: x)(total)

    return entry


def test_each_output_has_its_error_and_its_budget():
    accuracy = check(right)
    assert set(accuracy.outputs) == {"o", "total"}
    worst = accuracy.outputs[accuracy.output]
    assert (accuracy.max_error, accuracy.budget) == (worst.max_error, worst.budget)
    assert accuracy.share == max(output.share for output in accuracy.outputs.values())
    assert accuracy.outputs["total"].budget > 20 * accuracy.outputs["o"].budget
    assert accuracy.deterministic
    assert Accuracy.model_validate_json(accuracy.model_dump_json()) == accuracy


def test_an_error_that_only_the_larger_output_may_have_is_found_in_the_smaller():
    budget = check(right).outputs["total"].budget
    check(changed(total=lambda x: x + 0.1 * budget))
    with pytest.raises(WrongResultError, match="the first call, o: error") as caught:
        check(changed(o=lambda x: x + 0.1 * budget))
    assert caught.value.accuracy is not None
    assert caught.value.accuracy.output == "o"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (lambda *x, **y: right(*x, **y)[0], "the first call: returned Tensor, expected a tuple of 2 tensors, o, total"),
        (lambda *x, **y: right(*x, **y)[:1], "returned tuple of Tensor, expected a tuple of 2 tensors, o, total"),
        (lambda *x, **y: [*right(*x, **y)], "returned list of Tensor, Tensor, expected a tuple of 2 tensors"),
        (lambda *x, **y: (right(*x, **y)[0], None), "returned tuple of Tensor, NoneType, expected"),
        (lambda *x, **y: right(*x, **y)[::-1], r"the first call, o: output has shape \(1, 2, 33\), expected"),
        (changed(total=lambda x: x.double()), "the first call, total: output has dtype torch.float64, expected"),
        (changed(total=lambda x: x * torch.tensor(math.nan)), "the first call, total: NaN in 66 of 66 elements"),
        (changed(total=torch.zeros_like), "the first call, total: error"),
        (changed(o=lambda x: x.index_fill(2, torch.tensor([5]), math.inf)), "the first call, o: infinite in 32"),
        (changed(total=torch.nn.Parameter), "the first call, total: returned Parameter, expected a plain tensor"),
    ],
)
def test_a_wrong_output_is_named(entry, reason):
    with torch.no_grad(), pytest.raises(WrongResultError, match=reason):
        check(entry)


@pytest.mark.parametrize(
    "names", [("o", "o"), "ot", (), ("o", " "), ("o", 3), ["o", ["total"]], None, {"o": 1, "t": 2}]
)
def test_names_that_do_not_tell_outputs_apart_are_refused(names, monkeypatch):
    operator = Gradients()
    monkeypatch.setattr(operator, "outputs", lambda _: names)
    expected = "must return a tuple of names, at least one, none blank and no two alike, got"
    inputs = operator.make_inputs(SHORT, seed=1, device="cpu")
    for ask in (lambda: check(right, operator=operator), lambda: find_expected(operator, SHORT, inputs)):
        with pytest.raises(ProofError) as caught:
            ask()
        assert str(caught.value) == f"outputs of {operator.name} {expected} {names!r}"


def test_bits_of_all_outputs_count():
    calls = []

    def varying(q, k, v, **options):
        calls.append(1)
        o, total = right(q, k, v, **options)
        return o, total * (1 + 2**-10 * (len(calls) % 2))

    assert check(varying, deterministic=False).deterministic is False
    with pytest.raises(WrongResultError, match="the same input gave other bits"):
        check(varying)


def test_an_output_of_an_earlier_call_that_changes_is_named():
    kept = torch.empty(1, 2, 33, dtype=torch.float16)

    def shared(q, k, v, **options):
        o, total = right(q, k, v, **options)
        return o, kept.copy_(total)

    with pytest.raises(WrongResultError, match="the output of the first call, total was changed by a later call"):
        check(shared)


def test_memory_that_nobody_wrote_is_seen_in_every_output():
    def partly(q, k, v, **options):
        o, total = right(q, k, v, **options)
        out = torch.empty_like(total)
        out[:, 0] = total[:, 0]
        return o, out

    with pytest.raises(WrongResultError, match="the first call, total: NaN in 33 of 66 elements"):
        check(partly)


def test_an_operator_that_forgets_an_output_is_told():
    class Forgetful(Gradients):
        def exact(self, problem, inputs):
            return super().exact(problem, inputs)[0]

    class ForgetfulToo(Gradients):
        def low_precision(self, problem, inputs):
            return super().low_precision(problem, inputs)[:1]

    with pytest.raises(ProofError, match=r"exact of .* must return tensors for o, total, got Tensor"):
        check(right, operator=Forgetful())
    inputs = OPERATOR.make_inputs(SHORT, seed=0, device="cpu")
    with pytest.raises(ProofError, match=r"low_precision of .* must return tensors for o, total, got tuple of Tensor"):
        find_expected(ForgetfulToo(), SHORT, inputs)


def test_records_without_outputs_are_read():
    old = {"max_error": 1e-4, "budget": 1e-3, "low_precision_error": 5e-4, "deterministic": True}
    accuracy = Accuracy.model_validate(old)
    assert (accuracy.output, accuracy.outputs) == ("", {})


# On the simulated GPU: twice a vector, and four times.


class Multiples(Doubling):
    def outputs(self, problem):
        return ("twice", "fourfold")

    def exact(self, problem, inputs):
        return 2 * inputs["x"].double(), 4 * inputs["x"].double()

    def low_precision(self, problem, inputs):
        return (2 * inputs["x"].half()).float(), (4 * inputs["x"].half()).float()


def kernels(gpu, *, seconds=2e-6, change=lambda out: out, stream="calling"):
    """Return an entry point with a kernel for each output; ``change`` spoils the second."""

    def entry(x):
        twice, fourfold = torch.empty(x.shape), torch.empty(x.shape)
        gpu.launch(lambda: twice.copy_(2 * x), seconds=seconds, name="twice")
        gpu.launch(lambda: fourfold.copy_(change(4 * x)), seconds=seconds, name="fourfold", stream=stream)
        return twice, fourfold

    return entry


@pytest.fixture
def bench():
    bench = Bench()
    bench.operator = Multiples()
    bench.subject = loaded("ours", kernels(bench.gpu), role="subject", deterministic=True)
    bench.baselines = [loaded("other", kernels(bench.gpu, seconds=6e-6))]
    return bench


@pytest.mark.parametrize("times", [("graph", "wall"), ("kernel",)])
def test_calls_of_two_outputs_are_timed(bench, times):
    bench.run(times)
    assert {name: arm.status for name, arm in bench.arms.items()} == dict.fromkeys(
        ("ours", "other", "other#2"), "measured"
    )
    accuracy = bench.arms["ours"].accuracy
    assert accuracy is not None
    assert set(accuracy.outputs) == {"twice", "fourfold"}
    if "graph" in times:
        assert bench.seconds("graph")["ours"][0] == pytest.approx(4e-6)


def test_a_wrong_second_output_fails_the_arm_alone(bench):
    bench.baselines[0] = loaded("other", kernels(bench.gpu, change=lambda out: out + 1))
    bench.run()
    assert bench.arms["ours"].status == "measured"
    assert bench.arms["other"].reason.startswith("its fourfold is off: error 1")
    accuracy = bench.arms["other"].accuracy
    assert accuracy is not None
    assert accuracy.output == "fourfold"


def test_a_second_output_on_another_stream_is_found(bench):
    bench.subject = loaded("ours", kernels(bench.gpu, stream="another"), role="subject")
    assert "not ordered with the stream" in bench.run().arms["ours"].reason


def test_a_second_output_that_a_graph_does_not_compute_loses_graph_time(bench):
    def entry(x):
        twice, fourfold = torch.empty(x.shape), torch.empty(x.shape)
        bench.gpu.launch(lambda: twice.copy_(2 * x), seconds=2e-6)
        fourfold.copy_(4 * x)  # while it is captured, and never again
        return twice, fourfold

    bench.baselines[0] = loaded("other", entry)
    arm = bench.run().arms["other"]
    assert "graph time: a replay of its graph is wrong: its fourfold has NaN in 64 of 64 elements" in arm.reason


def test_the_right_answer_in_the_wrong_form_is_refused(bench):
    inner = kernels(bench.gpu)
    bench.baselines[0] = loaded("other", lambda x: [*inner(x)])
    reason = bench.run().arms["other"].reason
    assert reason == "returned list of Tensor, Tensor, expected a tuple of 2 tensors, twice, fourfold"


def test_launches_of_two_outputs_are_captured(bench):
    subject = Subject("ours", "doubling", "nowhere:entry", Path(), (), deterministic=True)
    found = capture_case(Case("n64", bench.operator, 64), subject, [bench.subject], bench.timer, seed=1)
    arm = found["arms"][0]
    assert arm["status"] == "captured", arm["reason"]
    assert [launch["name"] for launch in arm["launches"]] == ["twice", "fourfold"]
    assert arm["graph_launches"] == arm["launches"]
    assert arm["problems"] == []


def test_the_largest_error_is_that_of_any_part(monkeypatch):
    """A tensor is compared part by part: what is wrong in the last one counts, and so does NaN in the first."""
    monkeypatch.setattr(allowed_error, "_ELEMENTS_AT_ONCE", 7)
    answer = torch.randn(5, 9)
    exact = answer.double()
    assert max_error(answer, exact) == 0.0
    assert max_error(answer.t(), exact.t().contiguous()) == 0.0
    exact[4, 8] += 3
    assert max_error(answer, exact) == pytest.approx(3)
    assert arms.mismatch([answer.double()], [exact], (Allowed(torch.tensor(2.9)),)) != ""
    exact[0, 0] = torch.nan
    assert math.isnan(max_error(answer, exact))
    with pytest.raises(ValueError, match=r"expected shape \[9, 5\], got \[5, 9\]"):
        max_error(answer, exact.t())
