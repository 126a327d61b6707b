"""Write the bill of materials of the newest wheel of ``dist/``, as CycloneDX 1.6: ``sbom.py [--wheel FILE]``.

It lists the wheel and all that it and its extra ``proof`` need, in the versions that this environment has: those that
the tests ran with. A dependency that the environment lacks is an error.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import json
import sys
import uuid
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from check_wheel import ROOT, newest_wheel
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("proof",)


def main() -> None:
    """Write the bill beside the wheel."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--wheel", type=Path, help="default: the newest of dist/")
    wheel = parser.parse_args().wheel or newest_wheel(ROOT / "dist")
    path = wheel.with_suffix(".cdx.json")
    bill = bill_of(wheel)
    path.write_text(json.dumps(bill, indent=2) + "\n", encoding="utf-8")
    print(f"{path.name}: {len(bill['components'])} packages")


def bill_of(wheel: Path) -> dict[str, Any]:
    """Return the bill of a wheel. The same wheel and environment give the same bill."""
    fields = _metadata_of(wheel)
    name, version = fields["Name"], fields["Version"]
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    whole = {**_component(name, version), "hashes": [{"alg": "SHA-256", "content": sha256}]}
    depends: dict[str, list[str]] = {}
    found: dict[str, dict[str, Any]] = {}
    todo: list[tuple[str, list[str], tuple[str, ...]]]
    todo = [(whole["purl"], fields.get_all("Requires-Dist", []), ("", *EXTRAS))]
    while todo:
        reference, requirements, extras = todo.pop()
        depends[reference] = []
        for needed in _needed(requirements, extras):
            installed = _installed(needed.name)
            component = _component(installed.metadata["Name"], installed.version)
            depends[reference].append(component["purl"])
            if component["purl"] not in found:
                found[component["purl"]] = component
                todo.append((component["purl"], installed.requires or [], ("", *needed.extras)))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.UUID(sha256[:32])}",
        "version": 1,
        "metadata": {"component": whole},
        "components": [found[reference] for reference in sorted(found)],
        "dependencies": [{"ref": each, "dependsOn": sorted(set(depends[each]))} for each in sorted(depends)],
    }


def _metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(path))


def _needed(requirements: list[str], extras: tuple[str, ...]) -> Iterator[Requirement]:
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            yield requirement


def _installed(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        sys.exit(f"{name} is not installed, and the wheel needs it\nhint: make env-dev")


def _component(name: str, version: str) -> dict[str, Any]:
    purl = f"pkg:pypi/{canonicalize_name(name)}@{version.replace('+', '%2B')}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


if __name__ == "__main__":
    main()
