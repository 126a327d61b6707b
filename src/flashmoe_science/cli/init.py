"""The verb ``init``: the files of a first trial, small enough to be read at once."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

from ..errors import InputError
from .options import Json, argument, flag
from .terminal import Terminal, short_path, write_file


class Kind(str, Enum):
    """How the kernel of a first trial is written."""

    plain = "plain"
    triton = "triton"
    cuda = "cuda"


_KERNEL_TOML = """[subject]
name = "my_axpy"
operator = "my_operator:OPERATOR"
entry_point = "my_axpy:axpy"
sources = [{sources}]
devices = [{devices}]
deterministic = true
{more}"""

_SUITE_TOML = """name = "my-suite"
operator = "my_operator:OPERATOR"
description = "A small size, a prime, and a large one."

[[cases]]
elements = 1024
origin = "the smallest that fills a block"

[[cases]]
elements = 1009
origin = "a prime"

[[cases]]
elements = 4194304
origin = "48 MiB in all"
"""

_OPERATOR = '''"""What a call means: 2 * x + y. The reference is docs/reference/operators.md of flashmoe_science."""

from dataclasses import dataclass

import torch

from flashmoe_science.proof.subject.custom_operator import Baseline, CustomOperator, Work, standard_normal


@dataclass(frozen=True)
class Problem:
    elements: int


class Axpy(CustomOperator):
    problem = Problem

    def make_inputs(self, problem, *, seed, device):
        shapes = {"x": (problem.elements,), "y": (problem.elements,)}
        return standard_normal(shapes, torch.float32, seed=seed, device=device)

    def exact(self, problem, inputs):
        return 2 * inputs["x"].double() + inputs["y"].double()

    def low_precision(self, problem, inputs):
        return torch_axpy(**inputs)

    def work(self, problem):
        return Work(flops=2.0 * problem.elements, bytes=12.0 * problem.elements, tokens=problem.elements)

    def baselines(self):
        return {"torch": Baseline("torch", torch_axpy)}


def torch_axpy(x, y):
    return torch.add(y, x, alpha=2)


OPERATOR = Axpy()
'''

_PLAIN = """def axpy(x, y):
    return 2 * x + y
"""

_TRITON = """import torch
import triton
import triton.language as tl


@triton.jit
def axpy_kernel(x_ptr, y_ptr, out_ptr, elements, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < elements
    x, y = tl.load(x_ptr + offs, mask=mask), tl.load(y_ptr + offs, mask=mask)
    tl.store(out_ptr + offs, 2 * x + y, mask=mask)


def axpy(x, y):
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = 65536 if x.device.type == "cpu" else 1024  # the interpreter takes its time for every block
    axpy_kernel[(triton.cdiv(x.numel(), block),)](x, y, out, x.numel(), BLOCK=block, num_warps=4)
    return out
"""

_CUDA = """__global__ void axpy_kernel(const float *x, const float *y, float *out, long long elements) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < elements) out[i] = 2.0f * x[i] + y[i];
}

extern "C" int axpy(const float *x, const float *y, float *out, long long elements, cudaStream_t stream) {
  axpy_kernel<<<(elements + 255) / 256, 256, 0, stream>>>(x, y, out, elements);
  return cudaGetLastError();
}
"""

_BINDING = """import ctypes
from pathlib import Path

import torch

_axpy = ctypes.CDLL(str(Path(__file__).with_name("libmy_axpy.so"))).axpy
_axpy.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_longlong, ctypes.c_void_p]


def axpy(x, y):
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    stream = torch.cuda.current_stream().cuda_stream
    if error := _axpy(x.data_ptr(), y.data_ptr(), out.data_ptr(), x.numel(), stream):
        raise RuntimeError(f"CUDA error {error}")
    return out
"""

_PROMISE = """
[[launch.kernels]]
pattern = "*axpy_kernel*"
"""

_BUILD = """
[build]
command = "nvcc -O3 -shared -Xcompiler -fPIC -arch=all-major -o libmy_axpy.so my_axpy.cu"
needs = ["nvcc"]
binaries = ["libmy_axpy.so"]
"""


def files_of(kind: Kind) -> dict[str, str]:
    """Return the files of a first trial: name -> text."""
    code = {Kind.plain: {"my_axpy.py": _PLAIN}, Kind.triton: {"my_axpy.py": _TRITON}}
    files = code.get(kind, {"my_axpy.cu": _CUDA, "my_axpy.py": _BINDING}) | {"my_operator.py": _OPERATOR}
    devices = '"cuda"' if kind is Kind.cuda else '"cuda", "cpu"'
    more = {Kind.plain: "", Kind.triton: _PROMISE, Kind.cuda: _PROMISE + _BUILD}[kind]
    sources = ", ".join(f'"{name}"' for name in files)
    kernel = _KERNEL_TOML.format(sources=sources, devices=devices, more=more)
    return {"kernel.toml": kernel, "suite.toml": _SUITE_TOML, **files}


def init(
    folder: Annotated[Path, argument("FOLDER", "Where the files go; made where it is missing.")],
    kind: Annotated[Kind, flag("--kind", "How the kernel is written.")] = Kind.triton,
    as_json: Json = False,
) -> None:
    """Write the files of a first trial: a kernel of a few lines, what it means, its shapes. No file is replaced.

    \b
    Examples:
      flashmoe init trial
      flashmoe init trial --kind cuda
      flashmoe prove trial
    """
    terminal = Terminal(as_json=as_json)
    files = {folder / name: text for name, text in files_of(kind).items()}
    if there := [str(path) for path in files if path.exists()]:
        raise InputError(f"folder must hold none of the files, got {', '.join(there)}", hint="name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made: {error.strerror}") from error
    for path, text in files.items():
        write_file(path, text)
        terminal.show(short_path(path))
    terminal.log.print(f"hint: flashmoe prove {short_path(folder)}", soft_wrap=True)
    terminal.document({"files": [short_path(path) for path in files]})
