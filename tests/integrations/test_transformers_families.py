"""Tiny random models of named families, whose layers choose their keys or ask for more than plain attention.

Each configuration is that of the sweep (``tools/tiny_models.py``), and is checked to have what its family is known for.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashmoe_science import InputError, UnsupportedError
from flashmoe_science.attention.masks.block_mask import BlockMask

pytest.importorskip("transformers", minversion="5.0", reason="transformers is optional")

import transformers

from flashmoe_science.integrations import transformers as integration, transformers_sparse
from flashmoe_science.integrations.transformers import register
from flashmoe_science.integrations.transformers_sparse import with_chosen_keys

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import tiny_models

attend: Any = integration.attend  # is called with tensors and options that tests put together
SPARSE = ["minimax_m3_vl_text", "deepseek_v32", "glm_moe_dsa"]
# By model type: whether a configuration has what the family is known for.
KNOWN_FOR: dict[str, Callable[[Any], bool]] = {
    "minimax_m3_vl_text": lambda c: (
        set(c.layer_types) == {"full_attention", "minimax_m3_sparse"} and c.index_topk_blocks * c.index_block_size < 9
    ),
    "deepseek_v32": lambda c: c.index_topk < 9,
    "glm_moe_dsa": lambda c: c.index_topk < 9,
    "qwen3_5_text": lambda c: (
        set(c.layer_types) == {"linear_attention", "full_attention"} and c.rope_parameters["partial_rotary_factor"] < 1
    ),
    "gemma4_text": lambda c: (
        set(c.layer_types) == {"sliding_attention", "full_attention"}
        and c.sliding_window < 9
        and c.num_kv_shared_layers
    ),
    "gpt_oss": lambda c: set(c.layer_types) == {"sliding_attention", "full_attention"} and c.sliding_window < 9,
}
TOKENS = torch.randint(5, 60, (2, 19), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


@functools.cache
def config_of(family: str) -> Any:
    return tiny_models.shrink_config(transformers.CONFIG_MAPPING[family], family)


def pair(family: str, reference: str = "eager") -> tuple[Any, Any]:
    """Return a model with our attention, and one with another and the same weights."""
    ours, other = (tiny_models.build(family, config_of(family), name) for name in ("moe_science", reference))
    return ours, other


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", KNOWN_FOR)
def test_configurations_have_what_the_family_is_known_for(family):
    assert KNOWN_FOR[family](config_of(family))


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("family", KNOWN_FOR)
def test_logits(family, padding):
    seen = torch.ones_like(TOKENS)
    if padding != "none":
        seen[0, slice(0, 7) if padding == "left" else slice(12, 19)] = 0
    # MiniMax-M3's indexer scores padding on the left too, of which eager attention and SDPA make different things.
    reference = "sdpa" if (family, padding) == ("minimax_m3_vl_text", "left") else "eager"
    with torch.no_grad():
        found, expected = (model(TOKENS, attention_mask=seen).logits for model in pair(family, reference))
    assert_close(found[seen.bool()], expected[seen.bool()])


@pytest.mark.parametrize("family", KNOWN_FOR)
def test_gradients(family):
    """Of all parameters; the indexer, which eager attention gives none, has none."""
    gradients = []
    for model in pair(family):
        model.train()
        model(TOKENS, labels=TOKENS).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    found, expected = gradients
    assert any(gradient is not None for gradient in expected.values())
    for name, gradient in expected.items():
        assert (found[name] is None) == (gradient is None), name
        if gradient is not None:
            size = max(1e-3, float(gradient.abs().max()))  # elements are sums, as exact as the largest
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-4 * size)


def generate(model: Any, **options: Any) -> Any:
    tokens = TOKENS[:, :9]
    return model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=10, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", KNOWN_FOR)
def test_generation(family, cache):
    options = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    found, expected = (generate(model, **options) for model in pair(family))
    assert torch.equal(found.sequences, expected.sequences)
    assert_close(torch.stack(found.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("family", SPARSE)
def test_a_prompt_in_two_parts(family):
    """The second part has several queries over a cache."""
    results = []
    for model in pair(family):  # of equal scores, the indexer may choose others in a whole prompt
        cache = transformers.DynamicCache(config=config_of(family))
        with torch.no_grad():
            results.append(torch.cat([model(part, None, None, cache).logits for part in TOKENS.split([10, 9], 1)], 1))
    assert_close(*results)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("family", SPARSE)
def test_packed_documents(family, use_cache):
    """With a cache too, which eager attention packs nothing in. MiniMax-M3 counts blocks by positions, across them."""
    ours, eager = pair(family)
    positions = torch.cat([torch.arange(8), torch.arange(11)])[None]
    with torch.no_grad():
        if family == "minimax_m3_vl_text":
            with pytest.raises(UnsupportedError, match=r"^block_indices is not served for packed documents"):
                ours(TOKENS[:1], position_ids=positions, use_cache=use_cache)
            return
        found = ours(TOKENS[:1], position_ids=positions, use_cache=use_cache).logits
        expected = eager(TOKENS[:1], position_ids=positions, use_cache=False).logits
    assert_close(found, expected)


@pytest.mark.parametrize("family", SPARSE[:2])
def test_compiled_generation(family):
    """All on a CPU, where transformers compiles nothing unless it is asked to."""
    compiled = transformers.CompileConfig(backend="aot_eager", fullgraph=True)
    compiled._compile_all_devices = True
    ours, eager = pair(family)
    found = generate(ours, cache_implementation="static", compile_config=compiled)
    expected = generate(eager, cache_implementation="static", disable_compile=True)
    assert torch.equal(found.sequences, expected.sequences)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()


def test_a_prompt_is_served_by_a_block_mask(monkeypatch):
    """A bias of all heads would take 16 times the memory of MiniMax-M3's four masks."""
    made: list[tuple[int, ...]] = []

    def record(mask: torch.Tensor) -> BlockMask:
        made.append(tuple(mask.shape))
        return BlockMask.from_dense(mask)

    monkeypatch.setattr(transformers_sparse, "BlockMask", type("Recorded", (), {"from_dense": staticmethod(record)}))
    generate(pair("minimax_m3_vl_text")[0])
    assert made == [(2, 2, 9, 9)]


