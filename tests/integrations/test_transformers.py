"""Tiny random models of transformers: our attention against the eager one, logits and tokens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from flashmoe_science import (
    BlockMask,
    InputError,
    UnsupportedError,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kv_cache,
)

pytest.importorskip("transformers", minversion="5.0", reason="transformers is optional")

import transformers

from flashmoe_science.integrations.transformers import attend, register
from flashmoe_science.integrations.transformers_masks import make_mask

from . import models
from .layouts import LAYOUTS, laid_out


@pytest.fixture(autouse=True)
def registered() -> None:
    assert register() == "moe_science"


@pytest.fixture(params=models.CONFIGS)
def pair(request) -> tuple[Any, Any]:
    """Return a model with our attention, and one of the same weights with the eager one."""
    return models.make(request.param, "moe_science"), models.make(request.param, "eager")


def test_prefill(pair):
    """Without padding no mask is made: causal, windows and sinks are options."""
    ours, eager = pair
    tokens = torch.randint(5, 60, (2, 21))
    torch.testing.assert_close(models.logits(ours, tokens), models.logits(eager, tokens), rtol=1e-4, atol=1e-4)


def test_padding_on_the_left(pair):
    """Padding comes as a bias; its own rows are nobody's."""
    tokens, seen = torch.randint(5, 60, (3, 17)), torch.ones(3, 17, dtype=torch.long)
    seen[0, :5], seen[2, :11] = 0, 0
    found, expected = (models.logits(model, tokens, attention_mask=seen) for model in pair)
    torch.testing.assert_close(found[seen.bool()], expected[seen.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(pair, cache):
    """Greedy tokens are the same over more steps than a window has keys, with padding and without."""
    tokens = torch.randint(5, 60, (2, 7))
    seen = torch.ones_like(tokens)
    for padded in (0, 3):
        seen[0, :padded] = 0
        options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
        found, expected = (model.generate(tokens, attention_mask=seen, **options) for model in pair)
        assert torch.equal(found, expected)


def test_chunks_of_a_prompt(pair):
    """A second part of a prompt, with a cache of the first: more keys than rows, aligned to the ends of both."""
    tokens = torch.randint(5, 60, (1, 19))
    results = []
    for model in pair:
        with torch.no_grad():
            first = model(tokens[:, :12], use_cache=True)
            # The cache by its place, behind mask and positions: transformers 5.24 gave its argument another name.
            results.append(model(tokens[:, 12:], None, None, first.past_key_values).logits)
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


def test_windows_make_no_mask(monkeypatch):
    """The layers of Gemma-3 with windows and those without get None, and the former their window."""
    calls = []

    def record(*tensors, **options):
        calls.append(options)
        return flash_attention(*tensors, **options)

    monkeypatch.setattr("flashmoe_science.integrations.transformers.flash_attention", record)
    models.logits(models.make("gemma3", "moe_science"), torch.randint(5, 60, (1, 30)))
    assert {options["window"] for options in calls} == {(5, -1), (-1, -1)}
    assert all(options["bias"] is None and options["causal"] for options in calls)


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_tokens_are_decoded_by_the_kernel_for_it(name, monkeypatch):
    """Every token after the first; sinks, windows and padding too. Where that cannot be, the other one does it."""
    calls = []
    for function in (flash_attention, flash_attention_with_kv_cache):

        def record(*tensors, function=function, **options):
            calls.append((function.__name__, tensors[0].shape[2], options["bias"] is not None))
            return function(*tensors, **options)

        monkeypatch.setattr(f"flashmoe_science.integrations.transformers.{function.__name__}", record)
    model, tokens = models.make(name, "moe_science"), torch.randint(5, 60, (2, 7))
    seen = torch.ones_like(tokens)
    for padded in (0, 3):
        seen[0, :padded] = 0
        calls.clear()
        model.generate(tokens, attention_mask=seen, max_new_tokens=3, do_sample=False)
        steps = [(function, rows) for function, rows, _ in calls]
        assert steps == [("flash_attention", 7)] * 2 + [("flash_attention_with_kv_cache", 1)] * 4
        assert any(biased for *_, biased in calls[2:]) == (padded > 0)
    calls.clear()
    model(tokens[:, :1], use_cache=False)  # gradients are recorded
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(tokens[:, :1], use_cache=False)
    assert [function for function, *_ in calls] == ["flash_attention"] * 4
    calls.clear()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # nothing is cast
        model.bfloat16()(tokens[:, :1], use_cache=False)
    assert [function for function, *_ in calls] == ["flash_attention_with_kv_cache"] * 2


def test_whole_models_compile():
    """A step of generation is one graph, of a prompt and of a token."""
    model = models.make("gpt-oss", "moe_science")
    compiled = torch.compile(model.model.layers[0].self_attn, fullgraph=True, backend="eager")
    for rows in (1, 5):
        states = torch.randn(2, rows, 32)
        angles = torch.randn(2, rows, 8)
        given = {"position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None}
        with torch.no_grad():
            expected, _ = model.model.layers[0].self_attn(states, **given)
            torch.testing.assert_close(compiled(states, **given)[0], expected)


def test_chunked_attention_makes_a_mask():
    """It comes to a mask under the same name as a window, and is none."""
    config = transformers.MistralConfig(sliding_window=None)
    config.attention_chunk_size = 4
    options = {"config": config, "allow_is_causal_skip": True}
    assert make_mask(1, 9, 9, 0, 0, local_size=4, **options) is not None
    config.sliding_window, config.attention_chunk_size = 8, None  # neither of them
    assert make_mask(1, 9, 9, 0, 0, local_size=4, **options) is not None
    config.sliding_window = 4
    assert make_mask(1, 9, 9, 0, 0, local_size=4, **options) is None


def test_packed_sequences():
    """The lengths that transformers gives to FlashAttention: a batch of one row with several sequences."""
    layer = torch.nn.Module()
    q, k, v = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    lengths: dict[str, Any] = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 5, "max_length_k": 5}
    o, weights = attend(layer, q, k, v, None, sliding_window=3, **lengths)
    assert weights is None
    parts = [
        flash_attention(q[:, :, part], k[:, :, part], v[:, :, part], causal=True, window=(2, -1))
        for part in (slice(0, 4), slice(4, 9))
    ]
    torch.testing.assert_close(o, torch.cat(parts, 2).transpose(1, 2))
    with pytest.raises(UnsupportedError, match=r"packed sequences .* need a batch of one and no position_bias"):
        attend(layer, q, k, v, None, position_bias=torch.zeros(1, 1, 9, 9), **lengths)


@pytest.mark.parametrize("name", ["flashmoe_science", "sdpa", "eager", "paged|mine", "someone/kernel"])
def test_names_that_transformers_takes_for_its_own(name):
    with pytest.raises(InputError, match=r'name must not hold "flash", .* got '):
        register(name)


def test_kernels_that_do_not_exist_are_refused_at_once():
    with pytest.raises(InputError, match=r"kernel must be auto or one of .*, got 'forward_tritn'"):
        register(kernel="forward_tritn")


def test_a_kernel_beside_context_parallel_is_refused():
    over_ranks: Any = object()
    with pytest.raises(InputError, match="kernel must be \"auto\" beside context_parallel, got 'forward_triton'"):
        register("over_ranks", kernel="forward_triton", context_parallel=over_ranks)


def test_models_in_training_drop():
    """``attention_dropout`` of the configuration, in training only; the same again after the same seed."""
    model, tokens = models.make("llama", "moe_science"), torch.randint(5, 60, (2, 7))
    plain = models.logits(model, tokens)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert torch.equal(models.logits(model, tokens), plain)
    model.train()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(models.logits(model, tokens))
    assert torch.equal(found[0], found[1])
    for one, other in ((found[0], plain), (found[0], found[2])):
        assert not torch.allclose(one, other)


def test_one_query_and_packed_sequences_drop_too(monkeypatch):
    """What decodes has no dropout: such calls go to the one that has."""
    calls = []
    for function in (flash_attention, flash_attention_varlen):

        def record(*tensors, function=function, **options):
            calls.append((function.__name__, options["dropout_p"]))
            return function(*tensors, **options)

        monkeypatch.setattr(f"flashmoe_science.integrations.transformers.{function.__name__}", record)
    layer, ends = torch.nn.Module(), torch.tensor([0, 1, 3], dtype=torch.int32)
    q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    attend(layer, q, k, v, None, dropout=0.25)
    lengths: dict[str, Any] = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 2, "max_length_k": 2}
    attend(layer, k, k, v, None, dropout=0.25, **lengths)
    assert calls == [("flash_attention", 0.25), ("flash_attention_varlen", 0.25)]


def test_what_is_not_served_raises_by_name():
    layer = torch.nn.Module()
    q, k, v = (torch.randn(1, 2, 3, 8) for _ in range(3))
    with pytest.raises(InputError, match=r"^dropout must be at least 0 and less than 1, got 1.0"):
        attend(layer, q, k, v, None, dropout=1.0)
    for name in ("output_attentions", "cache"):
        with pytest.raises(UnsupportedError, match=f"{name} is not served by flashmoe_science"):
            attend(layer, q, k, v, None, **{name: True})  # type: ignore[arg-type]


def _call(rows: int = 4, **changes: Any) -> dict[str, Any]:
    """Return arguments with changes."""
    tensors = {"query": torch.randn(2, 4, rows, 8), "key": torch.randn(2, 2, 5, 8), "value": torch.randn(2, 2, 5, 8)}
    mask = None if rows in (1, 5) else torch.zeros(1, 1, rows, 5)
    return {"module": torch.nn.Module(), **tensors, "attention_mask": mask, **changes}


def _packed(**changes: Any) -> dict[str, Any]:
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    tensors = {"query": torch.randn(1, 4, 5, 8), "key": torch.randn(1, 2, 5, 8), "value": torch.randn(1, 2, 5, 8)}
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 3, "max_length_k": 3}
    return _call(5, **{**tensors, **lengths, **changes})


