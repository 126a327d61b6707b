"""torchtitan's debug model with its heads split over ranks, beside SDPA on one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

LENGTHS = ((7, 1, 12), (3, 17))
OVERRIDE = "flashmoe_science.integrations.torchtitan.varlen_attention"


def make_model(*, by_us: bool) -> Any:
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    config = llama3_configs["debugmodel"](attn_backend="varlen")
    del config.layers[2:]
    if by_us:  # in the trainer's order
        set_llama3_sharding_config(config, enable_sp=True)
        apply_overrides(OverrideConfig(imports=[OVERRIDE]), config)
    else:
        for layer in config.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    return model


def split_heads(rank: int, ranks: int) -> dict[str, Any]:
    """Return the largest errors of logits and of each gradient, with torchtitan's check of how tensors are split."""
    import spmd_types as spmd
    from torchtitan.distributed import parallel_dims
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types
    from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend

    ours, theirs = make_model(by_us=True), make_model(by_us=False)
    set_spmd_backend("spmd_types")
    parallel_dims.device_type = "cpu"  # torchtitan takes a GPU where there is one
    dims = parallel_dims.ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=ranks, pp=1, ep=1, world_size=ranks)
    dims.build_mesh()
    context = get_spmd_context(parallel_dims=dims, spmd_typechecking=True)
    make = torch.Generator().manual_seed(1)
    tokens = torch.randint(2048, (2, 20), generator=make)
    weights = torch.randn(2, 20, 2048, generator=make).chunk(ranks, -1)[rank]
    places = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
    expected = [
        theirs(part[None], torch.arange(len(part))[None])
        for row, lengths in zip(tokens, LENGTHS, strict=True)
        for part in row.split(lengths)
    ]
    whole = torch.cat(expected, 1).view(2, 20, 2048).chunk(ranks, -1)[rank]
    (whole * weights).sum().backward()

    annotate_input_spmd_types(dims, tokens, tokens.clone(), {"positions": places})
    with context(), spmd.no_typecheck():
        ours.parallelize(dims)
    with context():
        found = ours(tokens, places, ours.get_attention_masks(places))
        with spmd.no_typecheck():
            (found * weights).sum().backward()
    errors = {"logits": float((found - whole).abs().max())}
    for (name, parameter), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        dist.all_reduce(other.grad)  # of the logits of all ranks
        mine = parameter.grad
        if "norm" in name:
            dist.all_reduce(mine)  # of each rank's tokens
        axis = next((axis for axis in range(mine.dim()) if mine.shape[axis] != other.shape[axis]), None)
        part = other.grad if axis is None else other.grad.chunk(ranks, axis)[rank]
        errors[name] = float((mine - part).abs().max() / part.abs().max())
    return errors
