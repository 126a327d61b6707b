"""Gradients of attention: entry point, autograd, plans and kernels."""
