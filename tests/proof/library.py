"""What a baseline calls: a library that is neither torch nor the harness, so nobody compares its functions."""

from __future__ import annotations

import time

import torch.nn.functional as F  # noqa: N812 - its usual name

SECONDS = 5e-3  # of a call: long beside what a busy machine adds


def wait() -> None:
    time.sleep(SECONDS)


def attend(q, k, v, *, causal, softmax_scale):
    wait()
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
