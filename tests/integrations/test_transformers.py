"""Tiny random models of transformers: our attention against the eager one, logits and tokens."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe_science import (
    InputError,
    UnsupportedError,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kv_cache,
)

pytest.importorskip("transformers", minversion="5.0", reason="transformers is optional")

from flashmoe_science.integrations.transformers import attend, make_mask, register

from . import models


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
    config = SimpleNamespace(sliding_window=None, attention_chunk_size=4)
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
    with pytest.raises(UnsupportedError, match=r"packed sequences .* need a batch of one, no mask"):
        attend(layer, q, k, v, torch.zeros(1, 1, 9, 9), **lengths)


@pytest.mark.parametrize("name", ["flashmoe_science", "sdpa", "eager", "paged|mine", "someone/kernel"])
def test_names_that_transformers_takes_for_its_own(name):
    with pytest.raises(InputError, match=r'name must not hold "flash", .* got '):
        register(name)


def test_kernels_that_do_not_exist_are_refused_at_once():
    with pytest.raises(InputError, match=r"kernel must be auto or one of .*, got 'forward_tritn'"):
        register(kernel="forward_tritn")


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
    with pytest.raises(InputError, match=r"dropout_p must be at least 0 and less than 1, got 1.0"):
        attend(layer, q, k, v, None, dropout=1.0)
    for name in ("output_attentions", "cache"):
        with pytest.raises(UnsupportedError, match=f"{name} is not served by flashmoe_science"):
            attend(layer, q, k, v, None, **{name: True})  # type: ignore[arg-type]


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
