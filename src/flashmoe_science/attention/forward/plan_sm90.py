"""Plans of ``forward_gluon_sm90``: when it serves, and with which tile and schedule, as measured on an H200."""

from __future__ import annotations

import dataclasses

from ...gpu.planning import PlannedLaunch
from ...gpu.specs import GpuSpec, shared_memory_limit
from ..problem import AttentionProblem
from ..tiles import FULL_ENOUGH, SMALLEST_SCALE_LOG2, HopperConfig, Plan, block_dim, cdiv
from .triton_plan import forward_plan

HOPPER_ROWS = 64  # of one warpgroup
# Registers of a multiplying thread, by warpgroups. The producer's threads have 32; with two warpgroups, the first
# has what is left, 232.
HOPPER_REGISTERS = {2: 240, 3: 160}
_HOPPER_BARRIER_BYTES = 1024  # and what else lies in shared memory: barriers, where row tiles lie, alignment
_HOPPER_L2_BYTES = 32 << 20  # of K and V of a group of heads: what FlashAttention-3 takes for an L2 of 50 MB
# Rows, keys, tiles: a sum of two of them, rounded up, stays in 32 bits. So does the count of key tiles over all row
# tiles of a program, at about 1 us each in any call of less than half an hour.
_HOPPER_MAX = 2**29
HOPPER_WIDEST = 256

# Where row tiles do not fill the GPU, forward_triton may split the keys, in two kernels. Per head width and mask: the
# row tiles on 132 SMs up to which splitting is faster, and the cost of the merge in row tiles x keys. Measured on an
# H200 with 256 to 4k keys and 8 to 96 row tiles, full and causal (lab/hopper/15_few_tiles.txt). A row tile takes 6.3 us
# and 7.3 ns a key (D 64; causal 7 and 8.1), 7.3 and 9.2 (D 128) or 7.5 and 18 (D 256), however many there are. With
# split keys it is 9, 12 or 16 us, and 105, 163 or 260 ps a key and row tile. At D 256 these give a second number of
# 33,000. It is raised: at 1k keys split ones took 24 to 32 us, and 8 and 16 row tiles 25 to 26.
_SPLIT_TILES = {
    (64, False): (70, 26_000),
    (64, True): (77, 19_000),
    (128, False): (56, 29_000),
    (128, True): (56, 29_000),
    (256, False): (69, 64_000),
    (256, True): (69, 64_000),
}
_SPLIT_ROWS = 64  # up to this many query rows most of a tile is empty: the keys are split, without a measurement
# D 64, where one round takes all row tiles: three warpgroups take 16.4 us at 1k keys, two 13.4; 45.8 and 35.9 at 4k,
# causal 46.0 and 39.5 (lab/hopper/15_few_tiles.txt). D 96 was not measured.
_ONE_ROUND = HopperConfig(2, 128, 2, ping_pong=True)

# The share of the row tiles that packing heads must save.
_PACK_FULL = 0.1
_PACK_CAUSAL = 0.18

