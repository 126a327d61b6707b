"""What the harness needs to know of attention: cases, inputs, the exact answer, work, budgets, kernels, rivals."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # what torch.compile traces with

from ..errors import CompileError, InputError, UnsupportedError
from ..gpu.axis import Axis
from ..gpu.device import current_gpu
from ..gpu.planning import PlannedKernel, PlannedLaunch, Work
from ..gpu.specs import SPECS, GpuSpec, find_gpu
from . import reference, rivals
from .api import flash_attention
from .inputs import check_window, problem_of
from .plan import plan_attention
from .problem import ITEM_BYTES, AttentionProblem
from .tiles import ForwardConfig, HopperConfig, Plan

if TYPE_CHECKING:
    from ..gpu.compile import KernelJob, KernelOutcome
    from ..gpu.identity import PlannedSource

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_KEYS = {
    "batch": int, "heads": int, "heads_kv": int, "seqlen_q": int, "seqlen_k": int, "head_dim": int, "head_dim_v": int,
    "dtype": str, "causal": bool, "softmax_scale": float,
    "window": list, "softcap": float, "sinks": str, "alibi": str, "bias": str,
}  # fmt: skip
_FEATURES = ("window", "softcap", "sinks", "alibi", "bias")  # left out of a table where a case has none of them
_REQUIRED = ("batch", "heads", "seqlen_q", "head_dim", "dtype")
_FRAMEWORK_KERNELS = ("*flash_fwd*", "*fmha*", "*cudnn*", "*sm80_xmma*softmax*")
_MAX_INTERPRETER_STEPS = 4096  # about a minute in Triton's interpreter

forward_triton = functools.partial(flash_attention, kernel="forward_triton")
forward_short_gluon = functools.partial(flash_attention, kernel="forward_short_gluon")
forward_gluon_sm90 = functools.partial(flash_attention, kernel="forward_gluon_sm90")
forward_features_gluon_sm90 = functools.partial(flash_attention, kernel="forward_features_gluon_sm90")
_IN_GLUON = ("forward_short_gluon", "forward_gluon_sm90", "forward_features_gluon_sm90")


_AXES = (
    Axis("keys", "sequential", "the number of keys"),
    Axis("length", "sequential", "the sequence length"),
    Axis("batch", "parallel", "the batch"),
    Axis("heads", "parallel", "the heads"),
)


# Local memory a thread that a kernel may use. The warpgroups of forward_gluon_sm90 have all registers that there are,
# and keep a few numbers of a row tile there, once a row tile; tests/attention/test_hopper.py sees to it that no loop
# over keys touches them, but for what it does where a sum is too large. So do those of forward_features_gluon_sm90.
_SPILL_BYTES = {"_forward_sm90_kernel": 64, "_forward_features_sm90_kernel": 64}
_WITHOUT_PRODUCTS = ("_merge_partials_kernel", "_order_sequences_kernel")


def compile_plan(plan: Plan) -> tuple[KernelOutcome, ...]:
    """Compile every kernel of ``plan`` for its architecture, with no GPU needed.

    Raises:
        CompileError: a kernel does not compile.
    """
    from ..gpu.compile import check_kernel
    from .prepare import prepare_kernels

    return tuple(
        check_kernel(
            kernel.source, plan.arch, plan.gpu,
            most_spilled=_SPILL_BYTES.get(kernel.source.name, 0),
            instruction=_matrix_instruction(plan, kernel.source.name),
        )
        for kernel in prepare_kernels(plan)
    )  # fmt: skip


def _asked(problem: AttentionProblem, inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the options of ``flash_attention`` for the features of a problem, and none for those that it has not."""
    options: dict[str, Any] = {name: inputs[name] for name in problem.extras}
    if problem.window != (-1, -1):
        options["window"] = problem.window
    if problem.softcap:
        options["softcap"] = problem.softcap
    return options


