"""Tokens a second of one transformers model, with our attention, PyTorch's and flash-attn's where that can be imported.

One model, one set of weights: only the attention is exchanged. Before anything is timed, logits of every attention have
to be as near to those of fp32 as twice what PyTorch's are. Rounds call all of them in random order. Prints the table,
and writes tokens_per_second.md and, with all times and the environment, tokens_per_second.json.

    python examples/tokens_per_second.py                       # on the GPU, in bf16: Llama-3-8B with random weights
    python examples/tokens_per_second.py --model Qwen/Qwen3-8B --batch 16 --prompt 2048   # weights of the hub
    python examples/tokens_per_second.py --device cpu --tiny

It needs transformers 5.23 or newer and the harness: in a clone, pip install -e ".[proof,examples]".
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.metadata
import json
import random
import sys
import time
from pathlib import Path
from statistics import median

import torch

try:
    import transformers
except ModuleNotFoundError:
    sys.exit('error: transformers is not installed\nhint: pip install "transformers>=5.23"')

from flashmoe_science.integrations.transformers import register
from flashmoe_science.proof.measure.environment import environment

SDPA = "sdpa"
# Names of transformers' attention, and the module that each needs.
FLASH_ATTN = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_4": "flash_attn.cute",
}
SIZES = {
    "llama-3-8b": transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072,
    ),
    "qwen3-8b": transformers.Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072,
    ),
    "tiny": transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    ),
}  # fmt: skip


class WrongLogitsError(Exception):
    """An attention's logits are further from those of fp32 than is allowed."""


def attentions(model):
    """Return the names that transformers has for what can run here, ours first, and why others cannot."""
    found, missing = [register(), SDPA], {}
    for name, module in FLASH_ATTN.items():
        if model.device.type == "cpu":
            missing[name] = "needs a GPU"
            continue
        try:
            importlib.import_module(module)  # without this transformers would look for a build of it on the hub
            model.set_attn_implementation(name)
        except (ImportError, ValueError) as error:  # what transformers raises where a model or a version does not fit
            missing[name] = f"cannot be used: {error}".replace("\n", " ").replace("|", "/")
        else:
            found.append(name)
    return found, missing


def make_model(args, layers=None):
    """Return the model: random weights of named sizes, or those of the hub; ``layers`` of random weights of either."""
    torch.manual_seed(args.seed)
    if args.model not in SIZES and layers is None:
        return transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).to(args.device).eval()
    config = copy.deepcopy(SIZES.get(args.model) or transformers.AutoConfig.from_pretrained(args.model))
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    with torch.device(args.device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=args.dtype).eval()


