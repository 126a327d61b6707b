"""Attention of MLA to the tokens that indices name: entry point, plan and kernels."""