class Layer(torch.nn.Module):
    """A layer whose blocks have three keys."""

    def __init__(self) -> None:
        super().__init__()
        self.indexer = torch.nn.Module()
        self.indexer.block_size = 3  # type: ignore[assignment]


def given(rows: int = 8, keys: int = 8, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(2, 4, rows, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 8)]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return what eager attention does, with the smallest number where a key is not seen."""
    scores = q @ k.repeat_interleave(2, 1).mT * q.shape[-1] ** -0.5
    scores = scores + torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    o: torch.Tensor = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    return o.transpose(1, 2)


BLOCKS = torch.tensor([[0, -1], [0, -1], [0, 2], [1, 0], [-1, 0], [2, 1], [-1, -1], [2, 0]])[None, None]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kind", ["none", "bool", "additive"])
def test_blocks_of_keys(kind, groups):
    """A row that chooses nothing weighs all keys alike, as eager attention has it."""
    q, k, v = given()
    blocks = torch.stack([BLOCKS[0, 0].roll(shift, 0) for shift in range(groups)]).expand(2, groups, 8, 2)
    mask = torch.ones(8, 8).tril().bool() if kind == "none" else torch.ones(8, 8).tril().bool() & (torch.arange(8) != 4)
    seen = torch.zeros(2, groups, 8, 8, dtype=torch.bool)
    for column in range(8):
        seen[..., column] = (blocks == column // 3).any(-1)
    seen = (seen & mask).repeat_interleave(4 // groups, 1)
    assert (~seen.any(-1)).any()
    options: dict[str, Any] = {"block_indices": blocks, "position_ids": torch.arange(8)[None]}
    handed: dict[str, Any] = {
        "none": None,
        "bool": mask.expand(2, 1, 8, 8),
        "additive": torch.zeros(2, 1, 8, 8).masked_fill(~mask, torch.finfo(torch.float32).min),
    }
    o, _ = attend(Layer(), q, k, v, handed[kind], **options)
    assert_close(o, plain(q, k, v, seen))
    biased, _ = attend(Layer(), q, k, v, handed[kind], position_bias=torch.zeros(1, 1, 8, 8), **options)
    assert_close(biased, o)


def test_blocks_without_a_mask_reach_up_to_the_position():
    """Positions are those of the call, or the last ones: keys of a static cache that are not there yet are ahead."""
    q, k, v = given(2, 8)
    blocks = torch.tensor([0, 1, 2]).expand(2, 1, 2, 3)
    places = torch.arange(8)
    for positions in (torch.tensor([3, 4]), torch.tensor([[3, 4], [1, 2]]), None):
        own = torch.tensor([6, 7]) if positions is None else positions
        seen = places <= own.expand(2, 2)[:, None, :, None]
        o, _ = attend(Layer(), q, k, v, None, block_indices=blocks, position_ids=positions)
        assert_close(o, plain(q, k, v, seen.expand(2, 4, 2, 8)))


def test_dropout_goes_with_a_mask_of_all_heads():
    q, k, _ = given()
    others = {"block_indices": BLOCKS.expand(2, 1, 8, 2)}
    _, mask = with_chosen_keys(Layer(), q, k, None, others, dropout=0.5)
    assert mask.shape == (2, 4, 8, 8)
    assert not others


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_tokens(kind, dtype):
    """Negative numbers name no token. What is added to the scores of those that are seen stays."""
    q, k, v = given()
    indices = torch.tensor([[0, -1], [1, 0], [2, 0], [3, 3], [4, 1], [-1, 5], [6, 2], [7, 4]], dtype=dtype)
    seen = (indices[..., None] == torch.arange(8)).any(-2)
    added = torch.randn(2, 1, 8, 8)
    mask = torch.ones(2, 1, 8, 8).tril().bool() if kind == "bool" else added
    o, _ = attend(Layer(), q, k, v, mask, indices=indices.expand(2, 8, 2))
    scores = q @ k.repeat_interleave(2, 1).mT * q.shape[-1] ** -0.5 + (0.0 if kind == "bool" else added)
    expected = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    assert_close(o, expected.transpose(1, 2))


MASK = torch.ones(2, 1, 8, 8).tril().bool()
TOKENS_SEEN, BLOCKS_SEEN = torch.zeros(2, 8, 2, dtype=torch.int32), BLOCKS.expand(2, 1, 8, 2)


@pytest.mark.parametrize(
    ("mask", "options", "error", "message"),
    [
        (None, {"indices": TOKENS_SEEN}, InputError, "attention_mask must say which keys a query sees beside indices"),
        (MASK, {"indices": TOKENS_SEEN.float()}, InputError, r"indices must be an int32 or int64 tensor \[B, Sq, K\]"),
        (MASK, {"indices": 3}, InputError, "indices must be an int32 or int64 tensor"),
        (MASK, {"indices": TOKENS_SEEN[:, 1:]}, InputError, r"indices must be \[B, Sq, K\] on cpu, here \[2, 8, 'K'\]"),
        (MASK[..., :5], {"indices": TOKENS_SEEN}, InputError, r"attention_mask must expand to \[2, 1, 8, 8\]"),
        (MASK[..., :5], {"block_indices": BLOCKS_SEEN}, InputError, r"attention_mask must expand to \[2, 1, 8, 8\]"),
        (MASK.int(), {"indices": TOKENS_SEEN}, InputError, "attention_mask must be bool"),
        (MASK, {"block_indices": BLOCKS_SEEN.half()}, InputError, "block_indices must be an int32 or int64 tensor"),
        (MASK, {"block_indices": BLOCKS_SEEN[0]}, InputError, r"block_indices must be \[B, groups, Sq, K\]"),
        (MASK, {"block_indices": BLOCKS_SEEN.expand(2, 3, 8, 2)}, InputError, "block_indices must have groups"),
        (MASK, {"indices": TOKENS_SEEN, "block_indices": BLOCKS_SEEN}, UnsupportedError, "indices is not served"),
        (
            MASK, {"block_indices": BLOCKS_SEEN, "cu_seq_lens_q": torch.tensor([0, 8])}, UnsupportedError,
            "block_indices is not served for packed documents",
        ),
        (BlockMask.from_dense(MASK), {"indices": TOKENS_SEEN}, UnsupportedError, "indices is not served beside"),
    ],
)  # fmt: skip
def test_what_is_refused(mask, options, error, message):
    with pytest.raises(error, match=f"^{message}"):
        attend(Layer(), *given(), mask, **options)


def test_blocks_of_an_unknown_size_are_refused():
    with pytest.raises(UnsupportedError, match=r"^block_indices is not served for Module, whose indexer\.block_size"):
        attend(torch.nn.Module(), *given(), MASK, block_indices=BLOCKS_SEEN)
