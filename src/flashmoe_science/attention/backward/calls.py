"""Prepared gradients: plan, kernels and grids are settled, a call allocates its outputs and launches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...gpu.checks import check_storages
from .. import reference
from ..masks.dense import with_dense_mask
from ..packed import mark_shared_keys
from ..problem import canonical_strides, output_strides
from .plan import BackwardPlan
from .plan_sm90 import HopperBackwardConfig
from .problem import BackwardProblem

Tensors = Mapping[str, Tensor]
# Gradients by the names of what they are of, from the tensors of a call by name: q, k, v, o, lse, do, dlse, extras.
Call = Callable[[Tensors], dict[str, Tensor]]

# Packed, launches are kept for so many numbers of tokens: grids follow from them, and layers repeat them.
_MAX_TOKENS = 64

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001 - absent from CPU builds of torch


def prepare_backward(plan: BackwardPlan, device: torch.device) -> Call:
    """Compile and load the kernels of ``plan``, and return its call for tensors on a device."""
    if plan.kernel == "reference":
        return _reference_call(plan.problem)
    if device.type == "cpu" and plan.problem.forward.dtype == "bf16":
        raise UnsupportedError(
            "Triton's interpreter multiplies bf16 wrongly", hint="use fp16 or fp32 with TRITON_INTERPRET=1"
        )
    if not isinstance(plan.config, HopperBackwardConfig):
        return _kernel_call(plan, device)
    if plan.problem.sums is not None:  # its kernels write gradients of their own
        alone = dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, sums=None))
        return _adding_call(prepare_backward(alone, device))
    return (_packed_hopper_call if plan.problem.forward.packed else _hopper_call)(plan, device)


def _adding_call(call: Call) -> Call:
    """Return a call that adds the gradients of k and v to the tensors that the caller gave for them."""

    def adding(tensors: Tensors) -> dict[str, Tensor]:
        return add_to_sums(call(tensors), tensors)

    return adding


def add_to_sums(found: dict[str, Tensor], tensors: Tensors) -> dict[str, Tensor]:
    """Return gradients, of which those of k and v were added to what ``tensors`` have for them, if anything."""
    for name in ("k", "v"):
        if f"d{name}" in tensors and name in found:
            found[name] = tensors[f"d{name}"].add_(found[name])
    return found


def allocate_gradient(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a gradient of q, k or v, not written yet: dense, with axes in the order of the tensor's in memory."""
    dtype = dtype or tensor.dtype
    if tensor.dim() == 3:
        return torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    batch, heads, seqlen, columns = tensor.shape
    strides = output_strides(batch, heads, seqlen, columns, canonical_strides(tensor.shape, tensor.stride()))
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).as_strided(tensor.shape, strides)


def _reference_call(problem: BackwardProblem) -> Call:
    p = problem.forward
    differentiate: Any = reference.attention_varlen_backward if p.packed else reference.attention_backward
    options: dict[str, Any] = {
        "causal": p.causal, "softmax_scale": p.softmax_scale, "window": p.window, "softcap": p.softcap,
        "dropout_p": p.dropout_p,
    }  # fmt: skip

    def call(tensors: Tensors) -> dict[str, Tensor]:
        extras = with_dense_mask(p, {name: tensors[name] for name in p.extras})
        inputs = (tensors["q"], tensors["k"], tensors["v"])
        check_storages(tensors)
        found = differentiate(*inputs, tensors["do"], tensors.get("dlse"), **options, **extras)
        return {
            name: _sum_of(name, tensors).add_(found[name])
            if _is_summed(problem, name)
            else _allocate(name, tensors[name]).copy_(found[name])
            for name in problem.wanted
        }

    return call


def _is_summed(problem: BackwardProblem, name: str) -> bool:
    """Return whether a gradient is added to a tensor in fp32."""
    return problem.sums is not None and name in ("k", "v")


def _sum_of(name: str, tensors: Tensors) -> Tensor:
    """Return the tensor that a gradient is added to: that which the caller gave, or zeros."""
    given = tensors.get(f"d{name}")
    return allocate_gradient(tensors[name], torch.float32).zero_() if given is None else given


