"""Compare answers of a subject once more, in a process in which its code was never imported.

The process that holds the subject writes the bytes of an answer to a file, and nothing else. What they have to be
follows from the seed, the problem and the operator, and is worked out here. So a subject that replaces the functions
that check it gains nothing: these are others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..subject.loading import operator_of
from ..subject.operator import Inputs, Operator, Part, Ranked
from ..subject.outputs import Answer, copied, known_parts, names_of, parts
from ..subject.subject import Subject
from ..worker import Emit
from .allowed_error import ExpectedOutputs, Whole, judge
from .fresh_values import Made

LARGEST_BYTES = 1 << 28  # of an answer that is written: a larger one is left out


class FirstAnswer:
    """An entry point that keeps a copy of the first answer that it gives, as plain tensors."""

    def __init__(self, entry: Callable[..., Any]) -> None:
        self._entry = entry
        self.answer: Answer | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the entry point."""
        answer = self._entry(*args, **kwargs)
        found = parts(answer)
        if self.answer is None and all(type(part) is torch.Tensor for part in found):
            if any(part.is_cuda for part in found):
                torch.cuda.synchronize()
            self.answer = copied(answer)
        return answer

    def __getattr__(self, name: str) -> Any:
        """Return what the entry point says of itself, e.g. its layout."""
        return getattr(self._entry, name)


def write_answer(answer: Answer, path: Path) -> None:
    """Write the bytes of an answer's tensors, one after another. A large answer is left out."""
    found = [part.detach().contiguous() for part in parts(answer)]
    if sum(part.nbytes for part in found) > LARGEST_BYTES:
        path.write_bytes(b"")
        return
    with path.open("wb") as file:
        for part in found:
            file.write(part.cpu().flatten().view(torch.uint8).numpy().tobytes())


@torch.no_grad()
def check_answers(payload: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Compare answers with what is right: the task of a process without the subject.

    Args:
        payload: ``subject``, ``device``, and ``answers``: each with ``name`` and ``problem`` of its case, ``file``,
            ``made``, see ``fresh_values.Made``, and, of several ranks, ``rank`` and ``layout``, see ``operator.Part``.
        emit: gets an event before each answer.

    Returns:
        ``wrong``: a reason for the name of each case with a wrong answer; ``left_out``: the names of those whose answer
        is too large; ``beside``: whether the operator's own module has imported the subject here after all.
    """
    subject = Subject.from_json(payload["subject"])
    operator = operator_of(subject)
    beside = subject.entry_point.partition(":")[0] in sys.modules
    wrong: dict[str, str] = {}
    left_out: list[str] = []
    whole, last = None, ""
    inputs: Inputs = {}
    for table in payload["answers"]:
        emit({"event": "answer", "name": table["name"]})
        problem = operator.parse_case(table["problem"])
        path = Path(table["file"])
        if not path.is_file():
            wrong.setdefault(table["name"], "no answer was handed over")
            continue
        part, whose = None, ""
        if isinstance(operator, Ranked) and "rank" in table:
            part, whose = Part(operator, problem, table["layout"], table["rank"]), f"rank {table['rank']}: "
        asked = json.dumps([table["problem"], table["made"]], sort_keys=True)
        if asked != last:  # ranks share one truth
            whole, last = None, asked  # fp64 of two may not fit
            inputs = Made(**table["made"]).inputs(operator, problem, payload["device"])
        if path.stat().st_size == 0 and _size_of_answer(operator, problem, inputs, part) > LARGEST_BYTES:
            left_out.append(table["name"])
            continue
        whole = Whole(operator, problem, inputs) if whole is None else whole
        if fault := _fault(path, whole.expected(part)):
            wrong.setdefault(table["name"], f"{whose}{fault}")
    return {"wrong": wrong, "left_out": left_out, "beside": beside}


def _fault(path: Path, expected: ExpectedOutputs) -> str:
    """Return how the answer in a file is wrong, or an empty text."""
    data = path.read_bytes()
    if len(data) != _size_of(expected):
        return f"it has {len(data)} bytes, expected {_size_of(expected)}"
    begin = 0
    for wanted in expected:
        part = torch.frombuffer(bytearray(data[begin : begin + wanted.nbytes]), dtype=wanted.dtype)
        begin += wanted.nbytes
        _, fault = judge(part.reshape(wanted.exact.shape).to(wanted.exact.device), wanted)
        if fault:
            return f"{wanted.output}: {fault}" if wanted.output else fault
    return ""


def _size_of_answer(operator: Operator, problem: Any, inputs: Inputs, part: Part | None) -> int:
    """Return the bytes of an answer, by the framework's: what is right takes far longer, and is not needed."""
    names = names_of(operator, problem)
    answer = known_parts(operator, "low_precision", operator.low_precision(problem, inputs), names)
    mine = answer if part is None else map(part.of, names, answer)
    return sum(each.nbytes for each in mine)


def _size_of(expected: ExpectedOutputs) -> int:
    return sum(wanted.nbytes for wanted in expected)
