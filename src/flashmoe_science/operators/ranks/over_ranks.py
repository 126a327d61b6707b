"""What our operators over several ranks share: a problem of theirs, the rank of this process, and its kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...errors import InputError
from ...gpu.planning import PlannedLaunch, Work
from ...gpu.specs import GpuSpec
from ..base import KernelOperator
from ..baselines.base import Inputs

if TYPE_CHECKING:
    from ...gpu.compile import KernelJob
    from ...gpu.identity import PlannedSource

Pass = tuple[KernelOperator, str, Any]  # an operator of one rank, its subject, and the problem of each rank


@dataclass(frozen=True)
class RankedProblem:
    """One problem that ranks share."""

    whole: Any
    ranks: int
    gradients: bool


def rank_here() -> int:
    """Return the rank of this process; 0 where there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


@functools.lru_cache(maxsize=4)
def mesh_of(ranks: int, device: str) -> DeviceMesh | None:
    """Return the mesh of all ranks; None where there is no process group, as where signatures are compared.

    Raises ``InputError`` where the process group has another number of ranks.
    """
    if not dist.is_initialized():
        return None
    if dist.get_world_size() != ranks:
        raise InputError(f"the problem is of {ranks} ranks, and {dist.get_world_size()} are here")
    return init_device_mesh(device, (ranks,), mesh_dim_names=("ranks",))


def with_gradients(
    forward: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor], gradient: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Return what ``forward`` makes of the leaves, and their gradients, where that of its result is given."""
    if gradient is None:
        return (forward(*leaves),)
    with torch.enable_grad():
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        out = forward(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, gradient)


class OperatorOverRanks(KernelOperator):
    """An operator whose calls are made by ranks, each of which runs kernels that operators of one rank know.

    To be written besides: ``passes``, ``layouts`` and ``shard``.
    """

    stress_draws = ()
    instead = None

    def passes(self, subject: str, problem: RankedProblem) -> Sequence[Pass]:
        """Return what each rank runs, in order; nothing where that is not known."""
        raise NotImplementedError

    def sizes(self, problem: RankedProblem) -> Any:
        """Return the whole problem."""
        return problem.whole

    def ranks(self, problem: RankedProblem) -> int:
        """Return how many ranks make a call."""
        return problem.ranks

    def layout(self, entry: Callable[..., Any]) -> str:
        """Return how an entry point splits answers over ranks: as it says itself, or one span after another."""
        return str(getattr(entry, "layout", "straight"))

    def part_of(self, base: Any, problem: RankedProblem) -> Work:
        """Return the work of one rank: its part of the whole, which an operator of one rank counts."""
        whole = base.work(problem.whole)
        return Work(whole.flops / problem.ranks, whole.bytes / problem.ranks, whole.tokens // problem.ranks)

    def launches(self, subject: str, problem: RankedProblem, gpu: GpuSpec) -> Sequence[PlannedSource]:
        """Return the launches of our kernels in a call of one rank. Raises ``UnsupportedError``."""
        return [
            kernel for base, name, part in self.passes(subject, problem) for kernel in base.launches(name, part, gpu)
        ]

    def promised_launches(self, subject: str, problem: RankedProblem) -> Sequence[PlannedLaunch]:  # noqa: ARG002 - the protocol's signature
        """Promise nothing: a call launches kernels of NCCL's and copies of torch's too, which differ by version."""
        return ()

    def compile_jobs(self, subject: str, problems: Sequence[Any], gpus: Sequence[str]) -> Sequence[KernelJob]:
        """Return every distinct kernel that a rank needs."""
        jobs: dict[Any, KernelJob] = {}
        for base, name, part in (each for problem in problems for each in self.passes(subject, problem)):
            jobs |= {(job.gpu, job.source): job for job in base.compile_jobs(name, [part], gpus)}
        return list(jobs.values())

    def refusal(self, subject: str, problem: RankedProblem, gpu: str) -> str | None:
        """Return why a rank cannot run its part on ``gpu``, or None."""
        refusals = (base.refusal(name, part, gpu) for base, name, part in self.passes(subject, problem))
        return next(filter(None, refusals), None)

    def cpu_refusal(self, subject: str, problem: RankedProblem) -> str | None:
        """Return why a CPU cannot check a problem, or None: only tiny ones, which ranks exchange over gloo."""
        if not subject or not (passes := self.passes(subject, problem)):
            return None
        if self.sizes(problem).dtype == "bf16":
            return "Triton's interpreter multiplies bf16 wrongly"
        steps = sum(base.interpreter_steps(part) for base, _, part in passes)
        most = self.max_interpreter_steps
        return f"{steps} steps in Triton's interpreter are too many (at most {most})" if steps > most else None

    def entry_points(self) -> Mapping[str, str]:
        """Return our own implementations by name: all are functions of the operator's module."""
        return {name: f"{type(self).__module__}:{name}" for name in self.kernels}

    def check_ranks(self, table: dict[str, Any], divided: Mapping[str, int]) -> tuple[int, bool]:
        """Take ranks and gradients out of a case. Raises ``InputError`` where ranks do not divide what they share."""
        ranks, gradients = table.pop("ranks"), table.pop("gradients", True)
        if ranks < 2:
            raise InputError(f"ranks must be at least 2, got {ranks}")
        for name, count in divided.items():
            if count % ranks:
                raise InputError(f"{name} must be a multiple of the {ranks} ranks, got {count}")
        return ranks, gradients


def narrowed(inputs: Inputs, names: Sequence[str], ranks: int) -> list[torch.Tensor]:
    """Return this rank's span of the first dimension of some inputs, as views: new values reach them."""
    spans = ((inputs[name], inputs[name].shape[0] // ranks) for name in names)
    return [tensor.narrow(0, rank_here() * length, length) for tensor, length in spans]
