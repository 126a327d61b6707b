"""What the harness needs to know of attention with a K/V cache: cases, inputs, the exact answer, work, rivals."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # what torch.compile traces with

from ..attention import cache_reference
from ..attention.cache_api import flash_attention_with_kv_cache
from ..attention.cache_contract import cache_problem_of
from ..attention.cache_problem import CacheProblem
from ..attention.decode_plan import DecodePlan, plan_with_kv_cache
from ..errors import CompileError, InputError, UnsupportedError
from ..gpu.device import current_gpu
from ..gpu.planning import PlannedLaunch, Work
from ..gpu.specs import GpuSpec, find_gpu
from . import rivals

if TYPE_CHECKING:
    from ..gpu.compile import KernelJob
    from ..gpu.identity import PlannedSource

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_KEYS = {
    "batch": int, "heads": int, "heads_kv": int, "seqlen_q": int, "seqlen_k": int, "head_dim": int, "head_dim_v": int,
    "dtype": str, "causal": bool, "softmax_scale": float, "page_size": int, "batch_invariant": bool,
    "shared_kv": bool,
}  # fmt: skip
_REQUIRED = ("batch", "heads", "seqlen_k", "head_dim", "dtype")
_KERNELS = ("decode_gluon_sm90", "decode_triton")
_FRAMEWORK_KERNELS = ("*flash_fwd*", "*fmha*", "*cudnn*", "*sm80_xmma*softmax*")

decode_gluon_sm90 = functools.partial(flash_attention_with_kv_cache, kernel="decode_gluon_sm90")
decode_triton = functools.partial(flash_attention_with_kv_cache, kernel="decode_triton")


def _matrix_instruction(plan: DecodePlan, kernel: str) -> str:
    """Return the machine instruction that a kernel of 16-bit operands promises, as a pattern, or an empty text."""
    if kernel == "_decode_sm90_kernel":
        return "*GMMA*"
    return "*MMA*" if plan.problem.item_bytes == 2 and kernel == "_decode_kernel" else ""


class CacheOperator:
    """Attention with a K/V cache, for the harness (the protocol is ``proof.operator.Operator``).

    Every sequence of a case fills its cache. With a ``page_size`` pages lie in random order and lengths on the device;
    without, no lengths are given.
    """

    name = "attention_cache"

    def parse_case(self, table: Mapping[str, Any]) -> CacheProblem:
        """Turn one case of a suite file into a problem.

        Raises:
            InputError: a key is unknown, missing or of the wrong type.
        """
        for key, value in table.items():
            if key not in _KEYS:
                raise InputError(f"{key} is not a key of a case of {self.name}; keys: {', '.join(_KEYS)}")
            kind = _KEYS[key]
            if not (isinstance(value, (int, float)) if kind is float else type(value) is kind):
                raise InputError(f"{key} must be {kind.__name__}, got {value!r}")
        missing = [key for key in _REQUIRED if key not in table]
        if missing:
            raise InputError(f"a case of {self.name} needs {', '.join(missing)}")
        full = {"heads_kv": table["heads"], "seqlen_q": 1, "head_dim_v": table["head_dim"], **table}
        full["capacity"] = full.pop("seqlen_k")
        page_size = full.get("page_size", 0)
        if page_size and full["capacity"] % page_size:
            raise InputError(f"seqlen_k must be a multiple of page_size = {page_size}, got {full['capacity']}")
        return CacheProblem(**full, has_seqlens=page_size > 0)

    def as_table(self, problem: CacheProblem) -> dict[str, Any]:
        """Return the inverse of ``parse_case``."""
        table = {key: getattr(problem, "capacity" if key == "seqlen_k" else key) for key in _KEYS}
        if table["softmax_scale"] is None:
            del table["softmax_scale"]
        return table

    def describe(self, problem: CacheProblem) -> str:
        """Return a short name of a problem."""
        return problem.describe()

    def work(self, problem: CacheProblem) -> Work:
        """Count 4 D operations a visible score, and every input that is read, and the output, once."""
        p = problem
        rows = p.batch * p.heads * p.seqlen_q * (p.head_dim + p.head_dim_v) * p.item_bytes
        pages = 4.0 * p.batch * (-(-p.capacity // p.page_size) + 1) if p.page_size else 0.0
        return Work(p.flops, p.kv_bytes + rows + pages, p.batch * p.seqlen_q)

    def make_inputs(self, problem: CacheProblem, *, seed: int, device: str) -> dict[str, torch.Tensor]:
        """Return standard normal q and caches, pages in random order, and lengths."""
        p, dtype = problem, _DTYPES[problem.dtype]
        generator = torch.Generator(device=device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        inputs = {
            "q": normal(p.batch, p.heads, p.seqlen_q, p.head_dim),
            "k_cache": normal(p.pages, p.page_size or p.capacity, p.heads_kv, p.head_dim),
        }
        if not p.shared_kv:
            inputs["v_cache"] = normal(p.pages, p.page_size or p.capacity, p.heads_kv, p.head_dim_v)
        if p.page_size:
            order = torch.randperm(p.pages, generator=generator, device=device, dtype=torch.int32)
            inputs["page_table"] = order.reshape(p.batch, -1)
            inputs["cache_seqlens"] = torch.full((p.batch,), p.capacity, dtype=torch.int32, device=device)
        return inputs

    def bind(
        self, entry: Callable[..., torch.Tensor], problem: CacheProblem, inputs: Mapping[str, torch.Tensor]
    ) -> Callable[[], torch.Tensor]:
        """Return ``entry(q, k_cache, v_cache, ...)`` as a call without arguments; a rival lays inputs out before."""
        if hasattr(entry, "bind_inputs"):
            bound: Callable[[], torch.Tensor] = entry.bind_inputs(problem, inputs)
            return bound
        options: dict[str, Any] = {name: inputs[name] for name in ("page_table", "cache_seqlens") if name in inputs}
        options.update(causal=problem.causal, softmax_scale=problem.softmax_scale)
        if problem.batch_invariant:
            options["batch_invariant"] = True
        return functools.partial(entry, inputs["q"], inputs["k_cache"], rivals.values(problem, inputs), **options)

    def exact(self, problem: CacheProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the answer in fp64."""
        tensors = {**inputs, "v_cache": rivals.values(problem, inputs)}
        return cache_reference.attention_with_kv_cache(problem, tensors, dtype=torch.float64)[0]

    def low_precision(self, problem: CacheProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the answer with every step rounded to the problem's dtype."""
        tensors = {**inputs, "v_cache": rivals.values(problem, inputs)}
        return cache_reference.attention_with_kv_cache(problem, tensors, dtype=_DTYPES[problem.dtype])[0]

    def error_budget(self, exact: torch.Tensor, low_precision: torch.Tensor) -> float:
        """Return twice the error of the low-precision run, and twice what adding and taking 0.3 costs in fp32.

        Source: the rule of FlashAttention's own tests.
        """
        if exact.numel() == 0:
            return 0.0
        exact32 = exact.float()
        noise = ((exact32 + 0.3 - 0.3) - exact32).abs().max().item()
        return 2 * (low_precision.double() - exact).abs().max().item() + 2 * noise

    def peak_tflops_key(self, problem: CacheProblem) -> str:
        """Return the rate that bounds a problem; fp32 may run on the tf32 units."""
        return "tf32" if problem.dtype == "fp32" else problem.dtype

    def entry_points(self) -> Mapping[str, str]:
        """Return our own implementations by name."""
        here = flash_attention_with_kv_cache.__module__
        return {
            "flash_attention_with_kv_cache": f"{here}:flash_attention_with_kv_cache",
            **{kernel: f"{__package__}.operator:{kernel}" for kernel in _KERNELS},
        }

    def sources(self, subject: str) -> Sequence[str]:  # noqa: ARG002 - the protocol's signature
        """Return the files that decide plan, result and verdict: the rooms, whole, so that nothing is forgotten."""
        package = pathlib.Path(__file__).parents[1]
        rooms = ("attention", "attention_cache", "gpu")
        return sorted(str(path.relative_to(package)) for room in rooms for path in (package / room).glob("*.py"))

    def promised_launches(self, subject: str, problem: CacheProblem) -> Sequence[PlannedLaunch]:
        """Return the launches of the plan for the current GPU, with the shared memory that compiling showed."""
        from ..attention.decode_prepare import prepare_cache_kernels
        from ..gpu.compile import compile_kernel

        gpu = current_gpu()
        if gpu is None:
            raise CompileError("launches are promised for a GPU, and there is none")
        plan = self._plan(subject, problem, gpu)
        return [
            PlannedLaunch(
                launch.pattern, launch.grid, launch.block, compile_kernel(kernel.source, plan.arch).metadata.shared
            )
            for launch, kernel in zip(plan.launches, prepare_cache_kernels(plan), strict=True)
        ]

    def refusal(self, subject: str, problem: CacheProblem, gpu: str) -> str | None:
        """Return why ``subject`` does not serve ``problem`` on ``gpu``, or None; also for a GPU that is not known."""
        try:
            spec = find_gpu(gpu)
        except InputError:
            return None
        try:
            self._plan(subject, problem, spec)
        except UnsupportedError as error:
            return str(error).removesuffix(f"\nhint: {error.hint}")
        return None

    def compile_jobs(self, subject: str, problems: Sequence[CacheProblem], gpus: Sequence[str]) -> Sequence[KernelJob]:
        """Return every distinct kernel that ``problems`` need on ``gpus``, as far as ``subject`` serves them there."""
        from ..attention.decode_prepare import prepare_cache_kernels
        from ..gpu.compile import KernelJob

        jobs, seen = [], set()
        for name in gpus:
            gpu = find_gpu(name)
            for problem in problems:
                if self.refusal(subject, problem, name) is not None:
                    continue
                plan = self._plan(subject, problem, gpu)
                for kernel in prepare_cache_kernels(plan):
                    if (kernel.source, gpu.arch) not in seen:
                        seen.add((kernel.source, gpu.arch))
                        label = f"{kernel.source.name} {self.describe(problem)}"
                        instruction = _matrix_instruction(plan, kernel.source.name)
                        jobs.append(KernelJob(label, gpu.name, kernel.source, instruction=instruction))
        return jobs

    def _plan(self, subject: str, problem: CacheProblem, gpu: GpuSpec) -> DecodePlan:
        return plan_with_kv_cache(problem, gpu, subject if subject in _KERNELS else "auto")

    def launches(self, subject: str, problem: CacheProblem, gpu: GpuSpec) -> Sequence[PlannedSource]:
        """Return the launches of one call on ``gpu``, in order. Raises ``UnsupportedError``."""
        from ..attention.decode_prepare import prepare_cache_kernels

        return prepare_cache_kernels(self._plan(subject, self._as_called(problem), gpu))

    def _as_called(self, problem: CacheProblem) -> CacheProblem:
        """Return ``problem`` as a call with its inputs describes it, which are made without memory."""
        p = problem
        with FakeTensorMode():
            tensors = self.make_inputs(p, seed=0, device="cpu")
            called = cache_problem_of(
                {**tensors, "v_cache": rivals.values(p, tensors)},
                causal=p.causal,
                softmax_scale=p.softmax_scale,
                batch_invariant=p.batch_invariant,
            )
        return dataclasses.replace(called, shared_kv=p.shared_kv)  # without memory nothing is shared

    def framework_kernels(self) -> Sequence[str]:
        """Return the patterns of PyTorch's own attention kernels."""
        return _FRAMEWORK_KERNELS

    def cpu_refusal(self, subject: str, problem: CacheProblem) -> str | None:
        """Return why Triton's interpreter cannot check ``problem``, or None."""
        if subject == "flash_attention_with_kv_cache":
            return "on CPU tensors it runs the reference, which would prove nothing: ask for decode_triton"
        if subject == "decode_gluon_sm90":
            return f"{subject} is written in Gluon, which cannot be interpreted: only a GPU can check it"
        if problem.dtype == "bf16":
            return "Triton's interpreter multiplies bf16 wrongly"
        steps = problem.batch * problem.heads_kv * -(-problem.seen_keys // 16)
        if steps > _MAX_INTERPRETER_STEPS:
            return f"{steps} steps in Triton's interpreter are too many (at most {_MAX_INTERPRETER_STEPS})"
        return None

    def cpu_stand_in(self, subject: str, problem: CacheProblem) -> str:  # noqa: ARG002 - the protocol's signature
        """Return what the interpreter runs in place of ``subject``: nothing else."""
        return ""

    def rivals(self) -> Mapping[str, rivals.CacheRival]:
        """Return all baselines by name; the first is the default."""
        return rivals.RIVALS


_MAX_INTERPRETER_STEPS = 1024  # about a minute in Triton's interpreter
OPERATOR = CacheOperator()
