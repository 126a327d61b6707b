"""Write the table of models into a page: ``model_table.py docs/reference/features.md``.

Its rows are planned from ``model_configurations.json``, which ``model_table.py --configurations`` writes: defaults of
transformers' configurations. A test compares all three.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feature_table import BACKWARD_LETTERS, CACHE_LETTERS, LETTERS as FORWARD_LETTERS, SPARSE_LETTERS

from flashmoe_science.attention.backward.plan import plan_backward
from flashmoe_science.attention.backward.problem import BackwardProblem
from flashmoe_science.attention.decode.plan import plan_with_kv_cache
from flashmoe_science.attention.decode.problem import CacheProblem
from flashmoe_science.attention.forward.plan import plan_attention
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.attention.sparse.plan import plan_sparse_mla
from flashmoe_science.attention.sparse.problem import SparseProblem
from flashmoe_science.errors import UnsupportedError
from flashmoe_science.gpu.specs import SPECS, GpuSpec

BEGIN, END = "<!-- models:begin -->", "<!-- models:end -->"
CONFIGURATIONS = Path(__file__).with_name("model_configurations.json")
# Model -> type of its configuration in transformers, and what the defaults lack. Kimi-K2 has DeepSeek-V3's type, and
# by the README of MoonshotAI/Kimi-K2 64 heads.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3.5": ("qwen3_5_text", {}),
    "Gemma-4": ("gemma4_text", {}),
    "DeepSeek-V3.2": ("deepseek_v32", {}),
    "DeepSeek-V4": ("deepseek_v4", {}),
    "GLM-5": ("glm_moe_dsa", {}),
    "Kimi-K2": ("deepseek_v3", {"num_attention_heads": 64, "num_key_value_heads": 64}),
    "Kimi-Linear": ("kimi_linear", {}),
    "gpt-oss": ("gpt_oss", {}),
    "MiniMax-M3": ("minimax_m3_vl_text", {}),
}
_FIELDS = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "index_topk", "index_n_heads", "index_block_size", "index_topk_blocks",
    "compress_rates",
)  # fmt: skip
LETTERS = {**FORWARD_LETTERS, **BACKWARD_LETTERS, **CACHE_LETTERS, **SPARSE_LETTERS}
# Batch and tokens of prompts; batch, queries and keys of decoding: a token, many sequences, tokens that are drafted.
_PROMPTS = ((1, 512), (1, 8192), (8, 2048))
_STEPS = ((1, 1, 8192), (64, 1, 4096), (8, 4, 8192))
_GPUS = ("H200", "A100")  # sm_90 and sm_80
_PAGE = 64
Planned = Callable[[GpuSpec], Iterable[str]]


@dataclass(frozen=True)
class Layer:
    """Attention layers of one kind: what they are, and the calls that serve them."""

    kind: str
    numbers: str
    prompt: str
    gradients: str
    decoding: str


def configurations() -> dict[str, Any]:
    """Return what the rows need of transformers' configurations."""
    import transformers
    from transformers import CONFIG_MAPPING

    models = {}
    for model, (model_type, changes) in MODELS.items():
        config = CONFIG_MAPPING[model_type]()
        held = config.to_dict()
        fields = {name: held[name] for name in _FIELDS if held.get(name) is not None} | changes
        fields["layer_types"] = sorted(set(held.get("layer_types") or ["full_attention"]))
        if "per_layer_config" in held:  # of Gemma-4, whose global layers have wider heads
            (fields["full_head_dim"],) = {layer["head_dim"] for layer in held["per_layer_config"].values()}
        module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
        source = Path(module.__file__ or "").read_text(encoding="utf-8")
        fields["sinks"] = "self.sinks = nn.Parameter" in source
        models[model] = {"configuration": type(config).__name__, **fields}
    return {"transformers": transformers.__version__, "models": models}


def _sizes(fields: dict[str, Any]) -> dict[str, Any]:
    """Return heads and columns of a layer that is not latent."""
    columns = fields["head_dim"]
    sizes = {"heads": fields["num_attention_heads"], "heads_kv": fields["num_key_value_heads"]}
    sinks = {"sinks": "bf16"} if fields["sinks"] else {}
    return {**sizes, "head_dim": columns, "head_dim_v": columns, **sinks}


