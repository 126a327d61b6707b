"""Verbs that need no GPU and no kernel do not import torch, which takes seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .conftest import RUN_ID

HEAVY = ("torch", "triton", "transformers", "matplotlib")
NEVER_FOR_HELP = (*HEAVY, "numpy", "scipy", "rich", "pydantic")
CODE = """
import sys
from flashmoe_science import cli
code = cli.main(sys.argv[2:])
print("imported", [name for name in sys.argv[1].split(",") if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize(
    ("args", "never"),
    [
        (["--help"], NEVER_FOR_HELP),
        (["prove", "--help"], HEAVY),
        (["runs"], HEAVY),
        (["show", RUN_ID], HEAVY),
        (["doctor"], HEAVY),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_verb_does_not_import_what_it_does_not_need(args, never):
    command = [sys.executable, "-c", CODE, ",".join(never), *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "imported []"), done.stderr


PLANS = """
import sys
from flashmoe_science.cli import explain
from flashmoe_science.gpu.specs import find_gpu
calls = [
    explain.attention_call("1,16,4096,128", {"dtype": "bf16"}),
    explain.cache_call("1,8,1,64", {"dtype": "bf16"}, mla=False),
    explain.experts_call("64,8,2,64,64", {"dtype": "bf16"}),
]
for call in calls:
    explain._plan_call(call, find_gpu("H200"), backward=False).as_text()
print("torch" in sys.modules)
"""


def test_a_call_is_planned_without_torch():
    done = subprocess.run([sys.executable, "-c", PLANS], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
