"""What ranks send to one another: all-gather of tokens, sums over ranks, and whether they agree.

Messages have tokens first, so what arrives lies in the order of tokens, and views of it are what kernels take.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import FlashmoeError, InputError, UnsupportedError
from .faults import collective
from .layout import Layout, Span

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup
# Dtypes that gloo and NCCL know. Others are gathered as bytes.
_SENT = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
)
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13


def all_to_all(message: Tensor, group: Group) -> Tensor:
    """Send ``message[r]`` to rank r; return what the ranks sent, by rank. ``[W, ...]`` contiguous."""
    received, wait = start_all_to_all(message, group)
    wait()
    return received


def start_all_to_all(message: Tensor, group: Group) -> tuple[Tensor, Callable[[], None]]:
    """Begin to send ``message[r]`` to rank r: return what the ranks send, and what waits until it is there."""
    received = torch.empty(message.shape, dtype=message.dtype, device=message.device)
    with collective(group, "all-to-all"):
        work = dist.all_to_all_single(received, message, group=group, async_op=True)
    return received, functools.partial(_wait, work, group, "all-to-all")


def start_gathering(local: Tensor, group: Group) -> tuple[Tensor, Callable[[], None]]:
    """Begin to gather ``[m, ...]`` of each rank: return ``[W * m, ...]`` by rank, and what waits until it is there."""
    gathered = local.new_empty(group.size() * local.shape[0], *local.shape[1:])
    with collective(group, "all-gather"):
        work = _all_gather(gathered, local, group=group, async_op=True)
    return gathered, functools.partial(_wait, work, group, "all-gather")


def _wait(work: Any, group: Group, what: str) -> None:
    with collective(group, what):
        work.wait()


def gather_tokens(local: Tensor, layout: Layout, group: Group) -> Tensor:
    """Return the tokens ``[T, ...]`` of all ranks in their order, from ``[n, ...]`` of each."""
    if local.dtype not in _SENT:
        rows = local.contiguous().unsqueeze(-1).view(torch.uint8)
        return gather_tokens(rows, layout, group).view(local.dtype).squeeze(-1)
    gathered = local.new_empty(layout.tokens, *local.shape[1:])
    with collective(group, "all-gather"):
        _all_gather(gathered, local.contiguous(), group=group)
    return _take(gathered, layout.of_tokens())


def reduce_tokens(partial: Tensor, layout: Layout, group: Group) -> Tensor:
    """Return the sum over ranks for the tokens of this one, added in one order: the same bits in every run.

    Args:
        partial: ``[T, ...]``, what this rank adds to each token; it is sent as it is.
        layout: which tokens are whose.
        group: of all ranks.

    Returns:
        ``[n, ...]`` in the dtype of the parts.
    """
    owned = _take(partial, layout.of_ranks())
    return sum_of_ranks(all_to_all(torch.unflatten(owned, 0, (layout.ranks, -1)).contiguous(), group))


def sum_of_ranks(received: Tensor) -> Tensor:
    """Return the sum of what the ranks sent, ``[W, ...]``: torch adds 16-bit numbers in fp32, and rounds once."""
    return received[0] + received[1] if len(received) == 2 else received.sum(0)


def sum_ranks_into(out: Tensor, received: Tensor) -> None:
    """Write the sum of what the ranks sent, ``[W, ...]`` fp32, rounded to the dtype of ``out``."""
    if len(received) == 2:
        torch.add(received[0], received[1], out=out)
    else:
        out.copy_(received.sum(0))


def gather_together(tensors: Sequence[Tensor], layout: Layout, group: Group) -> tuple[Tensor, ...]:
    """Return ``gather_tokens`` of several tensors, by one message."""
    # A token's bytes. Rows of one element, or none, may be contiguous with a stride that no view of bytes takes.
    dense = [x.contiguous() if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format) for x in tensors]
    rows = [x.view(torch.uint8) for x in dense]
    gathered = torch.split(gather_tokens(torch.cat(rows, 1), layout, group), [row.shape[1] for row in rows], 1)
    # Copies: a part of one row is contiguous as it is, at an address that the dtype may not allow.
    parts = (part.clone(memory_format=torch.contiguous_format) for part in gathered)
    return tuple(part.view(x.dtype) for part, x in zip(parts, tensors, strict=True))


def _take(tokens: Tensor, spans: Sequence[Span]) -> Tensor:
    """Return spans of ``tokens``, one behind the other."""
    if all(one[1] == other[0] for one, other in itertools.pairwise(spans)):
        return tokens
    return torch.cat([tokens[start:end] for start, end in spans])


class Agreement:
    """Whether all ranks make the same call: a collective would hang else, or mix tensors up."""

    def __init__(self, *groups: Group) -> None:
        """Begin with no call known. Groups are as ``compare`` takes them."""
        self._groups = groups
        self._known: set[Hashable] = set()

    def check(self, kind: Hashable, describe: Callable[[], str]) -> None:
        """Compare a call over ranks, the first time that its kind comes; with ``FLASHMOE_CHECK=1`` every time.

        Args:
            kind: all that must be the same on all ranks.
            describe: returns the same for people, or raises the ``InputError`` that this rank found.

        Raises:
            InputError: on all ranks, where calls differ or one is wrong.
        """
        if kind in self._known and os.environ.get("FLASHMOE_CHECK") != "1":
            return
        self.compare(describe)
        self._known.add(kind)

    def compare(self, describe: Callable[[], str]) -> None:
        """Compare what ``describe`` returns. Raises as ``check``."""
        compare(describe, *self._groups)


def compare(describe: Callable[[], str], *groups: Group) -> None:
    """Compare what ``describe`` returns over ranks.

    Args:
        describe: returns what must be the same.
        groups: of one dimension of a mesh each, the last dimension first.

    Raises:
        InputError: on all ranks, where it differs or raises any error on one.
        UnsupportedError: on all ranks, where it raises one.
    """
    fault: Exception | None = None
    try:
        found = [("", describe())]
    except Exception as error:  # noqa: BLE001 - raised below, on all ranks: they would wait for this one
        fault = error
        told = str(error) if isinstance(error, FlashmoeError) else f"{type(error).__name__}: {error}"
        found = [(told, type(error).__name__)]
    for group in groups:
        of_ranks: list[list[tuple[str, str]]] = [[]] * group.size()
        with collective(group, "comparison of calls"):
            dist.all_gather_object(of_ranks, found, group=group)
        found = list(itertools.chain(*of_ranks))
    for rank, (wrong, kind) in enumerate(found):
        if wrong:
            raise (UnsupportedError if kind == UnsupportedError.__name__ else InputError)(
                f"rank {rank}: {wrong}"
            ) from fault
    for rank, (_, other) in enumerate(found):
        if other != found[0][1]:
            one, two = (_parts_without(x, y) for x, y in ((found[0][1], other), (other, found[0][1])))
            raise InputError(
                f"all ranks must make the same call, but rank 0 has {found[0][1]} and rank {rank} has {other}",
                hint=f"rank 0 has {one or 'nothing'}, and rank {rank} has {two or 'nothing'}, unlike the other",
            )


def _parts_without(text: str, other: str) -> str:
    """Return the parts of a description that another one lacks. Commas within brackets part nothing."""
    parts, others = (re.split(r"(?:, |: )(?![^\[(]*[\])])", each) for each in (text, other))
    return ", ".join(part for part in parts if part not in others)


def describe_tensors(tensors: Mapping[str, Tensor | None]) -> str:
    """Return shapes and dtypes by name, and which tensors have a gradient."""
    return ", ".join(f"{name} {_form(tensor)}" for name, tensor in tensors.items() if tensor is not None)


def kind_of(tensors: Iterable[Tensor | None]) -> tuple[Hashable, ...]:
    """Return what ``describe_tensors`` says, to be compared."""
    records = torch.is_grad_enabled()
    return tuple(
        (x.shape, x.dtype, x.device, records and x.requires_grad) if isinstance(x, Tensor) else str(type(x))
        for x in tensors
    )


def _form(tensor: Tensor) -> str:
    grad = " with a gradient" if tensor.requires_grad and torch.is_grad_enabled() else ""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{grad}"


def group_of(mesh: DeviceMesh, dimension: str) -> Group:
    """Return the group of a mesh of one dimension. Raises ``InputError`` for another mesh."""
    check_mesh(mesh)
    if mesh.ndim != 1:
        raise InputError(
            f"mesh must have one dimension, got {mesh.ndim}", hint=f'choose one, as in mesh["{dimension}"]'
        )
    return mesh.get_group()


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise ``InputError`` unless ranks ascend along each dimension: groups sort them, and DTensors do not."""
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise InputError(f"mesh must be a DeviceMesh, as init_device_mesh makes one, got {type(mesh).__name__}")
    if mesh.get_coordinate() is None:
        raise InputError(f"mesh must have this rank, {dist.get_rank()}, got {mesh.mesh.tolist()}")
    if any(not torch.equal(mesh.mesh, mesh.mesh.sort(axis).values) for axis in range(mesh.ndim)):
        raise InputError(f"ranks of a mesh must ascend in all dimensions, got {mesh.mesh.tolist()}")


def groups_of(mesh: DeviceMesh) -> tuple[Group, Group]:
    """Return the groups of a mesh of two dimensions. Raises ``InputError`` for another mesh."""
    check_mesh(mesh)
    if mesh.ndim != 2:
        raise InputError(
            f'mesh must have two dimensions for strategy="heads+gather", got {mesh.ndim}',
            hint='make one with mesh_dim_names=("gather", "heads"), where "heads" are the ranks of a host',
        )
    return mesh.get_group(0), mesh.get_group(1)
