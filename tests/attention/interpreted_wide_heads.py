"""Child process: head sizes above 256 in Triton's interpreter, with gradients and a cache; answers ``right``."""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science import flash_attention, flash_attention_with_kv_cache

OPTIONS: tuple[dict[str, Any], ...] = ({"causal": True}, {"causal": True, "window": (9, -1), "softcap": 5.0})


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Allow what fp16 rounds."""
    assert (found.float() - expected.float()).abs().max() <= 2e-3 * expected.abs().max().clamp_min(1.0)


def check_one_memory() -> None:
    """Values that are the keys, or their first columns, have the bits of values in memory of their own."""
    generator = torch.Generator().manual_seed(1)
    q, kv = (torch.randn(shape, generator=generator).half() for shape in ((1, 2, 20, 512), (1, 1, 37, 512)))
    sinks = torch.randn(2, generator=generator)
    for columns in (512, 400):
        v = kv[..., :columns]
        options: dict[str, Any] = {"sinks": sinks, "causal": True, "kernel": "forward_triton"}
        assert torch.equal(flash_attention(q, kv, v, **options), flash_attention(q, kv, v.clone(), **options))
        do = torch.randn(1, 2, 20, columns, generator=generator).half()
        one = kv.clone().requires_grad_()
        (both,) = torch.autograd.grad(flash_attention(q, one, one[..., :columns], **options), one, do)
        leaves = kv.clone().requires_grad_(), v.clone().requires_grad_()
        parts = torch.autograd.grad(flash_attention(q, *leaves, **options), leaves, do)
        expected = parts[0] + torch.nn.functional.pad(parts[1], (0, 512 - columns))
        assert torch.equal(both, expected)


def main() -> None:
    """Hold forward, gradients and decoding against the reference."""
    check_one_memory()
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
