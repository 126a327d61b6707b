"""Kernels of the experts for few tokens."""
