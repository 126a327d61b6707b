"""One attention call, described: the key to plans, prepared launches, cases and evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InputError

ITEM_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
LOG2_E = math.log2(math.e)
_LARGEST_FP32 = (2 - 2**-23) * 2.0**127
LARGEST_SCALE = _LARGEST_FP32 / LOG2_E  # kernels take it times log2(e), in fp32

MAX_SPLITS = 256
MAX_POSITIONS = 2**31  # kernels count them in 32 bits
# Of windows that hide nothing where bits are not to depend on the longest sequence: sums of bounds stay in 32 bits.
_WIDEST_WINDOW = 2**29

Strides = tuple[int, int, int, int]


def dense_strides(_batch: int, heads: int, seqlen: int, head_dim: int) -> Strides:
    """Return the strides of a contiguous ``[B, H, S, D]`` tensor, in elements."""
    return heads * seqlen * head_dim, seqlen * head_dim, head_dim, 1


def canonical_strides(shape: Sequence[int], strides: Sequence[int]) -> Strides:
    """Return strides in which axes of one element, never stepped along, have 0, the last axis 1."""
    b, h, s, d = (stride if size > 1 else 0 for size, stride in zip(shape, strides, strict=True))
    return b, h, s, d if shape[3] > 1 else 1


def output_strides(batch: int, heads: int, seqlen_q: int, head_dim_v: int, q_strides: Strides) -> Strides:
    """Return the strides of the output: [B, S, H, D] in memory where q (canonical strides) is so, else contiguous."""
    _, h, s, d = q_strides
    if d == 1 and seqlen_q > 1 and heads > 1 and h < s:
        return seqlen_q * heads * head_dim_v, head_dim_v, heads * head_dim_v, 1
    return dense_strides(batch, heads, seqlen_q, head_dim_v)


def check_share(dropout_p: float) -> None:
    """Raise ``InputError`` unless it is a share of the probabilities that may be dropped."""
    if not 0 <= dropout_p < 1:  # NaN is not
        raise InputError(f"dropout_p must be at least 0 and less than 1, got {dropout_p}")


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """Sizes, dtype, mask and memory layout of one call of ``flash_attention``; strides are in elements."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str  # "fp16", "bf16" or "fp32"
    causal: bool = False
    softmax_scale: float | None = None  # None: head_dim ** -0.5
    return_lse: bool = False
    q_strides: Strides = ()  # type: ignore[assignment] # left out: contiguous
    k_strides: Strides = ()  # type: ignore[assignment]
    v_strides: Strides = ()  # type: ignore[assignment]
    pointer_alignment: int = 16  # bytes by which the addresses of q, k and v are multiples, 16 at the most
    # Row m sees keys from p - left to p + right, where p = m + Sk - Sq; -1: no bound. Kept in one form: a bound that
    # hides nothing is -1, and a right bound of 0 is ``causal``.
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: they do not
    sinks: str = ""  # dtype of one logit a query head, [H]; "": none
    alibi: str = ""  # dtype of the slopes, [H] or [B, H]; "": none
    alibi_stride: int = 0  # of the slopes along B; 0 where they are [H]
    bias: str = ""  # dtype of what is added to the scores; "": nothing is
    bias_strides: Strides = ()  # type: ignore[assignment] # of [B, H, Sq, Sk], 0 along a broadcast axis
    bias_alignment: int = 16  # bytes by which the address of the bias is a multiple, 16 at the most
    # q, k, v and o are [T, H, D], sequences in a row; seqlen_q and seqlen_k are the longest, which a bias has rows and
    # columns for. Strides have 0 for B.
    packed: bool = False
    seqused: str = ""  # of packed sequences that end before their place does: "q", "k" or "qk"
    # k and v of packed sequences are [pages, page_size, HK, D], and a table [B, P] says which pages are whose; 0: they
    # are not. Strides have that of pages for B.
    page_size: int = 0
    table_stride: int = 0  # of the page table along B
    num_splits: int = 0  # over which the keys of each sequence are split, with pages; 0: as the lengths suggest
    batch_invariant: bool = False  # the bits of a sequence depend on nothing else in the batch
    dropout_p: float = 0.0  # the share of the probabilities that are dropped; the call takes a seed where it is not 0
    # Sequences and heads that have a block mask of their own: 1 or B, and what divides H; 0: there is no mask.
    mask_batch: int = 0
    mask_heads: int = 0

    def __post_init__(self) -> None:
        """Fill contiguous strides in, and check what does not depend on tensors."""
        if self.dtype not in ITEM_BYTES:
            raise InputError(f"dtype must be one of {', '.join(ITEM_BYTES)}, got {self.dtype!r}")
        for name in ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("head_dim", "head_dim_v"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads_kv == 0 and self.heads != 0:
            raise InputError(f"k must have a head for the {self.heads} heads of q, got 0")
        if self.heads_kv and self.heads % self.heads_kv:
            raise InputError(
                f"heads of q must be a multiple of the {self.heads_kv} of k, got {self.heads}",
                hint="q is [B, H, Sq, D] and k [B, HK, Sk, D]; of tensors [B, S, H, D] pass x.transpose(1, 2)",
            )
        if self.softmax_scale is not None and not abs(self.softmax_scale) <= LARGEST_SCALE:  # NaN is not
            allowed = f"finite in fp32, so at most {LARGEST_SCALE:.3g} in size"
            raise InputError(f"softmax_scale must be {allowed}, got {self.softmax_scale}")
        self._check_features()
        shapes = {
            "q_strides": (self.batch, self.heads, self.seqlen_q, self.head_dim),
            "k_strides": (self.batch, self.heads_kv, self.seqlen_k, self.head_dim),
            "v_strides": (self.batch, self.heads_kv, self.seqlen_k, self.head_dim_v),
            **({"bias_strides": (self.batch, self.heads, self.seqlen_q, self.seqlen_k)} if self.bias else {}),
        }
        for name, (batch, heads, seqlen, columns) in shapes.items():
            if not getattr(self, name):
                page = self.page_size * heads * columns if name in ("k_strides", "v_strides") else 0
                packed = (page, columns, heads * columns, 1)
                dense = not self.packed or name == "bias_strides"
                strides = dense_strides(batch, heads, seqlen, columns) if dense else packed
                object.__setattr__(self, name, strides)

    def _check_features(self) -> None:
        """Check what changes scores and mask, and bring the window into its one form."""
        for name in ("sinks", "alibi", "bias"):
            if getattr(self, name) not in ("", *ITEM_BYTES):
                raise InputError(
                    f"the dtype of {name} must be one of {', '.join(ITEM_BYTES)}, got {getattr(self, name)!r}"
                )
        if self.seqused not in ("", "q", "k", "qk") or (self.seqused and not self.packed):
            raise InputError(f"seqused must be q, k or qk, and the sequences packed, got {self.seqused!r}")
        if self.page_size < 0 or (self.page_size and not self.packed):
            raise InputError(f"page_size must be 0 or more, and 0 unless sequences are packed, got {self.page_size}")
        if not 0 <= self.softcap <= LARGEST_SCALE:  # NaN is not
            raise InputError(f"softcap must be 0 (none) or more, at most {LARGEST_SCALE:.3g}, got {self.softcap}")
        if self.softcap and abs(self.softcap_scale) > _LARGEST_FP32:
            raise InputError(
                f"softmax_scale / softcap must be at most {LARGEST_SCALE / 2:.3g} in size, "
                f"got {self.scale:.3g} / {self.softcap:.3g}"
            )
        check_share(self.dropout_p)
        if not 0 <= self.num_splits <= MAX_SPLITS:
            expected = f"from 0 (chosen by the lengths) to {MAX_SPLITS}"
            raise InputError(f"num_splits must be {expected}, got {self.num_splits}")
        self._bring_window_into_form()

    def _bring_window_into_form(self) -> None:
        """Drop bounds that hide nothing, and call a right bound of 0 causal."""
        left, right = self.window
        if min(left, right) < -1:
            raise InputError(f"window must be two integers (left, right), -1 for no bound, got {self.window}")
        if self.batch_invariant:
            left, right = min(left, _WIDEST_WINDOW), min(right, _WIDEST_WINDOW)
        elif left >= self.seqlen_k - 1:
            left = -1
        if self.causal or (right >= self.seqlen_q - 1 and not self.batch_invariant):
            right = -1
        if right == 0:
            object.__setattr__(self, "causal", True)
            right = -1
        object.__setattr__(self, "window", (left, right))

    @property
    def scale(self) -> float:
        """The factor on the scores."""
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def scale_log2(self) -> float:
        """The factor on the scores for exponentials to base 2, as kernels get it (in fp32)."""
        return self.scale * LOG2_E

    @property
    def softcap_scale(self) -> float:
        """The factor on q . k in front of an exponential to base 2 that gives tanh, as kernels get it (in fp32)."""
        return 2 * self.scale_log2 / self.softcap

    @property
    def dropout_threshold(self) -> int:
        """The least random number of 32 bits that keeps a probability; 2**32 where none does."""
        return math.ceil(self.dropout_p * 2.0**32)

    @property
    def dropout_scale(self) -> float:
        """The factor on the probabilities that are kept."""
        return 1 / (1 - self.dropout_p)

    @property
    def bounded_right(self) -> bool:
        """Whether some keys come too late for some rows."""
        return self.causal or self.window[1] >= 0

    @property
    def bounded_left(self) -> bool:
        """Whether some keys come too early for some rows."""
        return self.window[0] >= 0

    @property
    def features(self) -> tuple[str, ...]:
        """What the call asks for besides a causal mask, a scale and an LSE, in words."""
        asked = {
            "a sliding window": self.window != (-1, -1),
            "a softcap": self.softcap > 0,
            "attention sinks": self.sinks,
            "ALiBi": self.alibi,
            "a bias": self.bias,
            "packed sequences": self.packed,
            "a page table": self.page_size > 0,
            "dropout": self.dropout_p > 0,
            "a block mask": self.mask_heads > 0,
        }
        return tuple(name for name, is_asked in asked.items() if is_asked)

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the tensors that the call takes besides q, k and v, in the order in which kernels do."""
        names = [name for name in ("sinks", "alibi", "bias") if getattr(self, name)]
        if self.packed:
            names += ["cu_seqlens_q", "cu_seqlens_k", *(f"seqused_{side}" for side in self.seqused)]
        names += ["page_table"] if self.page_size else []
        names += ["dropout_seed"] if self.dropout_p else []
        names += ["mask_lists", "mask_bits"] if self.mask_heads else []
        return tuple(names)

    @property
    def group(self) -> int:
        """Query heads that share one K/V head."""
        return self.heads // self.heads_kv if self.heads_kv else 1

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of q, k, v and o."""
        return ITEM_BYTES[self.dtype]

    @property
    def rows(self) -> int:
        """Rows of the output over all heads and sequences."""
        return self.batch * self.heads * self.seqlen_q

    @property
    def output_strides(self) -> Strides:
        """Strides of the output."""
        if self.packed:
            return 0, self.head_dim_v, self.heads * self.head_dim_v, 1
        return output_strides(self.batch, self.heads, self.seqlen_q, self.head_dim_v, self.q_strides)

    @property
    def visible_scores(self) -> int:
        """Pairs of a query and a key that it may see, per head; of packed sequences, were all the longest."""
        left, right = self.window
        seen = self.seqlen_q * self.seqlen_k
        if self.bounded_right:
            seen = self._keys_up_to(max(0, right))
        return seen - (self._keys_up_to(-left - 1) if self.bounded_left else 0)

    def _keys_up_to(self, reach: int) -> int:
        """Return the pairs of row m and key n with n <= m + Sk - Sq + reach."""
        first = self.seqlen_k - self.seqlen_q + reach + 1  # keys of row 0, were there any number of them
        without = min(max(0, -first), self.seqlen_q)  # rows
        whole = min(max(0, first + self.seqlen_q - self.seqlen_k), self.seqlen_q - without)  # rows that see all
        between = self.seqlen_q - without - whole
        return whole * self.seqlen_k + between * (first + without) + between * (between - 1) // 2

    @property
    def flops(self) -> float:
        """Operations of a call: for every visible score, 2 D for it and 2 DV for its share of the output."""
        return 2.0 * self.batch * self.heads * self.visible_scores * (self.head_dim + self.head_dim_v)

    def describe(self) -> str:
        """Return a short name, e.g. ``b1_h16_s512_d64_fp16_causal``."""
        heads = f"h{self.heads}" if self.heads == self.heads_kv else f"h{self.heads}_{self.heads_kv}"
        seqlen = f"s{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"s{self.seqlen_q}_{self.seqlen_k}"
        dim = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}_{self.head_dim_v}"
        words = [f"b{self.batch}", heads, seqlen, dim, self.dtype]
        words += ["causal"] if self.causal else []
        if self.window != (-1, -1):
            words.append("window" + "_".join("all" if size < 0 else str(size) for size in self.window))
        words += [f"softcap{self.softcap:g}"] if self.softcap else []
        words += [name for name in ("sinks", "alibi", "bias", "packed") if getattr(self, name)]
        words += [f"page{self.page_size}"] if self.page_size else []
        words += [f"splits{self.num_splits}"] if self.num_splits else []
        words += ["invariant"] if self.batch_invariant else []
        words += [f"dropout{self.dropout_p:g}"] if self.dropout_p else []
        words += [f"mask{self.mask_batch}_{self.mask_heads}"] if self.mask_heads else []
        return "_".join(words)
