"""Worker tasks of the chain: the subject's code is never imported anywhere else."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import secrets
import sys
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from ...errors import CompileError, OperatorError, SubjectError, UnsupportedError
from ..subject.failure_hints import explain_import
from ..subject.loading import load_entry, operator_of
from ..subject.operator import ours, part_of
from ..subject.subject import Subject, add_python_path, expand_sources, load_attribute
from ..subject.user_operator import blaming
from ..worker import Emit, describe_error, rank_here


def import_subject(payload: dict[str, Any], emit: Emit) -> dict[str, Any]:  # noqa: ARG001 - all tasks take it
    """Import the subject, and compare its entry point's signature with the operator's arguments for a small ``case``.

    Returns ``notes``, one fact each. Or ``failure`` and ``hint``: the module does not load, or the entry point is
    missing, cannot be called or does not take these arguments.
    """
    try:
        return {"notes": _import(payload)}
    except OperatorError:
        raise
    except SubjectError as error:
        return {"failure": error.message, "hint": error.hint}


def _import(payload: dict[str, Any]) -> list[str]:
    """Import the subject, and return notes about it. Raises ``SubjectError``."""
    from .shared_state import AT_IMPORT, HINT, guard_against  # it imports torch, which not every task needs

    subject = Subject.from_json(payload["subject"])
    changes = guard_against(subject)
    operator = operator_of(subject)
    try:
        entry = load_entry(subject)
    except (ImportError, OSError) as error:  # torch.ops.load_library raises the latter
        reason, hint = explain_import(error)
        raise SubjectError(reason, hint=hint) from error
    if found := changes():
        raise SubjectError(f"{AT_IMPORT}: {found}", hint=HINT)
    module = importlib.import_module(subject.entry_point.partition(":")[0])
    notes = _origin_notes(subject, module.__file__)
    return notes + check_signature(operator, entry, operator.parse_case(payload["case"]))


class _RecordedError(Exception):
    """Ends a call whose arguments are known now."""


def check_signature(operator: Any, entry: Callable[..., Any], problem: Any) -> list[str]:
    """Compare the entry point's signature with the arguments that the operator passes. Raises ``SubjectError``."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def recorder(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        raise _RecordedError

    with contextlib.suppress(_RecordedError):
        operator.bind(recorder, problem, operator.make_inputs(problem, seed=0, device="cpu"))()
    signature = _signature(entry)
    if signature is None:
        return ["the entry point does not tell its signature: its first call will"]
    for args, kwargs in calls:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            given = ", ".join([*(type(a).__name__ for a in args), *(f"{k}={v!r}" for k, v in kwargs.items())])
            taken = re.sub(r"\btorch\.Tensor\b", "Tensor", str(signature))
            raise SubjectError(
                f"it takes {taken}, and the harness passes ({given}): {error}",
                hint="name a function that takes these arguments. Or write an operator: its `bind` passes others",
            ) from error
    return [f"signature {signature}"]


def _signature(entry: Callable[..., Any]) -> inspect.Signature | None:
    """Return what an entry point takes; None where it does not tell. An operator of torch's has a schema."""
    overload = getattr(entry, "default", entry)  # torch.ops.library.name, or one of its overloads
    if (schema := getattr(overload, "_schema", None)) is not None:
        kind = inspect.Parameter
        return inspect.Signature(
            [
                kind(
                    argument.name,
                    kind.KEYWORD_ONLY if argument.kwarg_only else kind.POSITIONAL_OR_KEYWORD,
                    default=argument.default_value if argument.has_default_value() else kind.empty,
                )
                for argument in schema.arguments
            ]
        )
    try:
        return inspect.signature(entry)
    except (TypeError, ValueError):
        return None


def _origin_notes(subject: Subject, file: str | None) -> list[str]:
    """Say which file was loaded: an older build of the same name elsewhere is a classic."""
    if file is None:
        return ["the module has no file"]
    path = Path(file).resolve()
    if not path.is_relative_to(subject.folder):
        return [f"loaded {path.name} from outside the subject's folder"]
    sources = [subject.folder / source for source in expand_sources(subject)[0]]
    newest = max((source.stat().st_mtime for source in sources), default=0.0)
    notes = [f"loaded {path.relative_to(subject.folder).as_posix()}"]
    if path.suffix == ".so" and path.stat().st_mtime < newest:
        notes.append("the loaded library is older than the newest source: was it built from these sources?")
    return notes


