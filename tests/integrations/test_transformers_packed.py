"""Packed documents in models of transformers: each has the answer that it has alone, and nothing is quadratic."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashmoe_science import UnsupportedError

pytest.importorskip("transformers", minversion="5.0", reason="transformers is optional")

import transformers

from flashmoe_science.integrations import transformers as integration
from flashmoe_science.integrations.transformers import register
from flashmoe_science.integrations.transformers_packing import LENGTHS, PackedMask

from . import models
from .test_transformers_models import SHARED, make

attend: Any = integration.attend  # is called with tensors and options that tests put together
DOCUMENTS = (8, 1, 1, 10, 4)  # with a window of 6, some are longer and some shorter than it
TOKENS = sum(DOCUMENTS)
GIVEN = ("positions", "lengths", "both")


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


def batch(given: str = "both", documents: tuple[int, ...] = DOCUMENTS) -> dict[str, Any]:
    """Return the tokens of documents and what tells them apart, as the real collator makes it."""
    generator = torch.Generator().manual_seed(5)
    features = [{"input_ids": torch.randint(5, 60, (size,), generator=generator).tolist()} for size in documents]
    collate = transformers.DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True)
    left_out = {"positions": LENGTHS, "lengths": ("position_ids",), "both": ()}[given]
    return {name: value for name, value in collate(features).items() if name not in ("labels", *left_out)}


def model_of(name: str, implementation: str = "moe_science") -> Any:
    if name in models.CONFIGS:
        return models.make(name, implementation)
    chunks = {"attention_chunk_size": 6, "num_local_experts": 2, "intermediate_size_mlp": 48, "head_dim": 8}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "persimmon": ("PersimmonConfig", {}),
        "phimoe": ("PhimoeConfig", {"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1}),
        "gemma4": ("Gemma4TextConfig", SHARED),
        "llama4": ("Llama4TextConfig", {**chunks, "layer_types": ["chunked_attention", "full_attention"]}),
    }
    return make(kinds[name][0], implementation, **kinds[name][1])


def step(model: Any, weights: torch.Tensor, **given: Any) -> torch.Tensor:
    """Return the logits of a call, and add its gradients to those of the model's parameters."""
    logits: torch.Tensor = model(**given).logits
    (logits * weights).sum().backward()
    return logits.detach()


def gradients(model: Any) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def alone(model: Any, weights: torch.Tensor, tokens: torch.Tensor, documents: tuple[int, ...]) -> torch.Tensor:
    parts = zip(tokens.split(documents, 1), weights.split(documents, 1), strict=True)
    return torch.cat([step(model, part_of_weights, input_ids=part) for part, part_of_weights in parts], 1)


