"""Adapters between our kernels and the harness: the only place that knows both.

An operator keeps the name that records have. Its module may have another.
"""

MODULES = {
    "attention": "attention",
    "attention_backward": "attention_backward",
    "attention_cache": "attention_decode",
    "attention_masked": "attention_masked",
    "attention_sparse": "attention_sparse",
    "attention_mixed": "packed.attention_mixed",
    "attention_train": "attention_step",
    "attention_varlen": "attention_varlen",
    "attention_varlen_backward": "attention_varlen_backward",
    "context_parallel": "ranks.context_parallel",
    "expert_parallel": "ranks.expert_parallel",
    "moe": "moe",
    "moe_backward": "moe_backward",
}