def _allocate(name: str, tensor: Tensor) -> Tensor:
    """Return a gradient, not written yet."""
    if name in ("q", "k", "v"):
        return allocate_gradient(tensor)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _kernel_call(plan: BackwardPlan, device: torch.device) -> Call:
    """Return the call that allocates the gradients and delta, and launches, or interprets, every kernel."""
    problem, p = plan.problem, plan.problem.forward
    if device.type == "cuda":
        from .prepare import prepare_backward_kernels

        launches = _cuda_launches(prepare_backward_kernels(plan), plan.arch, device)
    else:
        launches = _interpreted_launches(plan)

    def call(tensors: Tensors) -> dict[str, Tensor]:
        q = tensors["q"]
        # The LSE of packed sequences is [H, T], stored token-major, as kernels read it.
        rows = {name: tensors[name] for name in ("lse", "dlse") if name in tensors}
        rows = {name: (tensor.t() if p.packed else tensor).contiguous() for name, tensor in rows.items()}
        if "k" in p.seqused and "k" in problem.wanted:
            rows["lse"] = mark_shared_keys(rows["lse"], tensors)
        delta = torch.empty(rows["lse"].shape, dtype=torch.float32, device=q.device)
        found = {
            name: _sum_of(name, tensors) if _is_summed(problem, name) else _allocate(name, tensors[name])
            for name in problem.wanted
        }
        if p.packed or not launches:  # no program writes the gradients of rows and keys in no sequence's place
            for name, gradient in found.items():
                if _is_summed(problem, name):
                    continue
                if name != "bias" or not launches:  # that of a bias is written as a whole
                    gradient.zero_()
        made = {f"d{name}": gradient for name, gradient in found.items()}
        for launch in launches:
            launch({**tensors, **rows, "delta": delta, **made})
        if not launches:  # o is 0 everywhere
            torch.neg(rows["dlse"], out=delta) if "dlse" in rows else delta.zero_()
        if problem.wants_sinks:
            _write_sinks_gradient(found["sinks"], tensors, rows["lse"], delta)
        return found

    return call


def _hopper_call(plan: BackwardPlan, device: torch.device) -> Call:
    """Return the call that allocates the gradients and what the kernels hand on to one another, and launches them.

    The counters of a call are its own and its first kernel sets them, so calls on other streams, and replays of a CUDA
    graph, which has memory of its own, share none.
    """
    from .prepare import prepare_backward_kernels
    from .prepare_sm90 import scratch_sizes

    assert isinstance(plan.config, HopperBackwardConfig)
    sizes, wanted = scratch_sizes(plan.problem, plan.config), plan.problem.wanted
    allocated = _made_by_hopper(plan.problem)
    launches = _cuda_launches(prepare_backward_kernels(plan), plan.arch, device)

    def call(tensors: Tensors) -> dict[str, Tensor]:
        rows = {name: tensors[name].contiguous() for name in ("lse", "dlse") if name in tensors}
        rows.setdefault("dlse", rows["lse"])  # not read
        made = {name: _allocate(name, tensors[name]) for name in allocated}
        scratch = _scratch(sizes, tensors["q"].device)
        written = {f"d{name}": gradient for name, gradient in made.items()}
        for launch in launches:
            launch({**tensors, **rows, **scratch, **written})
        return {name: made[name] for name in wanted}

    return call


def _given_or_allocated(name: str, tensors: Tensors) -> Tensor:
    """Return where a gradient is written: where the caller asks for it, if kernels can write there."""
    given = tensors.get(f"out_{name}")
    fits = given is not None and given.is_contiguous() and given.data_ptr() % 16 == 0  # as TMA asks for
    return given if given is not None and fits else _allocate(name, tensors[name])


def _made_by_hopper(problem: BackwardProblem) -> tuple[str, ...]:
    """Return the gradients that the kernels write: q, k and v together, also where only some of them are wanted."""
    return "q", "k", "v", *(["sinks"] if problem.wants_sinks else [])


