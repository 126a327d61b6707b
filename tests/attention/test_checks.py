"""The helpers of GPU tests that can be shown without a GPU."""

from __future__ import annotations

import warnings

import pytest
import torch

from .checks import synchronisation_is_an_error


def test_synchronisation_is_an_error_only_inside(monkeypatch):
    """What torch warns of is no error, and the mode is put back where a test fails inside."""
    modes: list[int | str] = [0]

    def set_mode(mode: int | str) -> None:
        warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all", stacklevel=1)
        modes.append(mode)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with pytest.raises(ZeroDivisionError):
        _raise_inside(ZeroDivisionError())
    assert modes == [0, "error", 0]
    with pytest.raises(UserWarning, match="of another kind"):
        _raise_inside(None)
    assert modes[-1] == 0


def _raise_inside(error: Exception | None) -> None:
    with synchronisation_is_an_error():
        if error is not None:
            raise error
        warnings.warn("of another kind", stacklevel=1)
