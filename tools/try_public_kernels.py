"""Fetch four public kernels, and put each on trial: ``try_public_kernels.py [--sources DIR] [--only NAME]``.

They are wheels of pinned versions and a file of a pinned commit, fetched unless ``--sources`` has them, and laid beside
their ``kernel.toml`` in ``examples/public_kernels``. The exit code is 1 where a verdict is not the one that is known.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "public_kernels"

# Version and SHA-256 of the wheel.
WHEELS = {
    "fla-core": ("0.6.0", "b0708b70e0b119cd58a0a5146ea56cb175cef6ed969d8ac60267e3e077ce3ebd"),
    "liger-kernel": ("0.8.5", "60789cd576af073ab9b192b570d2597fd0cdad489cd62fb44fb16256d43754c9"),
    "einops": ("0.8.2", "54058201ac7087911181bfec4af6091bb59380360f069276601256a76af08193"),
}
# Name, address, SHA-256, and the name of the module that it becomes.
TUTORIAL = (
    "06-fused-attention.py",
    "https://raw.githubusercontent.com/triton-lang/triton/5c846f015d9cfbe94480fea890545888ea33b827/python/tutorials",
    "5b16be48b7b781ef018931c789b191f3390886ac479bb5df8a3418e5612ab317",
    "triton_fused_attention.py",
)


@dataclass(frozen=True)
class Trial:
    """One kernel: its folder, sources and suite, and the known verdict of gate correct on each kind of machine."""

    folder: str
    sources: tuple[str, ...]  # names of wheels, or that of the tutorial
    suite: Path
    on_cpu: str = "not possible here"
    on_gpu: str = "passed"
    times: tuple[str, ...] = ("graph",)


TRIALS = {
    "fla_attention": Trial("fla_attention", ("fla-core", "einops"), FOLDER / "fla_attention" / "suite.toml", "passed"),
    "liger_rms_norm": Trial("liger_rms_norm", ("liger-kernel",), ROOT / "examples" / "rms_norm" / "suite.toml"),
    "liger_moe": Trial(
        "liger_moe", ("liger-kernel",), FOLDER / "liger_moe" / "suite.toml", times=("kernel", "wall")
    ),  # the host reads counts of tokens: no graph holds that
    "triton_attention": Trial("triton_attention", (TUTORIAL[0],), FOLDER / "triton_attention" / "suite.toml"),
    "triton_attention_cut": Trial(
        "triton_attention", (TUTORIAL[0],), FOLDER / "triton_attention" / "cut.toml", on_gpu="failed"
    ),
}


def fetch(folder: Path | None, sources: Collection[str]) -> None:
    """Unpack the wheels and copy the file that are asked for, after a look at their hashes."""
    target = FOLDER / "fetched"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name in sorted(WHEELS.keys() & sources):
            version, sha256 = WHEELS[name]
            found = folder or Path(scratch)
            if folder is None:
                pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", scratch]
                subprocess.run([*pip, "--only-binary", ":all:", f"{name}=={version}"], check=True)
            wheel = next(found.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
            require_hash(wheel.name, wheel.read_bytes(), sha256)
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
    name, address, sha256, module = TUTORIAL
    if name not in sources:
        return
    if folder is None:
        with urllib.request.urlopen(f"{address}/{name}", timeout=60) as answer:  # noqa: S310 - https, as above
            text = answer.read()
    else:
        text = (folder / name).read_bytes()
    require_hash(name, text, sha256)
    (target / module).write_bytes(text)


def require_hash(name: str, content: bytes, sha256: str) -> None:
    """Stop where a file is another one than was tried."""
    if hashlib.sha256(content).hexdigest() != sha256:
        raise SystemExit(f"{name} is not the file that was tried: its SHA-256 differs")


def prove(name: str, trial: Trial, evidence: Path) -> str:
    """Run the chain, and return what is wrong with its verdict, or an empty text."""
    command = [
        sys.executable,
        "-m",
        "flashmoe_science",
        "prove",
        str(FOLDER / trial.folder),
        "--suite",
        str(trial.suite),
    ]
    command += ["--processes", "1", "--json", *(part for kind in trial.times for part in ("--time", kind))]
    result = subprocess.run(command, cwd=evidence, stdout=subprocess.PIPE, text=True, check=False)
    try:
        record = json.loads(result.stdout)["record"]
    except ValueError:
        return f"it ended with {result.returncode} and no record"
    gates = {gate["name"]: gate for gate in record["gates"]}
    for gate in gates.values():
        print(f"{name}: {gate['name']}: {gate['status']}: {gate['summary']}")
    expected = trial.on_gpu if record["environment"]["gpu"] else trial.on_cpu
    decided = [gates[gate]["status"] for gate in ("import", "launch", "correct") if gates[gate]["status"] != "passed"]
    found = "failed" if "failed" in decided else gates["correct"]["status"]
    return "" if found == expected else f"gate correct: {found}, and {expected} is known"


def main() -> int:
    """Try each kernel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path, help="a folder that has the wheels and the file already")
    parser.add_argument("--only", choices=TRIALS, help="one of them")
    parser.add_argument("--evidence", type=Path, help="where the records go; by default they are thrown away")
    wanted = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    names = [wanted.only] if wanted.only else list(TRIALS)
    fetch(wanted.sources, {source for name in names for source in TRIALS[name].sources})
    with tempfile.TemporaryDirectory() as scratch:
        evidence = wanted.evidence or Path(scratch)
        found = {name: prove(name, TRIALS[name], evidence) for name in names}
    problems = [f"{name}: {problem}" for name, problem in found.items() if problem]
    print("\n".join(problems) or "each verdict is the one that is known")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
