"""Draw a suite of packed sequences: ``draw_varlen_suite.py SUITE SEED > src/flashmoe_science/suites/SUITE.toml``.

Lengths as servers and corpora have them: many short ones, few long ones. The same seed draws the same suite.
"""

from __future__ import annotations

import math
import random
import sys

# Mean length, and about the tokens of a case. The longest sequence has no more than four times the mean, so that the
# answer that sets the error budget, with all scores of a head in memory, fits a GPU.
BATCHES = ((1024, 32768), (8192, 131072))
# Of ``train-packed``: columns of q and v, heads, K/V heads, causal, mean length, tokens, and whether a few are long.
TRAIN = (
    (64, 64, 16, 16, False, 300, 65536, False),
    (64, 64, 32, 8, True, 1024, 32768, False),
    (64, 64, 64, 8, True, 4096, 32768, False),
    (128, 128, 32, 8, True, 300, 32768, False),
    (128, 128, 28, 4, True, 1536, 32768, False),
    (128, 128, 32, 8, False, 1024, 32768, False),
    (128, 128, 32, 8, True, 4096, 32768, False),
    (128, 128, 64, 8, True, 2048, 32768, True),
    (128, 128, 16, 16, False, 2048, 32768, True),
    (128, 128, 16, 1, True, 1024, 32768, False),
    (192, 128, 16, 16, True, 1024, 32768, False),
    (192, 128, 16, 16, True, 4096, 32768, False),
    (256, 256, 16, 4, True, 1024, 32768, False),
    (256, 256, 16, 4, True, 4096, 32768, False),
    (256, 256, 8, 4, False, 1024, 32768, False),
    (256, 256, 16, 1, True, 2048, 32768, True),
)
# Windows of train-packed, as Mistral and gpt-oss have them: columns, heads, K/V heads, window, mean length, tokens.
TRAIN_WINDOWS = ((128, 32, 8, 4095, 4096, 32768), (64, 64, 8, 127, 2048, 32768))
HEADS = ((64, 32, 8), (128, 32, 8), (128, 16, 16), (256, 16, 4))  # columns, query heads, K/V heads
SIGMA = 1.0  # of the logarithm of a length


def draw_lengths(draw: random.Random, mean: int, tokens: int, *, long_tailed: bool = False) -> list[int]:
    """Return lengths of a log-normal distribution whose logarithm is around that of the median."""
    lengths: list[int] = []
    sigma, most = (1.5, 8) if long_tailed else (SIGMA, 4)
    while sum(lengths) < tokens:
        length = round(mean * math.exp(sigma * draw.gauss(0, 1) - sigma**2 / 2))
        lengths.append(max(16, min(most * mean, length)))
    return lengths


def draw_train_suite(seed: str) -> str:
    """Return the suite file of ``train-packed``."""
    draw = random.Random(seed)
    lines = [
        'name = "train-packed"',
        'operator = "attention_varlen_backward"',
        'description = "Gradients of packed documents up to 16k tokens, D 64 to 256, groups 1 to 16; bf16."',
        "",
        f"# Drawn by tools/draw_varlen_suite.py train-packed, seed {seed}.",
        "",
        "[defaults]",
        'dtype = "bf16"',
    ]
    for head_dim, head_dim_v, heads, heads_kv, causal, mean, tokens, long_tailed in TRAIN:
        lengths = draw_lengths(draw, mean, tokens, long_tailed=long_tailed)
        tail = ", a few long" if long_tailed else ""
        lines += [
            "",
            "[[cases]]",
            f"lengths = {lengths}",
            f"heads = {heads}",
            f"heads_kv = {heads_kv}",
            f"head_dim = {head_dim}",
            *([f"head_dim_v = {head_dim_v}"] if head_dim_v != head_dim else []),
            f"causal = {str(causal).lower()}",
            f'origin = "log-normal lengths around a mean of {mean}{tail}, about {tokens} tokens"',
        ]
    for head_dim, heads, heads_kv, window, mean, tokens in TRAIN_WINDOWS:
        lines += [
            "",
            "[[cases]]",
            f"lengths = {draw_lengths(draw, mean, tokens)}",
            f"heads = {heads}",
            f"heads_kv = {heads_kv}",
            f"head_dim = {head_dim}",
            "causal = true",
            f"window = [{window}, -1]",
            f'origin = "log-normal lengths around a mean of {mean}, about {tokens} tokens; a window"',
        ]
    return "\n".join(lines) + "\n"


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


DRAW = {"varlen": draw_suite, "train-packed": draw_train_suite}

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in DRAW:
        raise SystemExit(f"usage: draw_varlen_suite.py {'|'.join(DRAW)} SEED")
    sys.stdout.write(DRAW[sys.argv[1]](sys.argv[2]))
