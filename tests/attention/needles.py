"""Needles in a long cache: one key for each query, which the query has to find among random ones.

The output has the value of the needle in it, a codeword, and the values of other keys that happen to score as high. The
answer is the codeword nearest to the output. A needle scores about as high as the best of the other keys. So some
answers are wrong with exact keys, too, and small errors of the scores change others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flashmoe_science import flash_attention_with_kv_cache

PAGE_SIZE = 64
CODEWORDS = 32
OUTLIERS = 4  # columns of each head that are 10 to 20 times as large as the others
SCALES = ("all", "head", "token")  # what has a scale in an fp8 cache
SHARPNESS = 5.0  # standard deviation of the scores: at 131,072 keys a needle has a seventh of the weight


@dataclass(frozen=True)
class Haystack:
    """Sizes of the caches, and how hard the needles are to find."""

    keys: int  # of each sequence
    strength: float  # the score of a needle, in standard deviations of the others: with more keys it has to be higher
    sequences: int
    heads_kv: int
    group: int  # query heads of each K/V head
    queries: int = 1  # of each sequence, one after the other
    head_dim: int = 128
    # "wide": outliers are any numbers, and queries are small there. "shifted": outliers are a constant plus what any
    # other column has. So they say no more than others do, and a shifted one is rounded more coarsely.
    outliers: str = "none"


class Trials(NamedTuple):
    """Queries, what the cache will hold, and the codeword that each query has to find."""

    q: torch.Tensor  # [B, H, Sq, D]
    k: torch.Tensor  # [B, HK, S, D]
    v: torch.Tensor  # [B, HK, S, D]
    codebook: torch.Tensor  # [CODEWORDS, D]
    answers: torch.Tensor  # [B, H, Sq]


def make_trials(haystack: Haystack, device: str, seed: int) -> Trials:
    """Return bf16 tensors with a needle for every query, at depths from the first key to the last."""
    generator = torch.Generator(device).manual_seed(seed)
    batch, heads_kv, dim = haystack.sequences, haystack.heads_kv, haystack.head_dim
    rows = haystack.group * haystack.queries  # queries of one K/V head

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    codebook = torch.nn.functional.normalize(normal(CODEWORDS, dim), dim=-1) * dim**0.5
    answers = torch.randint(CODEWORDS, (batch, heads_kv, rows), generator=generator, device=device)
    # Each stretch of the cache has one needle. Queries have theirs in any order, so that no head has all late ones.
    stretch = haystack.keys // rows
    depths = uniform(batch, heads_kv, rows).argsort(-1) * stretch + (uniform(batch, heads_kv, rows) * stretch).long()
    places = depths[..., None].expand(-1, -1, -1, dim)

    q = torch.nn.functional.normalize(normal(batch, heads_kv, rows, dim), dim=-1)
    k, v = (normal(batch, heads_kv, haystack.keys, dim) for _ in "kv")
    needles = k.gather(2, places)
    # All needles score the same: their luck would hide that of rounding.
    k.scatter_(2, places, needles + (haystack.strength - (needles * q).sum(-1, keepdim=True)) * q)
    v.scatter_(2, places, codebook[answers])

    size = 0.25 * 16 ** uniform(heads_kv, 1, 1).expand(-1, -1, dim)  # one scale has to serve small and large heads
    outliers = uniform(heads_kv, 1, dim).argsort(-1) < OUTLIERS
    factor = 10 + 10 * uniform(heads_kv, 1, dim)
    if haystack.outliers == "shifted":
        k += factor * outliers
    elif haystack.outliers == "wide":
        size = size * torch.where(outliers, factor, 1.0)
    k *= size
    q *= dim**0.5 / size
    shape = (batch, heads_kv * haystack.group, haystack.queries)
    return Trials(q.bfloat16().view(*shape, dim), k.bfloat16(), v.bfloat16(), codebook, answers.view(shape))


def find(trials: Trials, scales: str = "") -> torch.Tensor:
    """Append all keys to an empty cache, attend with one query after the other, and return which found their codewords.

    ``scales`` is "" for a bf16 cache, else one of ``SCALES``.
    """
    batch, heads_kv, keys, dim = trials.k.shape
    device, pages = trials.k.device, batch * keys // PAGE_SIZE
    caches: dict[str, Any] = {"page_table": torch.randperm(pages).view(batch, -1).int().to(device)}
    for side, new in (("k", trials.k), ("v", trials.v)):
        shape = (pages, PAGE_SIZE, heads_kv)
        dtype = torch.float8_e4m3fn if scales else torch.bfloat16
        caches[f"{side}_cache"] = torch.zeros(*shape, dim, dtype=dtype, device=device)
        if scales == "token":
            caches[f"{side}_scale"] = torch.zeros(shape, device=device)  # the call writes them
        elif scales:
            largest = new.abs().amax((0, 2, 3)) if scales == "head" else new.abs().amax()
            caches[f"{side}_scale"] = largest.float() / 448
    found = []
    for n in range(trials.q.shape[2]):
        k, v = (None, None) if n else (trials.k, trials.v)
        lengths = torch.full((batch,), keys if n else 0, dtype=torch.int32, device=device)
        o = flash_attention_with_kv_cache(
            trials.q[:, :, n : n + 1], **caches, k=k, v=v, cache_seqlens=lengths, softmax_scale=SHARPNESS * dim**-0.5,
        )  # fmt: skip
        found.append((o.float() @ trials.codebook.T).argmax(-1))
    return torch.cat(found, 2) == trials.answers


def centred(trials: Trials) -> Trials:
    """Return the trials with the mean of every column taken from the keys: all scores of a query fall by the same."""
    return trials._replace(k=trials.k - trials.k.mean(2, keepdim=True, dtype=torch.float32).bfloat16())
