"""Try every text model of transformers with our attention and our experts: ``sweep_models.py --out FILE``.

Each model type for causal or masked language models is built tiny, with random weights, and runs as ``MODES`` says.
Ours is compared with eager attention and with SDPA, in fp32 on a CPU. Each type runs in a process of its own with a
limit of time. A second run goes on where the first one ended; ``--only`` takes names and does them anew.

``--render VERSION`` writes the shipped table and the page of the docs from FILE. ``--also`` takes the FILE of another
version: what is shipped holds for both.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import resource
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tiny_models import build, shrink_config

from flashmoe_science.integrations import transformers_models

ROOT = Path(__file__).resolve().parents[1]
OURS, OUR_EXPERTS, BY_HAND = "moe_science", "flashmoe_science", "by_hand"
TOKENS, TOLERANCE = 19, 5e-4
MODES: dict[str, str] = {
    "prompt": "two prompts without padding",
    "short": "prompts of 2 and of 5 tokens, in which no window hides a key",
    "kept": "the same with `logits_to_keep=3`",
    "padding": "padding on the left",
    "packing": "restarting `position_ids`, without a cache",
    "flattening": "what `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` returns",
    "dynamic": "greedy tokens with a growing cache",
    "static": "greedy tokens with a static cache",
    "assisted": "greedy tokens with an assistant",
    "training": "gradients of all parameters",
    "experts": "our experts against eager ones: logits and gradients",
}


def tokens_of(*shape: int, seed: int = 3) -> torch.Tensor:
    """Return tokens that are no special ones."""
    return torch.randint(5, 60, shape, generator=torch.Generator().manual_seed(seed))


def run(mode: str, model: Any, assistant: Any, *, ours: bool) -> dict[str, torch.Tensor]:
    """Return what a mode compares."""
    tokens = tokens_of(2, TOKENS)
    options: dict[str, Any] = {}
    if mode in ("training", "experts"):
        model.train()
        model.zero_grad(set_to_none=True)
        if "labels" in inspect.signature(model.forward).parameters:
            options = {"labels": tokens}
        result = model(tokens, **options)
        loss = result.loss if options else result.logits.float().square().mean()
        loss.backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found["logits"] = result.logits.detach()
        model.eval()
        return found
    with torch.no_grad():
        if mode == "prompt":
            return {"logits": model(tokens).logits}
        if mode == "short":
            return {"logits": torch.cat([model(tokens[:, :length]).logits for length in (2, 5)], 1)}
        if mode == "kept":
            if "logits_to_keep" not in inspect.signature(model.forward).parameters:
                raise NotImplementedError("forward has no logits_to_keep")
            return {"logits": model(tokens, logits_to_keep=3).logits}
        if mode == "padding":
            seen = torch.ones_like(tokens)
            seen[0, :9] = 0
            return {"logits": model(tokens, attention_mask=seen).logits[seen.bool()]}
        if mode == "packing":
            positions = torch.cat([torch.arange(8), torch.arange(11)])[None]
            return {"logits": model(tokens[:1], position_ids=positions, use_cache=False).logits}
        if mode == "flattening":
            batch = flattened(model, tokens, lengths=ours)
            return {"logits": model(**batch, use_cache=False).logits}
        options = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        if mode == "static":
            options |= {"cache_implementation": "static", "disable_compile": True}
        if mode == "assisted":
            options |= {"assistant_model": assistant}
        rows = 1 if mode == "assisted" else 2
        seen = torch.ones(rows, 9, dtype=torch.long)
        made = model.generate(tokens[:rows, :9], attention_mask=seen, **options)
        return {"sequences": made.sequences.float(), "logits": torch.stack(made.logits)}


def attend_by_hand(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as FlashAttention does with packed sequences, in plain torch. All masks are made (``eager_mask``)."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores if not softcap else torch.tanh(scores / softcap) * softcap
    for bias in (attention_mask, position_bias):
        scores = scores if bias is None else scores + bias
    if cu_seq_lens_q is not None:
        own = torch.bucketize(torch.arange(query.shape[2]), cu_seq_lens_q[1:].long(), right=True)
        scores = scores.masked_fill(own[:, None] != own[None], torch.finfo(scores.dtype).min)
    if attention_mask is None and getattr(module, "is_causal", True) and query.shape[2] > 1:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).tril().bool(), torch.finfo(scores.dtype).min)
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        probabilities = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    return (probabilities @ value).transpose(1, 2).contiguous(), None


def flattened(model: Any, tokens: torch.Tensor, *, lengths: bool) -> dict[str, Any]:
    """Return a batch of two sequences as the collator makes it."""
    from transformers import DataCollatorWithFlattening

    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=lengths, return_tensors="pt")
    batch: dict[str, Any] = collate([{"input_ids": tokens[0, :8].tolist()}, {"input_ids": tokens[0, 8:].tolist()}])
    del batch["labels"]
    if "position_ids" not in inspect.signature(model.forward).parameters:
        del batch["position_ids"]
    return batch


def distance(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference of a tensor by the size of what is expected, at least 1."""
    if found.keys() != expected.keys():
        return float("inf")
    worst = 0.0
    for name, value in expected.items():
        if found[name].shape != value.shape:
            return float("inf")
        if not value.isfinite().all():
            return float("nan")
        if value.numel():
            scale = max(float(value.abs().max()), 1e-3 if name not in ("logits", "sequences") else 1.0)
            error = float((found[name] - value).abs().max()) / scale
            worst = max(worst, float("inf") if math.isnan(error) else error)
    return worst


