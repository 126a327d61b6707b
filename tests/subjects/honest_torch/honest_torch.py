"""Right in every way."""

from plain_torch import attend

__all__ = ["attend"]
