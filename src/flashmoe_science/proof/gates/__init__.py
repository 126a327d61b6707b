"""The chain of proof: seven gates in one order, and a stop at the first that fails.

``chain.py`` runs them; ``run.py`` holds what they share; each other file has the gates of one kind.
"""

from __future__ import annotations

from .chain import prove
from .run import Progress, ProveRequest, Run, RunMeter, check_request, ranks_asked

__all__ = ["Progress", "ProveRequest", "Run", "RunMeter", "check_request", "prove", "ranks_asked"]
