"""Runs the command line: ``python -m flashmoe_science`` is ``flashmoe``."""

from __future__ import annotations

import sys
from pathlib import Path

here = Path.cwd()
if sys.path and sys.path[0] in ("", str(here)) and Path(__file__).parents[1] != here:
    del sys.path[0]  # "python -m" puts the current folder first: a repository that is read could bring a torch.py

from .cli import main  # noqa: E402 - nothing is imported from that folder

sys.exit(main())
