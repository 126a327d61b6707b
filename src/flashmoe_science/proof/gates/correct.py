"""The gate correct: every case against the exact answer, on the GPU, or in the interpreter where there is none."""

from __future__ import annotations

import random
import re
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..measure.schedule import SLOW_TRUTH_S
from ..records.evidence import Accuracy
from ..text import counted, few
from .run import NO_GPU, Outcome, Run, failed, not_possible, passed

_MOST_CRASHES = 3  # then the cases left are not checked: each crash costs a process of its own


@dataclass
class _Checks:
    """What the processes of this gate found."""

    results: list[dict[str, Any]] = field(default_factory=list)
    ended: dict[str, str] = field(default_factory=dict)  # case that ended its process -> how
    ending: str = ""  # how a process ended before it had begun a case
    hung: bool = False
    hint: str = ""
    tail: list[str] = field(default_factory=list)  # last words of the first process that ended early
    left: list[str] = field(default_factory=list)  # cases that nobody checked
    under_way: str = ""  # the case that the process has begun


def check_results(run: Run) -> Outcome:
    """Gate correct: fresh random inputs, poisoned memory, no NaN, error within the budget, inputs left alone.

    A case that ends its process is wrong, and those after it are checked in a fresh one. A case that hangs ends the
    gate: so may all that follow, and each would take as long.
    """
    device = run.device
    if run.not_built:
        return not_possible(run.not_built)
    if device is None:
        return not_possible(
            f"{NO_GPU}, and this subject does not run on a CPU", hint="devices = [...] says where it runs"
        )
    if run.not_served_reason:
        return not_possible(run.not_served_reason)
    assert run.settings.seed is not None
    # Other inputs than those of gate bench, and the same ones for the same --seed.
    seed = random.Random(f"{run.settings.seed}/correct").getrandbits(31)
    with tempfile.TemporaryDirectory() as answers:
        checks = _check_all(run, device, seed, answers)
        outcome, notes = _recheck(run, device, seed, answers, checks)
    wrong = [case for case in checks.results if case["status"] == "failed" and case["name"] not in checks.ended]
    details = [f"{case['name']}: {case['reason']}" for case in checks.results if case["reason"]]
    if checks.ended or checks.ending:
        details += [f"{name}: {ending}" for name, ending in checks.ended.items()]
        summary, reason = _say_ended(run, checks, wrong)
        return failed(summary, hint=checks.hint or _mend(reason), details=[*details, *checks.tail])
    if wrong:
        of = counted(len(checks.results), "case")
        summary = f"wrong in {len(wrong)} of {of}; {wrong[0]['name']}: {wrong[0]['reason']}"
        hint = _mend(wrong[0]["reason"])
        said = f"the seed of the inputs was {run.settings.seed}"  # as --seed takes it
        return failed(summary, hint=hint, details=[*details, said])
    return outcome or _sum_up(run, [*_kept_results(run), *checks.results], [*details, *notes], device)


def _recheck(run: Run, device: str, seed: int, folder: str, checks: _Checks) -> tuple[Outcome | None, list[str]]:
    """Let a process without the subject look at the first answer to each case again (``measure.recheck``).

    Returns:
        How that fails, or None, and notes.
    """
    answers = [
        {**run.case_table(case["name"]), "file": str(Path(folder, f"{case['name']}.{rank}")), "made": {"seed": seed}}
        | ({"rank": rank, "layout": case["layout"]} if "layout" in case else {})
        for case in checks.results
        if case["status"] == "passed"
        for rank in range(run.ranks)
    ]
    if not answers:
        return None, []
    limit = "correct_s" if device == "cuda" else "correct_cpu_s"
    payload = run.payload(device=device, answers=answers)
    result = run.run_task("recheck:check_answers", payload, timeout_s=getattr(run.subject.limits, limit))
    if not result.ok or result.data is None:
        hint, tail = run.explain_crash(result, limit)
        said = f"the process that compares answers: {run.hide_paths(result.reason)}"
        return failed(said, hint=hint, details=tail), []
    wrong: dict[str, str] = result.data["wrong"]
    for name, reason in wrong.items():
        _mark_wrong(run, name, reason)
    if wrong:
        name, reason = next(iter(wrong.items()))
        details = [f"{each}: {why}" for each, why in wrong.items()]
        hint = "the process of the subject found it right: look at what its module changes there"
        summary = f"{name}: a process without the subject finds its answer wrong: {reason}"
        return failed(summary, hint=hint, details=details), []
    left_out = result.data["left_out"]
    where = "beside it: its operator imports it" if result.data["beside"] else "without the subject"
    notes = [f"{counted(len(answers) - len(left_out), 'answer')} compared again in a process {where}"]
    return None, notes + [f"{name}: its answer is too large to be handed over" for name in left_out]


