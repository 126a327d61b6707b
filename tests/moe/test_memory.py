"""What the gradients of experts allocate, by count: plans are carried out on tensors without memory."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from flashmoe_science import UnsupportedError, fused_moe
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.gpu.subclasses import is_watched
from flashmoe_science.moe import checks as inputs
from flashmoe_science.moe.backward import autograd as gradients
from flashmoe_science.moe.backward.plan import COLUMN_STEP, FEWEST_COLUMNS, GRADIENTS, BackwardPlan, plan_backward
from flashmoe_science.moe.calls import allocate
from flashmoe_science.moe.problem import MoeProblem, Options
from flashmoe_science.proof.subject.suites import load_suite

from .cases import Case, make_tensors

FROZEN = ("x", "topk_weights")
# For shapes of moe-train, by first word of their origin, with so many tokens, and for BEYOND: what a backward pass
# needs at its peak beyond gradients, as multiples of what is kept, the product that it overwrites among them; and the
# parts in which it makes weighted activations and rows of dx. Then the same where experts are not trained.
PEAKS = """
DeepSeek-V3, 1024: 1.016x in 1 and 1; 1.880x in 2
DeepSeek-V3, 4096: 1.008x in 1 and 1; 1.255x in 7
DeepSeek-V3, 32768: 1.005x in 1 and 2; 1.130x in 14
Mixtral 1024: 1.009x in 1 and 1; 1.147x in 1
Mixtral 4096: 1.005x in 1 and 1; 1.147x in 1
Mixtral 8192: 1.005x in 1 and 1; 1.075x in 2
Mixtral 32768: 1.004x in 1 and 1; 1.075x in 2
OLMoE 1024: 1.022x in 1 and 1; 2.006x in 1
OLMoE 8192: 1.008x in 1 and 1; 1.256x in 4
OLMoE 32768: 1.007x in 1 and 2; 1.256x in 4
Qwen3-30B-A3B 1024: 1.044x in 1 and 1; 2.341x in 1
Qwen3-30B-A3B 2048: 1.026x in 1 and 1; 2.341x in 1
Qwen3-30B-A3B 8192: 1.012x in 1 and 1; 1.341x in 4
Qwen3-30B-A3B 32768: 1.009x in 1 and 2; 1.341x in 4
fine-grained 1024: 1.088x in 1 and 1; 5.010x in 1
fine-grained 8192: 1.020x in 1 and 1; 1.510x in 8
fine-grained 32768: 1.012x in 1 and 2; 1.510x in 8
gpt-oss-120b, 1024: 1.005x in 1 and 1; 1.505x in 1
gpt-oss-120b, 4096: 1.005x in 1 and 1; 1.272x in 2
gpt-oss-120b, 32768: 1.005x in 1 and 1; 1.094x in 6
narrow 262144: 1.509x in 1 and 4; 1.508x in 4
narrower 32768: 3.030x in 1 and 4; 3.028x in 4
"""
# Where more than a tenth is needed although all is trained: experts of few columns with many rows each. 512 columns of
# rows of dx are as much as a good part of what is kept, and more than the gradient of w_gate_up lends.
BEYOND = {
    "narrow": MoeProblem(262144, 32, 2, 2048, 512, "bf16", keep_product=True),
    "narrower": MoeProblem(32768, 64, 8, 2048, 128, "bf16", keep_product=True),
}
# The same of DeepSeek-V3 with its shared expert, by tokens: the gradient of x is there twice, 0.194 of what is kept.
SHARED_PEAKS = {1024: 1.195, 4096: 1.195, 32768: 1.222}


def scratch_bytes(plan: BackwardPlan, *, overwrites: bool = True) -> int:
    """Return what a call of this plan allocates besides the gradients that are asked for."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[plan.problem.dtype]
    names = ("x", "dproduct") if overwrites else ("x",)
    made = allocate(plan, {name: torch.empty(0, dtype=dtype, device="meta") for name in names})
    gradients = {id(made[f"d_{name}"]) for name in plan.wanted}
    return sum({id(t): t.nbytes for t in made.values() if id(t) not in gradients}.values())


def kept_bytes(problem: MoeProblem) -> int:
    return problem.pairs * problem.columns_up * problem.item_bytes


def parts(plan: BackwardPlan, step: str) -> int:
    return sum(each in (step, f"{step}_sm90") for each in plan.steps)


