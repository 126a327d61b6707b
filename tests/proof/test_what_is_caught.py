"""More ways to be wrong than ``tests/subjects`` has: docs/explanation/what-is-caught.md lists them all."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from flashmoe_science.attention import reference
from flashmoe_science.errors import ProofError
from flashmoe_science.moe.reference import activate
from flashmoe_science.proof.judge.statistics import interval, log_ratios
from flashmoe_science.proof.measure.correctness import WrongResultError, check_case, check_stress
from flashmoe_science.proof.measure.shared_state import SharedState
from flashmoe_science.proof.subject.loading import load_operator
from flashmoe_science.proof.worker import run_task

from .bench import Bench
from .chain import write_subject
from .fake_operator import OPERATOR, FakeOperator, Problem, attend
from .simulated import Doubling, Gpu, implementation, loaded

SHORT = Problem(1, 2, 33, 16)

ROOT = Path(__file__).parents[2]


def check(entry, *, operator=OPERATOR, deterministic=False):
    return check_case(operator, entry, SHORT, device="cpu", seed=7, deterministic=deterministic)


class Lazy(torch.Tensor):
    """An answer that is worked out when somebody looks at it."""

    work: Callable[[], torch.Tensor]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args = [arg.work() if isinstance(arg, Lazy) else arg for arg in args]
        return func(*args, **(kwargs or {}))


def lazy(work, like):
    answer = like.clone().as_subclass(Lazy)
    answer.work = work
    return answer


# The gate correct.


def test_an_answer_that_is_worked_out_when_it_is_looked_at_is_refused():
    def entry(q, k, v, **kwargs):
        return lazy(lambda: attend(q, k, v, **kwargs), q)

    with pytest.raises(WrongResultError, match="the first call: returned Lazy, expected a plain tensor"):
        check(entry)


def test_work_that_is_left_to_the_next_call_is_caught():
    left: list[Callable[[], object]] = []

    def entry(q, k, v, **kwargs):
        for work in left:
            work()
        out = torch.empty(q.shape, dtype=q.dtype)
        left[:] = [lambda: out.copy_(attend(q, k, v, **kwargs))]
        return out

    with pytest.raises(WrongResultError, match="the first call: NaN in 1056 of 1056 elements"):
        check(entry)


def test_an_answer_for_one_seed_only_is_caught():
    known = OPERATOR.make_inputs(SHORT, seed=7, device="cpu")
    answer = attend(**known, causal=False, softmax_scale=None)

    def entry(q, k, v, **_):
        return answer.clone()

    with pytest.raises(WrongResultError, match="new values at the same addresses: error"):
        check(entry)


def test_a_lower_precision_that_is_cast_back_is_caught():
    def entry(q, k, v, **kwargs):
        return attend(*(x.to(torch.float8_e4m3fn).to(x.dtype) for x in (q, k, v)), **kwargs)

    with pytest.raises(WrongResultError, match="error"):
        check(entry)


@pytest.fixture
def tf32():
    """Put back what a subject allows."""
    assert torch.backends.cuda.matmul.allow_tf32 is False
    yield
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.usefixtures("tf32")
def test_a_call_that_changes_settings_of_torch_is_caught():
    def entry(q, k, v, **kwargs):
        torch.backends.cuda.matmul.allow_tf32 = True
        return attend(q, k, v, **kwargs)

    reason = r"the first call changed what all arms share: .*cuda\.matmul\.allow_tf32 is True, and was False"
    with pytest.raises(WrongResultError, match=reason):
        check(entry)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda x, seed: x, "inputs must follow the seed"),
        (torch.full_like, "inputs must be random, and all of those of fake are constant"),
    ],
)
def test_an_operator_whose_inputs_prove_nothing_is_refused(make, reason):
    class Constant(FakeOperator):
        name = "fake"

        def make_inputs(self, problem, *, seed, device):
            drawn = super().make_inputs(problem, seed=0, device=device)
            return {name: make(tensor, seed) for name, tensor in drawn.items()}

    with pytest.raises(ProofError, match=reason):
        check(attend, operator=Constant())


def test_a_sign_that_is_put_off_is_refused():
    with pytest.raises(WrongResultError, match="the first call: returned a tensor whose sign is put off"):
        check(lambda q, k, v, **kwargs: torch._neg_view(-attend(q, k, v, **kwargs)))


# What one stress draw shows, and no draw of standard normal values in contiguous tensors does.


def attend_to(q, k, v, *, causal=False, softmax_scale=None):
    return reference.attention(q, k, v, causal=causal, softmax_scale=softmax_scale)[0].to(q.dtype)


def values_by_strides_of_keys(q, k, v, **options):
    return attend_to(q, k, v.as_strided(v.shape, k.stride()), **options)


def a_row_behind_the_values_times_0(q, k, v, **options):
    """As a tile that is loaded without a mask, behind the last key."""
    out, (batch, heads, keys, size) = attend_to(q, k, v, **options), v.shape
    behind = v.storage_offset() + sum((n - 1) * step for n, step in zip((batch, heads), v.stride(), strict=False))
    behind += keys * v.stride(2)
    whole = v.untyped_storage().nbytes() // v.element_size()
    if behind + size <= whole:
        out += 0 * v.as_strided((size,), (1,), behind)
    return out


def attend_to_cache(q, k_cache, v_cache, *, page_table, cache_seqlens, causal, softmax_scale):
    outs = []
    for one, pages, length in zip(q, page_table.long(), cache_seqlens.tolist(), strict=True):
        k, v = (cache[pages].flatten(0, 1)[:length].transpose(0, 1) for cache in (k_cache, v_cache))
        outs.append(attend_to(one[None], k[None], v[None], causal=causal, softmax_scale=softmax_scale))
    return torch.cat(outs)


def whole_pages(q, k_cache, v_cache, *, cache_seqlens, page_table, **options):
    full = torch.full_like(cache_seqlens, page_table.shape[1] * k_cache.shape[1])
    return attend_to_cache(q, k_cache, v_cache, page_table=page_table, cache_seqlens=full, **options)


def one_length_for_all(q, k_cache, v_cache, *, cache_seqlens, **options):
    return attend_to_cache(q, k_cache, v_cache, cache_seqlens=cache_seqlens[:1].expand(len(q)), **options)


def ask_experts(x, w_gate_up, w_down, weights, ids, **_):
    out = torch.zeros(x.shape)
    for expert, (up, down) in enumerate(zip(w_gate_up.float(), w_down.float(), strict=True)):
        tokens, slots = torch.where(ids == expert)
        h = activate(x[tokens].float() @ up.T, activation="swiglu").to(x.dtype)
        out.index_add_(0, tokens, (h.float() @ down.T) * weights[tokens, slots, None].float())
    return out.to(x.dtype)


def weights_that_sum_to_1(x, w_gate_up, w_down, weights, ids, **options):
    return ask_experts(x, w_gate_up, w_down, weights / weights.sum(-1, keepdim=True), ids, **options)


def experts_with_a_capacity(x, w_gate_up, w_down, weights, ids, **options):
    kept, most = weights.clone(), int(1.5 * ids.numel() / len(w_down))
    for expert in range(len(w_down)):
        tokens, slots = torch.where(ids == expert)
        kept[tokens[most:], slots[most:]] = 0
    return ask_experts(x, w_gate_up, w_down, kept, ids, **options)


FIXED = {"batch": 2, "heads": 2, "seqlen_q": 33, "head_dim": 16, "dtype": "fp16"}
CACHE = {"batch": 2, "heads": 2, "seqlen_k": 48, "head_dim": 16, "page_size": 16, "dtype": "fp16"}
EXPERTS = {"tokens": 8, "experts": 4, "top_k": 2, "hidden": 64, "inter": 32, "dtype": "fp16"}


@pytest.mark.parametrize(
    ("operator", "table", "right", "wrong", "draw"),
    [
        ("attention", FIXED, attend_to, values_by_strides_of_keys, "expanded"),
        ("attention", FIXED, attend_to, a_row_behind_the_values_times_0, "strided"),
        ("attention_cache", CACHE, attend_to_cache, whole_pages, "short_caches"),
        ("attention_cache", CACHE, attend_to_cache, one_length_for_all, "short_caches"),
        ("moe", EXPERTS, ask_experts, weights_that_sum_to_1, "peaked_routing"),
        ("moe", EXPERTS, ask_experts, experts_with_a_capacity, "peaked_routing"),
    ],
)
def test_what_one_stress_draw_shows(operator, table, right, wrong, draw):
    operator = load_operator(operator)
    problem = operator.parse_case(table)
    others = [each for each in operator.stress_draws if each != draw]

    def ask(entry, not_served):
        return check_stress(operator, entry, problem, device="cpu", seed=7, not_served=not_served, passed=set())

    assert ask(right, others) == [draw]
    with pytest.raises(WrongResultError, match=f"stress draw {draw}: (error|NaN)"):
        ask(wrong, others)
    if wrong is not experts_with_a_capacity:  # of few tokens some drop out by chance
        ask(wrong, [draw])


# What all arms share.


def test_what_is_as_it_was_is_no_change():
    assert SharedState().changes() == ""


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (time, "perf_counter"),
        (torch, "empty"),
        (torch.Tensor, "copy_"),  # inherited: a new one stands before it
        (torch.cuda, "synchronize"),
        (torch.cuda, "Event"),
        (torch.cuda.Event, "elapsed_time"),
        (torch.cuda.CUDAGraph, "replay"),
        (F, "scaled_dot_product_attention"),
    ],
)
def test_a_function_that_was_replaced_is_named(monkeypatch, owner, name):
    before = SharedState()
    monkeypatch.setattr(owner, name, lambda *_: 0.0, raising=False)
    assert re.fullmatch(rf"[\w.]+\.{name} is another function", before.changes())


def test_a_wrapper_that_torch_itself_puts_around_a_function_is_no_change(monkeypatch):
    before = SharedState()
    monkeypatch.setattr(torch, "manual_seed", torch.no_grad()(torch.manual_seed))  # as torch.compile does in its way
    assert before.changes() == ""
    monkeypatch.setattr(torch, "manual_seed", F.softmax)
    assert before.changes() == "torch.manual_seed is another function"


@pytest.mark.parametrize(
    ("change", "back", "said"),
    [
        (
            lambda: torch.set_default_dtype(torch.float64),
            lambda: torch.set_default_dtype(torch.float32),
            r"default_dtype\(\) is torch.float64, and was torch.float32",
        ),
        (
            lambda: torch.use_deterministic_algorithms(mode=True),
            lambda: torch.use_deterministic_algorithms(mode=False),
            r"deterministic_algorithms_enabled\(\) is True",
        ),
        (
            lambda: torch.backends.cuda.enable_flash_sdp(False),
            lambda: torch.backends.cuda.enable_flash_sdp(True),
            r"flash_sdp_enabled\(\) is False",
        ),
    ],
)
def test_a_setting_that_was_changed_is_named_with_both_values(change, back, said):
    before = SharedState()
    change()
    try:
        changes = before.changes()
    finally:
        back()
    assert re.search(said, changes)
    assert before.changes() == ""


def test_a_module_that_changes_what_all_share_fails_at_import(tmp_path):
    code = """