def _mark_wrong(run: Run, name: str, reason: str, **more: Any) -> None:
    run.drop_times(name)
    run.update_case(name, correct=False, **more)
    run.update_arm(name, run.subject.name, status="failed", reason=reason)


def _mend(reason: str) -> str:
    """Return what a reason means, or what to do."""
    if found := re.match(r"stress draw (\w+): raised", reason):
        return f'not_served = ["{found[1]}"] in the kernel.toml says that the kernel does not take such inputs'
    # A record names no folder of this machine.
    told = "page error-scale of the documentation says what to look for"
    return told if "allowed" in reason or "NaN in" in reason else ""


def _check_all(run: Run, device: str, seed: int, answers: str) -> _Checks:
    """Check the cases, in a fresh process after each one that ends its own."""
    checks = _Checks(left=list(run.todo))
    limit = "correct_s" if device == "cuda" else "correct_cpu_s"

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "start":
            checks.under_way = event["name"]
        else:
            checks.results.append(event["case"])
            _record(run, event["case"])
            run.save()
        run.progress.advance(len(checks.results), len(run.todo), checks.under_way)

    timeout_s = getattr(run.subject.limits, limit)
    while checks.left:
        checks.under_way = ""
        tables = [run.case_table(name) for name in checks.left]
        payload = run.payload(device=device, seed=seed, cases=tables, answers=answers)
        result = run.run_task("tasks:check_correct", payload, timeout_s=timeout_s, on_event=on_event)
        checked = {case["name"] for case in checks.results}
        checks.left = [name for name in checks.left if name not in checked]
        if result.ok:
            break
        if not checks.tail:
            checks.hint, checks.tail = run.explain_crash(result, limit)
        checks.hung = result.timed_out
        _note_end(run, checks, run.hide_paths(result.reason))
        if checks.ending or checks.hung or len(checks.ended) == _MOST_CRASHES:
            break
    return checks


def _note_end(run: Run, checks: _Checks, ending: str) -> None:
    """Take note that a process ended early, and of the case that was under way, which is wrong."""
    name = checks.under_way
    if not name:
        checks.ending = ending
        return
    checks.ended[name] = ending
    if name in checks.left:  # else its answer had come
        checks.left.remove(name)
        _mark_wrong(run, name, ending)


