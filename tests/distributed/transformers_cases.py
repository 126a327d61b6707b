"""A language model of transformers whose sequences are split over ranks, beside the same model on one process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from flashmoe_science import InputError, UnsupportedError
from flashmoe_science.distributed import ContextParallel, PackedPlan
from flashmoe_science.integrations import transformers_ranks
from flashmoe_science.integrations.transformers import register

TOKENS, LENGTHS = 64, (17, 30, 1, 16)


def make_model(implementation: str, *, windows: bool) -> Any:
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.MistralConfig(**sizes, sliding_window=9) if windows else transformers.LlamaConfig(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    return model.eval()


def run(model: Any, ids: Tensor, labels: Tensor, positions: Tensor, **more: Any) -> dict[str, Tensor]:
    """Return the sum of losses, the logits, and the gradients of two weights."""
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, **more).logits
    loss = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum")
    loss.backward()
    first = model.model.layers[0].self_attn
    return {
        "loss": loss.detach(),
        "logits": logits.detach(),
        "q": first.q_proj.weight.grad,
        "k": first.k_proj.weight.grad,
    }


def case(cp: ContextParallel, *, windows: bool, packed: bool) -> dict[str, float]:
    make = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(50, (2, 1, TOKENS), generator=make)
    lengths = LENGTHS if packed else (TOKENS,)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    register("whole_science")
    whole = run(make_model("whole_science", windows=windows), ids, labels, positions)
    plan: PackedPlan | None = cp.plan(lengths) if packed else None
    name = register(f"split_science_{cp.strategy}", context_parallel=cp)
    local = [cp.shard(x, 1, plan) for x in (ids, labels, positions)]
    more: dict[str, Any] = {"context_parallel_plan": plan} if packed else {}
    mine = run(make_model(name, windows=windows), *local, **more)
    errors = {"logits": float((mine["logits"] - cp.shard(whole["logits"], 1, plan)).abs().max())}
    for part in ("loss", "q", "k"):  # ranks add their parts, as data-parallel training does
        torch.distributed.all_reduce(mine[part])
        errors[part] = float((mine[part] - whole[part]).abs().max() / whole[part].abs().max())
    return errors


def losses(cp: ContextParallel) -> dict[str, float]:
    """Return the loss of one process, and the sum of those that ranks have of labels that were shifted first."""
    tokens = torch.randint(50, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    shifted = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    positions = torch.arange(TOKENS)[None]
    ids, positions, labels, shifted = (cp.shard(x, 1) for x in (tokens, positions, tokens, shifted))
    more = {"position_ids": positions, "shift_labels": shifted, "num_items_in_batch": TOKENS - 1, "use_cache": False}
    split = make_model(register("split_loss", context_parallel=cp), windows=False)
    mine = split(input_ids=ids, labels=labels, **more).loss.detach()
    torch.distributed.all_reduce(mine)
    whole = make_model(register("whole_science"), windows=False)
    return {"whole": float(whole(input_ids=tokens, labels=tokens).loss), "split": float(mine)}


def error_of(model: Any, **given: Any) -> str:
    try:
        model(use_cache=False, **given)
    except InputError as error:
        return str(error).split("\n")[0]
    return ""


def wrong_positions(mesh: Any) -> dict[str, str]:
    """Return the first line of what calls raise, each the first of a model."""
    found = {}
    ids = torch.ones(1, TOKENS, dtype=torch.long)
    for strategy in ("heads", "gather"):
        for packed in (False, True):
            cp = ContextParallel(mesh, strategy=strategy)
            model = make_model(register("split_positions", context_parallel=cp), windows=False)
            plan = cp.plan(LENGTHS) if packed else None
            more: dict[str, Any] = {"input_ids": cp.shard(ids, 1, plan)}
            more |= {"context_parallel_plan": plan} if packed else {}
            found[f"{strategy}, packed {packed}"] = error_of(model, **more)
            if packed:  # zeros fill up
                positions = torch.cat([torch.arange(length) for length in LENGTHS[:-1]] + [torch.zeros(LENGTHS[-1])])
                local = cp.shard(positions.long()[None], 1, plan)
                found[f"{strategy}, padding"] = error_of(model, position_ids=local, **more)
    return found


def comparisons(cp: ContextParallel) -> int:
    """Return how often positions are compared in the second call of a model of two layers."""
    ids, positions = cp.shard(torch.ones(1, TOKENS, dtype=torch.long), 1), cp.shard(torch.arange(TOKENS)[None], 1)
    model = make_model(register("split_counted", context_parallel=cp), windows=False)
    with torch.inference_mode():
        model(input_ids=ids, position_ids=positions, use_cache=False)
        with mock.patch.object(transformers_ranks, "_compare", wraps=transformers_ranks._compare) as compare:
            model(input_ids=ids, position_ids=positions, use_cache=False)
    return compare.call_count


def all_cases(rank: int, ranks: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (ranks,))
    found: dict[str, Any] = {}
    for strategy in ("heads", "gather"):
        cp = ContextParallel(mesh, strategy=strategy)
        for windows in (False, True):
            for packed in (False, True):
                found[f"{strategy}, windows {windows}, packed {packed}"] = case(cp, windows=windows, packed=packed)
    model = make_model(register("split_science_heads", context_parallel=cp), windows=False)
    ids = torch.ones(1, 8, dtype=torch.long)
    mask = torch.ones(1, 8, dtype=torch.long)
    mask[0, :3] = 0
    refused = {
        "padding": {"attention_mask": mask},
        "lengths": {"cu_seq_lens_q": torch.tensor([0, 8])},
        "no plan": {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])},
    }
    messages = {}
    for name, more in refused.items():
        try:
            model(input_ids=ids, use_cache=False, **more)
        except (InputError, UnsupportedError) as error:
            messages[name] = str(error).split("\n")[0]
    return {
        "cases": found,
        "messages": messages,
        "losses": losses(cp),
        "positions": wrong_positions(mesh),
        "comparisons": comparisons(cp),
    }
