"""Write new identities of launches into records where a kernel's text changed and its machine code did not.

``python tools/restamp.py OLD_COMMIT`` compares the launches of all recorded cases between that commit and this tree.
Where an identity (``gpu/identity.py``) differs, both kernels are compiled for the record's architecture with the Triton
that is installed: to PTX, and to machine code where their PTX differs, as ptxas takes most of the time. A case whose
launches have the same code, shared memory, warps, grid, scalars and tensor maps gets the new identities in its record.
The others are listed: they have to be measured again. No GPU is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gzip
import hashlib
import importlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_LOADERS = tuple(
    f"flashmoe_science.proof.{place}" for place in ("subject.loading", "loading", "operator")
)  # newest first
_SECTION = struct.Struct("<IIQQQQIIQQ")  # a section's header in a file of ELF: name, ..., offset, size, link, info, ...
_WHOLE = ("grid", "scalars", "maps", "kernel")  # what has to be equal


def main() -> int:
    """Run the command. Return 1 where a case has to be measured again."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old_commit", help="the tree whose identities the records have")
    old_commit = parser.parse_args().old_commit
    records = {path: json.loads(_read(path)) for path in sorted((ROOT / "evidence").glob("*.json*"))}
    calls = {
        json.dumps(call, sort_keys=True): call for document in records.values() for _, call, _ in _recorded(document)
    }
    with _worktree(old_commit) as old_tree:
        trees = old_tree, ROOT
        old, new = _in_both(trees, [{"calls": [*calls.values()], "compile": [], "code": ""}] * 2)
        found = dict(zip(calls, zip(old, new, strict=True), strict=True))
        differ = [key for key, (one, other) in found.items() if _names(one) != _names(other) and len(one) == len(other)]
        same: set[str] = set()
        for code in ("PTX", "machine code"):
            differ = [key for key in differ if key not in same]
            pairs = {
                pair for key in differ for pair in zip(*map(_names, found[key]), strict=True) if pair[0] != pair[1]
            }
            print(
                f"{len(differ)} of {len(calls)} calls differ: compiling {len(pairs)} kernels twice to {code}",
                flush=True,
            )
            requests = [
                {
                    "calls": [calls[key] for key in differ],
                    "compile": sorted({pair[tree] for pair in pairs}),
                    "code": code,
                }
                for tree in range(2)
            ]
            answers = zip(differ, *_in_both(trees, requests), strict=True)
            same |= {key for key, one, other in answers if _is_same(one, other)}
    lost = [line for path, document in records.items() for line in _restamp(path, document, found, same)]
    print("\n".join(lost) or "every record has the identities of this tree")
    return 1 if lost else 0


def _restamp(path: Path, document: Any, found: Mapping[str, Any], same: set[str]) -> Iterator[str]:
    """Write the new identities into one record; yield the cases that have to be measured again."""
    renamed: dict[str, str] = {}
    for case, call, identities in _recorded(document):
        key = json.dumps(call, sort_keys=True)
        old, new = map(_names, found[key])
        if identities == new:
            continue
        if identities != old or key not in same:
            why = (
                "its launches differ"
                if identities == old
                else "it was measured with other launches than OLD_COMMIT has"
            )
            yield f"{path.name}: {case}: {why}"
            continue
        for before, now in zip(old, new, strict=True):
            if renamed.setdefault(before, now) != now:
                raise SystemExit(f"{path.name}: {case}: one launch of OLD_COMMIT is two different ones here")
    if renamed:
        text = _read(path)
        for before, now in renamed.items():
            text = text.replace(f'"{before}"', f'"{now}"')
        data = text.encode()
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _recorded(document: Any) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """Yield each case of a record that has identities: its name, the call, and the identities."""
    subject, gpu = document["subject"], document["environment"]["gpu"]
    for case in document["cases"]:
        for arm in case["arms"]:
            if arm.get("identities"):
                call = {
                    "operator": subject["operator"],
                    "subject": subject["name"],
                    "gpu": gpu,
                    "problem": case["problem"],
                }
                yield case["name"], call, arm["identities"]


