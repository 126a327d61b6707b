"""Worker tasks of a diagnosis: launches with their times and machine code, and one call under a profiler.

The subject's code is imported here only. Times of calls are ``gpu_tasks.measure``'s.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import CompileError, ProofError
from ...gpu.cuobjdump import Target
from ...gpu.machine_code import LOCAL_MEMORY_OPCODES, TENSOR_CORE_OPCODES, KernelCode, for_arch, read_cubin, read_file
from ..measure import arms as arms_module
from ..measure.arms import Loaded
from ..measure.gpu_tasks import capture_case
from ..measure.launches import CallTrace, match_names
from ..measure.measure import CudaTimer, Timer
from ..measure.rounds import Case
from ..measure.schedule import derived_seed
from ..subject.loading import load_entry, operator_of
from ..subject.operator import Operator, Planning, ours
from ..subject.subject import Subject
from ..worker import Emit
from .observations import Code, Kernel

_CALLS = 5  # whose median is a kernel's part of the time
_LARGEST_LIBRARY_BYTES = 512 << 20  # disassembling takes minutes beyond


def observe_launches(payload: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Record the launches of the subject in every case, with the times of each kernel, and read its machine code.

    ``payload`` has ``subject``, ``seed`` and ``cases`` with ``name``, ``problem`` and ``code``: whether to read machine
    code. ``emit`` gets ``{"event": "case", "case"}`` after each case.

    Returns:
        ``cases``, each with ``name``, ``kernels`` (``observations.Kernel``), ``reason`` where there are none, and
        ``capture``: the subject's arm of ``gpu_tasks.capture_case``.

    Raises:
        ProofError: no GPU, or the GPU context is lost.
    """
    if not torch.cuda.is_available():
        raise ProofError("no NVIDIA GPU here that torch can use", hint="`flashmoe doctor` says what this machine lacks")
    torch.set_grad_enabled(False)
    subject = Subject.from_json(payload["subject"])
    operator = operator_of(subject)
    before = mapped_libraries()
    (loaded,) = arms_module.load_arms(subject, operator, [])
    timer = CudaTimer()
    arch = int("".join(map(str, torch.cuda.get_device_capability())))
    cases = []
    for table in payload["cases"]:
        case = Case(table["name"], operator, operator.parse_case(table["problem"]))
        found = observe_case(case, subject, loaded, timer, seed=payload["seed"])
        if table["code"]:
            found["kernels"] = with_code(found["kernels"], subject, before, arch)
        cases.append(found)
        emit({"event": "case", "case": found})
    return {"cases": cases}


def observe_case(case: Case, subject: Subject, loaded: Loaded, timer: Timer, *, seed: int) -> dict[str, Any]:
    """Return the kernels of one call with the median of each one's time, and the capture of the gate launch."""
    captured = capture_case(case, subject, [loaded], timer, seed=seed)["arms"][0]
    found: dict[str, Any] = {"name": case.name, "kernels": [], "reason": captured["reason"], "capture": captured}
    if captured["status"] != "captured" or loaded.entry is None:
        return found
    try:
        inputs = case.operator.make_inputs(
            case.problem, seed=derived_seed(seed, case.name, "kernels"), device=timer.name
        )
        call = case.operator.bind(loaded.entry, case.problem, inputs)
        with timer.recording() as recording:
            for _ in range(_CALLS):
                with recording.call("call"):
                    call()
                    timer.synchronize()
    except Exception as error:  # noqa: BLE001 - what a subject raises is a result
        found["reason"] = arms_module.survive(error, loaded.name, timer)
        return found
    kernels = kernels_of(recording.calls("call"))
    found["kernels"] = [kernel.model_dump(mode="json") for kernel in kernels]
    found["reason"] = "" if kernels else "the profiler saw no kernel"
    return found


def kernels_of(calls: Sequence[CallTrace]) -> list[Kernel]:
    """Return the kernels of the last of ``calls``, each with the median of its time over all of them."""
    return [
        Kernel(**launch.model_dump(), seconds=statistics.median(call.seconds_of(launch) for call in calls))
        for launch in (calls[-1].launches() if calls else [])
    ]


