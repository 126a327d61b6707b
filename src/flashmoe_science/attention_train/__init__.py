"""Attention in a step of training, forward and backward, for the harness."""
