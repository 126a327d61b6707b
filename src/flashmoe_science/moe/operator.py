"""What the harness needs to know of the experts: cases, inputs, the exact answer, work, budgets, kernels, rivals."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CompileError, InputError, UnsupportedError
from ..gpu.axis import Axis
from ..gpu.device import current_gpu
from ..gpu.planning import PlannedKernel, PlannedLaunch, Work
from ..gpu.specs import GpuSpec, find_gpu
from . import reference
from .api import fused_moe
from .drawn import draw_ids, weight_bytes
from .inputs import TENSORS
from .plan import MoePlan, plan_moe
from .problem import MoeCase, MoeProblem
from .rival_registry import RIVALS
from .rivals import MoeRival

if TYPE_CHECKING:
    from ..gpu.compile import KernelJob
    from ..gpu.identity import PlannedSource

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_KEYS = {
    "tokens": int, "experts": int, "top_k": int, "hidden": int, "inter": int, "dtype": str, "activation": str,
    "alpha": float, "limit": float, "interleaved": bool, "bias_gate_up": bool, "bias_down": bool,
    "shared_experts": int, "shared_inter": int, "shared_weights": str, "batch_invariant": bool, "routing": str,
}  # fmt: skip
_REQUIRED = ("tokens", "experts", "top_k", "hidden", "inter", "dtype")
_MAX_INTERPRETER_STEPS = 4096  # about a minute in Triton's interpreter
_MATRIX_KERNELS = (
    "_gate_up_kernel", "_down_kernel", "_grouped_sm90_kernel", "_activation_backward_kernel", "_weight_gradient_kernel",
    "_weights_sm90_kernel", "_activation_sm90_kernel",
)  # fmt: skip
_FRAMEWORK_KERNELS = ("*cutlass*gemm*grouped*", "*GroupProblemShape*")

gemv_triton = functools.partial(fused_moe, kernel="gemv_triton")
few_triton = functools.partial(fused_moe, kernel="few_triton")
grouped_triton = functools.partial(fused_moe, kernel="grouped_triton")
grouped_gluon_sm90 = functools.partial(fused_moe, kernel="grouped_gluon_sm90")


def _matrix_instruction(plan: MoePlan, kernel: str) -> str:
    """Return the machine instruction that a kernel of 16-bit operands promises, as a pattern, or an empty text."""
    return "*MMA*" if plan.problem.item_bytes == 2 and kernel in _MATRIX_KERNELS else ""


class MoeOperator:
    """The experts, for the harness (the protocol is ``proof.operator.Operator``)."""

    name = "moe"

    def parse_case(self, table: Mapping[str, Any]) -> MoeCase:
        """Turn one case of a suite file into a problem.

        Raises:
            InputError: a key is unknown, missing or of the wrong type.
        """
        for key, value in table.items():
            if key not in _KEYS:
                raise InputError(f"{key} is not a key of a case of {self.name}; keys: {', '.join(_KEYS)}")
            kind = _KEYS[key]
            if not (type(value) in (int, float) if kind is float else type(value) is kind):
                raise InputError(f"{key} must be {kind.__name__}, got {value!r}")
        missing = [key for key in _REQUIRED if key not in table]
        if missing:
            raise InputError(f"a case of {self.name} needs {', '.join(missing)}")
        full = dict(table)
        routing = full.pop("routing", "uniform")
        return MoeCase(MoeProblem(**full), routing)

    def as_table(self, case: MoeCase) -> dict[str, Any]:
        """Return the inverse of ``parse_case``: what is not a default."""
        defaults = {item.name: item.default for item in dataclasses.fields(MoeProblem)}
        table = {key: getattr(case.problem, key) for key in _KEYS if key != "routing"}
        table = {key: value for key, value in table.items() if key in _REQUIRED or value != defaults[key]}
        return table if case.routing == "uniform" else {**table, "routing": case.routing}

    def axes(self) -> Sequence[Axis]:
        """Return the one axis: each token gives a row of its own."""
        return (Axis("tokens", "parallel", "the tokens"),)

    def scaled(self, case: MoeCase, axis: str, factor: int) -> MoeCase | None:
        """Return a case of more tokens, by the kernels that serve as many."""
        assert axis == "tokens", axis
        return self.parse_case({**self.as_table(case), "tokens": case.problem.tokens * factor})

    def describe(self, case: MoeCase) -> str:
        """Return a short name of a problem."""
        return case.problem.describe() + ("" if case.routing == "uniform" else f"_{case.routing}")

    def work(self, case: MoeCase) -> Work:
        """Count both products of every pair; and the weights of active experts, x, routing and output once."""
        p = case.problem
        rows = 2 * p.tokens * p.hidden * p.item_bytes + 8 * p.pairs
        return Work(p.flops, float(weight_bytes(case) + rows), p.tokens)

    def make_inputs(self, case: MoeCase, *, seed: int, device: str) -> dict[str, torch.Tensor]:
        """Return standard normal x and biases, weights that keep that size, and a routing whose weights sum to 1."""
        p, dtype = case.problem, _DTYPES[case.problem.dtype]
        generator = torch.Generator(device=device).manual_seed(seed)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            for part in tensor if len(shape) == 3 else (tensor,):  # an expert at a time: fp32 of all may not fit
                part.copy_(torch.randn(part.shape, generator=generator, device=device) * scale)
            return tensor

        drawn = torch.rand(p.tokens, p.top_k, generator=generator, device=device) + 0.1
        inputs = {
            "x": normal(p.tokens, p.hidden),
            "w_gate_up": normal(p.experts, p.columns_up, p.hidden, scale=p.hidden**-0.5),
            "w_down": normal(p.experts, p.hidden, p.inter, scale=p.inter**-0.5),
            "topk_weights": (drawn / drawn.sum(-1, keepdim=True)).to(_DTYPES[p.weights_dtype]),
            "topk_ids": draw_ids(case, generator, device),
        }
        if p.bias_gate_up:
            inputs["bias_gate_up"] = normal(p.experts, p.columns_up)
        if p.bias_down:
            inputs["bias_down"] = normal(p.experts, p.hidden)
        if p.shared_experts:
            theirs = p.shared()
            inputs["shared_gate_up"] = normal(theirs.experts, theirs.columns_up, p.hidden, scale=p.hidden**-0.5)
            inputs["shared_down"] = normal(theirs.experts, p.hidden, theirs.inter, scale=theirs.inter**-0.5)
        if p.shared_weights:
            weights = torch.rand(p.tokens, p.shared_experts, generator=generator, device=device)
            inputs["shared_weights"] = weights.to(_DTYPES[p.shared_weights])
        return inputs

    @staticmethod
    def _options(case: MoeCase) -> dict[str, Any]:
        """Return the options of ``fused_moe`` that are not its defaults."""
        p = case.problem
        named = {"activation": p.activation, "alpha": p.alpha, "limit": p.limit, "interleaved": p.interleaved}
        return {name: value for name, value in named.items() if value and value != "swiglu"}

    def bind(
        self, entry: Callable[..., torch.Tensor], case: MoeCase, inputs: Mapping[str, torch.Tensor]
    ) -> Callable[[], torch.Tensor]:
        """Return ``entry(x, w_gate_up, w_down, topk_weights, topk_ids, ...)`` as a call without arguments.

        A yardstick lays out what it needs before: it offers ``bind_inputs``.
        """
        if hasattr(entry, "bind_inputs"):
            bound: Callable[[], torch.Tensor] = entry.bind_inputs(case, inputs)
            return bound
        options = self._options(case)
        if case.problem.batch_invariant:
            options["batch_invariant"] = True
        options.update({name: inputs[name] for name in TENSORS[5:] if name in inputs})
        return functools.partial(entry, *(inputs[name] for name in TENSORS[:5]), **options)

    def exact(self, case: MoeCase, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the answer in fp64."""
        options: dict[str, Any] = {**inputs, **self._options(case)}
        return reference.fused_moe(**options, dtype=torch.float64)

    def low_precision(self, case: MoeCase, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the framework's eager answer: a loop over experts in the problem's dtype."""
        options: dict[str, Any] = {**inputs, **self._options(case)}
        return reference.fused_moe(**options)

    def error_budget(self, exact: torch.Tensor, low_precision: torch.Tensor) -> float:
        """Return twice the error of the eager run, and twice what adding and taking 0.3 costs in fp32.

        Source: the rule of FlashAttention's own tests.
        """
        if exact.numel() == 0:
            return 0.0
        exact32 = exact.float()
        noise = ((exact32 + 0.3 - 0.3) - exact32).abs().max().item()
        return 2 * (low_precision.double() - exact).abs().max().item() + 2 * noise

    def peak_tflops_key(self, case: MoeCase) -> str:
        """Return the rate that bounds a problem; fp32 may run on the tf32 units."""
        return "tf32" if case.problem.dtype == "fp32" else case.problem.dtype

    def entry_points(self) -> Mapping[str, str]:
        """Return our own implementations by name."""
        here = f"{__package__}.operator"
        return {
            "fused_moe": f"{__package__}.api:fused_moe",
            "gemv_triton": f"{here}:gemv_triton",
            "few_triton": f"{here}:few_triton",
            "grouped_triton": f"{here}:grouped_triton",
            "grouped_gluon_sm90": f"{here}:grouped_gluon_sm90",
        }

    def sources(self, subject: str) -> Sequence[str]:  # noqa: ARG002 - the protocol's signature
        """Return the files that decide plan, result and verdict: the rooms, whole, so that nothing is forgotten."""
        package = pathlib.Path(__file__).parents[1]
        files = [path for room in ("moe", "gpu") for path in (package / room).glob("*.py")]
        files.append(package / "attention" / "plan.py")  # which architectures are served
        return sorted(str(path.relative_to(package)) for path in files)

    def promised_launches(self, subject: str, case: MoeCase) -> Sequence[PlannedLaunch]:
        """Return the launches of the plan for the current GPU, with the shared memory that compiling showed."""
        gpu = current_gpu()
        if gpu is None:
            raise CompileError("launches are promised for a GPU, and there is none")
        return [
            PlannedLaunch(kernel.name, kernel.grid, kernel.block, kernel.shared_memory_bytes)
            for kernel in self._planned(self._plan(subject, case, gpu), with_code=False)
        ]

    def planned_kernels(self, subject: str, case: MoeCase, gpu: str) -> Sequence[PlannedKernel]:
        """Return the kernels that ``subject`` would launch on ``gpu``, compiled for it.

        Raises:
            CompileError: a kernel does not compile.
        """
        return self._planned(self._plan(subject, case, find_gpu(gpu)), with_code=True)

    @staticmethod
    def _planned(plan: MoePlan, *, with_code: bool) -> list[Any]:
        from ..gpu.compile import compile_kernel, read_code
        from .calls import kernels_of

        kernels = []
        for launch, prepared in zip(plan.launches, kernels_of(plan), strict=True):
            compiled = compile_kernel(prepared.source, plan.arch)
            code: Any = read_code(compiled, prepared.source.name, plan.arch) if with_code else None
            kernels.append(PlannedKernel(launch.pattern, launch.grid, launch.block, compiled.metadata.shared, code))
        return kernels

    def refusal(self, subject: str, case: MoeCase, gpu: str) -> str | None:
        """Return why ``subject`` does not serve ``case`` on ``gpu``, or None; also for a GPU that is not known."""
        try:
            spec = find_gpu(gpu)
        except InputError:
            return None
        try:
            self._plan(subject, case, spec)
        except UnsupportedError as error:
            message = str(error).removesuffix(f"\nhint: {error.hint}")
            return message.removeprefix(f"{subject} does not serve {case.problem.describe()}: ")
        return None

    def compile_jobs(self, subject: str, cases: Sequence[MoeCase], gpus: Sequence[str]) -> Sequence[KernelJob]:
        """Return every distinct kernel that ``cases`` need on ``gpus``, as far as ``subject`` serves them there."""
        from ..gpu.compile import KernelJob
        from .calls import kernels_of

        jobs, seen = [], set()
        for name in gpus:
            gpu = find_gpu(name)
            for case in cases:
                if self.refusal(subject, case, name) is not None:
                    continue
                plan = self._plan(subject, case, gpu)
                for kernel in kernels_of(plan):
                    if (kernel.source, gpu.arch) not in seen:
                        seen.add((kernel.source, gpu.arch))
                        label = f"{kernel.source.name} {self.describe(case)}"
                        instruction = _matrix_instruction(plan, kernel.source.name)
                        jobs.append(KernelJob(label, gpu.name, kernel.source, instruction=instruction))
        return jobs

    def _plan(self, subject: str, case: MoeCase, gpu: GpuSpec) -> MoePlan:
        return plan_moe(case.problem, gpu, "auto" if subject == "fused_moe" else subject)

    def launches(self, subject: str, case: MoeCase, gpu: GpuSpec) -> Sequence[PlannedSource]:
        """Return the launches of one call on ``gpu``, in order. Raises ``UnsupportedError``."""
        from .calls import kernels_of

        return kernels_of(self._plan(subject, case, gpu))

    def framework_kernels(self) -> Sequence[str]:
        """Return the patterns of PyTorch's own grouped products."""
        return _FRAMEWORK_KERNELS

    def cpu_refusal(self, subject: str, case: MoeCase) -> str | None:
        """Return why Triton's interpreter cannot check ``case``, or None."""
        if subject == "fused_moe":
            others = "few_triton or grouped_triton, in a suite of fp16 or fp32"
            return f"on CPU tensors it runs the reference, which would prove nothing: ask for {others}"
        if subject == "grouped_gluon_sm90":
            return f"{subject} is written in Gluon, which cannot be interpreted: only a GPU can check it"
        if case.problem.dtype == "bf16":
            return "Triton's interpreter multiplies bf16 wrongly: a suite of fp16 or fp32 can be checked here"
        p = case.problem
        tiles = (p.pairs // 16 + min(p.experts, p.pairs)) * (-(-p.inter // 16) + -(-p.hidden // 32))
        steps = tiles * -(-max(p.hidden, p.inter) // 32)
        if steps > _MAX_INTERPRETER_STEPS:
            return f"{steps} steps in Triton's interpreter are too many (at most {_MAX_INTERPRETER_STEPS})"
        return None

    def cpu_stand_in(self, subject: str, case: MoeCase) -> str:  # noqa: ARG002 - the protocol's signature
        """Return what the interpreter runs in place of ``subject``: nothing else."""
        return ""

    def rivals(self) -> Mapping[str, MoeRival]:
        """Return all baselines by name; the first is the default."""
        return RIVALS


OPERATOR = MoeOperator()
