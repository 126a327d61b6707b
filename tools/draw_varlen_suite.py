"""Draw the suite of packed sequences: ``draw_varlen_suite.py SEED > src/flashmoe_science/suites/varlen.toml``.

Lengths as servers and corpora have them: many short ones, few long ones. The same seed draws the same suite.
"""

from __future__ import annotations

import math
import random
import sys

# Mean length, and about the tokens of a case. The longest sequence has no more than four times the mean, so that the
# answer that sets the error budget, with all scores of a head in memory, fits a GPU.
BATCHES = ((1024, 32768), (8192, 131072))
HEADS = ((64, 32, 8), (128, 32, 8), (128, 16, 16), (256, 16, 4))  # columns, query heads, K/V heads
SIGMA = 1.0  # of the logarithm of a length


def draw_lengths(draw: random.Random, mean: int, tokens: int) -> list[int]:
    """Return lengths of a log-normal distribution whose logarithm is around that of the median."""
    lengths: list[int] = []
    while sum(lengths) < tokens:
        length = round(mean * math.exp(SIGMA * draw.gauss(0, 1) - SIGMA**2 / 2))
        lengths.append(max(16, min(4 * mean, length)))
    return lengths


def draw_suite(seed: str) -> str:
    """Return the suite file."""
    draw = random.Random(seed)
    lines = [
        'name = "varlen"',
        'operator = "attention_varlen"',
        'description = "Prompts packed without padding, few long ones among many short ones, mean 1k and 8k, bf16."',
        "",
        f"# Drawn by tools/draw_varlen_suite.py, seed {seed}.",
        "",
        "[defaults]",
        'dtype = "bf16"',
    ]
    for mean, tokens in BATCHES:
        for head_dim, heads, heads_kv in HEADS:
            for causal in (True, False):
                lengths = draw_lengths(draw, mean, tokens)
                lines += [
                    "",
                    "[[cases]]",
                    f"lengths = {lengths}",
                    f"heads = {heads}",
                    f"heads_kv = {heads_kv}",
                    f"head_dim = {head_dim}",
                    f"causal = {str(causal).lower()}",
                    f'origin = "log-normal lengths around a mean of {mean}, about {tokens} tokens"',
                ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: draw_varlen_suite.py SEED")
    sys.stdout.write(draw_suite(sys.argv[1]))
