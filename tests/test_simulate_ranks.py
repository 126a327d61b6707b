"""The simulation of many ranks: what it fits, and that its page has its tables."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_SPEC = importlib.util.spec_from_file_location("simulate_ranks", ROOT / "tools" / "simulate_ranks.py")
assert _SPEC is not None
assert _SPEC.loader is not None
simulate_ranks = importlib.util.module_from_spec(_SPEC)
sys.modules["simulate_ranks"] = simulate_ranks
_SPEC.loader.exec_module(simulate_ranks)


def test_the_page_has_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate_ranks.py", "--check"])
    simulate_ranks.main()


def test_another_table_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "scaling.md"
    page.write_text(simulate_ranks.PAGE.read_text(encoding="utf-8").replace("| 16k |", "| 17k |"), encoding="utf-8")
    monkeypatch.setattr(simulate_ranks, "PAGE", page)
    monkeypatch.setattr(sys, "argv", ["simulate_ranks.py", "--check"])
    with pytest.raises(SystemExit, match="has other tables"):
        simulate_ranks.main()


def test_a_bandwidth_that_made_the_times_is_found() -> None:
    exchange = simulate_ranks.Exchange(2e8)
    passes = [simulate_ranks.Pass(kernels, sent, 2) for kernels, sent in ((1.0, 1e8), (5.0, 3e8), (20.0, 2e9))]
    assert simulate_ranks.fit((each, exchange.time(each)) for each in passes).bandwidth == pytest.approx(2e8)


def test_heads_and_gather_send_an_eighth_between_hosts() -> None:
    record = {"causal 65536": {"one GPU": {"forward": 500.0, "backward": 400.0}}}
    exchange, tokens = simulate_ranks.Exchange(1e8), 2**20
    passes = simulate_ranks.attention(record, tokens, 64, "gather")
    kernels = sum(each.kernels for each in passes.values())
    row = simulate_ranks.HEADS_KV * simulate_ranks.D * 2 * (2 + 6)  # bytes of K and V, and in backward again
    between = tokens / 8 * row * 7 / 8 / simulate_ranks.NETWORK + 3 * (0.07 + 6 * simulate_ranks.HOP)
    own = 2 * (simulate_ranks.HEADS + simulate_ranks.HEADS_KV) * simulate_ranks.D * 2
    within = 2 * tokens / 64 * own * 7 / 8 / 1e8 + 4 * (0.07 + 6 * simulate_ranks.HOP)
    found = simulate_ranks.share_in_two_dimensions(record, tokens, exchange, 64)
    assert found == pytest.approx(kernels / (kernels + between + within))


def test_one_group_hides_nothing_and_many_hide_all_but_ends_and_copies() -> None:
    exchange = simulate_ranks.Exchange(1e8)
    each = simulate_ranks.Pass(10.0, 2.61e8, 2)  # 1 ms on the link, 2.61 with copies
    starts = 2 * simulate_ranks.STARTS["collectives"]
    assert exchange.time_in_groups(each, 1, "collectives") == pytest.approx(exchange.time(each))
    expected = 10 + 1.61 + 1 / 4 + starts
    assert exchange.time_in_groups(each, 4, "collectives") == pytest.approx(expected)
    # Where the link is the longer, kernels hide under it.
    short = simulate_ranks.Pass(0.1, 2.61e8, 2)
    assert exchange.time_in_groups(short, 2, "collectives") == pytest.approx(0.1 / 2 + 1.61 + 1 + 2 * starts, rel=0.05)
