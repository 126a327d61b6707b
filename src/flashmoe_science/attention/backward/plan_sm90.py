"""Plans of ``backward_gluon_sm90``: when it serves, and how it splits the work. No Triton.

Heads wider than 128 have kernels of their own: ``d192_gluon_sm90.py`` where they have up to 192 columns and
values up to 128, else ``wide_gluon_sm90.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ...gpu.planning import PlannedLaunch
from ...gpu.specs import GpuSpec
from ..tiles import SMALLEST_SCALE_LOG2, cdiv
from .problem import BackwardProblem

HOPPER_KEYS = 64  # of one warpgroup
ORDERED, ORDER_WARPS = 64, 4  # sequences of a program that orders them
CLEARED, CLEAR_WARPS = 128, 4  # tokens of a program that sets gradients to 0
SINK_ROWS, SINK_WARPS = 2048, 4  # query rows that a program adds up at once for the gradient of a sink
HOPPER_PART = 4096  # numbers of dQ that a warpgroup computes of a query tile
_WIDEST = 256
_NARROW = 128  # columns of the widest heads that gluon_sm90.py itself serves
_FAST_MEMORY = 4e12  # bytes a second: an H200 has 4.8e12, an H100 3.4e12
_LONGEST_TOGETHER = 16384  # keys
# Packed and causal, on an H100, TFLOP/s at D 128. 23 sequences, 28 heads on 4: seven heads together 465, one 356; two
# K/V heads in turns 486 (four: 465). 19 sequences, 64 heads on 8: eight together 449, four 462, one 437; two in turns
# 473 (four: 463, all: 449). At D 64, full, 16 heads: 16 in turns 310, eight 305, two 286.
_MOST_PACKED_TOGETHER = 8
_PACKED_HEADS_PER_GROUP = 2
# Packed, on an H200 (lab/hopper/backward/20_packed_shares_h200.txt), TFLOP/s. D 256, 16 heads on 1: 16 together 365,
# eight 359. With a window of 4,095 at D 128, 32 heads on 8: two together 498, one 482; of 127 at D 64, 64 on 8: two
# 150, one 144. With ALiBi too, two spill.
_MOST_WIDE_TOGETHER = 16
_WINDOW_TOGETHER, _WINDOW_HEADS_PER_GROUP = 2, {128: 16, 64: 8}  # the latter by columns
# One length, causal, on an H100 (lab/hopper/backward/17_groups_and_turns.txt): up to 2k keys of D 128 (groups of
# four: 1k), and at D 64 with odd groups, a whole group together and four K/V heads in turns run at 1.03 to 1.21 of the
# speed of the other rule.
_SHORT = 2048
_WHOLE_GROUPS_IN_TURNS = 4
# Programs drift apart on long walks. With eight heads in turns, what they read then leaves L2. Causal, D 128, 32 heads
# on 8, on an H100, TFLOP/s at 64k and 128k keys: 563 and 374; four heads in turns 597 and 590, two 554 and 596
# (lab/hopper/backward/18_long_sequences_h100.txt).
_LONG = 32768
_LONG_HEADS_PER_GROUP = 4
# Without a mask walks are twice as long. On an H200 (lab/hopper/backward/21_long_sequences_h200.txt), TFLOP/s at D 128:
# 32k queries, 32 heads on 8, eight in turns 480, four 562, two 563; 64k, four 480, two 544. At 16k all are alike.
_LONG_FULL = 16384
_FULL_QUERIES_IN_TURNS = 65536
# Causal, D 64, same file: 32k keys, 16 heads on 4, four together 570, one 514; 16k, 64 on 8, eight together 545, four
# 526. Below so many rows of a whole group walks over more heads were not timed.
_LONG_GROUP = 131072
# Few K/V heads make few key tiles, unlike in length, and the longest decides. Programs then share a group, so that an
# SM has about two tiles. What is fastest of a causal call, on an H200 (lab/hopper/backward/19_shared_groups_h200.txt):
# each share walks over all of its heads together, three to five, with eight shares in turns; one alone with four.
_TILES_OF_AN_SM = 1.9
_PLENTY_OF_TILES = 3  # of an SM, from where on plans for groups of 4, 8 and 16 are those of a run that claims rest on
_MOST_OF_A_SHARE = 5
_SHARES_IN_TURNS, _SINGLE_HEADS_IN_TURNS = 8, 4
# Packed, on an H200 (lab/hopper/backward/20_packed_shares_h200.txt); on an H100 nothing was timed. The host knows the
# number of documents and the longest, and takes the others for a quarter of that. An SM then needs these many key
# tiles, so that unlike lengths leave none idle. One long walk outlasts all others. Causal shares of two heads, or with
# short walks, gain only where tiles are few; of single heads, s7t1 ran at 0.67 of s1t7 (27 documents up to 4k).
_LENGTH_OF_OTHERS = 1 / 4
_CAUSAL_TILES_OF_AN_SM, _FULL_TILES_OF_AN_SM = 3.4, 1.7
_SHORTEST_WALK, _LONGEST_WALK = 64, 1024  # steps of a share in the longest document
_SMALLEST_SHARE, _FEW_TILES = 2, 1 / 4  # heads, and the part of the tiles above
_SERVED = ("a sliding window", "a softcap", "ALiBi", "attention sinks", "packed sequences")  # sinks are part of the LSE
_MAX = 2**29  # positions: a sum of two of them, rounded up, stays in 32 bits
_MAX_QUERY_TILES = 2**22  # rows of what is kept of them, 512 each at the most, are counted in 32 bits
_MAX_KEY_TILES = 2**30  # so that the count of those drawn stays in 32 bits


@dataclass(frozen=True, slots=True)
class HopperBackwardConfig:
    """How ``backward_gluon_sm90`` splits its work."""

    block_m: int  # query rows of a step
    programs: int  # that draw key tiles; more than the GPU runs at a time find none left
    warpgroups: int = 2
    keys: int = 128  # of a key tile: 64 of each warpgroup; of the widest heads 64 that both share
    writers: int = 1  # that add to the same query tile
    num_stages: int = 2  # query tiles in flight
    # Columns of V kept in registers at D = 128. A product of 64 x 64 x 16 with both operands in shared memory is bound
    # by the bandwidth there. With 64 columns in registers a step needs 2,816 clocks of it, by count, instead of 2,944.
    # In fp16, or with a window, ptxas of Triton 3.9 spills in the loops.
    v_columns: int = 0
    # K/V heads that share an order of key tiles: the first key tile of each, then the second of each, and so on. With
    # 16, about eight of 132 programs walk over the same query tiles. With fewer programs there, Q, dO and dQ come from
    # memory; with more, they wait for one another. At D 64, causal, where steps are short and key tiles differ in
    # length, four at a time are faster: 315 TFLOP/s instead of 276 at 1k keys, 501 instead of 491 at 4k
    # (lab/hopper/backward/6_groups_and_dk_that_runs_on.txt).
    heads_per_group: int = 16
    # Query heads of a group that a key tile walks over together, before the next ones. Later keys have a shorter causal
    # walk. At each further walk a key tile waits for the one before it, so all take as long as the first
    # (lab/hopper/backward/turns.py). But a program that does not wait runs ahead of the others and appears to read Q,
    # dO and dQ from memory (lab/hopper/backward/13_heads_together.txt).
    heads_together: int = 1
    # Programs that share the query heads of a K/V head, as if there were as many K/V heads. Each adds its dK and dV, in
    # fp32, to those of the share before. K/V heads in turns are counted in shares.
    shares: int = 1
    dependent_launch: bool = True  # a kernel is set up while the one before ends
    prepare_warps: int = 4
    finish_warps: int = 4


def hopper_backward_columns(problem: BackwardProblem) -> tuple[int, int]:
    """Return the columns of dQ and of V that are kept, of which TMA fills in what there is not."""
    p = problem.forward
    if is_wide(problem):
        if p.head_dim_v > _NARROW:
            return 256, 256
        return hopper_wide_columns(problem), 128
    return 64 if max(p.head_dim, p.head_dim_v) <= 64 else 128, 64 if p.head_dim_v <= 64 else 128


def hopper_wide_columns(problem: BackwardProblem) -> int:
    """Return the columns of Q and K of a wide head: TMA fills in what there is not of them."""
    return 192 if problem.forward.head_dim <= 192 else 256


def is_wide(problem: BackwardProblem) -> bool:
    """Return whether heads are wider than 128."""
    return max(problem.forward.head_dim, problem.forward.head_dim_v) > _NARROW


def hopper_backward_kernel(problem: BackwardProblem) -> str:
    """Return the name of the kernel that makes the sums."""
    if not is_wide(problem):
        return "_backward_sm90_kernel"
    if hopper_backward_columns(problem) == (192, 128):
        return "_backward_192_sm90_kernel"
    return "_backward_wide_sm90_kernel"


def hopper_backward_config(problem: BackwardProblem, gpu: GpuSpec) -> HopperBackwardConfig:
    """Return the configuration of a head size."""
    p = problem.forward
    config = HopperBackwardConfig(block_m=128 if hopper_backward_columns(problem)[0] == 64 else 64, programs=gpu.sms)
    if hopper_backward_kernel(problem) == "_backward_wide_sm90_kernel":
        config = replace(config, keys=64, writers=2)
    elif config.block_m == 128 and p.causal:
        config = replace(config, heads_per_group=32)
    elif (
        hopper_backward_columns(problem) == (128, 128)
        and p.dtype == "bf16"
        and not (p.bounded_left or p.softcap or p.alibi)
    ):
        config = replace(config, v_columns=64)
    if is_pack(problem):
        config = replace(config, shares=_packed_shares(problem, config, gpu))
    if p.causal and not p.bounded_left:  # a window bounds the walks
        config = _with_heads_together(problem, config, gpu)
    elif p.causal and is_pack(problem) and not (is_wide(problem) or p.softcap or p.alibi):
        in_turns = _WINDOW_HEADS_PER_GROUP[hopper_backward_columns(problem)[0]]
        config = replace(config, heads_together=math.gcd(p.group, _WINDOW_TOGETHER), heads_per_group=in_turns)
    elif _is_long_and_full(problem):
        config = replace(config, heads_per_group=max(1, _FULL_QUERIES_IN_TURNS // p.seqlen_q))
    return replace(config, programs=min(gpu.sms, key_tiles(problem, config) * config.shares))


def _is_long_and_full(problem: BackwardProblem) -> bool:
    """Return whether all queries see all keys, and a walk over them is so long that programs drift apart."""
    p = problem.forward
    is_bounded = p.bounded_left or p.bounded_right or is_pack(problem)
    return not is_bounded and hopper_backward_columns(problem)[0] == _NARROW and p.seqlen_q > _LONG_FULL


def _tensors(problem: BackwardProblem) -> int:
    """Return the sequences that lie in tensors of their own; all of a packed batch lie in one."""
    return 1 if problem.forward.packed else problem.forward.batch


def is_pack(problem: BackwardProblem) -> bool:
    """Return whether sequences are packed; the work of one alone is that of a batch of one."""
    return problem.forward.packed and problem.forward.batch > 1


def _with_heads_together(problem: BackwardProblem, config: HopperBackwardConfig, gpu: GpuSpec) -> HopperBackwardConfig:
    """Return how a causal walk takes heads: how many of a group together, and how many K/V heads in turns."""
    p, columns = problem.forward, hopper_backward_columns(problem)[0]
    if is_pack(problem):
        heads_of_share = p.group // config.shares
        most = _MOST_WIDE_TOGETHER if is_wide(problem) else _MOST_PACKED_TOGETHER
        whole = next(heads for heads in range(most, 0, -1) if heads_of_share % heads == 0)
        in_turns = _PACKED_HEADS_PER_GROUP if columns == _NARROW else config.heads_per_group
        return replace(config, heads_together=whole, heads_per_group=in_turns)
    if columns == _NARROW and p.seqlen_k > _LONG:
        config = replace(config, heads_per_group=_LONG_HEADS_PER_GROUP)
    # With few queries and many keys, all walks are about equally long.
    if p.seqlen_k > 2 * p.seqlen_q:
        return config
    whole_group = replace(config, heads_together=p.group, heads_per_group=_WHOLE_GROUPS_IN_TURNS)
    is_long = columns == 64 and 4 <= p.group <= _MOST_PACKED_TOGETHER and p.seqlen_q * p.group >= _LONG_GROUP
    if p.seqlen_k > _LONGEST_TOGETHER:
        return whole_group if is_long else config
    shares = _shares(problem, config, gpu)
    if shares:
        together = p.group // shares
        in_turns = _SHARES_IN_TURNS if together > 1 else _SINGLE_HEADS_IN_TURNS
        return replace(config, shares=shares, heads_together=together, heads_per_group=in_turns)
    short = _SHORT if p.group > 4 else _SHORT // 2
    is_short = columns == _NARROW and p.seqlen_k <= short and 4 <= p.group <= _MOST_PACKED_TOGETHER
    is_odd = columns == 64 and p.group % 2 == 1 and 1 < p.group <= _MOST_PACKED_TOGETHER
    if is_short or is_odd or is_long:
        return whole_group
    return replace(config, heads_together=math.gcd(p.group, _most_heads_together(problem, config, gpu)))


def _shares(problem: BackwardProblem, config: HopperBackwardConfig, gpu: GpuSpec) -> int:
    """Return how many programs share the heads of a group, or 0 where another rule decides."""
    p, tiles = problem.forward, key_tiles(problem, config) * problem.head_parts
    if is_wide(problem) or p.group == 1 or p.softcap or p.alibi or "k" in p.seqused:
        return 0
    enough = _TILES_OF_AN_SM * gpu.sms
    if tiles >= enough:  # on an H100 walks over whole groups were slower there
        is_other = p.group > 2 and p.group % 4 > 0
        if gpu.bandwidth_bytes_per_s < _FAST_MEMORY or not (is_other or tiles < _PLENTY_OF_TILES * gpu.sms):
            return 0
    divisors = [shares for shares in range(1, p.group + 1) if p.group % shares == 0]
    shares = next((n for n in divisors if tiles * n >= enough and p.group // n <= _MOST_OF_A_SHARE), p.group)
    if shares == p.group and tiles >= enough:  # single heads lose to a whole group, such as seven
        return 1 if p.group <= _MOST_PACKED_TOGETHER else 0
    return shares


def _packed_shares(problem: BackwardProblem, config: HopperBackwardConfig, gpu: GpuSpec) -> int:
    """Return how many programs share the heads of a group of packed sequences.

    With lengths in use, sequences may share keys by mistake, and have more key tiles than there is room for. Calls with
    other features, and with many more keys than queries, were not timed.
    """
    p = problem.forward
    is_other = is_wide(problem) or p.softcap or p.alibi or p.bounded_left or "k" in p.seqused
    if is_other or p.group == 1 or p.seqlen_k > 2 * p.seqlen_q:
        return 1
    longest = cdiv(p.seqlen_k, config.keys) * p.heads_kv * problem.head_parts
    tiles = longest * (1 + (p.batch - 1) * _LENGTH_OF_OTHERS) / gpu.sms
    enough = _CAUSAL_TILES_OF_AN_SM if p.causal else _FULL_TILES_OF_AN_SM
    fewest_heads = _SMALLEST_SHARE if tiles < _FEW_TILES * enough else 2 * _SMALLEST_SHARE
    steps = cdiv(p.seqlen_q, config.block_m)  # of the longest walk over one head
    ways = {  # heads of a share; those of a causal walk that do not fit together wait for those before them
        shares: p.group // shares
        for shares in range(1, p.group + 1)
        if p.group % shares == 0
        and (shares == 1 or p.group // shares >= max(fewest_heads, _SHORTEST_WALK / steps))
        and (not p.causal or p.group // shares <= _MOST_PACKED_TOGETHER)
    }
    for shares, heads in ways.items():
        if tiles >= enough or (tiles * shares >= enough and steps * heads <= _LONGEST_WALK):
            return shares
    return max(ways, default=1)


def _most_heads_together(problem: BackwardProblem, config: HopperBackwardConfig, gpu: GpuSpec) -> int:
    """Return of how many heads causal walks gain, by times of walks over one head by walks over several.

    On an H200: D 64, four 1.07 and 1.15; D 128, four 1.04 to 1.16, but 0.96 with 32k keys; D 192, two 1.01; D 256, two
    1.02 to 1.13, four 0.96. On an H100: D 64, four 1.05 and 1.16; D 128, two 1.00 to 1.07, four 0.88 to 1.06; D 192,
    two 0.96; D 256, two of two 1.03 and 1.06, two of four 0.90.
    """
    is_fast = gpu.bandwidth_bytes_per_s >= _FAST_MEMORY
    if is_wide(problem):
        return 2 if is_fast or problem.forward.group == 2 else 1
    return 4 if is_fast or config.block_m == 128 else 2


def hopper_backward_tiles(
    problem: BackwardProblem, config: HopperBackwardConfig, tokens: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Return the query tiles and the key tiles of one head.

    Packed, these are of all sequences, at the most. ``tokens`` are then those of q and of k; left out, all sequences
    are the longest.
    """
    p = problem.forward
    if p.packed:
        tokens_q, tokens_k = tokens or (p.batch * p.seqlen_q, p.batch * p.seqlen_k)
        return tokens_q // config.block_m + p.batch, tokens_k // config.keys + p.batch
    return cdiv(p.seqlen_q, config.block_m), cdiv(p.seqlen_k, config.keys)


