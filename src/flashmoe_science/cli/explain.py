"""The verb ``explain``: the kernels that serve a call of attention, with or without a cache, or of experts.

And what compiling those kernels shows. Planning needs neither torch nor triton; the process that compiles imports them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from ..errors import CompileError, InputError
from ..gpu.specs import GpuSpec
from ..proof.judge.run_verdicts import GATE_FAILED
from ..proof.report.terminal import compile_line, plan_lines
from .names import gpu_named
from .options import Json, flag, option
from .terminal import Terminal

_COMPILE_TIMEOUT_S = 900.0
_RESOURCES = ("registers", "spill_bytes", "shared_memory_bytes", "seconds")
_ROTATED = 64  # columns of MLA's keys that are no values
_TRAINED = ("x", "topk_weights", "w_gate_up", "w_down")  # of experts: what has gradients


def explain(
    shape: Annotated[str | None, option("", "B,H,S,D", "For attention: batch, heads, positions, head size.")] = None,
    experts: Annotated[
        str | None, option("", "T,E,K,H,I", "For experts: tokens, experts, top_k, hidden and inner size.")
    ] = None,
    activation: Annotated[str | None, option("", "NAME", "For experts. Default: swiglu.")] = None,
    kv_heads: Annotated[int | None, option("", "N", "Default: H.", min=1)] = None,
    seqlen_k: Annotated[
        int | None, option("", "N", "Default: S. With --cache: the capacity of a sequence.", min=0)
    ] = None,
    head_dim_v: Annotated[int | None, option("", "N", "Default: D.", min=1)] = None,
    dtype: Annotated[str, option("", "NAME", "fp16, bf16 or fp32.")] = "fp16",
    causal: Annotated[bool, flag("--causal", "With a causal mask, aligned bottom-right.")] = False,
    cache: Annotated[bool, flag("--cache", "With a K/V cache, and lengths on the device.")] = False,
    page_size: Annotated[int | None, option("", "N", "With --cache: positions in a page.", min=1)] = None,
    mla: Annotated[bool, flag("--mla", "With --cache: values are the first columns of the keys.")] = False,
    batch_invariant: Annotated[bool, flag("--batch-invariant", "With --cache.")] = False,
    backward: Annotated[bool, flag("--backward", "Explain the gradients instead.")] = False,
    gpu: Annotated[
        str | None, option("", "NAME", "e.g. L4, A100, H100, H200, B200. Default: the GPU of this machine.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the kernel that serves a call of attention or experts, its tile and grid, and why. Needs no GPU.

    The kernel is compiled for that GPU; registers, spills and shared memory come from the compiler.

    \b
    Examples:
      flashmoe explain --shape 1,16,4096,128 --gpu L4
      flashmoe explain --shape 1,32,1,128 --kv-heads 8 --seqlen-k 8192 --gpu H200 --json
      flashmoe explain --shape 2,16,4096,128 --dtype bf16 --causal --backward --gpu H200
      flashmoe explain --shape 16,128,1,576 --cache --mla --page-size 64 --seqlen-k 8192 --dtype bf16 --gpu H200
      flashmoe explain --experts 8192,128,8,2048,768 --dtype bf16 --gpu H200

    \b
    Exit codes:
      0  explained    2  wrong usage, or no kernel serves this problem    3  the kernel breaks a limit
    """
    if (shape is None) == (experts is None):
        raise typer.BadParameter("give --shape or --experts")
    of_cache = {"--page-size": page_size, "--mla": mla, "--batch-invariant": batch_invariant}
    if not cache and (wrong := [name for name, value in of_cache.items() if value]):
        raise typer.BadParameter(f"{' and '.join(wrong)}: only with --cache")
    if cache and backward:
        raise typer.BadParameter("--backward does not go with --cache: a cache has no gradients")
    if shape is not None:
        if activation is not None:
            raise typer.BadParameter("--activation: only with --experts")
        more: dict[str, Any] = {"heads_kv": kv_heads, "seqlen_k": seqlen_k, "head_dim_v": head_dim_v, "dtype": dtype}
        more["causal"] = causal or None
        if cache:
            more |= {"page_size": page_size, "batch_invariant": batch_invariant or None}
        call = cache_call(shape, more, mla=mla) if cache else attention_call(shape, more)
    else:
        assert experts is not None
        of_attention = {
            "--kv-heads": kv_heads, "--seqlen-k": seqlen_k, "--head-dim-v": head_dim_v, "--causal": causal,
            "--cache": cache,
        }  # fmt: skip
        if wrong := [name for name, value in of_attention.items() if value]:
            raise typer.BadParameter(f"{' and '.join(wrong)}: only with --shape")
        call = experts_call(experts, {"dtype": dtype, "activation": activation})
    raise typer.Exit(_explain(call, gpu=gpu, backward=backward, as_json=as_json))