def _forward(options: dict[str, Any]) -> Iterator[AttentionProblem]:
    for batch, tokens in _PROMPTS:
        yield AttentionProblem(**{"batch": batch, "seqlen_q": tokens, "seqlen_k": tokens, "dtype": "bf16", **options})


def _prompt(**options: Any) -> str:
    return _cell(lambda gpu: (plan_attention(problem, gpu).kernel for problem in _forward(options)))


def _gradients(**options: Any) -> str:
    problems = [BackwardProblem(problem, wants_sinks=bool(problem.sinks)) for problem in _forward(options)]
    return _cell(lambda gpu: (plan_backward(problem, gpu).kernel for problem in problems))


def _decoding(page_size: int = _PAGE, **options: Any) -> str:
    problems = [
        CacheProblem(
            **{"batch": batch, "seqlen_q": queries, "capacity": keys, "causal": True, "dtype": "bf16", **options},
            page_size=page_size,
        )
        for batch, queries, keys in _STEPS
    ]
    return _cell(lambda gpu: (plan_with_kv_cache(problem, gpu).kernel for problem in problems))


def _sparse(steps: Iterable[tuple[int, int, int]], heads: int, top_k: int, columns: tuple[int, int], sinks: str) -> str:
    problems = [
        SparseProblem(batch, heads, queries, keys, top_k, *columns, "bf16", page_size=_PAGE, sinks=sinks)
        for batch, queries, keys in steps
    ]
    return "`sparse_mla`: " + _cell(lambda gpu: (plan_sparse_mla(problem, gpu).kernel for problem in problems))


def _cell(kernels: Planned) -> str:
    """Return the letters of the kernels on sm_90, and behind a semicolon those on sm_80 where they are others."""
    found = []
    for gpu in _GPUS:
        try:
            letters = {LETTERS[kernel] for kernel in kernels(SPECS[gpu])}
        except UnsupportedError:
            letters = {"–"}
        found.append(" ".join(sorted(letters, key=[*LETTERS.values(), "–"].index)))
    return found[0] if found[0] == found[1] else f"{found[0]}; {found[1]}"


def _mask(heads: int = 1) -> dict[str, Any]:
    return {"causal": False, "mask_batch": 1, "mask_heads": heads}


def _plain(fields: dict[str, Any], kind: str) -> Layer:
    """Return layers with keys and values of their own, with a window or without."""
    sliding = kind == "sliding_attention"
    sizes = _sizes(
        {**fields, "head_dim": fields["head_dim"] if sliding else fields.get("full_head_dim", fields["head_dim"])}
    )
    window: dict[str, Any] = {"window": (fields["sliding_window"] - 1, -1)} if sliding else {}
    numbers = f"{sizes['heads']} heads on {sizes['heads_kv']}, D {sizes['head_dim']}"
    numbers += f", window {fields['sliding_window']}" if sliding else ""
    numbers += ", sinks" if fields["sinks"] else ""
    options = {**sizes, **window, "causal": True}
    return Layer(
        "sliding" if sliding else "full",
        numbers,
        _prompt(**options),
        _gradients(**options),
        _decoding(**sizes, **window),
    )


def _latent(fields: dict[str, Any], kind: str) -> Layer:
    """Return MLA: prompts and gradients with heads of their own, decoding in the absorbed form."""
    heads, rank, rope = fields["num_attention_heads"], fields["kv_lora_rank"], fields["qk_rope_head_dim"]
    columns = {"head_dim": fields["qk_nope_head_dim"] + rope, "head_dim_v": fields["v_head_dim"]}
    options: dict[str, Any] = {"heads": heads, "heads_kv": heads, **columns}
    numbers = f"MLA, {heads} heads, ranks {rank}+{rope}, D {columns['head_dim']}, DV {columns['head_dim_v']}"
    if kind == "indexed_attention":
        top_k = fields["index_topk"]
        absorbed = heads, top_k, (rank + rope, rank), ""
        prompt = _sparse(((1, 512, 8192), (4, 2048, 4096)), *absorbed)
        masked = f"`mask=`: {_gradients(**options, **_mask())}"
        return Layer("indexed", f"{numbers}, top {top_k:,}", prompt, masked, _sparse(_STEPS, *absorbed))
    absorbed_sizes = {"heads": heads, "heads_kv": 1, "head_dim": rank + rope, "head_dim_v": rank, "shared_kv": True}
    options["causal"] = True
    return Layer("full", numbers, _prompt(**options), _gradients(**options), _decoding(**absorbed_sizes))


