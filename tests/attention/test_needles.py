"""Retrieval from long caches: an fp8 cache finds the needles that a bf16 cache finds, less 1 % of all at the most."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from .needles import SCALES, Haystack, centred, find, make_trials

ALLOWED = 0.01  # the share of all trials by which an fp8 cache may find fewer
SMALL = Haystack(keys=2048, strength=3.4, sequences=1, heads_kv=64, group=128)
LARGE = Haystack(keys=131_072, strength=4.3, sequences=2, heads_kv=8, group=16, queries=8)
SEEDS = 16  # of LARGE: 32,768 trials


def losses(
    haystack: Haystack, device: str, seeds: int, *, scales: tuple[str, ...] = SCALES, centre: bool = False
) -> dict[str, float]:
    """Return by which share of the same trials an fp8 cache with each kind of scale finds fewer than a bf16 cache.

    With ``centre`` the fp8 cache gets centred keys, and the bf16 cache those as they are.
    """
    found: dict[str, list[torch.Tensor]] = {kind: [] for kind in ("", *scales)}
    for seed in range(seeds):
        trials = make_trials(haystack, device, seed)
        found[""].append(find(trials))
        given = centred(trials) if centre else trials
        for kind in scales:
            found[kind].append(find(given, kind))
    in_bf16, *in_fp8 = (torch.stack(parts).double().flatten() for parts in found.values())
    accuracy = in_bf16.mean().item()
    assert 0.6 < accuracy < 0.95, f"a bf16 cache finds {accuracy:.3f}: caches differ where it finds most, not all"
    lost = {}
    for kind, right in zip(scales, in_fp8, strict=True):
        less = in_bf16 - right
        lost[kind] = less.mean().item()
        error = less.std().item() / less.numel() ** 0.5
        print(f"{haystack}: bf16 {accuracy:.4f}, {kind} {'centred ' * centre}loses {lost[kind]:.4f} ± {error:.4f}")
        assert error < ALLOWED / 3, f"{less.numel()} trials are too few to tell a loss of {ALLOWED}"
    return lost


def with_outliers(haystack: Haystack, outliers: str) -> Haystack:
    return dataclasses.replace(haystack, outliers=outliers)


@pytest.mark.parametrize("outliers", ["none", "wide"])
def test_an_fp8_cache_finds_as_many(outliers):
    lost = losses(with_outliers(SMALL, outliers), "cpu", 1)
    assert max(lost.values()) <= ALLOWED, lost


@pytest.mark.gpu
@pytest.mark.parametrize("outliers", ["none", "wide"])
def test_an_fp8_cache_finds_as_many_on_a_gpu(outliers):
    lost = losses(with_outliers(LARGE, outliers), "cuda", SEEDS)
    assert max(lost.values()) <= ALLOWED, lost


# A limit of e4m3: next to a constant of 15 what a column says has steps of 1. No scale helps, but subtraction does.
def test_a_constant_in_the_keys_costs_needles():
    shifted = with_outliers(SMALL, "shifted")
    lost = losses(shifted, "cpu", 2, scales=("all",))["all"]
    lost_centred = losses(shifted, "cpu", 2, scales=("all",), centre=True)["all"]
    assert lost_centred <= ALLOWED
    assert lost - lost_centred > ALLOWED / 2, "the page about caches says that it helps to subtract the constant"


@pytest.mark.gpu
def test_a_constant_in_the_keys_costs_needles_on_a_gpu():
    shifted = with_outliers(LARGE, "shifted")
    lost = losses(shifted, "cuda", SEEDS)
    assert all(ALLOWED < share < 4 * ALLOWED for share in lost.values()), f"the page about caches says so, got {lost}"
    lost_centred = losses(shifted, "cuda", SEEDS, centre=True)
    assert max(lost_centred.values()) <= ALLOWED, lost_centred
