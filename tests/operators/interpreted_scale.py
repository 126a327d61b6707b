"""Child process: work out error scales of attention in Triton's interpreter, and answer ``right``."""

from __future__ import annotations

from typing import Any

import torch

from .scale_cases import SMALL, compare


def main() -> None:
    """Compare every case with PyTorch's operations; memory that nobody writes is NaN."""
    empty: Any = torch.empty
    torch.empty = lambda *shape, **options: empty(*shape, **options).fill_(torch.nan)
    for case in SMALL:
        for dtype in case.dtypes:
            compare(case, dtype, "cpu")


if __name__ == "__main__":
    main()
    print("right")
