"""One call of attention with a K/V cache, described: the key to plans, prepared launches, cases and evidence."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import InputError
from ..problem import ITEM_BYTES, LARGEST_SCALE, LOG2_E, MAX_POSITIONS, MAX_SPLITS, Strides, output_strides

_LARGEST_FP32 = (2 - 2**-23) * 2.0**127
_WIDEST_WINDOW = 2**30  # of those that hide nothing: positions less it stay in 32 bits


def dense_cache_strides(length: int, heads_kv: int, columns: int) -> Strides:
    """Return the strides of a contiguous ``[PAGES, PAGE_SIZE, HK, D]`` tensor, in elements."""
    return length * heads_kv * columns, heads_kv * columns, columns, 1


@dataclass(frozen=True, slots=True)
class CacheProblem:
    """Sizes, dtype, mask, features and memory layout of one call of ``flash_attention_with_kv_cache``.

    Strides are in elements: of q ``[B, H, Sq, D]``, of the caches ``[PAGES, PAGE_SIZE, HK, D]``; without a page table
    a page is the cache of one sequence.
    """

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    capacity: int  # the most keys of one sequence, with those appended
    head_dim: int
    head_dim_v: int
    dtype: str  # of q: "fp16", "bf16" or "fp32"
    seqlen_new: int = 0  # keys that the call appends to each sequence
    page_size: int = 0  # 0: no page table
    pages: int = 0  # of the caches; left out: as many as the sequences need
    has_seqlens: bool = True  # lengths lie on the device; without, every sequence fills its cache
    has_leftpad: bool = False
    has_batch_idx: bool = False
    is_fp8: bool = False  # keys and values in the caches are e4m3
    # Strides of scales along pages, positions and heads, 0 along axes that share one; (): there are none.
    k_scale_strides: tuple[int, ...] = ()
    v_scale_strides: tuple[int, ...] = ()
    k_by_token: bool = False  # each key has a scale of its own, and gets it where it is appended
    v_by_token: bool = False
    shared_kv: bool = False  # values are the first DV columns of the keys, in the same memory (MLA)
    causal: bool = False
    # Row m sees keys from p - left to p + right, where p = m + length - Sq; -1: no bound.
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: they do not
    sinks: str = ""  # dtype of one logit a query head; "": none
    alibi: str = ""  # dtype of the slopes, [H] or [B, H]; "": none
    alibi_stride: int = 0  # of the slopes along B; 0 where they are [H]
    bias: str = ""  # dtype of what is added to the scores, [B or 1, H or 1, Sq, capacity]; "": nothing is
    bias_strides: Strides = ()  # type: ignore[assignment] # 0 along a broadcast axis; left out: contiguous
    softmax_scale: float | None = None  # None: head_dim ** -0.5
    rotary_dim: int = 0  # columns that are rotated; 0: none
    rotary_length: int = 0  # positions of the tables
    rotary_dtype: str = ""
    rotary_interleaved: bool = False
    rotary_advance: bool = False  # query m is rotated as the m-th after the keys before, else all as the first
    num_splits: int = 0  # 0: the plan chooses
    batch_invariant: bool = False
    return_lse: bool = False
    q_strides: Strides = ()  # type: ignore[assignment] # left out: contiguous; so all below
    k_strides: Strides = ()  # type: ignore[assignment]
    v_strides: Strides = ()  # type: ignore[assignment]
    new_k_strides: Strides = ()  # type: ignore[assignment] # of [B, HK, Sn, D]
    new_v_strides: Strides = ()  # type: ignore[assignment]
    table_stride: int = 0  # of the page table along B
    rotary_stride: int = 0  # of the tables along positions
    pointer_alignment: int = 16  # bytes by which the addresses of q and the caches are multiples, 16 at the most

    def __post_init__(self) -> None:
        """Fill in what was left out, and check what does not depend on tensors."""
        if self.dtype not in ITEM_BYTES:
            raise InputError(f"dtype must be one of {', '.join(ITEM_BYTES)}, got {self.dtype!r}")
        for name in ("batch", "heads", "heads_kv", "seqlen_q", "capacity", "seqlen_new", "page_size"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.capacity >= MAX_POSITIONS:
            raise InputError(
                f"caches must have fewer than 2**31 positions a sequence, got {self.capacity}",
                hint="a page table needs no more columns than the longest sequence has pages",
            )
        for name in ("head_dim", "head_dim_v"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads_kv == 0 and self.heads != 0:
            raise InputError(f"k_cache must have a head for the {self.heads} heads of q, got 0")
        if self.heads_kv and self.heads % self.heads_kv:
            raise InputError(
                f"heads of q must be a multiple of the {self.heads_kv} of k_cache, got {self.heads}",
                hint="q is [B, H, Sq, D], caches are [B or pages, positions, HK, D]",
            )
        self._check_options()
        self._fill_in()

    def _check_options(self) -> None:
        if self.softmax_scale is not None and not abs(self.softmax_scale) <= LARGEST_SCALE:  # NaN is not
            allowed = f"finite in fp32, so at most {LARGEST_SCALE:.3g} in size"
            raise InputError(f"softmax_scale must be {allowed}, got {self.softmax_scale}")
        if not 0 <= self.softcap <= LARGEST_SCALE:
            raise InputError(f"softcap must be 0 (none) or more, at most {LARGEST_SCALE:.3g}, got {self.softcap}")
        if self.softcap and abs(self.kernel_scale) > _LARGEST_FP32:
            raise InputError(
                f"softmax_scale / softcap must be at most {LARGEST_SCALE / 2:.3g} in size, "
                f"got {self.scale:.3g} / {self.softcap:.3g}"
            )
        if len(tuple(self.window)) != 2 or min(self.window) < -1:
            raise InputError(f"window must be two integers (left, right), -1 for no bound, got {self.window}")
        if not 0 <= self.num_splits <= MAX_SPLITS:
            raise InputError(f"num_splits must be 0 (the plan chooses) to {MAX_SPLITS}, got {self.num_splits}")
        if self.shared_kv and (self.head_dim_v > self.head_dim or self.seqlen_new):
            raise InputError(
                f"with shared_kv head_dim_v must be at most D = {self.head_dim} and seqlen_new 0, "
                f"got {self.head_dim_v} and {self.seqlen_new}"
            )
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise InputError(
                f"the rotary dimension must be even and at most D = {self.head_dim}, got {self.rotary_dim}"
            )

    def _fill_in(self) -> None:
        """Bring the window into one form, in which a bound that hides nothing is -1; fill contiguous strides in.

        A left bound stays, even if it hides nothing, where the same bits are promised for every capacity.
        """
        left, right = self.window
        if left >= self.capacity - 1:  # where bits are promised, the capacity must not decide which kernel serves
            left = min(left, _WIDEST_WINDOW) if self.batch_invariant or self.num_splits else -1
        if self.causal:
            right = 0
        if right >= self.seqlen_q - 1:  # the last row sees the last key anyway
            right = -1
        object.__setattr__(self, "window", (left, right))
        length = self.page_size or self.capacity
        table = -(-self.capacity // length) if length else 0
        defaults = {
            "pages": self.batch * table,
            "table_stride": table,
            "rotary_stride": self.rotary_dim // 2,
            "q_strides": _dense(self.heads, self.seqlen_q, self.head_dim),
            "k_strides": dense_cache_strides(length, self.heads_kv, self.head_dim),
            "v_strides": dense_cache_strides(
                length, self.heads_kv, self.head_dim if self.shared_kv else self.head_dim_v
            ),
            "new_k_strides": _dense(self.heads_kv, self.seqlen_new, self.head_dim),
            "new_v_strides": _dense(self.heads_kv, self.seqlen_new, self.head_dim_v),
            "bias_strides": _dense(self.heads, self.seqlen_q, self.capacity) if self.bias else (),
        }
        for name, value in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)

    @property
    def scale(self) -> float:
        """The factor on the scores."""
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def kernel_scale(self) -> float:
        """The factor on q . k as kernels get it (in fp32): times log2(e), and for a softcap what gives tanh."""
        return 2 * self.scale * LOG2_E / self.softcap if self.softcap else self.scale * LOG2_E

    @property
    def group(self) -> int:
        """Query heads that share one K/V head."""
        return self.heads // self.heads_kv if self.heads_kv else 1

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of q and o."""
        return ITEM_BYTES[self.dtype]

    @property
    def kv_item_bytes(self) -> int:
        """Bytes of one element of the caches."""
        return 1 if self.is_fp8 else self.item_bytes

    @property
    def packed_rows(self) -> int:
        """Rows that read the same keys: the queries of all heads of one K/V head."""
        return self.seqlen_q * self.group

    @property
    def seen_keys(self) -> int:
        """The most keys of one sequence that some row sees."""
        left, _ = self.window
        return min(self.capacity, self.seqlen_q + left) if left >= 0 else self.capacity

    @property
    def output_strides(self) -> Strides:
        """Strides of the output ``[B, H, Sq, DV]``."""
        return output_strides(self.batch, self.heads, self.seqlen_q, self.head_dim_v, self.q_strides)

    @property
    def kv_bytes(self) -> float:
        """Bytes of the keys and values that some row sees, where every sequence fills its cache."""
        columns = self.head_dim + (0 if self.shared_kv else self.head_dim_v)
        return float(self.batch * self.seen_keys * self.heads_kv * columns * self.kv_item_bytes)

    @property
    def flops(self) -> float:
        """Operations where every sequence fills its cache: 2 D for a score and 2 DV for its share of the output."""
        left, right = self.window
        seen = 0
        for row in range(self.seqlen_q):
            position = row + self.capacity - self.seqlen_q
            first = max(0, position - left) if left >= 0 else 0
            end = min(self.capacity, position + right + 1) if right >= 0 else self.capacity
            seen += max(0, end - first)
        return 2.0 * self.batch * self.heads * seen * (self.head_dim + self.head_dim_v)

    def describe(self) -> str:
        """Return a short name, e.g. ``b16_h32_8_s1_8192_d128_bf16_page64``."""
        heads = f"h{self.heads}" if self.heads == self.heads_kv else f"h{self.heads}_{self.heads_kv}"
        dim = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}_{self.head_dim_v}"
        words = [f"b{self.batch}", heads, f"s{self.seqlen_q}_{self.capacity}", dim, self.dtype]
        words += [f"new{self.seqlen_new}"] if self.seqlen_new else []
        words += [f"page{self.page_size}"] if self.page_size else []
        words += ["fp8" + ("token" if self.k_by_token else "")] if self.is_fp8 else []
        words += ["shared"] if self.shared_kv else []
        words += ["causal"] if self.causal and self.seqlen_q > 1 else []
        if self.window[0] >= 0 or (self.window[1] >= 0 and not self.causal):
            words.append("window" + "_".join("inf" if size < 0 else str(size) for size in self.window))
        words += [f"splits{self.num_splits}"] if self.num_splits else []
        words += ["invariant"] if self.batch_invariant else []
        return "_".join(words)


def _dense(heads: int, seqlen: int, columns: int) -> Strides:
    return heads * seqlen * columns, seqlen * columns, columns, 1


def alignments(problem: CacheProblem) -> tuple[int, int]:
    """Return the largest powers of two, in elements, of which every row of q, and of the caches, is a multiple.

    At most 16 bytes. Where q and the caches have one dtype, both are that of all.
    """
    p = problem
    q = _alignment(p.pointer_alignment, (p.q_strides,), p.item_bytes)
    kv = _alignment(p.pointer_alignment, (p.k_strides, p.v_strides), p.kv_item_bytes)
    return (q, kv) if p.is_fp8 else (min(q, kv), min(q, kv))


def _alignment(pointer_bytes: int, strides: tuple[Strides, ...], item_bytes: int) -> int:
    bytes_ = pointer_bytes
    for stride in (stride for each in strides for stride in each[:3]):
        bytes_ = math.gcd(bytes_, stride * item_bytes)
    return max(1, bytes_ // item_bytes)