def query_tiles(problem: BackwardProblem, config: HopperBackwardConfig, tokens: tuple[int, int] | None = None) -> int:
    """Return the query tiles of all heads and sequences."""
    return hopper_backward_tiles(problem, config, tokens)[0] * _tensors(problem) * problem.forward.heads


def key_tiles(problem: BackwardProblem, config: HopperBackwardConfig, tokens: tuple[int, int] | None = None) -> int:
    """Return the key tiles of all K/V heads and sequences."""
    return hopper_backward_tiles(problem, config, tokens)[1] * _tensors(problem) * problem.forward.heads_kv


def hopper_backward_refusal(problem: BackwardProblem, gpu: GpuSpec) -> str | None:
    """Return why ``backward_gluon_sm90`` cannot serve ``problem``, or None."""
    p = problem.forward
    *first, last = [feature for feature in p.features if feature not in _SERVED] or ("",)
    features = f"{', '.join(first)}{' and ' if first else ''}{last}"
    config = hopper_backward_config(problem, gpu)
    tiles_m, tiles_n = hopper_backward_tiles(problem, config)
    last_to_see = config.keys - 1 + p.seqlen_q - p.seqlen_k + p.window[0]  # the first key tile
    # Packed, the sums of dQ of as many query tiles do not fit into any memory.
    many = not p.packed and (
        tiles_m * p.batch * p.heads >= _MAX_QUERY_TILES or tiles_n * p.batch * p.heads_kv >= _MAX_KEY_TILES
    )
    reasons = (
        (gpu.arch != 90, f"it is for sm_90, this GPU is sm_{gpu.arch}"),
        (features, f"it does not serve {features}"),
        (
            p.bounded_left and last_to_see < 0 and not p.packed,
            f"its window hides the first {config.keys} keys from all queries",
        ),
        (p.item_bytes != 2, "it serves fp16 and bf16 only"),
        (p.softcap and p.dtype == "fp16", "with a softcap its probabilities are not exact enough in fp16"),
        (p.alibi and p.softcap, "it does not serve ALiBi with a softcap"),
        (p.packed and p.alibi_stride, "packed, it serves slopes that all sequences share"),
        (p.alibi and problem.wants_sinks, "it does not serve the gradient of sinks with ALiBi"),
        (
            not (problem.wants_q or problem.wants_kv),
            "it makes the gradients of q, k and v together, and none of them is asked for",
        ),
        (max(p.head_dim, p.head_dim_v) > _WIDEST, f"it serves head dimensions up to {_WIDEST}"),
        (
            p.head_dim % 8 or p.head_dim_v % 8,
            "it serves head dimensions that are multiples of 8 (TMA steps by 16 bytes)",
        ),
        (p.scale_log2 < SMALLEST_SCALE_LOG2, "it needs a positive softmax_scale, of normal size in fp32"),
        (p.pointer_alignment < 16, "TMA reads tensors that start at multiples of 16 bytes"),
        (max(p.seqlen_q, p.seqlen_k) >= _MAX, f"it counts positions up to {_MAX}"),
        (many, f"it counts query tiles up to {_MAX_QUERY_TILES}, key tiles up to {_MAX_KEY_TILES}"),
    )
    return next((why for is_so, why in reasons if is_so), None) or _layout_refusal(problem)


