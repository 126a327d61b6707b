"""Build one state of the story's extension: `python build.py FOLDER [FLAG ...]` makes FOLDER/story_extension.so.

As flashmoe_science.cuda_extension builds one, also with a CPU build of PyTorch: the library then loads, and cannot run.
Object files are kept for the states that share them.
"""

import hashlib
import importlib.util
import os
import runpy
import sys
import sysconfig
from pathlib import Path

from flashmoe_science.cuda_extension import architecture_flags, run

HERE = Path(__file__).parent
OBJECTS = HERE / "build" / "objects"
TORCH = Path(importlib.util.find_spec("torch").origin).parent
VERSION = runpy.run_path(str(TORCH / "version.py"))  # importing torch would take longer than linking
HAS_CUDA = VERSION["cuda"] is not None


def compile_source(source, *flags):
    """Compile one source, unless an object file of the same text, flags, nvcc and PyTorch is there."""
    command = ["nvcc", "-O2", "-Xcompiler", "-fPIC", *flags, "-c", str(HERE / "csrc" / source)]
    text = [source, *flags, VERSION["__version__"], sys.version, run("nvcc", "--version", quiet=True)]
    text += [path.read_text() for path in (HERE / "csrc" / source, HERE / "csrc" / "attention.h")]
    target = OBJECTS / f"{source}.{hashlib.sha256(chr(0).join(text).encode()).hexdigest()[:16]}.o"
    if not target.exists():
        print(*command[:-1], source, flush=True)
        half = target.with_suffix(f".{os.getpid()}")
        run(*command, "-o", str(half), quiet=True)
        half.replace(target)
    return str(target)


def build(folder, defines):
    """Compile what is missing, and link."""
    OBJECTS.mkdir(parents=True, exist_ok=True)
    headers = [f"-I{TORCH / 'include'}", f"-I{sysconfig.get_paths()['include']}"]
    archs = architecture_flags()
    tile = [flag for flag in defines if flag.startswith(("-DTILE", "-DFORGET"))]
    objects = [
        compile_source("binding.cpp", "-std=c++20", *headers, *(["-DWITH_CUDA_TORCH"] if HAS_CUDA else [])),
        compile_source("dispatch.cpp", "-std=c++17", *(flag for flag in defines if flag.startswith("-DROUTE"))),
        compile_source("attend_v1.cu", "-std=c++17", *archs),
        compile_source("attend_v2.cu", "-std=c++17", *archs, *tile),
    ]
    names = ["c10", "torch_cpu", *(["c10_cuda", "torch_cuda"] if HAS_CUDA else [])]
    target = HERE / folder / "story_extension.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    libraries = [f"-L{TORCH / 'lib'}", *(f"-l{name}" for name in names)]
    run("nvcc", "-shared", *objects, *libraries, "-o", str(target), quiet=True)
    print(f"{folder}/{target.name}")


if __name__ == "__main__":
    build(sys.argv[1], sys.argv[2:])
