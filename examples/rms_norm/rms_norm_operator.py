"""RMSNorm for the harness: cases, inputs, the exact answer, work and baselines. The error budget is the default one."""

import functools
from dataclasses import dataclass

import torch

from flashmoe_science.proof.subject.custom_operator import (
    DTYPES,
    Baseline,
    CustomOperator,
    Work,
    standard_normal,
)


@dataclass(frozen=True)
class Problem:
    """One call: its fields are the keys of a case in suite.toml."""

    rows: int
    columns: int
    dtype: str
    eps: float = 1e-6

    def __post_init__(self):
        if self.rows < 1 or self.columns < 1 or self.dtype not in DTYPES:
            raise ValueError(f"rows and columns must be above 0 and dtype one of {', '.join(DTYPES)}")


class RmsNorm(CustomOperator):
    """y = x / sqrt(mean(x ** 2) + eps) * weight, row by row."""

    problem = Problem

    def describe(self, problem):
        """Return a short name for tables and records."""
        return f"rows{problem.rows}_columns{problem.columns}_{problem.dtype}"

    def make_inputs(self, problem, *, seed, device):
        """Return fresh random inputs."""
        shapes = {"x": (problem.rows, problem.columns), "weight": (problem.columns,)}
        return standard_normal(shapes, DTYPES[problem.dtype], seed=seed, device=device)

    def bind(self, entry, problem, inputs):
        """Return the call that is checked and timed."""
        return functools.partial(entry, inputs["x"], inputs["weight"], eps=problem.eps)

    def exact(self, problem, inputs):
        """Return the answer in fp64."""
        x, weight = inputs["x"].double(), inputs["weight"].double()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + problem.eps) * weight

    def low_precision(self, problem, inputs):
        """Return the framework's own answer: twice its error is allowed."""
        return torch_rms_norm(inputs["x"], inputs["weight"], eps=problem.eps)

    def work(self, problem):
        """Count what one call has to do at the least: no GPU can be faster."""
        elements = problem.rows * problem.columns
        size = DTYPES[problem.dtype].itemsize
        return Work(flops=4.0 * elements, bytes=float((2 * elements + problem.columns) * size), tokens=problem.rows)

    def baselines(self):
        """Return whom it is compared with; the first is the default."""
        return {"torch": Baseline("torch", torch_rms_norm)}


def torch_rms_norm(x, weight, *, eps):
    """Return PyTorch's own."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


OPERATOR = RmsNorm()
