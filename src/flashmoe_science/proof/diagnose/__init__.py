"""Why a kernel is slow: observations of one call, and what follows from them.

``gather.py`` asks worker processes for observations (``tasks.py``), and ``hypotheses.py`` draws conclusions from them.
Reasoning is apart from gathering: it needs no GPU.
"""