def attempt(work: Callable[[], Any]) -> tuple[Any, str]:
    """Return a result, or None and the first line of what was raised."""
    try:
        return work(), ""
    except Exception as error:  # noqa: BLE001  a model may fail in any way, and the table says how
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return None, f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''} [{where}]"


def record_calls(calls: dict[str, Any]) -> None:
    """Write down who calls our attention, and with which keywords."""
    from transformers import AttentionInterface, AttentionMaskInterface

    inner = AttentionInterface._global_mapping[OURS]  # noqa: SLF001

    def attend(module: Any, *tensors: Any, **options: Any) -> Any:
        calls["layers"] = sorted({*calls.get("layers", []), type(module).__name__})
        kind = getattr(getattr(module, "config", None), "model_type", "")
        calls["types"] = sorted({*calls.get("types", []), kind})
        given = {name for name, option in options.items() if option is not None}
        calls["keywords"] = sorted({*calls.get("keywords", []), *given})
        if options.get("sliding_window"):
            calls["window"] = True
        return inner(module, *tensors, **options)

    AttentionInterface.register(OURS, attend)
    inner_mask = AttentionMaskInterface._global_mapping[OURS]  # noqa: SLF001

    def make_mask(*arguments: Any, **options: Any) -> Any:
        calls["masks"] = True
        kind = getattr(options.get("config"), "model_type", "")
        calls["mask_types"] = sorted({*calls.get("mask_types", []), kind})
        return inner_mask(*arguments, **options)

    AttentionMaskInterface.register(OURS, make_mask)


def sweep_one(model_type: str, modes: list[str]) -> dict[str, Any]:
    """Return what a model type does in each mode."""
    from transformers import CONFIG_MAPPING

    entry: dict[str, Any] = {"modes": {}, "calls": {}}
    config, reason = attempt(lambda: shrink_config(CONFIG_MAPPING[model_type], model_type))
    if config is None:
        return {**entry, "unbuilt": f"configuration: {reason}"}
    eager, reason = attempt(lambda: build(model_type, config, "eager"))
    if eager is None:
        return {**entry, "unbuilt": f"model: {reason}"}
    size = sum(parameter.numel() for parameter in eager.parameters())
    if size > 60e6:
        return {**entry, "unbuilt": f"{size / 1e6:.0f} million parameters after shrinking"}
    entry["parameters"] = size
    ours, reason = attempt(lambda: build(model_type, config, OURS))
    if ours is None:
        return {**entry, "raises": reason}
    sdpa, _ = attempt(lambda: build(model_type, config, "sdpa"))
    by_hand = build(model_type, config, BY_HAND)
    assistant = build(model_type, config, "eager")
    with torch.no_grad():
        for parameter in assistant.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn(parameter.shape) * 0.01)
    record_calls(entry["calls"])
    try_masks(entry, [mode for mode in modes if mode != "experts"], (ours, eager, sdpa, by_hand, assistant))
    if "experts" in modes:
        entry["modes"]["experts"] = compare_experts(model_type, config)
    return entry


def try_masks(entry: dict[str, Any], modes: list[str], models: tuple[Any, ...]) -> None:
    """Run the modes with as few masks as possible, then with more, until all are right; keep the best, of the first."""
    tries: list[dict[str, Any]] = []
    for skips in (("causal", "window"), ("causal",), ()):
        transformers_models.MODELS = Everything(skips)
        done = {mode: compare(mode, *models) for mode in modes}
        is_shown = skips != ("causal", "window") or entry["calls"].get("window")
        # Where no layer hands a window over, nothing shows that one would.
        tries.append({"skips": list(skips) if is_shown else ["causal"], "modes": done})
        if _badness(done) == (0, 0):
            break
    entry |= min(tries, key=lambda one: _badness(one["modes"]))


