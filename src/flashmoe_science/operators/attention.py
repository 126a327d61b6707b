"""Attention for the harness: cases, inputs, the exact answer, work and kernels."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..attention import reference
from ..attention.api import flash_attention
from ..attention.forward.plan import plan_attention
from ..attention.inputs import check_window
from ..attention.problem import ITEM_BYTES, AttentionProblem, canonical_strides
from ..attention.tiles import ForwardConfig, HopperConfig, Plan, WideConfig
from ..gpu.planning import Axis, Work
from ..gpu.specs import SPECS
from .attention_scale import forward_scale
from .base import DTYPES, KernelOperator, standard_normal
from .baselines.attention import BASELINES
from .baselines.base import Inputs
from .error_scale import Scale
from .stress import halved, stress_attention

if TYPE_CHECKING:
    from ..gpu.compile import KernelOutcome

forward_triton = functools.partial(flash_attention, kernel="forward_triton")
forward_short_gluon = functools.partial(flash_attention, kernel="forward_short_gluon")
forward_gluon_sm90 = functools.partial(flash_attention, kernel="forward_gluon_sm90")
forward_features_gluon_sm90 = functools.partial(flash_attention, kernel="forward_features_gluon_sm90")
forward_wide_gluon_sm90 = functools.partial(flash_attention, kernel="forward_wide_gluon_sm90")

# Local memory a thread that a kernel may use. The warpgroups of forward_gluon_sm90 have all registers that there are,
# and keep a few numbers of a row tile there, once a row tile; tests/attention/test_hopper.py sees to it that no loop
# over keys touches them, but for what it does where a sum is too large. So do those of forward_features_gluon_sm90.
SPILL_BYTES = {"_forward_sm90_kernel": 64, "_forward_features_sm90_kernel": 80}
_WITHOUT_PRODUCTS = ("_merge_partials_kernel", "_order_sequences_kernel")


def shapes_of(p: AttentionProblem) -> dict[str, tuple[int, int, int, int]]:
    """Return the shapes of q, k and v."""
    return {
        "q": (p.batch, p.heads, p.seqlen_q, p.head_dim),
        "k": (p.batch, p.heads_kv, p.seqlen_k, p.head_dim),
        "v": (p.batch, p.heads_kv, p.seqlen_k, p.head_dim_v),
    }


def canonical(p: AttentionProblem) -> AttentionProblem:
    """Return a problem as a call describes it: an axis of one element has stride 0."""
    shapes = shapes_of(p)
    return replace(
        p,
        q_strides=canonical_strides(shapes["q"], p.q_strides),
        k_strides=canonical_strides(shapes["k"], p.k_strides),
        v_strides=canonical_strides(shapes["v"], p.v_strides),
    )


def smaller_sizes(p: AttentionProblem, device: str) -> dict[str, int]:
    """Return sizes for stress draws: two sequences, and as many heads and scores as a device does quickly."""
    heads_kv, batch = min(1 if device == "cpu" else 2, p.heads_kv), min(2, p.batch)
    group = min(2, p.group) if device == "cpu" else p.group
    least, most = (64, 0) if device == "cpu" else (1024, 2**28)
    longest = max(p.seqlen_q, p.seqlen_k)
    length = halved(longest, least, lambda n: batch * heads_kv * group * n * n <= most)
    seqlen_q, seqlen_k = (-(-n * length // max(1, longest)) for n in (p.seqlen_q, p.seqlen_k))
    sizes = {"batch": batch, "heads": group * heads_kv, "heads_kv": heads_kv}
    return {**sizes, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}


def change_batched(draw: str, p: AttentionProblem, inputs: Inputs) -> bool:
    """Change q, k and v ``[B, H, S, D]`` for a stress draw; return whether there is what it changes."""
    q, k, v = (inputs[name] for name in "qkv")
    if draw == "neighbours":
        for x, factor in ((q, 4), (k, 4), (v, 64)):
            x[1:] *= factor
        return p.batch > 1
    stress_attention(draw, q, k, v, p.scale, [0])
    return True


def options_of(problem: AttentionProblem, inputs: Inputs) -> dict[str, Any]:
    """Return the options of ``flash_attention`` for a problem, and none for features that it has not."""
    options: dict[str, Any] = {"causal": problem.causal, "softmax_scale": problem.softmax_scale}
    options.update({name: inputs[name] for name in problem.extras})
    if problem.window != (-1, -1):
        options["window"] = problem.window
    if problem.softcap:
        options["softcap"] = problem.softcap
    return options


def draw_extras(problem: AttentionProblem, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return sinks, bias and slopes (2**-8 to 1), those that a problem has."""
    p, found = problem, {}
    shapes: dict[str, tuple[int, ...]] = {
        "sinks": (p.heads,), "alibi": (p.heads,), "bias": (1, p.heads, p.seqlen_q, p.seqlen_k),
    }  # fmt: skip
    for name in p.extras:
        values = torch.randn(shapes[name], generator=generator, device=generator.device, dtype=torch.float32)
        if name == "alibi":
            values = torch.exp2(-8 * torch.special.ndtr(values))
        found[name] = values.to(DTYPES[getattr(p, name)])
    return found