def too_short_for_tiles(problem: BackwardProblem, gpu: GpuSpec) -> str | None:
    """Return why short packed sequences are left to the portable kernel, or None.

    Each sequence has query tiles of its own, with a sum in fp32 for each row. For 8,192 sequences of 16 tokens, 32
    heads and D = 128, they take 10.7 GB, and q takes 1.1 GB.
    """
    rows = hopper_backward_config(problem, gpu).block_m
    if problem.forward.packed and 2 * problem.forward.seqlen_q <= rows:
        return f"sequences of {problem.forward.seqlen_q} queries or fewer fill half of its tiles of {rows} or less"
    return None


def _layout_refusal(problem: BackwardProblem) -> str | None:
    """Return why TMA, or a load of 16 bytes, cannot step through an input, or None."""
    p = problem.forward
    tensors = _tensors(problem)
    queries, keys = (tensors, p.heads, p.seqlen_q), (tensors, p.heads_kv, p.seqlen_k)
    for name, strides, sizes in (
        ("q", p.q_strides, queries),
        ("k", p.k_strides, keys),
        ("v", p.v_strides, keys),
        ("o", problem.o_strides, queries),
        ("the gradient of o", problem.do_strides, queries),
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


def hopper_backward_launches(
    problem: BackwardProblem, config: HopperBackwardConfig, tokens: tuple[int, int] | None = None
) -> tuple[PlannedLaunch, ...]:
    """Return the launches: what comes before, the kernel, and what brings dQ in order. For ``tokens`` see above."""
    p = problem.forward
    tiles = query_tiles(problem, config, tokens)
    parts = config.block_m * hopper_backward_columns(problem)[0] // HOPPER_PART
    first: list[PlannedLaunch] = []
    if p.packed:
        first = [PlannedLaunch("_order_key_tiles_kernel", (cdiv(p.batch, ORDERED), 1, 1), (32 * ORDER_WARPS, 1, 1))]
        if not p.seqused:
            longest = max(tokens or (p.batch * p.seqlen_q, p.batch * p.seqlen_k))
            first.append(PlannedLaunch("_clear_kernel", (cdiv(longest, CLEARED), 1, 1), (32 * CLEAR_WARPS, 1, 1)))
    last = []
    if problem.wants_sinks:
        last = [PlannedLaunch("_sinks_gradient_kernel", (p.heads, 1, 1), (32 * SINK_WARPS, 1, 1))]
    # Triton rounds the three single warps up to a warpgroup.
    return (
        *first,
        PlannedLaunch("_prepare_backward_kernel", (tiles, 1, 1), (32 * config.prepare_warps, 1, 1)),
        PlannedLaunch(hopper_backward_kernel(problem), (config.programs, 1, 1), (128 * (config.warpgroups + 1), 1, 1)),
        PlannedLaunch("_finish_dq_kernel", (tiles * parts, 1, 1), (32 * config.finish_warps, 1, 1)),
        *last,
    )
