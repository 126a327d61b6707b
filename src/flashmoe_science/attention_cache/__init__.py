"""Attention with a K/V cache, for the harness; the room of its kernels is ``attention``."""
