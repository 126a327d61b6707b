"""Causes of and remedies for a failed build, import or call: pure functions on the output of programs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from ...gpu.cuobjdump import demangle

_ERROR_LINE = re.compile(r"\berror\b|\bError:|undefined reference|cannot find -l", re.IGNORECASE)

# The first that is found in the output counts. A hint may name groups of its pattern.
_OF_BUILDS: tuple[tuple[str, str], ...] = (
    (r"uses too much shared data \((\w+) bytes, (\w+) max\)",
     ("static shared memory ends at 48 KiB a block: take smaller tiles, or dynamic shared memory after "
     "cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)")),
    (r"Unsupported gpu architecture '(\w+)'",
     r"this nvcc knows no \1: `nvcc --list-gpu-arch` says which it knows, and --gpu which are compiled for"),
    (r"Python\.h: No such file", "Python's headers are missing: the package python3-dev, or python3-devel, has them"),
    (r"No module named '(\w+)'", r"the Python that runs the harness also builds: install \1 there"),
    (r"cannot find -l(c10_cuda|torch_cuda)",
     "this PyTorch is a CPU build and has no such library: install a CUDA build, or link it only where it is"),
    (r"CUDA_HOME environment variable is not set",
     ("torch's CPU build finds no toolkit: build with `{python} -m flashmoe_science.cuda_extension`, or with torch's "
     "CUDA build and CUDA_HOME set")),
    (r"unsupported GNU version", "this nvcc needs an older g++: -ccbin g++-N names one"),
    (r"cuda_runtime(_api)?\.h: No such file", "the CUDA toolkit's headers are missing: is CUDA_HOME its folder?"),
)  # fmt: skip


# Frames of this package and of Python's import machinery, which every stack has below those of the subject.
_OWN_FRAME = re.compile(
    r'\s+File "(?:flashmoe_science/proof/|<string>"|<frozen importlib|<python>/[^"]*/importlib/__init__\.py)'
)
_OWN_THREAD = re.compile(r'\s+File "flashmoe_science/proof/worker\.py", line \d+ in watch$')


def without_own_frames(lines: Sequence[str]) -> list[str]:
    """Return what a crashed process wrote, without the frames of this package in its stacks.

    Where no other frame is in them the fault is our own, and all of it is returned.
    """
    kept: list[str] = []
    own = False  # whether the frame that is being read is ours: its code follows, further to the right
    thread = -1  # where in ``kept`` the stack of a thread begins
    for line in lines:
        if line.startswith(("Thread 0x", "Current thread 0x")):
            thread = len(kept)
        elif _OWN_THREAD.match(line) and thread >= 0:
            del kept[thread:]
            thread = -2  # until the next thread all is of this one
        if thread == -2 and line.startswith(" "):
            continue
        if line.lstrip().startswith('File "'):
            own = bool(_OWN_FRAME.match(line))
        elif not line.startswith("    "):
            own = False
        if not own:
            kept.append(line)
    return kept if any(line.lstrip().startswith('File "') for line in kept) else list(lines)


def explain_build(output: str) -> tuple[str, str]:
    """Return the first line of a failed build's output that names an error, and what mends it; texts may be empty."""
    said = next((line.strip() for line in output.splitlines() if _ERROR_LINE.search(line)), "")
    for pattern, hint in _OF_BUILDS:
        if (found := re.search(pattern, output)) is not None:
            line = next((line.strip() for line in output.splitlines() if found[0] in line), said)
            return line, found.expand(hint)
    return said, ""


def explain_import(error: BaseException) -> tuple[str, str]:
    """Return why a module does not load, with C++ names as they were written, and what mends it."""
    messages = [str(each).strip().partition("\n")[0] for each in _chain(error)]
    for pattern, explain in _OF_IMPORTS:
        for message in messages:
            if (found := re.search(pattern, message)) is not None:
                return explain(found)
    return f"{type(error).__name__}: {messages[0]}" if messages[0] else type(error).__name__, ""


# What a machine without a GPU cannot do, by what it says: no fault of the kernel.
_NO_DRIVER = (
    r"Found no NVIDIA driver|No CUDA GPUs are available|not compiled with CUDA|\b0 active drivers|cuInit"
    r"|no CUDA-capable device|libcuda\.so|driver version is insufficient"
)
_NOT_HERE = (
    (_NO_DRIVER, "it asks for a GPU driver, and there is none here"),
    (r"not implemented for '(BFloat16|Half|Float8\w*)'", "PyTorch has no such operation on a CPU"),
    (r"InterpreterBuilder|[Ii]nterpret\w* (mode )?(does not|is not|not) support", "Triton's interpreter cannot run it"),
)