# Tiles of forward_gluon_sm90: (columns of Q and K, columns of V, causal) -> (keys up to which, configuration).
# The numbers are TFLOP/s at 512, 1k, 2k, 4k, 8k and 16k keys, measured on an H200 (Triton 3.6, bf16, 16,384 tokens, L2
# flushed, median of 10 calls): lab/hopper, run 10, and run 12 for 96 and 192 columns. Lengths between two of them take
# the longer one's configuration; fp16 takes bf16's; widths take the first entry that covers both.
_HC = HopperConfig
_ANY = 2**63
HOPPER_TABLE: dict[tuple[int, int, bool], tuple[tuple[int, HopperConfig], ...]] = {
    # 128 keys 444 503 572 573 594 594, not in turns 419 482 548 545 566 569; 64 keys 415 478 547 550 576 577.
    (64, 64, False): ((_ANY, _HC(3, 128, 2, ping_pong=True)),),
    # 128 rows in turns 263 351 428 471 463 472; 192 rows 247 325 456 514 543 566, in turns 215 309 448 514 543 574,
    # with 64 keys 244 325 454 520 547 563.
    (64, 64, True): (
        (1024, _HC(2, 128, 2, ping_pong=True)),
        (2048, _HC(3, 128, 2, ping_pong=False)),
        (_ANY, _HC(3, 128, 2, ping_pong=True)),
    ),
    # 128 rows 508 599 651 668 628 622, not in turns 447 504 528 522 474 474; 192 rows 485 577 683 651 684 681 (4k:
    # two sequences only, where 192 rows fill 5.3 rounds).
    (96, 96, False): (
        (1024, _HC(2, 128, 2, ping_pong=True)),
        (_ANY, _HC(3, 64, 2, ping_pong=True)),
    ),
    # 128 rows 318 454 567 620 682 633, not in turns 297 402 486 532 593 533; 192 rows 267 377 538 605 684 663, but more
    # registers spill than is allowed where the diagonal is not aligned with the tiles.
    (96, 96, True): ((_ANY, _HC(2, 128, 2, ping_pong=True)),),
    # 572 688 755 778 763 728, in turns 571 689 754 777 761 726.
    (128, 128, False): ((_ANY, _HC(2, 128, 2, ping_pong=False)),),
    # In turns 343 519 656 740 770 746, not 340 515 654 744 776 754.
    (128, 128, True): (
        (2048, _HC(2, 128, 2, ping_pong=True)),
        (_ANY, _HC(2, 128, 2, ping_pong=False)),
    ),
    # In turns 617 730 789 807 748 743, not 607 724 785 807 749 735; 64 keys x 3 stages 612 719 775 801 743 737.
    (192, 128, False): ((_ANY, _HC(2, 128, 2, ping_pong=True)),),
    # In turns 385 552 683 742 729 709, not 372 542 679 739 726 704; 64 keys x 3 stages 376 542 675 736 718 708.
    (192, 128, True): ((_ANY, _HC(2, 128, 2, ping_pong=True)),),
    # 3 stages in turns 624 728 771 789 728 738, not 607 704 750 777 710 741; 2 stages 602 722 776 790 718 744.
    (192, 192, False): ((_ANY, _HC(2, 64, 3, ping_pong=True)),),
    # 3 stages in turns 390 552 676 742 699 720, not 400 561 686 747 705 723; 2 stages 386 558 688 746 706 723.
    (192, 192, True): ((_ANY, _HC(2, 64, 3, ping_pong=False)),),
    # In turns 603 722 792 824 757 751, not 594 713 789 823 757 755.
    (256, 256, False): ((_ANY, _HC(2, 64, 2, ping_pong=True)),),
    # 396 558 678 763 810 754, in turns 396 552 667 757 807 752.
    (256, 256, True): ((_ANY, _HC(2, 64, 2, ping_pong=False)),),
}


def hopper_config_of_table(problem: AttentionProblem) -> HopperConfig:
    """Return tile and schedule of a call that fills the GPU."""
    rows = next(
        rows
        for (columns, columns_v, causal), rows in HOPPER_TABLE.items()
        if problem.head_dim <= columns and problem.head_dim_v <= columns_v and problem.causal == causal
    )
    return next(config for keys, config in rows if problem.seqlen_k <= keys)


def hopper_config(problem: AttentionProblem, gpu: GpuSpec) -> HopperConfig:
    """Return tile and schedule of ``forward_gluon_sm90``."""
    config = hopper_config_of_table(problem)
    is_wide = max(problem.head_dim, problem.head_dim_v) > 64
    if not is_wide and hopper_tiles(problem, _ONE_ROUND) <= gpu.sms:
        config = _ONE_ROUND
    # Heads of a group are packed where that saves enough row tiles, and leaves enough for the GPU. Measured on an H200,
    # packed over not: an eighth fewer tiles 1.13x full, and 0.94x causal, where a packed tile masks more keys; then,
    # causal, a fifth fewer 1.08x, a quarter 1.20x and 1.28x, three eighths 1.57x, half 1.64x (lab/hopper, run 13).
    packed = dataclasses.replace(config, pack=min(HOPPER_ROWS, problem.group & -problem.group))
    tiles = hopper_tiles(problem, packed)
    saved = 1 - tiles / max(1, hopper_tiles(problem, config))
    pays = tiles >= FULL_ENOUGH * gpu.sms and saved >= (_PACK_CAUSAL if problem.causal else _PACK_FULL)
    return packed if pays else config


