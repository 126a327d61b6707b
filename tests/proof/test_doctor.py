"""The checks of the doctor: with a driver that is made up, and on the machine at hand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flashmoe_science.proof.measure import doctor as module, nvml
from flashmoe_science.proof.measure.doctor import Check, examine, may_read_counters
from flashmoe_science.proof.subject.loading import load_operator
from flashmoe_science.proof.subject.registry import BUILTIN_OPERATORS

from .test_nvml import FakeNvml

LIST_SENSORS = nvml.list_sensors  # before a test replaces it


def use(monkeypatch, *, cuda="13.0", **answers):
    """Make NVML answer as a card with ``answers`` would, beside a torch that is built for ``cuda``."""
    library = FakeNvml(**answers)
    monkeypatch.setattr(nvml, "list_sensors", lambda: LIST_SENSORS(library=library))
    monkeypatch.setattr(module, "_torch", lambda: module._Torch("2.11.0", cuda))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def checks(monkeypatch, *names):
    monkeypatch.setattr(module, "_CHECKS", {name: module._CHECKS[name] for name in names})
    return {check.name: check for check in examine()}


@pytest.mark.parametrize(
    ("parameters", "is_root", "may"),
    [
        ("ResmanDebugLevel: 1\nRmProfilingAdminOnly: 1\n", False, False),
        ("RmProfilingAdminOnly: 1\n", True, True),
        ("RmProfilingAdminOnly: 0\n", False, True),
        ("ResmanDebugLevel: 1\n", True, None),
        (None, True, None),
    ],
)
def test_who_may_read_counters(parameters, is_root, may):
    assert may_read_counters(parameters, is_root=is_root) is may


def test_the_doctor_always_answers_and_every_trouble_has_a_hint():
    found = list(examine())
    assert {"python", "torch", "triton", "driver", "GPU", "nvcc", "commit"} <= {check.name for check in found}
    assert [check.name for check in found if check.ok is False and not check.hint] == []


def test_the_doctor_imports_neither_torch_nor_triton_nor_a_baseline():
    code = (
        "import sys; from flashmoe_science.proof.measure.doctor import BASELINES, examine; list(examine());"
        "print({'torch', 'triton', 'flash_attn', 'flashinfer', 'vllm', 'sqlalchemy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_package_of_a_baseline_is_looked_for():
    baselines = [each for name in BUILTIN_OPERATORS for each in load_operator(name).baselines().values()]
    packages = {each.distribution for each in baselines if hasattr(each, "distribution")}
    assert packages - {"torch", None} == set(module.BASELINES)


def test_a_check_that_breaks_does_not_hide_the_others(monkeypatch):
    def breaks():
        raise OSError("device gone")

    monkeypatch.setattr(module, "_CHECKS", {"first": breaks, "python": module._check_python})
    first, second = examine()
    assert (first.name, first.ok) == ("first", False)
    assert "OSError: device gone" in first.text
    assert second.ok is True


def test_no_driver_is_no_trouble(monkeypatch):
    use(monkeypatch, driver=False)
    found = checks(monkeypatch, "driver", "GPU")
    assert (found["driver"].ok, found["GPU"].ok) == (None, None)
    assert "without one everything but timing works" in found["driver"].hint


def test_a_gpu_that_this_torch_cannot_use_is_trouble(monkeypatch):
    use(monkeypatch, cuda=None)
    found = checks(monkeypatch, "GPU")["GPU"]
    assert found.ok is False
    assert "this torch is built without CUDA" in found.text


def test_a_healthy_gpu(monkeypatch):
    use(monkeypatch, CurrentClocksEventReasons=0)
    found = checks(monkeypatch, "driver", "GPU")
    assert found["driver"] == Check("driver", ok=True, text="580.159.04, serves CUDA up to 13.2")
    assert found["GPU"] == Check("GPU", ok=True, text="NVIDIA H200, sm_90, 141 GiB")
    assert found["clocks"] == Check("clocks", ok=True, text="SM 1965 MHz now, 1980 at most, 350 W of 700, 41 C")


def test_a_driver_older_than_torch_is_trouble(monkeypatch):
    use(monkeypatch, cuda="14.0")
    found = checks(monkeypatch, "driver")["driver"]
    assert found.ok is False
    assert found.hint == "update the driver, or install a torch that is built for CUDA 13"


def test_a_missing_package_is_trouble_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(module, "_torch", lambda: None)
    monkeypatch.setattr(module, "_distribution", lambda _: "")
    found = checks(monkeypatch, "torch", "triton")
    assert [(check.ok, check.hint.partition(";")[0]) for check in found.values()] == [
        (False, "pip install torch"),
        (False, "pip install triton"),
    ]
