"""How DTensors are sharded in our operators: by batch or by heads, else replicated.

DTensor gathers what is sharded otherwise, by tokens for one: the answer is right, and every rank makes all of it.
``flashmoe_science.distributed.ContextParallel`` shards tokens.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

Axis = Literal["batch", "heads"]
_LIKE_Q = ("q", "k", "v", "o", "do")
_GRADIENTS = ("q", "k", "v", "sinks", "bias")  # what the operator of gradients returns


def prepare_dtensors(tensors: Iterable[object]) -> None:
    """Register the strategies when the first DTensor comes. torch's module of DTensors loads slowly."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and any(issubclass(kind, module.DTensor) for kind in map(type, tensors)):
        _register()


@functools.cache
def _register() -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    operators = torch.ops.flashmoe_science
    for operator, returns in (
        (operators.attention_forward.default, _outputs),
        (operators.attention_forward_lse.default, _outputs),
        (operators.attention_features.default, _outputs),
        (operators.attention_varlen.default, _outputs),
        (operators.attention_backward.default, _gradients),
    ):
        register_sharding(operator)(_strategies(operator, returns))
        # The public way remembers a strategy whatever the options are: one call would get the LSE of another.
        known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info  # noqa: SLF001 - has no public name
        known[operator] = RuntimeSchemaInfo(0, needs_pytree=True)


def _strategies(operator: Any, returns: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    names = [argument.name for argument in operator._schema.arguments]  # noqa: SLF001 - has no public name
    outputs = len(operator._schema.returns)  # noqa: SLF001

    def strategies(*arguments: Any) -> list[Any]:
        from torch.distributed.tensor import Replicate

        given = dict(zip(names, arguments, strict=True))
        tensors = {name: value for name, value in given.items() if hasattr(value, "placements")}
        whole = [Replicate() if name in tensors else None for name in names]
        found: list[Any] = [([Replicate()] * outputs, whole)]
        for axis in _axes(given):
            inputs = [_placement(name, tensors, axis) if name in tensors else None for name in names]
            found.append((returns(given, tensors, axis)[:outputs], inputs))
        return found

    return strategies


def _axes(given: Mapping[str, Any]) -> list[Axis]:
    """Return what a call can be sharded by. A mask of dropout counts heads of the whole batch."""
    if given.get("dropout_p"):
        return []
    mesh, packed = given["q"].mesh, given.get("cu_seqlens_q") is not None
    axes: list[Axis] = [] if packed else ["batch"]
    heads_kv = given["k"].shape[1]
    sizes = [mesh.size(dim) for dim in range(mesh.ndim)]
    ways = (math.prod(some) for count in range(1, mesh.ndim + 1) for some in itertools.combinations(sizes, count))
    # Each rank has whole groups, over any dimensions of the mesh. torch itself leaves out more shards than heads.
    if all(heads_kv % ranks == 0 or ranks > heads_kv for ranks in ways):
        axes.append("heads")
    return axes


def _dimension(name: str, tensors: Mapping[str, Any], axis: Axis) -> int | None:
    """Return the dimension of a tensor that is sharded, or None where all ranks have it whole."""
    packed = "cu_seqlens_q" in tensors
    if name in _LIKE_Q:
        return 1 if axis == "heads" else 0
    if name in ("lse", "dlse"):
        return 1 if axis == "heads" and not packed else 0
    if name in ("sinks", "alibi"):
        by_sequence = tensors[name].ndim == 2
        return int(by_sequence) if axis == "heads" else 0 if by_sequence else None
    if name == "bias":
        dimension = 1 if axis == "heads" else 0
        return dimension if tensors[name].shape[dimension] > 1 else None
    return None


def _placement(name: str, tensors: Mapping[str, Any], axis: Axis) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    dimension = _dimension(name, tensors, axis)
    return Replicate() if dimension is None else Shard(dimension)


def _outputs(given: Mapping[str, Any], tensors: Mapping[str, Any], axis: Axis) -> list[Any]:
    from torch.distributed.tensor import Replicate

    has_lse = given.get("return_lse", True)
    return [_placement("o", tensors, axis), _placement("lse", tensors, axis) if has_lse else Replicate()]


def _gradients(given: Mapping[str, Any], tensors: Mapping[str, Any], axis: Axis) -> list[Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    wanted: Sequence[int] = given["wanted"]
    found: list[Any] = []
    for number, name in enumerate(_GRADIENTS):
        if number not in wanted:
            found.append(Replicate())  # it has no elements
            continue
        dimension = _dimension(name, tensors, axis)
        found.append(Partial() if dimension is None else Shard(dimension))
    return found
