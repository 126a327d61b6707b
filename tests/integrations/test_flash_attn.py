"""The functions of flash-attn: their signatures, and what they return."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest
import torch

from flashmoe_science import InputError, UnsupportedError
from flashmoe_science.attention import reference
from flashmoe_science.integrations import flash_attn

from .layouts import LAYOUTS, laid_out

_OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
_LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
# Source: flash_attn/flash_attn_interface.py of flash-attn, tag v2.8.3.
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {_OPTIONS}",
    "flash_attn_qkvpacked_func": f"qkv, {_OPTIONS}",
    "flash_attn_kvpacked_func": f"q, kv, {_OPTIONS}",
    "flash_attn_varlen_func": f"q, k, v, {_LENGTHS}, {_OPTIONS}, block_table=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {_OPTIONS}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {_LENGTHS}, {_OPTIONS}",
}


CACHE_SIGNATURE = (
    "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, "
    "cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
)


def _signature(function: Any) -> str:
    """Return names, order and defaults."""
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in parameters)


def test_signatures_are_those_of_flash_attn():
    signatures = {**SIGNATURES, "flash_attn_with_kvcache": CACHE_SIGNATURE}
    assert {name: _signature(getattr(flash_attn, name)) for name in flash_attn.__all__} == signatures


def test_signatures_are_those_of_the_flash_attn_that_is_installed():
    original = pytest.importorskip("flash_attn", reason="flash-attn is not installed", exc_type=ImportError)
    if not original.__version__.startswith("2.8."):
        pytest.skip(f"flash-attn is {original.__version__}, not 2.8")
    for name in flash_attn.__all__:
        assert _signature(getattr(flash_attn, name)) == _signature(getattr(original, name))


def test_code_that_asks_for_the_version_gets_that_of_the_signatures():
    assert flash_attn.__version__.startswith("2.8.")


@pytest.fixture
def qkv() -> torch.Tensor:
    return torch.randn(2, 9, 3, 4, 8)


def test_dense_functions_agree_with_the_reference(qkv):
    q, k, v = qkv.unbind(2)
    slopes = torch.rand(4)
    options: dict[str, Any] = {
        "causal": True,
        "window_size": (3, -1),
        "softcap": 2.0,
        "alibi_slopes": slopes,
        "softmax_scale": 0.3,
    }
    expected, lse = reference.attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        causal=True, window=(3, -1), softcap=2.0, alibi=slopes, softmax_scale=0.3,
    )  # fmt: skip
    results = [
        flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options),
        flash_attn.flash_attn_qkvpacked_func(qkv, return_attn_probs=True, **options),
        flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], return_attn_probs=True, **options),
    ]
    for o, found_lse, probabilities in results:
        torch.testing.assert_close(o, expected.transpose(1, 2))
        torch.testing.assert_close(found_lse, lse)
        assert (probabilities.shape, probabilities.dtype) == ((0,), q.dtype)
        assert o.is_contiguous()
    alone = flash_attn.flash_attn_func(q, k, v, 0.0, 0.3, True, (3, -1), 2.0, slopes, True)
    assert torch.equal(alone, results[0][0])


def test_packed_functions_agree_with_the_reference(qkv):
    packed = qkv[0]
    q, k, v = packed.unbind(1)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    expected, lse = reference.attention_varlen(q, k, v, ends, ends, causal=True)
    results = [
        flash_attn.flash_attn_varlen_func(q, k, v, ends, ends, 5, 5, causal=True, return_attn_probs=True),
        flash_attn.flash_attn_varlen_qkvpacked_func(packed, ends, 5, causal=True, return_attn_probs=True),
        flash_attn.flash_attn_varlen_kvpacked_func(
            q, packed[:, 1:], ends, ends, 5, 5, causal=True, return_attn_probs=True
        ),
    ]
    for o, found_lse, probabilities in results:
        torch.testing.assert_close(o, expected)
        torch.testing.assert_close(found_lse, lse)
        assert (probabilities.shape, probabilities.dtype) == ((0,), q.dtype)
    assert torch.equal(flash_attn.flash_attn_varlen_func(q, k, v, ends, ends, 5, 5, causal=True), results[0][0])


def test_dropout(qkv):
    """Every function drops what ``flash_attention`` drops after the same ``torch.manual_seed``, in training too."""
    qkv = qkv.requires_grad_()
    q, k, v = qkv.unbind(2)
    packed, ends = qkv.flatten(0, 1), torch.tensor([0, 9, 18], dtype=torch.int32)
    flat_q, flat_k, flat_v = packed.unbind(1)
    torch.manual_seed(5)
    seed = torch.randint(2**62, (2,))
    expected, _ = reference.attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True, dropout_p=0.4, dropout_seed=seed
    )
    expected = expected.transpose(1, 2)
    (gradient,) = torch.autograd.grad(expected.sum(), qkv)
    calls: dict[str, tuple[Any, ...]] = {
        "flash_attn_func": (q, k, v),
        "flash_attn_qkvpacked_func": (qkv,),
        "flash_attn_kvpacked_func": (q, qkv[:, :, 1:]),
        "flash_attn_varlen_func": (flat_q, flat_k, flat_v, ends, ends, 9, 9),
        "flash_attn_varlen_qkvpacked_func": (packed, ends, 9),
        "flash_attn_varlen_kvpacked_func": (flat_q, packed[:, 1:], ends, ends, 9, 9),
    }
    for name, given in calls.items():
        torch.manual_seed(5)
        o = getattr(flash_attn, name)(*given, dropout_p=0.4, causal=True)
        torch.testing.assert_close(o.view_as(expected), expected)
        torch.testing.assert_close(torch.autograd.grad(o.sum(), qkv)[0], gradient)
        assert not torch.allclose(o, getattr(flash_attn, name)(*given, dropout_p=0.4, causal=True)), "the next draw"


def test_packed_queries_attend_to_a_paged_cache():
    """As serving code calls it: prompts of some sequences, one token of others, and a padded table."""
    lengths_q, lengths_k = torch.tensor([4, 1, 0, 7]), torch.tensor([4, 21, 3, 30])
    starts_q, starts_k = (
        torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int() for lengths in (lengths_q, lengths_k)
    )
    k_cache, v_cache = torch.randn(2, 40, 8, 2, 16).unbind(0)
    table = torch.randperm(40)[:20].reshape(4, 5).int()
    q, k, v = torch.randn(12, 4, 16), torch.empty(58, 2, 16), torch.empty(58, 2, 16)
    for b, (start, length) in enumerate(zip(starts_k.tolist(), lengths_k.tolist(), strict=False)):
        for n in range(length):
            k[start + n], v[start + n] = (cache[table[b, n // 8], n % 8] for cache in (k_cache, v_cache))
        table[b, -(-length // 8) :] = -1
    slopes = torch.rand(4)
    lse: torch.Tensor
    o, lse, probs = flash_attn.flash_attn_varlen_func(
        q, k_cache, v_cache, starts_q, starts_k, 7, 30, 0.0, 0.3, True, (9, -1), 2.0, slopes,
        return_attn_probs=True, block_table=table,
    )  # fmt: skip
    expected, expected_lse = reference.attention_varlen(
        q, k, v, starts_q, starts_k, causal=True, window=(9, -1), softcap=2.0, alibi=slopes, softmax_scale=0.3
    )
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert probs.numel() == 0


def test_what_is_not_served_raises_by_name(qkv):
    q, k, v = qkv.unbind(2)
    ends = torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match=r"return_attn_probs must be False with dropout_p of 0.1"):
        flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], dropout_p=0.1, return_attn_probs=True)
    with pytest.raises(UnsupportedError, match=r"return_attn_probs must be False with dropout_p of 0.1"):
        flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 9, 9, 0.1, return_attn_probs=True)
    with pytest.raises(InputError, match=r"dropout_p must be at least 0 and less than 1, got 1.0"):
        flash_attn.flash_attn_func(q, k, v, dropout_p=1.0)
    table = torch.zeros(1, 9, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="dropout_p must be 0 with a block_table"):
        flash_attn.flash_attn_varlen_func(q[0], k, v, ends, ends, 9, 9, dropout_p=0.1, block_table=table)
    with pytest.raises(InputError, match=r"k must have 4 dimensions \[pages, page_size, HK, D\] with a block_table"):
        flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 9, 9, block_table=table)
    with pytest.raises(
        InputError, match=r"qkv must have shape \[B, S, 3, H, D\] = \[2, 9, 3, 4, 8\], got \[2, 9, 2, 4, 8\]"
    ):
        flash_attn.flash_attn_qkvpacked_func(qkv[:, :, :2])
    with pytest.raises(InputError, match=r"kv must have 4 dimensions \[Tk, 2, HK, D\], got shape \[2, 9, 3, 4, 8\]"):
        flash_attn.flash_attn_varlen_kvpacked_func(q[0], qkv, ends, ends, 9, 9)
    with pytest.raises(InputError, match=r"q must have 4 dimensions \[B, Sq, H, D\], got shape \[9, 4, 8\]"):
        flash_attn.flash_attn_func(q[0], k, v)
    with pytest.raises(InputError, match=r"k must be a torch.Tensor, got NoneType"):
        flash_attn.flash_attn_func(q, None, v)  # type: ignore[call-overload]


def _call(function: str, **changes: Any) -> dict[str, Any]:
    """Return arguments that the function takes, with changes."""
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 5, "max_seqlen_k": 5}
    q, kv, qkv = torch.randn(9, 4, 8), torch.randn(9, 2, 2, 8), torch.randn(9, 3, 4, 8)
    given: dict[str, dict[str, Any]] = {
        "flash_attn_func": {"q": q[None], "k": kv[None, :, 0], "v": kv[None, :, 1]},
        "flash_attn_qkvpacked_func": {"qkv": qkv[None]},
        "flash_attn_kvpacked_func": {"q": q[None], "kv": kv[None]},
        "flash_attn_varlen_func": {"q": q, "k": kv[:, 0], "v": kv[:, 1], **lengths},
        "flash_attn_varlen_qkvpacked_func": {"qkv": qkv, "cu_seqlens": starts, "max_seqlen": 5},
        "flash_attn_varlen_kvpacked_func": {"q": q, "kv": kv, **lengths},
    }
    return {**given[function], **changes}


def _refused(function: str, message: str, **changes: Any) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        getattr(flash_attn, function)(**_call(function, **changes))


@pytest.mark.parametrize("function", SIGNATURES)
def test_calls_that_are_refused_below_are_served_without_the_change(function):
    getattr(flash_attn, function)(**_call(function))


@pytest.mark.parametrize("value", ["x", [1], np.ones(2), torch.ones(2)], ids=str)
@pytest.mark.parametrize("name", ["causal", "deterministic", "return_attn_probs"])
@pytest.mark.parametrize("function", SIGNATURES)
def test_flags_are_true_or_false(function, name, value):
    _refused(function, f"{name} must be True or False, got {value!r}", **{name: value})


_WINDOW = "window_size must be two integers (left, right), negative for no bound, got "


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_size": None}, f"{_WINDOW}None"),
        ({"window_size": (1,)}, f"{_WINDOW}(1,)"),
        ({"window_size": (1.0, 1)}, f"{_WINDOW}(1.0, 1)"),
        ({"window_size": (True, 1)}, f"{_WINDOW}(True, 1)"),
        ({"window_size": (2**63, 1)}, f"{_WINDOW}({2**63}, 1)"),
        ({"window_size": np.ones(2)}, f"{_WINDOW}array([1., 1.])"),
        ({"softcap": "x"}, "softcap must be a number, 0 for none, got str"),
        ({"softcap": np.ones(2)}, "softcap must be a number, 0 for none, got ndarray"),
        ({"softcap": np.nan}, "softcap must be 0 (none) or more, at most 2.36e+38, got nan"),
        ({"softmax_scale": np.ones(2)}, "softmax_scale must be a number or None, got ndarray"),
        ({"softmax_scale": 1e39}, "softmax_scale must be finite in fp32, so at most 2.36e+38 in size, got 1e+39"),
        ({"dropout_p": torch.ones(2)}, "dropout_p must be a number, 0 for no dropout, got Tensor"),
        ({"dropout_p": -0.5}, "dropout_p must be at least 0 and less than 1, got -0.5"),
        ({"alibi_slopes": [1]}, "alibi_slopes must be a torch.Tensor or None, got list"),
        ({"alibi_slopes": torch.ones(4).int()}, "alibi_slopes must be float16, bfloat16 or float32, got torch.int32"),
        ({"alibi_slopes": torch.ones(8)[::2]}, "alibi_slopes must be contiguous along its last axis, got strides [2]"),
    ],
)
@pytest.mark.parametrize("function", SIGNATURES)
def test_options_have_the_names_of_flash_attn(function, changes, message):
    if "contiguous" in message:
        with pytest.raises(InputError, match=f"^{re.escape(message)}\nhint: "):
            getattr(flash_attn, function)(**_call(function, **changes))
    else:
        _refused(function, message, **changes)


@pytest.mark.parametrize("function", SIGNATURES)
def test_slopes_fit_the_heads(function):
    given = _call(function)
    batch = 2 if "varlen" in function else 1
    message = f"alibi_slopes must have shape [H] = [4] or [B, H] = [{batch}, 4], got [3]"
    _refused(function, message, alibi_slopes=torch.ones(3))
    where = "qkv" if "qkv" in given else "q"
    message = f"alibi_slopes must be on the device of {where}, cpu, got meta"
    _refused(function, message, alibi_slopes=torch.ones(4, device="meta"))
    with pytest.raises(UnsupportedError, match=r"^alibi_slopes must not require grad: there is no gradient of it\n"):
        getattr(flash_attn, function)(**_call(function, alibi_slopes=torch.ones(4, requires_grad=True)))


@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
        (
            "flash_attn_func",
            {"k": torch.zeros(2, 9, 2, 8)},
            "k must have shape [B, Sk, HK, D] = [1, 9, 2, 8], got [2, 9, 2, 8]",
        ),
        (
            "flash_attn_func",
            {"v": torch.zeros(1, 9, 4, 8)},
            "v must have shape [B, Sk, HK, DV] = [1, 9, 2, 8], got [1, 9, 4, 8]",
        ),
        ("flash_attn_func", {"v": torch.zeros(1, 8, 2, 8)}, "v must have as many keys as k, 9, got 8"),
        (
            "flash_attn_func",
            {"q": torch.zeros(1, 9, 3, 8)},
            "k must have a number of heads that divides those of q, 3, got 2",
        ),
        (
            "flash_attn_kvpacked_func",
            {"kv": torch.zeros(1, 9, 2, 2, 4)},
            "kv must have shape [B, Sk, 2, HK, D] = [1, 9, 2, 2, 8], got [1, 9, 2, 2, 4]",
        ),
        (
            "flash_attn_kvpacked_func",
            {"kv": torch.zeros(1, 9, 2, 3, 8)},
            "kv must have a number of heads that divides those of q, 4, got 3",
        ),
        (
            "flash_attn_kvpacked_func",
            {"kv": torch.zeros(1, 9, 2, 2, 8, device="meta")},
            "kv must be on the device of q, cpu, got meta",
        ),
        (
            "flash_attn_kvpacked_func",
            {"kv": torch.zeros(1, 9, 2, 2, 8).half()},
            "kv must have the dtype of q, torch.float32, got torch.float16",
        ),
        ("flash_attn_qkvpacked_func", {"qkv": None}, "qkv must be a torch.Tensor, got NoneType"),
        (
            "flash_attn_qkvpacked_func",
            {"qkv": torch.zeros(1, 9, 3, 4, 8).int()},
            "qkv must be float16, bfloat16 or float32, got torch.int32",
        ),
        (
            "flash_attn_varlen_kvpacked_func",
            {"kv": torch.zeros(9, 2, 2, 8, device="meta")},
            "kv must be on the device of q, cpu, got meta",
        ),
        ("flash_attn_varlen_func", {"v": torch.zeros(8, 2, 8)}, "v must have as many tokens as k, 9, got 8"),
        (
            "flash_attn_varlen_func",
            {"k": torch.zeros(9, 2, 4)},
            "k must have shape [Tk, HK, D] = [9, 2, 8], got [9, 2, 4]",
        ),
    ],
)
def test_tensors_are_refused_by_their_own_shapes(function, changes, message):
    _refused(function, message, **changes)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("function", SIGNATURES)
def test_tensors_are_dense(function, kind):
    tensor, words = laid_out(kind)
    names = [name for name, value in _call(function).items() if isinstance(value, torch.Tensor)]
    for name in (*names, "alibi_slopes", *(["block_table"] if function == "flash_attn_varlen_func" else [])):
        if name == "block_table":
            pages = torch.zeros(2, 9, 2, 8)
            _refused(function, f"{name} must be dense, got {words}", k=pages, v=pages, block_table=tensor)
        else:
            _refused(function, f"{name} must be dense, got {words}", **{name: tensor})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([0, 9], "must be a torch.Tensor, got list"),
        (torch.tensor([0, 9]), "must be int32, got torch.int64"),
        (torch.zeros(1, 3, dtype=torch.int32), "must have shape [B + 1], got [1, 3]"),
        (torch.zeros(0, dtype=torch.int32), "must have shape [B + 1], so at least one element, got [0]"),
        (torch.zeros(3, dtype=torch.int32, device="meta"), "must be on the device of {}, cpu, got meta"),
        (torch.tensor([0, 4, 10], dtype=torch.int32), "must be from 0 to 9, the tokens of {}, got 0 to 10"),
        (torch.tensor([5, 4, 9], dtype=torch.int32), "must not decrease, got 5 and then 4 at index 1"),
    ],
)
def test_starts_have_the_name_that_the_caller_gave_them(value, message):
    packed = message.format("qkv")
    _refused("flash_attn_varlen_qkvpacked_func", f"cu_seqlens {packed}", cu_seqlens=value)
    for function in ("flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func"):
        _refused(function, f"cu_seqlens_q {message.format('q')}", cu_seqlens_q=value)
    _refused(
        "flash_attn_varlen_func", "cu_seqlens_k must be int32, got torch.int64", cu_seqlens_k=torch.zeros(3).long()
    )
    message = "cu_seqlens_k must have shape [B + 1] = [3], got [2]"
    _refused("flash_attn_varlen_kvpacked_func", message, cu_seqlens_k=torch.tensor([0, 9], dtype=torch.int32))
    many = torch.tensor([0, 4, 10], dtype=torch.int32)
    message = "cu_seqlens_k must be from 0 to 9, the tokens of kv, got 0 to 10"
    _refused("flash_attn_varlen_kvpacked_func", message, cu_seqlens_k=many, max_seqlen_k=9)


@pytest.mark.parametrize("value", ["x", None, True, -1, 2**31, 5.0, [1]], ids=str)
def test_longest_lengths_are_integers(value):
    message = f"must be an integer from 0 to 2**31 - 1, got {value!r}"
    _refused("flash_attn_varlen_qkvpacked_func", f"max_seqlen {message}", max_seqlen=value)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        _refused("flash_attn_varlen_func", f"{name} {message}", **{name: value})
    message = "max_seqlen must be at least 5, the length of sequence 1, got 4"
    _refused("flash_attn_varlen_qkvpacked_func", message, max_seqlen=4)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([0], "block_table must be a torch.Tensor, got list"),
        (torch.zeros(2, 1), "block_table must be int32, got torch.float32"),
        (torch.zeros(2, dtype=torch.int32), "block_table must have shape [B, P] = [2, P], got [2]"),
        (torch.zeros(3, 1, dtype=torch.int32), "block_table must have shape [B, P] = [2, P], got [3, 1]"),
        (
            torch.zeros(2, 0, dtype=torch.int32),
            "block_table must have pages for max_seqlen_k = 5 keys, got 0 of 9 positions, which hold 0",
        ),
        (torch.full((2, 1), 7, dtype=torch.int32), "block_table[0, 0] must be from 0 to 1, got 7"),
    ],
)
def test_tables_are_refused_by_their_name(table, message):
    pages = torch.zeros(2, 9, 2, 8)
    _refused("flash_attn_varlen_func", message, k=pages, v=pages, block_table=table)


@pytest.mark.parametrize("with_lse", [False, True])
def test_gradients_of_pages_are_refused_where_they_are_asked_for(with_lse):
    pages, table = torch.randn(2, 9, 2, 8), torch.zeros(2, 1, dtype=torch.int32)
    given = _call("flash_attn_varlen_func", k=pages, v=pages.mT.contiguous().mT, block_table=table)
    expected = flash_attn.flash_attn_varlen_func(**given)
    found = flash_attn.flash_attn_varlen_func(
        **{**given, "q": given["q"].clone().requires_grad_()}, return_attn_probs=with_lse
    )
    o = found[0] if with_lse else found
    assert torch.equal(o.detach(), expected)
    with pytest.raises(UnsupportedError, match=r"^there is no backward with a block_table, and .* required of q\n"):
        o.sum().backward()


NUMBERS: dict[str, Any] = {
    "python": lambda value: value,
    "numpy": np.array,
    "numpy scalar": lambda value: np.array(value)[()],
    "torch": torch.tensor,
}


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("function", SIGNATURES)
def test_options_may_be_scalars_of_any_library(function, kind):
    """As flash-attn takes them: vision models pass ``(cu[1:] - cu[:-1]).max()``."""
    given, number = _call(function), NUMBERS[kind]
    options: dict[str, Any] = {
        "softmax_scale": 0.5, "causal": 1, "window_size": (3, 2), "softcap": 2.0, "dropout_p": 0.0, "deterministic": 1
    }  # fmt: skip
    expected = getattr(flash_attn, function)(**given, **{**options, "causal": True, "deterministic": True})
    scalars = {name: number(value) for name, value in options.items() if name != "window_size"}
    longest = {name: number(value) for name, value in given.items() if name.startswith("max_seqlen")}
    windows = [(3, 2), [3, 2], (number(3), number(2)), np.array([3, 2]), torch.tensor([3, 2])]
    for window in windows:
        found = getattr(flash_attn, function)(**{**given, **longest}, **scalars, window_size=window)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("function", SIGNATURES)
def test_what_is_negative_or_none_is_none(function):
    given = _call(function)
    call = getattr(flash_attn, function)
    expected = call(**given)
    assert torch.equal(call(**given, softcap=None, causal=None, window_size=(-7, np.int32(-2))), expected)
    assert torch.equal(call(**given, softcap=-1.0, causal=0, deterministic=None, return_attn_probs=0), expected)
    assert torch.equal(call(**given, window_size=torch.tensor([2, -9])), call(**given, window_size=(2, -1)))


def test_whole_graphs_compile(qkv):
    """Each function is one node of a graph, with its outputs as they are."""
    ends, lengths = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([5, 3], dtype=torch.int32)
    caches = torch.randn(2, 2, 12, 4, 8)
    table = torch.tensor([[1], [0]], dtype=torch.int32)  # of pages of 9

    def run(qkv: torch.Tensor, caches: torch.Tensor) -> tuple[Any, ...]:
        q, k, v = qkv.unbind(2)
        step = (q[:, :1], caches[0], caches[1], k[:, :1], v[:, :1])
        return (
            flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True),
            flash_attn.flash_attn_qkvpacked_func(qkv, window_size=(3, 0)),
            flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], softcap=2.0),
            flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 5, 5, return_attn_probs=True),
            flash_attn.flash_attn_varlen_qkvpacked_func(qkv[0], ends, 5, causal=True),
            flash_attn.flash_attn_varlen_kvpacked_func(q[0], qkv[0, :, 1:], ends, ends, 5, 5),
            flash_attn.flash_attn_varlen_func(q[0], k, v, ends, ends, 5, 5, causal=True, block_table=table),
            flash_attn.flash_attn_with_kvcache(*step, cache_seqlens=lengths, causal=True, return_softmax_lse=True),
            flash_attn.flash_attn_with_kvcache(*step, cache_seqlens=7),
        )

    expected_caches, found_caches = caches.clone(), caches.clone()
    expected = run(qkv, expected_caches)
    found = torch.compile(run, fullgraph=True, backend="eager")(qkv, found_caches)
    torch.testing.assert_close(found, expected)
    assert torch.equal(found_caches, expected_caches)
