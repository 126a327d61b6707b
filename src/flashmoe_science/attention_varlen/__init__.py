"""Attention of packed sequences, for the harness; the operator itself lives in ``attention``."""
