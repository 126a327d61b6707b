"""Tiny random models with experts. As a program: some of them by the Triton kernels in its interpreter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def _config(kind: str, **changes: Any) -> Any:
    import transformers

    return getattr(transformers, kind)(**{**_SIZES, **changes})


# Experts that Hopper's kernels serve, and one layer: of two, the second may choose others by what the first rounded.
LARGE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
}  # fmt: skip


CONFIGS: dict[str, Callable[[], Any]] = {
    "mixtral": functools.partial(_config, "MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": functools.partial(
        _config, "Qwen3MoeConfig", head_dim=16, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=20,
        norm_topk_prob=True,
    ),
    "gpt-oss": functools.partial(
        _config, "GptOssConfig", head_dim=16, sliding_window=6, num_local_experts=4, num_experts_per_tok=2
    ),
    # One dense layer, then experts in groups, with a shared one and a bias that chooses.
    "deepseek-v3": functools.partial(
        _config, "DeepseekV3Config", num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=3, n_group=4,
        topk_group=2, moe_intermediate_size=20, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    ),
    "olmoe": functools.partial(_config, "OlmoeConfig", num_experts=8, num_experts_per_tok=3),
}  # fmt: skip


# Halves, many experts with few rows, rows that take turns with biases, groups and a shared expert.
INTERPRETED = ("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3")


def make(name: str, implementation: str, **changes: Any) -> Any:
    """Return a random model; that of a name has the same weights each time, and biases that choose."""
    import transformers

    torch.manual_seed(0)
    config = CONFIGS[name]()
    for key, value in changes.items():
        if hasattr(config, key):
            setattr(config, key, value)
    options = {"attn_implementation": "eager", "experts_implementation": implementation}
    model = transformers.AutoModelForCausalLM.from_config(config, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape) * 0.1)
    return model


def logits_and_gradients(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the logits of a prompt, and the gradients of all parameters by the loss of its next tokens."""
    result = model(tokens, labels=tokens)
    result.loss.backward()
    found = {"logits": result.logits.detach()}
    found.update({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad(set_to_none=True)
    return found


def assert_alike(
    name: str, ours: str, tokens: int = 9, *, device: str = "cpu", dtype: torch.dtype = torch.float32, **changes: Any
) -> None:
    """Compare logits and gradients with those of eager experts: each element, or in bf16 all of a tensor together."""
    ids = torch.randint(5, 60, (2, tokens), generator=torch.Generator().manual_seed(2)).to(device)
    found, expected = (
        logits_and_gradients(make(name, kind, **changes).to(device, dtype), ids) for kind in (ours, "eager")
    )
    assert found.keys() == expected.keys()
    assert any("experts" in key for key in found)
    for key, value in expected.items():
        if dtype == torch.float32:
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-4, msg=f"{name}: {key} differs")
            continue
        error = (found[key].float() - value.float()).norm() / value.float().norm().clamp(min=1e-6)
        assert error <= 0.02, f"{name}: {key} differs by {error.item():.1e} of its norm"


def main() -> None:
    """Print the names of the models that agree."""
    from flashmoe_science.integrations.transformers_experts import register_experts

    ours = register_experts("moe_triton", kernel="grouped_triton")
    for name in INTERPRETED:
        assert_alike(name, ours, tokens=3)
        print(name, flush=True)


if __name__ == "__main__":
    main()
