"""The values of the inputs while arms are timed: new ones for each call, and what is right for them.

A kernel that keeps results, keyed by what it read, is fast on values that it has seen. So a timed call reads values
that no call before it has read. They are made on the device, outside of what is timed, from a seed that this process
does not have before the round begins. They are written to the same addresses, so that a captured graph reads them too.
All arms of a round get the same ones: what a call costs may depend on them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..subject.operator import Inputs, Operator, Part, sample_of
from . import schedule
from .allowed_error import ExpectedOutputs, Whole, truth_of_part

_STRIDE = 7919  # between the seeds of two sets: an operator may use the next few numbers too
_PART = 64  # of a tensor, one in so many elements is new where the others stay


@dataclass(frozen=True)
class Made:
    """How the values of a set of inputs came about: enough to make them again in another process."""

    seed: int  # of ``make_inputs``
    refreshed: int | None = None  # the seed of what was written over them; None: nothing was

    def inputs(self, operator: Operator, problem: Any, device: str) -> Inputs:
        """Make them again."""
        inputs = operator.make_inputs(problem, seed=self.seed, device=device)
        if self.refreshed is not None:
            FreshValues(operator, problem, [inputs], device).write_seed(0, self.refreshed)
        return inputs


class FreshValues:
    """Writes values into the sets of inputs of one case."""

    def __init__(
        self, operator: Operator, problem: Any, input_sets: Sequence[Inputs], device: str, *, sampled: bool = False
    ) -> None:
        """``sampled``: compare with what is right for a part that is drawn, where the operator knows parts."""
        self._operator = operator
        self._problem = problem
        self._input_sets = input_sets
        self._device = device
        # An operator may write some tensors in place, without drawing again what is costly and tells nothing.
        self._refresh: Callable[..., None] | None = getattr(operator, "refresh", None)
        self._round = self._writes = 0
        self._sample = ""
        self._seeds: dict[int, int] = {}  # place -> of the values that it holds
        self._whole: tuple[tuple[int, int], Whole] | None = None
        self.parts = 1  # of an answer, of which one is compared
        if sampled and (sample := sample_of(operator, problem, input_sets[0], seed=0)):
            self.parts = sample.parts
        self.slow = sampled and self.parts == 1  # what is right takes long, and is worked out as seldom as may be

    def begin_round(self, seed: int) -> None:
        """Take the seed of a round."""
        self._round = seed

    def begin_sample(self, sample: str) -> None:
        """Begin anew with what is drawn for ``sample`` in this round: the next arm gets the same values."""
        self._sample, self._writes = sample, 0

    def write(self, places: Sequence[int]) -> None:
        """Write new values to the sets ``places``, on the current stream."""
        first = schedule.derived_seed(self._round, self._sample, self._writes)
        self._writes += 1
        for place in places:
            self.write_seed(place, (first + _STRIDE * place) % 2**31)

    def write_seed(self, place: int, seed: int) -> None:
        """Write the values of a seed. Through ``.data`` the version counter does not change: no cache is warned."""
        inputs, self._seeds[place] = self._input_sets[place], seed
        if self._refresh is not None:
            self._refresh(self._problem, {name: tensor.data for name, tensor in inputs.items()}, seed=seed)
            return
        made = self._operator.make_inputs(self._problem, seed=seed, device=self._device)
        for name, tensor in inputs.items():
            tensor.data.copy_(made[name])

    def seed_at(self, place: int) -> int:
        """Return the seed of the values at ``place``."""
        return self._seeds[place]

    def draw(self, places: Sequence[int]) -> int:
        """Return one of ``places``, the same for every arm of this sample."""
        return places[random.Random(f"{self._round}/{self._sample}/compared").randrange(len(places))]

    def expected(self, place: int, part: Part | None = None) -> ExpectedOutputs:
        """Return what is right for the values at ``place``, or for a part of them, drawn by their seed.

        The last one is kept: the next arm asks for it too.
        """
        key = place, self._seeds[place]
        if self._whole is None or self._whole[0] != key:
            self._whole = None  # fp64 of two may not fit
            self._whole = key, self._work_out(place)
        return self._whole[1].expected(part)

    def _work_out(self, place: int) -> Whole:
        inputs = self._input_sets[place]
        if self.parts == 1:
            return Whole(self._operator, self._problem, inputs)
        drawn = schedule.derived_seed(self._round, f"{self._sample}/part", place, self._seeds[place])
        return truth_of_part(self._operator, self._problem, inputs, seed=drawn)

    @property
    def writes_parts(self) -> bool:
        """Whether some values may be new where others stay: the operator says which depend on no other."""
        return self._refresh is not None

    def write_part(self, place: int) -> None:
        """Write new values to a 64th of each tensor. A result that was kept by the other elements is wrong then."""
        inputs = self._input_sets[place]
        before = {name: tensor.clone() for name, tensor in inputs.items()}
        self.write([place])
        for name, tensor in inputs.items():
            size = max(1, tensor.numel() // _PART)
            begin = random.Random(f"{self._seeds[place]}/{name}").randrange(max(1, tensor.numel() - size + 1))
            stays = torch.ones(tensor.numel(), dtype=torch.bool, device=tensor.device)
            stays[begin : begin + size] = False
            tensor.data.copy_(torch.where(stays.view(tensor.shape), before[name], tensor))
        if update := getattr(self._operator, "update_copies", None):  # inputs that are copies of parts of others
            update(self._problem, {name: tensor.data for name, tensor in inputs.items()})