def mapped_libraries() -> set[str]:
    """Return the libraries that this process holds in memory."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return set()
    paths = (line.split(maxsplit=5)[-1] for line in lines if "/" in line)
    return {path for path in paths if ".so" in Path(path).name}


def with_code(kernels: list[dict[str, Any]], subject: Subject, before: set[str], arch: int) -> list[dict[str, Any]]:
    """Add to each kernel the machine code that this process has of it: Triton's, or that of the subject's libraries."""
    if not kernels:
        return kernels
    problems: list[str] = []
    triton_codes = find_triton_code([table["name"] for table in kernels], arch, problems)
    library_codes: list[KernelCode] | None = None
    found = []
    for table in kernels:
        kernel = Kernel.model_validate(table)
        code = match_code(kernel, triton_codes)
        if code is None:
            if library_codes is None:  # disassembling is slow, and no Triton kernel needs it
                library_codes = find_library_code(subject, before, arch, problems)
            code = match_code(kernel, [(each, None, None) for each in library_codes])
        if code is None:
            why = problems[0] if problems else "it is neither Triton's nor in a library that the subject loaded"
            kernel = kernel.model_copy(update={"code_missing": why})
        else:
            kernel = kernel.model_copy(update={"code": summarize(code)})
        found.append(kernel.model_dump(mode="json"))
    return found


Candidate = tuple[KernelCode, int | None, int | None]  # with threads a block and shared memory, where they are known


def find_triton_code(names: Sequence[str], arch: int, problems: list[str]) -> list[Candidate]:
    """Return the machine code of the kernels called so that Triton compiled in this process, whoever asked for them."""
    compiler = sys.modules.get("triton.compiler")
    if compiler is None:
        return []
    candidates: list[Candidate] = []
    # issubclass looks at the type itself. isinstance asks objects for __class__, and some run code that warns or loads.
    for kernel in [each for each in gc.get_objects() if issubclass(type(each), compiler.CompiledKernel)]:
        cubin = kernel.asm.get("cubin")
        if not isinstance(cubin, bytes) or not any(match_names(kernel.metadata.name, name) for name in names):
            continue
        try:
            codes = for_arch(read_cubin(cubin, kernel.metadata.name), arch)
        except CompileError as error:
            problems.append(str(error).partition("\n")[0])
            continue
        threads = kernel.metadata.num_warps * 32
        candidates += [(code, threads, kernel.metadata.shared) for code in codes]
    return candidates


def find_library_code(subject: Subject, before: set[str], arch: int, problems: list[str]) -> list[KernelCode]:
    """Return the machine code in libraries that came with the subject: loaded with it, and not PyTorch's own."""
    own = str(subject.folder)
    frameworks = tuple(str(Path(path).parent) for path in (torch.__file__,))
    codes: list[KernelCode] = []
    for path in sorted(mapped_libraries()):
        is_new = path not in before and not path.startswith(frameworks) and "/nvidia/" not in path
        if not (is_new or path.startswith(own)) or not Path(path).exists():
            continue
        if Path(path).stat().st_size > _LARGEST_LIBRARY_BYTES:
            problems.append(f"{Path(path).name} is too large to disassemble")
            continue
        try:
            read = read_file(Path(path))
        except CompileError as error:
            problems.append(str(error).partition("\n")[0])
            continue
        fitting = for_arch(read, arch)
        codes += fitting
        if read and not fitting:
            made_for = ", ".join(dict.fromkeys(str(Target(code.arch, code.kind)) for code in read))
            problems.append(
                f"{Path(path).name} has machine code for {made_for} and none for sm_{arch}: what ran, the driver made "
                f"of its PTX; build it with -gencode=arch=compute_{arch},code=sm_{arch}"
            )
    return codes


