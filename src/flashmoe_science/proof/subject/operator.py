"""What the harness needs to know of an operator: protocols only. No operator is named here, and none imports this.

One of ours is a module of ``operators/`` that offers an object ``OPERATOR``; ``operators.MODULES`` has its name. A
user's own is named ``module:OBJECT``, or by a path with dots of a module that offers ``OPERATOR``;
``custom_operator.py`` has a base for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

from ...gpu.planning import Axis, PlannedKernel, Work
from ...gpu.specs import GpuSpec
from .outputs import Answer, Call

if TYPE_CHECKING:  # the command line reads protocols without waiting for torch
    import torch

    from ...gpu.identity import PlannedSource

Inputs: TypeAlias = "Mapping[str, torch.Tensor]"


class LaunchPromise(Protocol):
    """One kernel that a plan promises. ``None``: nothing is promised about this."""

    pattern: str  # fnmatch pattern on the kernel's name
    grid: tuple[int, int, int] | None
    block: tuple[int, int, int] | None
    shared_memory_bytes: int | None


class CompileJob(Protocol):
    """One kernel to compile for one architecture with no GPU present."""

    label: str  # e.g. "forward_triton D=64 fp16 64x64"
    gpu: str  # e.g. "L4"

    def run(self) -> CompileOutcome:
        """Compile, and compare with the limits. Raises ``CompileError`` when it does not compile at all."""


class CompileOutcome(Protocol):
    """What compiling showed."""

    registers: int
    spill_bytes: int
    shared_memory_bytes: int
    seconds: float
    problems: Sequence[str]  # broken promises: spills, too much shared memory, instructions missing; empty is good


class Baseline(Protocol):
    """How one baseline is called.

    One with ``speed_of_light = True`` does other work of the same size, e.g. a matrix product: its answer is not
    checked.
    """

    name: str
    kernels: Sequence[str]  # fnmatch patterns; every call must launch at least one match. Empty: nothing is pinned

    def load(self) -> Callable[..., Any]:
        """Return its entry point, called as the operator calls. Raises ``ImportError`` with the reason."""

    def version(self) -> str:
        """Return its version as text."""

    def refusal(self, problem: Any) -> str | None:
        """Return why it cannot serve ``problem``, or None."""

    def context(self) -> AbstractContextManager[object]:
        """Return the context in which all its calls are made, e.g. a pinned backend; entered outside the timing."""


@runtime_checkable
class Operator(Protocol):
    """One operator, for the harness."""

    name: str

    def parse_case(self, table: Mapping[str, Any]) -> Hashable:
        """Turn one case of a suite file (without name and origin) into a problem. Raises ``InputError``."""

    def as_table(self, problem: Any) -> dict[str, Any]:
        """Return the inverse of ``parse_case``: plain JSON values."""

    def describe(self, problem: Any) -> str:
        """Return a short name, e.g. ``b1_h16_s512_d64_fp16``."""

    def work(self, problem: Any) -> Work:
        """Return the operations, bytes and tokens of one call."""

    def make_inputs(self, problem: Any, *, seed: int, device: str) -> dict[str, torch.Tensor]:
        """Return fresh random inputs."""

    # An answer is one tensor, or, where a method ``outputs(problem)`` returns several names, a tuple of as many.

    def bind(self, entry: Callable[..., Any], problem: Any, inputs: Inputs) -> Call:
        """Return a call with no arguments and as little overhead as Python allows."""

    def exact(self, problem: Any, inputs: Inputs) -> Answer:
        """Return the answer in fp64."""

    def low_precision(self, problem: Any, inputs: Inputs) -> Answer:
        """Return the framework's own answer in the problem's dtype."""

    def error_budget(self, exact: torch.Tensor, low_precision: torch.Tensor) -> float:
        """Return the largest absolute error allowed, of one tensor of the answer."""

    def peak_tflops_key(self, problem: Any) -> str:
        """Return which of a GPU's peak rates bounds this problem, e.g. ``fp16``."""

    def cpu_refusal(self, subject: str, problem: Any) -> str | None:
        """Return why correctness of ``problem`` cannot be shown on a CPU in reasonable time, or None."""

    def baselines(self) -> Mapping[str, Baseline]:
        """Return all known baselines by name; the first is the default."""


