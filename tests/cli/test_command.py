"""Tests of what holds for every verb: exit codes, streams, errors, help and documentation."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from flashmoe_science.errors import CompileError, TooFewRoundsError

from ..proof.claim_builders import claim_toml
from .conftest import RUN_ID

ROOT = Path(__file__).resolve().parents[2]
VERBS = (
