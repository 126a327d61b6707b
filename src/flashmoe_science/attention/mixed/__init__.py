"""Packed queries over keys in pages: prompts, chunks and single tokens in one call."""
