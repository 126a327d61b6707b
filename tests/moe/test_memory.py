"""What the gradients of experts allocate, by count: plans are carried out on tensors without memory."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from flashmoe_science import fused_moe
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.moe import gradients
from flashmoe_science.moe.backward_plan import COLUMN_STEP, FEWEST_COLUMNS, GRADIENTS, BackwardPlan, plan_backward
from flashmoe_science.moe.calls import allocate
from flashmoe_science.moe.problem import MoeProblem
from flashmoe_science.proof.suites import load_suite

from .cases import Case, make_tensors

FROZEN = ("x", "topk_weights")
# Of the cases of moe-train, by the first word of their origin and tokens, what a backward pass needs at its peak beyond
# gradients, as multiples of what is kept, the product that it overwrites among them; and the parts in which it makes
# weighted activations and rows of dx. Then the same where experts are not trained: as many parts of dx.
PEAKS = """
DeepSeek-V3, 1024: 1.020x in 1 and 1; 1.884x in 2
DeepSeek-V3, 4096: 1.012x in 1 and 1; 1.259x in 7
DeepSeek-V3, 32768: 1.009x in 1 and 2; 1.134x in 14
Mixtral 1024: 1.012x in 1 and 1; 1.151x in 1
Mixtral 4096: 1.009x in 1 and 1; 1.151x in 1
Mixtral 8192: 1.009x in 1 and 1; 1.079x in 2
Mixtral 32768: 1.008x in 1 and 1; 1.079x in 2
OLMoE 1024: 1.026x in 1 and 1; 2.010x in 1
OLMoE 8192: 1.012x in 1 and 1; 1.260x in 4
OLMoE 32768: 1.011x in 1 and 2; 1.260x in 4
Qwen3-30B-A3B 1024: 1.048x in 1 and 1; 2.345x in 1
Qwen3-30B-A3B 2048: 1.030x in 1 and 1; 2.345x in 1
Qwen3-30B-A3B 8192: 1.016x in 1 and 1; 1.345x in 4
Qwen3-30B-A3B 32768: 1.013x in 1 and 2; 1.345x in 4
fine-grained 1024: 1.092x in 1 and 1; 5.014x in 1
fine-grained 8192: 1.024x in 1 and 1; 1.514x in 8
fine-grained 32768: 1.016x in 1 and 2; 1.514x in 8
gpt-oss-120b 1024: 1.016x in 1 and 1; 1.516x in 1
gpt-oss-120b 4096: 1.009x in 1 and 1; 1.276x in 2
gpt-oss-120b 32768: 1.009x in 1 and 1; 1.098x in 6
"""


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


def test_the_peak_of_gradients_is_what_is_kept_and_a_tenth_of_it():
    found = {}
    for case in load_suite("moe-train").cases:
        problem: MoeProblem = case.problem.problem  # type: ignore[attr-defined]
        kept = kept_bytes(problem)
        biases = ("bias_gate_up", "bias_down") if problem.bias_down else ()
        trained = plan_backward(problem, SPECS["H200"], (*GRADIENTS[:4], *biases))
        frozen = plan_backward(problem, SPECS["H200"], FROZEN)
        peak, of_frozen = (1 + scratch_bytes(plan) / kept for plan in (trained, frozen))
        assert peak <= 1.1, case.name
        counts = f"{parts(trained, 'dactivation')} and {parts(trained, 'dx')}"
        text = f"{peak:.3f}x in {counts}; {of_frozen:.3f}x in {parts(frozen, 'dx')}"
        assert scratch_bytes(trained, overwrites=False) == kept + scratch_bytes(trained), "without: a buffer more"
        found[case.origin.split(" ")[0], problem.tokens] = text
    lines = [f"{origin} {tokens}: {text}" for (origin, tokens), text in sorted(found.items())]
    assert lines == PEAKS.strip().splitlines()


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
    assert gradients._hooks_let_go()
    assert gradients._count_modes() == 0
    assert not gradients._is_wrapped(leaf)


class Watching(TorchDispatchMode):
    """See every operator."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_what_is_kept_is_overwritten_where_it_is_ours_alone(monkeypatch):
    """Not where the operator is called by its name, where operators are watched, or in a transform."""
    answers: list[bool] = []
    ask = gradients._overwrites

    def remember(*given):
        answers.append(ask(*given))
        return answers[-1]

    monkeypatch.setattr(gradients, "_overwrites", remember)
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
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.vmap(lambda do: torch.autograd.grad(out, tensors["w_down"], do)[0])(torch.ones(2, *out.shape))
    assert answers[3:] == [False], "a transform"


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
