"""One hypothesis about one call on the way to its finding, and the list of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .experiments import fewest_seconds, main_kernel
from .observations import Chip, Code, Finding, Kernel, Observations, Status


class CannotTellError(Exception):
    """Nothing follows: what the experiment needs was not observed."""


@dataclass(frozen=True)
class Case:
    """One hypothesis about one call, on the way to its finding."""

    name: str
    experiment: str
    seen: Observations

    def confirmed(
        self,
        explanation: str,
        advice: str,
        *,
        share: float | None = None,
        device_seconds: float | None = None,
        bound: str = "",
    ) -> Finding:
        """Return the finding that it is at work.

        Args:
            explanation: with the numbers that decide.
            advice: what to try.
            share: of the GPU's time for the call, that it is shown to explain.
            device_seconds: the GPU's time that is left at the least once the cause is gone.
            bound: how that is computed.
        """
        device, call, most = self.seen.times.device, self.seen.times.call, None
        if not device or not call:
            return self._finding(Status.CONFIRMED, explanation, advice=advice)
        if device_seconds is not None:  # never faster than the GPU's rates allow, and the host's part stays
            left = call - device + max(device_seconds, fewest_seconds(self.seen) or 0.0)
            most = call / left if left > 0 else None
        if share is not None:  # of the whole call: its kernels explain no more than their own part
            share = min(1.0, max(0.0, share)) * device / call
        bound = bound if most is not None else ""
        return self._finding(Status.CONFIRMED, explanation, advice=advice, share=share, most=most, bound=bound)

    def at_the_rates(self, explanation: str, advice: str) -> Finding:
        """Return the finding that it is at work: once it is gone, nothing but the GPU's rates need take time."""
        bound = "the GPU's rates: nothing else takes time"
        return self.confirmed(explanation, advice, device_seconds=fewest_seconds(self.seen), bound=bound)

    def ruled_out(self, explanation: str) -> Finding:
        """Return the finding that it is not what costs the time."""
        return self._finding(Status.RULED_OUT, explanation)

    def cannot_tell(self, explanation: str) -> Finding:
        """Return the finding that nothing follows from what was observed."""
        return self._finding(Status.CANNOT_TELL, explanation)

    def _finding(self, status: Status, explanation: str, **more: Any) -> Finding:
        return Finding(hypothesis=self.name, status=status, explanation=explanation, experiment=self.experiment, **more)

    def need(self, what: str, *names: str) -> CannotTellError:
        """Return the error that ``what`` is needed; ``names`` of what is missing say why it is not there."""
        return CannotTellError(f"{what}: {self.seen.why_missing(*names)}")

    def timed(self) -> tuple[Chip, float]:
        """Return the GPU, and its time for the call."""
        if self.seen.chip is None or self.seen.times.device is None:
            raise self.need("no times", "gpu", "times")
        return self.seen.chip, self.seen.times.device

    def gridded(self) -> tuple[Chip, list[Kernel], Kernel, str]:
        """Return the GPU, the kernels whose grid is known, the main kernel, and the grids as text."""
        chip, known = self.seen.chip, [kernel for kernel in self.seen.kernels if kernel.blocks]
        main = main_kernel(self.seen.kernels)
        if chip is None or not known or main is None:
            raise self.need("no grid", "gpu", "launches")
        shown = ", ".join(f"{kernel.blocks} blocks of {kernel.name}" for kernel in known[:3])
        return chip, known, main, f"{shown} for {chip.sms} SMs"

    def codes(self) -> list[tuple[Kernel, Code]]:
        """Return the kernels whose machine code is known."""
        return [(kernel, kernel.code) for kernel in self.seen.kernels if kernel.code is not None]

    def need_all_codes(self) -> None:
        """See to it that there are kernels, and that the machine code of each is known."""
        kernels = self.seen.kernels
        if not kernels or len(self.codes()) < len(kernels):
            reasons = dict.fromkeys(f"{each.name}: {each.code_missing}" for each in kernels if each.code is None)
            said = "; ".join(reasons) or self.seen.why_missing("launches", "code")
            raise CannotTellError(f"no machine code: {said}")

    def left(self, part: float) -> float | None:
        """Return a part of the GPU's time for the call."""
        return None if self.seen.times.device is None else self.seen.times.device * part


_Test = Callable[[Observations], Finding]
HYPOTHESES: list[_Test] = []  # in the order of their definitions


def hypothesis(name: str, experiment: str) -> Callable[[Callable[[Case], Finding]], Callable[[Case], Finding]]:
    """Enter a hypothesis: ``experiment`` says what is compared with what."""

    def enter(decide: Callable[[Case], Finding]) -> Callable[[Case], Finding]:
        def test(seen: Observations) -> Finding:
            case = Case(name, experiment, seen)
            try:
                return decide(case)
            except CannotTellError as error:
                return case.cannot_tell(str(error))

        HYPOTHESES.append(test)
        return decide

    return enter
