"""Attention over several GPUs, on ``torch.distributed``."""

from .context_parallel import ContextParallel
from .layout import PackedPlan

__all__ = ["ContextParallel", "PackedPlan"]
