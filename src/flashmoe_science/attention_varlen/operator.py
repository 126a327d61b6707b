"""What the harness needs to know of attention of packed sequences: cases, inputs, the exact answer, work, rivals."""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..attention import reference
from ..attention.operator import OPERATOR as PADDED
from ..attention.plan import plan_attention
from ..attention.varlen import flash_attention_varlen
from ..errors import InputError
from ..gpu.planning import PlannedKernel, PlannedLaunch, Work
from ..gpu.specs import GpuSpec
from . import rivals
from .problem import VarlenProblem, make_problem

if TYPE_CHECKING:
    from ..gpu.compile import KernelJob
    from ..gpu.identity import PlannedSource

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_KEYS = {
    "lengths": list, "lengths_k": list, "heads": int, "heads_kv": int, "head_dim": int, "head_dim_v": int,
    "dtype": str, "causal": bool, "softmax_scale": float,
}  # fmt: skip
_REQUIRED = ("lengths", "heads", "head_dim", "dtype")
_FRAMEWORK_KERNELS = ("*flash_fwd*", "*fmha*", "*cudnn*", "*sm80_xmma*softmax*")
_MAX_INTERPRETER_STEPS = 1024  # about a minute in Triton's interpreter

varlen_triton = functools.partial(flash_attention_varlen, kernel="forward_triton")
varlen_gluon_sm90 = functools.partial(flash_attention_varlen, kernel="forward_features_gluon_sm90")
# What ``attention.operator`` calls them.
_KERNELS = {
    "flash_attention_varlen": "flash_attention",
    "varlen_triton": "forward_triton",
    "varlen_gluon_sm90": "forward_features_gluon_sm90",
}


