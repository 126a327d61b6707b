"""Gradients without a GPU: their meaning, their contract, and the kernels in Triton's interpreter."""

from __future__ import annotations

import pytest

from .cases import GRADIENTS


@pytest.mark.triton
@pytest.mark.parametrize("gradients", GRADIENTS, ids=str)
def test_kernels_interpreted(gradients, interpreted):
    """The Triton kernels themselves, run by Triton's interpreter in a process of its own."""
    interpreted(gradients)
