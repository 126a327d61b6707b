"""Kernels of attention and of experts for PyTorch whose every speed claim ships with its evidence, and the harness.

Importing this package touches neither Triton nor a GPU driver: the public names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .flops import count_when_imported

__version__ = "0.1.0"

_ORIGIN = {
    "BlockMask": "attention.masks.block_mask",
    "flash_attention": "attention.api",
    "flash_attention_varlen": "attention.varlen",
    "flash_attention_with_kv_cache": "attention.decode.api",
    "explain_with_kv_cache": "attention.decode.api",
    "merge_attention_states": "attention.decode.merge",
    "sparse_mla": "attention.sparse.api",
    "explain_sparse_mla": "attention.sparse.api",
    "sparse_mla_indices": "attention.sparse.indexer",
    "pack_mla_rows": "attention.sparse.fp8_rows",
    "unpack_mla_rows": "attention.sparse.fp8_rows",
    "explain": "attention.api",
    "explain_gradients": "attention.backward.api",
    "flash_attention_backward": "attention.backward.api",
    "flash_attention_varlen_backward": "attention.backward.varlen_api",
    "fused_moe": "moe.api",
    "explain_moe": "moe.api",
    "route": "moe.api",
    "MoeLayer": "integrations.moe_layer",
    "explain_varlen": "attention.varlen",
    "explain_varlen_gradients": "attention.backward.varlen_api",
    "FlashmoeError": "errors",
    "InputError": "errors",
    "UnsupportedError": "errors",
    "CompileError": "errors",
}

__all__ = [
    "BlockMask",
    "CompileError",
    "FlashmoeError",
    "InputError",
    "MoeLayer",
    "UnsupportedError",
    "__version__",
    "explain",
    "explain_gradients",
    "explain_moe",
    "explain_sparse_mla",
    "explain_varlen",
    "explain_varlen_gradients",
    "explain_with_kv_cache",
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_varlen",
    "flash_attention_varlen_backward",
    "flash_attention_with_kv_cache",
    "fused_moe",
    "merge_attention_states",
    "pack_mla_rows",
    "route",
    "sparse_mla",
    "sparse_mla_indices",
    "unpack_mla_rows",
]

if TYPE_CHECKING:
    from .attention.api import explain, flash_attention
    from .attention.backward.api import explain_gradients, flash_attention_backward
    from .attention.backward.varlen_api import explain_varlen_gradients, flash_attention_varlen_backward
    from .attention.decode.api import explain_with_kv_cache, flash_attention_with_kv_cache
    from .attention.decode.merge import merge_attention_states
    from .attention.masks.block_mask import BlockMask
    from .attention.sparse.api import explain_sparse_mla, sparse_mla
    from .attention.sparse.fp8_rows import pack_mla_rows, unpack_mla_rows
    from .attention.sparse.indexer import sparse_mla_indices
    from .attention.varlen import explain_varlen, flash_attention_varlen
    from .errors import CompileError, FlashmoeError, InputError, UnsupportedError
    from .integrations.moe_layer import MoeLayer
    from .moe.api import explain_moe, fused_moe, route


def __getattr__(name: str) -> object:
    if name not in _ORIGIN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_ORIGIN[name]}", __name__), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


count_when_imported()