def _refused(message: str, given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        attend(**given)


def test_calls_that_are_refused_below_are_served_without_the_change():
    for given in (_call(1), _call(4), _packed()):
        attend(**given)


_FLAG = "must be True or False, got "
_WINDOW = "sliding_window must be an integer of at least 0, or None, got "
_NO_FLAGS: list[Any] = ["x", [], 1, np.ones(2)]
_NO_NUMBERS: list[Any] = [[], {}, False, "x", np.ones(2)]
_NO_WINDOWS: list[Any] = [True, [], [1], (1, 2), "x", -3, 2.0, 2**63, torch.ones(1).bool()]
_OPTIONS: list[tuple[dict[str, Any], str]] = [
    *(({"is_causal": value}, f"is_causal {_FLAG}{value!r}") for value in (*_NO_FLAGS, torch.ones(2))),
    *(({"output_attentions": value}, f"output_attentions {_FLAG}{value!r}") for value in _NO_FLAGS),
    *(({"sliding_window": value}, f"{_WINDOW}{value!r}") for value in _NO_WINDOWS),
    *(
        ({"softcap": value}, f"softcap must be a number, 0 for none, got {type(value).__name__}")
        for value in _NO_NUMBERS
    ),
    ({"softcap": -1}, "softcap must be 0 (none) or more, at most 2.36e+38, got -1"),
    *(
        ({"dropout": value}, f"dropout must be a number, 0 for no dropout, got {type(value).__name__}")
        for value in (*_NO_NUMBERS, "", None)
    ),
    ({"dropout": 1.5}, "dropout must be at least 0 and less than 1, got 1.5"),
    ({"scaling": "x"}, "scaling must be a number or None, got str"),
    ({"scaling": 1e39}, "scaling must be finite in fp32, so at most 2.36e+38 in size, got 1e+39"),
    ({"s_aux": [1.0]}, "s_aux must be a torch.Tensor or None, got list"),
    ({"s_aux": torch.zeros(3)}, "s_aux must have shape [H] = [4], got [3]"),
    ({"s_aux": torch.zeros(4).long()}, "s_aux must be float16, bfloat16 or float32, got torch.int64"),
    ({"s_aux": torch.zeros(4, device="meta")}, "s_aux must be on the device of query, cpu, got meta"),
]


@pytest.mark.parametrize(("changes", "message"), _OPTIONS)
def test_options_have_the_names_of_transformers(changes, message):
    """Of a prompt, of one token and of packed sequences."""
    for given in (_call(4, **changes), _call(1, **changes), _packed(**changes)):
        _refused(message, given)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": None}, "query must be a torch.Tensor, got NoneType"),
        ({"key": [1]}, "key must be a torch.Tensor, got list"),
        ({"query": torch.zeros(())}, "query must have 4 dimensions [B, H, Sq, D], got shape []"),
        ({"value": torch.zeros(5)}, "value must have 4 dimensions [B, HK, Sk, DV], got shape [5]"),
        ({"value": torch.zeros(2, 2, 9, 8)}, "value must have as many keys as key, 5, got 9"),
        ({"key": torch.zeros(3, 2, 5, 8)}, "key must have shape [B, HK, Sk, D] = [2, 2, 5, 8], got [3, 2, 5, 8]"),
        ({"key": torch.zeros(2, 2, 5, 8).half()}, "key must have the dtype of query, torch.float32, got torch.float16"),
        ({"value": torch.zeros(2, 2, 5, 8, device="meta")}, "value must be on the device of query, cpu, got meta"),
        *(
            (
                {"key": torch.zeros(2, heads, 5, 8), "value": torch.zeros(2, heads, 5, 8)},
                f"key must have a number of heads that divides those of query, 4, got {heads}",
            )
            for heads in (0, 3)
        ),
        *(
            ({name: value}, f"{name} must be {message}")
            for name, kinds in (
                ("attention_mask", "bool, float16, bfloat16 or float32"),
                ("position_bias", "float16, bfloat16 or float32"),
            )
            for value, message in (
                ([1], "a torch.Tensor or None, got list"),
                (torch.zeros(2, 4, 1, 5).int(), f"{kinds}, got torch.int32"),
                (torch.zeros(2, 4, 1, 5, device="meta"), "on the device of query, cpu, got meta"),
            )
        ),
        (
            {"position_bias": torch.zeros(5).bool()},
            "position_bias must be float16, bfloat16 or float32, got torch.bool",
        ),
    ],
)
def test_tensors_have_the_names_of_transformers(changes, message, rows):
    _refused(message, _call(rows, **changes))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", ["attention_mask", "position_bias"])
