"""Right in every way."""

from plain_triton import attend

__all__ = ["attend"]
