"""A base for a user's operator: what only our operators need has a default here (docs/reference/operators.md)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import TypeAdapter, ValidationError

from ...errors import InputError
from ...gpu.planning import Work
from ..records.toml_files import OUR_WORDS
from .operator import Baseline as AnyBaseline, Inputs

__all__ = ["DTYPES", "Baseline", "CustomOperator", "Work", "standard_normal"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Baseline:
    """A baseline that is a function."""

    name: str
    function: Callable[..., torch.Tensor]  # called as the operator calls
    kernels: Sequence[str] = ()  # patterns; every call must launch at least one match. Empty: nothing is pinned

    def load(self) -> Callable[..., torch.Tensor]:
        """Return the function."""
        return self.function

    def version(self) -> str:
        """Return name and version of the distribution that the function comes from; empty for a user's own module."""
        top = (getattr(self.function, "__module__", None) or "").partition(".")[0]
        names = importlib.metadata.packages_distributions().get(top, [])
        return f"{names[0]} {importlib.metadata.version(names[0])}" if names else ""

    def refusal(self, problem: Any) -> str | None:  # noqa: ARG002 - the protocol's signature
        """Refuse nothing."""
        return None

    def context(self) -> AbstractContextManager[object]:
        """Return nothing to enter."""
        return contextlib.nullcontext()


def standard_normal(
    shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, *, seed: int, device: str
) -> dict[str, torch.Tensor]:
    """Return fresh random tensors of these shapes."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return {
        name: torch.randn(tuple(shape), generator=generator, device=device, dtype=torch.float32).to(dtype)
        for name, shape in shapes.items()
    }


class CustomOperator:
    """Everything that ``proof.operator.Operator`` asks for, but what one call does and means.

    To be written: ``problem``, ``work``, ``make_inputs``, ``exact``, ``low_precision``, and mostly ``baselines``. A
    module with an instance called ``OPERATOR`` is named ``module:OPERATOR`` in a kernel.toml and in a suite.
    """

    problem: ClassVar[type]  # a frozen dataclass: its fields are the keys of a case in a suite

    @property
    def name(self) -> str:
        """Return by which name it is found."""
        return f"{type(self).__module__}:OPERATOR"

    def parse_case(self, table: Mapping[str, Any]) -> Hashable:
        """Return a problem of the keys of a case. Raises ``InputError``."""
        known = [field.name for field in dataclasses.fields(self.problem)]
        unknown = [key for key in table if key not in known]
        if unknown:
            raise InputError(f"{unknown[0]} is not a key of a case; keys: {', '.join(known)}")
        try:
            problem: Hashable = TypeAdapter(self.problem).validate_json(json.dumps(dict(table)), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "a case"
            if first["type"] == "missing":
                raise InputError(f"{key}: missing") from error
            said = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected", 1)
            said = f"expected {OUR_WORDS[first['type']]}" if first["type"] in OUR_WORDS else said
            raise InputError(f"{key}: {said}, got {first['input']!r}") from error
        return problem

    def as_table(self, problem: Any) -> dict[str, Any]:
        """Return the fields of a problem."""
        return dataclasses.asdict(problem)

    def describe(self, problem: Any) -> str:
        """Return e.g. ``rows4096_columns1024_fp16``: a field's name stands before a number, or for what is true."""
        parts = []
        for name, value in dataclasses.asdict(problem).items():
            if isinstance(value, bool):
                parts += [name] if value else []
            else:
                parts.append(str(value) if isinstance(value, str) else f"{name}{value}")
        return "_".join(parts)

    def bind(
        self,
        entry: Callable[..., torch.Tensor],
        problem: Any,  # noqa: ARG002 - the protocol's signature
        inputs: Inputs,
    ) -> Callable[[], torch.Tensor]:
        """Return a call of the entry point with all inputs, in their order."""
        return functools.partial(entry, *inputs.values())

    def error_budget(self, exact: torch.Tensor, low_precision: torch.Tensor) -> float:
        """Return twice the error of the framework's own run, and twice a rounding of the largest value."""
        if exact.numel() == 0:
            return 0.0
        rounding = torch.finfo(low_precision.dtype).eps * exact.abs().max().item()
        return 2 * (low_precision.double() - exact).abs().max().item() + 2 * rounding

    def peak_tflops_key(self, problem: Any) -> str:
        """Return the problem's dtype."""
        return str(getattr(problem, "dtype", "fp32"))

    def cpu_refusal(self, subject: str, problem: Any) -> str | None:  # noqa: ARG002 - the protocol's signature
        """Check everything on a CPU too. Override it where the interpreter would take too long."""
        return None

    def framework_kernels(self) -> Sequence[str]:
        """Return none. Override it with patterns of the framework's own kernels, where their names tell them."""
        return ()

    def baselines(self) -> Mapping[str, AnyBaseline]:
        """Return no baseline; with none, nothing is compared."""
        return {}
