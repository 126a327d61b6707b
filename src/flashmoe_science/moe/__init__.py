"""Mixture of Experts: routing, and the experts' feed-forward networks, fused."""