def _scratch(sizes: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
    """Allocate what the kernels of a call hand on to one another."""
    from .prepare_sm90 import INTEGERS

    return {
        name: torch.empty(size, dtype=torch.int32 if name in INTEGERS else torch.float32, device=device)
        for name, size in sizes.items()
    }


def _packed_hopper_call(plan: BackwardPlan, device: torch.device) -> Call:
    """Return the call of packed sequences: as ``_hopper_call``, with kernels prepared for each number of tokens."""
    from .prepare_sm90 import prepare_hopper_backward, scratch_sizes

    problem, config = plan.problem, plan.config
    assert isinstance(config, HopperBackwardConfig)
    allocated = _made_by_hopper(problem)

    @functools.lru_cache(maxsize=_MAX_TOKENS)
    def prepared(tokens: tuple[int, int]) -> tuple[list[Callable[[Tensors], None]], dict[str, int]]:
        kernels = prepare_hopper_backward(plan, tokens)
        launches = _cuda_launches(kernels, plan.arch, device)
        return launches, scratch_sizes(problem, config, tokens)

    def call(tensors: Tensors) -> dict[str, Tensor]:
        made = {name: _given_or_allocated(name, tensors) for name in allocated}
        found = {name: made[name] for name in problem.wanted}
        tokens = tensors["q"].shape[0], tensors["k"].shape[0]
        if problem.forward.seqused or not all(tokens):  # else the kernels write all of them
            for gradient in made.values():
                gradient.zero_()
        if not all(tokens):
            if problem.wants_sinks and "dlse" in tensors:  # without a key, the LSE of a row is its sink
                _write_sinks_gradient(found["sinks"], tensors, tensors["lse"].t(), -tensors["dlse"].t())
            return found
        rows = {name: tensors[name].t().contiguous() for name in ("lse", "dlse") if name in tensors}
        if "k" in problem.forward.seqused and problem.wants_kv:
            rows["lse"] = mark_shared_keys(rows["lse"], tensors)
        rows.setdefault("dlse", rows["lse"])  # not read
        launches, sizes = prepared(tokens)
        scratch = _scratch(sizes, device)
        written = {f"d{name}": gradient for name, gradient in made.items()}
        for launch in launches:
            launch({**tensors, **rows, **scratch, **written})
        return found

    return call


def _write_sinks_gradient(out: Tensor, tensors: Tensors, lse: Tensor, delta: Tensor) -> None:
    """Write - sum P delta over the rows of each head, where P is that of the sink: its value is 0.

    lse and delta are ``[B, H, Sq]``, of packed sequences ``[T, H]``.
    """
    packed = lse.dim() == 2
    sinks = tensors["sinks"].float()
    terms = -delta * torch.exp((sinks if packed else sinks[:, None]) - lse)
    counted = lse != -torch.inf
    if packed:  # rows in no sequence's place were not written
        starts, tokens = tensors["cu_seqlens_q"], torch.arange(lse.shape[0], device=lse.device)
        counted = counted & ((tokens >= starts[0]) & (tokens < starts[-1]))[:, None]
    out.copy_(torch.where(counted, terms, 0.0).sum(0 if packed else (0, 2)))


def _pointer_names(source: Any) -> list[str]:
    return [name.rpartition(".")[2].removesuffix("_ptr") for name, kind in source.signature if kind.startswith("*")]


def _interpreted_launches(plan: BackwardPlan) -> list[Callable[[Tensors], None]]:
    from ..forward.prepare import interpret
    from .prepare import prepare_backward_kernels

    def run(kernel: Any) -> Callable[[Tensors], None]:
        names = _pointer_names(kernel.source)
        return lambda tensors: interpret(kernel, tuple(tensors[name] for name in names))

    return [run(kernel) for kernel in prepare_backward_kernels(plan)]


def _cuda_launches(kernels: Sequence[Any], arch: int, device: torch.device) -> list[Callable[[Tensors], None]]:
    """Return the launches of tensors by name."""
    from ...gpu.launch import prepare_launch

    index = device.index
    stream_of = _raw_stream
    assert stream_of is not None

    def prepare(kernel: Any) -> Callable[[Tensors], None]:
        launch = prepare_launch(kernel.source, arch, index, kernel.grid, kernel.scalars, kernel.tensor_maps)
        names = [name.rpartition(".")[2].removesuffix("_ptr") for name in kernel.tensors]
        missing = [0] * (4 - len(names))  # a launch takes four addresses at the least

        def run(tensors: Tensors) -> None:
            addresses = [tensors[name].data_ptr() for name in names] + missing
            if torch.cuda.current_device() == index:
                launch(stream_of(index), *addresses)
            else:
                with torch.cuda.device(index):
                    launch(stream_of(index), *addresses)

        return run

    return [prepare(kernel) for kernel in kernels]
