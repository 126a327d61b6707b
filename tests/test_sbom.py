"""The bill of materials names a wheel and all that it needs here, each once."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
METADATA = """Metadata-Version: 2.4
Name: made-up
Version: 1.2+cpu
Requires-Dist: numpy>=1
Requires-Dist: jinja2; extra == "proof"
Requires-Dist: not-installed-here; extra == "docs"
Requires-Dist: not-installed-here; python_version < "3"
"""


@pytest.fixture
def sbom(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    spec = importlib.util.spec_from_file_location("sbom", TOOLS / "sbom.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("check_wheel", None)


def write_wheel(path: Path, metadata: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo("made_up-1.2.dist-info/METADATA"), metadata)
    return path


def test_a_bill_names_what_is_needed_here(sbom, tmp_path, monkeypatch, capsys):
    wheel = write_wheel(tmp_path / "made_up-1.2-py3-none-any.whl", METADATA)
    bill = sbom.bill_of(wheel)
    assert bill == sbom.bill_of(wheel)
    whole = bill["metadata"]["component"]
    assert (whole["purl"], len(whole["hashes"][0]["content"])) == ("pkg:pypi/made-up@1.2%2Bcpu", 64)
    versions = {name: importlib.metadata.version(name) for name in ("jinja2", "markupsafe", "numpy")}
    expected = [f"pkg:pypi/{name}@{version}" for name, version in versions.items()]
    assert [component["purl"] for component in bill["components"]] == expected
    depends = {each["ref"]: each["dependsOn"] for each in bill["dependencies"]}
    assert depends[whole["purl"]] == [expected[0], expected[2]]
    assert depends[expected[0]] == [expected[1]]
    monkeypatch.setattr(sys, "argv", ["sbom.py", "--wheel", str(wheel)])
    sbom.main()
    assert capsys.readouterr().out == "made_up-1.2-py3-none-any.cdx.json: 3 packages\n"
    assert (tmp_path / "made_up-1.2-py3-none-any.cdx.json").exists()


def test_what_is_not_installed_is_an_error(sbom, tmp_path):
    wheel = write_wheel(tmp_path / "a.whl", METADATA.replace('; extra == "docs"', ""))
    with pytest.raises(SystemExit, match="not-installed-here is not installed, and the wheel needs it"):
        sbom.bill_of(wheel)
