"""Grouped matrix products of the experts, and the combination of their outputs."""
