"""What a failed build or import means is said, with what mends it. The messages are those of real tools."""

from __future__ import annotations

import pytest

from flashmoe_science.proof.subject.failure_hints import explain_build, explain_import, without_own_frames


@pytest.mark.parametrize(
    ("message", "reason", "hint"),
    [
        (
            "/a/b/ext.so: undefined symbol: _ZN5story2v26launchI13__nv_bfloat16EE9cudaErrorRKNS_4ArgsE",
            "ext.so does not load: undefined symbol: cudaError story::v2::launch<__nv_bfloat16>(story::Args const&)",
            "add `template cudaError story::v2::launch<__nv_bfloat16>(story::Args const&);` to the .cu file",
        ),
        (
            "/a/ext.so: undefined symbol: _ZN3c106detail14torchCheckFailEPKcS2_jRKSs",
            "undefined symbol: c10::detail::torchCheckFail(char const*",
            "built against another PyTorch",
        ),
        ("/a/ext.so: undefined symbol: _ZN5story6attendEv", "symbol: story::attend()", "is its source in the build"),
        ("/a/ext.so: undefined symbol: cudaLaunchKernel", "symbol: cudaLaunchKernel", "-lcudart"),
        ("/a/ext.so: undefined symbol: PyUnicode_AsUTF8", "PyUnicode_AsUTF8", "another Python"),
        (
            "libc10_cuda.so: cannot open shared object file: No such file or directory",
            "libc10_cuda.so is not found",
            "import torch before the extension",
        ),
        (
            "dynamic module does not define module export function (PyInit_ext)",
            "the library has no PyInit_ext",
            "must be ext",
        ),
        ("No module named 'ext'", "ModuleNotFoundError: No module named 'ext'", "python_path"),
        ("something else", "ImportError: something else", ""),
    ],
)
def test_a_failed_import_is_explained(message, reason, hint):
    said, mend = explain_import(ImportError(message))
    assert reason in said
    assert hint in mend
    assert bool(hint) == bool(mend)


def test_the_loaders_own_error_is_found_behind_another():
    # torch.ops.load_library raises so.
    outer = OSError("Could not load this library: /a/ext.so")
    outer.__cause__ = OSError("/a/ext.so: undefined symbol: _ZN5story6attendEv")
    assert explain_import(outer)[0].startswith("ext.so does not load: undefined symbol: story::attend()")


@pytest.mark.parametrize(
    ("output", "line", "hint"),
    [
        (
            "ptxas error   : Entry function 'k' uses too much shared data (0x28000 bytes, 0xc000 max)\nmore",
            "ptxas error   : Entry function 'k' uses too much shared data (0x28000 bytes, 0xc000 max)",
            "smaller tiles, or dynamic shared memory",
        ),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_70'", "nvcc fatal", "this nvcc knows no compute_70"),
        ("x\na.cpp:1:10: fatal error: Python.h: No such file or directory", "a.cpp:1:10", "python3-dev"),
        ("/usr/bin/ld: cannot find -lc10_cuda: No such file", "/usr/bin/ld: cannot find", "is a CPU build"),
        ("a.cu(3): error: expected a ';'\n1 error detected", "a.cu(3): error: expected a ';'", ""),
        ("nothing of note", "", ""),
    ],
)
def test_a_failed_build_is_explained(output, line, hint):
    said, mend = explain_build(output)
    assert said.startswith(line)
    assert hint in mend
    assert bool(hint) == bool(mend)


CRASH = """\
Fatal Python error: Segmentation fault
Thread 0x00007f1d25cce6c0 (most recent call first):
  File "flashmoe_science/proof/worker.py", line 367 in watch
  File "<python>/lib/python3.11/threading.py", line 982 in run
Current thread 0x00007f1d26aa8b80 (most recent call first):
  File "./mod_crash.py", line 3 in attend
  File "flashmoe_science/proof/check.py", line 133 in __call__
  File "<string>", line 1 in <module>"""

TRACEBACK = """\
Traceback (most recent call last):
  File "flashmoe_science/proof/worker.py", line 335, in main
    answer = {"result": function(request["payload"])}
                        ^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "<python>/lib/python3.11/importlib/__init__.py", line 126, in import_module
    return _bootstrap._gcd_import(name[level:], package, level)
  File "./mod_raises.py", line 1, in <module>
    raise RuntimeError("no license")
RuntimeError: no license"""


def test_of_a_stack_the_frames_of_the_subject_are_shown():
    assert without_own_frames(CRASH.splitlines()) == [
        "Fatal Python error: Segmentation fault",
        "Current thread 0x00007f1d26aa8b80 (most recent call first):",
        '  File "./mod_crash.py", line 3 in attend',
    ]
    assert without_own_frames(TRACEBACK.splitlines()) == [
        "Traceback (most recent call last):",
        '  File "./mod_raises.py", line 1, in <module>',
        '    raise RuntimeError("no license")',
        "RuntimeError: no license",
    ]


def test_a_stack_of_our_own_and_what_is_no_stack_are_shown_whole():
    own = [line for line in TRACEBACK.splitlines() if "mod_raises" not in line and "raise " not in line]
    assert without_own_frames(own) == own
    assert without_own_frames(["error: no nvcc", "    indented"]) == ["error: no nvcc", "    indented"]
