"""Attention over a K/V cache: entry point, plans and kernels."""