def _read(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def _names(launches: Sequence[Mapping[str, Any]]) -> list[str]:
    return [launch["identity"] for launch in launches]


def _is_same(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> bool:
    return all(
        one["identity"] == other["identity"] or all(one[key] == other[key] for key in _WHOLE)
        for one, other in zip(old, new, strict=True)
    )


@contextlib.contextmanager
def _worktree(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="restamp-") as folder:
        tree = Path(folder) / "old"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def _in_both(trees: Sequence[Path], requests: Sequence[Any]) -> list[Any]:
    """Answer one request in each tree, at the same time."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_ask, trees, requests))


def _ask(tree: Path, request: Any) -> Any:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree / "src"), os.environ.get("PYTHONPATH", "")]),
        "TRITON_DISABLE_LINE_INFO": "1",  # where a line stands decides the order of some instructions
    }
    command = [sys.executable, __file__, "--worker"]
    done = subprocess.run(command, cwd=tree, env=environment, input=json.dumps(request), stdout=subprocess.PIPE,
                          text=True, check=True)  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


# In a process of its own, with the package of one of the trees


def worker() -> None:
    """Print the launches of the calls asked for, and of those asked for the machine code."""
    request = json.loads(sys.stdin.read())
    compiled: dict[str, Any] = dict.fromkeys(request["compile"])
    if request["code"] == "PTX":
        _compile_to_ptx()
    print(json.dumps([_launches(call, compiled) for call in request["calls"]]))


def _launches(call: Mapping[str, Any], compiled: dict[str, Any]) -> list[dict[str, Any]]:
    from flashmoe_science.errors import FlashmoeError
    from flashmoe_science.gpu.device import gpu_of_properties
    from flashmoe_science.gpu.identity import launch_identity

    gpu, operator = call["gpu"], _load_operator(call["operator"])
    arch = gpu["arch"]
    spec = gpu_of_properties(SimpleNamespace(
        name=gpu["name"], major=arch // 10, minor=arch % 10, multi_processor_count=gpu["sms"],
        L2_cache_size=gpu["l2_bytes"],
    ))  # fmt: skip
    try:
        launches = operator.launches(call["subject"], operator.parse_case(call["problem"]), spec)
    except FlashmoeError:  # it is no case any more, or not served
        return []
    found = []
    for launch in launches:
        identity = launch_identity(launch, arch)
        if compiled.get(identity, "") is None:
            print(f"{launch.source.name} {identity}", file=sys.stderr, flush=True)
            compiled[identity] = _kernel(launch.source, arch)
        maps = [dataclasses.astuple(each) for each in launch.tensor_maps]
        kernel = compiled.get(identity)
        found.append(
            {"identity": identity, "grid": launch.grid, "scalars": launch.scalars, "maps": maps, "kernel": kernel}
        )
    return found


def _load_operator(name: str) -> Any:
    for module in _LOADERS:
        with contextlib.suppress(ModuleNotFoundError):
            if load := getattr(importlib.import_module(module), "load_operator", None):
                return load(name)
    raise SystemExit(f"this tree has none of {', '.join(_LOADERS)}")


def _kernel(source: Any, arch: int) -> list[Any]:
    """Compile a kernel, and return what of it decides how it runs."""
    from flashmoe_science.gpu.compile import compile_kernel

    kernel = compile_kernel(source, arch)
    cubin = kernel.asm["cubin"]
    code = _machine_code(cubin) if cubin else [hashlib.sha256(kernel.asm["ptx"].encode()).hexdigest()]
    return [
        *code, kernel.metadata.shared, kernel.metadata.num_warps, source.dependent_launch,
    ]  # fmt: skip


def _compile_to_ptx() -> None:
    """Let Triton call no ptxas, and keep what it makes apart from whole kernels."""
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend

    knobs.cache.dir = str(Path(knobs.cache.dir) / "ptx")
    CUDABackend.make_cubin = lambda *_: b""


def _machine_code(cubin: bytes) -> list[Any]:
    """Return the hash of each section of code and of constants, without names, and the registers a thread."""
    headers_at = struct.unpack_from("<Q", cubin, 0x28)[0]
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [_SECTION.unpack_from(cubin, headers_at + i * size) for i in range(count)]
    names_at, found = headers[names_index][4], []
    for name_at, _, _, _, start, length, _, info, *_ in headers:
        name = cubin[names_at + name_at : cubin.index(b"\0", names_at + name_at)].decode()
        if name.startswith((".text.", ".nv.constant")) and not name.startswith(".nv.constant0"):  # 0: arguments
            code = hashlib.sha256(cubin[start : start + length]).hexdigest()
            found.append([name.split(".")[1], code, info >> 24])
    if not any(kind == "text" for kind, _, _ in found):
        raise SystemExit("a cubin without a section of code")
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        worker()
    else:
        sys.exit(main())
