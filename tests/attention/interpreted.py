"""Child process: read cases from stdin, run them in Triton's interpreter, answer ``right`` or why not."""

from __future__ import annotations

import math
import sys

import torch

from flashmoe_science import flash_attention

from .cases import Case
from .checks import assert_right, make_inputs


def check(case: Case) -> None:
    """Compare one case with fp64, its layout changed too."""
    q, k, v = make_inputs(case, "cpu")
    empty = torch.empty
    torch.empty = lambda *a, **o: empty(*a, **o).fill_(math.nan)  # an element that no one wrote shows
    try:
        o, lse = flash_attention(q, k, v, causal=case.causal, return_lse=True, kernel="forward_triton")
        strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
        again = flash_attention(*strided, causal=case.causal, kernel="forward_triton")
    finally:
        torch.empty = empty
    assert_right(o, q, k, v, causal=case.causal, lse=lse)
    assert torch.equal(again, o), "another memory layout gives other bits"
    if o.numel() and k.numel():
        check_expanded(q, k, v, causal=case.causal)
        for scale in (1e-60, 0.0, -0.5):
            o, lse = flash_attention(
                q, k, v, causal=case.causal, softmax_scale=scale, return_lse=True, kernel="forward_triton"
            )
            assert_right(
                o, q, k, v, causal=case.causal, softmax_scale=scale, lse=lse, name=f"output with scale {scale}"
            )


def check_expanded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> None:
    """Expand each axis of k and of v in turn, so that it has stride 0."""
    for axis in range(4):
        for name in ("k", "v"):
            one = (k if name == "k" else v).narrow(axis, 0, 1).expand_as(k if name == "k" else v)
            args = (q, one, v) if name == "k" else (q, k, one)
            o = flash_attention(*args, causal=causal, kernel="forward_triton")
            assert_right(o, *args, causal=causal, name=f"{name} expanded along axis {axis}")


def main() -> None:
    """Serve until stdin ends."""
    for line in sys.stdin:
        try:
            check(eval(line, {"Case": Case}))  # the parent's own repr
            answer = "right"
        except Exception as error:  # noqa: BLE001 - the parent fails the test with it
            answer = f"{type(error).__name__}: {error}".replace("\n", " | ")
        print(answer, flush=True)


if __name__ == "__main__":
    main()
