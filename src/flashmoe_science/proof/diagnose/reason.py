"""From observations to a diagnosis: every hypothesis, then the causes by the time that each explains."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .grid import OTHER_KERNEL, grid_too_small, launch_bound, other_kernel, serial_loop, wave_tail
from .kernels import bank_conflicts, local_memory, no_tensor_cores, occupancy_capped, threads_idle
from .observations import CaseDiagnosis, Finding, Observations, Status
from .rates import bandwidth_bound, compute_bound, excess_bytes, throttled

HYPOTHESES: tuple[Callable[[Observations], Finding], ...] = (
    other_kernel,
    launch_bound,
    grid_too_small,
    wave_tail,
    serial_loop,
    threads_idle,
    no_tensor_cores,
    local_memory,
    occupancy_capped,
    bank_conflicts,
    excess_bytes,
    bandwidth_bound,
    compute_bound,
    throttled,
)


def diagnose_case(observations: Observations) -> CaseDiagnosis:
    """Return the findings of all hypotheses, and the causes."""
    findings = [hypothesis(observations) for hypothesis in HYPOTHESES]
    causes = rank(findings)
    return CaseDiagnosis(
        observations=observations,
        findings=findings,
        causes=[cause.hypothesis for cause in causes],
        overlap=overlap(causes, observations),
    )


def rank(findings: Sequence[Finding]) -> list[Finding]:
    """Return the confirmed causes by the time that each explains; those without a share come last.

    Another kernel than promised comes first: the rest is about a kernel that nobody meant.
    """
    confirmed = [finding for finding in findings if finding.status is Status.CONFIRMED]
    return sorted(
        confirmed, key=lambda each: (each.hypothesis != OTHER_KERNEL, each.share is None, -(each.share or 0.0))
    )


def overlap(causes: Sequence[Finding], observations: Observations) -> str:
    """Return how far the shares of the causes may be added, or an empty text where there is nothing to add."""
    shares = [cause for cause in causes if cause.share is not None]
    device = [cause for cause in shares if cause.part == "device"]
    if len(shares) < 2:
        return ""
    times = observations.times
    kernels = (times.device or 0.0) / (times.call or 1.0)
    if len(device) < 2:
        return "These causes explain different parts of a call, the host's and the kernels': their shares add up."
    largest = max(cause.share or 0.0 for cause in device)
    names = ", ".join(cause.hypothesis for cause in device)
    return (
        f"The shares of {names} overlap and must not be added: they are parts of the same {kernels:.0%} of a call that "
        f"kernels take. Together they explain between {largest:.0%} and "
        f"{min(kernels, sum(cause.share or 0.0 for cause in device)):.0%}."
    )