def describe_peaks(problem: MoeProblem) -> tuple[float, str]:
    """Return the peak where all is trained, as a multiple of what is kept, and the line of PEAKS."""
    kept = kept_bytes(problem)
    biases = ("bias_gate_up", "bias_down") if problem.bias_down else ()
    trained = plan_backward(problem, SPECS["H200"], (*GRADIENTS[:4], *biases))
    frozen = plan_backward(problem, SPECS["H200"], FROZEN)
    peak, of_frozen = (1 + scratch_bytes(plan) / kept for plan in (trained, frozen))
    assert scratch_bytes(trained, overwrites=False) == kept + scratch_bytes(trained), "without: a buffer more"
    counts = f"{parts(trained, 'dactivation')} and {parts(trained, 'dx')}"
    return peak, f"{peak:.3f}x in {counts}; {of_frozen:.3f}x in {parts(frozen, 'dx')}"


def test_the_peak_of_gradients_is_what_is_kept_and_a_tenth_of_it():
    found = {}
    tokens = collections.defaultdict(list)
    for line in PEAKS.strip().splitlines():
        tokens[line.split(" ")[0]].append(int(line.split(":")[0].split(" ")[1]))
    for case in load_suite("moe-train").cases:
        origin = case.origin.split(" ")[0]
        for count in tokens[origin]:
            problem: MoeProblem = dataclasses.replace(case.problem.problem, tokens=count)  # type: ignore[attr-defined]
            peak, found[origin, count] = describe_peaks(problem)
            assert peak <= 1.1, case.name
    for name, problem in BEYOND.items():
        _, found[name, problem.tokens] = describe_peaks(problem)
    lines = [f"{origin} {tokens}: {text}" for (origin, tokens), text in sorted(found.items())]
    assert lines == PEAKS.strip().splitlines()


class Counting(TorchDispatchMode):
    """Count the bytes of the tensors that are made, and the most that there are at a time."""

    def __init__(self, there: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live = {tensor.untyped_storage()._cdata: 0 for tensor in there}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.live.values()))
        return made


@pytest.mark.unpoisoned
@pytest.mark.parametrize("tokens", SHARED_PEAKS)
def test_the_peak_of_gradients_with_a_shared_expert(tokens, monkeypatch):
    monkeypatch.setattr(gradients, "prepare_run", lambda plan, _device: lambda tensors: allocate(plan, tensors))
    monkeypatch.setattr(gradients, "gpu_of", lambda _x: SPECS["H200"])
    monkeypatch.setattr(gradients, "_prepared", {})
    monkeypatch.setattr(inputs, "check_places", lambda _tensors: None)  # it refuses tensors without memory
    experts, top_k, hidden, inter = 256, 8, 7168, 2048

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    tensors = {
        "x": draw(tokens, hidden),
        "w_gate_up": draw(experts, 2 * inter, hidden),
        "w_down": draw(experts, hidden, inter),
        "topk_weights": draw(tokens, top_k, dtype=torch.float32),
        "topk_ids": draw(tokens, top_k, dtype=torch.int32),
        "shared_gate_up": draw(1, 2 * inter, hidden),
        "shared_down": draw(1, hidden, inter),
    }
    products = draw(tokens * top_k, 2 * inter), draw(tokens, 2 * inter)
    options = Options()
    names = [name for name in tensors if name != "topk_ids"]
    do = draw(tokens, hidden)
    with Counting() as counting:
        found = gradients.moe_gradients(do, products, tensors, options, names, overwrite=True)
    beyond = counting.peak - sum(gradient.nbytes for gradient in found.values())
    assert round(1 + beyond / sum(product.nbytes for product in products), 3) == SHARED_PEAKS[tokens]


@pytest.mark.parametrize("wanted", [GRADIENTS[:4], FROZEN, ("x", "w_down"), ("w_gate_up",), ("w_down",)], ids=str)
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_what_is_lent_is_enough(wanted, activation):
    """Parts cover all columns once, begin where tiles do, and have room."""
    for tokens, experts, hidden, inter, dtype in itertools.product(
        (1, 3000, 300_000), (1, 16, 128), (64, 1000, 8192), (16, 128, 5000), ("bf16", "fp32")
    ):
        problem = MoeProblem(tokens, experts, 1, hidden, inter, dtype, activation=activation, keep_product=True)
        plan = plan_backward(problem, SPECS["H200"], wanted)
        lent = experts * problem.columns_up * hidden if "w_gate_up" in wanted else 0
        widest = 0
        for step, columns in (("dactivation", inter), ("ddown", inter), ("dx", hidden), ("dcombine", hidden)):
            spans = [span for each, span in zip(plan.steps, plan.spans, strict=True) if each in (step, f"{step}_sm90")]
            if not spans:
                continue
            firsts = [first for first, _ in spans]
            ends = [first + width for first, width in spans]
            assert [*firsts, columns] == [0, *ends]
            assert not any(first % COLUMN_STEP for first in firsts)
            assert spans[0][1] >= min(FEWEST_COLUMNS, columns)
            if step in ("ddown", "dx"):
                widest = max(widest, spans[0][1])
        assert problem.pairs * widest <= (plan.scratch or lent)
        made = allocate(plan, {"x": torch.empty(0, dtype=torch.bfloat16, device="meta")})
        assert ("scratch" in made) or not widest
        assert (plan.scratch == 0) == (not widest or made["scratch"] is made.get("d_w_gate_up"))


