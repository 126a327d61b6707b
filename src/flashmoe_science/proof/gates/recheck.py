"""Let a process without the subject look at its answers again: both gates that look at answers ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..text import counted
from .run import Outcome, Run, failed


def recheck(run: Run, answers: Sequence[dict[str, Any]], device: str, limit: str) -> tuple[Outcome | None, list[str]]:
    """Compare ``answers`` (``measure.recheck``) with what is right; return how that fails, or None, and notes."""
    if not answers:
        return None, []
    payload = run.payload(device=device, answers=list(answers))
    result = run.run_task("recheck:check_answers", payload, timeout_s=getattr(run.subject.limits, limit))
    if not result.ok or result.data is None:
        hint, tail = run.explain_crash(result, limit)
        return failed(
            f"the process that compares answers: {run.hide_paths(result.reason)}", hint=hint, details=tail
        ), []
    wrong: dict[str, str] = result.data["wrong"]
    for name, reason in wrong.items():
        run.drop_times(name)
        run.update_case(name, correct=False)
        run.update_arm(name, run.subject.name, status="failed", reason=reason)
    if wrong:
        name, reason = next(iter(wrong.items()))
        details = [f"{each}: {why}" for each, why in wrong.items()]
        hint = "the process of the subject found it right: look at what its module changes there"
        summary = f"{name}: a process without the subject finds its answer wrong: {reason}"
        return failed(summary, hint=hint, details=details), []
    left_out = result.data["left_out"]
    where = "beside it: its operator imports it" if result.data["beside"] else "without the subject"
    notes = [f"{counted(len(answers) - len(left_out), 'answer')} compared again in a process {where}"]
    notes += [f"{name}: its answer is too large to be handed over" for name in left_out]
    return None, notes