def _say_ended(run: Run, checks: _Checks, wrong: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the cases that ended their processes, how they did, and the results of the others; and the first reason.

    A case that left the GPU unusable has said before what it failed in.
    """
    if not checks.ended:
        return checks.ending, checks.ending
    names = list(checks.ended)
    said = {case["name"]: case["reason"] for case in checks.results if case["status"] == "failed"}
    first = said.get(names[0]) or checks.ended[names[0]]
    hung = names.pop() if checks.hung else ""  # the last: a hang ends the gate
    of = counted(len(run.todo), "case")
    if len(run.todo) == 1:
        return f"case {hung or names[0]}: {first}", first
    parts = []
    if names:
        parts.append(f"{len(names)} of {of} ended the process, {few(names)}: {first}")
    if hung:
        which = f"{hung} hung" if names else f"1 of {of} hung, {hung}"
        parts.append(f"{which}: {checks.ended[hung]}")
    if wrong:
        parts.append(f"{len(wrong)} wrong, {wrong[0]['name']}: {wrong[0]['reason']}")
    if checks.ending:
        parts.append(f"a fresh process: {checks.ending}")
    right = sum(case["status"] == "passed" for case in checks.results)
    parts.append(f"{right} right" + (f", {len(checks.left)} not checked" if checks.left else ""))
    return "; ".join(parts), first


def _kept_results(run: Run) -> list[dict[str, Any]]:
    """Return the results of the earlier run, in the form of the task."""
    rows = []
    for name in sorted(run.finished):
        case = run.cases[name]
        accuracy = next((arm.accuracy for arm in case.arms if arm.role == "subject"), None)
        if accuracy is not None:
            plain = accuracy.model_dump(mode="json")
            kept = {"accuracy": plain, "stand_in": case.stand_in, "stress_draws": case.stress_draws}
            rows.append({"status": "passed", "reason": "", **kept})
    return rows


def _record(run: Run, case: dict[str, Any]) -> None:
    if case.get("truth_s", 0.0) > SLOW_TRUTH_S:
        run.slow.add(case["name"])
    run.update_arm(case["name"], run.subject.name, accuracy=case["accuracy"])
    if case["status"] == "failed":
        _mark_wrong(run, case["name"], case["reason"], stand_in=case["stand_in"])
    elif case["status"] == "passed":  # a stand-in that is right shows nothing of what a GPU will run
        shown = None if case["stand_in"] else True
        run.update_case(case["name"], correct=shown, stand_in=case["stand_in"], stress_draws=case["stress_draws"])


def _sum_up(run: Run, results: list[dict[str, Any]], details: list[str], device: str) -> Outcome:
    checked = [case for case in results if case["status"] == "passed"]
    where = "on the GPU" if device == "cuda" else "on the CPU"
    if run.ranks > 1:
        where = f"on {run.ranks} GPUs" if device == "cuda" else f"on {run.ranks} ranks of the CPU"
    if not checked:
        reasons = {case["reason"] for case in results}
        why = f": {reasons.pop()}" if len(reasons) == 1 else ""
        summary = f"none of the {counted(len(results), 'case')} can be checked {where}{why}"
        return not_possible(summary, details=[] if why else details)
    details = [*_stress_notes(run, checked), *details]
    share = max(Accuracy.model_validate(case["accuracy"]).share for case in checked)
    left = f"; {len(results) - len(checked)} not possible here" if len(checked) < len(results) else ""
    same = all(case["accuracy"]["deterministic"] for case in checked)
    bits = "same bits on every repeat" if same else "bits vary between repeats"
    summary = (
        f"{len(checked)} of {counted(len(results), 'case')} {where}{_by_stand_ins(checked)}: "
        f"error at most {share:.0%} of what is allowed, {bits}{left}{run.not_served_note}"
    )
    return passed(summary, details=details)


def _stress_notes(run: Run, checked: list[dict[str, Any]]) -> list[str]:
    """Return which stress draws were tried, and which the kernel.toml leaves out."""
    tried = dict.fromkeys(draw for case in checked for draw in case["stress_draws"])
    left_out = ", ".join(run.subject.not_served)
    notes = [f"right in the stress draws {', '.join(tried)}"] if tried else []
    return notes + ([f"stress draws not served, as the kernel.toml says: {left_out}"] if left_out else [])


def _by_stand_ins(checked: list[dict[str, Any]]) -> str:
    """Return which cases were checked on something else than the subject, or an empty text."""
    counts = Counter(case["stand_in"] for case in checked if case["stand_in"])
    if not counts:
        return ""
    if set(counts.values()) == {len(checked)}:
        return f", by {next(iter(counts))}"
    return ", " + ", ".join(f"{count} of them by {stand_in}" for stand_in, count in counts.items())
