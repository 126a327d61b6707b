"""The baselines of attention over ranks: PyTorch's own context parallelism, plain Ulysses, and one GPU."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...attention.api import flash_attention
from ...attention.varlen import flash_attention_varlen
from ..ranks.over_ranks import mesh_of, with_gradients
from . import ulysses
from .base import Baseline, Bound, Call, Inputs, by_name

CHUNKS = "_chunks"  # of an input's name: this rank's tokens by layout "chunks"
ONE_GPU = "one-gpu"  # by which a claim says what share of one GPU's rate each has


def _pinned() -> AbstractContextManager[object]:
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if torch.cuda.is_available() else contextlib.nullcontext()


class OverRanks(Baseline):
    """A baseline that attends this rank's tokens, ``[n, heads, D]``."""

    layout = "straight"

    def load(self) -> Callable[..., Any]:
        """Return the entry point, with its layout."""
        entry = Bound(self.bind)
        entry.layout = self.layout
        return entry

    def bind(self, problem: Any, inputs: Inputs) -> Call:
        """Return a call on views of the inputs: new values reach it."""
        names = [f"{name}{CHUNKS if self.layout == 'chunks' else ''}" for name in ("q", "k", "v", "do")]
        tensors = [inputs[name] for name in names]
        if self.layout == "straight":
            length = tensors[0].shape[0] // problem.ranks
            tensors = [x.narrow(0, dist.get_rank() * length, length) for x in tensors]
        attend = functools.partial(self.attend, lengths=problem.whole.lengths, causal=problem.whole.planned.causal)
        return functools.partial(with_gradients, attend, tensors[:3], tensors[3] if problem.gradients else None)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, lengths: tuple[int, ...], causal: bool
    ) -> torch.Tensor:
        """Return o of this rank's tokens."""
        raise NotImplementedError


class Torch(OverRanks):
    """``torch.distributed.tensor.experimental.context_parallel``, with SDPA by cuDNN."""

    name = "torch-context-parallel"
    kernels = ("*cudnn*",)
    layout = "chunks"

    def load(self) -> Callable[..., Any]:
        """See that this version of torch has it."""
        self._enter = importlib.import_module("torch.distributed.tensor.experimental").context_parallel
        return super().load()

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, lengths: tuple[int, ...], causal: bool
    ) -> torch.Tensor:
        """Call SDPA, which the context has replaced."""
        del lengths
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)[0].transpose(0, 1)

    def refusal(self, problem: Any) -> str | None:
        """It serves one sequence, by kernels of a GPU."""
        if len(problem.whole.lengths) > 1:
            return "it has no packed documents"
        return None if torch.cuda.is_available() else "it serves no attention of a CPU's"

    @contextlib.contextmanager
    def context(self) -> Any:
        """Replace SDPA by the one over all ranks."""
        ranks = dist.get_world_size()
        buffer = torch.zeros(2 * ranks, device="cuda")
        with _pinned(), self._enter(mesh_of(ranks, "cuda"), buffers=[buffer], buffer_seq_dims=[0]):
            yield


class Ulysses(OverRanks):
    """Ulysses by plain collectives, with SDPA."""

    name = "ulysses"

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, lengths: tuple[int, ...], causal: bool
    ) -> torch.Tensor:
        """Exchange tokens for heads, attend, and exchange back."""
        return ulysses.attend(q, k, v, lengths=lengths, causal=causal)

    def context(self) -> AbstractContextManager[object]:
        """Pin cuDNN on a GPU."""
        return _pinned()


class OneGpu(Baseline):
    """Our attention of the whole problem on each rank's card, of whose answer a rank's part is kept."""

    name = ONE_GPU
    distribution = None

    def bind(self, problem: Any, inputs: Inputs) -> Call:
        """Return a call on the whole inputs."""
        lengths, causal = problem.whole.lengths, problem.whole.planned.causal
        starts, longest = inputs["cu_seqlens_q"], max(lengths)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if len(lengths) > 1:
                return flash_attention_varlen(q, k, v, starts, starts, longest, longest, causal=causal)
            return flash_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), causal=causal)[0].transpose(0, 1)

        whole = [inputs[name] for name in ("q", "k", "v")]
        do = inputs["do"] if problem.gradients else None
        length = whole[0].shape[0] // problem.ranks
        begin = dist.get_rank() * length

        return lambda: tuple(part.narrow(0, begin, length) for part in with_gradients(attend, whole, do))


BASELINES = by_name(Torch(), Ulysses(), OneGpu())
