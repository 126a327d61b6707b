"""Attention and experts over several GPUs, on ``torch.distributed``."""

from .context_parallel import ContextParallel
from .expert_parallel import ExpertParallel
from .plan import PackedPlan

__all__ = ["ContextParallel", "ExpertParallel", "PackedPlan"]