def _badness(modes: Mapping[str, Mapping[str, Any]]) -> tuple[int, int]:
    """Return how many modes go wrong, and how many are refused."""
    verdicts = [value["verdict"] for value in modes.values()]
    return sum(verdict in ("wrong", "fails") for verdict in verdicts), verdicts.count("refused")


class Everything(dict[str, Any]):
    """A table that has every model as right with these masks skipped."""

    def __init__(self, skips: tuple[str, ...]) -> None:
        super().__init__()
        self.skips = skips

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ARG002  the signature of dict
        """Return that a model is right."""
        return {"skips": self.skips}


def compare(mode: str, ours: Any, eager: Any, sdpa: Any, by_hand: Any, assistant: Any) -> dict[str, Any]:
    """Return the verdict of a mode, with distances and reasons."""
    expected, why = attempt(lambda: run(mode, eager, assistant, ours=False))
    other, why_other = (None, "") if sdpa is None else attempt(lambda: run(mode, sdpa, assistant, ours=False))
    if expected is None and other is None:
        return {"verdict": "not run", "reason": why or why_other}
    found, reason = attempt(lambda: run(mode, ours, assistant, ours=True))
    if found is None:
        refused = reason.startswith(("UnsupportedError", "InputError"))
        if not refused and mode == "flattening":
            theirs, why = attempt(lambda: run(mode, eager, assistant, ours=True))
            if theirs is None:
                return {"verdict": "not run", "reason": why}
        return {"verdict": "refused" if refused else "fails", "reason": reason}
    references = [expected, other]
    if mode in ("packing", "flattening"):  # some models pack for FlashAttention only
        references.append(attempt(lambda: run("flattening", by_hand, assistant, ours=True))[0])
    distances = [distance(found, reference) for reference in references if reference is not None]
    result: dict[str, Any] = {"distances": [float(f"{value:.2g}") for value in distances]}
    if all(math.isnan(value) for value in distances):
        return {**result, "verdict": "not run", "reason": "logits are not finite"}
    if expected is not None and other is not None:
        result["references"] = float(f"{distance(other, expected):.2g}")
    return {**result, "verdict": "right" if any(value <= TOLERANCE for value in distances) else "wrong"}


def compare_experts(model_type: str, config: Any) -> dict[str, Any]:
    """Return the verdict of our experts."""
    calls = []
    transformers_experts: Any = importlib.import_module("flashmoe_science.integrations.transformers_experts")
    inner = transformers_experts.fused_moe
    eager, why = attempt(lambda: build(model_type, config, "eager", "eager"))
    if eager is None:
        return {"verdict": "not run", "reason": why}
    expected, why = attempt(lambda: run("experts", eager, None, ours=False))
    if expected is None:
        return {"verdict": "not run", "reason": why}

    def count(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return inner(*arguments, **options)

    transformers_experts.fused_moe = count
    try:
        ours, reason = attempt(lambda: build(model_type, config, "eager", OUR_EXPERTS))
        found, reason = (None, reason) if ours is None else attempt(lambda: run("experts", ours, None, ours=True))
    finally:
        transformers_experts.fused_moe = inner
    if found is None:
        refused = reason.startswith(("UnsupportedError", "InputError"))
        return {"verdict": "refused" if refused else "fails", "reason": reason}
    if not calls:
        return {"verdict": "not run", "reason": "no experts of the registry"}
    value = distance(found, expected)
    return {"verdict": "right" if value <= TOLERANCE else "wrong", "distances": [float(f"{value:.2g}")]}


def _child(model_type: str, modes: list[str], pipe: Any) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    entry, reason = attempt(lambda: sweep_one(model_type, modes))
    pipe.send(entry if entry is not None else {"modes": {}, "calls": {}, "unbuilt": reason})


def sweep(model_types: list[str], modes: list[str], out: Path, limit: float, *, anew: bool, jobs: int) -> None:
    """Run all types, some at a time, and write each result as soon as it is there."""
    results: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    waiting = [name for name in model_types if anew or name not in results]
    context = multiprocessing.get_context("fork")
    running: dict[Any, tuple[str, Any]] = {}
    done = 0
    total = len(waiting)
    import time

    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(name, modes, theirs))
            process.start()
            theirs.close()
            running[mine] = (name, (process, time.monotonic()))
        ready = multiprocessing.connection.wait(list(running), timeout=1.0)
        for pipe in list(running):
            name, (process, start) = running[pipe]
            late = time.monotonic() - start > limit
            if pipe not in ready and not late:
                continue
            try:
                entry: dict[str, Any] = pipe.recv() if pipe in ready else {"unbuilt": f"took more than {limit:.0f} s"}
            except EOFError:
                entry = {"unbuilt": "the process died"}
            process.kill()
            process.join()
            del running[pipe]
            if set(modes) != set(MODES) and name in results:
                earlier: dict[str, Any] = results[name].get("modes", {})
                entry["modes"] = {**earlier, **entry.get("modes", {})}
            results[name] = {"modes": {}, "calls": {}, **entry}
            done += 1
            verdicts = " ".join(f"{mode}:{value['verdict']}" for mode, value in results[name]["modes"].items())
            print(
                f"{done}/{total} {name}: {results[name].get('unbuilt') or results[name].get('raises') or verdicts}",
                flush=True,
            )
            out.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


