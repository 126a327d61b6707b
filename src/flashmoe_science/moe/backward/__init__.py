"""Gradients of the experts: entry point, autograd, plans and kernels."""
