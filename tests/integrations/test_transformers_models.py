"""What our attention does with models of transformers that ask for more than it knows: right, or refused by name."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from flashmoe_science import InputError, UnsupportedError, flash_attention

pytest.importorskip("transformers", minversion="5.0", reason="transformers is optional")

import transformers

from flashmoe_science.integrations import transformers as integration, transformers_models
from flashmoe_science.integrations.transformers import register
from flashmoe_science.integrations.transformers_masks import make_mask

from . import models

ROOT = Path(__file__).parents[2]
attend: Any = integration.attend  # is called with tensors and options that tests put together


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


def make(kind: str, implementation: str, **changes: Any) -> Any:
    """Return a random model of a configuration's class; that of one class has the same weights each time."""
    sizes = {**models._SIZES, "num_hidden_layers": 2, **changes}
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return model


def pair(kind: str, **changes: Any) -> tuple[Any, Any]:
    return make(kind, "moe_science", **changes), make(kind, "eager", **changes)


def assert_same_logits(both: tuple[Any, Any], tokens: torch.Tensor, **options: Any) -> None:
    found, expected = (models.logits(model, tokens, **options) for model in both)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def tensors(rows: int = 5, keys: int = 5) -> tuple[torch.Tensor, ...]:
    return torch.randn(1, 2, rows, 8), torch.randn(1, 2, keys, 8), torch.randn(1, 2, keys, 8)


@pytest.mark.parametrize("name", ["sinks", "head_mask", "topk_indices", "anything"])
def test_keywords_that_are_not_understood_raise_by_name(name):
    options = {name: torch.zeros(1)}
    with pytest.raises(
        UnsupportedError, match=f"^{name} is not understood by flashmoe_science's attention, got Tensor"
    ):
        attend(torch.nn.Module(), *tensors(), None, **options)
    attend(torch.nn.Module(), *tensors(), None, **{name: None})


def test_what_does_not_concern_attention_may_be_handed_over():
    given = {"use_cache": True, "position_ids": torch.arange(5)[None], "output_router_logits": False}
    attend(torch.nn.Module(), *tensors(), None, **given)


@pytest.mark.parametrize("kind", ["BloomConfig", "XGLMConfig"])
def test_models_with_attention_of_their_own_are_refused(kind):
    sizes = {"vocab_size": 64, "d_model": 32, "ffn_dim": 48, "attention_heads": 4, "num_layers": 2}
    model = make(kind, "moe_science", **sizes)
    with pytest.raises(UnsupportedError, match="its layers compute attention themselves"):
        model(torch.randint(5, 60, (1, 9)))


@pytest.mark.parametrize("layers", [1, 2])
def test_a_window_that_the_layer_keeps_to_itself(layers):
    """PhiMoE's mask has a window, and its layers do not hand it over."""
    both = pair("PhimoeConfig", sliding_window=6, num_local_experts=2, num_experts_per_tok=1, num_hidden_layers=layers)
    assert_same_logits(both, torch.randint(5, 60, (2, 19)))


SHARED: dict[str, Any] = {
    "head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 6,
}  # fmt: skip


def test_layers_that_share_keys_cut_their_queries():
    """With fewer queries than keys, the mask has to say which they are."""
    both = pair("Gemma4TextConfig", **SHARED)
    tokens = torch.randint(5, 60, (1, 19))
    for kept in (1, 3):
        assert_same_logits(both, tokens, logits_to_keep=kept)
    found, expected = (
        model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False, eos_token_id=None,
            prompt_lookup_num_tokens=3, output_logits=True, return_dict_in_generate=True,
        )
        for model in both
    )  # fmt: skip
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "keys"), [(3, 5), (5, 3), (2, 9)])
def test_none_as_a_mask_says_too_little_of_other_keys_than_queries(rows, keys):
    with pytest.raises(
        UnsupportedError, match=f"^attention_mask None is not served for {rows} causal queries and {keys}"
    ):
        attend(torch.nn.Module(), *tensors(rows, keys), None)
    attend(torch.nn.Module(), *tensors(rows, keys), None, is_causal=False)
    attend(torch.nn.Module(), *tensors(1, keys), None)


