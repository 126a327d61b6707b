"""Find in machine code the loops that multiply matrices, where all the time goes."""

from __future__ import annotations

import collections
import re
from pathlib import Path

from flashmoe_science.gpu.cuobjdump import run_cuobjdump

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+) )?([A-Z0-9_.]+)(.*?);", re.MULTILINE)


def key_loops(cubin: bytes, folder: Path) -> list[collections.Counter[str]]:
    """Return how often each opcode, with its first modifier, occurs in each loop that multiplies matrices.

    A loop ends in a branch back that depends on a predicate. Waits that are rarely needed lie behind all code and come
    back by one that does not. Loops around other loops are left out.
    """
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    text = run_cuobjdump("--dump-sass", str(path))
    code = [(int(at, 16), predicate, opcode, rest) for at, predicate, opcode, rest in _INSTRUCTION.findall(text)]
    products = [at for at, _, opcode, _ in code if opcode.startswith("HGMMA")]
    loops = []
    for at, predicate, opcode, rest in code:
        target = re.search(r"0x([0-9a-f]+)", rest)
        if opcode == "BRA" and predicate and target and int(target[1], 16) < at:
            start = int(target[1], 16)
            if any(start <= product <= at for product in products):
                loops.append((start, at))
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return [
        collections.Counter(".".join(opcode.split(".")[:2]) for at, _, opcode, _ in code if start <= at <= end)
        for start, end in inner
    ]


def matrix_loops(cubin: bytes, folder: Path) -> list[collections.Counter[str]]:
    """Return how often each opcode, without modifiers, occurs in each innermost loop that multiplies, on any GPU.

    Products of fp32 are many multiplications and additions.
    """
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    text = run_cuobjdump("--dump-sass", str(path))
    code = [(int(at, 16), opcode, rest) for at, _, opcode, rest in _INSTRUCTION.findall(text)]
    targets = [(at, re.search(r"0x([0-9a-f]+)", rest)) for at, opcode, rest in code if opcode[:3] == "BRA"]
    loops = [(int(target[1], 16), at) for at, target in targets if target and int(target[1], 16) < at]
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    counts = [
        collections.Counter(opcode.split(".")[0] for at, opcode, _ in code if start <= at <= end)
        for start, end in inner
    ]
    return [found for found in counts if any("MMA" in name for name in found) or found["FFMA"] >= 64]