@dataclass(frozen=True)
class Explained:
    """A call to explain."""

    operator: Literal["attention", "cache", "experts"]
    sizes: Mapping[str, Any]  # of ``AttentionProblem``, ``CacheProblem`` or ``MoeProblem``


def attention_call(shape: str, more: Mapping[str, Any]) -> Explained:
    """Return a call of attention; what is None in ``more`` is left out."""
    batch, heads, seqlen, head_dim = _sizes("shape", shape, "B,H,S,D", "--shape 1,16,4096,128")
    call = {"batch": batch, "heads": heads, "seqlen_q": seqlen, "head_dim": head_dim}
    defaults = {"heads_kv": heads, "seqlen_k": seqlen, "head_dim_v": head_dim}
    return Explained("attention", {**call, **defaults, **_given(more)})


def cache_call(shape: str, more: Mapping[str, Any], *, mla: bool) -> Explained:
    """Return a call with a cache, lengths on the device; what is None in ``more`` is left out.

    Of MLA, with one K/V head, the values are the keys but for their last 64 columns, unless ``more`` says otherwise.
    """
    call = dict(attention_call(shape, more).sizes)
    call["capacity"] = call.pop("seqlen_k")
    if mla:
        narrower = {"heads_kv": 1, "head_dim_v": call["head_dim"] - _ROTATED}
        call |= {name: value for name, value in narrower.items() if more.get(name) is None}
    return Explained("cache", {**call, "shared_kv": mla})


def experts_call(experts: str, more: Mapping[str, Any]) -> Explained:
    """Return a call of experts; what is None in ``more`` is left out."""
    sizes = _sizes("experts", experts, "T,E,K,H,I", "--experts 8192,128,8,2048,768")
    if sizes[2] > sizes[1]:
        raise InputError(f"experts: K must be at most the {sizes[1]} experts, got {sizes[2]}")
    names = ("tokens", "experts", "top_k", "hidden", "inter")
    return Explained("experts", {**dict(zip(names, sizes, strict=True)), **_given(more)})


def _given(more: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in more.items() if value is not None}


def _sizes(option: str, text: str, names: str, example: str) -> list[int]:
    try:
        sizes = [int(size) for size in text.replace("x", ",").split(",")]
    except ValueError:
        sizes = []
    count = len(names.split(","))
    if len(sizes) != count:
        number = {4: "four", 5: "five"}[count]
        raise InputError(f"{option} must be {number} integers {names}, got {text!r}", hint=f"e.g. {example}")
    return sizes


def _explain(call: Explained, *, gpu: str | None, backward: bool = False, as_json: bool) -> int:
    """Print the plan for one call, or for its gradients, and what compiling its kernels shows."""
    terminal = Terminal(as_json=as_json)
    spec = gpu_named(gpu) if gpu else _gpu_here()
    if spec is None:
        raise InputError("there is no NVIDIA GPU here", hint="name one, e.g. --gpu H200")
    plan = _plan_call(call, spec, backward=backward)
    terminal.show(*plan_lines(plan.as_text()))
    payload = {"call": dataclasses.asdict(call), "gpu": dataclasses.asdict(spec), "backward": backward}
    terminal.log.print(f"compiling for {spec.name}", style="dim")
    compiled = _compile_apart(payload)
    terminal.show(*(compile_line(**kernel) for kernel in compiled))
    fits = all(kernel["shared_memory_bytes"] <= spec.shared_memory_per_block_bytes for kernel in compiled)
    if not fits:
        terminal.show(f"  problem {spec.name} has {spec.shared_memory_per_block_bytes} bytes of shared memory a block")
    terminal.document({"plan": plan.as_dict(), "compiled": compiled, "fits": fits})
    return 0 if fits else GATE_FAILED


