"""Calls of attention whose error scale both forms of it work out, and the comparison of the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from flashmoe_science.operators.attention_scale import errors, errors_triton, scale, step_scale


@dataclass(frozen=True)
class ScaleCase:
    """Sizes and features of one call."""

    name: str
    heads: int = 4
    heads_kv: int = 2
    seqlen_q: int = 19
    seqlen_k: int = 67
    head_dim: int = 64  # its default scale is a power of two
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    size: float = 1.0  # of q
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, dtype: torch.dtype, device: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Return q, k, v and do, heads inside tokens, and the options of a call."""
        generator = torch.Generator().manual_seed(5)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        def tensor(heads: int, rows: int) -> torch.Tensor:
            return draw(1, rows, heads, self.head_dim).to(dtype).transpose(1, 2).to(device)

        tensors = [tensor(self.heads, self.seqlen_q), *(tensor(self.heads_kv, self.seqlen_k) for _ in range(2))]
        tensors = [tensors[0] * self.size, *tensors[1:], tensor(self.heads, self.seqlen_q)]
        scores = draw(1, self.heads, self.seqlen_q, self.seqlen_k)
        made = {
            "sinks": scores[0, :, 0, 0] * 4,
            "alibi": scores[:, :, 0, 0].abs(),
            "bias": scores.to(dtype),
            "mask": scores[:, :2] > 0.8,
            "hidden": torch.where(scores[:, :1] > 0, -3e38, 0.0).to(torch.bfloat16),
        }
        more = {name: made[value] if isinstance(value, str) else value for name, value in self.options.items()}
        on_device = {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in more.items()}
        return tensors, {"causal": True, "softmax_scale": None, **on_device}


ALL = (torch.bfloat16, torch.float16, torch.float32)
SMALL = [
    ScaleCase("plain", dtypes=ALL),
    ScaleCase("scale", head_dim=48, seqlen_k=40, dtypes=ALL),
    ScaleCase("blocks", heads=2, seqlen_q=3, seqlen_k=1100, head_dim=16),
    ScaleCase("few keys", seqlen_q=5, seqlen_k=1, options={"causal": False}),
    ScaleCase("unseen", seqlen_k=9, dtypes=ALL),
    ScaleCase("window", options={"window": (6, 0)}),
    ScaleCase("softcap", seqlen_k=72, options={"softcap": 3.0}, dtypes=ALL),
    ScaleCase("sinks", options={"sinks": "sinks"}, dtypes=ALL),
    ScaleCase("alibi", options={"alibi": "alibi"}, dtypes=ALL),
    ScaleCase("bias", head_dim=80, options={"bias": "bias", "softcap": 5.0, "sinks": "sinks"}),
    ScaleCase("hidden", options={"bias": "hidden", "causal": False}),
    ScaleCase("mask", options={"mask": "mask", "causal": False}),
    ScaleCase("peaked", size=12.0, dtypes=ALL),
]
LARGE = [
    ScaleCase("4k keys", seqlen_q=1024, seqlen_k=4096, head_dim=128),
    ScaleCase(
        "odd keys", heads=8, seqlen_q=333, seqlen_k=2047, head_dim=80, options={"sinks": "sinks", "softcap": 9.0}
    ),
    ScaleCase("long bias", seqlen_q=512, seqlen_k=512, options={"bias": "bias", "alibi": "alibi"}, dtypes=ALL),
]


def compare(case: ScaleCase, dtype: torch.dtype, device: str) -> None:
    """Work out the scale of a training step, with every result of the kernels beside that of PyTorch's operations."""
    tensors, options = case.make(dtype, device)
    forms = _both("p_with_errors"), _both("ds_with_errors")
    with mock.patch.object(scale, "_forms", return_value=forms):
        step_scale(*tensors, **options)


def _both(name: str) -> Callable[..., Any]:
    """Return the kernel, which compares: results, and arguments that change."""

    def call(*arguments: Any, **options: Any) -> Any:
        before = _map(torch.clone, arguments)
        expected = getattr(errors, name)(*before, **options)
        found = getattr(errors_triton, name)(*arguments, **options)
        more = (arguments[0], before[0]) if name == "ds_with_errors" else ((), ())
        torch.testing.assert_close((found, more[0]), (expected, more[1]), rtol=3e-5, atol=1e-36)
        return found

    return call


def _map(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_map(change, each) for each in value)
    return change(value) if isinstance(value, torch.Tensor) else value
