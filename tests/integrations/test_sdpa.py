"""The drop-in for PyTorch's attention, against PyTorch's."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit

from flashmoe_science import InputError, UnsupportedError, flash_attention
from flashmoe_science.integrations.sdpa import scaled_dot_product_attention

from ..exhaustive import all_but_some_with
from .layouts import LAYOUTS, laid_out


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(6, 6), (4, 9), (9, 4), (1, 5), (5, 1)])
def test_lengths_and_masks(seqlen_q, seqlen_k, is_causal):
    """Causal is aligned top-left there."""
    q, k, v = torch.randn(2, 4, seqlen_q, 8), torch.randn(2, 4, seqlen_k, 8), torch.randn(2, 4, seqlen_k, 16)
    for scale in (None, 0.7):
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
        found = scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
        torch.testing.assert_close(found, expected)
        found = scaled_dot_product_attention(q[0], k[0], v[0], is_causal=is_causal, scale=scale)
        torch.testing.assert_close(found, expected[0])


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (2, 1, 5, 7), (1, 4, 5, 7), (2, 4, 5, 7), (4, 5, 7), (5, 1)])
def test_masks(shape):
    """Boolean and added, of every shape that expands."""
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 8)
    added = torch.randn(shape)
    seen = added > 0
    seen[..., 0] = True  # each row sees a key
    for mask in (added, seen):
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        torch.testing.assert_close(scaled_dot_product_attention(q, k, v, attn_mask=mask), expected)
    if len(shape) < 4:
        expected = F.scaled_dot_product_attention(q[0], k[0], v[0], attn_mask=seen)
        torch.testing.assert_close(scaled_dot_product_attention(q[0], k[0], v[0], attn_mask=seen), expected)


def test_rows_without_keys_are_0():
    q, k, v = (torch.randn(1, 1, 3, 8) for _ in range(3))
    mask = torch.tensor([[True, True, False], [False, False, False], [True, False, True]])
    o = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert torch.equal(o[:, :, 1], torch.zeros(1, 1, 8))
    added = torch.where(mask, 0.0, -math.inf)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, attn_mask=added), o)


def test_gqa():
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), expected)
    message = r"key must have batch and heads that expand with \[2, 6\], got \[2, 2\]\nhint: enable_gqa=True"
    with pytest.raises(InputError, match=message):
        scaled_dot_product_attention(q, k, v)
    expected = F.scaled_dot_product_attention(q, k, v[:, :1], enable_gqa=True)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v[:, :1], enable_gqa=True), expected)


# Batch and heads of query, key and value, and whether heads are shared.
LEADING: dict[str, tuple[Any, Any, Any, bool]] = {
    "no batch": ((4,), (4,), (4,), False),
    "neither batch nor heads": ((), (), (), False),
    "two axes of batches": ((3, 2, 4), (3, 2, 4), (3, 2, 4), False),
    "one batch of keys": ((2, 4), (1, 4), (1, 4), False),
    "one head of keys": ((2, 4), (2, 1), (2, 1), False),
    "one head of values": ((2, 4), (2, 4), (2, 1), False),
    "one query": ((1, 1), (2, 4), (2, 4), False),
    "keys without a batch": ((2, 4), (4,), (4,), False),
    "values alone have a batch": ((4,), (4,), (2, 4), False),
    "queries without heads": ((), (2, 4), (2, 4), False),
    "expanded in two axes": ((3, 1, 4), (1, 2, 4), (2, 1), False),
    "shared heads, one batch": ((2, 4), (1, 2), (1, 2), True),
    "shared heads, no batch": ((4,), (2,), (2,), True),
    "shared heads, two axes of batches": ((3, 1, 4), (1, 2, 2), (2, 1), True),
}


WAYS = ("plain", "causal", "mask", "seen", "scale")
EXPANDED = itertools.product(LEADING, WAYS, (torch.float32, torch.float64))


@pytest.mark.parametrize(
    ("why", "way", "dtype"),
    all_but_some_with(EXPANDED, lambda case: [case[1:], (case[0], "mask") if case[1] == "mask" else case[0]]),
)
def test_batch_and_heads_expand(why, way, dtype):
    """Outputs and gradients, of any number of axes."""
    *leading, enable_gqa = LEADING[why]
    sizes = ((5, 8), (7, 8), (7, 16))
    tensors = [torch.randn(*a, *b, dtype=dtype).requires_grad_() for a, b in zip(leading, sizes, strict=True)]
    added = torch.randn(5, 7, dtype=dtype)
    seen = added > 0
    seen[:, 0] = True
    ways: dict[str, dict[str, Any]] = {
        "plain": {}, "causal": {"is_causal": True}, "mask": {"attn_mask": added}, "seen": {"attn_mask": seen},
        "scale": {"scale": np.float32(0.3)},
    }  # fmt: skip
    q, k, v = tensors
    expected = F.scaled_dot_product_attention(q, k, v, **ways[way], enable_gqa=enable_gqa)
    found = scaled_dot_product_attention(q, k, v, **ways[way], enable_gqa=enable_gqa)
    torch.testing.assert_close(found, expected)
    asked = torch.randn_like(expected)
    for got, right in zip(
        torch.autograd.grad(found, tensors, asked), torch.autograd.grad(expected, tensors, asked), strict=True
    ):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 2, 4, 5, 7), (3, 1, 1, 5, 7), (1, 2, 4, 1, 7), (4, 5, 7)])
def test_masks_of_five_dimensions(shape):
    q, k, v = torch.randn(3, 2, 4, 5, 8), torch.randn(3, 2, 4, 7, 8), torch.randn(3, 2, 4, 7, 8)
    mask = torch.randn(shape)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, attn_mask=mask), expected)


@pytest.mark.parametrize("dropout_p", [1, 1.0, np.float32(1), torch.tensor(1.0)])
def test_all_may_be_dropped(dropout_p):
    """Nothing is left, and no gradient."""
    q, k, v = (torch.randn(2, 4, 5, 8, requires_grad=True) for _ in range(3))
    o = scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
    assert torch.equal(o, F.scaled_dot_product_attention(q, k, v, dropout_p=1.0))
    assert not any(gradient.any() for gradient in torch.autograd.grad(o.sum(), (q, k, v)))


def test_dropout_in_fp64():
    q, k, v = (torch.randn(1, 2, 6, 8, dtype=torch.float64) for _ in range(3))
    torch.manual_seed(1)
    expected = flash_attention(q.float(), k.float(), v.float(), dropout_p=torch.tensor(0.5).item())
    torch.manual_seed(1)
    found = scaled_dot_product_attention(q, k, v, dropout_p=torch.tensor(0.5))  # type: ignore[arg-type]
    torch.testing.assert_close(found.float(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_masks_on_the_cpu_are_copied(dtype):
    q, k, v = (torch.randn(2, 4, 33, 64, device="cuda", dtype=dtype) for _ in range(3))
    seen = torch.rand(33, 33) > 0.5
    seen[:, 0] = True
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen.cuda())
    found = scaled_dot_product_attention(q, k, v, attn_mask=seen)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_the_signature_is_that_of_pytorch():
    """PyTorch's is built in; its documentation starts with it."""
    parameters = inspect.signature(scaled_dot_product_attention).parameters.values()
    ours = ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in parameters)
    documented = (F.scaled_dot_product_attention.__doc__ or "").partition("(")[2].partition(")")[0]
    assert ours == " ".join(documented.split())