class OurOperator(Operator, Protocol):
    """What is asked of operators of ours besides: about the implementations that come with them."""

    def entry_points(self) -> Mapping[str, str]:
        """Return our own implementations: subject name -> ``module:attribute``."""

    def sources(self, subject: str) -> Sequence[str]:
        """Return the files that decide the result of one of our subjects, relative to the package folder."""

    def promised_launches(self, subject: str, problem: Any) -> Sequence[LaunchPromise]:
        """Return the launches that one of our subjects promises on the current GPU, in order."""

    def refusal(self, subject: str, problem: Any, gpu: str) -> str | None:
        """Return why one of our subjects does not serve ``problem`` on ``gpu``, or None; also for a GPU not known."""

    def compile_jobs(self, subject: str, problems: Sequence[Any], gpus: Sequence[str]) -> Sequence[CompileJob]:
        """Return what has to compile for one of our subjects to serve ``problems`` on ``gpus``, without duplicates.

        What it does not serve is left out: ``refusal`` says why.
        """

    def cpu_stand_in(self, subject: str, problem: Any) -> str:
        """Return what a CPU runs in place of one of our subjects and why, or an empty text where it runs the subject.

        It reads on after "by", e.g. "forward_triton in Triton's interpreter (a GPU runs another kernel)".
        """


def ours(operator: Operator) -> OurOperator:
    """Return an operator that is one of ours as such."""
    return cast("OurOperator", operator)


