"""NVML, with a fake library: what a card reports, what it refuses, and no driver at all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flashmoe_science.proof.measure import nvml


class FakeNvml:
    """Stands in for the module ``pynvml``. A quantity set to None is refused, as a card without that sensor does."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        """What the library raises for a missing driver, card or sensor."""

    def __init__(self, *, cards=("GPU-aaaa",), driver=True, **answers):
        self.cards = cards
        self.driver = driver
        self.answers = {
            "PowerUsage": 350_500,
            "ClockInfo": 1965,
            "Temperature": 41,
            "CurrentClocksEventReasons": 0x4,
            "CurrentClocksThrottleReasons": 0x8,
            "EnforcedPowerLimit": 700_000,
            "MemoryInfo": SimpleNamespace(total=141 << 30),
            "MaxClockInfo": 1980,
            "Name": b"NVIDIA H200",
            "UUID": "GPU-aaaa",
            "CudaComputeCapability": (9, 0),
            **answers,
        }

    def nvmlInit(self):  # noqa: N802 - NVML's name
        if not self.driver:
            raise self.NVMLError("NVML Shared Library Not Found")

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid not in self.cards:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return "580.159.04"

    def nvmlSystemGetCudaDriverVersion_v2(self):  # noqa: N802
        return 13020

    def __getattr__(self, name):
        def answer(*_):
            found = self.answers[name.removeprefix("nvmlDeviceGet")]
            if found is None:
                raise self.NVMLError("Not Supported")
            return found

        return answer


def test_a_reading_has_clock_power_temperature_and_reasons():
    sensors = nvml.open_sensors("aaaa", library=FakeNvml())
    assert sensors.read() == nvml.Reading(sm_clock_mhz=1965, power_w=350.5, temperature_c=41, throttle="sw_power_cap")
    assert sensors.reason == ""


def test_a_sensor_that_is_missing_does_not_hide_the_others():
    reading = nvml.open_sensors(library=FakeNvml(PowerUsage=None, Temperature=None)).read()
    assert reading == nvml.Reading(sm_clock_mhz=1965, power_w=None, temperature_c=None, throttle="sw_power_cap")


def test_no_driver_is_a_normal_state_with_a_reason():
    sensors = nvml.open_sensors("aaaa", library=FakeNvml(driver=False))
    assert sensors.read() == nvml.Reading()
    assert sensors.limits() == nvml.Limits()
    assert sensors.reason == "NVML says: NVML Shared Library Not Found"


def card(sensors):
    assert isinstance(sensors, nvml.Sensors), sensors.reason
    return sensors._handle


def test_the_card_is_found_by_uuid_and_never_guessed_among_several():
    two = FakeNvml(cards=("GPU-aaaa", "GPU-bbbb"))
    assert card(nvml.open_sensors("GPU-bbbb", library=two)) == "GPU-bbbb"
    assert card(nvml.open_sensors("bbbb", library=two)) == "GPU-bbbb"
    assert "several GPUs" in nvml.open_sensors("cccc", library=two).reason
    assert "several GPUs" in nvml.open_sensors(None, library=two).reason
    assert card(nvml.open_sensors("cccc", library=FakeNvml())) == "GPU-aaaa"


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (0, ""),
        (0x1, ""),  # idle
        (0x4 | 0x1, "sw_power_cap"),
        (0x20 | 0x4, "sw_power_cap,sw_thermal"),
        (0x8 | 0x40 | 0x80, "hw_slowdown,hw_thermal,hw_power_brake"),
        (0x800, "unknown_0x800"),
    ],
)
def test_throttle_reasons_are_decoded(mask, text):
    assert nvml.decode_throttle(mask) == text


def test_the_bits_are_those_of_the_library():
    pynvml = pytest.importorskip("pynvml")
    assert pynvml.nvmlClocksEventReasonGpuIdle == 0x1
    assert nvml.decode_throttle(pynvml.nvmlClocksEventReasonSwPowerCap) == "sw_power_cap"
    assert nvml.decode_throttle(pynvml.nvmlClocksEventReasonHwThermalSlowdown) == "hw_thermal"
    assert nvml.decode_throttle(pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown) == "hw_power_brake"
    assert nvml.decode_throttle(pynvml.nvmlClocksEventReasonSwThermalSlowdown) == "sw_thermal"