def _compressed(fields: dict[str, Any], kind: str) -> Layer:
    """Return DeepSeek-V4's: a window and compressed rows, of which some layers choose; keys are the values."""
    sizes, window, every = _sizes(fields), fields["sliding_window"], fields["compress_rates"][kind]
    numbers = f"{sizes['heads']} heads on {sizes['heads_kv']}, D {sizes['head_dim']}, K=V, sinks, window {window}"
    masked = f"`mask=`: {_gradients(**sizes, **_mask())}"
    if kind == "compressed_sparse_attention":
        top_k, columns = fields["index_topk"], (sizes["head_dim"], sizes["head_dim_v"])
        call = sizes["heads"], top_k + window, columns, sizes["sinks"]
        numbers += f", top {top_k} of 1 row in {every}"
        prompt = _sparse(((1, 512, 8192), (4, 2048, 4096)), *call)
        return Layer("compressed, sparse", numbers, prompt, masked, _sparse(_STEPS, *call))
    prompt = f"`mask=`: {_prompt(**sizes, **_mask())}"
    decoding = _decoding(page_size=0, **{**sizes, "shared_kv": True, "causal": False})
    return Layer("heavily compressed", f"{numbers}, 1 row in {every}", prompt, masked, decoding)


def _blocks(fields: dict[str, Any]) -> Layer:
    """Return MiniMax-M3's: each group of heads chooses blocks of keys, which decoding reads as pages."""
    sizes, heads = _sizes(fields), fields["index_n_heads"]
    size, count = fields["index_block_size"], fields["index_topk_blocks"]
    numbers = f"{sizes['heads']} heads on {sizes['heads_kv']}, D {sizes['head_dim']}, {count} blocks of {size}"
    options = {**sizes, **_mask(heads)}
    group: dict[str, Any] = {
        **sizes,
        "heads": sizes["heads"] // sizes["heads_kv"],
        "heads_kv": 1,
        "capacity": count * size,
        "seqlen_q": 1,
    }
    decoding = f"blocks as pages: {_decoding(size, **group)}"
    return Layer(
        "block-sparse", numbers, f"`mask=`: {_prompt(**options)}", f"`mask=`: {_gradients(**options)}", decoding
    )


def layers_of(fields: dict[str, Any]) -> Iterator[Layer]:
    """Yield the kinds of attention layers of a model."""
    for kind in fields["layer_types"]:
        if kind == "linear_attention":
            yield Layer("linear", "no softmax", "–", "–", "–")
        elif kind in fields.get("compress_rates", ()):
            yield _compressed(fields, kind)
        elif "kv_lora_rank" in fields:
            yield _latent(fields, kind)
        else:
            yield _plain(fields, kind)
    if "index_topk_blocks" in fields:
        yield _blocks(fields)


def render() -> str:
    """Return the table of models, and where its numbers are from."""
    data = json.loads(CONFIGURATIONS.read_text(encoding="utf-8"))
    lines = ["| model: layers | attention | prompt | gradients | decoding |", "| --- | --- | --- | --- | --- |"]
    for model, fields in data["models"].items():
        for layer in layers_of(fields):
            cells = f"{model}: {layer.kind}", layer.numbers, layer.prompt, layer.gradients, layer.decoding
            lines.append(f"| {' | '.join(cells)} |")
    classes = ", ".join(f"`{fields['configuration']}`" for fields in data["models"].values())
    source = f"Numbers are the defaults of transformers {data['transformers']}: {classes}."
    return "\n".join([*lines, "", source])


def update(page: str) -> str:
    """Return the page with its table as it is now."""
    return re.sub(f"{BEGIN}.*{END}", f"{BEGIN}\n{render()}\n{END}", page, flags=re.DOTALL)


if __name__ == "__main__":
    if sys.argv[1] == "--configurations":
        CONFIGURATIONS.write_text(json.dumps(configurations(), indent=1) + "\n", encoding="utf-8")
    else:
        path = Path(sys.argv[1])
        path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
