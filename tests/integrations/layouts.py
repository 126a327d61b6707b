"""Tensors whose elements do not lie in memory one by one."""

from __future__ import annotations

import warnings

import torch

LAYOUTS = ("sparse", "csr", "mkldnn", "nested", "jagged")


def laid_out(kind: str) -> tuple[torch.Tensor, str]:
    """Return such a tensor of fp32, and what messages call it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says of some that they are new
        return _laid_out(kind)


def _laid_out(kind: str) -> tuple[torch.Tensor, str]:
    dense = torch.ones(2, 4, 4, 8)
    if kind == "sparse":
        return dense.to_sparse(), "torch.sparse_coo"
    if kind == "csr":
        return dense[0, 0].to_sparse_csr(), "torch.sparse_csr"
    if kind == "mkldnn":
        return dense.to_mkldnn(), "torch._mkldnn"
    layout = torch.jagged if kind == "jagged" else torch.strided
    return torch.nested.nested_tensor([dense[0], dense[0, :, :3].transpose(0, 1)], layout=layout), "a nested tensor"
