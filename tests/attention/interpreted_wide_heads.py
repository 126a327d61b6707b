"""Child process: head sizes above 256 in Triton's interpreter, with gradients and a cache; answers ``right``."""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science import flash_attention, flash_attention_with_kv_cache

OPTIONS: tuple[dict[str, Any], ...] = ({"causal": True}, {"causal": True, "window": (9, -1), "softcap": 5.0})


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Allow what fp16 rounds."""
    assert (found.float() - expected.float()).abs().max() <= 2e-3 * expected.abs().max().clamp_min(1.0)


def main() -> None:
    """Hold forward, gradients and decoding against the reference."""
    generator = torch.Generator().manual_seed(0)
    for (head_dim, head_dim_v), options in zip(((512, 512), (300, 264)), OPTIONS, strict=True):
        shapes = ((1, 2, 20, head_dim), (1, 1, 37, head_dim), (1, 1, 37, head_dim_v), (1, 2, 20, head_dim_v))
        q, k, v, do = (torch.randn(shape, generator=generator).half() for shape in shapes)
        sinks = torch.randn(2, generator=generator)
        near(
            flash_attention(q, k, v, sinks=sinks, **options, kernel="forward_triton"),
            flash_attention(q, k, v, sinks=sinks, **options),
        )
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = flash_attention(*leaves, **options, kernel="forward_triton")
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        from flashmoe_science.attention import reference

        o_exact = reference.attention(*exact, **options)[0]
        gradients = zip(
            torch.autograd.grad(o, leaves, do), torch.autograd.grad(o_exact, exact, do.double()), strict=True
        )
        for ours, expected in gradients:
            near(ours, expected)
        caches = [x.transpose(1, 2).contiguous() for x in (k, v)]
        lengths = torch.tensor([31], dtype=torch.int32)
        near(
            flash_attention_with_kv_cache(q[:, :, :1], *caches, cache_seqlens=lengths, kernel="decode_triton"),
            flash_attention_with_kv_cache(q[:, :, :1], *caches, cache_seqlens=lengths),
        )


if __name__ == "__main__":
    main()
    print("right")
