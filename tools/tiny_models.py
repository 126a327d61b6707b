"""Tiny models of transformers, made mechanically from each type's own configuration, with random weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import torch

WINDOW = 6  # of sliding windows: fewer than the tokens that are tried

# Sizes by the name of what a configuration holds; the first pattern that fits decides. Nested ones are shrunk alike.
# fmt: off
# ruff: disable[E501]
SIZES: list[tuple[str, Any]] = [
    (r"vocab_size(_per_layer_input)?|n_vocab|vocabulary_size", 64),
    (r"(num_hidden|num|n|num_decoder|num_encoder|decoder|encoder|num_prediction)_layers?|n_layer|depth|num_hidden_groups", 2),
    (r"(mtp_)?num_(mtp|nextn_predict)_layers", 0),
    (r"num_kv_shared_layers", 1),
    (r"(num_|n_)?(key_value|kv)_heads|num_key_value_heads|multi_query_groups?|num_(swa|global|local)_key_value_heads|swa_num_key_value_heads", 2),
    (r"(decoder_|encoder_|linear_)?(num_|n_)?attention_heads|n_heads?|num_heads|swa_num_attention_heads", 4),
    (r"(global_|swa_|attention_|local_)?head_dim|d_kv|d_head|v_head_dim|swa_v_head_dim|kv_channels", 16),
    (r"qk_rope_head_dim|qk_nope_head_dim|rotary_dim|index_head_dim", 8),
    (r"(q|kv|o)_lora_rank|lora_rank.*", 16),
    (r"hidden_size|d_model|n_embd|n_embed|dim|embed_dim|embedding_size|hidden_dim|attention_hidden_size", 64),
    (r"hidden_size_per_layer_input|word_embed_proj_dim", 16),
    (r"(moe_|shared_|shared_expert_)?intermediate_size.*|ffn_(hidden_)?(size|dim)|(encoder|decoder)_ffn_dim|d_ff|d_inner|n_inner", 48),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|seq_length", 128),
    (r"(num_local|num|n_routed|moe_num|n)_experts|num_moe_experts", 4),
    (r"(num_)?experts_per_tok(en)?|moe_k|moe_topk|top_k_experts|num_selected_experts|num_experts_per_token", 2),
    (r"(n|num|moe_num)_shared_experts?", 1),
    (r"n_group|topk_group|first_k_dense_replace|moe_layer_start_index|num_dense_layers|moe_n_group|moe_topk_group", 1),
    (r"sliding_window(_size)?|attention_window_size|attention_chunk_size|local_attention|window_size", WINDOW),
    (r"index_topk|index_top_k", 4),
    (r"index_n_heads", 2),
    (r"(?!attention_bias|use_).*(dropout|drop_rate|drop_path|layerdrop|pdrop|drop_prob|router_jitter_noise|input_jitter_noise).*", 0.0),
    (r"pad_token_id", 0),
    (r"bos_token_id", 1),
    (r"eos_token_id", 2),
    (r"mamba_n_heads|mamba_num_heads|linear_num_value_heads|linear_num_key_heads|n_mamba_heads", 4),
    (r"mamba_d_head|mamba_head_dim|linear_key_head_dim|linear_value_head_dim", 32),
    (r"mamba_d_state|ssm_state_size|state_size|mamba_n_groups|mamba_chunk_size", 4),
]
# ruff: enable[E501]
# fmt: on
NEEDED = (
    "head_dim",
    "num_key_value_heads",
    "vocab_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "kv_lora_rank",
    "mamba_dt_rank",
)
LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type", "moe_layers", "indexer_types",
         "attn_layer_indices", "attention_layers", "block_types")  # fmt: skip
# What the patterns do not get right, by model type.
_SHARED = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_chunk_size": 8}
_KDA = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "linear_head_dim": 8,
    "linear_num_heads": 2,
    "num_expert_group": 1,
    "topk_group": 1,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CHANGES: dict[str, dict[str, Any]] = {
    "gemma4_text": _SHARED,
    "gemma4_unified_text": _SHARED,
    "gemma3n_text": _SHARED,
    "bailing_hybrid": _KDA,
    "kimi_linear": _KDA,
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8, "use_mamba_kernels": False},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "use_mamba_kernels": False,
        "moe_shared_expert_intermediate_size": 48,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "inkling_text": {"d_rel": 8, "rel_extent": 32, "sliding_window_size": WINDOW},
    "inkling2_text": {"d_rel": 8, "rel_extent": 32, "sliding_window_size": WINDOW},
    "inkling2_loop_text": {"d_rel": 8, "rel_extent": 32, "sliding_window_size": WINDOW},
    "dory": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"expert_ffn_hidden_size": 48, "zero_expert_num": 2, "head_dim": 8},
    "flaubert": {"emb_dim": 64},
    "xlm": {"emb_dim": 64},
    "luke": {"entity_vocab_size": 64, "entity_emb_size": 16},
    "reformer": {
        "is_decoder": True,
        "attention_head_size": 16,
        "axial_pos_shape": [4, 8],
        "axial_pos_embds_dim": [16, 48],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
    },
    "xmod": {"default_language": "en_XX"},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "phimoe": {"sliding_window": WINDOW},
}


def shrink(config: Any) -> dict[str, Any]:
    """Return arguments for a tiny configuration of the class of this one."""
    from transformers import PretrainedConfig

    found: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            found[name] = shrink_config(type(value))
        elif name in LISTS and isinstance(value, (list, tuple)) and len(value) > 2:
            found[name] = shortened(value)
        elif name == "use_sliding_window":
            found[name] = True
        elif isinstance(value, bool) or name.startswith("_"):
            continue
        elif name == "sliding_window" and value is None:
            found[name] = WINDOW
        else:
            for pattern, size in SIZES:
                if re.fullmatch(pattern, name):
                    if isinstance(value, (int, float)) or name.endswith("_token_id") or (name in NEEDED and not value):
                        found[name] = size
                    break
    if "qk_rope_head_dim" in found:  # of latent attention: what head_dim means is up to the model
        found.pop("head_dim", None)
    held = vars(config)
    if found.get("num_key_value_heads") and held.get("num_key_value_heads") == held.get("num_attention_heads"):
        found["num_key_value_heads"] = found.get("num_attention_heads", 4)
    return found


def shortened(values: Any) -> list[Any]:
    """Return two of a list of layers, of two kinds where there are two."""
    kinds = list(dict.fromkeys(values))
    return kinds[:2] if len(kinds) > 1 else list(values[:2])


def shrink_config(cls: type, model_type: str = "") -> Any:
    """Return a tiny configuration."""
    default = cls()
    arguments = {**shrink(default), **CHANGES.get(model_type or default.model_type, {})}
    attempts: list[Callable[[], Any]] = [
        lambda: cls(**arguments),
        lambda: cls(**{name: value for name, value in arguments.items() if name not in LISTS}),
        lambda: cls(**{name: value for name, value in arguments.items() if "sliding_window" not in name}),
    ]
    for attempt in attempts:
        try:
            return attempt()
        except Exception as error:  # noqa: BLE001  another try, and the last reason is said
            reason = error
    raise reason


def build(model_type: str, config: Any, attention: str, experts: str | None = None) -> Any:
    """Return a model; that of a type has the same weights each time."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    kind = transformers.AutoModelForCausalLM if model_type in CAUSAL else transformers.AutoModelForMaskedLM
    torch.manual_seed(0)
    options = {} if experts is None else {"experts_implementation": experts}
    model = kind.from_config(copy.deepcopy(config), attn_implementation=attention, **options).float().eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape) * 0.15)
            elif name.endswith("sinks"):
                parameter.copy_(torch.randn(parameter.shape))
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    return model