def complete_table(table: dict[str, Any]) -> AttentionProblem:
    """Return the problem of a case."""
    if "window" in table:
        table["window"] = check_window(table["window"])
    if table.get("bias"):  # one for all sequences
        of_head = table["seqlen_q"] * table["seqlen_k"] if table["heads"] > 1 else 0
        table["bias_strides"] = (0, of_head, table["seqlen_k"], 1)
    return canonical(AttentionProblem(**table))


class AttentionOperator(KernelOperator):
    """Attention, for the harness."""

    name = "attention"
    fresh: ClassVar[tuple[str, ...]] = ("q", "k", "v", "sinks", "bias")
    heads_along = {"q": 1, "k": 1, "v": 1, "sinks": 0, "alibi": 0, "bias": 1}
    keys = {
        "batch": int, "heads": int, "heads_kv": int, "seqlen_q": int, "seqlen_k": int, "head_dim": int,
        "head_dim_v": int, "dtype": str, "causal": bool, "softmax_scale": float,
        "window": list, "softcap": float, "sinks": str, "alibi": str, "bias": str,
    }  # fmt: skip
    required: ClassVar[Sequence[str]] = ("batch", "heads", "seqlen_q", "head_dim", "dtype")
    same_as = {"heads_kv": "heads", "seqlen_k": "seqlen_q", "head_dim_v": "head_dim"}
    omitted = {"softmax_scale": None, "window": (-1, -1), "softcap": 0.0, "sinks": "", "alibi": "", "bias": ""}
    kernels = {
        "flash_attention": "auto",
        **{kernel: kernel for kernel in (
            "forward_triton", "forward_short_gluon", "forward_gluon_sm90", "forward_features_gluon_sm90",
            "forward_wide_gluon_sm90",
        )},
    }  # fmt: skip
    public_module = flash_attention.__module__
    rooms = ("attention",)
    spill_bytes = SPILL_BYTES
    framework = ("*flash_fwd*", "*fmha*", "*cudnn*", "*sm80_xmma*softmax*")
    known_baselines = BASELINES
    planner = staticmethod(plan_attention)
    preparer = "..attention.forward.prepare:prepare_kernels"
    instead = None
    max_interpreter_steps = 4096

    def make_problem(self, table: dict[str, Any]) -> AttentionProblem:
        """Return the problem of a case."""
        return complete_table(table)

    def work(self, problem: AttentionProblem) -> Work:
        """Count 4 D (2 for QK, 2 for PV) operations a visible score, and every input and output once."""
        p = problem
        queries = p.batch * p.heads * p.seqlen_q * (p.head_dim + p.head_dim_v)
        keys = p.batch * p.heads_kv * p.seqlen_k * (p.head_dim + p.head_dim_v)
        bias = p.heads * p.seqlen_q * p.seqlen_k * ITEM_BYTES[p.bias] if p.bias else 0
        return Work(p.flops, float((queries + keys) * p.item_bytes + bias), p.batch * p.seqlen_q)

    def make_inputs(self, problem: AttentionProblem, *, seed: int, device: str) -> dict[str, torch.Tensor]:
        """Return standard normal q, k and v, and, where the problem has them, sinks, bias and slopes (2**-8 to 1)."""
        generator = torch.Generator(device=device).manual_seed(seed)
        inputs = standard_normal(shapes_of(problem), DTYPES[problem.dtype], generator)
        return {**inputs, **draw_extras(problem, generator)}

    def arguments(self, problem: AttentionProblem, inputs: Inputs) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Return q, k and v, and the options of ``flash_attention``."""
        return [inputs[name] for name in "qkv"], options_of(problem, inputs)

    def bind(self, entry: Callable[..., Any], problem: AttentionProblem, inputs: Inputs) -> Callable[[], Any]:
        """Return a call without arguments.

        On CPU tensors ``flash_attention`` runs the Triton kernel in the interpreter, as ``cpu_stand_in`` says: the
        reference would prove nothing.
        """
        on_cpu = inputs["q"].device.type == "cpu"
        if entry is flash_attention and on_cpu and os.environ.get("TRITON_INTERPRET") == "1":
            entry = forward_triton
        return super().bind(entry, problem, inputs)

    def exact(self, problem: AttentionProblem, inputs: Inputs) -> torch.Tensor:
        """Return the answer in fp64."""
        q, k, v = (inputs[name] for name in "qkv")
        return reference.attention(q, k, v, **options_of(problem, inputs), dtype=torch.float64)[0]

    def low_precision(self, problem: AttentionProblem, inputs: Inputs) -> torch.Tensor:
        """Return the framework's eager answer in the problem's dtype, by heads: all scores at once may not fit."""
        p, (q, k, v) = problem, (inputs[name] for name in "qkv")
        at_once = reference.heads_at_once(p.heads_kv, p.group * p.seqlen_q * p.seqlen_k)
        o = torch.empty(p.batch, p.heads, p.seqlen_q, p.head_dim_v, dtype=q.dtype, device=q.device)
        for b, h in itertools.product(range(p.batch), range(0, p.heads_kv, at_once)):
            one, mine, its = slice(b, b + 1), slice(h * p.group, (h + at_once) * p.group), slice(h, h + at_once)
            options = options_of(p, inputs)
            options |= {name: options[name][mine] for name in ("sinks", "alibi") if name in options}
            options |= {"bias": options["bias"][:, mine]} if p.bias else {}
            o[one, mine] = reference.attention_low_precision(q[one, mine], k[one, its], v[one, its], **options)
        return o

    def error_scale(self, problem: AttentionProblem, inputs: Inputs) -> tuple[Scale, ...]:
        """Return what is allowed in each element of o."""
        q, k, v = (inputs[name] for name in "qkv")
        return (forward_scale(q, k, v, **options_of(problem, inputs)),)

    def smaller(self, problem: AttentionProblem, device: str) -> AttentionProblem:
        """Return a problem of fewer sequences and heads, and shorter where its scores are too many."""
        found: AttentionProblem = self.changed(problem, **smaller_sizes(problem, device))
        return found

    def change_values(self, draw: str, problem: AttentionProblem, inputs: Inputs) -> bool:
        """Change q, k and v."""
        return change_batched(draw, problem, inputs)

    def instruction(self, plan: Plan, kernel: str) -> str:
        """Return the machine instruction that a kernel of 16-bit operands promises, or an empty text."""
        if plan.problem.item_bytes != 2 or kernel in _WITHOUT_PRODUCTS:
            return ""
        config = plan.config
        wgmma = isinstance(config, HopperConfig | WideConfig)
        wgmma |= isinstance(config, ForwardConfig) and config.block_m >= 64
        if plan.arch == 90:
            return "HGMMA" if wgmma else "HMMA"
        if plan.arch // 10 == 10:  # sm_100 and sm_103
            return "UTCHMMA" if wgmma else "HMMA"
        return "HMMA"

    def axes(self) -> Sequence[Axis]:
        """Return the ways to make a problem longer."""
        return (
            Axis("keys", "sequential", "the number of keys"),
            Axis("length", "sequential", "the sequence length"),
            Axis("batch", "parallel", "the batch"),
            Axis("heads", "parallel", "the heads"),
        )

    def scaled(self, problem: AttentionProblem, axis: str, factor: int) -> AttentionProblem | None:
        """Return a longer problem. More keys alone are not in proportion under a causal mask: then it is None."""
        p = problem
        if axis == "keys" and p.causal:
            return None
        longer = {"keys": ["seqlen_k"], "length": ["seqlen_q", "seqlen_k"], "heads": ["heads", "heads_kv"]}
        sizes = {name: getattr(p, name) * factor for name in longer.get(axis, [axis])}
        found: AttentionProblem = self.changed(p, **sizes)
        return found

    def interpreter_steps(self, problem: AttentionProblem) -> int:
        """Count pairs of a row tile and a key tile."""
        config = plan_attention(problem, None, "auto").config or ForwardConfig(16, 32, 4, 1)
        assert isinstance(config, ForwardConfig)
        tiles = -(-problem.seqlen_q // config.block_m) * problem.batch * problem.heads
        return tiles * -(-problem.seqlen_k // config.block_n)

    def cpu_stand_in(self, subject: str, problem: AttentionProblem) -> str:
        """Return what the interpreter runs in place of ``subject`` and why, or an empty text where it is the same.

        ``flash_attention`` chooses: what runs here is what it gets on a GPU only where every GPU would get it. And the
        interpreter never splits the keys.
        """
        if subject not in ("flash_attention", "forward_triton"):
            return ""
        plans = [
            self.plan(subject, problem, gpu)
            for name, gpu in SPECS.items()
            if self.refusal(subject, problem, name) is None
        ]
        others = dict.fromkeys(plan.kernel for plan in plans if "gluon" in plan.kernel)
        if others:
            why = f"run {' or '.join(others)}, which cannot be interpreted"
        elif any(len(plan.launches) > 1 for plan in plans):
            why = "split the keys over blocks and merge their results"
        else:
            return ""
        return f"forward_triton in Triton's interpreter (a GPU may {why})"


OPERATOR = AttentionOperator()


def compile_plan(plan: Plan) -> tuple[KernelOutcome, ...]:
    """Compile every kernel of ``plan`` for its architecture, with no GPU needed.

    Raises:
        CompileError: a kernel does not compile.
    """
    from ..gpu.compile import check_kernel

    return tuple(
        check_kernel(
            kernel.source, plan.arch, plan.gpu,
            most_spilled=SPILL_BYTES.get(kernel.source.name, 0),
            instruction=OPERATOR.instruction(plan, kernel.source.name),
        )
        for kernel in OPERATOR.prepare(plan)
    )  # fmt: skip