def test_an_empty_static_cache_is_filled_without_a_bias(monkeypatch):
    """Its mask says of itself that it is causal from the first key; a mask that was cut does not."""
    calls: list[Any] = []

    def record(*given, **options):
        calls.append((given[1].shape[2], options["bias"] is None))
        return flash_attention(*given, **options)

    monkeypatch.setattr("flashmoe_science.integrations.transformers.flash_attention", record)
    model, tokens = models.make("mistral", "moe_science"), torch.randint(5, 60, (2, 9))
    options = {"cache_implementation": "static", "disable_compile": True, "max_new_tokens": 2, "do_sample": False}
    model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    assert calls[:2] == [(9, True)] * 2


class _Config(transformers.LlamaConfig):  # type: ignore[misc]
    model_type = "not_in_the_table"


def test_models_that_the_table_does_not_have_are_warned_of_once_and_get_masks():
    layer = torch.nn.Module()
    layer.config = _Config()
    with pytest.warns(UserWarning, match=r"model type not_in_the_table .* was not tried with flashmoe_science"):
        attend(layer, *tensors(), None, is_causal=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(layer, *tensors(), None, is_causal=True)
    assert make_mask(1, 9, 9, 0, 0, config=layer.config) is not None
    known = transformers.LlamaConfig()
    assert make_mask(1, 9, 9, 0, 0, config=known) is None


@pytest.mark.filterwarnings("ignore:model type")
@pytest.mark.parametrize("config", [_Config(), transformers.LlamaConfig()])
def test_a_mask_that_hides_nothing_is_not_taken_for_causal(config):
    """Eager attention gets None then, and shows all keys. A layer that says it is causal would hide some."""
    whole = {"config": config, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
    mask = make_mask(1, 5, 7, 0, 0, mask_function=lambda *_: torch.tensor(data=True), use_vmap=True, **whole)
    assert mask is not None
    assert mask.untyped_storage().nbytes() == 4
    layer = torch.nn.Module()
    layer.config = config
    layer.is_causal = True  # type: ignore[assignment]
    q, k, v = given = tensors(5, 7)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    for shown in (mask, mask[:, :, :, :7]):  # a mask that was cut is an ordinary one
        torch.testing.assert_close(attend(layer, *given, shown, sliding_window=2)[0], expected)


@pytest.mark.filterwarnings("ignore:model type splinter")
def test_an_encoder_that_the_table_does_not_have():
    """Its layers do not say whether they are causal, and it makes no mask without padding."""
    config = transformers.SplinterConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
    )
    torch.manual_seed(0)
    theirs = transformers.SplinterModel._from_config(config, attn_implementation="eager").eval()
    ours = transformers.SplinterModel._from_config(config, attn_implementation="moe_science").eval()
    ours.load_state_dict(theirs.state_dict())
    tokens, seen = torch.randint(5, 60, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    for hidden in (0, 3):
        seen[0, :hidden] = 0
        found, expected = (model(tokens, attention_mask=seen).last_hidden_state for model in (ours, theirs))
        torch.testing.assert_close(found[seen.bool()], expected[seen.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:model type")
@pytest.mark.parametrize("says", [True, None])
def test_none_as_a_mask_of_an_unknown_layer_means_two_things(says):
    layer = torch.nn.Module()
    layer.config = _Config()
    if says is not None:
        layer.is_causal = says
    with pytest.raises(UnsupportedError, match="eager attention shows all keys then, and SDPA hides those ahead"):
        attend(layer, *tensors(), None)
    attend(layer, *tensors(1, 5), None)
    attend(layer, *tensors(), None, is_causal=True)
    layer.is_causal = False  # type: ignore[assignment]
    attend(layer, *tensors(), None)


@pytest.mark.filterwarnings("ignore:model type qwen2_5_vl_text")
def test_a_vision_model_that_cuts_windows_into_sequences_of_their_own():
    """Its layers hold a window, in pixels, that they need no mask for."""

    def make_model(implementation: str) -> Any:
        text = {
            "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2,
            "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2]},
        }  # fmt: skip
        vision = {
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 1, "window_size": 16, "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
        }  # fmt: skip
        config = transformers.Qwen2_5_VLConfig(
            text_config=text, vision_config=vision, image_token_id=60, video_token_id=61, vision_start_token_id=62,
            vision_end_token_id=63,
        )  # fmt: skip
        torch.manual_seed(0)
        return transformers.AutoModelForImageTextToText.from_config(config, attn_implementation=implementation).eval()

    tokens = torch.tensor([[5, 6, 7, 62, *[60] * 16, 8, 9]])
    image = {"pixel_values": torch.randn(64, 48), "image_grid_thw": torch.tensor([[1, 8, 8]])}
    with torch.no_grad():
        expected, found = (make_model(name)(tokens, **image).logits for name in ("eager", "moe_science"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_another_version_of_transformers_is_not_known(monkeypatch):
    monkeypatch.setattr(transformers_models, "_VERSION_KNOWN", False)
    monkeypatch.setattr(transformers_models, "_warned", set())
    assert make_mask(1, 9, 9, 0, 0, config=transformers.LlamaConfig()) is not None
    with pytest.warns(UserWarning, match="model type llama of this version of transformers"):
        models.make("llama", "moe_science")(torch.randint(5, 60, (1, 9)))


@pytest.mark.parametrize(
    "line",
    [
        'if self.config._attn_implementation in ("eager", "sdpa"):',
        'if config._attn_implementation not in ["eager"]:',
        'if self.config._attn_implementation == "eager":',
        'if "sdpa" != self.config._attn_implementation:',
        "self.attention = CLASSES[config._attn_implementation]()",
        'kind = config._attn_implementation; self.sparse = kind == "eager"',
        'self.sparse = config._attn_implementation.startswith("sd")',
    ],
)
def test_sources_that_branch_on_the_name_are_refused(line, tmp_path, monkeypatch):
    tail = "        pass\n" if line.endswith(":") else ""
    source = f"import torch\nclass Layer(torch.nn.Module):\n    def f(self, config):\n        {line}\n    {tail}"
    (tmp_path / "branching_model.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "branching_model", raising=False)
    monkeypatch.setattr(transformers_models, "_branches", {})
    layer = importlib.import_module("branching_model").Layer()
    layer.config = _Config()
    with pytest.raises(
        UnsupportedError, match=r"^branching_model branches on the name of the attention implementation"
    ):
        attend(layer, *tensors(), None)


def test_sources_that_look_the_name_up_are_not(tmp_path, monkeypatch):
    source = "from torch.nn import Module as Layer\nf = lambda c: ALL_ATTENTION_FUNCTIONS[c._attn_implementation]\n"
    source += "class Layer(Layer):\n    def g(self, c):\n        return c._attn_implementation is None\n"
    (tmp_path / "other_model.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    layer = importlib.import_module("other_model").Layer()
    layer.config = _Config()
    monkeypatch.setattr(transformers_models, "_warned", {"not_in_the_table"})
    attend(layer, *tensors(), None, is_causal=True)
    compiled = torch.compile(
        lambda *given: attend(layer, *given, None, is_causal=True)[0], fullgraph=True, backend="eager"
    )
    given = tensors()
    torch.testing.assert_close(compiled(*given), attend(layer, *given, None, is_causal=True)[0])
    monkeypatch.setattr(transformers_models, "_warned", set())
    monkeypatch.setattr(transformers_models, "_branches", {"other_model": True})
    torch._dynamo.reset()
    compiled = torch.compile(lambda *given: attend(layer, *given, None, is_causal=True)[0], backend="eager")
    with pytest.raises(UnsupportedError, match="other_model branches on the name"):
        compiled(*given)


def test_layers_of_unknown_models_do_not_keep_windows_to_themselves():
    layer = torch.nn.Module()
    layer.sliding_window = 3  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match=r"sliding_window must be given .* whose sliding_window is 3"):
        attend(layer, *tensors(), None)
    attend(layer, *tensors(), None, sliding_window=None)
    attend(layer, *tensors(3, 3), None)


def _batch(**changes: Any) -> dict[str, Any]:
    """Return what the real collator makes of two sequences of 8 and 11 tokens."""
    tokens = torch.randint(5, 60, (19,), generator=torch.Generator().manual_seed(5)).tolist()
    collate = transformers.DataCollatorWithFlattening(
        return_tensors="pt", **{"return_flash_attn_kwargs": True, **changes}
    )
    batch: dict[str, Any] = collate([{"input_ids": tokens[:8]}, {"input_ids": tokens[8:]}])
    return batch


PACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 6}),
    "phimoe": ("PhimoeConfig", {"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "gemma4": ("Gemma4TextConfig", SHARED),
}


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("seq_idx", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_a_flattened_batch_with_all_that_the_collator_returns(name, seq_idx, use_cache):
    """Each sequence has the logits that it has alone, and the loss is that of eager attention."""
    kind, changes = PACKED[name]
    ours, eager = pair(kind, **changes)
    batch = _batch(return_seq_idx=seq_idx)
    found = models.logits(
        ours, tokens=batch["input_ids"], **_without(batch, "input_ids", "labels"), use_cache=use_cache
    )
    alone = [models.logits(eager, part) for part in batch["input_ids"].split([8, 11], 1)]
    torch.testing.assert_close(found, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)


def test_a_flattened_batch_trains():
    ours, eager = pair("MistralConfig", sliding_window=6)
    gradients = []
    for model, batch in ((ours, _batch()), (eager, _batch(return_flash_attn_kwargs=False))):
        model(**batch, use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_lengths_spare_the_mask(monkeypatch):
    """The varlen kernel serves a batch whose mask says no more than its lengths."""
    calls: list[str] = []
    for name in ("flash_attention", "flash_attention_varlen"):
        inner = getattr(importlib.import_module("flashmoe_science"), name)

        def record(*given, name=name, inner=inner, **options):
            calls.append(name)
            return inner(*given, **options)

        monkeypatch.setattr(f"flashmoe_science.integrations.transformers.{name}", record)
    models.make("llama", "moe_science")(**_without(_batch(), "labels"), use_cache=False)
    assert calls == ["flash_attention_varlen"] * 2


def _without(batch: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name not in names}


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("ends", [[0, 9, 19], [0, 19], [0, 4, 19]])
def test_lengths_that_contradict_positions_are_refused(ends, use_cache):
    starts = torch.tensor(ends, dtype=torch.int32)
    batch = {**_without(_batch(), "labels"), "cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    batch |= {"max_length_q": 19, "max_length_k": 19}
    with pytest.raises(
        InputError, match=r"^cu_seq_lens_q must start a sequence wherever position_ids does, at \[0, 8\]"
    ):
        models.make("llama", "moe_science")(**batch, use_cache=use_cache)


def test_lengths_that_contradict_a_mask_are_refused():
    ends = torch.tensor([0, 8, 19], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 11, "max_length_k": 11}
    other = torch.block_diag(torch.ones(9, 9), torch.ones(10, 10)).tril().bool()[None, None]
    with pytest.raises(InputError, match=r"^cu_seq_lens_q must agree with attention_mask"):
        attend(torch.nn.Module(), *tensors(19, 19), other, **lengths)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_a_mask_that_hides_more_than_lengths_hides_it(kind):
    """Such as a window that a layer keeps to itself, or a key of the caller's choice."""
    ends = torch.tensor([0, 8, 19], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 11, "max_length_k": 11}
    blocks = torch.block_diag(torch.ones(8, 8), torch.ones(11, 11)).bool()
    for seen in (torch.ones(19, 19).tril().triu(-3).bool(), blocks & (torch.arange(19) != 2)):
        mask = seen[None, None]
        if kind == "additive":
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        q, k, v = tensors(19, 19)
        o, _ = attend(torch.nn.Module(), q, k, v, mask, **lengths)
        bias = torch.zeros(19, 19).masked_fill(~(seen & blocks), -torch.inf)
        torch.testing.assert_close(
            o, flash_attention(q, k, v, bias=bias[None, None].expand(1, 2, 19, 19)).transpose(1, 2)
        )


def test_seq_idx_alone_keeps_nothing_apart():
    ids = torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match=r"^seq_idx alone does not keep sequences apart"):
        attend(torch.nn.Module(), *tensors(), None, seq_idx=ids)
    attend(torch.nn.Module(), *tensors(), None, seq_idx=torch.zeros_like(ids))


def test_whole_models_compile_with_checks():
    """A refusal comes out of a compiled model too."""
    model = models.make("llama", "moe_science")
    tokens = torch.randint(5, 60, (1, 9))
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens).logits, model(tokens).logits)
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def sweep() -> Any:
    sys.path.append(str(ROOT / "tools"))  # where a program of tools/ finds another
    spec = importlib.util.spec_from_file_location("sweep_models", ROOT / "tools" / "sweep_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _entry(
    calls: dict[str, Any] | None = None, skips: tuple[str, ...] = ("causal",), **verdicts: str
) -> dict[str, Any]:
    calls = {"layers": ["Layer"], "types": ["a"], "masks": True, "mask_types": ["a"]} if calls is None else calls
    modes = {mode: {"verdict": verdict, "reason": "E: why, it"} for mode, verdict in verdicts.items()}
    return {"calls": calls, "skips": list(skips), "modes": modes}


@pytest.mark.parametrize(
    ("entry", "status"),
    [
        (_entry(prompt="right", static="not run"), "right"),
        (_entry(prompt="right", flattening="refused"), "right"),
        (_entry(prompt="right", static="wrong"), "wrong"),
        (_entry(prompt="right", static="fails"), "wrong"),
        (_entry(prompt="refused", static="refused"), "refused"),
        (_entry({"masks": True, "mask_types": ["a"]}, prompt="right"), "refused"),
        (_entry({}, prompt="right"), "own attention"),
        (_entry(prompt="not run"), "not built"),
        ({"unbuilt": "x", "modes": {}, "calls": {}}, "not built"),
    ],
)
def test_the_sweep_judges(sweep, entry, status):
    assert sweep.judge(entry)["status"] == status
    table = sweep.table_of({"a": entry})
    if status == "right":
        assert table == {"a": {"skips": ["causal"]}}
    elif status in ("wrong", "refused"):
        assert "refused" in table["a"]
    else:
        assert "a" not in table


def test_the_sweep_keeps_the_fewest_masks_with_the_best_verdicts(sweep, monkeypatch):
    """More masks are tried where something is refused, and not kept where they change nothing."""
    right = {"prompt": "right", "flattening": "refused"}
    verdicts: dict[tuple[str, ...], dict[str, str]] = {
        ("causal", "window"): {**right, "prompt": "wrong"}, ("causal",): right, (): right,
    }  # fmt: skip
    monkeypatch.setattr(transformers_models, "MODELS", transformers_models.MODELS)
    tried: list[tuple[str, ...]] = []

    def judge_all(mode: str) -> dict[str, Any]:
        table: Any = transformers_models.MODELS
        tried.append(table.skips)
        return {"verdict": verdicts[table.skips][mode]}

    monkeypatch.setattr(sweep, "compare", judge_all)
    entry: dict[str, Any] = {"calls": {"window": True}}
    sweep.try_masks(entry, ["prompt", "flattening"], ())
    assert entry["skips"] == ["causal"]
    assert {mode: value["verdict"] for mode, value in entry["modes"].items()} == right
    assert set(tried) == set(verdicts)


def test_two_versions_have_one_table(sweep, monkeypatch):
    newer: dict[str, Any] = {"a": {"skips": ["causal", "window"]}, "b": {"skips": ["causal"]}, "c": {"refused": "x"}}
    older: dict[str, Any] = {"a": {"skips": ["causal"]}, "b": {"refused": "y"}, "c": {"skips": ["causal"]}}
    both = sweep.combined(newer, older, "5.23")
    assert both["a"] == {"skips": ["causal"]}
    assert both["c"] == {"refused": "x"}
    monkeypatch.setattr(transformers_models, "MODELS", both)
    monkeypatch.setattr(transformers_models, "_VERSION", "5.24")
    assert transformers_models._find("b", "transformers.b") is both["b"]
    monkeypatch.setattr(transformers_models, "_VERSION", "5.23")
    with pytest.raises(UnsupportedError, match="model type b is not served: y"):
        transformers_models._find("b", "transformers.b")


def test_the_sweep_tries_a_model(sweep):
    """In this process: the modes of one type that has windows."""
    table = transformers_models.MODELS
    register(sweep.OURS)
    transformers.AttentionInterface.register(sweep.BY_HAND, sweep.attend_by_hand)
    transformers.AttentionMaskInterface.register(sweep.BY_HAND, transformers.masking_utils.eager_mask)
    try:
        entry = sweep.sweep_one("mistral", ["prompt", "padding", "flattening"])
    finally:
        transformers_models.MODELS = table
        register(sweep.OURS)
    assert entry["skips"] == ["causal", "window"]
    assert {value["verdict"] for value in entry["modes"].values()} == {"right"}


def test_the_page_and_the_table_say_the_same():
    """``tools/sweep_models.py --render`` writes both."""
    page = (ROOT / "docs" / "reference" / "transformers-models.md").read_text(encoding="utf-8")
    table = json.loads(transformers_models.TABLE.read_text(encoding="utf-8"))
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    right = page.partition("### Right")[2].partition("###")[0]
    named = set(re.findall(r"`([\w.-]+)`", page))
    for name, entry in table["models"].items():
        if name in named and "refused" in entry and "refused in" not in entry:
            assert any(entry["refused"] in row and f"`{name}`" in row for row in rows), name
        elif name in named:
            assert f"`{name}`" in right, name
