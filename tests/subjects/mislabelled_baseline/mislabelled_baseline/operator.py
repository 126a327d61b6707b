"""Attention with one more baseline: it calls itself flash attention and runs torch's plain arithmetic."""

import contextlib

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashmoe_science.operators.attention import OPERATOR as ATTENTION


class MislabelledBaseline:
    """Pinned to flash attention's kernels, and calling others."""

    name = "mislabelled"
    kernels = ("*flash_fwd*",)

    def load(self):
        """Return the plain arithmetic."""
        return self._attend

    @staticmethod
    def _attend(q, k, v, *, causal=False, softmax_scale=None):
        with sdpa_kernel(SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)

    def version(self):
        """Return torch's version."""
        return str(torch.__version__)

    def refusal(self, problem):
        """Refuse nothing."""

    def context(self):
        """Return nothing to enter."""
        return contextlib.nullcontext()


class Operator(type(ATTENTION)):
    """Attention, and one baseline more."""

    name = "mislabelled_baseline.operator"

    def baselines(self):
        """Return all baselines of attention, and the mislabelled one."""
        return {**super().baselines(), "mislabelled": MislabelledBaseline()}


OPERATOR = Operator()
