"""Gate build for a library that a command makes: limits, needed programs, the command, and the library's kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from ...errors import CompileError
from ...gpu.binary import Binary, BinaryKernel, read_binary
from ...gpu.cuobjdump import find_cuobjdump
from ...gpu.specs import SPECS, GpuSpec, find_gpu
from ..subject.build_command import ARCH_LIST, known_gpus, run_build
from ..subject.failure_hints import explain_build
from ..subject.subject import KernelPromise, expand_paths
from ..text import counted, short_name
from .run import Outcome, Run, failed, first_of, not_possible

_MOST_THREADS = 1024  # of a block, on every architecture
_REGISTERS_OF_A_BLOCK = 65536  # on every architecture from sm_80 on
_WITHOUT_ASKING = 48  # KiB of shared memory a block, on every architecture
_SHOWN_LINES = 20


def targets(run: Run) -> list[GpuSpec]:
    """Return the GPUs that the library is for: those asked for, or those that the subject names, and the one here."""
    return known_gpus(run.request.gpus or run.subject.gpus, run.environment.gpu)


def broken_limits(run: Run) -> Outcome | None:
    """Compare the promises of each launch with the limits of a block, before anything is built."""
    problems, hint = [], ""
    for promise in run.subject.kernels:
        threads = _threads(promise)
        if threads is not None and threads > _MOST_THREADS:
            problems.append(
                f"{promise.pattern}: {threads} threads a block promised, at most {_MOST_THREADS} are possible"
            )
            hint = hint or "a block of fewer threads, each with more work"
        for spec in targets(run):
            limit, got = spec.shared_memory_per_block_bytes, promise.shared_memory_bytes
            if got is not None and got > limit:
                problems.append(
                    f"{promise.pattern}: {got} bytes of shared memory a block promised, {spec.name} has {limit}"
                )
                hint = hint or _fitting(got, spec)
    return failed(problems[0], hint=hint, details=problems) if problems else None


def _threads(promise: KernelPromise) -> int | None:
    return None if promise.block is None else promise.block[0] * promise.block[1] * promise.block[2]


def _fitting(needed: int, spec: GpuSpec) -> str:
    """Say what would fit ``spec``, and which GPUs have as much as is needed."""
    by_arch = {other.arch: other.name for other in reversed(SPECS.values())}
    others = [
        by_arch[arch] for arch in sorted(by_arch) if find_gpu(by_arch[arch]).shared_memory_per_block_bytes >= needed
    ]
    return (
        f"smaller tiles or fewer stages: a block of the {spec.name} can have "
        f"{spec.shared_memory_per_block_bytes // 1024} KiB, and {_WITHOUT_ASKING} KiB where the kernel does not ask "
        f"for more (cudaFuncSetAttribute); {needed / 1024:g} KiB fit {', '.join(others) or 'no GPU of those known'}"
    )


def run_build_command(run: Run, details: list[str]) -> Outcome | None:
    """Run the build command; return why the chain cannot go on, or None. Facts are added to ``details``."""
    subject = run.subject
    if subject.build_command is None:
        return None
    progress = run.progress
    built = run_build(subject, _wanted(run), progress.note, lambda text: progress.advance(0, 1, text))
    if built.missing:
        run.not_built = f"it was not built: {', '.join(built.missing)} is missing"
        return not_possible(built.lacks, hint=built.hint)
    result = built.result
    assert result is not None
    if not result.ok:
        output = run.hide_paths(result.output_tail)
        tail = output.strip().splitlines()[-_SHOWN_LINES:]
        said, hint = explain_build(output)
        hint = (
            hint
            or _HINT_OF_END.get(result.reason.partition(" ")[0], "")
            or ("its last lines are below" if tail else "")
        )
        return failed(f"the build command {result.reason}" + (f": {said}" if said else ""), hint=hint, details=tail)
    details.append(f"build command finished in {result.seconds:.1f} s")
    return None


# By the first word of how a command ended.
_HINT_OF_END = {
    "cannot": "is it installed, and on PATH? With [build] needs naming it, this gate is not possible here without it",
    "did": "[build] timeout_s gives it more time",
}


def _wanted(run: Run) -> list[GpuSpec]:
    """Return the GPUs to build for; none where none was named and one is here, or the caller has said it."""
    if run.request.gpus or run.subject.gpus:
        return targets(run)
    return [] if run.has_gpu or ARCH_LIST in os.environ else [find_gpu(name) for name in run.gpus]


def look_into(run: Run, details: list[str]) -> Outcome | str:
    """Read the libraries that were built, and compare their kernels with the promises, for every GPU wanted.

    Returns:
        Why the chain cannot go on, or what was found, as one line that may be empty. Facts are added to ``details``.
    """
    subject = run.subject
    if not subject.binaries:
        if subject.build_command is not None:
            details.append("nothing was looked into: [build] binaries names what the command makes")
        return ""
    paths, missing = expand_paths(subject.folder, subject.binaries)
    if missing:
        return failed(f"the build made no {', '.join(missing)}", hint="[build] binaries names the files that it makes")
    if find_cuobjdump() is None:
        details.append(
            "nothing was looked into: cuobjdump is not here, which comes with the CUDA toolkit and with Triton"
        )
        return ""
    try:
        read = [read_binary(subject.folder / path) for path in paths]
    except CompileError as error:
        return failed(str(error).partition("\n")[0], hint=error.hint or "[build] binaries names what holds kernels")
    library = Binary(tuple(k for binary in read for k in binary.kernels), tuple(t for b in read for t in b.ptx))
    problems: list[str] = []
    notes: list[str] = []
    wanted = targets(run)
    for spec in wanted:
        _compare(library, spec, subject.kernels, problems, notes)
    details += [*_by_target(library), *dict.fromkeys(notes)][:_SHOWN_LINES]
    if problems:
        return failed(first_of(problems), hint=_mend(problems[0], wanted), details=[*problems, *details])
    return _sum_up(library, wanted) + ("; " + first_of(list(dict.fromkeys(notes))) if notes else "")


def _compare(
    library: Binary, spec: GpuSpec, promises: Sequence[KernelPromise], problems: list[str], notes: list[str]
) -> None:
    """Add to ``problems`` why ``spec`` cannot run a promised launch; add remarks to ``notes``."""
    if not any(target.serves(spec.arch) for target in library.targets):
        has = ", ".join(map(str, library.targets))
        problems.append(f"there is no code for {spec.name} (sm_{spec.arch}); what there is: {has}")
        return
    kernels = library.kernels_for(spec.arch)
    fitting = [[k for k in kernels if fnmatchcase(k.name, promise.pattern)] for promise in promises]
    if kernels and promises and not any(fitting):
        has = ", ".join(dict.fromkeys(short_name(kernel.name) for kernel in kernels))
        problems.append(f"no kernel fits {' or '.join(promise.pattern for promise in promises)}; what there is: {has}")
        return
    for promise, named in zip(promises, fitting, strict=True):
        reasons = [reason for kernel in named if (reason := _refusal(promise, kernel, spec))]
        if reasons and len(reasons) == len(named):
            problems.append(reasons[0])
        else:
            notes += [f"{reason}: should it run, gate launch will say so on a GPU" for reason in reasons]


def _refusal(promise: KernelPromise, kernel: BinaryKernel, spec: GpuSpec) -> str:
    """Return why ``kernel`` cannot be launched as promised, or an empty text."""
    threads, name = _threads(promise), short_name(kernel.name).partition("<")[0]
    if threads is not None and kernel.max_threads is not None and threads > kernel.max_threads:
        return f"{name} takes at most {kernel.max_threads} threads a block (__launch_bounds__), {threads} are promised"
    static = kernel.shared_memory_bytes
    if promise.shared_memory_bytes is not None and static > promise.shared_memory_bytes:
        got = promise.shared_memory_bytes
        return f"{name} has {static} bytes of static shared memory a block, and {got} in all are promised"
    if threads is not None:
        warps, registers = -(-threads // 32), -(-kernel.registers // 8) * 8  # both are given out in such steps
        if (total := warps * 32 * registers) > _REGISTERS_OF_A_BLOCK:
            return (
                f"{name} takes {kernel.registers} registers a thread on {spec.name}: {threads} threads need {total}, "
                f"and a block has {_REGISTERS_OF_A_BLOCK}"
            )
    return ""


def _mend(problem: str, wanted: Sequence[GpuSpec]) -> str:
    """Return what to do about the first problem of a library."""
    if "there is no code" in problem:
        archs = ";".join(f"{spec.arch // 10}.{spec.arch % 10}" for spec in wanted)
        return f"the build command gets TORCH_CUDA_ARCH_LIST={archs}: pass -gencode for each to nvcc"
    if "no kernel fits" in problem:
        return "is the source of the kernel in the build, and is the pattern in [[launch.kernels]] its name?"
    if "__launch_bounds__" in problem:
        return "__launch_bounds__ must allow the threads that are launched"
    if "registers" in problem:
        return "__launch_bounds__(threads) makes the compiler keep within what a block has"
    return "shared_memory_bytes counts static and dynamic shared memory together"


def _by_target(library: Binary) -> Iterator[str]:
    """Yield what each kernel takes, a line for each architecture and kernel."""
    for kernel in sorted(library.kernels, key=lambda kernel: (kernel.target.arch, kernel.name)):
        most = f", at most {kernel.max_threads} threads a block" if kernel.max_threads else ""
        stack = f", {kernel.stack_bytes} bytes of stack" if kernel.stack_bytes else ""
        yield (
            f"{kernel.target}: {short_name(kernel.name)}: {kernel.registers} registers a thread{stack}, "
            f"{kernel.shared_memory_bytes} bytes of static shared memory{most}"
        )
    if library.ptx:
        yield f"PTX, which a driver compiles when it loads it: {', '.join(map(str, library.ptx))}"


def _sum_up(library: Binary, wanted: Sequence[GpuSpec]) -> str:
    names = {kernel.name for kernel in library.kernels}
    archs = " and ".join(map(str, library.targets)) + (f" ({', '.join(s.name for s in wanted)})" if wanted else "")
    if not names:
        return f"PTX alone for {archs}"
    stacks = [kernel.stack_bytes for kernel in library.kernels if kernel.stack_bytes]
    stack = f"{len(stacks)} with a stack of up to {max(stacks)} bytes" if stacks else "no spills"
    return (
        f"{counted(len(names), 'kernel')} for {archs}: at most "
        f"{max(kernel.registers for kernel in library.kernels)} registers a thread, "
        f"{max(kernel.shared_memory_bytes for kernel in library.kernels)} bytes static shared memory a block, {stack}"
    )
