"""Which kernel serves a problem on a GPU, with which tile and grid, and why. No Triton: plans are made anywhere."""

from __future__ import annotations

import os

from ...errors import InputError, UnsupportedError, shown
from ...gpu.planning import PlannedLaunch, refuse_architecture
from ...gpu.specs import GpuSpec
from ..masks.plan import (
    MASKED_HOPPER_KERNEL,
    MASKED_KERNEL,
    masked_hopper_plan,
    masked_hopper_refusal,
    masked_hopper_underfills,
    masked_launch,
    masked_plan,
    masked_refusal,
)
from ..mixed.plan import (
    MIXED_KERNEL,
    interpreted_plan,
    mixed_passed_over,
    mixed_plan,
    mixed_refusal,
    split_refusal,
)
from ..problem import AttentionProblem
from ..tiles import ForwardConfig, Plan, cdiv
from .plan_sm90 import HOPPER_WIDEST, hopper_plan, hopper_refusal, hopper_underfills
from .short_plan import short_passed_over, short_plan, short_refusal, short_slower_than_hopper
from .triton_plan import forward_plan
from .variants_plan import FEATURES_KERNEL, variants_passed_over, variants_plan, variants_refusal
from .wide_plan import WIDE_KERNEL, wide_plan, wide_refusal, wide_underfills

MAX_HEAD_DIM = 512
KERNELS = (
    "forward_short_gluon", "forward_gluon_sm90", WIDE_KERNEL, FEATURES_KERNEL, "forward_triton",
    MASKED_KERNEL, MASKED_HOPPER_KERNEL, MIXED_KERNEL, "reference",
)  # fmt: skip


def check_kernel_name(kernel: object) -> None:
    """Raise ``InputError`` unless ``kernel`` is ``auto`` or one of ``KERNELS``."""
    if not isinstance(kernel, str) or kernel not in ("auto", *KERNELS):
        raise InputError(f"kernel must be auto or one of {', '.join(KERNELS)}, got {shown(kernel)}")


def plan_attention(problem: AttentionProblem, gpu: GpuSpec | None, kernel: str = "auto") -> Plan:
    """Return how ``problem`` is served on ``gpu`` (None: CPU tensors).

    A forced ``kernel`` never falls back.

    Raises:
        InputError: ``kernel`` is not a name.
        UnsupportedError: the kernel forced, or every kernel, refuses; the message names the nearest problem served.
    """
    check_kernel_name(kernel)
    if gpu is None:
        return _cpu_plan(problem, kernel)
    if kernel == "reference":
        return Plan(problem, gpu.name, gpu.arch, "reference", None, (), "the reference was asked for")
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > MAX_HEAD_DIM:
        raise UnsupportedError(
            f"no kernel serves head dimension {widest}", hint=f"the nearest that is served: {MAX_HEAD_DIM}"
        )
    refuse_architecture(gpu.arch)
    _refuse_splits(problem)
    if problem.rows == 0:
        own = MASKED_KERNEL if problem.mask_heads else "forward_triton"
        name = own if kernel == "auto" else kernel
        return Plan(problem, gpu.name, gpu.arch, name, None, (), "the output is empty: nothing is launched")
    if kernel == "auto":
        return _auto_plan(problem, gpu)
    return _forced_plan(problem, gpu, kernel)


