"""README.md as an index of packages shows it: no link is dead away from a clone."""

from __future__ import annotations

import email.message
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.delitem(sys.modules, "long_description", raising=False)
    import check_wheel
    import long_description

    return check_wheel, long_description


def links(check, text):
    fields = email.message.Message()
    fields.set_payload(text)
    return check.relative_links(fields)


@pytest.mark.parametrize("source", ["", "https://forge.example/flashmoe_science"])
def test_no_link_is_relative(tools, source):
    check, hook = tools
    assert len(links(check, README)) > 10
    text = hook.long_description(README, source)
    assert links(check, text) == []
    assert "pip install" in text


def test_without_an_address_pages_are_named_as_files_of_the_wheel_and_pictures_go_with_what_explains_them(tools):
    text = tools[1].long_description(README)
    assert "The feature tables (`flashmoe_science/docs/reference/features.md` in site-packages)" in text
    assert "DESIGN.md, CONTRIBUTING.md, CHANGELOG.md" in text
    assert "<img" not in text
    assert "picture" not in text
    assert "decode bar" not in text


def test_with_an_address_links_and_pictures_are_absolute(tools):
    text = tools[1].long_description(README, "https://forge.example/us/it")
    assert "(https://forge.example/us/it/blob/main/docs/how-to/kv-cache.md#mla)" in text
    assert 'src="https://forge.example/us/it/raw/main/docs/pictures/speedups-light.svg"' in text
    assert "](#where-it-is-slower)" in text
