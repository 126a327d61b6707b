"""Why a kernel is slow: observations of one call, and what follows from them.

``gather.py`` asks worker processes for observations (``tasks.py``), ``reason.py`` draws conclusions from them with the
hypotheses of ``grid.py``, ``kernels.py`` and ``rates.py``. Reasoning is apart from gathering: it needs no GPU.
"""
