"""Draw a suite of attention shapes that nobody chose: ``draw_suite.py SEED > src/flashmoe_science/suites/unseen.toml``.

Tables are tuned on shapes that somebody chose. Whether they hold elsewhere is shown on shapes drawn after tuning has
ended, by a seed that is not known before, such as the first digits of the commit that ended it. The same seed draws the
same suite. A file in another place needs another name: that of the packaged suite is taken.
"""

from __future__ import annotations

import random
import sys

CASES = 24
HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
GROUPS = (1, 4, 8)  # query heads of one KV head
TOKENS = (4096, 32768)  # about the fewest and the most queries of a case, over its sequences
LENGTHS = (128, 16384)  # of a sequence
HEADS = (8, 16, 24, 32, 40, 64)


def draw_length(draw: random.Random) -> int:
    """Return a length: every size of length as often as any other; half are odd ones, half are round."""
    low, high = LENGTHS
    length = int(low * (high / low) ** draw.random())
    return length | 1 if draw.random() < 0.5 else -(-length // 64) * 64


def draw_case(draw: random.Random, number: int) -> dict[str, object]:
    """Return the keys of one case. Head sizes, groups and masks take turns: each is there. The rest is drawn."""
    head_dim, head_dim_v = HEAD_DIMS[number % len(HEAD_DIMS)]
    group = GROUPS[number % len(GROUPS)]
    seqlen_q = draw_length(draw)
    equal = draw.random() < 0.5
    seqlen_k = seqlen_q if equal else max(seqlen_q, draw_length(draw))
    tokens = round(TOKENS[0] * (TOKENS[1] / TOKENS[0]) ** draw.random())
    return {
        "batch": max(1, min(32, tokens // seqlen_q)),
        "heads": (heads := draw.choice([h for h in HEADS if h % group == 0])),
        "heads_kv": heads // group,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "causal": number % 2 == 1,
    }


def draw_suite(seed: str) -> str:
    """Return the suite file."""
    draw = random.Random(seed)
    lines = [
        'name = "unseen"',
        'operator = "attention"',
        f'description = "{CASES} shapes that nobody chose, drawn by tools/draw_suite.py after tuning; seed {seed}."',
        "",
        "[defaults]",
        'dtype = "bf16"',
        f'origin = "drawn by tools/draw_suite.py, seed {seed}"',
    ]
    for number in range(CASES):
        lines += ["", "[[cases]]"]
        lines += [f"{key} = {str(value).lower()}" for key, value in draw_case(draw, number).items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: draw_suite.py SEED")
    sys.stdout.write(draw_suite(sys.argv[1]))