def test_dropout():
    """That of ``flash_attention``, of 3 and 4 dimensions; on average, what PyTorch gives without."""
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    torch.manual_seed(1)
    expected = flash_attention(q, k, v, causal=True, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.5), expected)
    torch.manual_seed(1)
    assert torch.equal(scaled_dot_product_attention(q[0], k[0], v[0], is_causal=True, dropout_p=0.5), expected[0])
    mask = torch.randn(6, 6)
    many = [scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.5) for _ in range(2000)]
    plain = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    deviation = torch.stack(many).std(0) / 2000**0.5
    assert ((torch.stack(many).mean(0) - plain).abs() < 6 * deviation + 1e-6).all()


def _tensors(**changes: Any) -> dict[str, Any]:
    tensors = {"query": torch.randn(2, 4, 4, 8), "key": torch.randn(2, 2, 5, 8), "value": torch.randn(2, 2, 5, 16)}
    return {**tensors, "enable_gqa": True, **changes}


def _refused(message: str, **given: Any) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        scaled_dot_product_attention(**given)


@pytest.mark.parametrize("value", ["x", [1], 1, None, np.ones(2), torch.ones(2)], ids=str)
@pytest.mark.parametrize("name", ["is_causal", "enable_gqa"])
def test_flags_are_true_or_false(name, value):
    _refused(f"{name} must be True or False, got {value!r}", **_tensors(**{name: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": "x"}, "scale must be a number or None, got str"),
        ({"scale": True}, "scale must be a number or None, got bool"),
        ({"scale": np.ones(2)}, "scale must be a number or None, got ndarray"),
        ({"scale": math.inf}, "scale must be finite in fp32, so at most 2.36e+38 in size, got inf"),
        ({"scale": math.nan}, "scale must be finite in fp32, so at most 2.36e+38 in size, got nan"),
        (
            {"scale": 10**5000},
            "scale must be finite in fp32, so at most 2.36e+38 in size, got int too long to be printed",
        ),
        ({"dropout_p": 1.5}, "dropout_p must be at least 0 and less than 1, got 1.5"),
        ({"dropout_p": False}, "dropout_p must be a number, 0 for no dropout, got bool"),
        ({"dropout_p": torch.zeros(2)}, "dropout_p must be a number, 0 for no dropout, got Tensor"),
    ],
)
def test_numbers_are_numbers(changes, message):
    _refused(message, **_tensors(**changes))


@pytest.mark.parametrize("is_causal", [False, True])
def test_key_and_value_are_as_long(is_causal):
    """Also where causal leaves the last keys unread."""
    message = "value must have as many keys as key, 5, got 9"
    given = _tensors(value=torch.randn(2, 2, 9, 8), is_causal=is_causal)
    _refused(message, **given)
    _refused(message, **{name: each[0] if isinstance(each, torch.Tensor) else each for name, each in given.items()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": None}, "value must be a torch.Tensor, got NoneType"),
        ({"query": [1]}, "query must be a torch.Tensor, got list"),
        ({"query": torch.zeros(8)}, "query must have 2 dimensions [S, D] or more, got shape [8]"),
        (
            {"key": torch.zeros(3, 2, 5, 8)},
            "key must have batch and heads that expand with [2, 4], got [3, 2]",
        ),
        (
            {"value": torch.zeros(3, 1, 2, 5, 8), "query": torch.zeros(2, 2, 4, 4, 8)},
            "value must have batch and heads that expand with [2, 2, 4], got [3, 1, 2]",
        ),
        (
            {"key": torch.zeros(2, 3, 5, 8)},
            "key must have a number of heads that divides those of query, 4, got 3",
        ),
        ({"key": torch.zeros(2, 2, 5, 4)}, "key must have as many columns as query, 8, got 4"),
        ({"query": torch.zeros(2, 4, 4, 0)}, "query must have D of 1 or more, got shape [2, 4, 4, 0]"),
        (
            {"query": torch.zeros(2, 4, 4, 8).int()},
            "query must be float16, bfloat16, float32 or float64, got torch.int32",
        ),
        (
            {"query": torch.zeros(2, 4, 4, 8).double()},
            "key must have the dtype of query, torch.float64, got torch.float32",
        ),
        (
            {"attn_mask": torch.zeros(4, 5).double()},
            "attn_mask must be bool, float16, bfloat16 or float32, got torch.float64",
        ),
        (
            {"key": torch.zeros(2, 2, 5, 8).half()},
            "key must have the dtype of query, torch.float32, got torch.float16",
        ),
        (
            {"value": torch.zeros(2, 2, 5, 8, device="meta")},
            "value must be on the device of query, cpu, got meta",
        ),
        (
            {"key": torch.zeros(2, 2, 5, 8, dtype=torch.complex64).conj().imag},
            "key must not be a negative view, got one (is_neg()): call resolve_neg()",
        ),
    ],
)
def test_tensors_that_do_not_fit(changes, message):
    _refused(message, **_tensors(**changes))


def test_tensors_without_a_batch_are_refused_by_the_shapes_they_have():
    q, k, v = torch.zeros(2, 4, 8), torch.zeros(2, 5, 8), torch.zeros(2, 5, 8)
    _refused("key must have as many columns as query, 8, got 4", query=q, key=torch.zeros(2, 5, 4), value=v)
    for shape in ([3, 4, 5], [1, 2, 4, 5], [4, 6]):
        message = f"attn_mask must expand to [2, 4, 5], got {shape}"
        _refused(message, query=q, key=k, value=v, attn_mask=torch.zeros(shape))


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([1], "attn_mask must be a torch.Tensor or None, got list"),
        (1, "attn_mask must be a torch.Tensor or None, got int"),
        (np.ones(2), "attn_mask must be a torch.Tensor or None, got ndarray"),
        (torch.zeros(4, 5, dtype=torch.int64), "attn_mask must be bool, float16, bfloat16 or float32, got torch.int64"),
        (torch.zeros(4, 5, device="meta"), "attn_mask must be on the device of query, cpu, got meta"),
        (torch.zeros(4, 5).bool().to("meta"), "attn_mask must be on the device of query, cpu, got meta"),
        (
            torch.zeros(4, 5, dtype=torch.complex64).conj().imag,
            "attn_mask must not be a negative view, got one (is_neg()): call resolve_neg()",
        ),
    ],
)
def test_masks_that_are_none(mask, message, batched):
    given = {name: each if batched or name == "enable_gqa" else each[0] for name, each in _tensors().items()}
    _refused(message, **given, attn_mask=mask)


