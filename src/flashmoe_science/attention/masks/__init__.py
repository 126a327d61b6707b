"""Attention under any mask: lists of the blocks that a tile visits, and the kernels that walk over them."""
