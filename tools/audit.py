"""Look every package of the newest bill of materials in ``dist/`` up in PyPI's advisories: ``audit.py``.

It exits with 1 where an advisory is about a version. Where they cannot be reached it says so, and exits with 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Audit the newest bill."""
    bills = sorted((ROOT / "dist").glob("*.cdx.json"), key=lambda path: path.stat().st_mtime)
    if not bills:
        sys.exit("there is no bill of materials in dist/\nhint: make release-check")
    said, is_wrong = judge(*ask(json.loads(bills[-1].read_text(encoding="utf-8"))))
    print(said)
    sys.exit(int(is_wrong))


def ask(bill: dict[str, Any]) -> tuple[str, str]:
    """Return what pip-audit prints of the packages of a bill: its document, and the last line of its messages."""
    # An advisory is about a release, whatever it is built for: "2.13.0+cpu" is 2.13.0.
    pins = [f"{each['name']}=={each['version'].partition('+')[0]}" for each in bill["components"]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requirements.txt"
        path.write_text("\n".join(pins) + "\n", encoding="utf-8")
        options = ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off", "-r", str(path)]
        command = [sys.executable, "-m", "pip_audit", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout, (done.stderr.strip().splitlines() or [""])[-1]


def judge(document: str, message: str) -> tuple[str, bool]:
    """Return what is known of the packages, and whether an advisory is about one."""
    try:
        packages: list[dict[str, Any]] = json.loads(document)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return f"advisories were not reached: {message}", False
    asked = [each for each in packages if "skip_reason" not in each]
    found = [f"{each['name']} {each['version']}: {one['id']}" for each in asked for one in each["vulns"]]
    if found:
        return "\n".join(found), True
    if not asked:
        reason = packages[0]["skip_reason"] if packages else "there is no package"
        return f"advisories were not reached: {reason}", False
    skipped = f"; not looked up: {', '.join(each['name'] for each in packages if each not in asked)}"
    return f"packages without an advisory: {len(asked)}{skipped if len(asked) < len(packages) else ''}", False


if __name__ == "__main__":
    main()