def test_what_is_added_has_a_column_for_every_key(name, rows, is_causal):
    """Also where a cache that is being filled leaves the last keys unread."""
    for columns in (50, 4):
        given = _call(rows, is_causal=is_causal, **{name: torch.zeros(1, 2, 1, 1).expand(1, 2, rows, columns)})
        _refused(f"{name} must expand to [2, 4, {rows}, 5], got [1, 2, {rows}, {columns}]", given)
        given = _call(rows, is_causal=is_causal, **{name: torch.zeros(1, 4, rows, columns)})
        _refused(f"{name} must expand to [2, 4, {rows}, 5], got [1, 4, {rows}, {columns}]", given)


def test_a_position_bias_of_a_cache_that_is_being_filled():
    """Keys behind the last query are not there yet, nor are their columns: the mask says so, until it is cut."""
    mask = make_mask(2, 4, 5, 0, 0, config=transformers.LlamaConfig())
    assert mask is not None
    given = _call(position_bias=torch.randn(1, 4, 4, 5), attention_mask=mask)
    tensors = given["query"], given["key"][:, :, :4], given["value"][:, :, :4]
    expected = flash_attention(*tensors, causal=True, bias=given["position_bias"][..., :4]).transpose(1, 2)
    torch.testing.assert_close(attend(**given)[0], expected)
    changes = {"query": given["query"][:, :, 1:], "attention_mask": mask[:, :, 1:]}
    changes["position_bias"] = given["position_bias"][:, :, 1:]
    torch.testing.assert_close(attend(**{**given, **changes})[0], expected[:, 1:])


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("name", ["query", "key", "value", "attention_mask", "s_aux", "position_bias", "cu_seq_lens_q"])
def test_tensors_are_dense(name, kind):
    tensor, words = laid_out(kind)
    changes: dict[str, Any] = {name: tensor}
    given = _packed(**changes) if "cu_seq" in name else _call(**changes)
    _refused(f"{name} must be dense, got {words}", given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seq_lens_q": None}, "cu_seq_lens_q must be given with cu_seq_lens_k, got None"),
        *(
            ({name: None}, f"{name} must be given with cu_seq_lens_q, got None")
            for name in ("cu_seq_lens_k", "max_length_q", "max_length_k")
        ),
        ({"cu_seq_lens_q": [0, 5]}, "cu_seq_lens_q must be a torch.Tensor, got list"),
        ({"cu_seq_lens_k": torch.zeros(3).long()}, "cu_seq_lens_k must be int32, got torch.int64"),
        ({"cu_seq_lens_k": torch.zeros(2).int()}, "cu_seq_lens_k must have shape [B + 1] = [3], got [2]"),
        ({"max_length_q": "x"}, "max_length_q must be an integer from 0 to 2**31 - 1, got 'x'"),
        ({"max_length_k": True}, "max_length_k must be an integer from 0 to 2**31 - 1, got True"),
        ({"max_length_k": 2}, "max_length_k must be at least 3, the length of sequence 1, got 2"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 3, 9]).int()},
            "cu_seq_lens_q must be from 0 to 5, the tokens of query, got 0 to 9",
        ),
    ],
)
def test_lengths_of_packed_sequences_have_the_names_of_transformers(changes, message):
    _refused(message, _packed(**changes))


