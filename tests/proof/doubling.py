"""The operator of ``simulated.py`` as a module that a ``kernel.toml`` can name, and the GPU that its kernels run on."""

from __future__ import annotations

from .simulated import Doubling, Gpu

GPU = Gpu()

OPERATOR = Doubling()
OPERATOR.name = "tests.proof.doubling"
