"""What the harness needs to know of the gradients of attention: cases, inputs, exact ones, work, kernels, rivals.

A call is given what the forward leaves, q, k, v, o and LSE, and the gradient of o, and gives dq, dk and dv. Each has an
error budget of its own.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # what torch.compile traces with

from ..attention import reference
from ..attention.backward_api import flash_attention_backward
from ..attention.backward_plan import BackwardConfig, BackwardPlan, plan_backward
from ..attention.backward_problem import BackwardProblem, backward_problem_of
from ..attention.inputs import Options, check_options, check_window
from ..attention.problem import AttentionProblem
from ..errors import CompileError, InputError, UnsupportedError
from ..gpu.device import current_gpu
from ..gpu.planning import PlannedLaunch, Work
from ..gpu.specs import GpuSpec, find_gpu
from . import rivals

if TYPE_CHECKING:
    from ..attention.prepared import PreparedKernel
    from ..gpu.compile import KernelJob
    from ..gpu.identity import PlannedSource

OUTPUTS = ("dq", "dk", "dv")
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_KEYS = {
    "batch": int, "heads": int, "heads_kv": int, "seqlen_q": int, "seqlen_k": int, "head_dim": int, "head_dim_v": int,
    "dtype": str, "causal": bool, "softmax_scale": float,
}  # fmt: skip
_REQUIRED = ("batch", "heads", "seqlen_q", "head_dim", "dtype")
_FRAMEWORK_KERNELS = ("*flash_bwd*", "*fmha*", "*cudnn*", "*sm80_xmma*softmax*")
_MAX_INTERPRETER_STEPS = 1024  # about a minute in Triton's interpreter
# Local memory a thread that a kernel may use outside of its loops, where tests/attention/test_backward_tables.py sees
# to it that none of their time goes; of the one of 192 columns test_backward_sm90.py, which allows some loads.
_SPILL_BYTES = {
    "_backward_kv_kernel": 512, "_backward_q_kernel": 512, "_backward_192_sm90_kernel": 80, "_backward_sm90_kernel": 32,
    "_forward_sm90_kernel": 64, "_forward_features_sm90_kernel": 64,
}  # fmt: skip
_WITHOUT_PRODUCTS = ("_finish_dq_kernel", "_merge_partials_kernel")

backward_triton = functools.partial(flash_attention_backward, kernel="backward_triton")
backward_gluon_sm90 = functools.partial(flash_attention_backward, kernel="backward_gluon_sm90")


def _matrix_instruction(problem: BackwardProblem, kernel: str) -> str:
    """Return the machine instruction that a kernel of 16-bit operands promises, as a pattern, or an empty text."""
    return "*MMA*" if problem.forward.item_bytes == 2 and kernel not in _WITHOUT_PRODUCTS else ""


def draw(problem: BackwardProblem, *, seed: int, device: str) -> dict[str, torch.Tensor]:
    """Return standard normal q, k, v and do."""
    p, dtype = problem.forward, _DTYPES[problem.forward.dtype]
    generator = torch.Generator(device=device).manual_seed(seed)
    shapes = {
        "q": (p.batch, p.heads, p.seqlen_q, p.head_dim),
        "k": (p.batch, p.heads_kv, p.seqlen_k, p.head_dim),
        "v": (p.batch, p.heads_kv, p.seqlen_k, p.head_dim_v),
        "do": (p.batch, p.heads, p.seqlen_q, p.head_dim_v),
    }
    return {
        name: torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
        for name, shape in shapes.items()
    }


class BackwardOperator:
    """The gradients of attention, for the harness (the protocol is ``proof.operator.Operator``)."""

    name = "attention_backward"
    keys: ClassVar[Mapping[str, type]] = _KEYS

    def outputs(self, problem: BackwardProblem) -> Sequence[str]:  # noqa: ARG002 - the protocol's signature
        """Return the names of what a call gives, in this order."""
        return OUTPUTS

    def parse_case(self, table: Mapping[str, Any]) -> BackwardProblem:
        """Turn one case of a suite file into a problem.

        Raises:
            InputError: a key is unknown, missing or of the wrong type.
        """
        for key, value in table.items():
            if key not in self.keys:
                raise InputError(f"{key} is not a key of a case of {self.name}; keys: {', '.join(self.keys)}")
            kind = self.keys[key]
            if not (isinstance(value, (int, float)) if kind is float else type(value) is kind):
                raise InputError(f"{key} must be {kind.__name__}, got {value!r}")
        missing = [key for key in _REQUIRED if key not in table]
        if missing:
            raise InputError(f"a case of {self.name} needs {', '.join(missing)}")
        defaults: dict[str, Any] = {
            "heads_kv": table["heads"], "seqlen_k": table["seqlen_q"], "head_dim_v": table["head_dim"],
        }  # fmt: skip
        full = {**defaults, **table}
        if "window" in full:
            full["window"] = check_window(full["window"])
        return BackwardProblem(AttentionProblem(**full, return_lse=True))

    def as_table(self, problem: BackwardProblem) -> dict[str, Any]:
        """Return the inverse of ``parse_case``."""
        table = {key: getattr(problem.forward, key) for key in self.keys}
        if table["softmax_scale"] is None:
            del table["softmax_scale"]
        return table

    def describe(self, problem: BackwardProblem) -> str:
        """Return a short name of a problem."""
        return problem.describe()

    def work(self, problem: BackwardProblem) -> Work:
        """Count five products a visible score, and every input and output once: the LSE is a number a row."""
        p = problem.forward
        columns = p.head_dim + p.head_dim_v
        queries = p.rows * (2 * p.head_dim + 2 * p.head_dim_v)  # q and dq, o and do
        keys = 2 * p.batch * p.heads_kv * p.seqlen_k * columns
        return Work(problem.flops, float((queries + keys) * p.item_bytes + 4 * p.rows), p.batch * p.seqlen_q)

    def make_inputs(self, problem: BackwardProblem, *, seed: int, device: str) -> dict[str, torch.Tensor]:
        """Return standard normal q, k, v and do, and o and LSE of the reference in fp32, o rounded."""
        p = problem.forward
        inputs = self._saved(problem, draw(problem, seed=seed, device=device))
        o, lse = reference.attention(
            inputs["q"], inputs["k"], inputs["v"],
            causal=p.causal, softmax_scale=p.softmax_scale, dtype=torch.float32,
        )  # fmt: skip
        inputs["o"].copy_(o)
        inputs["lse"].copy_(lse)
        return inputs

    def _saved(self, problem: BackwardProblem, drawn: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # noqa: ARG002 - for a step
        """Return what is drawn, with o and the LSE as the forward leaves them, not written yet."""
        do = drawn["do"]
        lse = torch.empty(do.shape[:3], dtype=torch.float32, device=do.device)
        return {**drawn, "o": torch.empty(do.shape, dtype=do.dtype, device=do.device), "lse": lse}

    def bind(
        self, entry: Callable[..., Any], problem: BackwardProblem, inputs: Mapping[str, torch.Tensor]
    ) -> Callable[[], Any]:
        """Return ``entry(q, k, v, o, lse, do, ...)`` as a call without arguments; a rival runs its forward before."""
        if hasattr(entry, "bind_inputs"):
            bound: Callable[[], Any] = entry.bind_inputs(problem, inputs)
            return bound
        given = [inputs[name] for name in ("q", "k", "v", "o", "lse", "do")]
        p = problem.forward
        return functools.partial(entry, *given, causal=p.causal, softmax_scale=p.softmax_scale)

    def exact(self, problem: BackwardProblem, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the gradients in fp64, of q, k, v and do alone: o and the LSE are computed anew."""
        p = problem.forward
        found = reference.attention_backward(
            inputs["q"], inputs["k"], inputs["v"], inputs["do"],
            causal=p.causal, softmax_scale=p.softmax_scale, window=p.window, dtype=torch.float64,
        )  # fmt: skip
        return tuple(found[name] for name in ("q", "k", "v"))

    def low_precision(self, problem: BackwardProblem, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return what autograd makes of the eager run in the problem's dtype."""
        _, dq, dk, dv = self.eager(problem, inputs)
        return dq, dk, dv

    def eager(self, problem: BackwardProblem, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return o of the eager run in the problem's dtype, and dq, dk and dv, by K/V heads to fit."""
        p = problem.forward
        at_once = reference.heads_at_once(p.heads_kv, 4 * p.group * p.seqlen_q * p.seqlen_k)
        q, k, v, do = (inputs[name] for name in ("q", "k", "v", "do"))
        found = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (do, q, k, v)]
        for b in range(p.batch):
            for h in range(0, p.heads_kv, at_once):
                mine, its = slice(h * p.group, (h + at_once) * p.group), slice(h, h + at_once)
                parts = ((q, mine), (k, its), (v, its))
                with torch.enable_grad():
                    leaves = [x[b : b + 1, heads].detach().requires_grad_() for x, heads in parts]
                    o = reference.attention_low_precision(
                        *leaves, causal=p.causal, softmax_scale=p.softmax_scale, window=p.window
                    )
                    grads = torch.autograd.grad(o, leaves, do[b : b + 1, mine])
                for whole, part, heads in zip(found, (o.detach(), *grads), (mine, mine, its, its), strict=True):
                    whole[b : b + 1, heads] = part
        return found

    def error_budget(self, exact: torch.Tensor, low_precision: torch.Tensor) -> float:
        """Return twice the eager low-precision error, and twice what adding and taking 0.3 costs in fp32.

        Source: the rule of FlashAttention's own tests.
        """
        if exact.numel() == 0:
            return 0.0
        exact32 = exact.float()
        noise = ((exact32 + 0.3 - 0.3) - exact32).abs().max().item()
        return 2 * (low_precision.double() - exact).abs().max().item() + 2 * noise

    def peak_tflops_key(self, problem: BackwardProblem) -> str:
        """Return the rate that bounds a problem; fp32 may run on the tf32 units."""
        return "tf32" if problem.forward.dtype == "fp32" else problem.forward.dtype

    def entry_points(self) -> Mapping[str, str]:
        """Return our own implementations by name."""
        here = f"{__package__}.operator"
        return {
            "flash_attention_backward": f"{flash_attention_backward.__module__}:flash_attention_backward",
            "backward_triton": f"{here}:backward_triton",
            "backward_gluon_sm90": f"{here}:backward_gluon_sm90",
        }

    def sources(self, subject: str) -> Sequence[str]:  # noqa: ARG002 - the protocol's signature
        """Return the files that decide plan, result and verdict: the rooms, whole, so that nothing is forgotten."""
        package = pathlib.Path(__file__).parents[1]
        rooms = ("attention", "attention_backward", "gpu")
        return sorted(str(path.relative_to(package)) for room in rooms for path in (package / room).glob("*.py"))

    def promised_launches(self, subject: str, problem: BackwardProblem) -> Sequence[PlannedLaunch]:
        """Return the launches of the plan for the current GPU, with the shared memory that compiling showed."""
        from ..gpu.compile import compile_kernel

        gpu = current_gpu()
        if gpu is None:
            raise CompileError("launches are promised for a GPU, and there is none")
        return [
            PlannedLaunch(
                launch.pattern, launch.grid, launch.block, compile_kernel(kernel.source, gpu.arch).metadata.shared
            )
            for launch, kernel in self._launches(subject, problem, gpu)
        ]

    def refusal(self, subject: str, problem: BackwardProblem, gpu: str) -> str | None:
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
        self, subject: str, problems: Sequence[BackwardProblem], gpus: Sequence[str]
    ) -> Sequence[KernelJob]:
        """Return every distinct kernel that ``problems`` need on ``gpus``, as far as ``subject`` serves them there."""
        from ..gpu.compile import KernelJob

        jobs, seen = [], set()
        for name in gpus:
            gpu = find_gpu(name)
            for problem in problems:
                if self.refusal(subject, problem, name) is not None:
                    continue
                for _, kernel in self._launches(subject, problem, gpu):
                    source, name_of_kernel = kernel.source, kernel.source.name
                    if (source, gpu.arch) in seen:
                        continue
                    seen.add((source, gpu.arch))
                    label, spilled = f"{name_of_kernel} {self.describe(problem)}", _SPILL_BYTES.get(name_of_kernel, 0)
                    instruction = _matrix_instruction(problem, name_of_kernel)
                    jobs.append(KernelJob(label, gpu.name, source, spilled, instruction))
        return jobs

    def _launches(
        self, subject: str, problem: BackwardProblem, gpu: GpuSpec
    ) -> list[tuple[PlannedLaunch, PreparedKernel]]:
        """Return what a call launches, each with its kernel. Raises ``UnsupportedError``."""
        from ..attention.backward_prepare import prepare_backward_kernels

        plan = self._plan(subject, problem, gpu)
        return [*zip(plan.launches, prepare_backward_kernels(plan), strict=True)]

    def _plan(self, subject: str, problem: BackwardProblem, gpu: GpuSpec) -> BackwardPlan:
        return plan_backward(problem, gpu, "auto" if subject == "flash_attention_backward" else subject)

    def launches(self, subject: str, problem: BackwardProblem, gpu: GpuSpec) -> Sequence[PlannedSource]:
        """Return the launches of one call on ``gpu``, in order. Raises ``UnsupportedError``."""
        return [kernel for _, kernel in self._launches(subject, self._as_called(problem), gpu)]

    def _as_called(self, problem: BackwardProblem) -> BackwardProblem:
        """Return ``problem`` as a call with its inputs describes it, which are made without memory."""
        p = problem.forward
        with FakeTensorMode():
            tensors = self._saved(problem, draw(problem, seed=0, device="cpu"))
            options = Options(p.causal, check_options(p.causal, p.softmax_scale), check_window(p.window))
            return backward_problem_of(options, tensors, ["q", "k", "v"])

    def framework_kernels(self) -> Sequence[str]:
        """Return the patterns of PyTorch's own attention kernels."""
        return _FRAMEWORK_KERNELS

    def cpu_refusal(self, subject: str, problem: BackwardProblem) -> str | None:
        """Return why Triton's interpreter cannot check ``problem``, or None."""
        if subject == "flash_attention_backward":
            return "on CPU tensors it runs the reference, which would prove nothing: ask for backward_triton"
        if subject == "backward_gluon_sm90":
            return f"{subject} is written in Gluon, which cannot be interpreted: only a GPU can check it"
        p = problem.forward
        if p.dtype == "bf16":
            return "Triton's interpreter multiplies bf16 wrongly"
        try:
            config = plan_backward(problem, None, "backward_triton").config
        except UnsupportedError as error:
            return str(error).removesuffix(f"\nhint: {error.hint}")
        assert config is None or isinstance(config, BackwardConfig)
        tile = config.q if config else None
        steps = p.batch * p.heads * -(-p.seqlen_q // tile.block_m) * -(-p.seqlen_k // tile.block_n) if tile else 0
        if steps > _MAX_INTERPRETER_STEPS:
            return f"{steps} steps in Triton's interpreter are too many (at most {_MAX_INTERPRETER_STEPS})"
        return None

    def cpu_stand_in(self, subject: str, problem: BackwardProblem) -> str:  # noqa: ARG002 - the protocol's signature
        """Return what the interpreter runs in place of ``subject``: nothing else."""
        return ""

    def rivals(self) -> Mapping[str, Any]:
        """Return all baselines by name; the first is the default."""
        return rivals.RIVALS


OPERATOR = BackwardOperator()
