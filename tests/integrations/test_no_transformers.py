"""Test of the integration where transformers is not installed."""

from __future__ import annotations

import sys

import pytest

from flashmoe_science.errors import MissingPackageError
from flashmoe_science.integrations.transformers import register


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r'hint: pip install "transformers>=5"') as error:
        register()
    assert isinstance(error.value, MissingPackageError)