def hopper_tiles(problem: AttentionProblem, config: HopperConfig) -> int:
    """Return how many row tiles there are."""
    return hopper_tiles_m(problem, config) * problem.batch * problem.heads // config.pack


def hopper_tiles_m(problem: AttentionProblem, config: HopperConfig) -> int:
    """Return how many row tiles one head has, or as many heads as are packed."""
    return cdiv(problem.seqlen_q, HOPPER_ROWS // config.pack * config.warpgroups)


def hopper_columns(head_dim: int) -> tuple[int, int]:
    """Return the columns that are multiplied: a power of two, and the power of two, or 0, that covers the rest.

    So 96 costs 64 + 32 columns and 192 costs 128 + 64, where one power of two would cost a third more. Up to 64 there
    is nothing to save: exp is the limit, not the matrix units.
    """
    if head_dim <= 64:
        return block_dim(head_dim), 0
    columns = cdiv(head_dim, 16) * 16
    first = 1 << (columns.bit_length() - 1)
    rest = columns - first
    second = block_dim(rest) if rest else 0
    return (2 * first, 0) if first == second else (first, second)


def hopper_output_columns(problem: AttentionProblem, config: HopperConfig) -> int:
    """Return how many columns of the output a warpgroup stages at once on the way to memory.

    All, up to 128; half as many where shared memory holds no more beside the tiles of Q, K and V.
    """
    d, dv = sum(hopper_columns(problem.head_dim)), sum(hopper_columns(problem.head_dim_v))
    rows, columns = HOPPER_ROWS * config.warpgroups, min(block_dim(problem.head_dim_v), 128)
    tiles = problem.item_bytes * (rows * d + config.num_stages * config.block_n * (d + dv))
    fits = tiles + problem.item_bytes * rows * columns + _HOPPER_BARRIER_BYTES <= shared_memory_limit(90)
    return columns if fits else columns // 2


def hopper_is_aligned(problem: AttentionProblem, config: HopperConfig) -> bool:
    """Return whether, in turns and causal, the diagonal crosses key tiles as it does at the start of both sequences.

    With heads packed in three warpgroups it does not: row tiles start anywhere in a key tile.
    """
    further = problem.seqlen_k - problem.seqlen_q
    starts = config.pack == 1 or config.warpgroups == 2
    return problem.causal and config.ping_pong and starts and further >= 0 and further % config.block_n == 0


def hopper_edge_tiles(problem: AttentionProblem, config: HopperConfig) -> int:
    """Return how many key tiles the first warpgroup masks, counted from the last that it walks over.

    In turns it walks over those of the last warpgroup, whose rows come after its own.
    """
    if not problem.causal:
        return 1 if problem.seqlen_k % config.block_n else 0
    rows = HOPPER_ROWS // config.pack
    behind = (config.warpgroups - 1) * rows if config.ping_pong else 0
    further = problem.seqlen_k - problem.seqlen_q
    if hopper_is_aligned(problem, config) or (not config.ping_pong and further % rows == 0):
        return 1 + behind // config.block_n
    # Its first row does not see the last rows - 1 + behind keys, which may begin anywhere in a tile.
    return 1 + (rows - 2 + behind + config.block_n - 1) // config.block_n


def hopper_heads_per_group(problem: AttentionProblem, pack: int) -> int:
    """Return how many heads, or packs of ``pack`` heads, are walked over together when causal.

    As many as have their K and V in L2 together: the longest row tiles of all come first, and the next row tiles of a
    head find its K and V there. The groups are as equal as they can be: the row tiles of a small last one would not
    fill the GPU.
    """
    heads = problem.batch * problem.heads // pack
    kv_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.item_bytes
    fitting = max(1, _HOPPER_L2_BYTES * (problem.group // pack) // kv_bytes)
    return cdiv(heads, cdiv(heads, fitting))


def hopper_refusal(problem: AttentionProblem, gpu: GpuSpec) -> str | None:
    """Return why ``forward_gluon_sm90`` cannot serve ``problem``, or None."""
    if refusal := hopper_head_refusal(problem):
        return refusal
    return hopper_call_refusal(problem, gpu, hopper_tiles(problem, hopper_config(problem, gpu)))


def hopper_call_refusal(problem: AttentionProblem, gpu: GpuSpec, tiles: int) -> str | None:
    """Return why a kernel for Hopper with ``tiles`` row tiles cannot serve ``problem``, or None."""
    if gpu.arch != 90:
        return f"it is for sm_90, this GPU is sm_{gpu.arch}"
    if problem.item_bytes != 2:
        return "it serves fp16 and bf16 only"
    if problem.seqlen_k == 0:
        return "there are no keys"
    if problem.scale_log2 < SMALLEST_SCALE_LOG2:
        return "it needs a positive softmax_scale, of normal size in fp32"
    if problem.pointer_alignment < 16:
        return "TMA reads tensors that start at multiples of 16 bytes"
    if max(problem.seqlen_q, problem.seqlen_k, tiles) >= _HOPPER_MAX:
        return f"it counts rows, keys and tiles up to {_HOPPER_MAX}"
    return _hopper_layout_refusal(problem)


def hopper_head_refusal(problem: AttentionProblem) -> str | None:
    """Return why a kernel for Hopper cannot serve the head dimensions, or None."""
    if max(problem.head_dim, problem.head_dim_v) > HOPPER_WIDEST:
        return f"it serves head dimensions up to {HOPPER_WIDEST}"
    if problem.head_dim % 8 or problem.head_dim_v % 8:
        return "it serves head dimensions that are multiples of 8 (TMA steps by 16 bytes)"
    return None


def _hopper_layout_refusal(problem: AttentionProblem) -> str | None:
    """Return why TMA cannot step through q, k or v, or None."""
    for name, strides, sizes in (
        ("q", problem.q_strides, (problem.batch, problem.heads, problem.seqlen_q)),
        ("k", problem.k_strides, (problem.batch, problem.heads_kv, problem.seqlen_k)),
        ("v", problem.v_strides, (problem.batch, problem.heads_kv, problem.seqlen_k)),
    ):
        if strides[3] != 1:
            return f"rows of {name} are not contiguous"
        stepped = [stride for stride, size in zip(strides, sizes, strict=False) if size > 1]
        if 0 in stepped:
            return f"{name} is expanded: TMA does not step by 0"
        if any(stride % 8 for stride in stepped):
            return f"rows of {name} do not start at multiples of 16 bytes"
        if any(stride >= 2**39 for stride in stepped):
            return f"rows of {name} are too far apart"
    return None


def hopper_underfills(problem: AttentionProblem, gpu: GpuSpec) -> str | None:
    """Return why ``forward_triton``, which has smaller tiles and can split the keys, is left to serve it, or None."""
    tiles = hopper_tiles(problem, hopper_config(problem, gpu))
    if tiles >= FULL_ENOUGH * gpu.sms:
        return None
    columns = block_dim(max(problem.head_dim, problem.head_dim_v))
    most, cost = _SPLIT_TILES[max(64, columns), problem.causal]
    few = (most - cost / problem.seqlen_k) * gpu.sms / 132
    if problem.seqlen_q > _SPLIT_ROWS and (tiles > few or len(forward_plan(problem, gpu, "").launches) == 1):
        return None
    return f"its {tiles} row tiles do not fill {gpu.sms} SMs, and it does not split the keys"


def hopper_plan(problem: AttentionProblem, gpu: GpuSpec, why: str) -> Plan:
    """Return how ``forward_gluon_sm90`` serves ``problem``; it does not refuse it."""
    config = hopper_config(problem, gpu)
    tiles = hopper_tiles(problem, config)
    programs = min(tiles, gpu.sms)
    # Triton rounds the producer's warp up to a warpgroup.
    launch = PlannedLaunch("_forward_sm90_kernel", (programs, 1, 1), (128 * (config.warpgroups + 1), 1, 1))
    reason = f"{why}; {tiles} row tiles of {HOPPER_ROWS * config.warpgroups} on {gpu.sms} SMs"
    if config.pack > 1:
        reason += f", {config.pack} heads of a KV head to a tile"
    return Plan(problem, gpu.name, gpu.arch, "forward_gluon_sm90", config, (launch,), reason)
