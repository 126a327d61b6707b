"""Print the figures of docs/explanation/error-scale.md: right kernels that fail, and wrong ones that are found.

``PYTHONPATH=src python tools/simulate_error_scale.py`` takes an hour, most of it for gradients and experts; ``--fewer
16`` some minutes. ``--suites`` takes some hours for its one table; with names of suites it is theirs, so that many
cores can share it. The tests check the same with fewer draws. Kernels are simulated: fp64, and a rounding where a
kernel rounds.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashmoe_science.moe.reference import activate, activation_slopes
from flashmoe_science.operators.attention_scale import backward_scale, forward_scale
from flashmoe_science.operators.baselines.attention_decode import in_dtype_of_q
from flashmoe_science.operators.error_scale import Scale
from flashmoe_science.operators.moe import OPERATOR as EXPERTS, activation_of
from flashmoe_science.operators.moe_backward import OPERATOR as EXPERT_GRADIENTS
from flashmoe_science.operators.stress import OF_VALUES, stress_attention
from flashmoe_science.proof.measure.allowed_error import find_expected, judge
from flashmoe_science.proof.subject.loading import load_operator
from flashmoe_science.proof.subject.outputs import parts
from flashmoe_science.proof.subject.suites import list_suites, load_suite

SEED = 20261126
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
Shares = tuple[Tensor, Tensor]  # of what is allowed: in the worst element, and in the worst row, of each draw


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return fp64 numbers as a kernel with fp32 sums stores them in ``dtype``."""
    return x.float().to(dtype).double()


def grouped(heads: Tensor, group: int) -> Tensor:
    """Return ``[N * G, ...]`` as ``[N, G, ...]``."""
    return heads.reshape(-1, group, *heads.shape[1:])


def shares_of(answer: Tensor, exact: Tensor, scale: Scale) -> Shares:
    """Return the worst shares of each draw; draws are the first axis."""
    errors = (answer.double() - exact).abs()
    rows = errors.square().mean(-1, keepdim=True).sqrt()
    both = ((errors, scale.largest), (rows, scale.rms))
    of_element, of_row = (torch.where(e == 0, 0.0, e / s).flatten(1).amax(1) for e, s in both)
    return of_element, of_row


