"""From a plan of ``mixed_triton`` to its prepared call, whose grids depend on the number of queries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...gpu.signature import PreparedKernel
from ..tiles import MixedConfig, Plan
from .plan import INTERPRETED_SMS, mixed_sizes, round_tokens
from .prepare import part_rows, prepare_mixed
from .work_triton import RECORDS

_MAX_GRIDS = 64
_FEWEST_POINTERS = 4  # that ``prepare_launch`` writes
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001 - what torch.compile's code calls
Call = Callable[..., Any]


def _tensor_names(kernel: PreparedKernel) -> list[str]:
    """Return the names of the tensors whose addresses a launch is given, in order."""
    return [name.rpartition(".")[2].removesuffix("_ptr") for name in kernel.tensors]


def _part_rows(plan: Plan, sms: int, tokens: int) -> int:
    """Return the rows of partial results of a call with so many queries."""
    assert isinstance(plan.config, MixedConfig)
    return sum(part_rows(plan.problem, plan.config, mixed_sizes(plan.problem, plan.config, sms, round_tokens(tokens))))


def _allocate(plan: Plan, rows: int, q: Tensor) -> dict[str, Tensor]:
    """Return outputs, the list of work and ``rows`` of partial results, not written yet."""
    p = plan.problem
    found = {
        "o": torch.empty((*q.shape[:2], p.head_dim_v), dtype=q.dtype, device=q.device),
        "records": torch.empty(RECORDS.value * p.batch, dtype=torch.int32, device=q.device),
        "o_part": torch.empty(rows * p.head_dim_v, dtype=torch.float32, device=q.device),
        "sums_part": torch.empty(2 * rows, dtype=torch.float32, device=q.device),
    }
    if p.return_lse:  # rows of tokens, so that no stride depends on their number
        found["lse"] = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return found


def _returned(tensors: Mapping[str, Tensor]) -> Any:
    return (tensors["o"], tensors["lse"].t()) if "lse" in tensors else tensors["o"]


def interpreted_call(plan: Plan) -> Call:
    """Return the call that runs the kernels in Triton's interpreter, on CPU tensors."""
    from ..forward.prepare import interpret

    if plan.problem.dtype == "bf16":
        raise UnsupportedError("Triton's interpreter multiplies bf16 wrongly", hint="use fp16 with TRITON_INTERPRET=1")

    def call(q: Tensor, k: Tensor, v: Tensor, _pq: int, _pk: int, _pv: int, *extras: Tensor) -> Any:
        tensors = {"q": q, "k": k, "v": v, **dict(zip(plan.problem.extras, extras, strict=True))}
        tensors |= _allocate(plan, _part_rows(plan, INTERPRETED_SMS, q.shape[0]), q)
        if q.shape[0]:
            for kernel in prepare_mixed(plan, INTERPRETED_SMS, q.shape[0]):
                interpret(kernel, tuple(tensors[name] for name in _tensor_names(kernel)))
        return _returned(tensors)

    return call


def cuda_call(plan: Plan, device: int) -> Call:
    """Return the call that allocates, and launches on ``device``."""
    from ...gpu.device import gpu_of_device
    from ...gpu.launch import current_context, prepare_launch

    stream_of, sms = _raw_stream, gpu_of_device(device).sms
    assert stream_of is not None

    @functools.lru_cache(maxsize=_MAX_GRIDS)
    def prepared(tokens: int) -> tuple[int, list[tuple[Callable[..., None], list[str]]]]:
        found = []
        with current_context(device):  # the thread that calls may not have used the GPU yet
            for kernel in prepare_mixed(plan, sms, tokens):
                names = _tensor_names(kernel)
                names += [""] * (_FEWEST_POINTERS - len(names))
                launch = prepare_launch(
                    kernel.source, plan.arch, device, kernel.grid, kernel.scalars, kernel.tensor_maps
                )
                found.append((launch, names))
        return _part_rows(plan, sms, tokens), found

    def call(q: Tensor, _k: Tensor, _v: Tensor, pq: int, pk: int, pv: int, *extras: Tensor) -> Any:
        rows, launches = prepared(round_tokens(q.shape[0])) if q.shape[0] else (0, [])
        tensors = _allocate(plan, rows, q)
        if launches:
            addresses = {"": 0, "q": pq, "k": pk, "v": pv, "lse": 0}
            named = (*tensors.items(), *zip(plan.problem.extras, extras, strict=True))
            addresses.update((name, tensor.data_ptr()) for name, tensor in named)
            stream = stream_of(device)
            for launch, names in launches:
                launch(stream, *[addresses[name] for name in names])
        return _returned(tensors)

    return call