def _gpu_here() -> GpuSpec | None:
    from ..gpu.device import current_gpu  # imports torch, which planning alone does without

    return current_gpu()


def _plan_call(call: Explained, gpu: GpuSpec, *, backward: bool) -> Any:
    """Return the plan of a call."""
    if call.operator == "experts":
        from ..moe.problem import MoeProblem

        if backward:
            from ..moe.backward.plan import plan_backward as plan_moe_backward

            return plan_moe_backward(MoeProblem(**call.sizes, keep_product=True), gpu, _TRAINED)
        from ..moe.plan import plan_moe

        return plan_moe(MoeProblem(**call.sizes), gpu)
    if call.operator == "cache":
        from ..attention.decode.plan import plan_with_kv_cache
        from ..attention.decode.problem import CacheProblem

        return plan_with_kv_cache(CacheProblem(**call.sizes), gpu)
    from ..attention.problem import AttentionProblem

    problem = AttentionProblem(**call.sizes)
    if backward:
        from ..attention.backward.plan import BACKWARD_KERNEL, plan_backward
        from ..attention.backward.problem import BackwardProblem

        return plan_backward(BackwardProblem(problem), gpu, os.environ.get(BACKWARD_KERNEL) or "auto")
    from ..attention.forward.plan import plan_attention

    return plan_attention(problem, gpu)


def _prepare_call(call: Explained, plan: Any, *, backward: bool) -> Iterable[Any]:
    """Return the kernels of a planned call, ready to be compiled. Imports torch."""
    if call.operator == "experts":
        if backward:
            from ..moe.backward.prepare import prepare_backward_kernels as prepare_moe_backward_kernels

            return prepare_moe_backward_kernels(plan)
        from ..moe.prepare import prepare_moe_kernels

        return prepare_moe_kernels(plan)
    if call.operator == "cache":
        from ..attention.decode.prepare import prepare_cache_kernels

        return prepare_cache_kernels(plan)
    if backward:
        from ..attention.backward.prepare import prepare_backward_kernels

        return prepare_backward_kernels(plan)
    from ..attention.forward.prepare import prepare_kernels

    return prepare_kernels(plan)


def _compile_apart(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Compile the kernels of a call in a process of its own: Triton 3.9 ends with a page about objects it kept."""
    from ..proof.worker import run_task

    result = run_task(f"{__name__}:compile_call", payload, timeout_s=_COMPILE_TIMEOUT_S)
    if result.data is None:
        raise CompileError(f"the compiling process: {result.reason}")
    if "error" in result.data:
        raise CompileError(result.data["error"], hint=result.data["hint"])
    return list(result.data["compiled"])


def compile_call(payload: dict[str, Any], emit: object) -> dict[str, Any]:  # noqa: ARG001 - all tasks take it
    """Compile the kernels of ``payload["call"]`` for ``payload["gpu"]``: the task of a worker process."""
    from ..gpu.compile import read_resources

    call, gpu, backward = Explained(**payload["call"]), GpuSpec(**payload["gpu"]), payload["backward"]
    compiled = []
    try:
        for kernel in _prepare_call(call, _plan_call(call, gpu, backward=backward), backward=backward):
            found = read_resources(kernel.source, gpu.arch)
            compiled.append({"kernel": kernel.source.name, **{name: getattr(found, name) for name in _RESOURCES}})
    except CompileError as error:
        return {"error": error.message, "hint": error.hint}
    return {"compiled": compiled}