@runtime_checkable
class ErrorScaling(Protocol):
    """What an operator may offer besides: how large an error the roundings of a right kernel make, by elements.

    Without it what is allowed follows from the framework's own error, row by row where rows are long.
    """

    def error_scale(self, problem: Any, inputs: Inputs) -> Sequence[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return, for each output, the absolute error allowed of each element, and the mean square of each row.

        The first has the output's shape; the second is the root of the mean square, ``[..., 1]``, or None.
        """


@runtime_checkable
class Refreshing(Protocol):
    """What an operator may offer besides: new values at less cost than new inputs have.

    Each call that is timed gets new values. Without this they come from ``make_inputs``, and all of them are copied.
    """

    def refresh(self, problem: Any, inputs: Inputs, *, seed: int) -> None:
        """Write new values into ``inputs``, in place and on their device.

        They decide every element of the answer, and each may stay as it was where others are new: none is worked out
        of another. Those that are copies of others are written by ``update_copies(problem, inputs)``, where there is
        such a method.
        """


@runtime_checkable
class Ranked(Protocol):
    """What an operator offers whose calls are made by several ranks together, each on a part of one problem.

    All ranks make the inputs of the whole problem, of one seed. ``bind`` takes the part of this rank: the rank is that
    of the process group of torch. ``exact`` and ``low_precision`` are of the whole problem, and ``work`` of one rank.
    """

    def ranks(self, problem: Any) -> int:
        """Return how many ranks make a call."""

    def layout(self, entry: Callable[..., Any]) -> str:
        """Return by which of the operator's layouts an entry point splits answers over ranks."""

    def shard(self, problem: Any, layout: str, rank: int, output: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a rank of a whole output, or of what is allowed in its elements or rows."""


def ranks_of(operator: Operator, problem: Any) -> int:
    """Return how many ranks make a call."""
    return operator.ranks(problem) if isinstance(operator, Ranked) else 1


@dataclass(frozen=True)
class Part:
    """The part of a whole answer that one rank gives."""

    operator: Ranked = field(compare=False)
    problem: Any
    layout: str
    rank: int

    def of(self, output: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return that part of an output."""
        return self.operator.shard(self.problem, self.layout, self.rank, output, tensor)


def part_of(operator: Operator, problem: Any, entry: Callable[..., Any] | None, rank: int) -> Part | None:
    """Return the part of a rank; None: a call gives the whole answer."""
    if entry is None or not isinstance(operator, Ranked) or operator.ranks(problem) == 1:
        return None
    return Part(operator, problem, operator.layout(entry), rank)


class Sample(NamedTuple):
    """Part of a call, whose answer is that part of the whole answer: what an operator's ``sample`` may return."""

    problem: Any
    inputs: Inputs
    pick: Callable[[torch.Tensor], torch.Tensor]  # of a whole output, the part
    parts: int  # of the whole, all alike


def sample_of(operator: Operator, problem: Any, inputs: Inputs, *, seed: int) -> Sample | None:
    """Return a part of a call, or None where the operator knows none."""
    draw = getattr(operator, "sample", None)  # not by isinstance: a revision's operator hands it on
    found = None if draw is None else draw(problem, inputs, seed=seed)
    return None if found is None else Sample(*found)


@runtime_checkable
class Stressing(Protocol):
    """What an operator may offer besides: inputs and layouts that models have and its random inputs have not."""

    stress_draws: Sequence[str]  # their names, in the order in which they are tried

    def stressed(
        self, problem: Any, draw: str, *, seed: int, device: str
    ) -> tuple[Hashable, Mapping[str, torch.Tensor]] | None:
        """Return a problem like ``problem``, mostly smaller, and its inputs; None where the draw does not apply."""


def stress_draws_of(operator: Operator) -> tuple[str, ...]:
    """Return the names of an operator's stress draws."""
    return tuple(getattr(operator, "stress_draws", ()))  # not by isinstance: a revision's operator hands it on


@runtime_checkable
class Recognising(Protocol):
    """What an operator may offer besides: how to tell that the framework did the work of a subject."""

    def framework_kernels(self) -> Sequence[str]:
        """Return patterns of the framework's own kernels: where one runs unpromised, a call fell through to it."""


def framework_kernels(operator: Operator) -> Sequence[str]:
    """Return the patterns of the framework's own kernels, as far as the operator knows them."""
    return operator.framework_kernels() if isinstance(operator, Recognising) else ()


@runtime_checkable
class Scalable(Protocol):
    """What an operator may offer besides: longer problems, by which a diagnosis tells waiting from work."""

    def axes(self) -> Sequence[Axis]:
        """Return the axes, those first that leave a kernel's grid as it is.

        Each has ``name``, ``meaning`` (e.g. ``the batch``) and ``kind``: ``parallel``, independent copies of the work,
        or ``sequential``, more work for one result.
        """

    def scaled(self, problem: Any, axis: str, factor: int) -> Any | None:
        """Return ``problem`` with ``axis`` that many times as long, or None where that is not the same kind of work.

        The work for one result grows in proportion to a sequential axis, the number of results to a parallel one.
        """


@runtime_checkable
class Planning(Protocol):
    """What an operator may offer besides: what its own subjects would launch, compiled with no GPU."""

    def planned_kernels(self, subject: str, problem: Any, gpu: str) -> Sequence[PlannedKernel]:
        """Return the kernels of one call, in order. Raises ``CompileError``; ``refusal`` is asked before."""


@runtime_checkable
class Launching(Protocol):
    """What an operator may offer besides: what a call of its own subjects launches. By this records go stale."""

    def launches(self, subject: str, problem: Any, gpu: GpuSpec) -> Sequence[PlannedSource]:
        """Return the launches of one call on ``gpu``, in order. It needs no GPU. Raises ``UnsupportedError``."""


def identities_of(operator: Operator, subject: str, problem: Any, gpu: GpuSpec) -> list[str]:
    """Return the identity of each launch of a call, in order; nothing where the operator cannot tell.

    Raises:
        UnsupportedError: the subject does not serve the problem on this GPU.
        UnreadableError: a kernel reaches something that cannot be read.
    """
    if not isinstance(operator, Launching):
        return []
    from ...gpu.identity import launch_identity

    return [launch_identity(launch, gpu.arch) for launch in operator.launches(subject, problem, gpu)]
