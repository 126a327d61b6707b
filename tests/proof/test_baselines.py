"""Baselines: found, missing, broken and crashing ones."""

from __future__ import annotations

from typing import cast

import torch

from flashmoe_science.proof.measure import baselines
from flashmoe_science.proof.subject.operator import Operator

from .baseline_operator import OPERATOR

OPERATOR_UNDER_TEST = cast("Operator", OPERATOR)


def test_every_baseline_is_tried_and_a_crash_counts_against_one_alone():
    found = baselines.available_baselines(OPERATOR_UNDER_TEST)
    assert [(status.name, status.installed, status.version) for status in found] == [
        ("good", True, "1.0"),
        ("absent", False, ""),
        ("crashing", False, ""),
        ("broken", False, ""),
        ("last", True, "1.0"),
    ]
    reasons = {status.name: status.reason for status in found}
    assert reasons["absent"] == "no module named absent"
    assert "SIGSEGV" in reasons["crashing"]
    assert reasons["broken"].startswith("ValueError: bad build")


def test_what_is_installed_runs_only_where_there_is_a_gpu():
    """A CPU build of torch lets its CUDA backends be named: they do not run there."""
    good = baselines.available_baselines(OPERATOR_UNDER_TEST)[0]
    if torch.cuda.is_available():
        assert (good.available, good.reason) == (True, "")
    else:
        assert (good.available, good.reason) == (False, "it is installed; it needs an NVIDIA GPU that torch can use")