@pytest.mark.parametrize("cache", [{}, {"use_cache": False}, {"use_cache": True}], ids=str)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("name", models.CONFIGS)
def test_documents_have_the_logits_and_gradients_that_they_have_alone(name, given, cache):
    model, weights = model_of(name), torch.randn(1, TOKENS, 64)
    packed = batch(given)
    found, found_gradients = step(model, weights, **packed, **cache), gradients(model)
    expected = alone(model_of(name, "eager"), weights, packed["input_ids"], DOCUMENTS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    expected = alone(model, weights, packed["input_ids"], DOCUMENTS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(found_gradients, gradients(model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


@pytest.mark.parametrize("given", ["positions", "both"])
@pytest.mark.parametrize(
    ("name", "cache"),
    [("phimoe", False), ("phimoe", True), ("gemma4", False), ("gemma4", True), ("llama4", False), ("persimmon", True)],
)
def test_windows_that_layers_keep_shared_keys_chunks_and_layers_without_positions(name, cache, given):
    """Without gradients, which some of their experts lack."""
    packed = batch(given)
    tokens = packed.pop("input_ids")
    found = models.logits(model_of(name), tokens, **packed, use_cache=cache)
    expected = torch.cat([models.logits(model_of(name, "eager"), part) for part in tokens.split(DOCUMENTS, 1)], 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seen", [None, "all"])
@pytest.mark.parametrize("name", ["llama", "gpt-oss", "persimmon"])
def test_a_mask_of_ones_changes_nothing(name, seen):
    """With it, transformers does not look for documents."""
    packed = batch("positions")
    tokens = packed.pop("input_ids")
    mask = {} if seen is None else {"attention_mask": torch.ones_like(tokens)}
    for seq_idx in ({}, {"seq_idx": torch.arange(5).repeat_interleave(torch.tensor(DOCUMENTS))[None]}):
        found = models.logits(model_of(name), tokens, **packed, **mask, **(seq_idx if name == "llama" else {}))
        expected = torch.cat([models.logits(model_of(name, "eager"), part) for part in tokens.split(DOCUMENTS, 1)], 1)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss"])
def test_rows_of_a_batch_have_documents_of_their_own(name, cache):
    rows = ((8, 1, 1, 10, 4), (24,), (3, 21))
    parts = [batch("positions", documents) for documents in rows]
    packed = {name: torch.cat([part[name] for part in parts]) for name in ("input_ids", "position_ids")}
    model, weights = model_of(name), torch.randn(3, TOKENS, 64)
    found, found_gradients = step(model, weights, **packed, use_cache=cache), gradients(model)
    for row, documents in enumerate(rows):
        expected = alone(model, weights[row, None], packed["input_ids"][row, None], documents)
        torch.testing.assert_close(found[row, None], expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(found_gradients, gradients(model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that a function of torch returned."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize(
    ("given", "cache"),
    [("positions", {"use_cache": False}), ("positions", {}), ("lengths", {"use_cache": False}), ("both", {}),
     ("both", {"use_cache": False})],
)  # fmt: skip
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss"])
def test_no_tensor_is_quadratic(name, given, cache, monkeypatch):
    """The largest of a step of training doubles with the tokens, and only the packed function is called."""
    monkeypatch.setattr("flashmoe_science.integrations.transformers.flash_attention", None)
    model, sizes = model_of(name), []
    for tokens in (512, 1024):
        packed = batch(given, (tokens // 4, tokens // 2, tokens // 4))
        packed.pop("position_ids" if name == "gpt-oss" and given == "lengths" else "", None)
        with Largest() as largest:
            step(model, torch.randn(1, tokens, 64), **packed, **cache)
        sizes.append(largest.bytes)
    assert sizes[1] <= 2.1 * sizes[0]
    assert sizes[1] < 1024 * 1024


def packed_mask(**changes: Any) -> Any:
    """Return the mask that a model without a cache gets for positions of documents of 2 and 3 tokens."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    config = transformers.MistralConfig(**models._SIZES, sliding_window=2)
    config._attn_implementation = "moe_science"
    function = create_sliding_window_causal_mask if changes.pop("window", False) else create_causal_mask
    given = {"position_ids": torch.tensor([[0, 1, 0, 1, 2]]), **changes}
    # The cache by its place: transformers 5.24 gave its argument another name.
    return function(config, torch.zeros(1, 5, 32), given.pop("attention_mask", None), None, **given)


def shown(mask: torch.Tensor) -> torch.Tensor:
    return (mask == 0)[0, 0]


def test_the_mask_has_elements_once_they_are_asked_for():
    blocks = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).tril().bool()
    for window, expected in ((False, blocks), (True, blocks.triu(-1))):
        mask = packed_mask(window=window)
        assert type(mask) is PackedMask
        assert (mask.shape, mask.dtype, mask.stride()) == ((1, 1, 5, 5), torch.float32, (0, 0, 0, 0))
        assert mask.window == ((1, -1) if window else (-1, -1))
        assert mask.starts.tolist() == [0, 2, 5]
        assert mask.longest == 3
        assert mask.made is None
        assert torch.equal(shown(mask), expected)
        assert torch.equal(shown(mask[:, :, 2:]), expected[2:])


def test_a_mask_that_is_moved_stays_without_elements():
    mask = packed_mask()
    for moved in (mask.to("cpu"), mask.to(torch.float64), mask.detach()):
        assert type(moved) is PackedMask
        assert (moved.made, mask.made) == (None, None)
    moved = mask.to(torch.float64)
    assert torch.equal(moved + 0, mask.dense().double())
    assert type(mask.to(torch.float64)) is torch.Tensor


def test_what_is_written_to_the_mask_counts():
    mask = packed_mask()
    mask.masked_fill_(torch.eye(5).bool() & (torch.arange(5) == 1), -torch.inf)
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    expected, _ = attend(torch.nn.Module(), q, k, v, mask.dense())
    torch.testing.assert_close(attend(torch.nn.Module(), q, k, v, mask)[0], expected)
    assert not torch.allclose(attend(torch.nn.Module(), q, k, v, packed_mask())[0], expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])},
        {"position_ids": torch.arange(5)[None]},
        {"and_mask_function": lambda _batch, _head, q, k: q - k < 2},
        {"or_mask_function": lambda _batch, _head, q, k: q == k},
        {"block_sequence_ids": torch.tensor([[-1, -1, 0, 0, -1]])},
    ],
    ids=["mask", "one document", "and", "or", "blocks"],
)
def test_masks_with_more_in_them_are_made(changes):
    assert not isinstance(packed_mask(**changes), PackedMask)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_gradients(name, reentrant):
    model, weights = model_of(name), torch.randn(1, TOKENS, 64)
    expected = step(model, weights, **batch(), use_cache=False), gradients(model)
    model.train()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    found = step(model, weights, **batch("positions"), use_cache=False), gradients(model)
    torch.testing.assert_close(found[0], expected[0])
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("cache", [False, True])
def test_positions_that_were_written_to(cache, inference):
    model = model_of("llama")
    with torch.inference_mode(inference):
        tokens, positions = batch()["input_ids"], torch.arange(TOKENS)[None]
        models.logits(model, tokens, position_ids=positions, use_cache=cache)
        for documents in (DOCUMENTS, (5, 19), (24,)):
            positions.copy_(torch.cat([torch.arange(size) for size in documents])[None])
            found = model(tokens, position_ids=positions, use_cache=cache).logits
            expected = torch.cat([model(part).logits for part in tokens.split(documents, 1)], 1)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def leaks(name: str, **given: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"^position_ids restart, and documents would see each other"):
        model_of(name)(batch()["input_ids"], position_ids=batch()["position_ids"], **given)


def test_documents_that_would_see_each_other_are_refused():
    """Where a mask is made without regard to them."""
    padded = torch.ones(1, TOKENS, dtype=torch.long)
    padded[0, -2:] = 0
    for use_cache in (False, True):
        leaks("llama", attention_mask=padded, use_cache=use_cache)
    leaks("llama4")  # its chunks start with documents only where transformers tells of them
    model, tokens = model_of("llama"), batch()["input_ids"]
    first = model(tokens, use_cache=True)
    positions = batch()["position_ids"] + TOKENS
    with pytest.raises(UnsupportedError, match=r"^position_ids restart, and documents would see each other"):
        model(tokens, None, positions, first.past_key_values)
    with pytest.raises(UnsupportedError, match=r"^position_ids that restart need use_cache=False"):
        attend(
            torch.nn.Module(), *(torch.randn(1, 2, 3, 8) for _ in range(3)), None,
            position_bias=torch.zeros(3, 3), position_ids=torch.tensor([[0, 1, 0]]),
        )  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "mistral", "phimoe", "gpt-oss"])
@pytest.mark.parametrize("padded", ["left", "right", "none"])
def test_padding_and_positions_that_go_on_are_no_documents(name, padded):
    """Positions as ``generate`` makes them, of a prompt in two parts, then of a token."""
    ours, eager = model_of(name), model_of(name, "eager")
    tokens, seen = torch.randint(5, 60, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    if padded != "none":
        seen[0, slice(0, 5) if padded == "left" else slice(5, 12)] = 0
    positions = (seen.cumsum(-1) - 1).masked_fill(seen == 0, 1)
    results = []
    for model in (ours, eager):
        cache, logits = None, []
        for start, end in ((0, 12), (12, 19), (19, 20)):
            mask = None if padded == "none" else seen[:, :end]
            with torch.no_grad():
                made = model(tokens[:, start:end], mask, positions[:, start:end], cache, use_cache=True)
            cache = made.past_key_values
            logits.append(made.logits)
        results.append(torch.cat(logits, 1)[seen.bool()])
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


SKIP = r"^position_ids skip or repeat, which transformers takes for documents in some calls and not in others"
RUNS = {
    "skipped": ([0, 1, 2, 10, 11, 12], (3, 3)),
    "twice": ([0, 1, 2, 2, 3, 4], (3, 3)),
    "shared": ([0, 1, 2, 3, 3, 3], (4, 1, 1)),
    "after a restart": ([0, 1, 0, 5, 6, 7], (2, 1, 3)),
}


@pytest.mark.parametrize("seq_idx", [{}, {"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]])}], ids=["", "seq_idx"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("run", RUNS)
def test_positions_that_skip_or_repeat_have_one_answer(run, name, seq_idx):
    """Without a cache they start documents, as transformers has it. With a cache or a mask they are refused."""
    if seq_idx and RUNS[run][1] != (3, 3):
        seq_idx = {"seq_idx": torch.zeros(1, 6, dtype=torch.long)}
    (positions, documents), model = RUNS[run], model_of(name)
    tokens, ids = torch.randint(5, 60, (1, 6)), torch.tensor([positions])
    found = models.logits(model, tokens, position_ids=ids, use_cache=False, **seq_idx)
    parts = zip(tokens.split(documents, 1), ids.split(documents, 1), strict=True)
    eager = model_of(name, "eager")
    expected = torch.cat([models.logits(eager, part, position_ids=own) for part, own in parts], 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for others in ({"use_cache": True}, {"use_cache": False, "attention_mask": torch.ones_like(tokens)}):
        with pytest.raises(UnsupportedError, match=SKIP):
            models.logits(model, tokens, position_ids=ids, **others, **seq_idx)


def test_positions_that_skip_in_a_prompt_that_goes_on_are_refused():
    model, tokens = model_of("llama"), torch.randint(5, 60, (1, 8))
    for positions, text in (([4, 5, 9, 10], SKIP), ([4, 5, 0, 1], r"^position_ids restart")):
        cache = model(tokens[:, :4], use_cache=True).past_key_values
        with pytest.raises(UnsupportedError, match=text):
            model(tokens[:, 4:], None, torch.tensor([positions]), cache)


@pytest.mark.parametrize("counted", [False, True])
def test_positions_may_count_padding_between_tokens_and_documents_beside_it_are_refused(counted):
    seen, tokens = torch.tensor([[1, 1, 1, 0, 0, 1, 1]]), torch.randint(5, 60, (1, 7))
    positions = torch.arange(7)[None] if counted else (seen.cumsum(-1) - 1).masked_fill(seen == 0, 1)
    results = [
        models.logits(model_of("llama", name), tokens, position_ids=positions, attention_mask=seen)[seen.bool()]
        for name in ("moe_science", "eager")
    ]
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)
    restarted = torch.tensor([[0, 1, 2, 0, 0, 0, 1]])
    with pytest.raises(UnsupportedError, match=r"^position_ids restart"):
        models.logits(model_of("llama"), tokens, position_ids=restarted, attention_mask=seen)


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("inside", [[0, 1, 2, 20, 21], [0, 1, 1, 1, 2]], ids=["skipped", "repeated"])
def test_lengths_say_where_documents_are(name, cache, inside):
    """A position that is skipped, or comes twice, inside one of them starts none."""
    starts, tokens = torch.tensor([0, 4, 9], dtype=torch.int32), torch.randint(5, 60, (1, 9))
    ids = torch.tensor([[*range(4), *inside]])
    lengths = dict(zip(LENGTHS, (starts, starts, 5, 5), strict=True))
    for seq_idx in ({}, {"seq_idx": torch.tensor([[0] * 4 + [1] * 5])}):
        given = {**lengths, **(seq_idx if name == "llama" else {})}
        found = models.logits(model_of(name), tokens, position_ids=ids, use_cache=cache, **given)
        eager, ends = model_of(name, "eager"), (4, 5)
        parts = zip(tokens.split(ends, 1), ids.split(ends, 1), strict=True)
        expected = [models.logits(eager, part, position_ids=own, use_cache=True) for part, own in parts]
        torch.testing.assert_close(found, torch.cat(expected, 1), rtol=1e-4, atol=1e-4)


def test_seq_idx_that_nothing_serves_is_refused():
    """Beside a mask, in a batch of several rows, in a compiled model, and of a wrong shape."""
    model, tokens = model_of("llama"), torch.randint(5, 60, (2, 6))
    ids, alone = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2), r"^seq_idx alone does not keep sequences apart"
    padded = torch.tensor([[1, 1, 1, 1, 1, 0]] * 2)
    for given in ({}, {"attention_mask": padded}, {"attention_mask": torch.ones(6, 6).tril().bool()[None, None]}):
        for cache in (False, True):
            with pytest.raises(UnsupportedError, match=alone):
                model(tokens, seq_idx=ids, use_cache=cache, **given)
    apart = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).tril().bool()[None, None]
    model(tokens, seq_idx=ids, attention_mask=apart)
    with pytest.raises(ValueError, match=r"^seq_idx must be integers \[1 or 2, 6\], got \[2, 5\]"):
        model(tokens, seq_idx=ids[:, 1:])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(RuntimeError, match=alone):
        compiled(tokens, seq_idx=ids, use_cache=True)
    torch._dynamo.reset()


@pytest.mark.parametrize("free", [0, 8])
def test_an_empty_static_cache_keeps_documents_apart(free):
    model, packed = model_of("llama"), batch("positions")
    cache = transformers.StaticCache(config=model.config, max_cache_len=TOKENS + free)
    with torch.no_grad():
        found = model(packed["input_ids"], None, packed["position_ids"], cache).logits
    expected = torch.cat([models.logits(model, part) for part in packed["input_ids"].split(DOCUMENTS, 1)], 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_compiled_models_take_lengths(name):
    """With a cache, as transformers then makes no mask. Positions alone fail when the model runs."""
    model = model_of(name)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        found = compiled(**batch(), use_cache=True).logits
        torch.testing.assert_close(found, model(**batch(), use_cache=True).logits)
        with pytest.raises(RuntimeError, match=r"^position_ids restart, .* compiled models need cu_seq_lens_q"):
            compiled(**batch("positions"), use_cache=True)
        whole = {"input_ids": batch()["input_ids"], "position_ids": torch.arange(TOKENS)[None]}
        torch.testing.assert_close(compiled(**whole).logits, model(**whole).logits)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss"])
def test_compiled_layers_take_the_mask(name):
    """Its lengths change from call to call, and nothing is compiled anew for each: more than 8 times would raise."""
    model, expected = model_of(name), model_of(name)
    for layer in model.model.layers:
        layer.self_attn.compile(backend="eager", fullgraph=name != "gpt-oss")
    with torch.no_grad():
        for documents in (DOCUMENTS, (1, 2, 21), *((size, TOKENS - size) for size in range(12, 22))):
            packed = batch("positions", documents)
            if name == "gpt-oss":  # its masks do not look at positions
                packed.update({key: value for key, value in batch("both", documents).items() if key in LENGTHS})
            found = model(**packed, use_cache=False).logits
            torch.testing.assert_close(found, expected(**packed, use_cache=False).logits)
    torch._dynamo.reset()


def test_lengths_are_compared_with_the_mask_without_its_elements(monkeypatch):
    masks = []
    inner = importlib.import_module("flashmoe_science.integrations.transformers_masks").pack_mask

    def record(*given: Any) -> Any:
        masks.append(inner(*given))
        return masks[-1]

    monkeypatch.setattr("flashmoe_science.integrations.transformers_masks.pack_mask", record)
    model_of("mistral")(**batch(), use_cache=False)
    assert [mask.made for mask in masks] == [None]
    starts = torch.tensor([0, 8, 24], dtype=torch.int32)
    q, k, v = (torch.randn(1, 2, TOKENS, 8) for _ in range(3))
    lengths = dict(zip(LENGTHS, (starts, starts, 16, 16), strict=True))
    fewer, _ = attend(torch.nn.Module(), q, k, v, masks[0], **lengths)  # the mask hides more, and counts
    torch.testing.assert_close(fewer, attend(torch.nn.Module(), q, k, v, masks[0])[0])
    starts[1] = 7
    with pytest.raises(ValueError, match=re.escape("cu_seq_lens_q must agree with attention_mask")):
        attend(torch.nn.Module(), q, k, v, masks[0], **lengths)
