"""Build one state of the story's extension: `python build.py FOLDER [FLAG ...]` makes FOLDER/story_extension.so.

What torch.utils.cpp_extension does on a machine with a CUDA build of PyTorch, and it also works where PyTorch is a CPU
build and there is no GPU: the library then loads, and cannot run. Object files are kept for the states that share them.
"""

import hashlib
import importlib.util
import os
import re
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
OBJECTS = HERE / "build" / "objects"
ALL = "8.0;8.6;8.9;9.0;10.0;12.0"
TORCH = Path(importlib.util.find_spec("torch").origin).parent
VERSION = runpy.run_path(str(TORCH / "version.py"))  # importing torch would take longer than linking
HAS_CUDA = VERSION["cuda"] is not None


def run(*command):
    """Run a command and return what it prints; end with its status where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="")
        sys.exit(done.returncode)
    return done.stdout


def architectures():
    """Return nvcc's flags for the architectures asked for, as far as this nvcc knows them.

    They are written as torch.utils.cpp_extension reads them: ``8.9;9.0``, with blanks too, ``9.0a`` and ``9.0+PTX``.
    """
    known = run("nvcc", "--list-gpu-code").split()
    asked = re.split(r"[;,\s]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip() or ALL)
    flags = []
    for arch in asked:
        number = arch.removesuffix("+PTX").replace(".", "")
        if f"sm_{number.rstrip('af')}" in known:  # the list has no architecture's own variants
            code = f"[sm_{number},compute_{number}]" if arch.endswith("+PTX") else f"sm_{number}"
            flags.append(f"-gencode=arch=compute_{number},code={code}")
    if not flags:  # nvcc would then choose one itself, which may be none of these
        sys.exit(f"TORCH_CUDA_ARCH_LIST must name an architecture that nvcc knows ({' '.join(known)}), got {asked}")
    return flags


def compile_source(source, *flags):
    """Compile one source, unless an object file of the same text, flags, nvcc and PyTorch is there."""
    command = ["nvcc", "-O2", "-Xcompiler", "-fPIC", *flags, "-c", str(HERE / "csrc" / source)]
    text = [source, *flags, VERSION["__version__"], sys.version, run("nvcc", "--version")]
    text += [path.read_text() for path in (HERE / "csrc" / source, HERE / "csrc" / "attention.h")]
    target = OBJECTS / f"{source}.{hashlib.sha256(chr(0).join(text).encode()).hexdigest()[:16]}.o"
    if not target.exists():
        print(*command[:-1], source, flush=True)
        half = target.with_suffix(f".{os.getpid()}")
        run(*command, "-o", str(half))
        half.replace(target)
    return str(target)


def build(folder, defines):
    """Compile what is missing, and link."""
    OBJECTS.mkdir(parents=True, exist_ok=True)
    headers = [f"-I{TORCH / 'include'}", f"-I{sysconfig.get_paths()['include']}"]
    archs = architectures()
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
    run("nvcc", "-shared", *objects, *libraries, "-o", str(target))
    print(f"{folder}/{target.name}")


if __name__ == "__main__":
    build(sys.argv[1], sys.argv[2:])
