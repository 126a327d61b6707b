"""Test of the integration where transformers is not installed."""

from __future__ import annotations

import sys

import pytest

from flashmoe_science.errors import MissingPackageError
from flashmoe_science.integrations.transformers import register
from flashmoe_science.integrations.transformers_experts import register_experts


@pytest.mark.parametrize("function", [register, register_experts])
def test_without_transformers_the_error_says_what_to_install(function, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(ImportError, match=r'hint: pip install "transformers>=5.23"') as error:
        function()
    assert isinstance(error.value, MissingPackageError)