OWN = "its layers compute attention themselves, so that no kernel of ours would be used"


def judge(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the table says of a model type: a status, a reason, and the modes that are not right."""
    if entry.get("unbuilt"):
        return {"status": "not built", "reason": entry["unbuilt"]}
    if entry.get("raises"):
        return {"status": "refused by transformers", "reason": entry["raises"]}
    modes = {mode: value for mode, value in entry["modes"].items() if mode != "experts"}
    prompt = modes["prompt"]
    if prompt["verdict"] == "not run":
        return {"status": "not built", "reason": prompt["reason"]}
    if not entry["calls"].get("layers") and prompt["verdict"] != "refused":
        return {"status": "refused" if entry["calls"].get("masks") else "own attention", "reason": OWN}
    if prompt["verdict"] == "refused":
        return {"status": "refused", "reason": prompt["reason"].partition(": ")[2].partition(",")[0]}
    bad = [mode for mode, value in modes.items() if value["verdict"] in ("wrong", "fails")]
    if bad:
        return {"status": "wrong", "reason": f"it goes wrong with {', '.join(bad)}"}
    refused = {mode: value["reason"] for mode, value in modes.items() if value["verdict"] == "refused"}
    not_run = [mode for mode, value in modes.items() if value["verdict"] == "not run"]
    return {"status": "right", "refused": refused, "not run": not_run}


def table_of(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what is shipped: by the type of the configuration that layers or masks have, for all models with it."""
    table: dict[str, dict[str, Any]] = {}
    for own_entry in (False, True):  # what a type does by itself outweighs what it does inside of others
        for name, entry in sorted(results.items()):
            verdict = judge(entry)
            types = {*entry["calls"].get("types", []), *entry["calls"].get("mask_types", [])} - {""}
            for kind in sorted(types | ({name} if verdict["status"] == "refused" else set())):
                if (kind == name) != own_entry:
                    continue
                if verdict["status"] in ("refused", "wrong"):
                    table[kind] = {"refused": verdict["reason"]}
                elif verdict["status"] == "right" and (own_entry or "refused" not in table.get(kind, {})):
                    skips = [*entry["skips"]]
                    if kind in table and "skips" in table[kind]:
                        skips = [skip for skip in skips if skip in table[kind]["skips"]]
                    table[kind] = {"skips": skips}
    return table


def names(found: list[str]) -> str:
    """Return a sentence's worth of model types."""
    return ", ".join(f"`{name}`" for name in sorted(found)) or "none"


def page_of(results: Mapping[str, Any], version: str) -> str:
    """Return the text between the marks of the page of the docs."""
    verdicts = {name: judge(entry) for name, entry in results.items()}
    by_status: dict[str, list[str]] = {}
    for name, verdict in verdicts.items():
        by_status.setdefault(verdict["status"], []).append(name)
    refused = [*by_status.get("refused", []), *by_status.get("wrong", [])]
    counts = {status: len(found) for status, found in by_status.items()}
    summary = (
        f"Made with transformers {version} and torch {torch.__version__.partition('+')[0]}, from {len(results)} model "
        f"types: {counts.get('right', 0)} are right, {len(refused)} are refused, "
        f"{counts.get('own attention', 0)} never ask for our attention, "
        f"{counts.get('refused by transformers', 0)} are refused by transformers, "
        f"{counts.get('not built', 0)} could not be built. The lists are those of the newest version."
    )
    lines = [
        summary,
        "",
        "### Right",
        "",
        names(by_status.get("right", [])) + ".",
        "",
        "### Refused",
        "",
        "| reason | model types |",
        "| --- | --- |",
    ]
    reasons: dict[str, list[str]] = {}
    for name in refused:
        reasons.setdefault(verdicts[name]["reason"], []).append(name)
    for name, verdict in verdicts.items():
        modes: dict[str, list[str]] = {}
        for mode, reason in verdict.get("refused", {}).items():
            modes.setdefault(reason.partition(": ")[2].partition(" [")[0], []).append(mode)
        for text, found in modes.items():
            reasons.setdefault(f"{' and '.join(found)} only: {text}", []).append(name)
    lines += [f"| {reason} | {names(found)} |" for reason, found in sorted(reasons.items())]
    lines += [
        f"| transformers knows no class for the name | {names(by_status.get('refused by transformers', []))} |",
        "",
        "### Own attention",
        "",
        "These models neither ask for masks nor for attention, so they run their own whatever the name: "
        + names(by_status.get("own attention", [])) + ".",
        "",
        "### Not tried",
        "",
        "The sweep could not make these tiny: " + names(by_status.get("not built", [])) + ".",
        "",
        "### Experts",
        "",
    ]  # fmt: skip
    experts: dict[str, list[str]] = {}
    for name, entry in results.items():
        experts.setdefault(entry["modes"].get("experts", {}).get("verdict", ""), []).append(name)
    lines += [
        f"Right: {names(experts.get('right', []))}.",
        "",
        f"Refused by name: {names(experts.get('refused', []))}.",
        "",
        f"Wrong: {names(experts.get('wrong', []) + experts.get('fails', []))}.",
    ]
    return "\n".join(lines) + "\n"


BEGIN, END = "<!-- models:begin -->\n", "<!-- models:end -->"
PAGE = ROOT / "docs" / "reference" / "transformers-models.md"


def combined(table: Mapping[str, Any], older: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Return a table that holds for an older version too: what either refuses, and which masks neither needs."""
    both = dict(table)
    for name, entry in older.items():
        newer = table.get(name, entry)
        if "refused" in entry and "refused" not in newer:
            both[name] = {**newer, **entry, "refused in": [version]}
        elif "skips" in entry and "skips" in newer:
            both[name] = {"skips": [skip for skip in newer["skips"] if skip in entry["skips"]]}
        else:
            both[name] = newer
    return both


def render(out: Path, versions: list[str], also: Path | None = None) -> None:
    """Write the shipped table and the page."""
    results = json.loads(out.read_text())
    table = table_of(results)
    if also:
        table = combined(table, table_of(json.loads(also.read_text())), versions[0])
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(table.items())]
    transformers_models.TABLE.write_text(
        f'{{\n "transformers": {json.dumps(versions)},\n "models": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    )
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(before + BEGIN + page_of(results, " and ".join(versions)) + END + rest.partition(END)[2])
    counts: dict[str, int] = {}
    for entry in results.values():
        status = judge(entry)["status"]
        counts[status] = counts.get(status, 0) + 1
    print(counts)


def all_model_types() -> list[str]:
    """Return the model types of causal and of masked language models."""
    from transformers.models.auto import modeling_auto

    names = {*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
    return sorted(names)


def main() -> None:
    """Sweep, or render."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON of results; it is added to")
    parser.add_argument("--only", nargs="*", help="model types, done anew")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a model type")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--render", nargs="+", metavar="VERSION", help="write table and page, for these versions: 5.24")
    parser.add_argument("--also", type=Path, help="JSON of results of another version, for --render")
    arguments = parser.parse_args()
    if arguments.render:
        render(arguments.out, arguments.render, arguments.also)
        return
    warnings.simplefilter("ignore")
    import transformers
    from transformers import masking_utils

    from flashmoe_science.integrations.transformers import register
    from flashmoe_science.integrations.transformers_experts import register_experts

    transformers.logging.set_verbosity_error()
    register(OURS)
    transformers.AttentionInterface.register(BY_HAND, attend_by_hand)
    transformers.AttentionMaskInterface.register(BY_HAND, masking_utils.eager_mask)
    register_experts(OUR_EXPERTS)
    sweep(
        arguments.only or all_model_types(), arguments.modes, arguments.out, arguments.limit,
        anew=bool(arguments.only), jobs=arguments.jobs,
    )  # fmt: skip


if __name__ == "__main__":
    main()