@pytest.mark.parametrize("cache", [[], False, {}, np.ones(2)], ids=str)
def test_a_cache_is_refused_whatever_it_is(cache):
    with pytest.raises(UnsupportedError, match=r"^cache is not served by flashmoe_science"):
        attend(**_call(cache=cache))


@pytest.mark.parametrize("name", ["", None, 1, ["a"]], ids=str)
def test_names_are_texts(name):
    message = f"name must be a text of one character or more, got {name!r}"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        register(name)


def test_layers_that_say_nothing_of_causal_are_causal_and_those_that_say_none_are_not():
    given = _call(5)
    expected, _ = attend(**given, is_causal=True)
    torch.testing.assert_close(attend(**given)[0], expected)
    given["module"].is_causal = None
    expected, _ = attend(**given, is_causal=False)
    torch.testing.assert_close(attend(**given)[0], expected)


@pytest.mark.triton
def test_the_kernel_itself_serves_models():
    """In Triton's interpreter, which needs a process of its own."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.integrations.models"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == list(models.CONFIGS)


def test_block_masks_of_transformers_are_taken_as_they_are(monkeypatch):
    """What it makes for FlexAttention: causal, with padding on the left."""
    from torch.nn.attention.flex_attention import create_block_mask
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    def create(*arguments: Any, _compile: bool, **options: Any) -> Any:
        return create_block_mask(*arguments, **options)  # compiling it takes long, and changes nothing

    monkeypatch.setattr(masking_utils, "create_block_mask", create)
    AttentionInterface.register("moe_science_blocks", attend)
    AttentionMaskInterface.register("moe_science_blocks", masking_utils.flex_attention_mask)
    name = next(iter(models.CONFIGS))
    ours, eager = models.make(name, "moe_science_blocks"), models.make(name, "eager")
    tokens, seen = torch.randint(5, 60, (3, 17)), torch.ones(3, 17, dtype=torch.long)
    seen[0, :5], seen[2, :11] = 0, 0
    found, expected = (models.logits(model, tokens, attention_mask=seen) for model in (ours, eager))
    torch.testing.assert_close(found[seen.bool()], expected[seen.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "value"), [("position_bias", torch.zeros(1, 4, 4, 5)), ("dropout", 0.1), ("max_length_q", 3)]
)
def test_what_does_not_stand_beside_block_masks_is_refused_by_name(name, value):
    mask = BlockMask.from_dense(torch.ones(2, 1, 4, 5, dtype=torch.bool))
    o, _ = attend(**_call(attention_mask=mask))
    assert o.shape == (2, 4, 4, 8)
    with pytest.raises(UnsupportedError, match=f"^{name} is not served beside a BlockMask"):
        attend(**_call(attention_mask=mask, **{name: value}))
