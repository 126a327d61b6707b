"""Nsight Compute: how it is asked, and how its answers are read. A stand-in writes what ncu would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashmoe_science.proof.diagnose.counters import attach, parse, read_counters
from flashmoe_science.proof.diagnose.observations import METRICS
from flashmoe_science.proof.processes import TaskResult

from .made_up import kernel

HEAD = (
    '"ID","Process ID","Kernel Name","Context","Stream","gpu__time_duration.sum","dram__bytes_read.sum",'
    '"dram__throughput.avg.pct_of_peak_sustained_elapsed","lts__t_bytes.sum"'
)
PRINTED = f"""==PROF== Connected to process 1
{HEAD}
"","","","","","nsecond","byte","%","byte"
"0","1","attend_kernel<(int)64>(const float *, int)","1","7","3,000","1,048,576","40.5","n/a"
"1","1","merge(float*)","1","7","1,000","2048","2","4096"
"2","1","merge(float*)","1","7","3,000","1024","6","4096"
==PROF== Disconnected
"""


def test_the_csv_of_ncu_is_read_without_units_messages_and_what_it_could_not_read():
    first, *merges = parse(PRINTED)
    assert first.name == "attend_kernel<(int)64>(const float *, int)"
    assert first.values == {
        "gpu__time_duration.sum": 3000.0,
        "dram__bytes_read.sum": 1048576.0,
        "dram__throughput.avg.pct_of_peak_sustained_elapsed": 40.5,
    }
    assert [row.values["lts__t_bytes.sum"] for row in merges] == [4096, 4096]
    assert parse("==ERROR== no kernels were profiled\n") == []


STORY = "void story::v2::attend_kernel<__half>(story::Args)"
MANGLED = "_ZN5story2v213attend_kernelI6__halfEEvNS_4ArgsE"


def printed_by_2025(name, grid="(8, 1, 1)", block="(384, 1, 1)"):
    """Return what ncu 2025.3 writes of one launch with ``--csv --page raw --metrics``: all columns are quoted."""
    return f"""==PROF== Connected to process 4242 (/usr/bin/python3.12)
==PROF== Profiling "{name}" - 0: 0%....50%....100% - 3 passes
==PROF== Disconnected from process 4242
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"dram__bytes_read.sum","gpu__time_duration.sum","l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
"","","","","","","","","","","","byte","ns",""
"0","4242","python3.12","127.0.0.1","{name}","1","7","{block}","{grid}","0","9.0","192,512","1,293,408","12,288"
""".replace("\\\n", "")


@pytest.mark.parametrize(
    "name",
    [
        MANGLED,
        STORY,
    ],
)
def test_a_kernel_is_found_whichever_way_ncu_writes_its_name(name):
    (found,), why = attach([kernel(8, name=STORY, block=(384, 1, 1))], parse(printed_by_2025(name)))
    assert why == ""
    assert found.counters == {
        "dram__bytes_read.sum": 192512,
        "gpu__time_duration.sum": 1293408,
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": 12288,
    }


def test_sums_are_added_and_percentages_weighted_by_time():
    kernels = [kernel(8, name="void attend_kernel<64>(float const*, int)"), kernel(4, name="merge(float*)", count=2)]
    (attend, merge), why = attach(kernels, parse(PRINTED))
    assert why == ""
    assert attend.counters["dram__bytes_read.sum"] == 1048576
    assert merge.counters["dram__bytes_read.sum"] == 3072
    assert merge.counters["dram__throughput.avg.pct_of_peak_sustained_elapsed"] == pytest.approx(5.0)
    assert "lts__t_bytes.sum" not in attend.counters


class Ncu:
    """Stands in for running the program: answers in turn, and keeps what it was asked."""

    def __init__(self, *answers, ok=True, tail=""):
        self.answers, self.ok, self.tail = list(answers), ok, tail
        self.asked: list[list[str]] = []

    def __call__(self, argv, *, cwd, timeout_s):
        self.asked.append(list(argv))
        log = Path(argv[argv.index("--log-file") + 1])
        log.write_text(self.answers.pop(0))
        request = json.loads(Path(argv[argv.index("-c") + 2]).read_text())
        assert request["case"] == {"problem": {"rows": 8}}
        return TaskResult(self.ok, {} if self.ok else None, "" if self.ok else "exited with status 1", 1.0, self.tail)


PAYLOAD = {"subject": {}, "case": {"problem": {"rows": 8}}, "seed": 1}
KERNELS = [kernel(8, name="void attend_kernel<64>(float const*, int)")]


def test_ncu_leaves_the_clocks_alone_and_profiles_one_call():
    ncu = Ncu(PRINTED)
    found, why = read_counters(PAYLOAD, KERNELS, run=ncu, ncu="ncu")
    assert (why, found[0].counters["gpu__time_duration.sum"]) == ("", 3000)
    (argv,) = ncu.asked
    assert argv[argv.index("--clock-control") + 1] == "none"
    assert argv[argv.index("--profile-from-start") + 1] == "off"
    assert argv[argv.index("--print-kernel-base") + 1] == "mangled"  # demangled names come simplified
    assert set(argv[argv.index("--metrics") + 1].split(",")) == set(METRICS)


def test_a_metric_that_this_ncu_does_not_know_is_left_out_and_the_rest_asked_again():
    ncu = Ncu("==ERROR== Failed to find metric lts__t_bytes.sum\n", PRINTED)
    found, why = read_counters(PAYLOAD, KERNELS, run=ncu, ncu="ncu")
    assert (why, len(ncu.asked)) == ("", 2)
    assert found[0].counters
    again = ncu.asked[1]
    assert "lts__t_bytes.sum" not in again[again.index("--metrics") + 1]


@pytest.mark.parametrize(
    ("text", "tail", "why"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", "", "this user may not read"),
        ("==ERROR== LibraryNotLoaded\n", "", "ncu LibraryNotLoaded"),
        ("", "Traceback", "ncu exited with status 1"),
    ],
)
def test_without_counters_there_is_a_reason(text, tail, why):
    found, said = read_counters(PAYLOAD, KERNELS, run=Ncu(text, ok=False, tail=tail), ncu="ncu")
    assert found == KERNELS
    assert said.startswith(why)
