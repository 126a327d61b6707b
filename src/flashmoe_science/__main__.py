"""Runs the command line: ``python -m flashmoe_science`` is ``flashmoe``."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
