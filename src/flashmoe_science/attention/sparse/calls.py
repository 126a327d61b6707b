"""From a call of ``sparse_mla`` to its prepared launches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import UnsupportedError
from . import reference
from .plan import SparsePlan

if TYPE_CHECKING:
    from ...gpu.signature import PreparedKernel

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001 - what torch.compile's code calls
Call = Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor | None]]
_KINDS_OF_BYTES = {"*fp8e4nv": torch.float8_e4m3fn, "*fp32": torch.float32, "*bf16": torch.bfloat16}
_NAMES = {name: f"{name.removesuffix('_cache')}_ptr" for name in ("q", "kv_cache", "indices", "page_table", "sinks")}


def prepare_sparse_call(plan: SparsePlan, device: torch.device) -> Call:
    """Compile and load the kernels of a plan, and return ``call(tensors)``, which gives o and lse (or None)."""
    problem = plan.problem
    if plan.kernel == "reference":

        def run_reference(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
            found, lse = reference.sparse_attention(problem, tensors)
            o = _allocate_output(plan, tensors["q"]).copy_(found)
            return o, lse.float() if problem.return_lse else None

        return run_reference
    if device.type == "cpu" and problem.dtype == "bf16":
        raise UnsupportedError("Triton's interpreter multiplies bf16 wrongly", hint="use fp16 with TRITON_INTERPRET=1")
    launches = _launches(plan, device)

    def run(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        places = {_NAMES[name]: tensor for name, tensor in tensors.items()}
        places.update(_allocate(plan, tensors["q"]))
        for launch in launches:
            launch(places)
        return places["o_ptr"], places.get("lse_ptr")

    if device.type == "cpu" or torch.cuda.device_count() == 1:
        return run

    def run_on_device(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        with torch.cuda.device(device):
            return run(tensors)

    return run_on_device


def _allocate_output(plan: SparsePlan, q: Tensor) -> Tensor:
    p = plan.problem
    shape = p.batch, p.heads, p.seqlen_q, p.head_dim_v
    return torch.empty(shape, dtype=q.dtype, device=q.device).as_strided(shape, p.output_strides)


def _allocate(plan: SparsePlan, q: Tensor) -> dict[str, Tensor]:
    """Return the outputs, and a place for what is merged, by the names that kernels have for them."""
    from .prepare import partial_sizes

    p = plan.problem
    found = {"o_ptr": _allocate_output(plan, q)}
    if p.return_lse:
        found["lse_ptr"] = torch.empty((p.batch, p.heads, p.seqlen_q), dtype=torch.float32, device=q.device)
    o_size, sums_size = partial_sizes(plan)
    if o_size:
        partials = torch.empty(o_size + sums_size, dtype=torch.float32, device=q.device)
        found["o_part_ptr"], found["sums_part_ptr"] = partials[:o_size], partials[o_size:]
    return found


def _launches(plan: SparsePlan, device: torch.device) -> list[Callable[[Mapping[str, Tensor]], None]]:
    """Return the launches in order; each takes the tensors by the kernels' names for them."""
    from .prepare import prepare_sparse_kernels

    launch = _interpreted if device.type == "cpu" else functools.partial(_launched, plan.arch, device.index)
    return [launch(kernel) for kernel in prepare_sparse_kernels(plan)]


def _interpreted(kernel: PreparedKernel) -> Callable[[Mapping[str, Tensor]], None]:
    from ..forward.prepare import interpret

    kinds = [kind for _, kind in kernel.source.signature if kind.startswith("*")]

    def run(places: Mapping[str, Tensor]) -> None:
        tensors = zip(kernel.tensors, kinds, strict=True)
        interpret(kernel, tuple(_viewed(places[name], kind) for name, kind in tensors))

    return run


def _viewed(tensor: Tensor, kind: str) -> Tensor:
    """Return bytes of a cache as a pointer's dtype: the interpreter takes it from the tensor."""
    return tensor.view(_KINDS_OF_BYTES[kind]) if tensor.dtype == torch.uint8 else tensor


def _launched(arch: int, device: int, kernel: PreparedKernel) -> Callable[[Mapping[str, Tensor]], None]:
    from ...gpu.launch import prepare_launch

    launch = prepare_launch(kernel.source, arch, device, kernel.grid, kernel.scalars)
    stream_of, spare = _raw_stream, [0] * max(0, 4 - len(kernel.tensors))  # launches take four addresses or more
    assert stream_of is not None

    def run(places: Mapping[str, Tensor]) -> None:
        launch(stream_of(device), *[places[name].data_ptr() for name in kernel.tensors], *spare)

    return run