def test_masks_that_do_not_fit():
    _refused("attn_mask must be None with is_causal, got both", **_tensors(attn_mask=torch.ones(4, 5), is_causal=True))
    _refused("attn_mask must expand to [2, 4, 4, 5], got [4, 6]", **_tensors(attn_mask=torch.ones(4, 6)))


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask"])
def test_tensors_are_dense(name, kind):
    tensor, words = laid_out(kind)
    _refused(f"{name} must be dense, got {words}", **_tensors(**{name: tensor}))


def test_autocast_makes_dtypes_one():
    given = _tensors()
    half = {**given, "key": given["key"].bfloat16()}
    with torch.autocast("cpu", torch.bfloat16):
        assert scaled_dot_product_attention(**half).dtype == torch.bfloat16
        _refused(
            "key must have the dtype of query, torch.float32, got torch.float16",
            **{**given, "key": given["key"].half()},
        )


def test_graphs_refuse_the_same():
    given = _tensors(attn_mask=torch.randn(4, 5))
    whole = torch.compile(scaled_dot_product_attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(**given), scaled_dot_product_attention(**given))
    with pytest.raises(InputError, match=r"^value must have as many keys as key, 5, got 9$"):
        torch.compile(scaled_dot_product_attention, backend="eager")(**_tensors(value=torch.randn(2, 2, 9, 8)))


def test_what_only_the_kernels_functions_know_is_said_by_the_same_names(monkeypatch):
    def refuse(*_tensors: torch.Tensor, **_options: Any) -> None:
        raise UnsupportedError("q, k and softmax_scale are refused", hint="pass another v")

    monkeypatch.setattr("flashmoe_science.integrations.sdpa.flash_attention", refuse)
    with pytest.raises(UnsupportedError, match=r"^query, key and scale are refused\nhint: pass another value$"):
        scaled_dot_product_attention(**_tensors())
