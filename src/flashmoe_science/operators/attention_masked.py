"""Attention under block masks for the harness: cases, inputs, the exact answer, work and kernels."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..attention import reference
from ..attention.api import flash_attention
from ..attention.forward.plan import plan_attention
from ..attention.masks.block_mask import BlockMask
from ..attention.masks.lists import MaskSizes
from ..attention.masks.plan import MASKED_HOPPER_KERNEL, MASKED_KERNEL
from ..attention.problem import AttentionProblem
from ..attention.tiles import ForwardConfig, Plan
from ..gpu.planning import Axis, Work
from ..gpu.specs import GpuSpec
from .attention import AttentionOperator, canonical, change_batched, shapes_of, smaller_sizes
from .attention_scale import forward_scale
from .base import DTYPES, KernelOperator, standard_normal
from .baselines.attention_masked import BASELINES
from .baselines.base import Inputs
from .error_scale import Scale
from .mask_kinds import check_kind, count_visible, make_mask

flash_attention_masked = functools.partial(flash_attention, kernel="auto")
forward_masked_triton = functools.partial(flash_attention, kernel=MASKED_KERNEL)
forward_masked_gluon_sm90 = functools.partial(flash_attention, kernel=MASKED_HOPPER_KERNEL)


@dataclass(frozen=True)
class MaskedProblem:
    """A call, and what its mask is."""

    planned: AttentionProblem
    mask: str  # of ``mask_kinds.KINDS``
    amount: int

    @property
    def dtype(self) -> str:
        """Of q, k, v and o."""
        return self.planned.dtype

    def make_mask(self, device: str) -> tuple[BlockMask, Any]:
        """Return the mask, and the function that FlexAttention takes."""
        return make_mask(self.mask, self.amount, self.planned.seqlen_q, self.planned.seqlen_k, device)

    @functools.cached_property
    def visible(self) -> int:
        """Pairs of a query and a key that it sees, of each head."""
        return count_visible(self.mask, self.amount, self.planned.seqlen_q, self.planned.seqlen_k)

    def describe(self) -> str:
        """Return a short name, e.g. ``documents1024_b1_h16_s8192_d128_bf16``."""
        amount = str(self.amount) if self.amount else ""
        return f"{self.mask}{amount}_{self.planned.describe()}".removesuffix("_mask1_1")


class MaskedOperator(AttentionOperator):
    """Attention under block masks, for the harness."""

    name = "attention_masked"
    fresh: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    keys = {
        "batch": int, "heads": int, "heads_kv": int, "seqlen_q": int, "seqlen_k": int, "head_dim": int,
        "head_dim_v": int, "dtype": str, "softmax_scale": float, "mask": str, "amount": int,
    }  # fmt: skip
    required: ClassVar[Sequence[str]] = ("batch", "heads", "seqlen_q", "head_dim", "dtype", "mask")
    omitted = {"softmax_scale": None, "amount": 0}
    kernels = {
        "flash_attention_masked": "auto",
        "forward_masked_triton": MASKED_KERNEL,
        "forward_masked_gluon_sm90": MASKED_HOPPER_KERNEL,
    }
    public_module = ""
    known_baselines = BASELINES
    spill_bytes = {**AttentionOperator.spill_bytes, "_masked_forward_sm90_kernel": 40}  # of 256 columns, by Triton 3.9

    def make_problem(self, table: dict[str, Any]) -> Any:
        """Return the problem of a case."""
        mask, amount = table.pop("mask"), table.pop("amount", 0)
        planned = canonical(AttentionProblem(**table, mask_batch=1, mask_heads=1))
        check_kind(mask, planned.seqlen_q, planned.seqlen_k)
        return MaskedProblem(planned, mask, amount)

    def sizes(self, problem: Any) -> AttentionProblem:
        """Return the problem that is planned."""
        planned: AttentionProblem = problem.planned
        return planned

    def values(self, problem: Any) -> dict[str, Any]:
        """Return the value of each key."""
        return {key: getattr(problem if key in ("mask", "amount") else problem.planned, key) for key in self.keys}

    def work(self, problem: Any) -> Work:
        """Count 4 D operations a visible score, and every input and output once."""
        p = problem.planned
        flops = 2.0 * p.batch * p.heads * problem.visible * (p.head_dim + p.head_dim_v)
        queries = p.batch * p.heads * p.seqlen_q * (p.head_dim + p.head_dim_v)
        keys = p.batch * p.heads_kv * p.seqlen_k * (p.head_dim + p.head_dim_v)
        return Work(flops, float((queries + keys) * p.item_bytes), p.batch * p.seqlen_q)

    def make_inputs(self, problem: Any, *, seed: int, device: str) -> dict[str, torch.Tensor]:
        """Return standard normal q, k and v, and the lists and bits of the mask."""
        p = problem.planned
        inputs = standard_normal(shapes_of(p), DTYPES[p.dtype], torch.Generator(device=device).manual_seed(seed))
        mask = problem.make_mask(device)[0]
        return {**inputs, "mask_lists": mask.lists, "mask_bits": mask.bits}

    def arguments(self, problem: Any, inputs: Inputs) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Return q, k and v, and the options of ``flash_attention``."""
        options = {"softmax_scale": problem.planned.softmax_scale, "mask": self._mask(problem, inputs)}
        return [inputs[name] for name in "qkv"], options

    def _mask(self, problem: Any, inputs: Inputs) -> BlockMask:
        sizes = MaskSizes(1, 1, problem.planned.seqlen_q, problem.planned.seqlen_k)
        return BlockMask(sizes, inputs["mask_lists"], inputs["mask_bits"])

    def exact(self, problem: Any, inputs: Inputs) -> torch.Tensor:
        """Return the answer in fp64."""
        return reference.attention(
            inputs["q"], inputs["k"], inputs["v"], softmax_scale=problem.planned.softmax_scale,
            mask=self._mask(problem, inputs).to_dense(), dtype=torch.float64,
        )[0]  # fmt: skip

    def low_precision(self, problem: Any, inputs: Inputs) -> torch.Tensor:
        """Return the framework's eager answer in the problem's dtype, by heads: all scores at once may not fit."""
        p, dense = problem.planned, self._mask(problem, inputs).to_dense()
        q, k, v = (inputs[name] for name in "qkv")
        at_once = reference.heads_at_once(p.heads_kv, p.group * p.seqlen_q * p.seqlen_k)
        o = torch.empty(p.batch, p.heads, p.seqlen_q, p.head_dim_v, dtype=q.dtype, device=q.device)
        for b in range(p.batch):
            for h in range(0, p.heads_kv, at_once):
                mine, its = slice(h * p.group, (h + at_once) * p.group), slice(h, h + at_once)
                parts = q[b : b + 1, mine], k[b : b + 1, its], v[b : b + 1, its]
                o[b : b + 1, mine] = reference.attention_low_precision(
                    *parts, softmax_scale=p.softmax_scale, mask=dense
                )
        return o

    def error_scale(self, problem: Any, inputs: Inputs) -> tuple[Scale, ...]:
        """Return what is allowed in each element of o."""
        q, k, v = (inputs[name] for name in "qkv")
        dense = self._mask(problem, inputs).to_dense()
        return (forward_scale(q, k, v, causal=False, softmax_scale=problem.planned.softmax_scale, mask=dense),)

    def smaller(self, problem: Any, device: str) -> Any:
        """Return a problem of fewer sequences and heads, and shorter where its scores are too many."""
        return self.parse_case({**self.as_table(problem), **smaller_sizes(problem.planned, device)})

    def change_values(self, draw: str, problem: Any, inputs: Inputs) -> bool:
        """Change q, k and v."""
        return change_batched(draw, problem.planned, inputs)

    def plan(self, subject: str, problem: Any, gpu: GpuSpec) -> Plan:
        """Return the plan of a call. Raises ``UnsupportedError``."""
        return plan_attention(problem.planned, gpu, self.kernels[subject])

    def scaled(self, problem: Any, axis: str, factor: int) -> Any:
        """Return a longer problem; a longer mask is another one, so only batch and heads grow."""
        p = problem.planned
        longer = {
            "batch": {"batch": p.batch * factor},
            "heads": {"heads": p.heads * factor, "heads_kv": p.heads_kv * factor},
        }
        return self.parse_case({**self.as_table(problem), **longer[axis]}) if axis in longer else None

    def axes(self) -> tuple[Axis, ...]:
        """Return the ways to make a problem longer."""
        return Axis("batch", "parallel", "the batch"), Axis("heads", "parallel", "the heads")

    def bind(self, entry: Any, problem: Any, inputs: Inputs) -> Any:
        """Return a call without arguments; on CPU tensors that of the interpreted kernel, as every GPU gets it."""
        on_cpu = inputs["q"].device.type == "cpu"
        if entry is flash_attention_masked and on_cpu and os.environ.get("TRITON_INTERPRET") == "1":
            entry = forward_masked_triton
        return KernelOperator.bind(self, entry, problem, inputs)

    def interpreter_steps(self, problem: Any) -> int:
        """Count pairs of a row tile and a key tile, were all blocks visited."""
        p, config = problem.planned, ForwardConfig(32, 64, 4, 1)
        tiles = -(-p.seqlen_q // config.block_m) * p.batch * p.heads
        return int(tiles * -(-p.seqlen_k // config.block_n))

    def cpu_stand_in(self, subject: str, problem: Any) -> str:  # noqa: ARG002 - the protocol's signature
        """Return what the interpreter runs in place of ``subject``: nothing else, as every GPU gets the kernel."""
        return ""


OPERATOR = MaskedOperator()
