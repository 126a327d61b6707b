"""From a call with a K/V cache to its prepared launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ..problem import dense_strides
from . import reference as cache_reference
from .plan import DecodePlan, partial_sizes
from .problem import CacheProblem

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001 - what torch.compile's code calls
_empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined] # noqa: SLF001 - see calls
Call = Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor | None]]


def prepare_call(plan: DecodePlan, device: torch.device) -> Call:
    """Compile and load the kernels of a plan, and return ``call(tensors)``, which gives o and lse (or None)."""
    if plan.kernel == "reference":
        return _reference_call(plan.problem)
    if device.type == "cpu":
        return _interpreter_call(plan)
    return _cuda_call(plan, device)


def _reference_call(problem: CacheProblem) -> Call:
    def call(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        q = tensors["q"]
        o, lse = cache_reference.attention_with_kv_cache(problem, tensors)
        o = torch.empty_strided(o.shape, problem.output_strides, dtype=q.dtype, device=q.device).copy_(o)
        return o, lse.float() if problem.return_lse else None

    return call


def _allocate(problem: CacheProblem, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the outputs, and a place for rotated queries, on the CPU, by the names that kernels have for them."""
    shape = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim_v)
    o = torch.empty(shape, dtype=dtype)
    if problem.output_strides != o.stride():
        o = o.as_strided(shape, problem.output_strides)
    outputs = {"o_ptr": o}
    if problem.return_lse:
        outputs["lse_ptr"] = torch.empty(shape[:3], dtype=torch.float32)
    if problem.rotary_dim:
        outputs["q_out_ptr"] = torch.empty((*shape[:3], problem.head_dim), dtype=dtype)
    return outputs


_NAMES = {
    "k_cache": "k_ptr", "v_cache": "v_ptr", "k": "k_new_ptr", "v": "v_new_ptr", "page_table": "page_table_ptr",
    "cache_seqlens": "seqlens_ptr", "leftpad_k": "leftpad_ptr", "cache_batch_idx": "batch_idx_ptr",
    "rotary_cos": "cos_ptr", "rotary_sin": "sin_ptr", "sinks": "sinks_ptr", "alibi": "alibi_ptr", "bias": "bias_ptr",
    "q": "q_ptr", "k_scale": "k_scale_ptr", "v_scale": "v_scale_ptr",
}  # fmt: skip


def _interpreter_call(plan: DecodePlan) -> Call:
    from ..forward.prepare import interpret
    from .prepare import pointer_names, prepare_cache_kernels, takes_pairs

    problem = plan.problem
    if problem.dtype == "bf16":
        raise UnsupportedError(
            "Triton's interpreter multiplies bf16 wrongly", hint="use fp16 or fp32 with TRITON_INTERPRET=1"
        )
    kernels = prepare_cache_kernels(plan)
    sizes = partial_sizes(plan)

    def call(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        places = {_NAMES[name]: tensor for name, tensor in tensors.items()}
        outputs = _allocate(problem, tensors["q"].dtype)
        places.update(outputs)
        places["o_part_ptr"], places["sums_part_ptr"] = (torch.empty(size, dtype=torch.float32) for size in sizes)
        for kernel in kernels:
            if kernel.source.name != "_append_kernel" and problem.rotary_dim:
                places["q_ptr"] = outputs["q_out_ptr"]
            if kernel.source.name == "_decode_kernel" and takes_pairs(problem):
                places.update({name: places[name].view(torch.int16) for name in ("k_ptr", "v_ptr")})
            interpret(kernel, tuple(places[name] for name in pointer_names(kernel)))
        return outputs["o_ptr"], outputs.get("lse_ptr")

    return call


def _cuda_call(plan: DecodePlan, device: torch.device) -> Call:
    """Return the call that allocates outputs and partials, and launches."""
    from ...gpu.launch import prepare_launch
    from .prepare import pointer_names, prepare_cache_kernels

    problem, index = plan.problem, device.index
    launches = [
        (
            prepare_launch(kernel.source, plan.arch, index, kernel.grid, kernel.scalars, kernel.tensor_maps),
            _sources(pointer_names(kernel), rotated=problem.rotary_dim > 0 and kernel.source.name != "_append_kernel"),
        )
        for kernel in prepare_cache_kernels(plan)
    ]
    o_size, sums_size = partial_sizes(plan)
    stream_of, empty = _raw_stream, _empty_strided_cuda
    assert stream_of is not None
    rows = problem.batch, problem.heads, problem.seqlen_q
    shape, rotated_shape = (*rows, problem.head_dim_v), (*rows, problem.head_dim)
    strides, return_lse, rotates = problem.output_strides, problem.return_lse, problem.rotary_dim > 0
    rows_strides, rotated_strides = (rows[1] * rows[2], rows[2], 1), dense_strides(*rotated_shape)

    def run(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        dtype = tensors["q"].dtype
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        addresses[""] = 0
        o = empty(shape, strides, dtype)
        addresses["o_ptr"] = o.data_ptr()
        lse = empty(rows, rows_strides, torch.float32) if return_lse else None
        if lse is not None:
            addresses["lse_ptr"] = lse.data_ptr()
        if rotates:
            rotated = empty(rotated_shape, rotated_strides, dtype)
            addresses["q_out_ptr"] = rotated.data_ptr()
        if o_size:
            partials = empty((o_size + sums_size,), (1,), torch.float32)
            addresses["o_part_ptr"] = partials.data_ptr()
            addresses["sums_part_ptr"] = partials.data_ptr() + 4 * o_size
        stream = stream_of(index)
        for launch, names in launches:
            launch(stream, *[addresses[name] for name in names])
        return o, lse

    if torch.cuda.device_count() == 1:
        return run

    def run_on_device(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        with torch.cuda.device(device):
            return run(tensors)

    return run_on_device


def _sources(pointers: tuple[str, ...], *, rotated: bool) -> list[str]:
    """Return where the address of each pointer comes from: an argument, an output, or "" for 0 (launches take four)."""
    arguments = {pointer: name for name, pointer in _NAMES.items()}
    if rotated:
        arguments["q_ptr"] = "q_out_ptr"
    return [arguments.get(pointer, pointer) for pointer in pointers] + [""] * (4 - len(pointers))
