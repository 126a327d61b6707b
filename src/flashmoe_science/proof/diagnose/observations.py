"""The observations of a diagnosis, and the findings that follow from them. Plain JSON values.

None means that something is not known; ``Observations.missing`` says why, by the name of what is missing.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

from pydantic import Field

from ..records.evidence import Environment, Gate, Model, Work

SCHEMA_VERSION = 1

# Nsight Compute's names of the counters that are read.
DURATION = "gpu__time_duration.sum"
READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
BANDWIDTH = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
ISSUE = "smsp__issue_active.avg.pct_of_peak_sustained_active"
LANES = "smsp__thread_inst_executed_per_inst_executed.ratio"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
METRICS = (
    DURATION, READ, WRITTEN, BANDWIDTH, WARPS, TENSOR, ISSUE, LANES, CONFLICTS, WAVEFRONTS, "lts__t_bytes.sum",
)  # fmt: skip


class Times(Model):
    """Medians of one call in seconds."""

    kernel: float | None = None
    graph: float | None = None
    wall: float | None = None

    @property
    def device(self) -> float | None:
        """What the GPU needs for one call: the graph's time or that of the kernels, whichever is less.

        A graph adds launches between kernels; the profiler's sum counts twice what overlaps from call to call.
        """
        return min((t for t in (self.kernel, self.graph) if t is not None), default=None)

    @property
    def call(self) -> float | None:
        """What a caller waits for: wall time, or the GPU's where that was not taken."""
        return self.device if self.wall is None else max(self.wall, self.device or 0.0)


class Code(Model):
    """The machine code that a kernel ran."""

    registers: int  # a thread
    local_bytes: int  # a thread: stack and local memory
    instructions: int
    tensor_core: int  # matrix instructions among them
    tensor_core_in_loops: int
    local: int  # loads and stores of local memory
    local_in_loops: int


class Kernel(Model):
    """One kernel of the call: how it was launched, what it holds, and what its counters say."""

    name: str
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    registers: int = 0  # a thread; 0: not known
    shared_memory_bytes: int | None = None  # a block, static and dynamic
    count: int = 1  # launches in one call
    seconds: float | None = None  # of all its launches in one call, by the profiler
    code: Code | None = None
    code_missing: str = ""  # why there is no code
    counters: dict[str, float] = Field(default_factory=dict)  # metric -> value, of all its launches in one call

    @property
    def blocks(self) -> int | None:
        """Blocks of one launch."""
        return None if self.grid is None else self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads(self) -> int | None:
        """Threads of one block."""
        return None if self.block is None else self.block[0] * self.block[1] * self.block[2]


class Scaled(Model):
    """The same call with one axis of its problem longer."""

    case: str
    axis: str
    kind: Literal["sequential", "parallel"]
    meaning: str
    factor: int
    seconds: float | None = None  # the GPU's, by the clock that ``Observations.clock`` names
    blocks: int | None = None  # of the kernel that takes most of the time
    reason: str = ""  # why there is no time


class Sensors(Model):
    """The GPU's sensors, an entry for every round."""

    sm_clock_mhz: list[int | None] = Field(default_factory=list)
    throttle: list[str | None] = Field(default_factory=list)
    max_sm_clock_mhz: int | None = None


class TimedBaseline(Model):
    """A baseline in the same case, to see what is possible."""

    name: str
    times: Times


class Chip(Model):
    """What limits a call on one GPU."""

    name: str
    arch: int
    sms: int
    l2_bytes: int
    bandwidth_bytes_per_s: float
    flops_per_s: float  # at the rate that bounds this problem
    plain_flops_per_s: float  # of fp32 without tensor cores
    threads_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int
    shared_memory_per_sm_bytes: int
    shared_memory_per_block_bytes: int


class Observations(Model):
    """All that was gathered about one call."""

    case: str
    problem: dict[str, Any]
    work: Work
    chip: Chip | None = None
    times: Times = Times()
    clock: Literal["graph", "kernel"] | None = None  # which time the experiments on longer axes compare
    clock_seconds: float | None = None  # of this call, by that clock
    dram_bytes: float = 0.0  # the fewest that one call must move from memory, L2 taken off
    kernels: list[Kernel] = Field(default_factory=list)
    scaled: list[Scaled] = Field(default_factory=list)
    sensors: Sensors = Sensors()
    baselines: list[TimedBaseline] = Field(default_factory=list)
    promised: bool = False  # whether launches were promised
    broken_promises: list[str] | None = None  # what ran otherwise than promised; None: not captured
    missing: dict[str, str] = Field(default_factory=dict)  # what -> why

    def why_missing(self, *names: str) -> str:
        """Return why the first of ``names`` that is missing is so."""
        return next((self.missing[name] for name in names if name in self.missing), "it was not observed")


class Status(str, Enum):
    """What an experiment showed of a hypothesis."""

    CONFIRMED = "confirmed"
    RULED_OUT = "ruled out"
    CANNOT_TELL = "cannot tell"


class Finding(Model):
    """What became of one hypothesis about one call."""

    hypothesis: str
    status: Status
    explanation: str  # one or two sentences with the numbers that decide
    experiment: str  # what was compared with what
    part: Literal["host", "device"] = "device"  # whose time it can explain
    share: float | None = None  # of one call's time that it is shown to explain; None: not known
    advice: str = ""  # what to try
    most: float | None = None  # the most that this can give: times as fast, an upper bound
    bound: str = ""  # how that bound is computed


class CaseDiagnosis(Model):
    """One call: what was observed, and what follows."""

    observations: Observations
    findings: list[Finding] = Field(default_factory=list)  # in a fixed order
    causes: list[str] = Field(default_factory=list)  # hypotheses confirmed, by the time that each explains
    overlap: str = ""  # how far the shares of the causes may be added


class Diagnosis(Model):
    """A whole diagnosis: it explains times, and is no evidence of any."""

    schema_version: int = SCHEMA_VERSION
    subject: str
    command: str = ""
    environment: Environment | None = None
    failed: Gate | None = None  # what had to be possible before anything could be observed
    cases: list[CaseDiagnosis] = Field(default_factory=list)
