"""The baselines of attention under block masks: FlexAttention compiled, and SDPA with booleans."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit

from .base import Baseline, Bound, Call, Inputs, SdpaBaseline, by_name, compile_flex

# With fewer it takes its kernel for decoding, which torch 2.11 does not compile for a tree of 64 tokens with 4 heads on
# one: no choice is left.
_FEW_QUERIES = 128


class Flex(Baseline):
    """FlexAttention, compiled, with the function of the mask."""

    name = "flex"
    kernels = ("*flex_attention*",)

    def load(self) -> Callable[..., Any]:
        """Return it with a block mask made beforehand."""
        flex, compiled = compile_flex()

        def bind(problem: Any, inputs: Inputs) -> Call:
            p, device = problem.planned, inputs["q"].device
            shown = problem.make_mask(str(device))[1]
            mask = flex.create_block_mask(shown, None, None, p.seqlen_q, p.seqlen_k, device=device)
            options = {"block_mask": mask, "scale": p.softmax_scale, "enable_gqa": p.group > 1}
            if p.seqlen_q < _FEW_QUERIES:
                options["kernel_options"] = {"FORCE_USE_FLEX_ATTENTION": True}
            return functools.partial(compiled, inputs["q"], inputs["k"], inputs["v"], **options)

        return Bound(bind)


class Sdpa(SdpaBaseline):
    """``torch.nn.functional.scaled_dot_product_attention`` with a mask of booleans."""

    def bind(self, problem: Any, inputs: Inputs) -> Call:
        """Return a call with the mask of all sequences and heads."""
        p = problem.planned
        mask = problem.make_mask(str(inputs["q"].device))[0].to_dense()
        options: dict[str, Any] = {"attn_mask": mask}
        if p.softmax_scale is not None:
            options["scale"] = p.softmax_scale
        if p.group > 1:
            options["enable_gqa"] = True
        return functools.partial(F.scaled_dot_product_attention, inputs["q"], inputs["k"], inputs["v"], **options)


BASELINES = by_name(Flex(), Sdpa("sdpa", None))