def compile_kernels(payload: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Compile a share of what a subject needs, with no GPU.

    ``payload`` has ``subject``, ``cases``, ``gpus``, and ``part`` of ``parts``: the share. ``emit`` gets ``{"event":
    "start", "label"}`` before a job and ``{"event": "job", ...}`` after it. Returns ``jobs``, their number.
    """
    subject = Subject.from_json(payload["subject"])
    jobs = _compile_jobs(subject, payload["cases"], payload["gpus"])
    mine = jobs[payload["part"] :: payload["parts"]]
    for job in mine:
        emit({"event": "start", "label": f"{job.label} for {job.gpu}", "total": len(jobs)})
        emit({"event": "job", "job": _compile(job)})
    return {"jobs": len(mine)}


def _compile_jobs(subject: Subject, cases: Sequence[dict[str, Any]], gpus: Sequence[str]) -> list[Any]:
    if subject.compile_jobs is not None:
        add_python_path(subject)
        return list(load_attribute(subject.compile_jobs)(cases, gpus))
    operator = operator_of(subject)
    return list(ours(operator).compile_jobs(subject.name, [operator.parse_case(case) for case in cases], gpus))


def _compile(job: Any) -> dict[str, Any]:
    numbers = ("registers", "spill_bytes", "shared_memory_bytes", "seconds")
    row: dict[str, Any] = {"label": job.label, "gpu": job.gpu}
    try:
        outcome = job.run()
    except CompileError as error:
        return {**row, "problems": [f"does not compile: {str(error).partition(chr(10))[0]}"]}
    return {**row, **{name: getattr(outcome, name) for name in numbers}, "problems": list(outcome.problems)}


def check_correct(payload: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Check the results of a subject, case by case, on ``device`` with inputs of ``seed``, None for a fresh one.

    ``emit`` gets a "start" and a "case" event for each case. Returns ``seed`` and ``cases``, each with ``name``,
    ``status`` (passed, failed, not possible here), ``reason``, ``accuracy``, ``stand_in``: what ran in the subject's
    place, and, where it passed, ``stress_draws``: those that it passed too, and ``truth_s``: the seconds that an exact
    answer takes.
    """
    from .recheck import FirstAnswer, write_answer  # they import torch, which not every task needs
    from .shared_state import AT_IMPORT, HINT, guard_against

    subject = Subject.from_json(payload["subject"])
    changes = guard_against(subject)
    operator = operator_of(subject)
    entry = load_entry(subject)
    if found := changes():
        raise SubjectError(f"{AT_IMPORT}: {found}", hint=HINT)
    seed = secrets.randbits(31) if payload.get("seed") is None else int(payload["seed"])
    cases, passed = [], set[Hashable]()
    for case in payload["cases"]:
        emit({"event": "start", "name": case["name"]})
        problem = operator.parse_case(case["problem"])
        first = FirstAnswer(entry)
        checked = _check(subject, operator, first, problem, payload["device"], seed, passed)
        if checked["status"] == "passed" and first.answer is not None and "answers" in payload:
            write_answer(first.answer, Path(payload["answers"], f"{case['name']}.{rank_here()}"))
            if (part := part_of(operator, problem, entry, rank_here())) is not None:
                checked["layout"] = part.layout
        if checked["status"] == "passed" and (found := changes()):
            checked |= {"status": "failed", "reason": f"its calls change what all arms share: {found}"}
        cases.append({"name": case["name"], **checked})
        emit({"event": "case", "case": cases[-1]})
        if checked["status"] == "failed" and (loss := _lost_gpu(payload["device"])):
            raise SubjectError(f"case {case['name']} left the GPU unusable: {loss}")
    return {"cases": cases, "seed": seed}


def _check(
    subject: Subject, operator: Any, entry: Any, problem: Any, device: str, seed: int, passed: set[Hashable]
) -> dict[str, Any]:
    from .correctness import NotPossibleHereError, WrongResultError, check_case, check_stress

    stand_in, promised = "", subject.deterministic
    if device == "cpu":
        ours = subject.name if subject.builtin else ""  # a name of ours says nothing about a kernel of someone else's
        if (refusal := operator.cpu_refusal(ours, problem)) is not None:
            return {"status": "not possible here", "reason": refusal, "accuracy": None, "stand_in": ""}
        stand_in = operator.cpu_stand_in(subject.name, problem) if subject.builtin else ""
    took: list[float] = []
    try:
        with blaming(subject.operator):
            accuracy = check_case(
                operator, entry, problem, device=device, seed=seed, deterministic=promised,
                capture=_capture_on(device), on_truth=took.append,
            )  # fmt: skip
            # Our own kernels say of some layouts that they do not serve them; a user's kernel.toml says so.
            draws = check_stress(
                operator, entry, problem, device=device, seed=seed, not_served=subject.not_served,
                refusals=(UnsupportedError,) if subject.builtin else (), passed=passed,
            )  # fmt: skip
    except NotPossibleHereError as error:
        return {"status": "not possible here", "reason": str(error), "accuracy": None, "stand_in": ""}
    except WrongResultError as error:
        accuracy_json = error.accuracy.model_dump(mode="json") if error.accuracy else None
        return {"status": "failed", "reason": str(error), "accuracy": accuracy_json, "stand_in": stand_in}
    found = {"accuracy": accuracy.model_dump(mode="json"), "stress_draws": draws, "truth_s": took[-1]}
    return {"status": "passed", "reason": "", "stand_in": stand_in, **found}


def _capture_on(device: str) -> Callable[[Callable[[], Any]], Any] | None:
    """Return what makes a CUDA graph of a call, or None where there is no GPU."""
    if device != "cuda":
        return None
    from .measure import capture_call

    return capture_call


def _lost_gpu(device: str) -> str:
    """Return why the GPU answers no more, or an empty text: after some errors every later call fails."""
    if device != "cuda":
        return ""
    torch = sys.modules["torch"]
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return describe_error(error)
    return ""
