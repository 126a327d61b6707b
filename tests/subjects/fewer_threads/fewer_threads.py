"""Launches 128 threads a block, as a binding does that routes to an older kernel."""

from plain_triton import attend

__all__ = ["attend"]
