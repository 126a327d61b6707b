"""Plans of ``forward_features_gluon_sm90``: when it serves, with which tile, and in which order."""

from __future__ import annotations

import dataclasses
import functools

from ...gpu.planning import PlannedLaunch
from ...gpu.specs import GpuSpec
from ..problem import AttentionProblem
from ..tiles import FULL_ENOUGH, HopperConfig, Plan, cdiv
from .plan_sm90 import HOPPER_ROWS, hopper_config_of_table, hopper_heads_per_group, hopper_refusal

FEATURES_KERNEL = "forward_features_gluon_sm90"
ORDER_SEQUENCES = 64  # that one program of ``sequences_triton`` places, and looks at together
ORDER_WARPS = 4
_SERVED = frozenset(("a sliding window", "a softcap", "ALiBi", "attention sinks", "a bias", "packed sequences"))
# Row tiles have 128 rows or more; below so many queries most of one is empty, and ``forward_triton`` has smaller ones.
_FEWEST_QUERIES = 64
_L2_BYTES = 32 << 20  # of K and V of heads that are walked over together, as in ``hopper_plan``
_MAX_ROUNDS = 64  # row tiles of a program: with more, any order comes out even
_ORDERS_TRIED = 16


def without_features(problem: AttentionProblem) -> AttentionProblem:
    """Return the plain problem of the same sizes, whose limits are those of ``forward_gluon_sm90``.

    A packed batch becomes one sequence: TMA indexes its tokens.
    """
    plain = dataclasses.replace(
        problem, window=(-1, -1), softcap=0.0, sinks="", alibi="", bias="", packed=False, seqused=""
    )
    if not problem.packed:
        return plain
    keys = max(2, problem.seqlen_k) if problem.seqlen_k else 0
    return dataclasses.replace(plain, batch=1, seqlen_q=max(2, problem.seqlen_q), seqlen_k=keys)


def variants_refusal(problem: AttentionProblem, gpu: GpuSpec) -> str | None:
    """Return why ``forward_features_gluon_sm90`` cannot serve ``problem``, or None."""
    lacking = [feature for feature in problem.features if feature not in _SERVED]
    if lacking:
        *first, last = lacking
        return f"it does not serve {', '.join(first)}{' and ' if first else ''}{last}"
    if problem.alibi and problem.softcap:
        return "it does not serve ALiBi with a softcap"
    if problem.bias and (refusal := _bias_refusal(problem)):
        return refusal
    if problem.packed and problem.alibi_stride:
        return "packed, it serves slopes that all sequences share"
    if not problem.features:
        return "the call has no features, which is what forward_gluon_sm90 is for"
    refusal = hopper_refusal(without_features(problem), gpu)
    if refusal is None and variants_tiles(problem, variants_config(problem)) >= 2**29:
        return "it counts row tiles up to 2**29"
    return refusal


def _bias_refusal(problem: AttentionProblem) -> str | None:
    """Return why a bias cannot be served, or None: TMA copies its tiles."""
    if problem.bias not in ("fp16", "bf16"):
        return "it serves biases of fp16 and bf16"
    for feature in ("packed sequences", "ALiBi", "a softcap"):
        if feature in problem.features:
            return f"it does not serve {feature} with a bias"
    *outer, columns = problem.bias_strides
    if columns != 1 and problem.seqlen_k > 1:
        return "the columns of the bias are not contiguous"
    if problem.bias_alignment < 16 or any(stride % 8 for stride in outer):
        return "rows of the bias do not start at multiples of 16 bytes"
    if any(stride >= 2**39 for stride in outer):
        return "rows of the bias are too far apart"
    if any(0 < stride < problem.seqlen_k for stride in outer):
        return "rows of the bias overlap"
    return None


def batch_inner(problem: AttentionProblem) -> bool:
    """Return whether a head of all sequences comes before the next head: they share a bias, read once into L2."""
    if not problem.bias or problem.batch == 1:
        return False
    of_sequences, of_heads, _, _ = problem.bias_strides
    return of_sequences == 0 and of_heads != 0


def variants_config(problem: AttentionProblem) -> HopperConfig:
    """Return tile and schedule: those of the plain problem with as many keys as a row sees.

    With a softcap warpgroups take turns up to 128 columns: its tanh and exp2 take as long as the products of the other
    warpgroup. Causal, 8k keys, D 128: 598 TFLOP/s to 515 (lab/hopper/17_softcap_in_turns.txt). Wider products take
    longer, and registers spill.
    """
    (left, right), plain = problem.window, without_features(problem)
    if problem.bounded_left and (problem.causal or right >= 0):
        plain = dataclasses.replace(plain, seqlen_k=min(plain.seqlen_k, left + max(0, right) + 1))
    config = hopper_config_of_table(plain)
    if problem.bias:
        config = _config_with_bias(problem, config)
    if problem.softcap and problem.head_dim > 64 and max(problem.head_dim, problem.head_dim_v) <= 128:
        config = dataclasses.replace(config, ping_pong=True)
    return dataclasses.replace(config, slope_product=_is_product_of_slopes(problem))


