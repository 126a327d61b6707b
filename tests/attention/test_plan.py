"""What ``plan_attention`` decides, and what it says about it. No GPU and no Triton."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies

import flashmoe_science
from flashmoe_science import InputError, UnsupportedError
from flashmoe_science.attention.forward.plan import plan_attention
from flashmoe_science.attention.forward.plan_sm90 import HOPPER_ROWS
from flashmoe_science.attention.forward.short_plan import short_shared_bytes
from flashmoe_science.attention.forward.triton_plan import MERGE_ROWS, share_keys
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.attention.tiles import ForwardConfig, HopperConfig, Plan, ShortConfig
from flashmoe_science.gpu import planning
from flashmoe_science.gpu.planning import PlannedLaunch
from flashmoe_science.gpu.specs import SPECS

from ..proof.processes import python_path

H200, L4, A100, B200 = SPECS["H200"], SPECS["L4"], SPECS["A100"], SPECS["B200"]


def make_problem(batch=1, heads=4, seqlen_q=128, head_dim=64, dtype="fp16", **more) -> AttentionProblem:
    sizes = {"heads_kv": heads, "seqlen_k": seqlen_q, "head_dim_v": head_dim, **more}
    return AttentionProblem(batch=batch, heads=heads, seqlen_q=seqlen_q, head_dim=head_dim, dtype=dtype, **sizes)


LARGE = make_problem(4, 16, 4096, 128, causal=True)
FEW_ROWS = make_problem(1, 2, 70, 64, seqlen_k=4096)


def test_a_small_problem_is_served_in_one_pass():
    plan = plan_attention(make_problem(1, 1, 128, 64), H200)
    assert plan.kernel == "forward_short_gluon"
    assert plan.config == ShortConfig(block_m=16, block_n=32, key_groups=4, num_warps=4)
    assert plan.launches == (PlannedLaunch("_forward_short_kernel", (8, 1, 1), (128, 1, 1)),)
    assert plan.reason == "128 keys fit one pass, and the grid is at most two blocks an SM"


def test_rows_that_more_than_fill_the_gpu_take_tiles_of_32():
    plan = plan_attention(make_problem(10, 4, 128, 64), H200)
    assert plan.kernel == "forward_short_gluon"
    assert plan.config == ShortConfig(block_m=32, block_n=64, key_groups=2, num_warps=4)
    assert plan.launches[0].grid == (4, 4, 10)


@pytest.mark.parametrize(
    ("heads", "keys", "groups"), [(4, 128, 4), (24, 128, 2), (4, 256, 4), (24, 256, 4), (40, 128, 2), (40, 256, 4)]
)
def test_groups_of_warps_share_the_keys_of_a_short_problem(heads, keys, groups):
    """Up to 128 keys, two groups where four tiles of 16 rows more than fill the GPU; four otherwise."""
    plan = plan_attention(make_problem(2, heads, 64, 64, seqlen_k=keys), H200)
    assert isinstance(plan.config, ShortConfig)
    assert (plan.config.key_groups, plan.config.block_n) == (groups, keys // groups)


@pytest.mark.parametrize("dims", [(64, 128), (128, 64)], ids=str)
def test_the_wider_of_keys_and_values_decides_the_tile(dims):
    problem = make_problem(4, 16, 4096, dims[0], head_dim_v=dims[1], causal=True)
    assert plan_attention(problem, A100).config == plan_attention(LARGE, A100).config


def test_a_large_problem_streams_over_the_keys():
    plan = plan_attention(LARGE, A100)
    assert plan.kernel == "forward_triton"
    assert isinstance(plan.config, ForwardConfig)
    assert (plan.config.block_m, plan.config.num_splits) == (128, 1)
    assert plan.launches == (PlannedLaunch("_forward_kernel", (4096 // 128 * 64, 1, 1), (256, 1, 1)),)
    assert "passed over (it serves at most 512 keys)" in plan.reason
    assert plan.reason.endswith("2048 row tiles of 128 fill 108 SMs")


def test_tiles_that_leave_a_few_sms_idle_are_not_said_to_fill_them():
    """The keys would do for two shares, and are split only where fewer SMs have a tile."""
    plan = plan_attention(make_problem(1, 126, 60, 80, dtype="bf16", seqlen_k=1024), B200)
    assert isinstance(plan.config, ForwardConfig)
    assert plan.config.num_splits == 1
    assert plan.reason.endswith(
        "126 row tiles of 64 leave 22 of 148 SMs idle, and the keys are not split where 80% have one"
    )


def test_more_than_two_blocks_an_sm_are_left_to_the_streaming_kernel():
    for gpu, streaming in ((H200, "forward_gluon_sm90"), (A100, "forward_triton")):
        two_an_sm = gpu.sms * 2 // 4  # sequences of four tiles of 32 rows
        assert plan_attention(make_problem(two_an_sm, 1, 128, 64), gpu).kernel == "forward_short_gluon"
        plan = plan_attention(make_problem(two_an_sm + 1, 1, 128, 64), gpu)
        assert plan.kernel == streaming
        assert "forward_short_gluon is passed over (its grid would be more than two blocks an SM)" in plan.reason


def test_keys_that_would_be_split_over_one_program_are_not_said_to_be_split():
    plan = plan_attention(make_problem(1, 12, 128, 256, seqlen_k=512), H200, "forward_triton")
    assert isinstance(plan.config, ForwardConfig)
    assert plan.config.num_splits == 1
    assert plan.reason.endswith("96 row tiles of 16 do not fill 132 SMs, and are too many for the keys to be split")


def test_tiles_shrink_until_they_fill_the_gpu():
    rows = []
    for batch, heads in ((1, 1), (1, 4), (64, 4)):
        plan = plan_attention(make_problem(batch, heads, 1000, 160, seqlen_k=400), A100)
        assert isinstance(plan.config, ForwardConfig)
        rows.append(plan.config.block_m)
    assert rows[0] < rows[1] < rows[2]


def test_no_row_tile_is_half_empty():
    """A tile of 128 would serve 60 rows of 4096 heads with half of its work in vain."""
    plan = plan_attention(make_problem(64, 64, 60, 64, seqlen_k=2048), A100)
    assert isinstance(plan.config, ForwardConfig)
    assert plan.config.block_m == 64


def test_keys_are_split_where_the_rows_are_few():
    plan = plan_attention(FEW_ROWS, H200)
    assert isinstance(plan.config, ForwardConfig)
    tiles, splits = -(-70 // plan.config.block_m), plan.config.num_splits
    assert splits > 1
    assert [launch.pattern for launch in plan.launches] == ["_forward_kernel", "_merge_partials_kernel"]
    assert plan.launches[0].grid == (tiles * splits * 2, 1, 1)
    assert plan.launches[1].grid == (-(-70 // MERGE_ROWS) * 2, 1, 1)
    assert plan.reason.endswith(f"do not fill 132 SMs, so the keys are split over {splits}")
    assert 0.8 * H200.sms <= plan.launches[0].grid[0] <= 2 * H200.sms


def test_a_share_has_256_keys_and_there_are_32_shares_at_the_most():
    for keys, most in ((600, 2), (1023, 3), (2**20, 32)):
        config = plan_attention(make_problem(1, 1, 16, 64, seqlen_k=keys), H200).config
        assert isinstance(config, ForwardConfig)
        assert config.num_splits == most


def test_no_share_is_empty():
    """32 shares of whole tiles are 257 keys rounded up to 384 each: the first 22 take all 8,193."""
    config = plan_attention(make_problem(1, 1, 16, 64, seqlen_k=8193), H200).config
    assert isinstance(config, ForwardConfig)
    assert (config.num_splits, config.block_n) == (22, 128)


@given(strategies.sampled_from(sorted(SPECS)), strategies.integers(1, 70), strategies.integers(257, 40000))
@settings(deadline=None)
def test_every_share_has_keys(gpu, rows, keys):
    """The rows are so few that the keys are split."""
    for dtype, head_dim in (("fp16", 64), ("bf16", 128), ("fp32", 256)):
        plan = plan_attention(make_problem(1, 1, rows, head_dim, dtype, seqlen_k=keys), SPECS[gpu], "forward_triton")
        assert isinstance(plan.config, ForwardConfig)
        splits = plan.config.num_splits
        share = share_keys(keys, splits, plan.config.block_n)
        assert all(split * share < keys for split in range(splits))
        assert splits * share >= keys


def test_few_keys_are_not_split():
    plan = plan_attention(make_problem(1, 1, 40, 64, "fp32"), H200)
    assert isinstance(plan.config, ForwardConfig)
    assert plan.config.num_splits == 1
    assert plan.reason.endswith("do not fill 132 SMs, and the keys are too few to be split")


def test_a_forced_kernel_is_the_one_that_serves():
    small = make_problem(1, 1, 128, 64)
    streaming = plan_attention(small, H200, "forward_triton")
    assert (streaming.kernel, streaming.reason.partition(";")[0]) == ("forward_triton", "it was asked for")
    # Too many blocks for it to pay, but it can serve them.
    many = plan_attention(make_problem(64, 16, 128, 64), H200, "forward_short_gluon")
    assert (many.kernel, many.reason) == ("forward_short_gluon", "it was asked for")
    reference = plan_attention(LARGE, H200, "reference")
    assert (reference.kernel, reference.launches) == ("reference", ())


def test_an_unknown_kernel_is_an_input_error():
    with pytest.raises(InputError, match=r"must be auto or one of forward_short_gluon, .*, got 'flash'"):
        plan_attention(LARGE, H200, "flash")


def strided(batch, heads, rows, columns) -> tuple[int, int, int, int]:
    """Return the strides of a ``[B, S, H, D]`` tensor seen as ``[B, H, S, D]``."""
    return rows * heads * columns, columns, heads * columns, 1


REFUSED = {
    "dtype": (make_problem(dtype="fp32"), "it serves fp16 and bf16 only"),
    "keys": (make_problem(seqlen_k=513), "it serves at most 512 keys"),
    "scale": (make_problem(softmax_scale=-0.1), "it needs a positive softmax_scale"),
    "scale of zero": (make_problem(softmax_scale=0.0), "it needs a positive softmax_scale"),
    "scale of zero in fp32": (make_problem(softmax_scale=1e-60), "it needs a positive softmax_scale, of normal size"),
    "subnormal scale": (make_problem(softmax_scale=8e-39), "it needs a positive softmax_scale, of normal size in fp32"),
    "head_dim": (make_problem(head_dim=129, head_dim_v=64), "it serves head dimensions up to 128"),
    "head_dim_v": (make_problem(head_dim_v=136), "it serves head dimensions up to 128"),
    "heads": (make_problem(1, 65536, 1, 16), "its grid has at most 65535 heads and sequences"),
    "batch": (make_problem(65536, 1, 1, 16), "its grid has at most 65535 heads and sequences"),
    "columns of q": (make_problem(q_strides=(4 * 128 * 64, 128 * 64, 1, 128)), "rows of q are not contiguous"),
    "columns of v": (make_problem(v_strides=(4 * 128 * 128, 128 * 128, 128, 2)), "rows of v are not contiguous"),
    "odd head_dim": (make_problem(head_dim=65, head_dim_v=64), "rows of q do not start at multiples of 16 bytes"),
    "odd row stride": (make_problem(k_strides=(4 * 128 * 65, 128 * 65, 65, 1)), "rows of k do not start at multiples"),
    "odd head stride": (make_problem(v_strides=(4 * 8196, 8196, 64, 1)), "rows of v do not start at multiples of 16"),
    "addresses": (make_problem(pointer_alignment=8), "rows of q do not start at multiples of 16 bytes"),
    "distance": (make_problem(1, 1, q_strides=(0, 0, 2**24, 1)), "rows of q are too far apart"),
    "no keys": (make_problem(seqlen_k=0), "there are no keys"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_short_kernel_refuses_is_streamed_and_the_plan_says_why(name):
    problem, why = REFUSED[name]
    plan = plan_attention(problem, A100)
    assert plan.kernel == "forward_triton"
    assert f"forward_short_gluon is passed over ({why}" in plan.reason
    with pytest.raises(UnsupportedError, match="forward_short_gluon does not serve") as caught:
        plan_attention(problem, A100, "forward_short_gluon")
    assert f"{problem.describe()}: {why}" in str(caught.value)
    assert caught.value.hint == "use kernel='auto'"


def test_shared_memory_decides_by_gpu():
    """512 keys of 128 columns are 256 KiB of K and V: too many for an L4; 256 keys fit an H200 and not an L4."""
    problem = make_problem(1, 1, 256, 128)
    assert plan_attention(problem, H200).kernel == "forward_short_gluon"
    plan = plan_attention(problem, L4)
    assert plan.kernel == "forward_triton"
    config = dataclasses.replace(ShortConfig(16, 64, 4, 4))
    needed = short_shared_bytes(problem, config)
    assert f"(it would need {needed} bytes of shared memory a block, L4 has 101376)" in plan.reason
    with pytest.raises(UnsupportedError, match=f"{needed} bytes of shared memory"):
        plan_attention(problem, L4, "forward_short_gluon")


def test_views_of_sequence_major_tensors_are_served_in_one_pass():
    problem = make_problem(2, 4, 100, 80, **{f"{x}_strides": strided(2, 4, 100, 80) for x in "qkv"})
    assert plan_attention(problem, H200).kernel == "forward_short_gluon"


@pytest.mark.parametrize("kernel", ["auto", "forward_triton", "forward_short_gluon"])
@pytest.mark.parametrize("problem", [make_problem(), LARGE], ids=["small", "large"])
def test_an_architecture_before_ampere_is_refused(problem, kernel):
    turing = dataclasses.replace(L4, name="T4", arch=75)
    with pytest.raises(UnsupportedError, match="kernels need sm_80 or newer, this GPU is sm_75") as caught:
        plan_attention(problem, turing, kernel)
    assert caught.value.hint == "A100, L4 and H100 are served"


@pytest.mark.parametrize("arch", [81, 88, 101, 130])
def test_an_architecture_that_no_triton_compiles_for_is_refused(arch):
    with pytest.raises(UnsupportedError, match=f"Triton compiles no kernel for sm_{arch}") as caught:
        plan_attention(LARGE, dataclasses.replace(B200, name="new", arch=arch))
    assert caught.value.hint.startswith("the architectures served: sm_80, sm_86, ")
    assert plan_attention(LARGE, dataclasses.replace(B200, arch=arch), "reference").kernel == "reference"


@pytest.mark.parametrize("kernel", ["auto", "forward_triton", "forward_short_gluon"])
def test_an_architecture_names_the_triton_that_it_needs(monkeypatch, kernel):
    thor = dataclasses.replace(B200, name="Thor", arch=110)
    monkeypatch.setattr(planning, "_installed_triton", lambda: (3, 6))
    with pytest.raises(UnsupportedError, match=r"sm_110 needs Triton 3\.7 or newer, got Triton 3\.6") as caught:
        plan_attention(make_problem(), thor, kernel)
    assert caught.value.hint == "install triton>=3.7, and a torch that goes with it"
    for installed in ((3, 7), (3, 10), None):
        monkeypatch.setattr(planning, "_installed_triton", lambda version=installed: version)
        assert plan_attention(make_problem(), thor, kernel).arch == 110


def test_the_version_of_triton_is_read_without_importing_it(monkeypatch):
    find = planning._installed_triton.__wrapped__
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "3.10.0+git1234")
    assert find() == (3, 10)

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert find() is None


@pytest.mark.parametrize(("arch", "like"), [(103, B200), (121, SPECS["RTX 5090"]), (87, SPECS["A10G"])])
def test_an_architecture_without_a_table_takes_the_tiles_of_the_one_before(arch, like):
    for problem in (LARGE, FEW_ROWS, make_problem(1, 2, 64, 256), make_problem(1, 2, 64, 64, "fp32")):
        newer = plan_attention(problem, dataclasses.replace(like, arch=arch))
        assert dataclasses.replace(newer, arch=like.arch) == plan_attention(problem, like)


@pytest.mark.parametrize("wide", [{"head_dim": 513}, {"head_dim": 64, "head_dim_v": 600}])
@pytest.mark.parametrize("kernel", ["auto", "forward_triton", "forward_short_gluon"])
def test_head_dimensions_above_512_are_refused_with_the_nearest(wide, kernel):
    widest = max(wide.values())
    with pytest.raises(UnsupportedError, match=f"no kernel serves head dimension {widest}") as caught:
        plan_attention(make_problem(**wide), H200, kernel)
    assert caught.value.hint == "the nearest that is served: 512"


def test_a_grid_that_no_gpu_takes_is_refused():
    with pytest.raises(UnsupportedError, match=r"a grid of 4294967296 blocks is too large; at most 2\*\*31 - 1"):
        plan_attention(make_problem(2**16, 2**16, 16, 16, seqlen_k=1000), H200)


@pytest.mark.parametrize("empty", [{"batch": 0}, {"heads": 0}, {"seqlen_q": 0}])
def test_an_empty_output_launches_nothing(empty):
    plan = plan_attention(make_problem(**empty), H200)
    assert (plan.launches, plan.config) == ((), None)
    assert "nothing is launched" in plan.reason


def test_cpu_tensors_run_the_reference(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for kernel in ("auto", "reference"):
        plan = plan_attention(LARGE, None, kernel)
        assert (plan.kernel, plan.gpu, plan.arch, plan.launches) == ("reference", "CPU", 0, ())
    with pytest.raises(UnsupportedError, match="forward_triton needs an NVIDIA GPU, got CPU tensors") as caught:
        plan_attention(LARGE, None, "forward_triton")
    assert "TRITON_INTERPRET=1" in caught.value.hint
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert plan_attention(LARGE, None, "forward_triton").kernel == "forward_triton"
    with pytest.raises(UnsupportedError, match="forward_short_gluon needs an NVIDIA GPU") as caught:
        plan_attention(LARGE, None, "forward_short_gluon")
    assert caught.value.hint == "use kernel='auto'"


def test_equal_problems_have_equal_plans():
    one = make_problem(2, 4, 300, 64)
    two = make_problem(2, 4, 300, 64, q_strides=(4 * 300 * 64, 300 * 64, 64, 1))  # contiguous, said aloud
    assert one == two
    plans = {plan_attention(problem, H200) for problem in (one, two)}
    assert len(plans) == 1
    assert plan_attention(dataclasses.replace(one, causal=True), H200) not in plans


def read_back(data) -> Plan:
    """Build a plan from what JSON left of it: lists are tuples."""

    def frozen(value):
        return tuple(map(frozen, value)) if isinstance(value, list) else value

    fields = {name: frozen(value) for name, value in data.items()}
    fields["problem"] = AttentionProblem(**{name: frozen(value) for name, value in data["problem"].items()})
    kinds = {
        "forward_triton": ForwardConfig,
        "forward_short_gluon": ShortConfig,
        "forward_gluon_sm90": HopperConfig,
    }
    fields["config"] = data["config"] and kinds[data["kernel"]](**data["config"])
    launches = ({name: frozen(value) for name, value in launch.items()} for launch in data["launches"])
    fields["launches"] = tuple(PlannedLaunch(**launch) for launch in launches)
    return Plan(**fields)


@pytest.mark.parametrize("problem", [make_problem(), LARGE, FEW_ROWS, make_problem(batch=0)], ids=str)
def test_a_plan_survives_json(problem):
    plan = plan_attention(problem, H200)
    assert read_back(json.loads(json.dumps(plan.as_dict()))) == plan


def test_a_plan_as_text_says_kernel_reason_tile_and_launches():
    plan = plan_attention(FEW_ROWS, H200)
    text = str(plan)
    assert text == plan.as_text()
    assert isinstance(plan.config, ForwardConfig)
    assert text.startswith("b1_h2_s70_4096_d64_fp16 on H200: forward_triton\n")
    assert f"because {plan.reason}" in text
    assert f"block_m {plan.config.block_m}" in text
    assert f"num_splits {plan.config.num_splits}" in text
    assert f"_merge_partials_kernel, grid {plan.launches[1].grid}, 128 threads" in text
    assert "shared memory" not in text  # it is not known before the kernel was compiled
    compiled = dataclasses.replace(plan.launches[0], shared_memory_bytes=4096)
    assert "4096 bytes of shared memory" in dataclasses.replace(plan, launches=(compiled,)).as_text()


lengths = strategies.integers(0, 5000) | strategies.integers(0, 70) | strategies.sampled_from([2**17, 2**20])


@given(
    batch=strategies.integers(1, 70), heads=strategies.integers(1, 40), seqlen_q=lengths, seqlen_k=lengths,
    head_dim=strategies.integers(1, 256), head_dim_v=strategies.integers(1, 256),
    dtype=strategies.sampled_from(["fp16", "bf16", "fp32"]), gpu=strategies.sampled_from(sorted(SPECS)),
    kernel=strategies.sampled_from(["auto", "forward_triton", "forward_short_gluon", "forward_gluon_sm90"]),
)  # fmt: skip
@settings(deadline=None)
def test_every_plan_covers_its_rows_and_keys(gpu, kernel, **sizes):
    """Grids reach the last row and the last key, within what a launch may ask for."""
    spec, problem = SPECS[gpu], make_problem(**sizes)
    try:
        plan = plan_attention(problem, spec, kernel)
    except UnsupportedError:
        assert kernel in ("forward_short_gluon", "forward_gluon_sm90")
        return
    if problem.rows == 0:
        return
    grid, threads = plan.launches[0].grid, plan.launches[0].block[0]
    if isinstance(plan.config, ShortConfig):
        config = plan.config
        assert grid[0] * config.block_m >= problem.seqlen_q > (grid[0] - 1) * config.block_m
        assert grid[1:] == (problem.heads, problem.batch)
        assert config.key_groups * config.block_n >= problem.seqlen_k
        assert config.block_n >= 16
        assert config.num_warps % config.key_groups == 0
        assert short_shared_bytes(problem, config) <= spec.shared_memory_per_block_bytes
        assert threads == 32 * config.num_warps
    elif isinstance(plan.config, HopperConfig):
        assert spec.arch == 90
        rows = HOPPER_ROWS * plan.config.warpgroups
        tiles = -(-problem.seqlen_q // rows) * problem.batch * problem.heads
        assert grid == (min(tiles, spec.sms), 1, 1)
        assert threads == 2 * rows + 128
    else:
        assert isinstance(plan.config, ForwardConfig)
        splits, heads = plan.config.num_splits, problem.batch * problem.heads
        assert grid == (-(-problem.seqlen_q // plan.config.block_m) * splits * heads, 1, 1)
        assert 1 <= splits <= 32
        assert splits == 1 or problem.seqlen_k >= 256 * splits
        assert len(plan.launches) == (1 if splits == 1 else 2)
        share = share_keys(problem.seqlen_k, splits, plan.config.block_n)
        assert splits == 1 or (splits - 1) * share < problem.seqlen_k <= splits * share
        assert threads == 32 * plan.config.num_warps


def test_planning_imports_no_triton():
    code = """
import sys
from flashmoe_science.attention.forward.plan import plan_attention
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.gpu.specs import find_gpu
for seqlen in (64, 4096):
    plan = plan_attention(AttentionProblem(1, 4, 4, seqlen, seqlen, 64, 64, "fp16"), find_gpu("L4"))
    print(plan.kernel, plan.as_text() != "")
heavy = {"triton", "torch", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    source = Path(flashmoe_science.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": python_path(source)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["forward_short_gluon True", "forward_triton True"]
