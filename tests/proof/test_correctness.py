"""The check of one case in this process: what an honest call earns, and what only single checks can show."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashmoe_science.errors import ProofError
from flashmoe_science.proof.measure import allowed_error, correctness as check_module
from flashmoe_science.proof.measure.allowed_error import (
    Allowed,
    find_expected,
    find_shares,
    judge,
    late_tolerance,
    max_error,
    rms_error,
)
from flashmoe_science.proof.measure.correctness import (
    NAN_BYTE,
    PoisonFreshMemory,
    WrongResultError,
    check_case,
    poison_free_memory,
    poisoned_blocks,
    require_random,
)
from flashmoe_science.proof.records.evidence import OutputAccuracy
from flashmoe_science.proof.subject.loading import load_operator
from tests.proof.fake_operator import OPERATOR, FakeOperator, Problem, attend

SHORT = Problem(1, 2, 33, 16)

ROW = torch.tensor([5])


def check(entry, problem=SHORT, *, operator=OPERATOR, deterministic=False):
    return check_case(operator, entry, problem, device="cpu", seed=7, deterministic=deterministic)


def test_honest_call_passes_with_its_error_beside_the_budget():
    accuracy = check(attend, deterministic=True)
    assert 0 < accuracy.max_error < accuracy.budget
    assert accuracy.low_precision_error > 0
    assert accuracy.deterministic


def test_a_call_that_raises_is_wrong_and_says_what_it_raised():
    def refuse(*_args, **_options):
        raise RuntimeError("no such shape")

    with pytest.raises(WrongResultError, match=r"raised .*no such shape"):
        check(refuse)


def test_exact_answer_passes():
    def exact(q, k, v, **_):
        return OPERATOR.exact(SHORT, {"q": q, "k": k, "v": v}).to(q.dtype)

    assert check(exact).max_error < 1e-3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda o: (o, None), "the first call: returned tuple, expected a tensor"),
        (lambda o: o.mT, r"output has shape \(1, 2, 16, 33\), expected \(1, 2, 33, 16\)"),
        (lambda o: o.float(), r"output has dtype torch.float32, expected torch.float16"),
        (
            lambda o: o.index_fill(2, torch.tensor([5]), math.nan),
            r"NaN in 32 of 1056 elements, the first at \[0, 0, 5, 0\]",
        ),
        (lambda o: o.index_fill(2, torch.tensor([5]), math.inf), r"infinite in 32 of 1056 elements"),
        (lambda o: o + 0.1, r"wrong in 1056 of 1056 elements"),
    ],
)
def test_wrong_form_or_value_is_said(change, reason):
    with pytest.raises(WrongResultError, match=reason):
        check(lambda q, k, v, **kwargs: change(attend(q, k, v, **kwargs)))


def test_errors_below_the_largest_allowed_are_caught_by_their_mean_square():
    def noisy(q, k, v, **kwargs):
        output = attend(q, k, v, **kwargs)
        return output + 0.4 * budget * torch.sign(torch.randn(output.shape)).to(output.dtype)

    budget = check(attend).budget
    with pytest.raises(WrongResultError, match=r"root mean square of all errors .* got .*, expected") as caught:
        check(noisy)
    accuracy = caught.value.accuracy
    assert accuracy is not None
    assert accuracy.max_error < accuracy.budget
    assert (accuracy.share > 1, accuracy.failed_test) == (True, "all elements")


def test_bits_that_vary_pass_where_nothing_was_promised():
    count = 0

    def varying(q, k, v, **kwargs):
        nonlocal count
        count += 1
        output = attend(q, k, v, **kwargs)
        output[0, 0, 0, 0] *= 1 + 2**-10 * (count % 2)
        return output

    assert check(varying).deterministic is False
    with pytest.raises(WrongResultError, match="determinism was promised"):
        check(varying, deterministic=True)


def test_result_that_depends_on_addresses_is_caught():
    seen = set()

    def moody(q, k, v, **kwargs):
        seen.add(q.data_ptr())
        return attend(q, k, v, **kwargs) * (1.0 if len(seen) == 1 else 1.1)

    with pytest.raises(WrongResultError, match="the same values at new addresses: error"):
        check(moody)


def test_input_that_is_not_contiguous_keeps_its_strides():
    class Transposed(FakeOperator):
        def make_inputs(self, problem, *, seed, device):
            inputs = super().make_inputs(problem, seed=seed, device=device)
            return {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items()}

    strides = []

    def note(q, k, v, **kwargs):
        strides.append(q.stride())
        return attend(q, k, v, **kwargs)

    check(note, operator=Transposed())
    assert set(strides) == {(1056, 16, 32, 1)}


def test_budget_without_bound_is_an_error_of_the_operator():
    class Boundless(FakeOperator):
        def error_budget(self, exact, low_precision):
            return math.nan

    with pytest.raises(ProofError, match="the error budget must be finite, got nan"):
        check(attend, operator=Boundless())


def test_budget_of_zero_takes_only_the_exact_answer():
    class Exact(FakeOperator):
        def error_budget(self, exact, low_precision):
            return 0.0

    one_key = Problem(1, 1, 1, 16)  # softmax of one score is 1: the answer is v
    accuracy = check(lambda q, k, v, **kwargs: v.clone(), one_key, operator=Exact())
    assert (accuracy.max_error, accuracy.budget, accuracy.share) == (0.0, 0.0, 0.0)
    with pytest.raises(WrongResultError, match="allowed 0; wrong in 16 of 16"):
        check(lambda q, k, v, **kwargs: v + 0.01, one_key, operator=Exact())


# What is allowed.


def fused(q, k, v, **_):
    """Attention of 4 columns, rounded as a kernel rounds."""
    scores = q.float() @ k.float().mT * 0.5
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (weights.half().float() @ v.float() / weights.sum(-1, keepdim=True)).half()


def test_a_right_kernel_of_16_elements_does_not_fail_by_the_frameworks_luck():
    """With these seeds, six of 3,000, the framework is so lucky that twice its error is not enough."""
    operator: Any = load_operator("attention")
    problem = operator.parse_case({"batch": 1, "heads": 1, "seqlen_q": 4, "head_dim": 4, "dtype": "fp16"})
    for seed in (371, 505, 714, 1399, 1631, 2522):
        inputs = operator.make_inputs(problem, seed=seed, device="cpu")
        exact, low = operator.exact(problem, inputs), operator.low_precision(problem, inputs)
        output = fused(**inputs)
        half_ulps = 2**-11 * rms_error(torch.zeros_like(low), exact)
        old_rms = rms_error(output, exact) > 2 * rms_error(low, exact) + half_ulps
        assert max_error(output, exact) > operator.error_budget(exact, low) or old_rms
        (wanted,) = find_expected(operator, problem, inputs)
        accuracy, fault = judge(output, wanted)
        assert (fault, accuracy is not None and accuracy.share <= 1) == ("", True)
        assert wanted.allowed is not None
        assert wanted.budget == pytest.approx(wanted.allowed.largest.max().item())
        assert judge(output + 0.01, wanted)[1].startswith("error 0.01")


def test_of_few_elements_the_frameworks_error_is_that_of_several_draws():
    draws = []

    class Watched(FakeOperator):
        def make_inputs(self, problem, *, seed, device):
            draws.append(seed)
            return super().make_inputs(problem, seed=seed, device=device)

    few, many = Problem(1, 1, 4, 4), Problem(1, 1, 64, 16)
    operator = Watched()
    inputs = OPERATOR.make_inputs(few, seed=3, device="cpu")
    (wanted,) = find_expected(operator, few, inputs)
    assert draws == list(range(1, 17))
    assert wanted.allowed is None  # rows of 4 elements are luck
    largest = max(
        max_error(OPERATOR.low_precision(few, each), OPERATOR.exact(few, each))
        for each in (inputs, *(OPERATOR.make_inputs(few, seed=seed, device="cpu") for seed in range(1, 17)))
    )
    assert wanted.low_precision_error == largest > max_error(OPERATOR.low_precision(few, inputs), wanted.exact)
    assert wanted.budget >= 2 * largest
    draws.clear()
    find_expected(operator, many, OPERATOR.make_inputs(many, seed=3, device="cpu"))
    assert draws == []  # 1,024 elements say enough


@pytest.mark.parametrize("missing", [slice(0, 16), slice(0, 8)])
def test_late_rows_that_miss_early_keys_are_caught_without_an_operators_help(missing):
    """Their elements are small: the largest error allowed in any element is far above them."""
    long = Problem(1, 1, 1024, 64, "bf16", causal=True)

    def forgetful(q, k, v, **kwargs):
        out = attend(q, k, v, **kwargs)
        k = k.clone()
        k[:, :, missing] = 0.0  # scores of 0, and of those keys alone
        out[:, :, -32:] = attend(q, k, v, **kwargs)[:, :, -32:]
        return out

    with pytest.raises(WrongResultError, match=r"in an element where .* is allowed; wrong in \d+ of 65536") as caught:
        check(forgetful, long)
    accuracy = caught.value.accuracy
    assert accuracy is not None
    assert accuracy.max_error < accuracy.budget
    assert accuracy.element_share is not None
    assert accuracy.share == accuracy.element_share > 1
    assert accuracy.row_share is None
    assert check(attend, long).share < 0.8


def test_a_row_whose_elements_are_right_and_whose_mean_square_is_not_is_caught():
    class Scaled(FakeOperator):
        def error_scale(self, problem, inputs):
            shape = inputs["q"].shape
            return [(torch.full(shape, 0.1), torch.full((*shape[:-1], 1), rms))]

    rms = 0.1
    assert check(attend, operator=Scaled()).share < 0.1
    rms = 1e-5
    with pytest.raises(WrongResultError, match=r"root mean square of a row's errors .* in \d+ of 66 rows, the first"):
        check(attend, operator=Scaled())


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (lambda shape: [], "error_scale of .* must return one for each of 1 outputs"),
        (lambda shape: [(torch.ones(3), None)], r"error_scale of .* must have the output's shape .*33.*, got \[3\]"),
        (lambda shape: [(torch.full(shape, math.inf), None)], "error_scale of .* must be finite"),
        (lambda shape: [(torch.ones(shape), torch.ones(3))], r"must have one rms a row, \[.*, 1\], got \[3\]"),
        (lambda shape: [(torch.ones(shape), torch.full((*shape[:-1], 1), math.nan))], "error_scale of .* finite"),
    ],
)
def test_a_scale_that_is_no_scale_is_an_error_of_the_operator(scale, message):
    class Wrong(FakeOperator):
        def error_scale(self, problem, inputs):
            return scale(inputs["q"].shape)

    with pytest.raises(ProofError, match=message):
        check(attend, operator=Wrong())


def test_what_is_allowed_is_compared_by_rows_and_by_parts(monkeypatch):
    right = torch.zeros(3, 4)
    answer = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0] * 4, [2.0, 0.0, 0.0, 0.0]])
    allowed = Allowed(torch.tensor([[2.0], [0.0], [8.0]]), torch.tensor([[0.5], [0.0], [0.5]]))
    for at_once in (1, 8, 100):
        monkeypatch.setattr(allowed_error, "_ELEMENTS_AT_ONCE", at_once)
        assert find_shares(answer, right, allowed).tolist() == [0.5, 2.0]
        assert find_shares(answer, right, Allowed(torch.tensor(4.0))).tolist() == [0.5, 0.0]
    assert torch.isnan(find_shares(answer * math.nan, right, allowed)).all()
    answer[1, 2] = 1e-30  # where nothing is allowed
    assert find_shares(answer, right, allowed)[0] == math.inf
    assert find_shares(torch.ones(0, 4), torch.ones(0, 4), Allowed(torch.ones(0, 4))).tolist() == [0.0, 0.0]
    assert find_shares(torch.tensor(1.0), torch.tensor(0.0), Allowed(torch.tensor(2.0))).tolist() == [0.5, 0.0]


def test_a_late_answer_may_differ_by_twice_what_each_row_is_allowed():
    problem = Problem(1, 1, 64, 64, "bf16", causal=True)
    sets = [OPERATOR.make_inputs(problem, seed=seed, device="cpu") for seed in (1, 2)]
    both = [find_expected(OPERATOR, problem, inputs)[0] for inputs in sets]
    tolerance = late_tolerance(both)
    largest = [wanted.allowed.largest for wanted in both if wanted.allowed is not None]
    rows = torch.stack([each.amax(-1, keepdim=True) for each in largest]).amax(0)
    budget = torch.tensor(max(wanted.budget for wanted in both), dtype=torch.float64)
    torch.testing.assert_close(tolerance.largest, 2 * torch.minimum(rows.double(), budget), rtol=0.2, atol=0)
    assert tolerance.largest.shape == (1, 1, 64, 1)
    assert tolerance.largest[0, 0, -1] < tolerance.largest[0, 0, 0]
    short = Problem(1, 1, 4, 4)
    (wanted,) = find_expected(OPERATOR, short, OPERATOR.make_inputs(short, seed=1, device="cpu"))
    assert late_tolerance([wanted]).largest.flatten().tolist() == pytest.approx([2 * wanted.budget] * 4)


def test_the_share_is_that_of_the_test_that_comes_closest():
    accuracy = OutputAccuracy(max_error=1.0, budget=4.0, low_precision_error=1.0)
    assert accuracy.share == 0.25  # as records without the other two have it
    assert accuracy.model_copy(update={"element_share": 0.5}).share == 0.5
    assert accuracy.model_copy(update={"element_share": 0.5, "row_share": 0.75}).share == 0.75
    assert accuracy.model_copy(update={"row_share": 0.1}).share == 0.25


@pytest.mark.unpoisoned
def test_fresh_memory_is_poisoned_whoever_asks_for_it():
    x = torch.ones(3)
    with PoisonFreshMemory():
        fresh = [torch.empty(4), torch.empty_like(x), x.new_empty(2), torch.empty_strided((2, 2), (2, 1))]
        whole = torch.empty(2, dtype=torch.int64)
        summed = x + x
    assert all(torch.isnan(tensor).all() for tensor in fresh)
    assert whole.dtype == torch.int64
    assert summed.tolist() == [2.0, 2.0, 2.0]
    assert not torch.isnan(torch.zeros(2)).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_poison_is_nan_in_every_format(dtype):
    assert torch.isnan(torch.full((16,), NAN_BYTE, dtype=torch.uint8).view(dtype)).all()


@pytest.mark.gpu
@pytest.mark.unpoisoned
@pytest.mark.parametrize("count", [1, 100, 4160, 99_999, 700_000, 20_000_000])
def test_what_a_gpu_hands_out_after_poisoning_is_nan(count):
    answer = torch.ones(count, dtype=torch.float16, device="cuda")
    del answer
    poison_free_memory("cuda", 2 * count)
    for _ in range(3):
        assert torch.isnan(torch.empty(count, dtype=torch.float16, device="cuda")).all()


def test_eight_blocks_of_an_output_are_poisoned_where_half_of_the_room_holds_them():
    assert [poisoned_blocks(size, 1600) for size in (1, 100, 101, 400, 800, 801, 10**6)] == [8, 8, 7, 2, 1, 1, 1]


@pytest.mark.gpu
@pytest.mark.unpoisoned
def test_an_output_of_a_third_of_the_free_memory_is_poisoned_once():
    """Eight blocks of it would be more than there is."""
    torch.cuda.empty_cache()
    count = torch.cuda.mem_get_info()[0] // 3
    poison_free_memory("cuda", count)
    assert (torch.empty(count, dtype=torch.uint8, device="cuda")[::4096] == NAN_BYTE).all()


class Replay:
    """A graph on a CPU: a replay makes the call anew, or does what ``change`` makes of it."""

    def __init__(self, call, change):
        self.call, self.change, self.outputs = call, change, [call()]
        self.released = False

    def poison_outputs(self):
        self.outputs[0].fill_(math.nan)

    def replay_once(self):
        self.outputs[0].copy_(self.change(self.call()))

    def release(self):
        self.released = True


def replay_on_a_cpu(monkeypatch):
    monkeypatch.setattr(check_module, "_synchronize", lambda device: None)
    monkeypatch.setattr(
        check_module,
        "_check_form",
        lambda answer, wanted, device, which, form=check_module._check_form: form(answer, wanted, "cpu", which),
    )


def test_a_replay_of_a_graph_is_judged_with_other_values(monkeypatch):
    replay_on_a_cpu(monkeypatch)
    inputs = OPERATOR.make_inputs(SHORT, seed=1, device="cpu")
    made = []

    class OnCpu(FakeOperator):
        def make_inputs(self, problem, *, seed, device):
            return super().make_inputs(problem, seed=seed, device="cpu")

    def replay(change):
        def capture(call):
            made.append(Replay(call, change))
            return made[-1]

        call = OPERATOR.bind(attend, SHORT, inputs)
        check_module.check_replay(OnCpu(), call, SHORT, inputs, capture, seed=9)

    replay(lambda out: out)
    assert torch.equal(inputs["q"], OPERATOR.make_inputs(SHORT, seed=9, device="cpu")["q"])
    with pytest.raises(WrongResultError, match="a replay of its CUDA graph: error"):
        replay(lambda out: out * 1.1)
    with pytest.raises(WrongResultError, match="a replay of its CUDA graph: NaN in"):
        replay(lambda out: out * math.nan)
    assert all(graph.released for graph in made)


def test_a_replay_is_compared_in_a_part_where_what_is_right_takes_long(monkeypatch):
    replay_on_a_cpu(monkeypatch)
    asked = []

    class Heads(FakeOperator):
        def make_inputs(self, problem, *, seed, device):
            return super().make_inputs(problem, seed=seed, device="cpu")

        def exact(self, problem, inputs):
            asked.append(problem.heads)
            return super().exact(problem, inputs)

        def sample(self, problem, inputs, *, seed):
            one = {name: tensor[:, 1:] for name, tensor in inputs.items()}
            return replace(problem, heads=1), one, lambda out: out[:, 1:], 2

    def check(change, seconds):
        monkeypatch.setattr(check_module, "_SLOW_TRUTH_S", seconds)
        asked.clear()
        return check_case(
            Heads(), attend, SHORT, device="cpu", seed=7, deterministic=True, capture=lambda call: Replay(call, change)
        )

    check(lambda out: out, 60.0)
    assert asked == [2, 2, 2]
    for seconds in (0.0, 60.0):
        with pytest.raises(WrongResultError, match="a replay of its CUDA graph: error"):
            check(lambda out: out * 1.1, seconds)
        with pytest.raises(WrongResultError, match="a replay of its CUDA graph: NaN"):
            check(lambda out: torch.cat((out[:, :1] * math.nan, out[:, 1:]), 1), seconds)
    check(lambda out: out, 0.0)
    assert asked[:2] == [2, 2]
    assert set(asked[2:]) == {1}  # few elements are drawn more often


def test_what_earlier_calls_gave_is_compared_after_the_replay_and_then_freed(monkeypatch):
    """What is right of the replay takes the memory that they had."""
    held = []
    replay_on_a_cpu(monkeypatch)

    class OnCpu(FakeOperator):
        def make_inputs(self, problem, *, seed, device):
            return super().make_inputs(problem, seed=seed, device="cpu")

        def exact(self, problem, inputs):
            held.append(sum(each() is not None for each in answers))
            return super().exact(problem, inputs)

    answers = []

    def kept(q, k, v, **options):
        answers.append(weakref.ref(out := attend(q, k, v, **options)))
        return out

    def check(change):
        return check_case(
            OnCpu(), kept, SHORT, device="cpu", seed=7, deterministic=True, capture=lambda call: Replay(call, change)
        )

    check(lambda out: out)
    assert held == [0, 1, 1]  # the last is the graph's

    def overwriting(out):
        for each in answers[-5:-2]:
            if (earlier := each()) is not None:
                earlier.zero_()
        return out

    with pytest.raises(WrongResultError, match="was changed by a later call"):
        check(overwriting)


def test_what_a_captured_call_overwrites_is_not_what_its_answer_is_judged_by(monkeypatch):
    """Work may depend on values: what makes them zeros before it computes has little to do."""
    replay_on_a_cpu(monkeypatch)
    given: list[torch.Tensor] = []

    class OnCpu(FakeOperator):
        def make_inputs(self, problem, *, seed, device):
            return super().make_inputs(problem, seed=seed, device="cpu")

    def kept(q, k, v, **options):
        given[:] = [q]
        return attend(q, k, v, **options)

    def zeroing(out):
        given[0].zero_()
        return attend(given[0], *rest, causal=False)

    inputs = OPERATOR.make_inputs(SHORT, seed=1, device="cpu")
    rest = inputs["k"], inputs["v"]
    call = OPERATOR.bind(kept, SHORT, inputs)
    with pytest.raises(WrongResultError, match="a replay of its CUDA graph: the input q was overwritten"):
        check_module.check_replay(OnCpu(), call, SHORT, inputs, lambda call: Replay(call, zeroing), seed=9)
    assert torch.equal(inputs["q"], OPERATOR.make_inputs(SHORT, seed=9, device="cpu")["q"])


@pytest.mark.parametrize("kept", [True, False])
def test_what_keeps_the_first_inputs_is_found_at_new_addresses(kept):
    """A descriptor that is cached by shape reads where the first inputs lay."""
    first = []

    def remembering(q, k, v, **options):
        first.append((q, k, v))
        return attend(*(first[0] if kept else (q, k, v)), **options)

    if not kept:
        check(remembering)
        return
    with pytest.raises(WrongResultError, match="the same values at new addresses: NaN in"):
        check(remembering)


def test_a_change_of_the_inputs_and_of_those_before_them_is_found():
    """What inputs are compared with is out of a subject's reach."""
    first = []

    def halving(q, k, v, **options):
        out = attend(q, k, v, **options)
        first.append(q)
        if first[0] is not q:
            for each in (first[0], q):
                each.data.mul_(0.5)
        return out

    with pytest.raises(WrongResultError, match="the same values at new addresses: the input q was overwritten"):
        check(halving)


def test_what_is_right_may_be_an_input():
    class Same(FakeOperator):
        def exact(self, problem, inputs):
            return inputs["q"]

        low_precision = exact

        def error_budget(self, exact, low_precision):
            return 1e-6

    check(lambda q, k, v, **options: q.clone(), operator=Same())


def test_an_input_of_one_element_is_no_constant():
    """A scale beside drawn integers says nothing of whether inputs are random."""
    first, second = ({"x": torch.arange(16) + seed, "scale": torch.ones(1)} for seed in range(2))
    require_random(OPERATOR, first, second)
    with pytest.raises(ProofError, match="inputs must be random"):
        require_random(OPERATOR, {**first, "scale": torch.ones(2)}, second | {"scale": torch.ones(2)})
