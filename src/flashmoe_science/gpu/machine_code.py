"""Read machine code: which instructions the kernels of a cubin or of a library hold, and what they need.

Triton's package carries NVIDIA's ``cuobjdump``, so this works on any machine and for any kernel: a cubin of Triton's,
or a CUDA extension with the code of several architectures in it.
"""

from __future__ import annotations

import collections
import pathlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import CompileError
from .cuobjdump import Target, Usage, demangle, parse_usage, run_cuobjdump

# Matrix products on the tensor cores, by opcode: sm_80 to sm_89 and sm_120, sm_90, sm_100.
TENSOR_CORE_OPCODES = frozenset(
    {
        *("HMMA", "IMMA", "BMMA", "DMMA", "QMMA", "OMMA"),
        *("HGMMA", "IGMMA", "BGMMA", "QGMMA"),
        *("UTCHMMA", "UTCIMMA", "UTCQMMA", "UTCOMMA", "UTCMMA"),
    }
)
LOCAL_MEMORY_OPCODES = frozenset({"LDL", "STL"})


@dataclass(frozen=True)
class KernelCode:
    """The machine code of one kernel for one architecture."""

    name: str  # as a profiler shows it: demangled
    arch: int  # 90 for sm_90 and sm_90a
    registers: int  # a thread
    local_bytes: int  # a thread: stack frame and local memory; spills live there, and so do arrays
    shared_memory_bytes: int  # a block, static
    opcodes: Mapping[str, int] = field(hash=False)  # opcode without modifiers -> count
    looped: Mapping[str, int] = field(hash=False)  # the same, of instructions within a loop
    kind: str = ""  # "a": for this architecture alone; "f": for its family

    def count(self, opcodes: Iterable[str], *, in_loops: bool = False) -> int:
        """Return how many instructions have one of ``opcodes``."""
        counts = self.looped if in_loops else self.opcodes
        return sum(counts.get(opcode, 0) for opcode in opcodes)


def read_cubin(cubin: bytes, what: str) -> list[KernelCode]:
    """Return the kernels of one cubin, called ``what`` in errors. Raises ``CompileError``."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return parse(_dump(file.name, what))


def read_file(path: pathlib.Path) -> list[KernelCode]:
    """Return the kernels of a library or a program, for every architecture in it; none where it has none.

    Raises:
        CompileError: there is no ``cuobjdump`` here, or it cannot read the file.
    """
    return parse(_dump(str(path), path.name))


def _dump(path: str, what: str) -> str:
    try:
        return run_cuobjdump("--dump-resource-usage", "--dump-sass", path, what=what)
    except CompileError as error:
        if "does not contain device code" in str(error):
            return ""
        raise


_ARCH = re.compile(r"^arch = sm_(\d+)([af]?)", re.MULTILINE)
_FUNCTION = re.compile(r"^\s+Function : (\S+)$", re.MULTILINE)
_CODE_FOR = re.compile(r"^\s+code for sm_(\d+)([af]?)", re.MULTILINE)
_INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9]*)((?:\.\w+)*)([^;\n]*)", re.MULTILINE
)


def parse(text: str) -> list[KernelCode]:
    """Return the kernels in what ``cuobjdump --dump-resource-usage --dump-sass`` printed."""
    kernels: list[KernelCode] = []
    usages: dict[tuple[Target, str], Usage] = {}
    for target, part in _parts(text):
        usages |= {(target, usage.symbol): usage for usage in parse_usage(part, target)}
        names = list(_FUNCTION.finditer(part))
        ends = [*(match.start() for match in names[1:]), len(part)]
        shown = demangle([match[1] for match in names])
        for match, name, end in zip(names, shown, ends, strict=False):  # without names there is one end too many
            usage = usages.get((target, match[1])) or Usage(target, match[1], 0, 0, 0)
            opcodes, looped = _count(part[match.end() : end])
            code = KernelCode(
                name,
                target.arch,
                usage.registers,
                usage.stack_bytes,
                usage.shared_memory_bytes,
                opcodes,
                looped,
                target.kind,
            )
            kernels.append(code)
    return kernels


def _parts(text: str) -> Iterator[tuple[Target, str]]:
    """Yield each architecture's part: a fatbin says it before, a cubin above its code."""
    marks = list(_ARCH.finditer(text))
    if not marks:
        if (code := _CODE_FOR.search(text)) is not None:
            yield Target(int(code[1]), code[2]), text
        return
    for mark, end in zip(marks, [*(mark.start() for mark in marks[1:]), len(text)], strict=True):
        yield Target(int(mark[1]), mark[2]), text[mark.end() : end]


def _count(text: str) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """Count the opcodes of one kernel: all of them, and those between a jump backwards and where it leads."""
    found = [(int(m[1], 16), m[2], m[4]) for m in _INSTRUCTION.finditer(text)]
    loops = []
    for address, opcode, operands in found:
        if opcode != "BRA":
            continue
        target = re.search(r"0x([0-9a-f]+)\s*$", operands)
        if target is not None and int(target[1], 16) < address:  # a jump to itself ends every kernel
            loops.append((int(target[1], 16), address))
    opcodes = collections.Counter(opcode for _, opcode, _ in found)
    looped = collections.Counter(
        opcode for address, opcode, _ in found if any(begin <= address <= end for begin, end in loops)
    )
    return opcodes, looped


def for_arch(kernels: Sequence[KernelCode], arch: int) -> list[KernelCode]:
    """Return the code that a GPU of ``sm_<arch>`` runs: of each kernel the newest that it can."""
    best: dict[str, KernelCode] = {}
    for kernel in kernels:
        known = best.get(kernel.name)
        newer = known is None or (kernel.arch, kernel.kind) > (known.arch, known.kind)
        if newer and Target(kernel.arch, kernel.kind).serves(arch):
            best[kernel.name] = kernel
    return list(best.values())
