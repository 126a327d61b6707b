"""The check of one case in this process: what an honest call earns, and what only single checks can show."""

from __future__ import annotations

import math

import pytest
import torch

from flashmoe_science.errors import ProofError
from flashmoe_science.proof.measure.correctness import (
    NAN_BYTE,
    PoisonFreshMemory,
    WrongResultError,
    check_case,
    poison_free_memory,
    poisoned_blocks,
)
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
    with pytest.raises(WrongResultError, match="root mean square of the error"):
        check(noisy)


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