def _matrix_instruction(plan: Plan, kernel: str) -> str:
    """Return the machine instruction that a kernel of 16-bit operands promises, or an empty text."""
    if plan.problem.item_bytes != 2 or kernel in _WITHOUT_PRODUCTS:
        return ""
    config = plan.config
    wgmma = isinstance(config, HopperConfig) or (isinstance(config, ForwardConfig) and config.block_m >= 64)
    if plan.arch == 90:
        return "HGMMA" if wgmma else "HMMA"
    if plan.arch // 10 == 10:  # sm_100 and sm_103
        return "UTCHMMA" if wgmma else "HMMA"
    return "HMMA"


class AttentionOperator:
    """Attention, for the harness (the protocol is ``proof.operator.Operator``)."""

    name = "attention"

    def parse_case(self, table: Mapping[str, Any]) -> AttentionProblem:
        """Turn one case of a suite file into a problem.

        Raises:
            InputError: a key is unknown, missing or of the wrong type.
        """
        for key, value in table.items():
            if key not in _KEYS:
                raise InputError(f"{key} is not a key of an attention case; keys: {', '.join(_KEYS)}")
            kind = _KEYS[key]
            fits = isinstance(value, (int, float)) if kind is float else type(value) is kind
            if not fits:
                raise InputError(f"{key} must be {kind.__name__}, got {value!r}")
        missing = [key for key in _REQUIRED if key not in table]
        if missing:
            raise InputError(f"an attention case needs {', '.join(missing)}")
        full = dict(table)
        full.setdefault("heads_kv", full["heads"])
        full.setdefault("seqlen_k", full["seqlen_q"])
        full.setdefault("head_dim_v", full["head_dim"])
        if "window" in full:
            full["window"] = check_window(full["window"])
        if full.get("bias"):  # one for all sequences
            of_head = full["seqlen_q"] * full["seqlen_k"] if full["heads"] > 1 else 0
            full["bias_strides"] = (0, of_head, full["seqlen_k"], 1)
        return AttentionProblem(**full)

    def as_table(self, problem: AttentionProblem) -> dict[str, Any]:
        """Return the inverse of ``parse_case``."""
        table = {key: getattr(problem, key) for key in _KEYS}
        table["window"] = [*problem.window]
        if table["softmax_scale"] is None:
            del table["softmax_scale"]
        for key in _FEATURES:
            if table[key] in ([-1, -1], 0.0, ""):
                del table[key]
        return table

    def describe(self, problem: AttentionProblem) -> str:
        """Return a short name of a problem."""
        return problem.describe()

    def work(self, problem: AttentionProblem) -> Work:
        """Count 4 D (2 for QK, 2 for PV) operations a visible score, and every input and output once."""
        p = problem
        queries = p.batch * p.heads * p.seqlen_q * (p.head_dim + p.head_dim_v)
        keys = p.batch * p.heads_kv * p.seqlen_k * (p.head_dim + p.head_dim_v)
        bias = p.heads * p.seqlen_q * p.seqlen_k * ITEM_BYTES[p.bias] if p.bias else 0
        return Work(p.flops, float((queries + keys) * p.item_bytes + bias), p.batch * p.seqlen_q)

    def make_inputs(self, problem: AttentionProblem, *, seed: int, device: str) -> dict[str, torch.Tensor]:
        """Return standard normal q, k and v, and, where the problem has them, sinks, bias and slopes (2**-8 to 1)."""
        p, dtype = problem, _DTYPES[problem.dtype]
        generator = torch.Generator(device=device).manual_seed(seed)
        shapes = {
            "q": (p.batch, p.heads, p.seqlen_q, p.head_dim),
            "k": (p.batch, p.heads_kv, p.seqlen_k, p.head_dim),
            "v": (p.batch, p.heads_kv, p.seqlen_k, p.head_dim_v),
        }
        inputs = {
            name: torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
            for name, shape in shapes.items()
        }
        more: dict[str, tuple[int, ...]] = {
            "sinks": (p.heads,), "alibi": (p.heads,), "bias": (1, p.heads, p.seqlen_q, p.seqlen_k),
        }  # fmt: skip
        for name in p.extras:
            values = torch.randn(more[name], generator=generator, device=device, dtype=torch.float32)
            if name == "alibi":
                values = torch.exp2(-8 * torch.special.ndtr(values))
            inputs[name] = values.to(_DTYPES[getattr(p, name)])
        return inputs

    def bind(
        self, entry: Callable[..., torch.Tensor], problem: AttentionProblem, inputs: Mapping[str, torch.Tensor]
    ) -> Callable[[], torch.Tensor]:
        """Return ``entry(q, k, v, causal=..., softmax_scale=...)`` as a call without arguments.

        A rival with a memory layout of its own offers ``bind_inputs``, and lays its inputs out there, outside any
        timing. On CPU tensors ``flash_attention`` runs the Triton kernel in the interpreter, as ``cpu_stand_in`` says:
        the reference would prove nothing.
        """
        if hasattr(entry, "bind_inputs"):
            bound: Callable[[], torch.Tensor] = entry.bind_inputs(problem, inputs)
            return bound
        options = {"causal": problem.causal, "softmax_scale": problem.softmax_scale, **_asked(problem, inputs)}
        on_cpu = inputs["q"].device.type == "cpu"
        if entry is flash_attention and on_cpu and os.environ.get("TRITON_INTERPRET") == "1":
            options["kernel"] = "forward_triton"
        return functools.partial(entry, inputs["q"], inputs["k"], inputs["v"], **options)

    def exact(self, problem: AttentionProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the answer in fp64."""
        return reference.attention(
            inputs["q"],
            inputs["k"],
            inputs["v"],
            causal=problem.causal,
            softmax_scale=problem.softmax_scale,
            dtype=torch.float64,
            **_asked(problem, inputs),
        )[0]

    def low_precision(self, problem: AttentionProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the framework's eager answer in the problem's dtype, by heads: all scores at once may not fit."""
        p = problem
        at_once = reference.heads_at_once(p.heads_kv, p.group * p.seqlen_q * p.seqlen_k)
        o = torch.empty(p.batch, p.heads, p.seqlen_q, p.head_dim_v, dtype=inputs["q"].dtype, device=inputs["q"].device)
        for b in range(p.batch):
            for h in range(0, p.heads_kv, at_once):
                mine = slice(h * p.group, (h + at_once) * p.group)
                asked = _asked(p, inputs)
                asked |= {name: asked[name][mine] for name in ("sinks", "alibi") if name in asked}
                asked |= {"bias": asked["bias"][:, mine]} if p.bias else {}
                o[b : b + 1, mine] = reference.attention_low_precision(
                    inputs["q"][b : b + 1, mine],
                    inputs["k"][b : b + 1, h : h + at_once],
                    inputs["v"][b : b + 1, h : h + at_once],
                    causal=p.causal,
                    softmax_scale=p.softmax_scale,
                    **asked,
                )
        return o

    def error_budget(self, exact: torch.Tensor, low_precision: torch.Tensor) -> float:
        """Return twice the eager low-precision error, and twice what adding and taking 0.3 costs in fp32.

        Source: the rule of FlashAttention's own tests.
        """
        if exact.numel() == 0:
            return 0.0
        exact32 = exact.float()
        noise = ((exact32 + 0.3 - 0.3) - exact32).abs().max().item()
        return 2 * (low_precision.double() - exact).abs().max().item() + 2 * noise

    def peak_tflops_key(self, problem: AttentionProblem) -> str:
        """Return the rate that bounds a problem; fp32 may run on the tf32 units."""
        return "tf32" if problem.dtype == "fp32" else problem.dtype

    def entry_points(self) -> Mapping[str, str]:
        """Return our own implementations by name."""
        here = f"{__package__}.operator"
        return {
            "flash_attention": f"{__package__}.api:flash_attention",
            "forward_triton": f"{here}:forward_triton",
            "forward_short_gluon": f"{here}:forward_short_gluon",
            "forward_gluon_sm90": f"{here}:forward_gluon_sm90",
            "forward_features_gluon_sm90": f"{here}:forward_features_gluon_sm90",
        }

    def sources(self, subject: str) -> Sequence[str]:  # noqa: ARG002 - the protocol's signature
        """Return the files that decide plan, result and verdict: both rooms, whole, so that nothing is forgotten."""
        package = pathlib.Path(__file__).parents[1]
        return sorted(
            str(path.relative_to(package)) for room in ("attention", "gpu") for path in (package / room).glob("*.py")
        )

    def promised_launches(self, subject: str, problem: AttentionProblem) -> Sequence[PlannedLaunch]:
        """Return the launches of the plan for the current GPU, with the shared memory that compiling showed."""
        from ..gpu.compile import compile_kernel
        from .prepare import prepare_kernels

        gpu = current_gpu()
        if gpu is None:
            raise CompileError("launches are promised for a GPU, and there is none")
        plan = self._plan(subject, problem, gpu)
        return [
            PlannedLaunch(
                launch.pattern, launch.grid, launch.block, compile_kernel(kernel.source, plan.arch).metadata.shared
            )
            for launch, kernel in zip(plan.launches, prepare_kernels(plan), strict=True)
        ]

    def refusal(self, subject: str, problem: AttentionProblem, gpu: str) -> str | None:
        """Return why ``subject`` does not serve ``problem`` on ``gpu``, or None; also for a GPU that is not known."""
        try:
            spec = find_gpu(gpu)
        except InputError:
            return None
        try:
            self._plan(subject, problem, spec)
        except UnsupportedError as error:
            message = str(error).removesuffix(f"\nhint: {error.hint}")
            return message.removeprefix(f"{subject} does not serve {problem.describe()}: ")
        return None

    def compile_jobs(
        self, subject: str, problems: Sequence[AttentionProblem], gpus: Sequence[str]
    ) -> Sequence[KernelJob]:
        """Return every distinct kernel that ``problems`` need on ``gpus``, as far as ``subject`` serves them there."""
        from ..gpu.compile import KernelJob
        from .prepare import prepare_kernels

        jobs, seen = [], set()
        for name in gpus:
            gpu = find_gpu(name)
            for problem in problems:
                if self.refusal(subject, problem, name) is not None:
                    continue
                plan = self._plan(subject, problem, gpu)
                for kernel in prepare_kernels(plan):
                    source, name_of_kernel = kernel.source, kernel.source.name
                    if (source, gpu.arch) in seen:
                        continue
                    seen.add((source, gpu.arch))
                    label, spilled = f"{name_of_kernel} {problem.describe()}", _SPILL_BYTES.get(name_of_kernel, 0)
                    jobs.append(KernelJob(label, gpu.name, source, spilled, _matrix_instruction(plan, name_of_kernel)))
        return jobs

    def _plan(self, subject: str, problem: AttentionProblem, gpu: GpuSpec) -> Plan:
        return plan_attention(problem, gpu, "auto" if subject == "flash_attention" else subject)

    def planned_kernels(self, subject: str, problem: AttentionProblem, gpu: str) -> Sequence[PlannedKernel]:
        """Return the kernels that ``subject`` would launch on ``gpu``, compiled for it.

        Raises:
            CompileError: a kernel does not compile.
        """
        from ..gpu.compile import compile_kernel, read_code
        from .prepare import prepare_kernels

        plan = self._plan(subject, problem, find_gpu(gpu))
        kernels = []
        for launch, prepared in zip(plan.launches, prepare_kernels(plan), strict=True):
            compiled = compile_kernel(prepared.source, plan.arch)
            code = read_code(compiled, prepared.source.name, plan.arch)
            kernels.append(PlannedKernel(launch.pattern, launch.grid, launch.block, compiled.metadata.shared, code))
        return kernels

    def launches(self, subject: str, problem: AttentionProblem, gpu: GpuSpec) -> Sequence[PlannedSource]:
        """Return the launches of one call on ``gpu``, in order. Raises ``UnsupportedError``."""
        from .prepare import prepare_kernels

        return prepare_kernels(self._plan(subject, self._as_called(problem), gpu))

    def _as_called(self, problem: AttentionProblem) -> AttentionProblem:
        """Return ``problem`` as a call with its inputs describes it, which are made without memory."""
        with FakeTensorMode():
            tensors = self.make_inputs(problem, seed=0, device="cpu")
            q, k, v = (tensors[name] for name in "qkv")
            return problem_of(
                q, k, v, causal=problem.causal, softmax_scale=problem.softmax_scale, return_lse=False,
                **_asked(problem, tensors),
            )  # fmt: skip

    def framework_kernels(self) -> Sequence[str]:
        """Return the patterns of PyTorch's own attention kernels."""
        return _FRAMEWORK_KERNELS

    def axes(self) -> Sequence[Axis]:
        """Return the ways to make a problem longer."""
        return _AXES

    def scaled(self, problem: AttentionProblem, axis: str, factor: int) -> AttentionProblem | None:
        """Return a longer problem. More keys alone are not in proportion under a causal mask: then it is None."""
        p = problem
        if axis == "keys" and p.causal:
            return None
        longer = {
            "keys": {"seqlen_k": p.seqlen_k * factor},
            "length": {"seqlen_q": p.seqlen_q * factor, "seqlen_k": p.seqlen_k * factor},
            "batch": {"batch": p.batch * factor},
            "heads": {"heads": p.heads * factor, "heads_kv": p.heads_kv * factor},
        }[axis]
        return self.parse_case({**self.as_table(p), **longer})

    def cpu_refusal(self, subject: str, problem: AttentionProblem) -> str | None:
        """Return why Triton's interpreter cannot check ``problem``, or None."""
        if subject in _IN_GLUON:
            return f"{subject} is written in Gluon, which cannot be interpreted: only a GPU can check it"
        if problem.dtype == "bf16":
            return "Triton's interpreter multiplies bf16 wrongly"
        config = plan_attention(problem, None, "auto").config or ForwardConfig(16, 32, 4, 1)
        assert isinstance(config, ForwardConfig)
        tiles = -(-problem.seqlen_q // config.block_m) * problem.batch * problem.heads
        steps = tiles * -(-problem.seqlen_k // config.block_n)
        if steps > _MAX_INTERPRETER_STEPS:
            return f"{steps} steps in Triton's interpreter are too many (at most {_MAX_INTERPRETER_STEPS})"
        return None

    def cpu_stand_in(self, subject: str, problem: AttentionProblem) -> str:
        """Return what the interpreter runs in place of ``subject`` and why, or an empty text where it is the same.

        ``flash_attention`` chooses: what runs here is what it gets on a GPU only where every GPU would get it. And the
        interpreter never splits the keys.
        """
        if subject not in ("flash_attention", "forward_triton"):
            return ""
        plans = [
            self._plan(subject, problem, gpu)
            for name, gpu in SPECS.items()
            if self.refusal(subject, problem, name) is None
        ]
        others = dict.fromkeys(plan.kernel for plan in plans if plan.kernel in _IN_GLUON)
        if others:
            why = f"run {' or '.join(others)}, which cannot be interpreted"
        elif any(len(plan.launches) > 1 for plan in plans):
            why = "split the keys over blocks and merge their results"
        else:
            return ""
        return f"forward_triton in Triton's interpreter (a GPU may {why})"

    def rivals(self) -> Mapping[str, rivals.Rival]:
        """Return all baselines by name; the first is the default."""
        return rivals.RIVALS


OPERATOR = AttentionOperator()
