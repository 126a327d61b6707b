"""Packed sequences: their problem, and operators over pages."""