def test_what_torch_is_asked_for_is_there():
    """Names that torch does not promise: without them nobody could tell who else needs what is kept."""
    answers = []

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            answers.append(gradients._pass_keeps_graph())
            return grad

    leaf = torch.zeros(1, requires_grad=True)
    out = Ask.apply(leaf)
    torch.autograd.grad(out, leaf, retain_graph=True)
    torch.autograd.grad(out, leaf)
    assert answers == [True, False]
    assert gradients._hooks_of_kept(True) is None
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert not gradients._hooks_let_go()
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.cpu, torch.Tensor.detach):
        assert not gradients._hooks_let_go(), "these belong to no module"
    assert gradients._hooks_let_go()
    assert not is_watched()
    assert not gradients._is_wrapped(leaf)


class Watching(TorchDispatchMode):
    """See every operator."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def remember_answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list of what backward passes decide from now on."""
    answers: list[bool] = []
    ask = gradients._overwrites

    def remember(*given):
        answers.append(ask(*given))
        return answers[-1]

    monkeypatch.setattr(gradients, "_overwrites", remember)
    return answers


def test_what_is_kept_is_overwritten_where_it_is_ours_alone(monkeypatch):
    """Not where the operator is called by its name, where operators are watched, or in a transform."""
    answers = remember_answers(monkeypatch)
    tensors = make_tensors(Case("whose"))
    tensors["w_down"].requires_grad_()
    fused_moe(**tensors).sum().backward()
    assert answers == [True]
    options = (None,) * 5, ("swiglu", None, None, False, False, "auto")
    out, *_products = torch.ops.flashmoe_science.fused_moe_kept(*tensors.values(), *options[0], *options[1])
    out.sum().backward()
    assert answers == [True, False], "by its name"
    out = fused_moe(**tensors).sum()
    with Watching():
        out.backward()
    assert answers == [True, False, False], "watched"
    out = fused_moe(**tensors)
    with pytest.raises(UnsupportedError, match="gradients of fused_moe are made one at a time, and not batched"):
        torch.vmap(lambda do: torch.autograd.grad(out, tensors["w_down"], do)[0])(torch.ones(2, *out.shape))
    assert answers[3:] == [], "a transform, which is refused"
    with Watching():
        out = fused_moe(**tensors).sum()
    out.backward()
    assert answers[3:] == [False], "watched in the forward pass"


CAPTURES = [((None, None), True), ((7, 7), True), ((7, 8), False), ((None, 7), False), ((7, None), False)]


@pytest.mark.parametrize(("captures", "overwrites"), CAPTURES, ids=str)
def test_what_was_kept_outside_of_a_capture_is_not_overwritten_in_it(captures, overwrites, monkeypatch):
    """Replays of a graph find a product where each makes it anew: forward and backward pass in one capture."""
    asked = iter(captures)
    monkeypatch.setattr(gradients, "_capture_of", lambda _device: next(asked))
    answers = remember_answers(monkeypatch)
    tensors = make_tensors(Case("captured"))
    tensors["w_down"].requires_grad_()
    fused_moe(**tensors).sum().backward()
    assert answers == [overwrites]
    assert next(asked, "none is left") == "none is left"


def test_a_capture_is_known_by_the_number_that_the_driver_gives_it(monkeypatch):
    asked = []

    def call(name, stream, status, number, *others, what):
        asked.append((name, stream.value, others))
        status._obj.value, number._obj.value = 1, 2**40 + 3

    is_capturing = [False, True]
    monkeypatch.setattr("flashmoe_science.gpu.launch.driver_call", call)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing.pop(0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    assert gradients._capture_of(torch.device("cpu")) is None
    assert gradients._capture_of(torch.device("cuda", 0)) is None
    assert gradients._capture_of(torch.device("cuda", 0)) == 2**40 + 3
    assert asked == [("cuStreamGetCaptureInfo_v2", 77, (None, None, None))]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own, of its stand-ins
def test_a_backward_pass_that_is_compiled_calls_the_operator():
    tensors = make_tensors(Case("compiled"))
    gradients_found = []
    for around in (contextlib.nullcontext(), compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True))):
        leaf = tensors["w_down"].clone().requires_grad_()
        with around:
            fused_moe(**{**tensors, "w_down": leaf}).sum().backward()
        gradients_found.append(leaf.grad)
    assert torch.equal(*gradients_found)
