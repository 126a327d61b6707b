"""Readings of a GPU through NVML: clocks, power, temperature, throttle reasons, limits.

No driver, no ``nvidia-ml-py`` or no permission is a normal state: then ``open_sensors`` returns sensors that read None
and say why. A quantity that one card does not report is None, the others are read all the same.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# NVML's bits. An idle GPU is no trouble, so bit 0 is left out.
THROTTLE_REASONS = {
    0x002: "applications_clocks",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal",
    0x040: "hw_thermal",
    0x080: "hw_power_brake",
    0x100: "display_clocks",
    0x200: "board_limit",
    0x400: "reliability",
}
_GPU_IDLE = 0x001
_NOT_INSTALLED = "nvidia-ml-py is not installed"


@dataclass(frozen=True)
class Reading:
    """The sensors at one moment. None: not reported."""

    sm_clock_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    throttle: str | None = None  # active reasons, joined by commas; "" for none


@dataclass(frozen=True)
class Limits:
    """What does not change while a card runs. None: not reported."""

    name: str | None = None
    uuid: str | None = None
    memory_bytes: int | None = None
    max_sm_clock_mhz: int | None = None
    power_limit_w: float | None = None
    arch: int | None = None  # e.g. 90
    driver: str | None = None
    driver_cuda: str | None = None  # the newest CUDA that the driver serves, e.g. "13.0"


class NoSensors:
    """Stands in where NVML cannot be asked; ``reason`` says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def read(self) -> Reading:
        """Return a reading that knows nothing."""
        return Reading()

    def limits(self) -> Limits:
        """Return limits that know nothing."""
        return Limits()


class Sensors:
    """One card, through the module ``pynvml``."""

    reason = ""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library = library
        self._handle = handle

    def read(self) -> Reading:
        """Return the sensors now. It takes well under a millisecond, and belongs outside of what is timed."""
        lib, card = self._library, self._handle
        power_mw = self._ask(lambda: lib.nvmlDeviceGetPowerUsage(card))
        mask = self._ask(self._throttle_mask)
        return Reading(
            sm_clock_mhz=self._ask(lambda: lib.nvmlDeviceGetClockInfo(card, lib.NVML_CLOCK_SM)),
            power_w=None if power_mw is None else power_mw / 1000,
            temperature_c=self._ask(lambda: lib.nvmlDeviceGetTemperature(card, lib.NVML_TEMPERATURE_GPU)),
            throttle=None if mask is None else decode_throttle(mask),
        )

    def limits(self) -> Limits:
        """Return name, size, limits and driver."""
        lib, card = self._library, self._handle
        power_mw = self._ask(lambda: lib.nvmlDeviceGetEnforcedPowerLimit(card))
        memory = self._ask(lambda: lib.nvmlDeviceGetMemoryInfo(card))
        capability = self._ask(lambda: lib.nvmlDeviceGetCudaComputeCapability(card))
        cuda = self._ask(lib.nvmlSystemGetCudaDriverVersion_v2)
        return Limits(
            name=_text(self._ask(lambda: lib.nvmlDeviceGetName(card))),
            uuid=_text(self._ask(lambda: lib.nvmlDeviceGetUUID(card))),
            memory_bytes=None if memory is None else int(memory.total),
            max_sm_clock_mhz=self._ask(lambda: lib.nvmlDeviceGetMaxClockInfo(card, lib.NVML_CLOCK_SM)),
            power_limit_w=None if power_mw is None else power_mw / 1000,
            arch=None if capability is None else 10 * capability[0] + capability[1],
            driver=_text(self._ask(lib.nvmlSystemGetDriverVersion)),
            driver_cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        )

    def has_nvlink_to(self, other: Sensors) -> bool:
        """Return whether NVLink joins this card and another, through a switch or not."""
        lib = self._library
        status = self._ask(
            lambda: lib.nvmlDeviceGetP2PStatus(self._handle, other._handle, lib.NVML_P2P_CAPS_INDEX_NVLINK)
        )
        return status is not None and status == lib.NVML_P2P_STATUS_OK

    def links_up(self, most: int) -> int:
        """Return how many of this card's NVLinks, ``most`` at most, are up."""
        lib, card = self._library, self._handle
        states = [self._ask(functools.partial(lib.nvmlDeviceGetNvLinkState, card, link)) for link in range(most)]
        return states.count(1)

    def _throttle_mask(self) -> int:
        try:
            return int(self._library.nvmlDeviceGetCurrentClocksEventReasons(self._handle))
        except self._library.NVMLError:  # the name before driver 535
            return int(self._library.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Return the answer, or None where this card or this user gets none."""
        try:
            return question()
        except self._library.NVMLError:
            return None


AnySensors = Sensors | NoSensors


def open_sensors(uuid: str | None = None, *, library: Any = None) -> AnySensors:
    """Return the sensors of the card with this UUID (with or without ``GPU-``), or of the only card."""
    library = library or _library()
    if library is None:
        return NoSensors(_NOT_INSTALLED)
    try:
        library.nvmlInit()
        handle = _find(library, uuid)
    except library.NVMLError as error:
        return NoSensors(f"NVML says: {error}")
    if handle is None:
        return NoSensors("NVML shows several GPUs and none with the UUID that PyTorch uses")
    return Sensors(library, handle)


def list_sensors(*, library: Any = None) -> list[Sensors] | NoSensors:
    """Return the sensors of every card that the driver shows; ``library`` stands in for ``pynvml``."""
    library = library or _library()
    if library is None:
        return NoSensors(_NOT_INSTALLED)
    try:
        library.nvmlInit()
        return [Sensors(library, library.nvmlDeviceGetHandleByIndex(at)) for at in range(library.nvmlDeviceGetCount())]
    except library.NVMLError as error:
        return NoSensors(f"NVML says: {error}")


def _library() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def _find(library: Any, uuid: str | None) -> Any:
    if uuid:
        try:
            return library.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        except library.NVMLError:
            pass  # a virtual machine may show PyTorch another UUID: with one card there is no doubt which it is
    return library.nvmlDeviceGetHandleByIndex(0) if library.nvmlDeviceGetCount() == 1 else None


def decode_throttle(mask: int) -> str:
    """Return the active throttle reasons of NVML's bit mask, joined by commas; an unknown bit as ``unknown_0x800``."""
    bits = (1 << position for position in range(mask.bit_length()))
    active = [bit for bit in bits if mask & bit and bit != _GPU_IDLE]
    return ",".join(THROTTLE_REASONS.get(bit, f"unknown_{bit:#x}") for bit in active)


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
