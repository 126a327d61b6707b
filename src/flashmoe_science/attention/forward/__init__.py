"""The forward pass of attention: plans, launches and kernels."""
