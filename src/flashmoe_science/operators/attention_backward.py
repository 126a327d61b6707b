"""The gradients of attention for the harness: cases, inputs, exact ones, work and kernels.

A call is given what the forward leaves, q, k, v, o and LSE, and the gradient of o, and gives dq, dk and dv. Each has an
error budget of its own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from ..attention import reference
from ..attention.backward.api import flash_attention_backward
from ..attention.backward.plan import BackwardConfig, plan_backward
from ..attention.backward.problem import BackwardProblem
from ..attention.problem import ITEM_BYTES, AttentionProblem, canonical_strides, dense_strides
from ..gpu.planning import Work
from .attention import (
    SPILL_BYTES as FORWARD_SPILL_BYTES,
    change_batched,
    complete_table,
    draw_extras,
    options_of,
    shapes_of,
    smaller_sizes,
)
from .attention_scale import backward_scale
from .base import DTYPES, KernelOperator, standard_normal
from .baselines.attention_backward import BASELINES
from .baselines.base import Inputs
from .error_scale import Scale

OUTPUTS = ("dq", "dk", "dv")
_INPUTS = ("q", "k", "v", "do")
# Local memory a thread that a kernel may use outside of its loops, where tests/attention/test_backward_tables.py sees
# to it that none of their time goes; of the one of 192 columns test_backward_compiled_sm90.py, which allows some loads.
_SPILL_BYTES = {
    "_backward_kv_kernel": 512, "_backward_q_kernel": 512, "_backward_192_sm90_kernel": 80, "_backward_sm90_kernel": 40,
    **FORWARD_SPILL_BYTES,
}  # fmt: skip
_WITHOUT_PRODUCTS = (
    "_clear_kernel", "_finish_dq_kernel", "_merge_partials_kernel", "_order_key_tiles_kernel", "_sinks_gradient_kernel",
)  # fmt: skip

backward_triton = functools.partial(flash_attention_backward, kernel="backward_triton")
backward_gluon_sm90 = functools.partial(flash_attention_backward, kernel="backward_gluon_sm90")


def step_options(problem: BackwardProblem) -> dict[str, Any]:
    """Return the options of both passes."""
    p = problem.forward
    return {"causal": p.causal, "softmax_scale": p.softmax_scale, "window": p.window}


def draw(problem: BackwardProblem, *, seed: int, device: str) -> dict[str, torch.Tensor]:
    """Return standard normal q, k, v and do, and what else the forward has."""
    p, generator = problem.forward, torch.Generator(device=device).manual_seed(seed)
    shapes = {**shapes_of(p), "do": (p.batch, p.heads, p.seqlen_q, p.head_dim_v)}
    return {**standard_normal(shapes, DTYPES[p.dtype], generator), **draw_extras(p, generator)}


class BackwardOperator(KernelOperator):
    """The gradients of attention, for the harness."""

    name = "attention_backward"
    fresh: ClassVar[tuple[str, ...]] = ("do",)  # o and the LSE follow from q, k and v
    heads_along = {"q": 1, "k": 1, "v": 1, "do": 1, "o": 1, "lse": 1, "sinks": 0, "alibi": 0, "bias": 1}
    keys = {
        "batch": int, "heads": int, "heads_kv": int, "seqlen_q": int, "seqlen_k": int, "head_dim": int,
        "head_dim_v": int, "dtype": str, "causal": bool, "softmax_scale": float,
        "window": list, "softcap": float, "sinks": str, "alibi": str, "bias": str,
    }  # fmt: skip
    omitted = {"softmax_scale": None, "window": (-1, -1), "softcap": 0.0, "sinks": "", "alibi": "", "bias": ""}
    required = ("batch", "heads", "seqlen_q", "head_dim", "dtype")
    same_as = {"heads_kv": "heads", "seqlen_k": "seqlen_q", "head_dim_v": "head_dim"}
    kernels = {
        "flash_attention_backward": "auto",
        "backward_triton": "backward_triton",
        "backward_gluon_sm90": "backward_gluon_sm90",
    }
    public_module = flash_attention_backward.__module__
    rooms = ("attention",)
    spill_bytes = _SPILL_BYTES
    framework: ClassVar[Sequence[str]] = ("*flash_bwd*", "*fmha*", "*cudnn*", "*sm80_xmma*softmax*")
    known_baselines = BASELINES
    planner: ClassVar[Callable[..., Any]] = staticmethod(plan_backward)
    preparer = "..attention.backward.prepare:prepare_backward_kernels"
    instead = "backward_triton"

    def outputs(self, problem: BackwardProblem) -> Sequence[str]:  # noqa: ARG002 - the protocol's signature
        """Return the names of what a call gives, in this order."""
        return OUTPUTS

    def make_problem(self, table: dict[str, Any]) -> BackwardProblem:
        """Return the problem of a case."""
        p = complete_table({**table, "return_lse": True})
        o = (p.batch, p.heads, p.seqlen_q, p.head_dim_v)
        strides = canonical_strides(o, dense_strides(*o))
        return BackwardProblem(p, strides, strides)

    def sizes(self, problem: BackwardProblem) -> AttentionProblem:
        """Return the forward's problem."""
        return problem.forward

    def work(self, problem: BackwardProblem) -> Work:
        """Count five products a visible score, and every input and output once: the LSE is a number a row."""
        p = problem.forward
        columns = p.head_dim + p.head_dim_v
        queries = p.rows * (2 * p.head_dim + 2 * p.head_dim_v)  # q and dq, o and do
        keys = 2 * p.batch * p.heads_kv * p.seqlen_k * columns
        bias = p.heads * p.seqlen_q * p.seqlen_k * ITEM_BYTES[p.bias] if p.bias else 0
        return Work(problem.flops, float((queries + keys) * p.item_bytes + 4 * p.rows + bias), p.batch * p.seqlen_q)

    def make_inputs(self, problem: BackwardProblem, *, seed: int, device: str) -> dict[str, torch.Tensor]:
        """Return standard normal q, k, v and do, and o and LSE of the reference in fp32, o rounded."""
        return self.completed(problem, draw(problem, seed=seed, device=device))

    def smaller(self, problem: BackwardProblem, device: str) -> BackwardProblem:
        """Return a problem of fewer sequences and heads, and shorter where its scores are too many."""
        found: BackwardProblem = self.changed(problem, **smaller_sizes(problem.forward, device))
        return found

    def change_values(self, draw: str, problem: BackwardProblem, inputs: Inputs) -> bool:
        """Change q, k and v."""
        return change_batched(draw, problem.forward, inputs)

    def completed(self, problem: BackwardProblem, drawn: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what is drawn, with o and the LSE of the forward pass."""
        q, k, v, do = (drawn[name] for name in _INPUTS)
        o, lse = reference.attention(q, k, v, **options_of(problem.forward, drawn), dtype=torch.float32)
        return {**drawn, "o": o.to(do.dtype), "lse": lse}

    def arguments(self, problem: BackwardProblem, inputs: Inputs) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Return what a call is given; a baseline runs its forward before."""
        return [inputs[x] for x in ("q", "k", "v", "o", "lse", "do")], options_of(problem.forward, inputs)

    def exact(self, problem: BackwardProblem, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Return the gradients in fp64, of q, k, v and do alone: o and the LSE are computed anew."""
        tensors = (inputs[name] for name in _INPUTS)
        found = reference.attention_backward(*tensors, **options_of(problem.forward, inputs), dtype=torch.float64)
        return tuple(found[name] for name in ("q", "k", "v"))

    def low_precision(self, problem: BackwardProblem, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Return what autograd makes of the eager run in the problem's dtype."""
        _, dq, dk, dv = self.eager(problem, inputs)
        return dq, dk, dv

    def eager(self, problem: BackwardProblem, inputs: Inputs) -> list[torch.Tensor]:
        """Return o of the eager run in the problem's dtype, and dq, dk and dv, by K/V heads to fit."""
        p = problem.forward
        at_once = reference.heads_at_once(p.heads_kv, 4 * p.group * p.seqlen_q * p.seqlen_k)
        q, k, v, do = (inputs[name] for name in _INPUTS)
        found = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (do, q, k, v)]
        for b, h in itertools.product(range(p.batch), range(0, p.heads_kv, at_once)):
            one, mine, its = slice(b, b + 1), slice(h * p.group, (h + at_once) * p.group), slice(h, h + at_once)
            options = options_of(p, inputs)
            options |= {name: options[name][mine] for name in ("sinks", "alibi") if name in options}
            options |= {"bias": options["bias"][:, mine]} if p.bias else {}
            with torch.enable_grad():
                leaves = [x[one, heads].detach().requires_grad_() for x, heads in ((q, mine), (k, its), (v, its))]
                o = reference.attention_low_precision(*leaves, **options)
                grads = torch.autograd.grad(o, leaves, do[one, mine])
            for whole, part, heads in zip(found, (o.detach(), *grads), (mine, mine, its, its), strict=True):
                whole[one, heads] = part
        return found

    def error_scale(self, problem: BackwardProblem, inputs: Inputs) -> tuple[Scale, ...]:
        """Return what is allowed in each element of dq, dk and dv."""
        return backward_scale(*(inputs[name] for name in _INPUTS), **options_of(problem.forward, inputs))

    def instruction(self, plan: Any, kernel: str) -> str:
        """Return the machine instruction that a kernel of 16-bit operands promises, as a pattern, or an empty text."""
        return "*MMA*" if plan.problem.forward.item_bytes == 2 and kernel not in _WITHOUT_PRODUCTS else ""

    def interpreter_steps(self, problem: BackwardProblem) -> int:
        """Count pairs of a row tile and a key tile."""
        p, config = problem.forward, plan_backward(problem, None, "backward_triton").config
        assert config is None or isinstance(config, BackwardConfig)
        if config is None:
            return 0
        return p.batch * p.heads * -(-p.seqlen_q // config.q.block_m) * -(-p.seqlen_k // config.q.block_n)


OPERATOR = BackwardOperator()
