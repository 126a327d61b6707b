"""The cards that ranks of this host run on, and what links them."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from ...errors import ProofError
from ..measure import nvml
from ..measure.environment import describe_gpu, uuid_of
from ..records.evidence import RankGroup
from ..worker import Emit, run_task

_TIMEOUT_S = 120.0
_KINDS = ("PCIe without peer access", "PCIe", "NVLink")  # the weakest first
_MOST_LINKS = 18  # of a card


def describe_ranks(ranks: int) -> RankGroup:
    """Describe the cards of so many ranks from a process of its own.

    Raises:
        ProofError: this host has GPUs, and fewer than ranks.
    """
    result = run_task(f"{__name__}:describe", {"ranks": ranks}, timeout_s=_TIMEOUT_S)
    if not result.ok or result.data is None:
        raise ProofError(f"the ranks cannot be described: {result.reason}", hint="`flashmoe doctor` says more")
    if "failure" in result.data:
        raise ProofError(result.data["failure"], hint="a suite says by ranks how many GPUs of one host it needs")
    return RankGroup.model_validate(result.data)


def describe(payload: dict[str, Any], emit: Emit) -> dict[str, Any]:  # noqa: ARG001 - all tasks take both
    """Return a ``RankGroup`` as plain values, or a ``failure``: the task of a process of its own."""
    import torch

    ranks = payload["ranks"]
    if not torch.cuda.is_available():
        return RankGroup(count=ranks, backend="gloo", link="one CPU").model_dump(mode="json")
    if (here := torch.cuda.device_count()) < ranks:
        return {"failure": f"the cases need {ranks} GPUs of one host, and torch can use {here} here"}
    sensors = [nvml.open_sensors(uuid_of(index)) for index in range(ranks)]
    gpus = [describe_gpu(each.limits(), index) for index, each in enumerate(sensors)]
    kinds = [_kind(sensors[a], sensors[b], a, b) for a, b in combinations(range(ranks), 2)]
    group = RankGroup(
        count=ranks,
        backend="nccl",
        link=min(kinds, key=_KINDS.index),
        links=min(map(_links_up, sensors)),
        gpus=[gpu for gpu in gpus if gpu is not None],
        nccl=".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
    )
    return group.model_dump(mode="json")


def _kind(one: nvml.AnySensors, other: nvml.AnySensors, a: int, b: int) -> str:
    """Return what links two cards, as the driver says; without its word, whether torch sees peer access."""
    import torch

    if isinstance(one, nvml.Sensors) and isinstance(other, nvml.Sensors) and one.has_nvlink_to(other):
        return "NVLink"
    peers = torch.cuda.can_device_access_peer(a, b) and torch.cuda.can_device_access_peer(b, a)
    return "PCIe" if peers else "PCIe without peer access"


def _links_up(sensors: nvml.AnySensors) -> int:
    return sensors.links_up(_MOST_LINKS) if isinstance(sensors, nvml.Sensors) else 0