# Triton's interpreter gives a kernel Python's own numbers, where a compiled one has scalars.
_PLAIN_NUMBER = "'float' object has no attribute"


def not_here(said: str, error: BaseException | None = None) -> str:
    """Return why a machine without a GPU cannot run something, by the error that it raised; empty: it is at fault."""
    chain = list(_chain(error))
    said = "\n".join([said, *map(str, chain)])
    for pattern, why in _NOT_HERE:
        if re.search(pattern, said) is not None:
            return why
    interpreted = any(type(each).__name__ == "InterpreterError" for each in chain)
    if interpreted and any(isinstance(each, NotImplementedError) or _PLAIN_NUMBER in str(each) for each in chain):
        return _NOT_HERE[-1][1]
    return ""


def _chain(error: BaseException | None) -> Iterable[BaseException]:
    """Yield an error, and those that it was raised from: torch.ops.load_library hides the loader's own."""
    current = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _undefined_symbol(found: re.Match[str]) -> tuple[str, str]:
    symbol = found["symbol"]
    name = demangle([symbol])[0]
    said = f"undefined symbol: {name}" if name == symbol else f"undefined symbol: {name}, mangled {symbol}"
    return f"{_library(found)} does not load: {said}", _mend_of(symbol, name)


# By the name as it is in the library.
_OF_SYMBOLS = (
    (r"cuda[A-Z]|__cuda",
     "of the CUDA runtime: link with nvcc, or with -lcudart; __cudaRegisterLinkedBinary asks for nvcc -dlink"),
    (r"cu[A-Z]", "of the CUDA driver: link with -lcuda"),
    (r"_?Py[A-Z_]", "Python's own: the library was built for another Python than the one here: build it anew"),
)  # fmt: skip


def _mend_of(symbol: str, name: str) -> str:
    """Return what mends a library that lacks ``symbol``, which reads ``name`` in C++."""
    if re.search(r"\b(c10|at|torch|caffe2)::|^aoti_torch_|^THP", name):
        return "PyTorch's own: the library was built against another PyTorch than the one here: build it anew"
    for pattern, hint in _OF_SYMBOLS:
        if re.match(pattern, symbol):
            return hint
    if re.search(r"<.*>\(", name):
        return (
            "a function template that is called, and was instantiated for other types or sizes: add "
            f"`template {name};` to the .cu file that defines it"
        )
    return "declared and called, and no file that was linked defines it: is its source in the build command?"


def _missing_library(found: re.Match[str]) -> tuple[str, str]:
    name = found["library"]
    if re.match(r"lib(c10|torch|shm)", name):
        return f"{name} is not found", "PyTorch's own: import torch before the extension"
    if re.match(r"lib(cuda|nv)", name):
        return f"{name} is not found", "of the driver or the CUDA toolkit: `flashmoe doctor` says what is here"
    return f"{name} is not found", "LD_LIBRARY_PATH, or -Wl,-rpath at linking, says where it lies"


def _library(found: re.Match[str]) -> str:
    return found["path"].rpartition("/")[2]


_OF_IMPORTS: tuple[tuple[str, Callable[[re.Match[str]], tuple[str, str]]], ...] = (
    (r"(?P<path>\S+): undefined symbol: (?P<symbol>[\w.$]+)", _undefined_symbol),
    (r"(?P<library>\S+): cannot open shared object file", _missing_library),
    (r"does not define module export function \(PyInit_(?P<name>\w+)\)", lambda found: (
        f"the library has no PyInit_{found['name']}",
        f"the name in PYBIND11_MODULE or TORCH_EXTENSION_NAME must be {found['name']}, as the file's is")),
    (r"version `(?P<version>GLIBC\w*_[\d.]+)' not found", lambda found: (
        f"the C++ or C library here is older than the one it was built with: {found['version']} is missing",
        "build it on this machine, or with an older compiler")),
    (r"No module named '(?P<name>[\w.]+)'", lambda found: (
        f"ModuleNotFoundError: {found[0]}",
        "python_path in the kernel.toml says where modules are looked for; if a build command makes it: did it?")),
)  # fmt: skip