class VarlenOperator:
    """Attention of packed sequences, for the harness (the protocol is ``proof.operator.Operator``)."""

    name = "attention_varlen"

    def parse_case(self, table: Mapping[str, Any]) -> VarlenProblem:
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
            if kind is list and not all(type(length) is int for length in value):
                raise InputError(f"{key} must be a list of integers, got {value!r}")
        missing = [key for key in _REQUIRED if key not in table]
        if missing:
            raise InputError(f"a case of {self.name} needs {', '.join(missing)}")
        full = {"heads_kv": table["heads"], "head_dim_v": table["head_dim"], **table}
        lengths = tuple(full.pop("lengths"))
        return make_problem(lengths, tuple(full.pop("lengths_k", lengths)), **full)

    def as_table(self, problem: VarlenProblem) -> dict[str, Any]:
        """Return the inverse of ``parse_case``."""
        own = {"lengths": [*problem.lengths], "lengths_k": [*problem.lengths_k]}
        table = {**own, **{key: getattr(problem.planned, key) for key in _KEYS if key not in own}}
        if table["softmax_scale"] is None:
            del table["softmax_scale"]
        return table

    def describe(self, problem: VarlenProblem) -> str:
        """Return a short name of a problem."""
        return problem.describe()

    def work(self, problem: VarlenProblem) -> Work:
        """Count 4 D operations a visible score, and every input and output once."""
        p, (tokens_q, tokens_k) = problem.planned, problem.tokens
        elements = (tokens_q * p.heads + tokens_k * p.heads_kv) * (p.head_dim + p.head_dim_v)
        return Work(problem.flops, float(elements * p.item_bytes + 8 * (p.batch + 1)), tokens_q)

    def make_inputs(self, problem: VarlenProblem, *, seed: int, device: str) -> dict[str, torch.Tensor]:
        """Return standard normal q, k and v, packed, and where sequences start."""
        p, (tokens_q, tokens_k) = problem.planned, problem.tokens
        generator = torch.Generator(device=device).manual_seed(seed)
        shapes = {
            "q": (tokens_q, p.heads, p.head_dim),
            "k": (tokens_k, p.heads_kv, p.head_dim),
            "v": (tokens_k, p.heads_kv, p.head_dim_v),
        }
        inputs = {
            name: torch.randn(shape, generator=generator, device=device).to(_DTYPES[p.dtype])
            for name, shape in shapes.items()
        }
        for side, lengths in (("q", problem.lengths), ("k", problem.lengths_k)):
            starts = [0, *itertools.accumulate(lengths)]
            inputs[f"cu_seqlens_{side}"] = torch.tensor(starts, dtype=torch.int32, device=device)
        return inputs

    def bind(
        self, entry: Callable[..., torch.Tensor], problem: VarlenProblem, inputs: Mapping[str, torch.Tensor]
    ) -> Callable[[], torch.Tensor]:
        """Return ``entry(q, k, v, cu_seqlens_q, ...)`` as a call without arguments."""
        if hasattr(entry, "bind_inputs"):
            bound: Callable[[], torch.Tensor] = entry.bind_inputs(problem, inputs)
            return bound
        names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
        options = {"causal": problem.planned.causal, "softmax_scale": problem.planned.softmax_scale}
        return functools.partial(entry, *(inputs[name] for name in names), *problem.longest, **options)

    def exact(self, problem: VarlenProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the answer in fp64."""
        return reference.attention_varlen(
            **inputs, causal=problem.planned.causal, softmax_scale=problem.planned.softmax_scale, dtype=torch.float64
        )[0]

    def low_precision(self, problem: VarlenProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the framework's eager answer in the problem's dtype, by heads: all scores at once may not fit."""
        p = problem.planned
        o = torch.zeros(*inputs["q"].shape[:2], p.head_dim_v, dtype=inputs["q"].dtype, device=inputs["q"].device)
        ends_q, ends_k = (itertools.accumulate(lengths) for lengths in (problem.lengths, problem.lengths_k))
        for sequence, end_q, end_k in zip(problem.sequences(), ends_q, ends_k, strict=True):
            rows, keys = slice(end_q - sequence.seqlen_q, end_q), slice(end_k - sequence.seqlen_k, end_k)
            if not sequence.seqlen_q or not sequence.seqlen_k:
                continue
            at_once = reference.heads_at_once(p.heads_kv, p.group * sequence.seqlen_q * sequence.seqlen_k)
            for h in range(0, p.heads_kv, at_once):
                mine, its = slice(h * p.group, (h + at_once) * p.group), slice(h, h + at_once)
                parts = (inputs["q"][rows, mine], inputs["k"][keys, its], inputs["v"][keys, its])
                q, k, v = (part.transpose(0, 1)[None] for part in parts)
                low = reference.attention_low_precision(q, k, v, causal=p.causal, softmax_scale=p.softmax_scale)
                o[rows, mine] = low[0].transpose(0, 1)
        return o

    def error_budget(self, exact: torch.Tensor, low_precision: torch.Tensor) -> float:
        """Return what ``attention.operator`` allows."""
        return PADDED.error_budget(exact, low_precision)

    def peak_tflops_key(self, problem: VarlenProblem) -> str:
        """Return the rate that bounds a problem."""
        return PADDED.peak_tflops_key(problem.planned)

    def entry_points(self) -> Mapping[str, str]:
        """Return our own implementations by name."""
        here = f"{__package__}.operator"
        return {
            "flash_attention_varlen": f"{flash_attention_varlen.__module__}:flash_attention_varlen",
            "varlen_triton": f"{here}:varlen_triton",
            "varlen_gluon_sm90": f"{here}:varlen_gluon_sm90",
        }

    def sources(self, subject: str) -> Sequence[str]:  # noqa: ARG002 - the protocol's signature
        """Return the files that decide plan, result and verdict: the rooms, whole, so that nothing is forgotten."""
        package = pathlib.Path(__file__).parents[1]
        rooms = ("attention", "attention_varlen", "gpu")
        return sorted(str(path.relative_to(package)) for room in rooms for path in (package / room).glob("*.py"))

    def promised_launches(self, subject: str, problem: VarlenProblem) -> Sequence[PlannedLaunch]:
        """Return the launches of the plan for the current GPU, with the shared memory that compiling showed."""
        return PADDED.promised_launches(_KERNELS[subject], problem.planned)

    def refusal(self, subject: str, problem: VarlenProblem, gpu: str) -> str | None:
        """Return why ``subject`` does not serve ``problem`` on ``gpu``, or None; also for a GPU that is not known."""
        return PADDED.refusal(_KERNELS[subject], problem.planned, gpu)

    def compile_jobs(self, subject: str, problems: Sequence[VarlenProblem], gpus: Sequence[str]) -> Sequence[KernelJob]:
        """Return every distinct kernel that ``problems`` need on ``gpus``, as far as ``subject`` serves them there."""
        return PADDED.compile_jobs(_KERNELS[subject], [problem.planned for problem in problems], gpus)

    def planned_kernels(self, subject: str, problem: VarlenProblem, gpu: str) -> Sequence[PlannedKernel]:
        """Return the kernels that ``subject`` would launch on ``gpu``, compiled for it."""
        return PADDED.planned_kernels(_KERNELS[subject], problem.planned, gpu)

    def launches(self, subject: str, problem: VarlenProblem, gpu: GpuSpec) -> Sequence[PlannedSource]:
        """Return the launches of one call on ``gpu``, in order. Raises ``UnsupportedError``."""
        from ..attention.features_plan import FEATURES_KERNEL
        from ..attention.features_prepare import prepare_features
        from ..attention.prepare import prepare_kernels

        kernel = _KERNELS[subject]
        plan = plan_attention(problem.planned, gpu, "auto" if kernel == "flash_attention" else kernel)
        if plan.kernel != FEATURES_KERNEL:
            return prepare_kernels(plan)
        return prepare_features(plan, (sum(problem.lengths), sum(problem.lengths_k)))  # TMA's maps have all tokens

    def framework_kernels(self) -> Sequence[str]:
        """Return the patterns of PyTorch's own attention kernels."""
        return _FRAMEWORK_KERNELS

    def cpu_refusal(self, subject: str, problem: VarlenProblem) -> str | None:
        """Return why Triton's interpreter cannot check ``problem``, or None."""
        if subject == "flash_attention_varlen":
            return "on CPU tensors it runs the reference, which would prove nothing: ask for varlen_triton"
        if subject == "varlen_gluon_sm90":
            return f"{subject} is written in Gluon, which cannot be interpreted: only a GPU can check it"
        if problem.dtype == "bf16":
            return "Triton's interpreter multiplies bf16 wrongly"
        tiles = sum(-(-q // 16) * -(-k // 32) for q, k in zip(problem.lengths, problem.lengths_k, strict=True))
        steps = tiles * problem.planned.heads
        if steps > _MAX_INTERPRETER_STEPS:
            return f"{steps} steps in Triton's interpreter are too many (at most {_MAX_INTERPRETER_STEPS})"
        return None

    def cpu_stand_in(self, subject: str, problem: VarlenProblem) -> str:  # noqa: ARG002 - the protocol's signature
        """Return what the interpreter runs in place of ``subject``: nothing else."""
        return ""

    def rivals(self) -> Mapping[str, rivals.VarlenRival]:
        """Return all baselines by name; the first is the default."""
        return rivals.RIVALS


OPERATOR = VarlenOperator()
