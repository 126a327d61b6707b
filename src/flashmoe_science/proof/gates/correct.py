"""The gate correct: every case against the exact answer, on the GPU, or in the interpreter where there is none."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..evidence import Accuracy
from ..words import counted
from .run import NO_GPU, Outcome, Run, failed, not_possible, passed

_CASE_TIMEOUT_S = {"cuda": 300.0, "cpu": 900.0}  # an interpreter is slow


def check_results(run: Run) -> Outcome:
    """Gate correct: fresh random inputs, poisoned memory, no NaN, error within the budget, inputs left alone."""
    device = run.device
    if run.not_built:
        return not_possible(run.not_built)
    if device is None:
        return not_possible(
            f"{NO_GPU}, and this subject does not run on a CPU", hint="devices = [...] says where it runs"
        )
    if run.not_served_reason:
        return not_possible(run.not_served_reason)
    under_way = ""

    def on_event(event: dict[str, Any]) -> None:
        nonlocal under_way
        if event["event"] == "start":
            under_way = event["name"]
        else:
            results.append(event["case"])
            _record(run, event["case"])
            run.save()
        run.progress.advance(len(results), len(run.todo), under_way)

    results: list[dict[str, Any]] = []
    payload = run.payload(device=device, seed=None)
    result = run.run_task("tasks:check_correct", payload, timeout_s=_CASE_TIMEOUT_S[device], on_event=on_event)
    gpu_seconds = result.seconds if device == "cuda" else 0.0
    wrong = [case for case in results if case["status"] == "failed"]
    details = [f"{case['name']}: {case['reason']}" for case in results if case["reason"]]
    if not result.ok or result.data is None:
        hint, tail = run.explain_crash(result)
        where = f"case {under_way}: " if under_way else ""
        unfinished = under_way in run.cases and under_way not in {case["name"] for case in results}
        if unfinished:
            run.drop_times(under_way)
            run.update_case(under_way, correct=False)
        reason = f"{where}{run.hide_paths(result.reason)}"
        return failed(reason, hint=hint, details=[*details, *tail], gpu_seconds=gpu_seconds)
    if wrong:
        seed = f"the seed of the inputs was {result.data['seed']}"
        summary = f"wrong in {len(wrong)} of {counted(len(results), 'case')}; {wrong[0]['name']}: {wrong[0]['reason']}"
        hint = "what is allowed is twice the framework's own error" if "allowed" in wrong[0]["reason"] else ""
        return failed(summary, hint=hint, details=[*details, seed], gpu_seconds=gpu_seconds)
    return _sum_up(run, [*_kept_results(run), *results], details, device, gpu_seconds)


def _kept_results(run: Run) -> list[dict[str, Any]]:
    """Return what the run that is gone on with found, as the task tells it."""
    rows = []
    for name in sorted(run.finished):
        case = run.cases[name]
        accuracy = next((arm.accuracy for arm in case.arms if arm.role == "subject"), None)
        if accuracy is not None:
            plain = accuracy.model_dump(mode="json")
            rows.append({"status": "passed", "reason": "", "accuracy": plain, "stand_in": case.stand_in})
    return rows


def _record(run: Run, case: dict[str, Any]) -> None:
    if case["status"] == "failed":
        run.drop_times(case["name"])
        run.update_case(case["name"], correct=False, stand_in=case["stand_in"])
    elif case["status"] == "passed":  # a stand-in that is right shows nothing of what a GPU will run
        run.update_case(case["name"], correct=None if case["stand_in"] else True, stand_in=case["stand_in"])
    arm: dict[str, Any] = {"accuracy": case["accuracy"]}
    if case["status"] == "failed":
        arm |= {"status": "failed", "reason": case["reason"]}
    run.update_arm(case["name"], run.subject.name, **arm)


def _sum_up(run: Run, results: list[dict[str, Any]], details: list[str], device: str, gpu_seconds: float) -> Outcome:
    checked = [case for case in results if case["status"] == "passed"]
    where = "on the GPU" if device == "cuda" else "on the CPU"
    if not checked:
        reasons = {case["reason"] for case in results}
        why = f": {reasons.pop()}" if len(reasons) == 1 else ""
        summary = f"none of the {counted(len(results), 'case')} can be checked {where}{why}"
        return not_possible(summary, details=[] if why else details)
    share = max(Accuracy.model_validate(case["accuracy"]).share for case in checked)
    left = f"; {len(results) - len(checked)} not possible here" if len(checked) < len(results) else ""
    same = all(case["accuracy"]["deterministic"] for case in checked)
    bits = "same bits on every repeat" if same else "bits vary between repeats"
    summary = (
        f"{len(checked)} of {counted(len(results), 'case')} {where}{_by_stand_ins(checked)}: "
        f"error at most {share:.0%} of what is allowed, {bits}{left}{run.not_served_note}"
    )
    return passed(summary, details=details, gpu_seconds=gpu_seconds)


def _by_stand_ins(checked: list[dict[str, Any]]) -> str:
    """Return which cases were checked on something else than the subject, or an empty text."""
    counts = Counter(case["stand_in"] for case in checked if case["stand_in"])
    if not counts:
        return ""
    if set(counts.values()) == {len(checked)}:
        return f", by {next(iter(counts))}"
    return ", " + ", ".join(f"{count} of them by {stand_in}" for stand_in, count in counts.items())
