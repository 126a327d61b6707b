"""Fetch three public kernels, and put each on trial: ``try_public_kernels.py [--wheels DIR] [--only NAME]``.

They are wheels of pinned versions, fetched by pip unless ``--wheels`` has them, and unpacked beside their
``kernel.toml`` in ``examples/public_kernels``. The exit code is 1 where a verdict is not the one that is known.
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
import zipfile
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


@dataclass(frozen=True)
class Trial:
    """One kernel: its suite, and the known verdict of gate correct on each kind of machine."""

    suite: Path
    on_cpu: str
    on_gpu: str = "passed"


TRIALS = {
    "fla_attention": Trial(FOLDER / "fla_attention" / "suite.toml", "passed"),
    "liger_rms_norm": Trial(ROOT / "examples" / "rms_norm" / "suite.toml", "not possible here"),
    "liger_moe": Trial(FOLDER / "liger_moe" / "suite.toml", "not possible here"),
}


def fetch(folder: Path | None) -> None:
    """Unpack the wheels, after a look at their hashes."""
    target = FOLDER / "fetched"
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name, (version, sha256) in WHEELS.items():
            found = folder or Path(scratch)
            if folder is None:
                pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", scratch]
                subprocess.run([*pip, "--only-binary", ":all:", f"{name}=={version}"], check=True)
            wheel = next(found.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
            if hashlib.sha256(wheel.read_bytes()).hexdigest() != sha256:
                raise SystemExit(f"{wheel.name} is not the file that was tried: its SHA-256 differs")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)


def prove(name: str, trial: Trial, evidence: Path) -> str:
    """Run the chain, and return what is wrong with its verdict, or an empty text."""
    command = [sys.executable, "-m", "flashmoe_science", "prove", str(FOLDER / name), "--suite", str(trial.suite)]
    command += ["--processes", "1", "--json"]
    result = subprocess.run(command, cwd=evidence, capture_output=True, text=True, check=False)
    sys.stderr.write(result.stderr)
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
    parser.add_argument("--wheels", type=Path, help="a folder that has the wheels already")
    parser.add_argument("--only", choices=TRIALS, help="one of them")
    parser.add_argument("--evidence", type=Path, help="where the records go; by default they are thrown away")
    wanted = parser.parse_args()
    fetch(wanted.wheels)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    names = [wanted.only] if wanted.only else list(TRIALS)
    with tempfile.TemporaryDirectory() as scratch:
        evidence = wanted.evidence or Path(scratch)
        found = {name: prove(name, TRIALS[name], evidence) for name in names}
    problems = [f"{name}: {problem}" for name, problem in found.items() if problem]
    print("\n".join(problems) or "each verdict is the one that is known")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
