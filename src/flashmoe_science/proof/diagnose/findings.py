"""How a hypothesis turns into a finding: shares of a whole call, and bounds on what a remedy can give."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .experiments import fewest_seconds
from .observations import Finding, Observations, Status


@dataclass(frozen=True)
class Hypothesis:
    """One hypothesis about one call, on the way to its finding."""

    name: str
    experiment: str
    observations: Observations
    numbers: dict[str, float] = field(default_factory=dict)

    def confirmed(
        self,
        explanation: str,
        advice: str,
        *,
        share: float | None = None,
        device_seconds: float | None = None,
        bound: str,
    ) -> Finding:
        """Return the finding that it is at work.

        Args:
            explanation: with the numbers that decide.
            advice: what to try.
            share: of the GPU's time for the call, that it is shown to explain.
            device_seconds: the GPU's time that is left at the least once the cause is gone.
            bound: how that is computed.
        """
        most = most_gained(self.observations, device_seconds)
        share = share_of_call(self.observations, share)
        bound = bound if most is not None else ""
        return self._finding(Status.CONFIRMED, explanation, share=share, advice=advice, most=most, bound=bound)

    def ruled_out(self, explanation: str) -> Finding:
        """Return the finding that it is not what costs the time."""
        return self._finding(Status.RULED_OUT, explanation)

    def cannot_tell(self, explanation: str) -> Finding:
        """Return the finding that nothing follows from what was observed."""
        return self._finding(Status.CANNOT_TELL, explanation)

    def _finding(self, status: Status, explanation: str, **more: Any) -> Finding:
        numbers = {name: float(value) for name, value in self.numbers.items()}
        return Finding(
            hypothesis=self.name,
            status=status,
            explanation=explanation,
            experiment=self.experiment,
            numbers=numbers,
            **more,
        )


def share_of_call(observations: Observations, share: float | None) -> float | None:
    """Return a share of the GPU's time as one of the whole call: its kernels explain no more than their own part."""
    device, call = observations.times.device, observations.times.call
    if share is None or not device or not call:
        return None
    return min(1.0, max(0.0, share)) * device / call


def most_gained(observations: Observations, device_seconds: float | None) -> float | None:
    """Return how many times as fast the call is at the most when the GPU's part falls to ``device_seconds``.

    Never more than what the GPU's rates allow, and the host's part stays.
    """
    device, call = observations.times.device, observations.times.call
    if device_seconds is None or not device or not call:
        return None
    left = call - device + max(device_seconds, fewest_seconds(observations) or 0.0)
    return call / left if left > 0 else None
