"""The base of our operators: an adapter plans a call, and what the harness asks of its kernels follows from that."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import random
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..errors import CompileError, InputError, UnsupportedError
from ..gpu.device import current_gpu
from ..gpu.planning import PlannedKernel, PlannedLaunch
from ..gpu.specs import GpuSpec, find_gpu
from .baselines.base import Baseline, Inputs
from .stress import OF_LAYOUT, OF_VALUES, laid_out

if TYPE_CHECKING:
    from ..gpu.compile import KernelJob
    from ..gpu.identity import PlannedSource

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_KINDS = {int: "a valid integer", float: "a valid number", str: "a text", bool: "true or false", list: "a list"}
_ELEMENTS_AT_ONCE = 2**27  # 1 GiB in fp64
_PACKAGE = Path(__file__).resolve().parents[1]


def standard_normal(
    shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Return random tensors of these shapes on the generator's device, drawn in fp32."""
    return {
        name: torch.randn(tuple(shape), generator=generator, device=generator.device, dtype=torch.float32).to(dtype)
        for name, shape in shapes.items()
    }


class KernelOperator:
    """What our operators share. It fits ``proof.operator.OurOperator``.

    To be written: ``make_problem``, ``work``, ``make_inputs``, ``arguments``, ``exact`` and ``low_precision``. The
    harness hands problems on; ``sizes`` returns the part with the sizes and the dtype.
    """

    name: str  # in suites and records
    keys: ClassVar[Mapping[str, type]]  # of a case
    required: ClassVar[Sequence[str]]
    same_as: ClassVar[Mapping[str, str]] = {}  # a key that is left out: the key whose value it takes
    omitted: ClassVar[Mapping[str, Any]] = {"softmax_scale": None}  # values that a table leaves out
    kernels: ClassVar[Mapping[str, str]]  # our implementations by name: the kernel that each asks for
    public_module: ClassVar[str] = ""  # of the one that asks for "auto"; empty: the operator's own module
    rooms: ClassVar[Sequence[str]]  # folders with the code of a call
    planner: ClassVar[Callable[..., Any]]  # of a problem, a GPU and the kernel asked for; raises UnsupportedError
    # module:function from this folder, which returns the kernels of a plan; it imports Triton. Relative, because
    # `flashmoe compare` imports a revision of this package under another name.
    preparer: ClassVar[str]
    spill_bytes: ClassVar[Mapping[str, int]] = {}  # local memory a thread that a kernel may use
    framework: ClassVar[Sequence[str]]  # patterns of PyTorch's own kernels
    known_baselines: ClassVar[Mapping[str, Baseline]]
    instead: ClassVar[str | None] = ""  # asked for on a CPU where "auto" runs the reference; None: it does not
    cpu_hint: ClassVar[str] = ""  # after the reason why bf16 is not interpreted
    stress_draws: ClassVar[Sequence[str]] = (*OF_VALUES, *OF_LAYOUT)
    laid_out: ClassVar[Sequence[str]] = ("q", "k", "v", "do")  # inputs that stress draws lay out anew
    expanded: ClassVar[Sequence[str]] = ("k", "v")  # of which sequences or heads may be one
    max_interpreter_steps: ClassVar[int] = 1024  # about a minute in Triton's interpreter
    fresh: ClassVar[tuple[str, ...]] = ()  # inputs that are normal, and of which no other input was worked out

    heads_along: ClassVar[Mapping[str, int]] = {}  # the axis of heads, of q or of K/V, of the inputs that have one

    # Cases

    def parse_case(self, table: Mapping[str, Any]) -> Any:
        """Turn one case of a suite file into a problem.

        Raises:
            InputError: a key is unknown, missing or of the wrong type.
        """
        for key, value in table.items():
            if key not in self.keys:
                raise InputError(f"{key} is not a key of a case of {self.name}; keys: {', '.join(self.keys)}")
            kind = self.keys[key]
            if type(value) not in ((int, float) if kind is float else (kind,)):
                raise InputError(f"{key}: expected {_KINDS[kind]}, got {value!r}")
        missing = [key for key in self.required if key not in table]
        if missing:
            raise InputError(f"a case of {self.name} needs {', '.join(missing)}")
        return self.make_problem({**{key: table[other] for key, other in self.same_as.items()}, **table})

    def make_problem(self, table: dict[str, Any]) -> Hashable:
        """Return the problem of a case whose keys and types are right. Raises ``InputError``."""
        raise NotImplementedError

    def sizes(self, problem: Any) -> Any:
        """Return the part of a problem that has its sizes and dtype."""
        return problem

    def values(self, problem: Any) -> dict[str, Any]:
        """Return the value of each key."""
        return {key: getattr(self.sizes(problem), key) for key in self.keys}

    def as_table(self, problem: Any) -> dict[str, Any]:
        """Return the inverse of ``parse_case``: plain JSON values."""
        return {
            key: [*value] if isinstance(value, tuple) else value
            for key, value in self.values(problem).items()
            if key in self.required or key not in self.omitted or value != self.omitted[key]
        }

    def changed(self, problem: Any, **values: Any) -> Any:
        """Return a problem with other values of some keys."""
        return self.parse_case({**self.as_table(problem), **values})

    def describe(self, problem: Any) -> str:
        """Return a short name of a problem."""
        return str(problem.describe())

    # Calls

    def make_inputs(self, problem: Any, *, seed: int, device: str) -> dict[str, torch.Tensor]:
        """Return fresh random inputs."""
        raise NotImplementedError

    def arguments(self, problem: Any, inputs: Inputs) -> tuple[Sequence[torch.Tensor | int], dict[str, Any]]:
        """Return the arguments of a call of ours, by position and by name."""
        raise NotImplementedError

    def refresh(self, problem: Any, inputs: Inputs, *, seed: int) -> None:
        """Write new values into the inputs of ``fresh``, of the distribution that ``make_inputs`` draws them from.

        They decide every element of the answer. What lies where, e.g. a routing, stays as it is.
        """
        generator = torch.Generator(next(iter(inputs.values())).device).manual_seed(seed)
        for name in self.fresh:
            if name in inputs:
                inputs[name].normal_(0.0, self.deviation(problem, name), generator=generator)

    def deviation(self, problem: Any, name: str) -> float:  # noqa: ARG002 - for operators with weights
        """Return the standard deviation of one of the inputs of ``fresh``."""
        return 1.0

    def bind(self, entry: Callable[..., Any], problem: Any, inputs: Inputs) -> Callable[[], Any]:
        """Return a call without arguments.

        A baseline with a memory layout of its own offers ``bind_inputs``, and lays its inputs out there, outside any
        timing.
        """
        if hasattr(entry, "bind_inputs"):
            bound: Callable[[], Any] = entry.bind_inputs(problem, inputs)
            return bound
        positional, options = self.arguments(problem, inputs)
        return functools.partial(entry, *positional, **options)

    def error_budget(self, exact: torch.Tensor, low_precision: torch.Tensor) -> float:
        """Return twice the eager low-precision error, and twice what adding and taking 0.3 costs in fp32.

        Source: the rule of FlashAttention's own tests.
        """
        if exact.numel() == 0:
            return 0.0
        noise, errors = [], []
        # In parts: in fp64 a few tensors of the size of all gradients may not fit.
        for right, low in zip(
            *(torch.split(x.flatten(), _ELEMENTS_AT_ONCE) for x in (exact, low_precision)), strict=True
        ):
            right32 = right.float()
            noise.append(((right32 + 0.3 - 0.3) - right32).abs().max())
            errors.append((low.double() - right).abs().max())
        return 2 * torch.stack(errors).max().item() + 2 * torch.stack(noise).max().item()

    def peak_tflops_key(self, problem: Any) -> str:
        """Return the rate that bounds a problem; fp32 may run on the tf32 units."""
        dtype: str = self.sizes(problem).dtype
        return "tf32" if dtype == "fp32" else dtype

    def sample(
        self, problem: Any, inputs: Inputs, *, seed: int
    ) -> tuple[Any, Inputs, Callable[[torch.Tensor], torch.Tensor], int] | None:
        """Return one head of K and V, drawn by ``seed``, with the heads of q that share it.

        Returns:
            Its problem, views of its inputs, what picks its part of an output, and the number of such parts. None: the
            operator has no heads, or there is one.
        """
        table = self.as_table(problem)
        heads_kv = table.get("heads_kv", table.get("heads", 1))
        if not self.heads_along or heads_kv < 2:
            return None
        heads, chosen = table["heads"], random.Random(seed).randrange(heads_kv)

        def pick(tensor: torch.Tensor, axis: int = 1) -> torch.Tensor:
            size = tensor.shape[axis]
            step = size // heads_kv
            return tensor.narrow(axis, chosen * step, step) if size in (heads, heads_kv) else tensor

        axes = self.heads_along
        its = {name: pick(tensor, axes[name]) if name in axes else tensor for name, tensor in inputs.items()}
        one = self.parse_case({**table, "heads": heads // heads_kv, "heads_kv": 1})
        return one, its, pick, heads_kv

    # Stress draws

    def smaller(self, problem: Any, device: str) -> Any:
        """Return a problem of the same kind that is small enough to be checked once more for each stress draw."""
        raise NotImplementedError

    def change_values(self, draw: str, problem: Any, inputs: Inputs) -> bool:
        """Change inputs in place as one of ``stress.OF_VALUES`` says; return whether there is what it changes."""
        raise NotImplementedError

    def completed(self, problem: Any, drawn: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # noqa: ARG002 - for those that override it
        """Return what is drawn, with the inputs that follow from it."""
        return drawn

    def stressed(
        self, problem: Any, draw: str, *, seed: int, device: str
    ) -> tuple[Any, dict[str, torch.Tensor]] | None:
        """Return a problem like ``problem`` and its inputs in a stress draw; None where the draw does not apply."""
        small = self.smaller(problem, device)
        inputs = self.make_inputs(small, seed=seed, device=device)
        if draw in OF_LAYOUT:
            found = laid_out(draw, inputs, self.laid_out, self.expanded)
        else:
            found = inputs if self.change_values(draw, small, inputs) else None
        return None if found is None else (small, self.completed(small, found))

    # Kernels

    def plan(self, subject: str, problem: Any, gpu: GpuSpec) -> Any:
        """Return the plan of a call on ``gpu``, which has ``launches``. Raises ``UnsupportedError``."""
        return type(self).planner(problem, gpu, self.kernels[subject])

    def prepare(self, plan: Any) -> Sequence[PlannedSource]:
        """Return the kernels of a plan, in the order of its launches."""
        module, _, function = self.preparer.partition(":")
        kernels: Sequence[PlannedSource] = getattr(importlib.import_module(module, __package__), function)(plan)
        return kernels

    def instruction(self, plan: Any, kernel: str) -> str:  # noqa: ARG002 - for those that override it
        """Return the matrix instruction that a kernel promises, as a pattern, or an empty text."""
        return ""

    def launches(self, subject: str, problem: Any, gpu: GpuSpec) -> Sequence[PlannedSource]:
        """Return the launches of one call on ``gpu``, in order. Raises ``UnsupportedError``."""
        return self.prepare(self.plan(subject, problem, gpu))

    def promised_launches(self, subject: str, problem: Any) -> Sequence[PlannedLaunch]:
        """Return the launches of the plan for the current GPU, with the shared memory that compiling showed."""
        gpu = current_gpu()
        if gpu is None:
            raise CompileError("launches are promised for a GPU, and there is none")
        return [
            dataclasses.replace(launch, shared_memory_bytes=compiled.metadata.shared)
            for launch, _, compiled in self._compiled(subject, problem, gpu)
        ]

    def planned_kernels(self, subject: str, problem: Any, gpu: str) -> Sequence[PlannedKernel]:
        """Return the kernels that ``subject`` would launch on ``gpu``, compiled for it.

        Raises:
            CompileError: a kernel does not compile.
        """
        from ..gpu.compile import read_code

        spec = find_gpu(gpu)
        return [
            PlannedKernel(
                launch.pattern, launch.grid, launch.block, compiled.metadata.shared,
                read_code(compiled, kernel, spec.arch),
            )
            for launch, kernel, compiled in self._compiled(subject, problem, spec)
        ]  # fmt: skip

    def _compiled(self, subject: str, problem: Any, gpu: GpuSpec) -> Iterator[tuple[PlannedLaunch, str, Any]]:
        """Yield each launch of the plan, its kernel's name, and the kernel as Triton compiled it."""
        from ..gpu.compile import compile_kernel

        plan = self.plan(subject, problem, gpu)
        for launch, kernel in zip(plan.launches, self.prepare(plan), strict=True):
            yield launch, kernel.source.name, compile_kernel(kernel.source, gpu.arch)

    def refusal(self, subject: str, problem: Any, gpu: str) -> str | None:
        """Return why ``subject`` does not serve ``problem`` on ``gpu``, or None; also for a GPU that is not known."""
        try:
            spec = find_gpu(gpu)
        except InputError:
            return None
        try:
            self.plan(subject, problem, spec)
        except UnsupportedError as error:
            reason = error.message
            opening = f"{self.kernels[subject]} does not serve "  # the problem follows, which the harness names too
            return reason.partition(": ")[2] if reason.startswith(opening) else reason
        return None

    def compile_jobs(self, subject: str, problems: Sequence[Any], gpus: Sequence[str]) -> Sequence[KernelJob]:
        """Return every distinct kernel that ``problems`` need on ``gpus``, as far as ``subject`` serves them there."""
        from ..gpu.compile import KernelJob

        jobs: dict[Any, KernelJob] = {}
        for gpu in map(find_gpu, gpus):
            for problem in problems:
                try:
                    plan = self.plan(subject, problem, gpu)
                except UnsupportedError:  # refusal says why
                    continue
                for source in (kernel.source for kernel in self.prepare(plan)):
                    job = KernelJob(
                        f"{source.name} {self.describe(problem)}", gpu.name, source,
                        self.spill_bytes.get(source.name, 0), self.instruction(plan, source.name),
                    )  # fmt: skip
                    jobs.setdefault((source, gpu.arch), job)
        return list(jobs.values())

    # On a CPU

    def interpreter_steps(self, problem: Any) -> int:
        """Return how many steps Triton's interpreter takes. Raises ``UnsupportedError``."""
        raise NotImplementedError

    def cpu_refusal(self, subject: str, problem: Any) -> str | None:
        """Return why Triton's interpreter cannot check ``problem``, or None.

        An empty ``subject`` is a kernel that is not ours.
        """
        kernel = self.kernels.get(subject, "")
        if kernel == "auto" and self.instead is not None:
            asked = f": ask for {self.instead}" if self.instead else ""
            return f"on CPU tensors it runs the reference, which would prove nothing{asked}"
        if "gluon" in kernel:
            return f"{subject} is written in Gluon, which cannot be interpreted: only a GPU can check it"
        # A kernel of someone else's who has not imported Triton is no kernel that Triton interprets.
        if self.sizes(problem).dtype == "bf16" and (kernel or "triton" in sys.modules):
            return f"Triton's interpreter multiplies bf16 wrongly{self.cpu_hint}"
        try:
            steps = self.interpreter_steps(problem)
        except UnsupportedError as error:
            return error.message
        most = self.max_interpreter_steps
        return f"{steps} steps in Triton's interpreter are too many (at most {most})" if steps > most else None

    def cpu_stand_in(self, subject: str, problem: Any) -> str:  # noqa: ARG002 - the protocol's signature
        """Return what the interpreter runs in place of ``subject``: nothing else."""
        return ""

    # Names

    def entry_points(self) -> Mapping[str, str]:
        """Return our own implementations by name."""
        here = type(self).__module__
        public = self.public_module or here
        return {name: f"{public if kernel == 'auto' else here}:{name}" for name, kernel in self.kernels.items()}

    def sources(self, subject: str) -> Sequence[str]:  # noqa: ARG002 - the protocol's signature
        """Return the files that decide plan, result and verdict: folders whole, so that nothing is forgotten."""
        folders = ("gpu", "operators", *self.rooms)
        return sorted(
            path.relative_to(_PACKAGE).as_posix() for room in folders for path in (_PACKAGE / room).rglob("*.py")
        )

    def framework_kernels(self) -> Sequence[str]:
        """Return the patterns of PyTorch's own kernels for this work."""
        return self.framework

    def baselines(self) -> Mapping[str, Baseline]:
        """Return all baselines by name; the first is the default."""
        return self.known_baselines