def match_code(kernel: Kernel, candidates: Sequence[Candidate]) -> KernelCode | None:
    """Return the code that ``kernel`` ran: by its name, and among several of one name by what it was launched with."""
    named = [each for each in candidates if match_names(each[0].name, kernel.name)]

    def fits(each: Candidate) -> int:
        code, threads, shared = each
        agreements = (
            code.registers == kernel.registers,
            threads == kernel.threads,
            shared == kernel.shared_memory_bytes,
        )
        return sum(agreements)

    return max(named, key=fits)[0] if named else None


def summarize(code: KernelCode) -> Code:
    """Return what a diagnosis needs of a kernel's code."""
    return Code(
        registers=code.registers,
        local_bytes=code.local_bytes,
        instructions=sum(code.opcodes.values()),
        tensor_core=code.count(TENSOR_CORE_OPCODES),
        tensor_core_in_loops=code.count(TENSOR_CORE_OPCODES, in_loops=True),
        local=code.count(LOCAL_MEMORY_OPCODES),
        local_in_loops=code.count(LOCAL_MEMORY_OPCODES, in_loops=True),
    )


def plan_kernels(payload: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Return the kernels of a GPU that is not here: ours compiled, others as they are promised.

    ``payload`` has ``subject``, ``cases`` and ``gpu``; ``emit`` gets ``{"event": "case", "case"}`` after
    each. Returns ``cases``, each with ``name``, ``kernels``, and ``reason`` where there are none.
    """
    subject = Subject.from_json(payload["subject"])
    operator = operator_of(subject)
    cases = []
    promised = [] if subject.builtin else _promised_kernels(subject)
    for table in payload["cases"]:
        problem = operator.parse_case(table["problem"])
        if subject.builtin:
            kernels, reason = _own_kernels(operator, subject, problem, payload["gpu"])
        else:
            kernels, reason = promised, "" if promised else "no launch is promised: [launch] of a kernel.toml says it"
        cases.append({"name": table["name"], "kernels": [each.model_dump(mode="json") for each in kernels]})
        cases[-1]["reason"] = reason
        emit({"event": "case", "case": cases[-1]})
    return {"cases": cases}


def _own_kernels(operator: Operator, subject: Subject, problem: Any, gpu: str) -> tuple[list[Kernel], str]:
    if not isinstance(operator, Planning):
        return [], f"operator {operator.name} does not say what its kernels would be on a GPU that is not here"
    if (refusal := ours(operator).refusal(subject.name, problem, gpu)) is not None:
        return [], f"not served on {gpu}: {refusal}"
    try:
        planned = operator.planned_kernels(subject.name, problem, gpu)
    except CompileError as error:
        return [], str(error).partition("\n")[0]
    kernels = [
        Kernel(
            name=each.name,
            grid=each.grid,
            block=each.block,
            registers=each.code.registers,
            shared_memory_bytes=each.shared_memory_bytes,
            code=summarize(each.code),
        )
        for each in planned
    ]
    return kernels, ""


def _promised_kernels(subject: Subject) -> list[Kernel]:
    """Return the launches that a kernel.toml promises; gate build looks into the libraries that it makes."""
    return [
        Kernel(
            name=promise.pattern,
            grid=promise.grid,
            block=promise.block,
            shared_memory_bytes=promise.shared_memory_bytes,
            code_missing="not read without a GPU; `flashmoe show` of a run has registers and spills, from gate build",
        )
        for promise in subject.kernels
    ]


def call_once(payload: dict[str, Any]) -> None:
    """Make one call of one case between the marks that start and stop a profiler, in this process.

    Args:
        payload: ``subject``; ``case``, a table with ``problem``; ``seed``.
    """
    torch.set_grad_enabled(False)
    subject = Subject.from_json(payload["subject"])
    operator = operator_of(subject)
    problem = operator.parse_case(payload["case"]["problem"])
    inputs = operator.make_inputs(problem, seed=payload["seed"], device="cuda")
    call = operator.bind(load_entry(subject), problem, inputs)
    for _ in range(2):  # compile, tune, allocate
        call()
    torch.cuda.synchronize()
    profiler: Any = torch.cuda.profiler  # not typed
    profiler.start()
    call()
    torch.cuda.synchronize()
    profiler.stop()
