"""Kernels of a user's own, each with an operator and a suite beside it, and made-up records of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from flashmoe_science.proof.records.documents import write_record
from flashmoe_science.proof.records.evidence import Record, SourceFile, SubjectInfo

from .builders import build_record

EXAMPLE = Path(__file__).parents[2] / "examples" / "rms_norm"
OPERATOR = "rms_norm_operator:OPERATOR"
SUITE = """
name = "{name}"
operator = "rms_norm_operator:OPERATOR"
description = "Made up."
[defaults]
origin = "made up"
dtype = "fp16"
[[cases]]
rows = 512
columns = 1024
[[cases]]
rows = 7
columns = 1000
"""
CLAIM = '''
[[claim]]
id = "{name}"
sentence = """On H200, {name} is at least 2 times as fast as torch in a CUDA graph,
in each of the 2 cases of suite {name}-suite."""
subject = "{name}"
baseline = "torch"
suite = "{name}-suite"
metric = "graph"
factor = 2.0
gpu = "H200"
scope = "each case"
'''


def write_kernel(root: Path, name: str, change: Callable[[str], str] = lambda code: code) -> Path:
    """Write the example's kernel under another name; ``change`` is made to its operator. All have modules alike."""
    folder = root / "kernels" / name
    folder.mkdir(parents=True)
    for file in ("rms_norm.py", "rms_norm_operator.py", "kernel.toml"):
        (folder / file).write_text((EXAMPLE / file).read_text().replace("rms_norm_triton", name))
    operator = folder / "rms_norm_operator.py"
    operator.write_text(change(operator.read_text()))
    (folder / "suite.toml").write_text(SUITE.format(name=f"{name}-suite"))
    return folder


def write_claim(root: Path, name: str) -> None:
    """Write a claim on the kernel called ``name``."""
    (root / "claims").mkdir(exist_ok=True)
    (root / "claims" / f"{name}.toml").write_text(CLAIM.format(name=name))


def record_of(root: Path, name: str) -> Record:
    """Write a made-up record of the kernel called ``name``, and return it."""
    folder = root / "kernels" / name
    sizes = [(512, 1024), (7, 1000)]
    names = [f"rows{rows}_columns{columns}_fp16" for rows, columns in sizes]
    record = build_record(
        speedups=[2.5, 2.6],
        subject=name,
        suite=f"{name}-suite",
        baselines={"torch": 1.0},
        names=names,
        processes=5,
    )
    files = ["kernel.toml", "rms_norm.py", "rms_norm_operator.py"]
    sources = [SourceFile(path=path, sha256=hashlib.sha256((folder / path).read_bytes()).hexdigest()) for path in files]
    subject = SubjectInfo(
        name=name, operator=OPERATOR, entry_point="rms_norm:rms_norm", sources=sources, folder=f"kernels/{name}"
    )
    cases = [
        case.model_copy(update={"problem": {"rows": rows, "columns": columns, "dtype": "fp16", "eps": 1e-6}})
        for case, (rows, columns) in zip(record.cases, sizes, strict=True)
    ]
    record = record.model_copy(update={"id": f"{record.id}-{name}", "subject": subject, "cases": cases})
    write_record(record, root / "evidence" / f"{record.id}.json")
    return record
