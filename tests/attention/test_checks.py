"""What tests hold kernels to, shown without a kernel and without a GPU."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from flashmoe_science.attention import reference
from flashmoe_science.operators.attention import OPERATOR

from .cases import GRADIENTS, FeatureCase
from .checks import assert_gradients_right, make_features, problem_of, synchronisation_is_an_error

# Two heads, dropout, an LSE with a gradient, and 30 rows that see no key.
SINKS = next(g.case for g in GRADIENTS if g.why == "dropout-window-sinks" and isinstance(g.case, FeatureCase))


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


def check_sinks(seed: int, *, dropout_scale: bool = True, through_lse: bool = True, rows_without_keys: bool = True):
    """Hold gradients in fp32 to the budget, those of the sinks made of o in 16 bits, as kernels make them.

    What is False is left out of them.
    """
    inputs = OPERATOR.make_inputs(problem_of(SINKS), seed=seed, device="cpu")
    given: dict[str, Any] = {**inputs, **make_features(SINKS, "cpu")}
    generator = torch.Generator().manual_seed(1000 + seed)
    do = torch.randn(given["q"].shape, generator=generator).half()
    dlse = torch.randn(do.shape[:3], generator=generator)
    found = reference.attention_backward(**given, do=do, dlse=dlse)
    found |= {name: found[name].half() for name in "qkv"}
    o, lse = reference.attention(**given)
    delta = ((o if dropout_scale else o * (1 - SINKS.dropout)).half().float() * do.float()).sum(-1)
    if through_lse:
        delta -= dlse
    first = 0 if rows_without_keys else SINKS.seqlen_q - SINKS.seqlen_k
    found["sinks"] = -(delta * torch.exp(given["sinks"][:, None] - lse))[:, :, first:].sum((0, 2))
    assert_gradients_right(found, do=do, dlse=dlse, **given)


@pytest.mark.parametrize("seed", [0, 44, 84, 155, 158, 173])
def test_rounding_of_o_is_within_the_budget_of_sinks(seed):
    """Also where one eager run is next to exact by luck, as with all of these but the first."""
    check_sinks(seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("left_out", ["dropout_scale", "through_lse", "rows_without_keys"])
def test_the_budget_of_sinks_shows_what_is_left_out(left_out, seed):
    with pytest.raises(AssertionError, match="dsinks: max error"):
        check_sinks(seed, **{left_out: False})
