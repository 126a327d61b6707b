"""Every public entry point with usual arguments, and what its answer is, by references in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashmoe_science import (
    BlockMask,
    explain,
    explain_gradients,
    explain_moe,
    explain_sparse_mla,
    explain_varlen,
    explain_with_kv_cache,
    flash_attention,
    flash_attention_backward,
    flash_attention_varlen,
    flash_attention_varlen_backward,
    flash_attention_with_kv_cache,
    fused_moe,
    merge_attention_states,
    pack_mla_rows,
    route,
    sparse_mla,
    sparse_mla_indices,
    unpack_mla_rows,
)
from flashmoe_science.attention import reference
from flashmoe_science.attention.decode import reference as cache_reference
from flashmoe_science.attention.decode.contract import cache_problem_of
from flashmoe_science.attention.decode.merge import merge_reference
from flashmoe_science.attention.sparse.contract import SparseOptions, describe_sparse_call, sparse_problem_of
from flashmoe_science.attention.sparse.reference import sparse_attention
from flashmoe_science.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flashmoe_science.integrations.flash_attn_3 import (
    flash_attn_combine,
    flash_attn_func as fa3_func,
    flash_attn_with_kvcache as fa3_with_kvcache,
)
from flashmoe_science.integrations.sdpa import scaled_dot_product_attention
from flashmoe_science.integrations.vllm_flash_attn import flash_attn_varlen_func as vllm_varlen_func
from flashmoe_science.moe import reference as moe_reference
from flashmoe_science.moe.backward.api import fused_moe_backward

Arguments = dict[str, Any]


def half(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float16)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def of_heads() -> Arguments:
    return {"q": half(2, 4, 3, 8), "k": half(2, 2, 5, 8), "v": half(2, 2, 5, 4)}


def of_attention() -> Arguments:
    return {
        **of_heads(), "causal": False, "softmax_scale": 0.3, "window": (-1, -1), "softcap": 0.0, "sinks": half(4),
        "alibi": half(4), "bias": half(1, 4, 3, 5), "dropout_p": 0.0, "dropout_seed": None, "return_lse": False,
        "kernel": "auto",
    }  # fmt: skip


def of_plain() -> Arguments:
    return {**of_heads(), "causal": True, "softmax_scale": None, "return_lse": True, "kernel": "auto"}


def of_masked() -> Arguments:
    dense = torch.arange(5) <= torch.arange(3)[:, None]
    return {
        **of_heads(), "mask": BlockMask.from_dense(dense.expand(2, 2, 3, 5)), "causal": False, "softmax_scale": None,
        "window": (-1, -1), "softcap": 2.0, "sinks": half(4), "alibi": None, "dropout_p": 0.0, "return_lse": True,
        "kernel": "auto",
    }  # fmt: skip


def of_chosen_blocks() -> Arguments:
    indices = torch.tensor([0, 1, -1, 2]).view(1, 2, 2, 1)
    return {"indices": indices, "block_size": 4, "seqlen_q": 7, "seqlen_k": 9, "causal": True}


def of_gradients() -> Arguments:
    given = of_heads()
    o, lse = flash_attention(**given, return_lse=True)
    return {**given, "o": o, "lse": lse, "do": half(2, 4, 3, 4), "dlse": None, "causal": False, "window": (-1, -1)}


def of_packed() -> Arguments:
    return {
        "q": half(7, 4, 8), "k": half(9, 2, 8), "v": half(9, 2, 4), "cu_seqlens_q": ints(0, 3, 7),
        "cu_seqlens_k": ints(0, 4, 9), "max_seqlen_q": 4, "max_seqlen_k": 5, "causal": True, "softmax_scale": None,
        "window": (-1, -1), "softcap": 0.0, "sinks": None, "alibi": None, "bias": None, "seqused_q": None,
        "seqused_k": ints(3, 5), "page_table": None, "dropout_p": 0.0, "return_lse": False, "kernel": "auto",
    }  # fmt: skip


def of_packed_gradients() -> Arguments:
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    given = {name: value for name, value in of_packed().items() if name in names}
    o, lse = flash_attention_varlen(**given, return_lse=True)
    more = {"o": o, "lse": lse, "do": half(7, 4, 4), "dlse": None, "causal": False, "softmax_scale": None}
    return {**given, **more, "window": (-1, -1)}


def of_pages() -> Arguments:
    given = of_packed()
    given.pop("seqused_k")
    return {**given, "k": half(3, 4, 2, 8), "v": half(3, 4, 2, 4), "page_table": ints(0, 1, 2, 0).view(2, 2)}


def of_pages_with_splits() -> Arguments:
    given = of_pages()
    heads = {"q": half(7, 4, 16), "k": half(3, 4, 2, 16), "v": half(3, 4, 2, 16)}
    return {**given, **heads, "num_splits": 2, "batch_invariant": True}


def of_cache() -> Arguments:
    return {
        "q": half(2, 4, 2, 8), "k_cache": half(2, 6, 2, 8), "v_cache": half(2, 6, 2, 4), "k": half(2, 2, 1, 8),
        "v": half(2, 2, 1, 4), "cache_seqlens": ints(3, 5), "page_table": None, "cache_batch_idx": ints(1, 0),
        "leftpad_k": ints(0, 1), "rotary_cos": half(8, 2), "rotary_sin": half(8, 2), "rotary_interleaved": False,
        "causal": True, "window": (-1, -1), "softcap": 0.0, "sinks": half(4), "alibi": half(4),
        "bias": half(1, 1, 2, 6), "k_scale": None, "v_scale": None,
        "softmax_scale": 0.4, "num_splits": 0, "batch_invariant": False, "return_lse": True, "kernel": "auto",
    }  # fmt: skip


def of_cache_fp8() -> Arguments:
    given = of_cache_pages()
    caches = {name: given[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    return {**given, **caches, "k_scale": torch.rand(4, 3, 2), "v_scale": torch.rand(2)}


def of_cache_pages() -> Arguments:
    return {
        "q": half(2, 4, 1, 8), "k_cache": half(4, 3, 2, 8), "v_cache": half(4, 3, 2, 4), "k": half(2, 2, 2, 8),
        "v": half(2, 2, 2, 4), "cache_seqlens": ints(1, 4), "page_table": ints(0, 2, 3, 1).view(2, 2),
        "window": (3, 0), "softcap": 2.0, "softmax_scale": None, "num_splits": 2, "batch_invariant": True,
    }  # fmt: skip


def of_parts() -> Arguments:
    return {"outs": half(3, 2, 4, 5, 8), "lses": torch.randn(3, 2, 4, 5)}


def of_rows() -> Arguments:
    return {
        "q": half(2, 4, 2, 576), "kv_cache": half(4, 3, 1, 576), "indices": ints(0, 5, -1, 2, 3, 1, 4, 0).view(2, 2, 2),
        "page_table": ints(0, 2, 3, 1).view(2, 2), "head_dim_v": 512, "sinks": half(4), "softmax_scale": 0.4,
        "num_splits": 0, "batch_invariant": False, "return_lse": True, "kernel": "auto",
    }  # fmt: skip


def of_rows_fp8() -> Arguments:
    return {
        **of_rows(),
        "q": half(2, 4, 2, 576) * 0.1,
        "kv_cache": pack_mla_rows(half(4, 3, 1, 512), half(4, 3, 1, 64)),
    }


def of_packed_rows() -> Arguments:
    return {"latents": half(3, 2, 512), "rotated": half(3, 2, 64)}


def of_unpacked_rows() -> Arguments:
    return {"rows": pack_mla_rows(half(3, 2, 512), half(3, 2, 64)), "dtype": torch.float16}


def of_indexer() -> Arguments:
    return {
        "q": half(2, 4, 3, 8), "k": half(2, 7, 8), "weights": half(2, 3, 4), "top_k": 5, "seqlens_k": ints(7, 4),
        "causal": True,
    }  # fmt: skip


def of_experts() -> Arguments:
    return {
        "x": half(5, 8), "w_gate_up": half(3, 12, 8), "w_down": half(3, 8, 6), "topk_weights": torch.rand(5, 2),
        "topk_ids": torch.randint(0, 3, (5, 2), dtype=torch.int32), "activation": "swiglu", "alpha": None,
        "limit": None, "interleaved": False, "bias_gate_up": half(3, 12), "bias_down": half(3, 8),
        "shared_gate_up": half(1, 8, 8), "shared_down": half(1, 8, 4), "shared_weights": torch.rand(5, 1),
        "batch_invariant": False, "kernel": "auto",
    }  # fmt: skip


def of_expert_gradients() -> Arguments:
    given = of_experts()
    kept = ("x", "w_gate_up", "w_down", "topk_weights", "topk_ids", "activation", "bias_gate_up", "bias_down", "kernel")
    experts = given["topk_ids"].flatten().long()
    columns = torch.einsum(
        "pk,pnk->pn", given["x"].float().repeat_interleave(2, 0), given["w_gate_up"].float()[experts]
    )
    product = (columns + given["bias_gate_up"].float()[experts]).half()[experts.sort(stable=True).indices]
    return {"do": half(5, 8), "product": product, **{name: given[name] for name in kept}}


def of_route() -> Arguments:
    return {
        "logits": half(5, 8), "top_k": 2, "score": "softmax", "renormalize": True, "bias": torch.randn(8), "groups": 2,
        "top_groups": 1, "scale": 1.0,
    }  # fmt: skip


def of_sdpa() -> Arguments:
    return {
        "query": half(2, 4, 3, 8), "key": half(2, 4, 5, 8), "value": half(2, 4, 5, 4), "attn_mask": half(3, 5),
        "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False,
    }  # fmt: skip


def of_flash_attn() -> Arguments:
    return {
        "q": half(2, 3, 4, 8), "k": half(2, 5, 2, 8), "v": half(2, 5, 2, 4), "dropout_p": 0.0, "softmax_scale": None,
        "causal": False, "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": torch.rand(4),
        "deterministic": False, "return_attn_probs": False,
    }  # fmt: skip


def of_flash_attn_packed() -> Arguments:
    return {
        "q": half(7, 4, 8), "k": half(9, 2, 8), "v": half(9, 2, 8), "cu_seqlens_q": ints(0, 3, 7),
        "cu_seqlens_k": ints(0, 4, 9), "max_seqlen_q": 4, "max_seqlen_k": 5, "dropout_p": 0.0, "causal": True,
        "window_size": (2, 1), "alibi_slopes": None, "block_table": None, "return_attn_probs": True,
    }  # fmt: skip


def of_flash_attn_cache() -> Arguments:
    return {
        "q": half(2, 1, 4, 8), "k_cache": half(2, 6, 2, 8), "v_cache": half(2, 6, 2, 8), "k": half(2, 1, 2, 8),
        "v": half(2, 1, 2, 8), "rotary_cos": half(8, 2), "rotary_sin": half(8, 2), "cache_seqlens": ints(3, 5),
        "cache_leftpad": None, "block_table": None, "softmax_scale": None, "causal": True, "window_size": (-1, -1),
        "alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False,
    }  # fmt: skip


def of_vllm() -> Arguments:
    return {
        "q": half(7, 4, 8), "k": half(3, 4, 2, 8), "v": half(3, 4, 2, 4), "max_seqlen_q": 4,
        "cu_seqlens_q": ints(0, 3, 7), "max_seqlen_k": 5, "cu_seqlens_k": None, "seqused_k": ints(4, 5), "q_v": None,
        "softmax_scale": None, "causal": True, "window_size": None, "softcap": 0.0, "alibi_slopes": None,
        "block_table": ints(0, 1, 2, 0).view(2, 2), "return_softmax_lse": True, "out": None, "num_splits": 0,
        "fa_version": 2, "s_aux": half(4), "cp_world_size": 1, "k_descale": torch.ones(2, 2),
    }  # fmt: skip


def of_fa3() -> Arguments:
    return {
        "q": half(2, 3, 4, 8), "k": half(2, 5, 2, 8), "v": half(2, 5, 2, 4), "softmax_scale": None, "causal": False,
        "qv": None, "window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0, "num_splits": 1, "pack_gqa": None,
        "sm_margin": 0, "return_attn_probs": False,
    }  # fmt: skip


def of_fa3_cache() -> Arguments:
    return {
        "q": half(2, 1, 4, 8), "k_cache": half(2, 6, 2, 8), "v_cache": half(2, 6, 2, 8), "k": half(2, 1, 2, 8),
        "v": half(2, 1, 2, 8), "qv": None, "rotary_cos": half(8, 2), "rotary_sin": half(8, 2),
        "cache_seqlens": ints(3, 5), "cache_leftpad": None, "page_table": None, "cu_seqlens_q": None,
        "max_seqlen_q": None, "softmax_scale": None, "causal": True, "window_size": (-1, -1), "num_splits": 0,
        "return_softmax_lse": False,
    }  # fmt: skip


def of_fa3_cache_fp8() -> Arguments:
    given = of_fa3_cache()
    caches = {name: given[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    descales = {"k_descale": torch.rand(2).expand(2, 2), "v_descale": torch.rand(2).expand(2, 2), "q_descale": None}
    return {**given, **caches, **descales}


def of_combine() -> Arguments:
    return {"out_partial": torch.randn(3, 2, 4, 5, 8), "lse_partial": torch.randn(3, 2, 4, 5), "out": None}


def exactly(given: Arguments) -> Arguments:
    return {name: value.double() if is_real(value) else value for name, value in given.items()}


def is_real(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def attended(given: Arguments) -> Any:
    options = {name: value for name, value in exactly(given).items() if name not in ("return_lse", "kernel")}
    o, lse = reference.attention(**options)
    return (o, lse) if given.get("return_lse") else o


def attended_masked(given: Arguments) -> Any:
    mask = given.get("mask")
    return attended({**given, "mask": None if mask is None else mask.to_dense()})


def attended_packed(given: Arguments) -> Any:
    left_out = ("return_lse", "kernel", "max_seqlen_q", "max_seqlen_k", "num_splits", "batch_invariant")
    o, lse = reference.attention_varlen(**{n: value for n, value in exactly(given).items() if n not in left_out})
    return (o, lse) if given.get("return_lse") else o


def attended_cache(given: Arguments) -> Any:
    tensors = {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}
    options = {name: value for name, value in given.items() if not isinstance(value, Tensor) and name not in tensors}
    length = options.pop("cache_seqlens", None)
    if length is not None:
        tensors["cache_seqlens"] = torch.full((tensors["q"].shape[0],), length, dtype=torch.int32)
    options = {name: value for name, value in options.items() if value is not None or name == "softmax_scale"}
    problem = cache_problem_of(tensors, **options)
    o, lse = cache_reference.attention_with_kv_cache(problem, tensors, dtype=torch.float64)
    return (o, lse) if given.get("return_lse") else o


def attended_rows(given: Arguments) -> Any:
    tensors = {name: given[name] for name in ("q", "kv_cache", "indices", "page_table", "sinks")}
    options = {name: value for name, value in given.items() if name not in tensors}
    call = describe_sparse_call(
        {n: None if x is None else x.detach() for n, x in tensors.items()}, SparseOptions(**options)
    )
    o, lse = sparse_attention(sparse_problem_of(call), call.tensors, dtype=torch.float64)
    return (o, lse) if given.get("return_lse") else o


def merged(given: Arguments) -> Any:
    o, lse = merge_reference(*(given[name].double().unbind() for name in ("outs", "lses")), dtype=torch.float64)
    return o, lse


def gradients(given: Arguments) -> Any:
    options = {name: value for name, value in exactly(given).items() if name not in ("o", "lse", "kernel")}
    found = reference.attention_backward(**options)
    return found["q"], found["k"], found["v"]


def packed_gradients(given: Arguments) -> Any:
    left_out = ("o", "lse", "kernel", "max_seqlen_q", "max_seqlen_k")
    options = {name: value for name, value in exactly(given).items() if name not in left_out}
    found = reference.attention_varlen_backward(**options)
    return found["q"], found["k"], found["v"]


def of_fused_moe(given: Arguments) -> Any:
    options = {name: value for name, value in given.items() if name not in ("batch_invariant", "kernel")}
    options |= {name: options[name] or 0.0 for name in ("alpha", "limit") if name in options}
    return moe_reference.fused_moe(**options, dtype=torch.float64)


def expert_gradients(given: Arguments) -> Any:
    options = {name: value for name, value in given.items() if name not in ("product", "kernel")}
    found = moe_reference.moe_gradients(**options, dtype=torch.float64)
    names = ("x", "w_gate_up", "w_down", "topk_weights", "bias_gate_up", "bias_down")
    return tuple(found[name] for name in names if given[name] is not None)


def routed(given: Arguments) -> Any:
    return moe_reference.route(**given, dtype=torch.float64)


def sdpa(given: Arguments) -> Any:
    options, mask = exactly(given), given["attn_mask"]
    if mask is not None:
        shape = (*given["query"].shape[:-1], given["key"].shape[-2])
        options["attn_mask"] = (mask.detach().double() if is_real(mask) else mask).expand(shape)
    return torch.nn.functional.scaled_dot_product_attention(**options).nan_to_num(0.0)


def flash_attn(given: Arguments) -> Any:
    options = {
        "causal": given.get("causal", False), "softmax_scale": given.get("softmax_scale"),
        "window": given.get("window_size", (-1, -1)), "softcap": given.get("softcap", 0.0),
        "alibi": given.get("alibi_slopes"), "return_lse": given.get("return_attn_probs", False),
    }  # fmt: skip
    if "qkv" in given:
        given = dict(zip("qkv", given["qkv"].unbind(2), strict=True))
    elif "kv" in given:
        given = {"q": given["q"], **dict(zip("kv", given["kv"].unbind(2), strict=True))}
    found = attended({**{name: given[name].transpose(1, 2) for name in "qkv"}, **options})
    if isinstance(found, tuple):
        return found[0].transpose(1, 2), found[1], torch.zeros(0)
    return found.transpose(1, 2)


def flash_attn_packed(given: Arguments) -> Any:
    options = {
        "causal": given.get("causal", False), "softmax_scale": given.get("softmax_scale"),
        "window": given.get("window_size", (-1, -1)), "alibi": given.get("alibi_slopes"),
        "page_table": given.get("block_table"), "return_lse": given.get("return_attn_probs", False),
    }  # fmt: skip
    if "qkv" in given:
        starts = given["cu_seqlens"]
        given = {
            **dict(zip("qkv", given["qkv"].unbind(1), strict=True)),
            "cu_seqlens_q": starts,
            "cu_seqlens_k": starts,
        }
    elif "kv" in given:
        given = {**given, **dict(zip("kv", given["kv"].unbind(1), strict=True))}
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    found = attended_packed({**{name: given[name] for name in names}, **options})
    return (*found, torch.zeros(0)) if isinstance(found, tuple) else found


def flash_attn_cache(given: Arguments) -> Any:
    names = {
        "alibi_slopes": "alibi", "cache_leftpad": "leftpad_k", "block_table": "page_table", "window_size": "window",
        "return_softmax_lse": "return_lse",
    }  # fmt: skip
    ours = {names.get(name, name): value for name, value in given.items()}
    ours.update({name: ours[name].transpose(1, 2).contiguous() for name in "qkv" if ours[name] is not None})
    found = attended_cache({"rotary_interleaved": True, **ours})
    return (found[0].transpose(1, 2), found[1]) if isinstance(found, tuple) else found.transpose(1, 2)


def combined(given: Arguments) -> Any:
    outs, lses = (given[name].double().transpose(2, 3).unbind() for name in ("out_partial", "lse_partial"))
    o, lse = merge_reference(outs, lses, dtype=torch.float64)
    return o.transpose(1, 2), lse.transpose(1, 2)


ENTRIES: dict[str, tuple[Callable[..., Any], Callable[[], Arguments], Callable[[Arguments], Any] | None]] = {
    "flash_attention": (flash_attention, of_attention, attended),
    "flash_attention plain": (flash_attention, of_plain, attended),
    "flash_attention masked": (flash_attention, of_masked, attended_masked),
    "BlockMask.from_dense": (BlockMask.from_dense, lambda: {"mask": torch.rand(2, 1, 5, 7) < 0.5}, None),
    "BlockMask.documents": (BlockMask.documents, lambda: {"ids": ints(0, 0, 1, -1), "causal": True}, None),
    "BlockMask.prefix": (BlockMask.prefix, lambda: {"lengths": ints(0, 2), "seqlen": 3}, None),
    "BlockMask.tree": (BlockMask.tree, lambda: {"parents": ints(-1, 0, 0, 1), "keys_before": 3}, None),
    "BlockMask.blocks": (BlockMask.blocks, of_chosen_blocks, None),
    "flash_attention_backward": (flash_attention_backward, of_gradients, gradients),
    "flash_attention_varlen": (flash_attention_varlen, of_packed, attended_packed),
    "flash_attention_varlen_backward": (flash_attention_varlen_backward, of_packed_gradients, packed_gradients),
    "flash_attention_varlen paged": (flash_attention_varlen, of_pages, attended_packed),
    "flash_attention_varlen splits": (flash_attention_varlen, of_pages_with_splits, attended_packed),
    "flash_attention_with_kv_cache": (flash_attention_with_kv_cache, of_cache, attended_cache),
    "flash_attention_with_kv_cache paged": (flash_attention_with_kv_cache, of_cache_pages, attended_cache),
    "merge_attention_states": (merge_attention_states, of_parts, merged),
    "flash_attention_with_kv_cache fp8": (flash_attention_with_kv_cache, of_cache_fp8, attended_cache),
    "sparse_mla": (sparse_mla, of_rows, attended_rows),
    "sparse_mla fp8": (sparse_mla, of_rows_fp8, attended_rows),
    "pack_mla_rows": (pack_mla_rows, of_packed_rows, None),
    "unpack_mla_rows": (unpack_mla_rows, of_unpacked_rows, None),
    "sparse_mla_indices": (sparse_mla_indices, of_indexer, None),
    "fused_moe": (fused_moe, of_experts, of_fused_moe),
    "fused_moe_backward": (fused_moe_backward, of_expert_gradients, expert_gradients),
    "route": (route, of_route, routed),
    "explain": (explain, of_attention, None),
    "explain_gradients": (explain_gradients, of_attention, None),
    "explain_varlen": (explain_varlen, of_packed, None),
    "explain_with_kv_cache": (explain_with_kv_cache, of_cache, None),
    "explain_sparse_mla": (explain_sparse_mla, of_rows, None),
    "explain_moe": (explain_moe, of_experts, None),
    "sdpa": (scaled_dot_product_attention, of_sdpa, sdpa),
    "flash_attn": (flash_attn_func, of_flash_attn, flash_attn),
    "flash_attn varlen": (flash_attn_varlen_func, of_flash_attn_packed, flash_attn_packed),
    "flash_attn cache": (flash_attn_with_kvcache, of_flash_attn_cache, flash_attn_cache),
    "vllm varlen": (vllm_varlen_func, of_vllm, None),
    "fa3": (fa3_func, of_fa3, None),
    "fa3 cache": (fa3_with_kvcache, of_fa3_cache, None),
    "fa3 cache fp8": (fa3_with_kvcache, of_fa3_cache_fp8, None),
    "fa3 combine": (flash_attn_combine, of_combine, combined),
    "flash_attn qkvpacked": (
        flash_attn_qkvpacked_func, lambda: {"qkv": half(2, 3, 3, 4, 8), "causal": True}, flash_attn,
    ),
    "flash_attn kvpacked": (
        flash_attn_kvpacked_func, lambda: {"q": half(2, 3, 4, 8), "kv": half(2, 5, 2, 2, 8), "causal": True},
        flash_attn,
    ),
    "flash_attn varlen qkvpacked": (
        flash_attn_varlen_qkvpacked_func,
        lambda: {"qkv": half(7, 3, 4, 8), "cu_seqlens": ints(0, 3, 7), "max_seqlen": 4}, flash_attn_packed,
    ),
    "flash_attn varlen kvpacked": (
        flash_attn_varlen_kvpacked_func,
        lambda: {
            "q": half(7, 4, 8), "kv": half(9, 2, 2, 8), "cu_seqlens_q": ints(0, 3, 7), "cu_seqlens_k": ints(0, 4, 9),
            "max_seqlen_q": 4, "max_seqlen_k": 5,
        }, flash_attn_packed,
    ),
}  # fmt: skip
