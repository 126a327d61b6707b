"""The gradients of attention, for the harness."""