import time, torch
import torch.nn.functional as F
torch.backends.cuda.matmul.allow_tf32 = True
plain = F.scaled_dot_product_attention
def slow(*args, **kwargs):
    time.sleep(1e-3)
    return plain(*args, **kwargs)
F.scaled_dot_product_attention = slow
time.perf_counter = lambda: 0.0
def attend(q, k, v, *, causal, softmax_scale):
    return plain(q, k, v)
"""
    subject = write_subject(tmp_path, code)
    case = OPERATOR.as_table(SHORT)
    payload = {"subject": subject.to_json(), "case": case}
    result = run_task("flashmoe_science.proof.measure.tasks:import_subject", payload, timeout_s=120)
    assert result.data is not None, result.reason
    assert result.data["failure"] == (
        "importing it changes what all arms share: time.perf_counter is another function; "
        "torch.nn.functional.scaled_dot_product_attention is another function; "
        "torch.get_float32_matmul_precision() is high, and was highest; "
        "torch.backends.cuda.matmul.allow_tf32 is True, and was False"
    )
    assert "the baselines run in the same process" in result.data["hint"]


# The rounds.


def honest_until(calls, plain, later):
    """Return an entry point that is ``plain`` for so many calls, and then ``later``."""
    made = []

    def entry(x):
        made.append(1)
        return (plain if len(made) <= calls else later)(x)

    return entry


def reason_of(bench, *times, **settings):
    found = bench.run(list(times) or ["graph", "wall"], **settings).arms["ours"]
    assert found.status == "failed", found
    assert bench.rounds is None or not any("ours" in arms for arms in bench.rounds.seconds.values())
    return found.reason


@pytest.mark.parametrize("calls", [20, 60, 200])
def test_answers_that_become_lazy_while_they_are_timed_are_caught(calls):
    bench = Bench()
    plain = implementation(bench.gpu)
    bench.subject = loaded(
        "ours", honest_until(calls, plain, lambda x: lazy(lambda: 2 * x, x)), role="subject", deterministic=True
    )
    assert "returned Lazy, expected a plain tensor" in reason_of(bench, "wall")


@pytest.mark.parametrize("calls", [20, 60, 200])
def test_inputs_that_are_overwritten_late_are_caught(calls):
    bench = Bench()
    plain = implementation(bench.gpu)

    def overwriting(x):
        out = plain(x)
        x.data.mul_(1.5)
        return out

    bench.subject = loaded("ours", honest_until(calls, plain, overwriting), role="subject", deterministic=True)
    assert "answer" in reason_of(bench, "wall")


@pytest.mark.usefixtures("tf32")
def test_settings_that_change_while_arms_are_timed_leave_no_times():
    bench = Bench()
    plain = implementation(bench.gpu)

    def changing(x):
        torch.backends.cuda.matmul.allow_tf32 = True
        return plain(x)

    bench.subject = loaded("ours", honest_until(300, plain, changing), role="subject")
    assert "what all arms share changed while they were timed: torch." in reason_of(bench, "wall")
    assert {arm.status for arm in bench.arms.values()} == {"failed"}


@pytest.mark.parametrize("length", [64, 1024])
def test_every_tenth_call_that_skips_its_work_is_caught(length):
    bench = Bench(length=length)
    plain = implementation(bench.gpu, seconds=2e-6)
    made = []

    def entry(x):
        made.append(1)
        return torch.empty(x.shape) if len(made) > 60 and len(made) % 10 == 0 else plain(x)

    bench.subject = loaded("ours", entry, role="subject", deterministic=True)
    assert "answer" in reason_of(bench, "wall", rounds=10)


@pytest.mark.parametrize("kind", ["graph", "wall", "kernel"])
def test_nan_in_one_element_of_a_late_answer_is_caught(kind):
    bench = Bench()

    def spoiled(out):
        out[5] = float("nan")
        return out

    plain, spoiling = implementation(bench.gpu), implementation(bench.gpu, change=spoiled)
    bench.subject = loaded("ours", honest_until(100, plain, spoiling), role="subject")
    assert "it has NaN" in reason_of(bench, kind)


def test_compiling_at_the_first_call_is_in_no_sample():
    bench = Bench()
    plain, compiling = implementation(bench.gpu, seconds=2e-6), implementation(bench.gpu, seconds=5.0)
    bench.subject = loaded("ours", honest_until(1, compiling, plain), role="subject", deterministic=True)
    bench.run()
    assert bench.arms["ours"].status == "measured"
    assert bench.seconds("graph")["ours"] == pytest.approx([2e-6] * 4)
    assert max(bench.seconds("wall")["ours"]) < 2e-5


class Drifting(Gpu):
    """A GPU that slows down over time, and more so right after a pause, as a cold one is fast at first."""

    def __init__(self, slower):
        super().__init__()
        self.slower = slower  # at a moment -> by what a kernel takes longer
        self.noise = random.Random(3)

    def run(self, seconds, name):
        super().run(seconds * self.slower(self.now) * (1 + self.noise.gauss(0, 0.002)), name)


@pytest.mark.parametrize(
    "slower",
    [
        pytest.param(lambda now: 1 + 20 * now, id="drift"),
        pytest.param(lambda now: 1.3 if now > 0.02 else 1.0, id="throttled half-way"),
        pytest.param(lambda now: 1.2 if int(now / 1.7e-3) % 2 else 1.0, id="up and down"),
        pytest.param(lambda now: 1.2 if int(now / 2.3e-3) % 2 else 1.0, id="up and down more slowly"),
    ],
)
def test_clocks_that_change_between_arms_favour_nobody(slower):
    bench = Bench()
    bench.gpu = Drifting(slower)
    bench.timer.gpu = bench.gpu
    bench.subject = loaded("ours", implementation(bench.gpu), role="subject", deterministic=True)
    bench.baselines = [loaded("sdpa", implementation(bench.gpu))]
    bench.run(["graph"], rounds=30)
    columns = bench.seconds("graph")
    assert max(columns["ours"]) > 1.1 * min(columns["ours"])  # the drift is there
    found = interval(log_ratios(columns["sdpa"], columns["ours"]))
    assert found.contains(0.0), found


def test_what_the_first_arm_of_a_round_pays_favours_nobody(monkeypatch):
    """As where the arm that comes first finds the caches cold: here it takes half as long again."""
    bench = Bench()
    bench.subject = loaded("ours", implementation(bench.gpu), role="subject", deterministic=True)
    bench.baselines = [loaded("sdpa", implementation(bench.gpu))]
    bench.run(["graph"], rounds=30)
    assert bench.rounds is not None
    columns = bench.seconds("graph")
    paid = {
        arm: [
            seconds * (1.5 if order[0] == arm else 1.0)
            for order, seconds in zip(bench.rounds.order, columns[arm], strict=True)
        ]
        for arm in columns
    }
    assert [sum(order[0] == arm for order in bench.rounds.order) for arm in columns] == [10, 10, 10]
    found = interval(log_ratios(paid["sdpa"], paid["ours"]))
    assert found.contains(0.0)
    assert median(paid["ours"]) == pytest.approx(median(paid["sdpa"]))


def test_inputs_that_prove_nothing_are_not_timed():
    class Zeros(Doubling):
        def make_inputs(self, problem, *, seed, device):
            return {"x": torch.zeros(problem)}

    bench = Bench()
    bench.operator = Zeros()
    assert "inputs must follow the seed" in reason_of(bench)


# The page about it.


def test_every_test_that_the_page_names_is_there():
    page = (ROOT / "docs" / "explanation" / "what-is-caught.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|") and "test" in line and "`" in line]
    named = {name for line in rows for name in re.findall(r"`((?:test_)[\w.]+(?:::\w+)?)`", line)}
    assert len(named) > 25
    there = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    for name in named:
        file, _, function = name.partition("::")
        assert file in there, name
        assert not function or f"def {function}(" in there[file], name
    subjects = {name for line in rows for name in re.findall(r"`subjects/(\w+)`", line)}
    folders = {path.parent.name for path in (ROOT / "tests" / "subjects").glob("*/kernel.toml")}
    assert subjects <= folders
    # Whatever is tried is on the page, except for what is honest.
    assert {name for name in folders if not name.startswith("honest")} == subjects


def test_the_page_names_the_gates_at_which_a_gpu_catches_subjects():
    page = (ROOT / "docs" / "explanation" / "what-is-caught.md").read_text()
    found_by = {name: line for line in page.splitlines() for name in re.findall(r"`subjects/(\w+)`", line)}
    blocks = (ROOT / "tests" / "proof" / "test_subjects_gpu.py").read_text().split("\n\n\n")
    tried = [
        (name, gate)
        for block in blocks
        for name in set(re.findall(r'"(\w+)"', block)) & set(found_by)
        for gate in re.findall(r'until\("(\w+)"\)', block)
    ]
    assert len(tried) > 15
    assert [(name, gate) for name, gate in tried if gate not in found_by[name].split("|")[2]] == []
