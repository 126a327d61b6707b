"""What each rank does of the operators over ranks: a call of every entry point, judged by its part of the truth."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from flashmoe_science.operators.ranks.context_parallel import OPERATOR as ATTENTION
from flashmoe_science.operators.ranks.expert_parallel import OPERATOR as EXPERTS
from flashmoe_science.proof.measure.allowed_error import find_expected, judge
from flashmoe_science.proof.subject.operator import part_of
from flashmoe_science.proof.subject.outputs import parts
from flashmoe_science.proof.subject.subject import load_attribute

_HEADS = {"ranks": 2, "heads": 4, "heads_kv": 2, "head_dim": 32, "dtype": "fp16", "causal": True}
_EXPERTS = {"ranks": 2, "tokens": 24, "experts": 4, "top_k": 2, "hidden": 64, "inter": 48, "dtype": "fp16"}
CASES: list[tuple[Any, dict[str, Any]]] = [
    (ATTENTION, {**_HEADS, "lengths": [128]}),
    (ATTENTION, {**_HEADS, "lengths": [1, 50, 3, 74]}),
    (ATTENTION, {**_HEADS, "lengths": [128], "gradients": False}),
    (EXPERTS, _EXPERTS),
    (EXPERTS, {**_EXPERTS, "gradients": False}),
]


def run(rank, ranks):
    """Return the fault of each output, by case, entry point and output, of two draws of values at one address."""
    found = {}
    for operator, table in CASES:
        problem = operator.parse_case(table)
        assert operator.ranks(problem) == ranks
        inputs = operator.make_inputs(problem, seed=1, device="cpu")
        entries = {name: load_attribute(path) for name, path in operator.entry_points().items()}
        refused = {name for name, each in operator.baselines().items() if each.refusal(problem)}
        entries |= {name: each.load() for name, each in operator.baselines().items() if name not in refused}
        calls = {name: operator.bind(entry, problem, inputs) for name, entry in entries.items()}
        for seed in (None, 2):
            if seed is not None:
                operator.refresh(problem, inputs, seed=seed)
            for name, call in calls.items():
                expected = find_expected(operator, problem, inputs, part_of(operator, problem, entries[name], rank))
                for part, wanted in zip(parts(call()), expected, strict=True):
                    if name == "replicated-experts" and wanted.output in ("dw_gate_up", "dw_down"):
                        continue  # of this rank's tokens alone
                    assert part.shape == wanted.exact.shape, (name, wanted.output)
                    case = f"{operator.describe(problem)} {name} {wanted.output} {seed}"
                    found[case] = judge(part, wanted)[1]
    return found


def truths(rank, ranks):
    """Return by case and question how far what ranks work out together is from what one of them does alone."""
    found = {}
    for operator, table in CASES:
        problem = operator.parse_case(table)
        inputs = operator.make_inputs(problem, seed=1, device="cpu")
        for question in ("exact", "low_precision", "error_scale"):
            together = _flat(getattr(operator, question)(problem, inputs))
            with mock.patch.object(dist, "is_initialized", return_value=False):
                alone = _flat(getattr(operator, question)(problem, inputs))
            assert [x.shape for x in together] == [x.shape for x in alone]
            off = [((x - y).abs().max() / y.abs().max()).item() for x, y in zip(together, alone, strict=True)]
            found[f"{operator.describe(problem)} {question}"] = max(off)
    return found


def _flat(answer):
    tensors = [x for each in answer for x in each] if isinstance(answer[0], tuple) else answer
    return [x.double() for x in tensors]


def wrong_part(rank, ranks):
    """Return whether a rank's answer is taken for that of another rank."""
    problem = ATTENTION.parse_case(CASES[0][1])
    inputs = ATTENTION.make_inputs(problem, seed=1, device="cpu")
    entry = load_attribute(ATTENTION.entry_points()["context_parallel"])
    with torch.no_grad():
        answer = ATTENTION.bind(entry, problem, inputs)()
    expected = find_expected(ATTENTION, problem, inputs, part_of(ATTENTION, problem, entry, ranks - 1 - rank))
    return {"faults": [judge(part, wanted)[1] for part, wanted in zip(answer, expected, strict=True)]}
