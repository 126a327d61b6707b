"""The answer of a call: one tensor, or several that the operator names, each judged by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ...errors import ProofError

if TYPE_CHECKING:  # the command line reads this without waiting for torch
    import torch

Answer: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"
Call: TypeAlias = "Callable[[], Answer]"


def names_of(operator: Any, problem: Any) -> tuple[str, ...]:
    """Return the names of what a call gives; one that is empty where the operator names none.

    Raises:
        ProofError: the operator names no output, or two alike, of which one would hide the other.
    """
    # Not by isinstance: the operator of a revision hands such questions on.
    outputs = getattr(operator, "outputs", None)
    if outputs is None:
        return ("",)
    names = outputs(problem)
    right = isinstance(names, Sequence) and not isinstance(names, str) and len(names) > 0
    if not right or not all(isinstance(name, str) and name.strip() for name in names) or len({*names}) < len(names):
        expected = "a tuple of names, at least one, none blank and no two alike"
        raise ProofError(f"outputs of {operator.name} must return {expected}, got {names!r}"[:500])
    return tuple(names)


def parts(answer: Answer) -> tuple[torch.Tensor, ...]:
    """Return the tensors of an answer."""
    return answer if isinstance(answer, tuple) else (answer,)


def known_parts(operator: Any, what: str, answer: Answer, names: Sequence[str]) -> tuple[torch.Tensor, ...]:
    """Return the tensors of what the operator itself made. Raises ``ProofError`` unless there is one for each name."""
    found = parts(answer)
    if len(found) != len(names) or not all(_is_tensor(part) for part in found):
        expected = f"tensors for {', '.join(names)}" if names != ("",) else "one tensor"
        raise ProofError(f"{what} of {operator.name} must return {expected}, got {_in_words(answer)}")
    return found


def not_formed(answer: Any, names: Sequence[str]) -> str:
    """Return why ``answer`` is not what a call has to give, or an empty text."""
    if tuple(names) == ("",):
        return "" if _is_tensor(answer) else f"returned {type(answer).__name__}, expected a tensor"
    expected = f"a tuple of {len(names)} tensors, {', '.join(names)}"
    right = isinstance(answer, tuple) and len(answer) == len(names)
    right = right and all(_is_tensor(part) for part in answer)
    return "" if right else f"returned {_in_words(answer)}, expected {expected}"


def _is_tensor(thing: object) -> bool:
    import torch

    return isinstance(thing, torch.Tensor)


def _in_words(answer: Any) -> str:
    if isinstance(answer, (tuple, list)) and answer:
        return f"{type(answer).__name__} of {', '.join(type(part).__name__ for part in answer)}"
    return type(answer).__name__


def copied(answer: Answer) -> Answer:
    """Return a copy of every tensor."""
    return tuple(part.clone() for part in answer) if isinstance(answer, tuple) else answer.clone()


def sizes_of(answer: Answer) -> list[int]:
    """Return the bytes of every tensor."""
    return [part.numel() * part.element_size() for part in parts(answer)]


def poison(answer: Answer) -> None:
    """Fill every tensor with NaN."""
    for part in parts(answer):
        part.fill_(float("nan"))