def _config_with_bias(problem: AttentionProblem, config: HopperConfig) -> HopperConfig:
    """Return tile and schedule with room for a bias: in shared memory, and among the 16 barriers of the hardware.

    Two warpgroups, in turns up to 128 columns as with a softcap. Heads wider than 128 have room for 64 keys, wider than
    192 for 32. None of it was timed.
    """
    widest = max(problem.head_dim, problem.head_dim_v)
    block_n = 128 if widest <= 128 else 64 if widest <= 192 else 32
    return HopperConfig(2, block_n, 2, ping_pong=config.ping_pong or widest <= 128)


def _is_product_of_slopes(problem: AttentionProblem) -> bool:
    """Return whether a matrix product gives scores their part of ALiBi.

    A row sees no key ahead of it, so the part is linear in the key. D 64 and 128: 0.91 to 0.98 of a call without
    features, and 0.72 to 0.80 with sums (lab/README.md). Wider heads were not timed.
    """
    sees_ahead = not problem.bounded_right or problem.window[1] > 0
    return bool(problem.alibi) and not sees_ahead and max(problem.head_dim, problem.head_dim_v) <= 128


def variants_tiles(problem: AttentionProblem, config: HopperConfig) -> int:
    """Return how many row tiles there are; of packed sequences, were all the longest."""
    return cdiv(problem.seqlen_q, HOPPER_ROWS * config.warpgroups) * problem.batch * problem.heads


def variants_passed_over(problem: AttentionProblem, gpu: GpuSpec) -> str | None:
    """Return why ``forward_triton`` is left to serve what this kernel could, or None.

    It has smaller tiles, can split keys, and its tanh is exact. This one's is right to 2^-11, and so is its LSE. From
    that gradients make weights whose rows do not sum to 1, in fp16 off by up to twice what is allowed (simulated).
    """
    if problem.softcap and problem.return_lse and problem.dtype == "fp16":
        return "with a softcap its LSE is not exact enough for gradients in fp16"
    if problem.packed and problem.seqlen_q < _FEWEST_QUERIES:
        return f"its row tiles are for more than the {problem.seqlen_q} queries of the longest sequence"
    tiles = variants_tiles(problem, variants_config(problem))
    if tiles >= FULL_ENOUGH * gpu.sms:
        return None
    return f"its {tiles} row tiles do not fill {gpu.sms} SMs, and it does not split the keys"


def heads_fit(problem: AttentionProblem) -> int | None:
    """Return how many keys, over all query heads of a sequence that share them, have K and V in L2 together.

    None where heads need not be walked over together: rows see as many keys, or those nearby.
    """
    if problem.bounded_left or not problem.bounded_right:
        return None
    group = 1 if batch_inner(problem) else problem.group
    return _L2_BYTES * group // ((problem.head_dim + problem.head_dim_v) * problem.item_bytes)


def heads_together(problem: AttentionProblem, config: HopperConfig, programs: int) -> int:
    """Return how many heads are walked over together; all sequences are as long.

    As many as fit L2, or a few less where programs then have more equal shares.
    """
    plain = without_features(problem)
    if batch_inner(problem):  # the next head is one of another sequence, with its own keys
        plain = dataclasses.replace(plain, heads_kv=plain.heads)
    if heads_fit(problem) is None:
        return 1
    tiles_m = cdiv(problem.seqlen_q, HOPPER_ROWS * config.warpgroups)
    most = hopper_heads_per_group(plain, config.pack)
    return _evenest(tiles_m, problem.batch * problem.heads, most, programs)


@functools.lru_cache(maxsize=1024)
def _evenest(tiles_m: int, heads: int, most: int, programs: int) -> int:
    """Return the number of heads, up to ``most``, with the smallest longest share of a program."""
    if tiles_m * heads > _MAX_ROUNDS * programs:
        return most
    tried = range(most, max(0, most - _ORDERS_TRIED), -1)
    return min(tried, key=lambda together: max(shares(tiles_m, heads, together, programs)))


def shares(tiles_m: int, heads: int, dealt: int, programs: int) -> list[int]:
    """Return what each program has to do, in row tiles of keys and one for each tile, as the kernel deals them out."""
    found = [0] * programs
    for first in range(0, heads, dealt):
        width = min(dealt, heads - first)
        for tile in range(width * tiles_m):
            turn, place = divmod(tile, programs)
            found[programs - 1 - place if turn % 2 else place] += tiles_m - tile // width + 1
    return found


def variants_plan(problem: AttentionProblem, gpu: GpuSpec, why: str) -> Plan:
    """Return how ``forward_features_gluon_sm90`` serves ``problem``; it does not refuse it."""
    config = variants_config(problem)
    rows, tiles = HOPPER_ROWS * config.warpgroups, variants_tiles(problem, config)
    # Triton rounds the producer's warp up to a warpgroup.
    threads = (128 * (config.warpgroups + 1), 1, 1)
    launch = PlannedLaunch("_forward_features_sm90_kernel", (min(tiles, gpu.sms), 1, 1), threads)
    reason = f"{why}; {tiles} row tiles of {rows} on {gpu.sms} SMs"
    launches: tuple[PlannedLaunch, ...] = (launch,)
    if problem.packed:
        reason = f"{why}; at most {tiles} row tiles of {rows} on {gpu.sms} SMs, drawn, the longest sequences first"
        order = (cdiv(problem.batch, ORDER_SEQUENCES), 1, 1)
        launches = PlannedLaunch("_order_sequences_kernel", order, (32 * ORDER_WARPS, 1, 1)), launch
    return Plan(problem, gpu.name, gpu.arch, FEATURES_KERNEL, config, launches if tiles else (), reason)
