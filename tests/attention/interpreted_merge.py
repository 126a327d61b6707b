"""Child process: merge partial results in Triton's interpreter, and answer ``right``."""

from __future__ import annotations

import math

import torch

from flashmoe_science.attention.decode.merge import merge_reference, run_merge

from .interpreted_cache import fill
from .merge_cases import MERGE_CASES, make_parts
from .merge_checks import assert_merged


def main() -> None:
    """Hold every case against fp64, and its bits against those of another layout."""
    empty = torch.empty
    torch.empty = lambda *a, **o: fill(empty(*a, **o))
    for case in MERGE_CASES:
        outs, lses = make_parts(case)
        o, lse = run_merge(outs, lses)
        assert_merged(case, o, lse, outs, lses)
        turned = [out.transpose(0, 1).contiguous().transpose(0, 1) for out in outs]
        again, lse_again = run_merge(turned, [part.mT.contiguous().mT for part in lses])
        assert torch.equal(again, o), f"{case.why}: another memory layout gives other bits"
        assert torch.equal(lse_again, lse)
    # A part whose LSE is NaN is no part without keys.
    o, lse = run_merge((torch.ones(1, 1, 1, 8),) * 2, (torch.tensor([[[math.nan]]]), torch.zeros(1, 1, 1)))
    assert o.isnan().all()
    assert lse.isnan().all()
    assert merge_reference((torch.ones(1, 1, 1, 8),) * 2, (lse, torch.zeros(1, 1, 1)))[0].isnan().all()


if __name__ == "__main__":
    main()
    print("right")
