"""The experts, for the harness: cases, work, baselines, and the suites."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe_science import InputError
from flashmoe_science.gpu.compile import read_resources
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.moe import reference
from flashmoe_science.moe.problem import MoeCase
from flashmoe_science.operators import moe_routing_cases
from flashmoe_science.operators.baselines.moe import BASELINES
from flashmoe_science.operators.baselines.moe_backward import BASELINES as BACKWARD_BASELINES
from flashmoe_science.operators.moe import OPERATOR
from flashmoe_science.operators.moe_routing_cases import active_experts
from flashmoe_science.proof.subject.loading import load_operator
from flashmoe_science.proof.subject.operator import Scalable
from flashmoe_science.proof.subject.suites import load_suite

from ..exhaustive import all_but

TABLE = {"tokens": 9, "experts": 4, "top_k": 2, "hidden": 16, "inter": 24, "dtype": "fp32"}
TABLES: list[dict[str, Any]] = [
    TABLE,
    {**TABLE, "dtype": "bf16", "routing": "zipf"},
    {
        **TABLE, "activation": "swiglu_clamped", "interleaved": True, "bias_gate_up": True, "bias_down": True,
        "alpha": 1.5, "limit": 0.5, "shared_experts": 2, "shared_inter": 8, "shared_weights": "fp32",
    },
    {**TABLE, "activation": "relu2", "batch_invariant": True, "bias_down": True},
]  # fmt: skip


@pytest.mark.parametrize("table", TABLES, ids=["plain", "zipf", "gpt-oss", "relu2"])
def test_every_implementation_gives_the_exact_answer(table):
    case = OPERATOR.parse_case(table)
    assert OPERATOR.parse_case(OPERATOR.as_table(case)) == case
    assert OPERATOR.as_table(case) == table
    inputs = OPERATOR.make_inputs(case, seed=3, device="cpu")
    exact = OPERATOR.exact(case, inputs)
    budget = OPERATOR.error_budget(exact, OPERATOR.low_precision(case, inputs))
    from flashmoe_science import fused_moe

    able = [baseline for name, baseline in BASELINES.items() if name != "liger"]  # it needs a package, and a GPU
    theirs = {baseline.name: baseline.load() for baseline in able if not baseline.speed_of_light}
    entries = {"fused_moe": fused_moe, **theirs}
    for name, entry in entries.items():
        out = OPERATOR.bind(entry, case, inputs)()
        # Other orders of the same roundings, so no closer than a few of them.
        allowed = max(budget, 4 * torch.finfo(out.dtype).eps * exact.abs().max().item())
        assert (out.double() - exact).abs().max() <= allowed, name


def test_baselines_say_what_they_do_not_serve():
    def refusals(**change: Any) -> dict[str, str | None]:
        case = OPERATOR.parse_case({**TABLE, "dtype": "bf16", **change})
        return {name: baseline.refusal(case) for name, baseline in BASELINES.items() if not baseline.speed_of_light}

    assert set(refusals().values()) == {None}
    assert refusals(dtype="fp32")["grouped_mm"] == "torch._grouped_mm serves bf16"
    assert refusals(hidden=17)["grouped_mm"] == "torch._grouped_mm serves sizes that are multiples of 8"
    large = refusals(tokens=4096, hidden=4096, inter=14336)
    assert large["batched_mm"] == "it would copy 2886 GB of weights, one expert's for each pair"
    assert large["transformers-eager"] is None
    assert refusals(activation="relu2", bias_down=True)["liger"] == "it has no relu2, biases"
    assert refusals(interleaved=True)["liger"] == "it has no interleaved gates"


def test_liger_is_given_what_it_asks_for(monkeypatch):
    """A stand-in with its order of arguments; shared experts, which it has none of, are added as by the others."""
    given = []

    def apply(x, gate_up_proj, down_proj, top_k_index, top_k_weights):
        given.append(top_k_index.dtype)
        return reference.fused_moe(x, gate_up_proj, down_proj, top_k_weights, top_k_index)

    function = SimpleNamespace(LigerFusedMoEFunction=SimpleNamespace(apply=apply))
    for name, module in (("liger_kernel", None), ("liger_kernel.ops", None), ("liger_kernel.ops.fused_moe", function)):
        monkeypatch.setitem(sys.modules, name, module or ModuleType(name))
    case = OPERATOR.parse_case({**TABLE, "shared_experts": 1, "shared_inter": 8})
    inputs = OPERATOR.make_inputs(case, seed=3, device="cpu")
    inputs["topk_ids"] = inputs["topk_ids"].long()
    for baseline in (BASELINES["liger"], BACKWARD_BASELINES["liger"]):
        assert baseline.refusal(case) is None
    found = OPERATOR.bind(BASELINES["liger"].load(), case, inputs)()
    assert given == [torch.int32]
    torch.testing.assert_close(found, OPERATOR.low_precision(case, inputs))
    monkeypatch.undo()
    if importlib.util.find_spec("liger_kernel") is None:
        with pytest.raises(ImportError, match="liger_kernel"):
            BASELINES["liger"].load()


def test_work_is_what_has_to_be_read():
    case = OPERATOR.parse_case({**TABLE, "tokens": 1, "dtype": "bf16", "shared_experts": 1, "shared_inter": 8})
    work = OPERATOR.work(case)
    assert active_experts(case) == 2
    assert work.bytes == 2 * 3 * 16 * 24 * 2 + 3 * 16 * 8 * 2 + 2 * 16 * 2 + 8 * 2
    assert work.flops == 6 * (2 * 16 * 24 + 16 * 8)
    assert work.tokens == 1
    many = OPERATOR.parse_case({**TABLE, "tokens": 500})
    assert active_experts(many) == 4
    active = {routing: active_experts(MoeCase(load_case(40), routing)) for routing in ("uniform", "zipf")}
    assert 110 < active["uniform"] < 125
    assert active["zipf"] < active["uniform"] - 10


@pytest.mark.parametrize("routing", ["uniform", "zipf"])
@pytest.mark.parametrize("tokens", [1, 9, 40, 1100])
def test_every_draw_asks_for_the_work_that_is_counted(tokens, routing):
    """Other experts, and as many tokens for each of as many."""
    case = OPERATOR.parse_case({**TABLE, "experts": 32, "tokens": tokens, "routing": routing})
    draws = [OPERATOR.make_inputs(case, seed=seed, device="cpu")["topk_ids"] for seed in range(4)]
    counts = [torch.bincount(ids.flatten(), minlength=32) for ids in draws]
    for ids, count in zip(draws, counts, strict=True):
        assert (ids.dtype, ids.shape) == (torch.int32, (tokens, 2))
        assert ids.is_contiguous()
        assert (ids[:, 0] != ids[:, 1]).all()
        assert torch.equal(count.sort().values, counts[0].sort().values)
        assert int((count > 0).sum()) == active_experts(case)
    assert not torch.equal(counts[0], counts[1])


def test_of_several_draws_the_middle_one_is_taken():
    case = OPERATOR.parse_case({**TABLE, "experts": 8, "tokens": 8})
    generator = torch.Generator().manual_seed(0)
    draw = moe_routing_cases._Draw.of(case)
    found = sorted(int(draw.next(generator, 8).unique().numel()) for _ in range(9))
    assert found[0] < found[-1]
    assert active_experts(case) == found[4]


@pytest.mark.parametrize(("experts", "tokens"), [(32, 1025), (512, 1500), (4096, 2000)])
@pytest.mark.parametrize("routing", ["uniform", "zipf"])
def test_many_tokens_are_counted_in_parts_and_give_what_the_whole_draw_gives(experts, tokens, routing):
    case = OPERATOR.parse_case({**TABLE, "experts": experts, "tokens": tokens, "routing": routing})
    whole = moe_routing_cases._routing(moe_routing_cases._Draw.of(case))
    assert active_experts(case) == int(whole.unique().numel())


def test_the_copy_moves_as_many_bytes_as_the_weights_have():
    case = OPERATOR.parse_case({**TABLE, "hidden": 4096, "inter": 14336, "tokens": 2, "dtype": "bf16"})
    baseline, inputs = BASELINES["copy"], {"x": torch.empty(1)}
    assert baseline.speed_of_light
    assert baseline.refusal(case) is None
    copy: Any = OPERATOR.bind(baseline.load(), case, inputs)
    found = copy()
    assert 2 * found.nbytes == active_experts(case) * 3 * 4096 * 14336 * 2
    assert found[:4096].unique().numel() > 200  # never zeros
    small = OPERATOR.parse_case({**TABLE, "dtype": "bf16"})
    assert baseline.refusal(small) == "it is asked for from 64 MiB on, this case has 0.00879"
    with pytest.raises(InputError, match=r"called through operator\.bind"):
        baseline.load()(inputs["x"])


def load_case(tokens: int) -> Any:
    table = {"tokens": tokens, "experts": 128, "top_k": 8, "hidden": 2048, "inter": 768, "dtype": "bf16"}
    return OPERATOR.parse_case(table).problem


def test_a_wrong_case_is_refused():
    for change, message in (
        ({"top_k": 5}, "top_k must be at most the 4 experts, got 5"),
        ({"routing": "skewed"}, "routing must be one of uniform, zipf, got 'skewed'"),
    ):
        with pytest.raises(InputError, match=message):
            OPERATOR.parse_case({**TABLE, **change})


SHAPES = {
    "Mixtral": (8, 2, 4096, 14336), "Qwen3": (128, 8, 2048, 768), "gpt-oss": (128, 4, 2880, 2880),
    "DeepSeek-V3": (32, 8, 7168, 2048), "OLMoE": (64, 8, 2048, 1024), "fine-grained": (128, 8, 4096, 512),
}  # fmt: skip


#: Baselines and answers of all of gpt-oss's 128 experts do not fit beside each other on one GPU in training.
SHAPES_OF_TRAINING = {**SHAPES, "gpt-oss": (32, 4, 2880, 2880)}


@pytest.mark.parametrize(
    ("suite", "shapes", "fewest", "most"),
    [
        ("moe-decode", SHAPES, 1, 256),
        ("moe-prefill", SHAPES, 1024, 32768),
        ("moe-train", SHAPES_OF_TRAINING, 1024, 32768),
    ],
)
def test_the_suites_hold_what_they_say_and_fit_a_gpu(suite, shapes, fewest, most):
    """Every shape, with routing drawn in both ways, and tokens from few to many."""
    named: list[Any] = list(load_suite(suite).cases)
    cases = [case.problem for case in named]
    sizes_of = [(c.problem.experts, c.problem.top_k, c.problem.hidden, c.problem.inter) for c in cases]
    assert set(sizes_of) == set(shapes.values())
    for shape in shapes.values():
        mine = [case for case, sizes in zip(cases, sizes_of, strict=True) if sizes == shape]
        assert {case.routing for case in mine} == {"uniform", "zipf"}
    tokens = [case.problem.tokens for case in cases]
    assert (min(tokens), max(tokens)) == (fewest, most)
    for case in cases:
        assert case.problem.experts * case.problem.expert_bytes < 7e9
        assert OPERATOR.refusal("fused_moe", case, "H200") is None
        assert BASELINES["grouped_mm"].refusal(case) is None
    if suite == "moe-decode":
        assert {case.problem.tokens for case in cases} == {2**n for n in range(9)}
        assert OPERATOR.refusal("gemv_triton", cases[1], "H200") == "it serves one token, got 2"


@pytest.mark.triton
@pytest.mark.parametrize("gpu", all_but(["H200", "A100"], "A100"))
def test_what_runs_on_the_matrix_units_is_held_to_them(gpu):
    """Building fails where a kernel that should multiply by them does not."""
    table = {**TABLE, "tokens": 2000, "hidden": 2048, "inter": 256, "dtype": "bf16"}
    held = {}
    operators: list[Any] = [OPERATOR, load_operator("moe_backward")]
    for operator in operators:
        jobs = operator.compile_jobs(next(iter(operator.entry_points())), [operator.parse_case(table)], [gpu])
        for job in jobs:
            found = read_resources(job.source, SPECS[gpu].arch).instructions
            held[job.source.name] = bool(job.instruction)
            assert bool(job.instruction) == any("MMA" in opcode for opcode in found), job.source.name
    assert sum(held.values()) >= 3, held
    assert "_activation_sm90_kernel" in held or gpu != "H200"


@pytest.mark.triton
def test_jobs_name_every_kernel_once():
    cases = [OPERATOR.parse_case({**TABLE, "tokens": tokens, "dtype": "bf16"}) for tokens in (100, 200)]
    jobs = OPERATOR.compile_jobs("fused_moe", cases, ["A100"])
    names = [job.label.partition(" ")[0] for job in jobs]
    assert sorted(set(names)) == ["_combine_kernel", "_down_kernel", "_gate_up_kernel", "_sort_few_kernel"]
    assert names.count("_combine_kernel") == 1
    outcome = next(job for job in jobs if job.label.startswith("_down_kernel")).run()
    assert outcome.problems == ()


def test_more_tokens_are_the_same_kind_of_work():
    case = OPERATOR.parse_case({**TABLE, "tokens": 8, "routing": "zipf"})
    assert isinstance(OPERATOR, Scalable)
    assert [(axis.name, axis.kind) for axis in OPERATOR.axes()] == [("tokens", "parallel")]
    longer = OPERATOR.scaled(case, "tokens", 3)
    assert longer is not None
    assert OPERATOR.as_table(longer) == {**OPERATOR.as_table(case), "tokens": 24}