def _refusal(kernel: str, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
    """Return why ``kernel`` cannot serve ``problem``, or None."""
    if kernel == FEATURES_KERNEL:
        return variants_refusal(problem, gpu)
    if kernel == MASKED_KERNEL:
        return masked_refusal(problem)
    if kernel == MASKED_HOPPER_KERNEL:
        return masked_hopper_refusal(problem, gpu)
    if kernel == MIXED_KERNEL:
        return mixed_refusal(problem)
    if problem.num_splits or problem.batch_invariant:
        return f"num_splits and batch_invariant are for {MIXED_KERNEL}"
    if kernel == "forward_triton":
        return "it does not serve a block mask" if problem.mask_heads else None
    if not problem.features:
        plain = {"forward_short_gluon": short_refusal, WIDE_KERNEL: wide_refusal}
        return plain.get(kernel, hopper_refusal)(problem, gpu)
    *first, last = problem.features
    return f"it does not serve {', '.join(first)}{' and ' if first else ''}{last}"


def _refuse_splits(problem: AttentionProblem) -> None:
    """Raise ``UnsupportedError`` where shares of keys are asked for that no kernel makes."""
    refusal = split_refusal(problem)
    if refusal:
        raise UnsupportedError(
            f"num_splits and batch_invariant need {MIXED_KERNEL}: {refusal}",
            hint="leave them out, or see flash_attention_with_kv_cache",
        )


def _refuse_forced(kernel: str, problem: AttentionProblem, refusal: str | None) -> None:
    """Raise ``UnsupportedError`` where there is a reason."""
    if refusal:
        raise UnsupportedError(f"{kernel} does not serve {problem.describe()}: {refusal}", hint="use kernel='auto'")


def _forced_plan(problem: AttentionProblem, gpu: GpuSpec, kernel: str) -> Plan:
    plans = {
        "forward_short_gluon": short_plan,
        "forward_gluon_sm90": hopper_plan,
        WIDE_KERNEL: wide_plan,
        FEATURES_KERNEL: variants_plan,
        "forward_triton": forward_plan,
        MASKED_KERNEL: masked_plan,
        MASKED_HOPPER_KERNEL: masked_hopper_plan,
        MIXED_KERNEL: mixed_plan,
    }
    _refuse_forced(kernel, problem, _refusal(kernel, problem, gpu))
    return plans[kernel](problem, gpu, "it was asked for")


def _auto_plan(problem: AttentionProblem, gpu: GpuSpec) -> Plan:
    if problem.mask_heads:
        return _auto_plan_of_mask(problem, gpu)
    if problem.num_splits or problem.batch_invariant:
        return mixed_plan(problem, gpu, "it is the one that serves num_splits and batch_invariant")
    if problem.page_size and (mixed_refusal(problem) or mixed_passed_over(problem, gpu)) is None:
        return mixed_plan(problem, gpu, "it splits the keys of prompts and tokens over pages")
    refusal = _refusal("forward_short_gluon", problem, gpu) or short_passed_over(problem, gpu)
    if refusal is None and _hopper_declines(problem, gpu) is None:
        refusal = short_slower_than_hopper(problem, gpu)
    if refusal is None:
        return short_plan(
            problem, gpu, f"{problem.seqlen_k} keys fit one pass, and the grid is at most two blocks an SM"
        )
    passed = f"forward_short_gluon is passed over ({refusal})"
    if gpu.arch == 90 and problem.features:
        refusal = variants_refusal(problem, gpu) or variants_passed_over(problem, gpu)
        if refusal is None:
            return variants_plan(problem, gpu, passed)
        passed += f", {FEATURES_KERNEL} too ({refusal})"
    elif gpu.arch == 90:
        refusal = _hopper_declines(problem, gpu)
        if refusal is None:
            return hopper_plan(problem, gpu, passed)
        passed += f", forward_gluon_sm90 too ({refusal})"
        if max(problem.head_dim, problem.head_dim_v) > HOPPER_WIDEST:
            refusal = wide_refusal(problem, gpu) or wide_underfills(problem, gpu)
            if refusal is None:
                return wide_plan(problem, gpu, passed)
            passed += f", {WIDE_KERNEL} too ({refusal})"
    return forward_plan(problem, gpu, passed)


def _auto_plan_of_mask(problem: AttentionProblem, gpu: GpuSpec) -> Plan:
    refusal = masked_hopper_refusal(problem, gpu) or masked_hopper_underfills(problem, gpu)
    if refusal is None:
        return masked_hopper_plan(problem, gpu, "it skips empty blocks, and reads bits of partial ones alone")
    return masked_plan(problem, gpu, f"{MASKED_HOPPER_KERNEL} is passed over ({refusal})")


def _hopper_declines(problem: AttentionProblem, gpu: GpuSpec) -> str | None:
    return hopper_refusal(problem, gpu) or hopper_underfills(problem, gpu)


def _cpu_plan(problem: AttentionProblem, kernel: str) -> Plan:
    _refuse_splits(problem)
    if kernel in ("auto", "reference"):
        return Plan(problem, "CPU", 0, "reference", None, (), "CPU tensors run the reference")
    if kernel == MIXED_KERNEL and os.environ.get("TRITON_INTERPRET") == "1":
        _refuse_forced(kernel, problem, mixed_refusal(problem))
        return interpreted_plan(problem, "Triton's interpreter runs it (TRITON_INTERPRET=1)")
    is_own = kernel in (MIXED_KERNEL, MASKED_KERNEL if problem.mask_heads else "forward_triton")
    if is_own and os.environ.get("TRITON_INTERPRET") == "1":
        config = ForwardConfig(16, 32, 4, 1)
        grid = (cdiv(problem.seqlen_q, 16) * problem.batch * problem.heads, 1, 1)
        launch = PlannedLaunch("_forward_kernel", grid, (128, 1, 1))
        if problem.mask_heads:  # blocks of 128 in few steps: the interpreter takes long for each
            config = ForwardConfig(32, 64, 4, 1)
            launch = masked_launch(problem, config)
        return Plan(problem, "CPU", 0, kernel, config, (launch,), "Triton's interpreter runs it (TRITON_INTERPRET=1)")
    hint = "TRITON_INTERPRET=1 runs it in Triton's interpreter" if is_own else "use kernel='auto'"
    raise UnsupportedError(f"{kernel} needs an NVIDIA GPU, got CPU tensors", hint=hint)
