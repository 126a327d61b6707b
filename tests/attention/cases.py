"""Problems that a forward kernel must get right, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One problem; ``why`` names the test."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: bool
    why: str

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        lengths, dims = f"{self.seqlen_q}x{self.seqlen_k}", f"{self.head_dim}_{self.head_dim_v}"
        return f"{self.why}-{self.batch}x{self.heads}_{self.heads_kv}x{lengths}x{dims}-{self.dtype}-{mask}"


# (Sq, Sk) of FlashAttention's own tests.
PAIRS = (
    (1, 1), (64, 128), (128, 192), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211), (108, 256),
    (384, 256), (640, 128), (512, 256), (1023, 1024), (1024, 1023),
)  # fmt: skip
HEAD_DIMS = (1, 4, 32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)

SMALL = [
    Case(1, 1, 1, 4, 4, 4, 4, "fp16", False, why="story-smallest"),
    Case(1, 1, 1, 65, 65, 64, 64, "fp16", False, why="story-odd"),
    Case(2, 2, 2, 33, 47, 64, 64, "fp16", True, why="causal-more-keys"),
    Case(2, 2, 2, 47, 33, 64, 64, "fp16", True, why="causal-rows-without-keys"),
    Case(1, 4, 2, 19, 23, 80, 80, "fp16", True, why="gqa-d80"),
    Case(2, 6, 1, 17, 31, 111, 111, "fp16", False, why="mqa-odd-dim"),
    Case(1, 2, 2, 40, 56, 64, 32, "fp16", False, why="dv-smaller"),
    Case(1, 2, 1, 21, 70, 48, 96, "fp16", True, why="dv-larger"),
    Case(1, 2, 2, 1, 129, 64, 64, "fp16", True, why="one-row"),
    Case(1, 2, 2, 33, 1, 64, 64, "fp16", False, why="one-key"),
    Case(1, 1, 1, 5, 7, 1, 1, "fp16", False, why="one-column"),
    Case(1, 2, 2, 40, 40, 64, 64, "fp32", True, why="fp32"),
    Case(1, 1, 1, 20, 40, 256, 256, "fp32", False, why="fp32-d256"),
    Case(1, 1, 1, 24, 40, 256, 256, "fp16", True, why="d256"),
]
EMPTY = [
    Case(0, 2, 2, 4, 4, 64, 64, "fp16", False, why="no-batch"),
    Case(2, 0, 0, 4, 4, 64, 64, "fp16", False, why="no-heads"),
    Case(2, 2, 2, 0, 4, 64, 64, "fp16", True, why="no-rows"),
    Case(2, 2, 2, 4, 0, 64, 64, "fp16", False, why="no-keys"),
    Case(2, 2, 2, 4, 0, 64, 64, "fp16", True, why="no-keys-causal"),
]


@dataclass(frozen=True)
class FeatureCase(Case):
    """One problem with features; tensors are named by their dtypes, "" for none."""

    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: str = ""
    alibi: str = ""
    alibi_axes: int = 1  # [H], or 2 for [B, H]
    bias: str = ""
    bias_heads: tuple[bool, bool] = (True, True)  # whether it has a batch and heads of its own
    scale: float | None = None
    splits: int = 1
    dropout: float = 0.0

    def __str__(self) -> str:
        return super().__str__()

    @property
    def keys_within_reach(self) -> tuple[int, int]:
        """Keys, in whole tiles of 32, outside of which the window hides all from every row."""
        middle, (left, right) = self.seqlen_k - self.seqlen_q, self.window
        right = 0 if self.causal else right
        first = max(0, middle - left) // 32 * 32 if left >= 0 else 0
        last = middle + self.seqlen_q - 1 + right if right >= 0 else self.seqlen_k
        return first, min(self.seqlen_k, -(-(last + 1) // 32) * 32)


@dataclass(frozen=True)
class VarlenCase:
    """Packed sequences; ``why`` names the test."""

    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: bool
    why: str
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: str = ""
    alibi: str = ""
    alibi_axes: int = 1
    bias: str = ""
    bias_heads: tuple[bool, bool] = (True, True)
    seqused_q: tuple[int, ...] | None = None
    seqused_k: tuple[int, ...] | None = None
    tail: int = 0  # tokens behind the last sequence
    spare: int = 0  # that the maxima are longer than the longest sequence
    dropout: float = 0.0
    page_size: int = 0  # keys lie in pages of so many; 0: in a row, as queries do

    def __str__(self) -> str:
        return f"{self.why}-{len(self.seqlens_q)}x{self.heads}_{self.heads_kv}x{self.head_dim}-{self.dtype}"


@dataclass(frozen=True)
class Ordering:
    """Packed sequences to be ordered; ``why`` names the test."""

    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    heads: int
    block_m: int
    why: str
    seqused_q: tuple[int, ...] | None = None
    seqused_k: tuple[int, ...] | None = None
    together_keys: int | None = None

    def __str__(self) -> str:
        return self.why


_F = FeatureCase
FEATURES = [
    _F(1, 2, 1, 40, 70, 32, 32, "fp16", True, window=(5, -1), why="window-narrower-than-a-tile"),
    _F(1, 2, 2, 70, 70, 32, 32, "fp16", True, window=(40, 0), why="window-of-several-tiles"),
    _F(1, 2, 2, 40, 100, 32, 32, "fp16", False, window=(33, 7), why="window-on-both-sides"),
    _F(1, 2, 2, 70, 40, 32, 32, "fp16", False, window=(-1, 7), why="window-right-rows-without-keys"),
    _F(1, 2, 2, 70, 40, 32, 32, "fp16", False, window=(3, -1), why="window-left-more-rows"),
    _F(1, 1, 1, 50, 50, 16, 16, "fp16", False, window=(0, 0), why="window-of-one-key"),
    _F(1, 2, 1, 1, 129, 64, 64, "fp16", True, window=(31, -1), why="window-one-row"),
    _F(1, 2, 2, 33, 40, 40, 24, "fp32", True, softcap=2.0, why="softcap-fp32"),
    _F(1, 2, 1, 48, 80, 32, 32, "fp32", True, window=(70, 0), softcap=50.0, why="softcap-far-above-the-scores"),
    _F(2, 2, 1, 40, 33, 64, 64, "fp16", True, softcap=30.0, why="softcap-rows-without-keys"),
    _F(1, 4, 2, 20, 70, 32, 32, "fp16", True, sinks="bf16", why="sinks"),
    _F(1, 4, 2, 40, 24, 32, 32, "fp32", True, sinks="fp32", why="sinks-rows-without-keys"),
    _F(2, 4, 2, 24, 40, 32, 32, "fp16", False, alibi="fp32", why="alibi-full"),
    _F(2, 2, 2, 24, 40, 32, 32, "fp32", True, alibi="fp32", alibi_axes=2, why="alibi-of-each-sequence"),
    _F(2, 4, 2, 20, 70, 32, 32, "fp16", False, bias="fp32", why="bias"),
    _F(2, 2, 1, 37, 37, 32, 32, "fp16", True, bias="fp16", bias_heads=(False, True), why="bias-of-heads"),
    _F(2, 2, 2, 20, 41, 32, 32, "fp32", False, bias="bf16", bias_heads=(True, False), why="bias-of-sequences"),
    _F(2, 2, 2, 33, 40, 111, 111, "fp16", False, bias="fp32", bias_heads=(False, False), softcap=5.0, why="bias-cap"),
    _F(1, 2, 2, 20, 200, 32, 32, "fp16", True, window=(90, -1), sinks="fp16", splits=3, why="split-window-sinks"),
    _F(1, 2, 2, 50, 150, 32, 32, "fp16", False, softcap=3.0, alibi="fp16", splits=4, why="split-softcap-alibi"),
    _F(1, 2, 2, 20, 150, 32, 32, "fp16", True, bias="fp32", sinks="fp32", splits=2, why="split-bias-sinks"),
    # Of FlashAttention's list of lengths, and of the head dimensions in use.
    _F(1, 1, 1, 239, 1, 40, 40, "fp16", True, window=(9, -1), sinks="fp16", why="one-key"),
    _F(1, 1, 1, 113, 203, 59, 59, "fp16", True, window=(60, -1), softcap=5.0, why="odd"),
    _F(1, 1, 1, 108, 256, 96, 96, "fp16", False, sinks="bf16", alibi="fp32", why="even"),
    _F(1, 1, 1, 64, 128, 128, 128, "fp16", False, window=(20, 30), bias="bf16", why="round"),
    _F(
        2, 4, 2, 33, 70, 48, 80, "fp16", True, window=(20, -1), softcap=4.0, sinks="fp32", alibi="fp32", alibi_axes=2,
        bias="fp16", scale=-0.3, why="all-at-once",
    ),
    _F(2, 4, 2, 40, 70, 32, 32, "fp16", True, dropout=0.3, why="dropout-gqa"),
    _F(2, 2, 2, 37, 65, 40, 24, "fp32", False, dropout=0.75, why="dropout-odd"),
    _F(1, 2, 2, 70, 40, 32, 32, "fp16", True, window=(33, -1), sinks="fp32", dropout=0.1, why="dropout-window-sinks"),
    _F(1, 2, 1, 20, 200, 32, 32, "fp16", True, dropout=0.5, splits=3, why="split-dropout"),
    _F(
        2, 4, 2, 33, 70, 48, 80, "fp32", True, window=(20, -1), softcap=4.0, sinks="fp16", alibi="fp32", alibi_axes=2,
        bias="bf16", bias_heads=(False, True), dropout=0.4, why="dropout-all-at-once",
    ),
]  # fmt: skip
_V = VarlenCase
VARLEN = [
    _V((5, 40, 17), (9, 33, 60), 4, 2, 32, 32, "fp16", False, why="full"),
    _V((5, 40, 17), (9, 33, 60), 4, 2, 32, 48, "fp16", True, why="causal-dv-larger"),
    _V((5, 0, 40, 0, 3), (0, 7, 33, 0, 50), 2, 1, 32, 32, "fp16", True, why="empty-sequences", spare=70),
    _V((0, 0), (3, 4), 2, 2, 32, 32, "fp16", False, why="no-rows"),
    _V((3, 4), (0, 0), 2, 2, 32, 32, "fp16", True, sinks="fp32", why="no-keys"),
    _V((), (), 2, 2, 32, 32, "fp16", True, why="no-sequences"),
    _V((1, 1, 1), (70, 1, 33), 4, 1, 40, 40, "fp32", True, why="one-row-each"),
    _V((20, 40), (60, 40), 2, 2, 32, 32, "fp16", True, seqused_k=(33, 7), why="seqused-k", tail=5),
    _V((20, 40), (60, 40), 2, 2, 32, 32, "fp16", False, seqused_q=(3, 0), seqused_k=(0, 9), why="seqused-both"),
    _V((33, 50), (70, 50), 4, 2, 32, 32, "fp16", True, window=(11, -1), softcap=4.0, why="window-softcap"),
    _V((33, 50), (70, 20), 4, 2, 32, 32, "fp16", False, window=(9, 5), sinks="bf16", why="window-sinks", tail=3),
    _V((33, 20), (33, 70), 4, 2, 32, 32, "fp16", True, alibi="fp32", alibi_axes=2, why="alibi"),
    _V((5, 0, 40), (9, 7, 60), 4, 2, 32, 48, "fp16", True, dropout=0.3, why="dropout", tail=3),
    _V(
        (20, 9), (60, 40), 2, 2, 32, 32, "fp32", False, seqused_k=(33, 7), sinks="fp32", dropout=0.6, why="dropout-used"
    ),
    _V((5, 0, 40, 7), (9, 6, 33, 70), 4, 2, 32, 48, "fp16", True, bias="fp32", why="bias", tail=3, spare=6),
    _V(
        (37, 20, 9),
        (33, 70, 5),
        4,
        1,
        40,
        24,
        "fp32",
        False,
        window=(20, 7),
        bias="bf16",
        bias_heads=(True, False),
        seqused_q=(36, 0, 9),
        seqused_k=(33, 61, 0),
        why="bias-of-sequences-used",
    ),
    _V(
        (40, 3, 17),
        (65, 40, 17),
        4,
        2,
        32,
        32,
        "fp16",
        False,
        bias="fp16",
        bias_heads=(False, True),
        sinks="fp32",
        window=(30, 5),
        why="bias-of-heads",
    ),
    _V(
        (33, 0, 20),
        (40, 7, 70),
        4,
        2,
        32,
        32,
        "fp16",
        True,
        bias="fp32",
        bias_heads=(False, False),
        softcap=4.0,
        alibi="fp32",
        alibi_axes=2,
        dropout=0.3,
        why="bias-shared",
    ),
    _V((20, 9), (0, 0), 2, 1, 32, 32, "fp16", False, bias="fp32", sinks="fp32", why="bias-no-keys", spare=3),
    _V((20, 9), (60, 40), 2, 2, 32, 32, "fp16", False, bias="fp32", seqused_q=(0, 8), why="bias-no-rows-used"),
    _V((), (), 2, 2, 32, 32, "fp16", True, bias="fp32", bias_heads=(False, False), spare=5, why="bias-no-sequences"),
    _V((0, 0), (0, 0), 2, 2, 32, 32, "fp16", True, bias="fp32", why="bias-of-nothing"),
]


# Packed queries over keys in pages. In the interpreter a tile has 32 keys: pages of less, of more and of other sizes.
_ALL: dict[str, Any] = {"window": (20, 3), "softcap": 4.0, "sinks": "bf16", "alibi": "fp32", "alibi_axes": 2}
PAGED = [
    _V((5, 40, 17), (9, 33, 60), 4, 2, 32, 48, "fp16", True, page_size=1, why="pages-of-1"),
    _V((5, 40, 17), (9, 33, 60), 4, 2, 32, 32, "fp16", False, page_size=3, why="pages-of-3"),
    _V((5, 40, 17), (9, 33, 60), 4, 1, 40, 40, "fp32", True, page_size=16, why="pages-of-16"),
    _V((5, 40, 17), (9, 65, 128), 4, 2, 32, 32, "fp16", True, page_size=64, why="pages-of-64"),
    _V((5, 0, 40, 0, 3), (0, 7, 33, 0, 50), 2, 1, 32, 32, "fp16", True, page_size=3, spare=70, why="empty-paged"),
    _V((3, 4), (0, 0), 2, 2, 32, 32, "fp16", True, sinks="fp32", page_size=16, why="no-keys-paged"),
    _V((), (), 2, 2, 32, 32, "fp16", True, page_size=16, why="no-sequences-paged"),
    _V((1, 1, 1), (70, 1, 33), 4, 2, 32, 32, "fp32", False, page_size=5, tail=2, why="one-row-each-paged"),
    _V(
        (20, 40, 9), (60, 40, 50), 2, 2, 32, 32, "fp16", True, seqused_k=(33, 7, 50), page_size=8, why="seqused-k-paged"
    ),
    _V((20, 40), (60, 90), 2, 2, 32, 32, "fp16", False, seqused_q=(3, 0), seqused_k=(9, 80), page_size=16, why="used"),
    _V((33, 20), (170, 150), 2, 1, 32, 32, "fp16", True, window=(11, -1), page_size=3, why="pages-behind-a-window"),
    _V((33, 20), (170, 150), 2, 1, 32, 32, "fp16", True, window=(40, -1), page_size=64, why="wide-pages-behind"),
    _V((33, 40), (170, 20), 4, 2, 32, 32, "fp16", False, page_size=16, why="all-paged", **_ALL),
    _V((33, 40), (170, 20), 4, 2, 32, 32, "fp32", False, page_size=64, why="all-wide-pages", **_ALL),
    _V((5, 40, 17), (9, 33, 60), 4, 2, 32, 48, "fp16", True, page_size=3, bias="fp32", spare=5, why="bias-paged"),
    _V(
        (33, 20),
        (170, 150),
        4,
        1,
        32,
        32,
        "fp32",
        False,
        page_size=64,
        bias="fp16",
        bias_heads=(False, True),
        seqused_q=(30, 0),
        seqused_k=(165, 9),
        why="bias-of-heads-paged",
        **_ALL,
    ),
]


@dataclass(frozen=True)
class Gradients:
    """The gradients of a case."""

    case: Case | VarlenCase
    through_lse: bool = False  # whether the LSE has a gradient too
    turned: bool = False  # whether it is tried in another memory layout too
    far: bool = False  # whether the keys of its bias are tried more than 2**31 elements apart too
    low: bool = False  # whether all scores are so low that a score of 0 would weigh infinitely much
    summed: bool = False  # whether dK and dV are added to fp32 tensors too

    @property
    def why(self) -> str:
        return self.case.why

    def __str__(self) -> str:
        return f"{self.case}{'-lse' if self.through_lse else ''}"


def _of(cases: list[Any], *whys: str) -> list[Gradients]:
    named = {case.why: case for case in cases}
    return [Gradients(named[why]) for why in whys]


GRADIENTS = [
    Gradients(Case(1, 2, 1, 37, 60, 64, 64, "fp16", True, why="several-tiles")),
    Gradients(Case(2, 4, 2, 19, 23, 40, 24, "fp16", True, why="layout"), turned=True, summed=True),
    Gradients(Case(1, 1, 1, 20, 37, 32, 32, "fp16", False, why="low-scores"), low=True),
    Gradients(Case(1, 1, 1, 70, 65, 32, 32, "fp32", True, why="tiles-and-empty-rows"), through_lse=True, summed=True),
    Gradients(Case(1, 2, 2, 64, 64, 32, 32, "fp16", False, why="whole-tiles")),
    Gradients(Case(1, 1, 1, 24, 40, 192, 128, "fp16", True, why="d192-dv128")),
    Gradients(VarlenCase((9, 20), (20, 9), 2, 1, 144, 144, "fp16", False, "apart", seqused_k=(13, 9)), summed=True),
    Gradients(Case(2, 2, 1, 47, 33, 64, 64, "fp16", True, why="causal-rows-without-keys"), through_lse=True),
    *_of(SMALL, "story-smallest", "story-odd", "gqa-d80", "mqa-odd-dim", "dv-smaller", "dv-larger", "one-row"),
    *_of(SMALL, "one-key", "one-column", "fp32"),
    *_of(EMPTY, "no-batch", "no-heads", "no-rows", "no-keys", "no-keys-causal"),
    *_of(FEATURES, "window-narrower-than-a-tile", "window-of-several-tiles", "window-on-both-sides"),
    *_of(FEATURES, "window-right-rows-without-keys", "window-left-more-rows", "window-of-one-key"),
    *_of(
        FEATURES,
        "softcap-fp32",
        "softcap-far-above-the-scores",
        "softcap-rows-without-keys",
        "sinks",
        "alibi-full",
        "alibi-of-each-sequence",
    ),
    *_of(FEATURES, "bias-of-heads", "bias-of-sequences", "bias-cap", "all-at-once"),
    *_of(FEATURES, "dropout-gqa", "dropout-odd", "dropout-all-at-once"),
    Gradients(
        FeatureCase(
            1, 2, 2, 70, 40, 32, 32, "fp16", True, "dropout-window-sinks", window=(33, -1), sinks="fp32", dropout=0.1
        ),
        through_lse=True,
    ),
    Gradients(FeatureCase(1, 2, 1, 40, 37, 144, 144, "fp16", False, bias="fp32", dropout=0.5, why="dropout-apart")),
    Gradients(FeatureCase(2, 2, 1, 20, 33, 32, 32, "fp16", False, bias="fp32", why="bias"), turned=True),
    Gradients(
        FeatureCase(1, 2, 1, 20, 300, 16, 16, "fp16", False, bias="fp16", bias_heads=(True, False), why="bias-far"),
        far=True,
    ),
    Gradients(
        FeatureCase(1, 4, 2, 40, 24, 32, 32, "fp32", True, sinks="fp32", why="sinks-rows-without-keys"),
        through_lse=True,
    ),
    *_of(VARLEN, "causal-dv-larger", "empty-sequences", "no-rows", "no-keys", "no-sequences", "one-row-each"),
    Gradients(
        VarlenCase((20, 9), (60, 40), 2, 2, 32, 32, "fp16", False, "keys-not-used", seqused_k=(33, 7), tail=5),
        summed=True,
    ),
    *_of(VARLEN, "seqused-k", "seqused-both", "window-softcap", "window-sinks", "alibi"),
    *_of(VARLEN, "dropout", "dropout-used"),
    *_of(VARLEN, "bias-of-sequences-used", "bias-of-heads", "bias-shared"),
    *(Gradients(case, through_lse=True) for case in VARLEN if case.why == "bias"),
    *_of(VARLEN, "bias-no-keys", "bias-no-rows-used", "bias-no-sequences", "bias-of-nothing"),
]
