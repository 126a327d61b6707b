"""Build a CUDA extension with nvcc and torch's headers, also where torch is a CPU build: no GPU is needed.

    python -m flashmoe_science.cuda_extension NAME SOURCE... [--out FOLDER] [-- FLAG...]

compiles the sources, ``.cu`` and ``.cpp``, and links FOLDER/NAME.so, a module of Python that registers its operators.
FLAGs go to nvcc. ``TORCH_CUDA_ARCH_LIST`` names the architectures, as for ``torch.utils.cpp_extension``, which refuses
to compile CUDA with a CPU build of torch.

Where torch has CUDA, ``WITH_CUDA_TORCH`` is defined, and the headers and libraries of c10::cuda can be used. Without
it the library loads, its machine code can be read, and it cannot run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import runpy
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ARCHITECTURES = "8.0;8.6;8.9;9.0;10.0;12.0"  # without TORCH_CUDA_ARCH_LIST, as far as nvcc knows them


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="python -m flashmoe_science.cuda_extension",
        description="Build a CUDA extension with nvcc and torch's headers, also where torch is a CPU build.",
        epilog="Flags for nvcc come after --. TORCH_CUDA_ARCH_LIST names the architectures, e.g. 8.9;9.0.",
    )
    parser.add_argument("name", help="name of the module: NAME.so is written")
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help=".cu and .cpp files")
    parser.add_argument("--out", default=".", metavar="FOLDER", help="where the library goes (default: here)")
    given = parser.parse_args(words[:cut])
    if not given.name.isidentifier():
        parser.error(f"name must be a name of Python, got {given.name!r}")
    if absent := [source for source in given.sources if not Path(source).is_file()]:
        parser.error(f"no such file: {', '.join(absent)}")
    out = Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    build(given.name, given.sources, out / f"{given.name}.so", words[cut + 1 :])
    return 0


def build(name: str, sources: Sequence[str], target: Path, flags: Sequence[str] = ()) -> None:
    """Compile and link in one call of nvcc. Ends the process with nvcc's status where it fails."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("torch is not installed in this Python, and its headers are needed")
    torch = Path(spec.origin).parent
    has_cuda = runpy.run_path(str(torch / "version.py"))["cuda"] is not None  # importing torch would take seconds
    headers = [torch / "include", torch / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    libraries = ["c10", "torch_cpu", "torch_python", *(["c10_cuda", "torch_cuda"] if has_cuda else [])]
    half = target.with_suffix(f".{os.getpid()}")
    defines = [f"-DTORCH_EXTENSION_NAME={name}", *(["-DWITH_CUDA_TORCH"] if has_cuda else [])]
    run(
        "nvcc", "-shared", "-O3", "-std=c++20", "-Xcompiler", "-fPIC", *architecture_flags(), *defines,
        *(f"-I{path}" for path in headers), *flags, *sources,
        f"-L{torch / 'lib'}", *(f"-l{library}" for library in libraries), "-o", str(half),
    )  # fmt: skip
    half.replace(target)
    print(target)


def architecture_flags() -> list[str]:
    """Return nvcc's flags for the architectures asked for, as far as this nvcc knows them.

    They are written as torch.utils.cpp_extension reads them: ``8.9;9.0``, with blanks too, ``9.0a`` and ``9.0+PTX``.
    """
    known = run("nvcc", "--list-gpu-code", quiet=True).split()
    asked = re.split(r"[;,\s]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip() or ARCHITECTURES)
    flags = []
    for arch in asked:
        number = arch.removesuffix("+PTX").replace(".", "")
        if f"sm_{number.rstrip('af')}" in known:  # the list has no architecture's own variants
            code = f"[sm_{number},compute_{number}]" if arch.endswith("+PTX") else f"sm_{number}"
            flags.append(f"-gencode=arch=compute_{number},code={code}")
    if not flags:  # nvcc would then choose one itself, which may be none of these
        sys.exit(f"TORCH_CUDA_ARCH_LIST must name an architecture that nvcc knows ({' '.join(known)}), got {asked}")
    return flags


def run(*command: str, quiet: bool = False) -> str:
    """Run a command and return what it prints; end with its status where it fails."""
    if not quiet:
        print(*command, flush=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        sys.exit(f"{command[0]} is not on PATH: install the CUDA toolkit, which needs no GPU")
    if done.returncode:
        print(done.stdout, done.stderr, sep="")
        sys.exit(done.returncode)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
