"""Attention in plain torch on the CPU, with everything that the harness asks of an operator.

The chain is tested with it, so that its tests need neither a GPU nor a compiler. Call it by its module's path.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field

import torch

from flashmoe_science.errors import CompileError, InputError
from flashmoe_science.proof.subject.custom_operator import DTYPES, CustomOperator, Work


@dataclass(frozen=True)
class Problem:
    batch: int
    heads: int
    seqlen_q: int
    head_dim: int
    dtype: str = "fp16"
    causal: bool = False

    def __post_init__(self):
        for name in ("batch", "heads", "seqlen_q", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InputError(f"{name} must be an integer above 0, got {value!r}")


@dataclass(frozen=True)
class Outcome:
    registers: int = 32
    spill_bytes: int = 0
    shared_memory_bytes: int = 1024
    seconds: float = 0.0
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    label: str
    gpu: str
    outcome: Outcome = field(default_factory=Outcome)

    def run(self):
        if "no compiler" in self.label:
            raise CompileError("expected an MMA of 16, got 4")
        return self.outcome


@dataclass(frozen=True)
class FakeBaseline:
    name: str
    kernels: tuple[str, ...] = ()

    def load(self):
        if self.name == "absent":
            raise ImportError("no module named absent")
        return torch.nn.functional.scaled_dot_product_attention

    def version(self):
        return "1.0"

    def refusal(self, problem):
        return "odd sizes" if self.name == "picky" and problem.seqlen_q % 2 else None

    def context(self):
        return contextlib.nullcontext()


def attend(q, k, v, *, causal=False, softmax_scale=None):
    """softmax(q k^T) v, [B, H, S, D], in the dtype of q with sums in fp32."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = (q.float() @ k.float().mT) * scale
    if causal:
        rows, columns = scores.shape[-2:]
        scores.masked_fill_(torch.ones(rows, columns, dtype=torch.bool).triu(1 + columns - rows), -math.inf)
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def _plain(problem, q, k, v):
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    if problem.causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return scores.softmax(-1) @ v


class FakeOperator(CustomOperator):
    name = "tests.proof.fake_operator"

    def parse_case(self, table):
        try:
            return Problem(**table)
        except TypeError as error:
            raise InputError(f"case must have batch, heads, seqlen_q and head_dim, got {dict(table)}") from error

    def describe(self, problem):
        causal = "_causal" if problem.causal else ""
        return f"b{problem.batch}_h{problem.heads}_s{problem.seqlen_q}_d{problem.head_dim}_{problem.dtype}{causal}"

    def work(self, problem):
        tokens = problem.batch * problem.seqlen_q
        flops = 4.0 * tokens * problem.seqlen_q * problem.heads * problem.head_dim
        return Work(flops, 8.0 * tokens * problem.heads * problem.head_dim, tokens)

    def make_inputs(self, problem, *, seed, device):
        generator = torch.Generator(device).manual_seed(seed)
        shape = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim)
        dtype = DTYPES[problem.dtype]
        return {n: torch.randn(shape, generator=generator, device=device).to(dtype) for n in "qkv"}

    def bind(self, entry, problem, inputs):
        q, k, v = (inputs[name] for name in "qkv")
        causal = problem.causal
        return lambda: entry(q, k, v, causal=causal, softmax_scale=None)

    def exact(self, problem, inputs):
        return _plain(problem, *(inputs[name].double() for name in "qkv"))

    def low_precision(self, problem, inputs):
        return _plain(problem, *(inputs[name] for name in "qkv"))

    def entry_points(self):
        return {"fake_attention": f"{self.name}:attend"}

    def sources(self, subject):
        return ["proof/gates/chain.py"]

    def refusal(self, subject, problem, gpu):
        if problem.batch == 7:
            return "it does not serve 7 sequences"
        return f"it is for the L4, this is a {gpu}" if problem.batch == 9 and gpu != "L4" else None

    def compile_jobs(self, subject, problems, gpus):
        problems = [p for p in problems if any(self.refusal(subject, p, gpu) is None for gpu in gpus)]
        return [Job(f"attend D={d}", gpu) for d in sorted({p.head_dim for p in problems}) for gpu in gpus]

    def cpu_refusal(self, subject, problem):
        return "4,096 tokens and more take hours in an interpreter" if problem.seqlen_q >= 4096 else None

    def cpu_stand_in(self, subject, problem):
        return "plain torch (a GPU runs a kernel)" if problem.causal else ""

    def baselines(self):
        return {name: FakeBaseline(name) for name in ("sdpa", "absent", "picky")}


OPERATOR = FakeOperator()