@dataclass(frozen=True)
class Attention:
    """A case, with heads as draws."""

    suite: str
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: str
    causal: bool
    group: int = 1
    window: int = -1  # to the left
    stress: str = ""  # a stress draw of values; empty: standard normal

    def draw(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return q, k, v and do."""

        def normal(heads: int, length: int) -> Tensor:
            shape = (1, heads, length, self.head_dim)
            return torch.randn(shape, generator=generator).to(LOW[self.dtype])

        queries = count * self.group
        drawn = {
            "q": normal(queries, self.seqlen_q), "k": normal(count, self.seqlen_k),
            "v": normal(count, self.seqlen_k), "do": normal(queries, self.seqlen_q),
        }  # fmt: skip
        if self.stress:
            stress_attention(self.stress, drawn["q"], drawn["k"], drawn["v"], self.head_dim**-0.5, [0])
        return drawn

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of references and scales."""
        window = (self.window, 0 if self.window >= 0 else -1)
        return {"causal": self.causal, "softmax_scale": None, "window": window}

    def scaled(self, q: Tensor, *, eager: bool) -> Tensor:
        """Return q times the scale ``[HK, G, Sq, D]``, which an eager run rounds."""
        scaled = grouped(q[0].double(), self.group) * self.head_dim**-0.5
        return rounded(scaled, LOW[self.dtype]) if eager else scaled

    def scores(self, q: Tensor, k: Tensor, *, eager: bool = False) -> Tensor:
        """Return scores ``[HK, G, Sq, Sk]`` in fp64, -inf where a row does not see a key."""
        scores: Tensor = self.scaled(q, eager=eager) @ k[0, :, None].double().mT
        ahead = torch.arange(self.seqlen_k) - torch.arange(self.seqlen_q)[:, None] - self.seqlen_k + self.seqlen_q
        hidden = (ahead > 0) & self.causal
        if self.window >= 0:
            hidden |= (ahead < -self.window) | (ahead > 0)
        return scores.masked_fill(hidden, -math.inf)


def softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(s - top), and its sum over keys."""
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return weights, weights.sum(-1, keepdim=True)


def attend(case: Attention, inputs: dict[str, Tensor], kernel: str) -> Tensor:
    """Return o ``[HK, G, Sq, DV]``: exact, of a fused kernel, of an eager one, or of a fault."""
    dtype, v = LOW[case.dtype], inputs["v"][0, :, None].double()
    scores = case.scores(inputs["q"], inputs["k"], eager=kernel == "eager")
    if kernel == "eager":
        weights, total = softmax(rounded(scores, dtype))
        return rounded(rounded(weights / total, dtype) @ v, dtype)
    weights, total = softmax(scores)
    if "sinks" in inputs:
        sinks = inputs["sinks"].double().reshape(-1, case.group, 1, 1)
        total = total + torch.exp(sinks - scores.amax(-1, keepdim=True))
    if kernel == "exact":
        return weights @ v / total
    if kernel == "P of 5 bits":  # a mantissa of 4, as of fp8 with five bits of exponent it is 2
        weights = rounded(weights, dtype).float()
        weights = (weights.view(torch.int32) + 0x40000 & ~0x7FFFF).view(torch.float32).double()
    else:
        weights = rounded(weights, dtype)
    return rounded(weights @ v / total, dtype)


def differentiate(case: Attention, inputs: dict[str, Tensor], kernel: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv with K/V heads first."""
    dtype, eager = LOW[case.dtype], kernel == "eager"

    def low(x: Tensor, *, always: bool = False) -> Tensor:
        return rounded(x, dtype) if always or (eager and kernel != "exact") else x

    exact = kernel == "exact"
    q, do = case.scaled(inputs["q"], eager=eager), grouped(inputs["do"][0].double(), case.group)
    k, v = (inputs[name][0, :, None].double() for name in "kv")
    weights, total = softmax(low(case.scores(inputs["q"], inputs["k"], eager=eager)))
    p = low(weights / total)
    dp = low(do @ v.mT)
    o = low(p @ v, always=not exact)
    delta = (p * dp if eager else do * o).sum(-1, keepdim=True)
    ds = low(p * (dp - delta), always=not exact)
    dk = ds.flatten(1, 2).mT @ q.flatten(1, 2)
    dv = low(p, always=not exact).flatten(1, 2).mT @ do.flatten(1, 2)
    dq = low(ds @ k) * case.head_dim**-0.5
    return tuple(low(x, always=not exact) for x in (dq, dk, dv))  # type: ignore[return-value]


# The smallest case of each suite, one K/V head a draw; long sequences are cut to what a CPU does.
FORWARD = (
    Attention("seed", 4, 4, 4, "fp16", causal=False),
    Attention("decode", 1, 512, 128, "bf16", causal=False, group=4),
    Attention("standard, host", 512, 512, 64, "bf16", causal=True),
    Attention("standard-fp16", 512, 512, 64, "fp16", causal=True),
    Attention("scaling", 256, 256, 128, "bf16", causal=False),
    Attention("unseen", 320, 320, 80, "bf16", causal=False, group=4),
    Attention("features", 512, 512, 64, "bf16", causal=True, group=8, window=127),
    Attention("varlen", 37, 37, 128, "bf16", causal=True),
)
BACKWARD = (
    Attention("standard-backward", 512, 512, 64, "bf16", causal=True),
    Attention("train", 256, 256, 256, "bf16", causal=True, group=2, window=127),
    Attention("16 elements", 4, 4, 4, "fp16", causal=False),
)
STRESS_DRAWS = tuple(draw for draw in OF_VALUES if draw != "neighbours")  # there are no other sequences here
STRESSED = {
    "attention, bf16": Attention("", 512, 2048, 128, "bf16", causal=True),
    "attention, fp16": Attention("", 512, 2048, 64, "fp16", causal=True),
    "gradients, bf16": Attention("", 512, 512, 128, "bf16", causal=True),
    "gradients, fp16": Attention("", 512, 512, 64, "fp16", causal=True),
}
EXPERT_CASES = {
    "moe-decode": {"tokens": 1, "experts": 8, "top_k": 8, "hidden": 256, "inter": 96, "dtype": "bf16"},
    "moe-prefill": {"tokens": 64, "experts": 8, "top_k": 2, "hidden": 128, "inter": 64, "dtype": "bf16"},
    "moe-train": {"tokens": 64, "experts": 8, "top_k": 2, "hidden": 128, "inter": 64, "dtype": "bf16"},
}


def forward_shares(case: Attention, count: int, kernels: Sequence[str], seed: int) -> dict[str, Shares]:
    """Return the shares of each kernel, draw by draw."""
    inputs = case.draw(count, torch.Generator().manual_seed(seed))
    scale = forward_scale(*(inputs[n] for n in "qkv"), **case.options)
    by_head = Scale(*(grouped(each[0], case.group) for each in scale))
    exact = attend(case, inputs, "exact")
    return {kernel: shares_of(attend(case, inputs, kernel), exact, by_head) for kernel in kernels}


def backward_shares(case: Attention, count: int, kernels: Sequence[str], seed: int) -> dict[str, Shares]:
    """Return the shares of each kernel, draw by draw, each the worst of the three gradients."""
    inputs = case.draw(count, torch.Generator().manual_seed(seed))
    scales = backward_scale(*(inputs[n] for n in ("q", "k", "v", "do")), **case.options)
    by_head = [Scale(*(grouped(each[0], each.shape[1] // count) for each in scale)) for scale in scales]
    by_head[1:] = [Scale(*(each[:, 0] for each in scale)) for scale in by_head[1:]]
    exact = differentiate(case, inputs, "exact")
    found = {}
    for kernel in kernels:
        gradients = differentiate(case, inputs, kernel)
        found[kernel] = _worst([shares_of(*each) for each in zip(gradients, exact, by_head, strict=True)])
    return found


def fused_experts(case: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return the output of kernels that round h and each pair's output."""
    dtype, x, out = inputs["x"].dtype, inputs["x"].double(), torch.zeros(inputs["x"].shape, dtype=torch.float64)
    for e in torch.unique(inputs["topk_ids"]).tolist():
        tokens, slots = torch.where(inputs["topk_ids"] == e)
        product = x[tokens] @ inputs["w_gate_up"][e].double().T
        h = rounded(activate(product, **activation_of(case)), dtype)
        y = rounded(h @ inputs["w_down"][e].double().T, dtype)
        out.index_add_(0, tokens, y * inputs["topk_weights"][tokens, slots, None].double())
    return rounded(out, dtype)


def fused_gradients(case: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of kernels that start from the product as it was kept, and round dproduct and h."""
    dtype, options = inputs["x"].dtype, activation_of(case)
    found = {n: torch.zeros(inputs[n].shape, dtype=torch.float64) for n in ("x", "w_gate_up", "w_down", "topk_weights")}
    order = torch.sort(inputs["topk_ids"].flatten(), stable=True).indices
    for e in torch.unique(inputs["topk_ids"]).tolist():
        rows = torch.where(inputs["topk_ids"].flatten()[order] == e)[0]
        tokens, slots = order[rows] // case.problem.top_k, order[rows] % case.problem.top_k
        x, do, product = inputs["x"][tokens].double(), inputs["do"][tokens].double(), inputs["product"][rows].double()
        weight = inputs["topk_weights"][tokens, slots, None].double()
        h = rounded(activate(product, **options), dtype)
        da = do @ inputs["w_down"][e].double()
        dproduct = rounded(torch.cat([da * weight * s for s in activation_slopes(product, **options)], -1), dtype)
        found["x"].index_add_(0, tokens, rounded(dproduct @ inputs["w_gate_up"][e].double(), dtype))
        found["w_gate_up"][e] = dproduct.T @ x
        found["w_down"][e] = rounded(do * weight, dtype).T @ h
        found["topk_weights"][tokens, slots] = (h * da).sum(-1)
    weights = inputs["topk_weights"].dtype
    return tuple(rounded(g, weights if n == "topk_weights" else dtype) for n, g in found.items())


def expert_shares(suite: str, count: int, seed: int) -> dict[str, Shares]:
    """Return the shares of a fused and an eager kernel, draw by draw."""
    operator = EXPERT_GRADIENTS if suite == "moe-train" else EXPERTS
    case = operator.parse_case(EXPERT_CASES[suite])
    found: dict[str, list[Shares]] = {"fused": [], "eager": []}
    for number in range(count):
        inputs = operator.make_inputs(case, seed=seed + number, device="cpu")
        exact, low, scales = (getattr(operator, n)(case, inputs) for n in ("exact", "low_precision", "error_scale"))
        fused = fused_gradients(case, inputs) if suite == "moe-train" else fused_experts(case, inputs)
        for kernel, answer in (("fused", fused), ("eager", low)):
            shares = [
                shares_of(*each) for each in zip(_drawn(answer), _drawn(exact), map(_one_draw, scales), strict=True)
            ]
            found[kernel].append(_worst(shares))
    return {kernel: _joined(shares) for kernel, shares in found.items()}


SIMULATED = (
    "attention", "attention_backward", "attention_cache", "attention_train", "attention_varlen",
    "attention_varlen_backward", "moe", "moe_backward",
)  # fmt: skip


class OfSuite:
    """The smallest case of a suite, cut to what a CPU does, judged as the harness judges."""

    def __init__(self, name: str) -> None:
        suite = load_suite(name)
        self.name, self.operator = name, load_operator(suite.operator)
        smallest = min((case.problem for case in suite.cases), key=lambda p: self.operator.work(p).flops)
        self.table = _cut(dict(self.operator.as_table(smallest)))
        self.problem = self.operator.parse_case(self.table)

    def judge(self, seed: int) -> dict[str, tuple[float, float, bool]]:
        """Return of the fused and the eager kernel the shares of an element and a row, and whether one is refused.

        Where no fused kernel is simulated, the eager one is alone.
        """
        inputs = self.operator.make_inputs(self.problem, seed=seed, device="cpu")
        expected = find_expected(self.operator, self.problem, inputs)
        found = {}
        answers = {"fused": self.fused(inputs)} if self.is_simulated else {}
        for kernel, answer in {**answers, "eager": self.eager(inputs)}.items():
            judged = [judge(*each) for each in zip(answer, expected, strict=True)]
            shares = [(a.element_share or 0.0, a.row_share or 0.0) for a, _ in judged if a is not None]
            of_element, of_row = (max(each) for each in zip(*shares, strict=True))
            found[kernel] = of_element, of_row, any(fault for _, fault in judged)
        return found

    @property
    def is_simulated(self) -> bool:
        """Whether ``fused`` knows this case: no masks, indices, pages, ranks, biases and the like."""
        left, right = self.table.get("window", (-1, -1))
        odd_window = right > 0 or (left >= 0 and not self.table["causal"])
        more = odd_window or any(self.table.get(n) for n in ("softcap", "alibi", "bias", "page_size", "shared_kv"))
        gradients_of_sinks = "sinks" in self.table and self.operator.name not in ("attention", "attention_varlen")
        return self.operator.name in SIMULATED and not more and not gradients_of_sinks

    def eager(self, inputs: dict[str, Tensor]) -> Sequence[Tensor]:
        """Return what the framework gives in the dtype."""
        return parts(self.operator.low_precision(self.problem, inputs))

    def fused(self, inputs: dict[str, Tensor]) -> Sequence[Tensor]:
        """Return what a kernel gives that keeps all but P, ds, h and results in fp32."""
        if "tokens" in self.table:
            gradients = self.operator.name == "moe_backward"
            found = fused_gradients(self.problem, inputs) if gradients else (fused_experts(self.problem, inputs),)
            names = ("x", "w_gate_up", "w_down", "topk_weights")[: len(found)]
            return [each.to(inputs[name].dtype) for name, each in zip(names, found, strict=True)]
        heads_first = [self._fused_sequence(each) for each in self._sequences(inputs)]
        if "lengths" not in self.table:
            return heads_first[0]
        return [torch.cat([each[0].transpose(0, 1) for each in output]) for output in zip(*heads_first, strict=True)]

    def _sequences(self, inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return q, k, v and do ``[1, H, S, D]`` of each sequence, and sinks."""
        if self.operator.name == "attention_cache":
            problem: Any = self.problem
            wide = in_dtype_of_q(problem, inputs)
            k, v = (wide[name].transpose(1, 2) for name in ("k_cache", "v_cache"))
            return [{"q": inputs["q"], "k": k, "v": v}]
        named: dict[str, Tensor] = {n: inputs[n] for n in ("q", "k", "v", "do", "sinks") if n in inputs}
        if "lengths" not in self.table:
            return [named]
        split = {
            name: tensor.split(self.table["lengths"])  # type: ignore[no-untyped-call]
            for name, tensor in named.items()
        }
        count = range(len(self.table["lengths"]))
        return [{name: of_all[n].transpose(0, 1)[None] for name, of_all in split.items()} for n in count]

    def _fused_sequence(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        """Return o, or dq, dk and dv, or all of them, ``[1, H, S, D]``."""
        t, (q, k) = self.table, (inputs["q"], inputs["k"])
        left, _ = t.get("window", (-1, -1))
        case = Attention(
            self.name,
            q.shape[2],
            k.shape[2],
            q.shape[3],
            t["dtype"],
            t.get("causal", False),
            q.shape[1] // k.shape[1],
            left,
        )
        found = [] if self.operator.name.endswith("_backward") else [attend(case, inputs, "fused")]
        found += differentiate(case, inputs, "fused") if "do" in inputs else []
        return [each.flatten(0, -3)[None].to(q.dtype) for each in found]


def _cut(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table of one sequence, or three packed ones, with one K/V head, shorter lengths and fewer experts."""
    most = {"batch": 1, "seqlen_q": 192, "seqlen_k": 192, "tokens": 32, "hidden": 128, "inter": 64, "top_k": 96}
    for name in most.keys() & table.keys():
        table[name] = min(table[name], most[name])
    if "heads_kv" in table:
        table |= {"heads": table["heads"] // table["heads_kv"], "heads_kv": 1}
    if "experts" in table:
        table["experts"] = max(8, table["top_k"])
    for name in {"lengths", "lengths_k"} & table.keys():
        table[name] = sorted(table[name])[:3]
    return table


def _drawn(answer: Any) -> list[Tensor]:
    return [part[None] for part in ((answer,) if isinstance(answer, Tensor) else answer)]


def _one_draw(scale: Scale) -> Scale:
    return Scale(scale.largest[None], scale.rms[None])


def _worst(shares: Sequence[Shares]) -> Shares:
    """Return the worst of several outputs, draw by draw."""
    return torch.stack([a for a, _ in shares]).amax(0), torch.stack([b for _, b in shares]).amax(0)


def _joined(shares: Sequence[Shares]) -> Shares:
    """Return the draws of several parts."""
    return torch.cat([a for a, _ in shares]), torch.cat([b for _, b in shares])


def late_rows(dtype: str, head_dim: int, seqlen: int, rows: int, seed: int) -> dict[str, tuple[float, float]]:
    """Return shares of a right kernel and of faults in the last rows of a long causal problem."""
    case = Attention("", rows, seqlen, head_dim, dtype, causal=True)
    inputs = case.draw(1, torch.Generator().manual_seed(seed))
    scale = Scale(*(each[0, :, None] for each in forward_scale(*(inputs[n] for n in "qkv"), **case.options)))
    exact, v = attend(case, inputs, "exact"), inputs["v"][0, :, None].double()

    def missing(keys: int) -> Tensor:
        scores = case.scores(inputs["q"], inputs["k"])
        scores[..., :keys] = -math.inf
        weights, total = softmax(scores)
        return rounded(rounded(weights, LOW[dtype]) @ v / total, LOW[dtype])

    right = attend(case, inputs, "fused")
    larger = right.clone()
    answers = {"right": right, "misses keys 0 to 63": missing(64), "misses keys 0 to 7": missing(8)}
    for percent in (10, 3):
        larger = right.clone()
        larger[..., -1, :] = rounded(larger[..., -1, :] * (1 + percent / 100), LOW[dtype])
        answers[f"last row {percent} % too large"] = larger
    found = {name: shares_of(answer, exact, scale) for name, answer in answers.items()}
    return {name: (float(a.max()), float(b.max())) for name, (a, b) in found.items()}


def _in_parts(shares: Callable[[int, int], dict[str, Shares]], draws: int, at_once: int) -> dict[str, Shares]:
    parts = [shares(min(at_once, draws - first), SEED + first) for first in range(0, draws, at_once)]
    return {kernel: _joined([part[kernel] for part in parts]) for kernel in parts[0]}


def _row(name: str, draws: int, found: dict[str, Shares]) -> str:
    cells = []
    for a, b in found.values():
        cells.append(f"{int(((a > 1) | (b > 1)).sum())} | {a.max():.2f}, {b.max():.2f}")
    return f"| {name} | {draws:,} | {' | '.join(cells)} |"


def _print_right(fewer: int) -> None:
    print("| suite | draws | fused: fail | element, row | eager: fail | element, row |\n" + "| --- " * 6 + "|")
    kernels = ("fused", "eager")
    for cases, shares in ((FORWARD, forward_shares), (BACKWARD, backward_shares)):
        for case in cases:
            scores = case.group * case.seqlen_q * case.seqlen_k
            draws = max(1, min(20_000, 2**25 // scores) // fewer)
            at_once = max(1, 2**21 // scores)
            found = _in_parts(lambda n, seed, c=case, f=shares: f(c, n, kernels, seed), draws, at_once)  # type: ignore[misc]
            print(_row(case.suite, draws, found), flush=True)
    for suite in EXPERT_CASES:
        draws = max(1, 200 // fewer)
        print(_row(suite, draws, expert_shares(suite, draws, SEED)), flush=True)


def _print_stress(fewer: int) -> None:
    print(
        "\n| stress draw | of | rows | fused: fail | element, row | eager: fail | element, row |\n" + "| --- " * 7 + "|"
    )
    for draw in STRESS_DRAWS:
        for name, case in STRESSED.items():
            shares = forward_shares if name.startswith("attention") else backward_shares
            stressed, draws = replace(case, stress=draw), max(1, 64 // fewer)
            found = _in_parts(lambda n, seed, c=stressed, f=shares: f(c, n, ("fused", "eager"), seed), draws, 2)  # type: ignore[misc]
            print(_row(f"{draw} | {name}", draws * case.seqlen_q, found), flush=True)


def _print_faults(fewer: int) -> None:
    print(
        "\n| late rows | D | right | misses keys 0 to 63 | misses keys 0 to 7 | last row 10 % too large | 3 % |\n"
        + "| --- " * 7
        + "|"
    )
    for dtype in LOW:
        for head_dim in (64, 128):
            found = late_rows(dtype, head_dim, 16384 // fewer, 128, SEED)
            cells = " | ".join(f"{a:.2f}, {b:.2f}" for a, b in found.values())
            print(f"| {dtype} | {head_dim} | {cells} |", flush=True)
    kernels = ("P of 5 bits",)
    print("\n| P of 5 bits in bf16, of 8 that it should have | draws | found |\n| --- | --- | --- |")
    for size in (4, 32, 128):
        case = Attention("", size, size, 16 if size == 4 else 64, "bf16", causal=False)
        draws = max(1, (2000 if size < 128 else 200) // fewer)
        a, b = forward_shares(case, draws, kernels, SEED)[kernels[0]]
        print(f"| {size} x {size} | {draws:,} | {int(((a > 1) | (b > 1)).sum()) / draws:.0%} |", flush=True)


def _print_suites(fewer: int, names: Sequence[str]) -> None:
    print(
        "| suite | case as it is cut | draws | fused: fail | element, row | eager: fail | element, row |\n"
        + "| --- " * 7
        + "|"
    )
    total = refused = 0
    # Of calls over ranks an answer comes in parts: it is that of the same operators.
    own = [name for name in list_suites() if not name.startswith(("context-parallel", "expert-parallel"))]
    for name in names or own:
        suite = OfSuite(name)
        draws = max(1, {"seed": 9000, "train": 500}.get(name, 1000) // fewer)
        found = [suite.judge(SEED + number) for number in range(draws)]
        cells = []
        for kernel in ("fused", "eager"):
            if kernel not in found[0]:
                cells.append("not simulated | ")
                continue
            of_element, of_row, failed = zip(*(each[kernel] for each in found), strict=True)
            cells.append(f"{sum(failed)} | {max(of_element):.2f}, {max(of_row):.2f}")
            refused += sum(failed)
        total += draws
        print(f"| {name} | `{suite.operator.describe(suite.problem)}` | {draws:,} | {' | '.join(cells)} |", flush=True)
    print(f"| all | | {total:,} | {refused} of both | | | |")


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fewer", type=int, default=1, help="so many times fewer draws")
    parser.add_argument(
        "--suites", nargs="*", metavar="NAME", help="print the smallest case of each suite, or of these, and no more"
    )
    parser.add_argument("--stress", action="store_true", help="print the stress draws of attention, and no more")
    asked = parser.parse_args()
    fewer = asked.fewer
    torch.set_grad_enabled(False)
    if asked.suites is not None:
        _print_suites(fewer, asked.suites)
        return
    if asked.stress:
        _print_stress(fewer)
        return
    _print_right(fewer)
    _print_faults(fewer)


if __name__ == "__main__":
    main()
