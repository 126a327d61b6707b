"""The drop-in for PyTorch's attention, against PyTorch's."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit

from flashmoe_science import InputError, flash_attention
from flashmoe_science.integrations.sdpa import scaled_dot_product_attention


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(6, 6), (4, 9), (9, 4), (1, 5), (5, 1)])
def test_lengths_and_masks(seqlen_q, seqlen_k, is_causal):
    """Causal is aligned top-left there."""
    q, k, v = torch.randn(2, 4, seqlen_q, 8), torch.randn(2, 4, seqlen_k, 8), torch.randn(2, 4, seqlen_k, 16)
    for scale in (None, 0.7):
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
        found = scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
        torch.testing.assert_close(found, expected)
        found = scaled_dot_product_attention(q[0], k[0], v[0], is_causal=is_causal, scale=scale)
        torch.testing.assert_close(found, expected[0])


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (2, 1, 5, 7), (1, 4, 5, 7), (2, 4, 5, 7), (4, 5, 7), (5, 1)])
def test_masks(shape):
    """Boolean and added, of every shape that expands."""
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 8)
    added = torch.randn(shape)
    seen = added > 0
    seen[..., 0] = True  # each row sees a key
    for mask in (added, seen):
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        torch.testing.assert_close(scaled_dot_product_attention(q, k, v, attn_mask=mask), expected)
    if len(shape) < 4:
        expected = F.scaled_dot_product_attention(q[0], k[0], v[0], attn_mask=seen)
        torch.testing.assert_close(scaled_dot_product_attention(q[0], k[0], v[0], attn_mask=seen), expected)


def test_rows_without_keys_are_0():
    q, k, v = (torch.randn(1, 1, 3, 8) for _ in range(3))
    mask = torch.tensor([[True, True, False], [False, False, False], [True, False, True]])
    o = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert torch.equal(o[:, :, 1], torch.zeros(1, 1, 8))
    added = torch.where(mask, 0.0, -math.inf)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, attn_mask=added), o)


def test_gqa():
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), expected)
    with pytest.raises(InputError, match="key must have 6 heads without enable_gqa, got 2"):
        scaled_dot_product_attention(q, k, v)


def test_the_signature_is_that_of_pytorch():
    """PyTorch's is built in; its documentation starts with it."""
    parameters = inspect.signature(scaled_dot_product_attention).parameters.values()
    ours = ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in parameters)
    documented = (F.scaled_dot_product_attention.__doc__ or "").partition("(")[2].partition(")")[0]
    assert ours == " ".join(documented.split())


def test_dropout():
    """That of ``flash_attention``, of 3 and 4 dimensions; on average, what PyTorch gives without."""
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    torch.manual_seed(1)
    expected = flash_attention(q, k, v, causal=True, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.5), expected)
    torch.manual_seed(1)
    assert torch.equal(scaled_dot_product_attention(q[0], k[0], v[0], is_causal=True, dropout_p=0.5), expected[0])
    mask = torch.randn(6, 6)
    many = [scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.5) for _ in range(2000)]
    plain = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    deviation = torch.stack(many).std(0) / 2000**0.5
    assert ((torch.stack(many).mean(0) - plain).abs() < 6 * deviation + 1e-6).all()


def test_what_is_not_served_raises_by_name():
    q, k, v = (torch.randn(1, 2, 3, 8) for _ in range(3))
    with pytest.raises(InputError, match=r"dropout_p must be at least 0 and less than 1, got 1.0"):
        scaled_dot_product_attention(q, k, v, dropout_p=1.0)
    with pytest.raises(InputError, match="attn_mask must be None with is_causal, got both"):
        scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(3, 3), is_causal=True)
    with pytest.raises(InputError, match=r"attn_mask must expand to \[1, 2, 3, 3\], got \[3, 4\]"):
        scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(3, 4))
    with pytest.raises(InputError, match=r"attn_mask must be a torch.Tensor or None, got list"):
        scaled_dot_product_attention(q, k, v, attn_mask=[1])  # type: ignore[arg-type]
    with pytest.raises(
        InputError, match=r"key must have 4 dimensions \[B, H, S, D\], or all have 3, got shape \[2, 3, 8\]"
    ):
        scaled_dot_product_attention(q, k[0], v)
    with pytest.raises(InputError, match=r"value must be a torch.Tensor, got NoneType"):
        scaled_dot_product_attention(q, k, None)  # type: ignore[arg-type]