def draw_prompt(model, batch, length, seed):
    """Return random tokens, none of which ends a text."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, model.config.get_text_config().vocab_size, (batch, length), generator=generator)
    return tokens.to(model.device)


@torch.no_grad()
def logits_of(model, name, tokens):
    """Return in fp32 the logits of a prompt, and of one more token that finds the prompt in a cache."""
    model.set_attn_implementation(name)
    prompt = model(tokens[:, :-1], use_cache=True)
    # The cache by its place, behind mask and positions: transformers 5.24 gave its argument another name.
    step = model(tokens[:, -1:], None, None, prompt.past_key_values)
    return torch.cat([prompt.logits, step.logits], 1).float()


def check_logits(args, model, names):
    """Compare logits of a small model with those of eager attention in fp32. Raises ``WrongLogitsError``.

    An error may be twice SDPA's, and twice what rounding of a sum in this dtype costs: the rule of flash-attn's tests.
    """
    tokens = draw_prompt(model, 2, min(257, args.prompt), args.seed)
    found = {name: logits_of(model, name, tokens) for name in names}
    exact = logits_of(copy.deepcopy(model).float(), "eager", tokens)
    rounded = (exact.to(args.dtype) + 0.3 - 0.3).float()
    errors = {name: (logits - exact).abs().max().item() for name, logits in found.items()}
    allowed = 2 * errors[SDPA] + 2 * (rounded - exact).abs().max().item()
    for name, error in errors.items():
        if not error <= allowed:  # NaN is not
            raise WrongLogitsError(f"logits of {name} must be within {allowed:.3g} of those of fp32, got {error:.3g}")
    return {"errors": errors, "allowed": allowed}


def generate(model, name, prompt, count, cache):
    """Return ``count`` tokens after each prompt, the most probable ones, and the seconds that it took."""
    model.set_attn_implementation(name)
    synchronize = torch.cuda.synchronize if prompt.is_cuda else lambda: None
    synchronize()
    begin = time.perf_counter()
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=count, min_new_tokens=count,
        cache_implementation=cache,
    )  # fmt: skip
    synchronize()
    return tokens[:, prompt.shape[1] :], time.perf_counter() - begin


def measure(args, names):
    """Return for each attention the seconds of all rounds, to the first token and to the last, and its tokens."""
    model = make_model(args)
    model.generation_config.eos_token_id = None  # all texts have the same length
    model.generation_config.pad_token_id = 0
    prompt = draw_prompt(model, args.batch, args.prompt, args.seed)
    runs = {name: {"first_s": [], "last_s": []} for name in names}
    for name in names:  # compiles, and allocates what stays
        runs[name]["tokens"] = generate(model, name, prompt, args.new, args.cache)[0].tolist()
        generate(model, name, prompt, 1, args.cache)
    order = random.Random(args.seed)
    for _ in range(args.rounds):
        for name in order.sample(names, len(names)):
            for key, count in (("first_s", 1), ("last_s", args.new)):
                runs[name][key].append(generate(model, name, prompt, count, args.cache)[1])
    return runs


def summarize(args, runs):
    """Return a row of numbers for each attention: medians over the rounds."""
    rows = {}
    for name, run in runs.items():
        pairs = list(zip(run["first_s"], run["last_s"], strict=True))
        # A round that a hiccup made too short says nothing of its decoding.
        decode = [args.batch * (args.new - 1) / (last - first) for first, last in pairs if last > first]
        same = [a == b for mine, sdpa in zip(run["tokens"], runs[SDPA]["tokens"], strict=True)
                for a, b in zip(mine, sdpa, strict=True)]  # fmt: skip
        rows[name] = {
            "prompt_tokens_per_second": median(args.batch * args.prompt / first for first, _ in pairs),
            "decode_tokens_per_second": median(decode) if decode else None,
            "lowest": min(decode, default=None),
            "highest": max(decode, default=None),
            "tokens_per_second": median(args.batch * args.new / last for _, last in pairs),
            "same_tokens": sum(same) / len(same),
        }
    return rows


def render(document):
    """Return the table, what it was measured on, and what could not be."""
    where, s = document["environment"], document["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    place = where["gpu"]["name"] if where["gpu"] else where["cpu"] or "CPU"
    commit = (where["commit"] or "unknown")[:12] + (" with changes" if where["dirty"] else "")
    caption = (
        f"{s['model']}, {s['dtype']}, {s['cache']} cache, batch {s['batch']}, prompts of {s['prompt']} tokens, "
        f"{s['new']} new ones; medians of {s['rounds']} rounds on {place}, driver {where['driver']}, {versions}, "
        f"commit {commit}."
    )
    titles = ("prompt tokens/s", "decoded tokens/s", "lowest to highest", "tokens/s of both", "same tokens as sdpa")
    lines = [caption, "", f"| attention | {' | '.join(titles)} |", f"| --- |{' ---: |' * len(titles)}"]
    for name, row in document["rows"].items():
        decode, low, high = (
            "-" if row[key] is None else f"{row[key]:,.1f}" for key in ("decode_tokens_per_second", "lowest", "highest")
        )
        lines.append(
            f"| {name} | {row['prompt_tokens_per_second']:,.1f} | {decode} | {low} to {high} "
            f"| {row['tokens_per_second']:,.1f} | {row['same_tokens']:.0%} |"
        )
    lines += [f"| {name} | {why} | | | | |" for name, why in document["missing"].items()]
    return "\n".join(lines) + "\n"


def parse(arguments):
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda; with --tiny cpu where there is none")
    parser.add_argument("--model", default="llama-3-8b", help=f"{', '.join(SIZES)} (random weights), or one of the hub")
    parser.add_argument("--cache", choices=("dynamic", "static"), default="dynamic", help="of transformers")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, and few tokens: seconds on a CPU")
    sizes = {"batch": (8, 2), "prompt": (4096, 24), "new": (128, 6), "rounds": (5, 2)}
    for name, (value, _) in sizes.items():
        parser.add_argument(f"--{name}", type=int, help=f"default: {value}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(), help="folder for tokens_per_second.md and .json")
    args = parser.parse_args(arguments)
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
        if args.device == "cpu" and not args.tiny:
            parser.error("torch finds no GPU: --tiny takes seconds on a CPU; --device cpu runs the whole model in fp32")
    for name, (value, tiny) in sizes.items():
        if getattr(args, name) is None:
            setattr(args, name, tiny if args.tiny else value)
    if min(args.batch, args.rounds) < 1 or min(args.prompt, args.new) < 2:
        parser.error("--batch and --rounds must be at least 1, --prompt and --new at least 2")
    if args.tiny:
        args.model = "tiny"
    args.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    return args


def main(arguments=None):
    """Check, measure, print and write."""
    args = parse(arguments)
    if args.device == "cpu":
        print("on a CPU ours is the reference in torch, not a kernel: its speed says nothing")
    small = make_model(args, layers=2)
    names, missing = attentions(small)
    checked = check_logits(args, small, names)
    del small
    runs = measure(args, names)
    settings = {key: getattr(args, key) for key in ("model", "cache", "batch", "prompt", "new", "rounds", "seed")}
    where = environment().model_dump(mode="json")
    versions = {**where["versions"], "transformers": transformers.__version__}
    for package in ("flash-attn", "flash-attn-3", "flash-attn-4"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    document = {
        "environment": where,
        "versions": versions,
        "settings": settings | {"dtype": str(args.dtype).removeprefix("torch.")},
        "check": checked,
        "rows": summarize(args, runs),
        "missing": missing,
        "runs": runs,
    }
    table = render(document)
    print(table, end="")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "tokens_per_second.md").write_text(table, encoding="utf-8")
    (args.out / "tokens_per_second.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    print(f"wrote {args.out / 'tokens_per_second.md'} and {args.out / 'tokens_per_second.json'}")


if __name__ == "__main__":
    main()
