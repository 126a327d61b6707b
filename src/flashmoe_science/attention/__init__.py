"""Attention: one operator, one room."""
