"""How often comparisons are wrong on a card: a kernel against itself, and against itself with planted extra work."""
