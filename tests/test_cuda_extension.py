"""CUDA extensions are built without a GPU and with torch's CPU build."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from flashmoe_science import cuda_extension

BINDING = """
#include <torch/extension.h>
void scale(float* x, int n);
torch::Tensor twice(torch::Tensor x) {
  TORCH_CHECK(x.is_cuda(), "x must be on a GPU");
  scale(x.data_ptr<float>(), x.numel());
  return x;
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("twice", &twice); }
"""
KERNEL = """
__global__ void scale_kernel(float* x, int n) { int i = threadIdx.x; if (i < n) x[i] *= 2; }
void scale(float* x, int n) { scale_kernel<<<1, 256>>>(x, n); }
"""
CALL = "import torch, my_scale\ntry:\n    my_scale.twice(torch.ones(3))\nexcept RuntimeError as why:\n    print(why)"

needs_nvcc = pytest.mark.needs("nvcc", bool(shutil.which("nvcc") and shutil.which("g++")), "builds with nvcc and g++")


@needs_nvcc
def test_an_extension_is_built_and_loads(tmp_path, monkeypatch):
    (tmp_path / "binding.cpp").write_text(BINDING)
    (tmp_path / "kernel.cu").write_text(KERNEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert cuda_extension.main(["my_scale", "binding.cpp", "kernel.cu", "--out", "build", "--", "-O1"]) == 0
    done = subprocess.run([sys.executable, "-c", CALL], cwd="build", capture_output=True, text=True, check=True)
    assert done.stdout.startswith("x must be on a GPU")


@needs_nvcc
@pytest.mark.parametrize(
    ("asked", "flags"),
    [
        ("8.9;9.0", ["-gencode=arch=compute_89,code=sm_89", "-gencode=arch=compute_90,code=sm_90"]),
        ("9.0 9.9", ["-gencode=arch=compute_90,code=sm_90"]),
        ("8.0; 9.0a", ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90a,code=sm_90a"]),
        ("9.0+PTX", ["-gencode=arch=compute_90,code=[sm_90,compute_90]"]),
    ],
)
def test_architectures_are_those_asked_for(monkeypatch, asked, flags):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", asked)
    assert cuda_extension.architecture_flags() == flags


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["my-scale", __file__], "name must be a name of Python, got 'my-scale'"),
        (["mine", "a.cu", __file__], "no such file: a.cu"),
    ],
)
def test_wrong_arguments_are_named(capsys, arguments, error):
    with pytest.raises(SystemExit):
        cuda_extension.main(arguments)
    assert error in capsys.readouterr().err


def test_a_missing_nvcc_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="nvcc is not on PATH: install the CUDA toolkit"):
        cuda_extension.architecture_flags()
