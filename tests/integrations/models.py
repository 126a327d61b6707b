"""Tiny random models. As a program: all of them by the Triton kernel in its interpreter, against eager attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def _config(kind: str, **changes: Any) -> Any:
    import transformers

    return getattr(transformers, kind)(**{**_SIZES, **changes})


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": functools.partial(_config, "LlamaConfig", num_hidden_layers=2),
    "qwen3": functools.partial(_config, "Qwen3Config", num_hidden_layers=2, head_dim=16),
    "mistral": functools.partial(_config, "MistralConfig", num_hidden_layers=2, sliding_window=6),
    # Window and softcap; D 256, windows in two of three layers; sinks and windows.
    "gemma2": functools.partial(
        _config, "Gemma2Config", num_hidden_layers=2, head_dim=16, sliding_window=6, attn_logit_softcapping=2.0
    ),
    "gemma3": functools.partial(
        _config, "Gemma3TextConfig", num_hidden_layers=3, head_dim=256, sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gpt-oss": functools.partial(
        _config, "GptOssConfig", num_hidden_layers=2, head_dim=16, sliding_window=6, num_local_experts=2,
        num_experts_per_tok=1,
    ),
}  # fmt: skip


def make(name: str, implementation: str) -> Any:
    """Return a random model; that of a name has the same weights each time, and sinks of a size that matters."""
    import transformers

    torch.manual_seed(0)
    config = CONFIGS[name]()
    config._attn_implementation = implementation
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * (1.0 if key.endswith("sinks") else 0.2))
    return model


def logits(model: Any, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the logits of a prompt."""
    with torch.no_grad():
        result: torch.Tensor = model(tokens, **options).logits
    return result


def main() -> None:
    """Print the names of the models that agree."""
    from flashmoe_science.integrations.transformers import register

    ours = register("moe_triton", kernel="forward_triton")
    for name in CONFIGS:
        tokens, seen = torch.randint(5, 60, (2, 9)), torch.ones(2, 9, dtype=torch.long)
        seen[0, :4] = 0
        for options in ({}, {"attention_mask": seen}):
            found, expected = (logits(make(name, kind), tokens, **options) for kind in (ours, "eager"))
            rows = seen.bool() if options else torch.ones_like(seen).bool()
            torch.testing.assert_close(found[rows], expected[rows], rtol=1e-4, atol=1e-4)
        print(name, flush=True)


if __name__ == "__main__":
    main()
