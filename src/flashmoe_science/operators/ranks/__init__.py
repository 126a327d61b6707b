"""Operators whose calls are made by several ranks together."""
