"""Refuse calls under ``torch.distributed.tensor.experimental.context_parallel``.

It splits sequences over ranks, and replaces ``torch.nn.functional.scaled_dot_product_attention`` alone: a call of ours
would attend within the shard of its rank.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit

from ..errors import UnsupportedError

TORCHS_OWN = torch._C._nn.scaled_dot_product_attention  # noqa: SLF001 - what torch.nn.functional has if nobody replaces it
_count_function_modes = torch._C._len_torch_function_stack  # noqa: SLF001 - torch 2.9 can do it by such a mode too


def refuse_context_parallel() -> None:
    """Raise ``UnsupportedError`` while the context is active. A compiled call is refused when it runs."""
    if torch.compiler.is_dynamo_compiling():
        return
    if F.scaled_dot_product_attention is TORCHS_OWN and not _count_function_modes():
        return
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None:
        return
    # Others replace the function too. This one also tells DTensor to attend by rings.
    rings = tensors.DTensor._op_dispatcher._custom_op_handlers  # noqa: SLF001 - has no public name
    if torch.ops.aten._scaled_dot_product_flash_attention.default in rings:  # noqa: SLF001 - its name
        raise UnsupportedError(
            "attention must not be called under context_parallel: it would attend within the shard of this rank",
            hint="call it outside of the context, or torch.nn.functional.scaled_dot_product_attention in it",
        )
