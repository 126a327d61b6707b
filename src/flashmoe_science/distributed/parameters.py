"""A layer whose experts are split over ranks: its parameters are DTensors, so that state dicts and FSDP2 know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .faults import collective

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .expert_parallel import ExpertParallel


def distribute(local: Tensor, mesh: DeviceMesh, *, by_expert: bool) -> nn.Parameter:
    """Return the parameter of which this rank has ``local``: its experts, or what all ranks have."""
    placement = Shard(0) if by_expert else Replicate()
    return nn.Parameter(DTensor.from_local(local, mesh, [placement], run_check=False))


def local_of(parameter: Tensor) -> Tensor:
    """Return what this rank has. The gradient of what all ranks have is summed over them, as their tokens differ."""
    if not isinstance(parameter, DTensor):
        return parameter
    if any(placement.is_shard() for placement in parameter.placements):
        return parameter.to_local()
    return parameter.redistribute(placements=parameter.placements).to_local(grad_placements=[Partial()])


def draw(parameter: DTensor, fill: Callable[[Tensor], object]) -> None:
    """Fill what this rank has. All experts are drawn in turn, so ranks of one seed have what one process has.

    What several ranks have is that of the first of them, whatever their seeds. Sharded by FSDP2 too, a parameter is
    that of the first rank of the mesh, cut: each rank needs memory for the whole of it meanwhile.
    """
    mesh, local = parameter.device_mesh, parameter.to_local().detach()
    if local.is_meta:
        return
    if mesh.ndim > 1:
        whole = torch.empty(parameter.shape, dtype=local.dtype, device=local.device)
        fill(whole)
        for axis in range(mesh.ndim):
            _take_from_first(whole, mesh.get_group(axis))
        same = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        local.copy_(same.redistribute(placements=parameter.placements).to_local())
        return
    if parameter.placements != (Shard(0),):
        fill(local)
        _take_from_first(local, mesh.get_group())
        return
    first = parameter.device_mesh.get_local_rank() * local.shape[0]
    drawn = torch.empty(local.shape[1:], dtype=local.dtype, device=local.device)
    for expert in range(parameter.shape[0]):
        fill(drawn)
        if first <= expert < first + local.shape[0]:
            local[expert - first].copy_(drawn)


def _take_from_first(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Overwrite a tensor by that of the group's first rank, as bytes: gloo may not know the dtype."""
    with collective(group, "weights of the first rank"):
        dist.broadcast(tensor.view(torch.uint8), dist.get_global_rank(group, 0), group)


# The decorator loads all of Dynamo: only layers over a mesh import this module. Dynamo of torch 2.13 raises an error of
# its own where it traces the comparison of a first call over ranks.
@torch.compiler.disable(reason="the exchange of experts over ranks is not traced")  # type: ignore[no-untyped-call, untyped-decorator]
def run_over_ranks(parallel: ExpertParallel, tokens: Tensor, given: Mapping[str, Any]) -> Tensor:
    """Call ``parallel.fused_moe`` eagerly, also in a model that is compiled."""
    return parallel.fused_moe(tokens, **given)
