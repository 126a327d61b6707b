"""Plans of gradients, of batches and of packed sequences, and the kernel that is forced."""

from __future__ import annotations

import pytest
import torch

from flashmoe_science import InputError, UnsupportedError, explain_gradients, explain_varlen_gradients
from flashmoe_science.attention.backward.autograd import attention_gradients
from flashmoe_science.attention.inputs import Options


def test_a_kernel_can_be_forced_from_the_environment(monkeypatch):
    """And never falls back; a name that is none is an error."""
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    assert explain_gradients(q, k, v, causal=True).kernel == "reference"
    tensors = {"q": q, "k": k, "v": v, "o": q, "lse": q[..., 0], "do": q}
    monkeypatch.setenv("FLASHMOE_BACKWARD_KERNEL", "backward_gluon_sm90")
    with pytest.raises(UnsupportedError, match="backward_gluon_sm90 needs an NVIDIA GPU"):
        attention_gradients(Options(causal=True, softmax_scale=None), tensors, ["q", "k", "v"])
    with pytest.raises(UnsupportedError, match="backward_gluon_sm90 needs an NVIDIA GPU"):
        explain_gradients(q, k, v)
    assert explain_gradients(q, k, v, kernel="reference").kernel == "reference"
    monkeypatch.setenv("FLASHMOE_BACKWARD_KERNEL", "fastest")
    names = "backward_gluon_sm90, backward_triton, backward_masked_triton, reference"
    with pytest.raises(InputError, match=f"FLASHMOE_BACKWARD_KERNEL must be auto or one of {names}, got 'fastest'"):
        attention_gradients(Options(causal=True, softmax_scale=None), tensors, ["q", "k", "v"])


def test_explain_gradients_describes_the_call():
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 16)
    bias = torch.randn(1, 4, 5, 6)
    plan = explain_gradients(q, k, v, bias=bias, sinks=torch.randn(4), return_lse=True)
    assert plan.problem.wanted == ("q", "k", "v", "sinks", "bias")
    assert plan.problem.has_dlse
    assert plan.problem.bias_sums == (True, False)
    assert explain_gradients(q.requires_grad_(), k, v, bias=bias).problem.wanted == ("q",)


def test_explain_varlen_gradients_describes_the_call():
    q, k = torch.randn(9, 4, 8), torch.randn(11, 2, 8)
    ends = torch.tensor([0, 3, 9], dtype=torch.int32), torch.tensor([0, 5, 11], dtype=torch.int32)
    plan = explain_varlen_gradients(q, k, k, *ends, 6, 6, sinks=torch.randn(4), causal=True, return_lse=True)
    assert plan.kernel == "reference"
    assert plan.problem.wanted == ("q", "k", "v", "sinks")
    assert plan.problem.has_dlse
    forward = plan.problem.forward
    assert (forward.packed, forward.batch, forward.seqlen_q, forward.seqlen_k) == (True, 2, 8, 8)
    assert explain_varlen_gradients(q, k.requires_grad_(), k, *ends, 6, 6).problem.wanted == ("k", "v")
    with pytest.raises(UnsupportedError, match="backward_gluon_sm90 needs an NVIDIA GPU"):
        explain_varlen_gradients(q, k, k, *ends, 6, 6, kernel="backward_gluon_sm90")
    with pytest.raises(InputError, match=r"v must have shape \[Tk, HK, DV\] = \[11, 2, 8\], got \[10, 2, 8\]"):
        explain_varlen_gradients(q, k, k[:10], *ends, 6, 6)
