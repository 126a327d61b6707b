"""What a call of attention over ranks sends, in words: for people, who see why a strategy was chosen."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from .layout import PackedLayout

# Milliseconds of a small exchange, and bytes a millisecond of a large one, between two H100 (tools/simulate_ranks.py).
_NVLINK = {"collectives": (0.07, 261e6), "symmetric": (0.032, 369e6)}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a rank's tensors."""

    ranks: int
    batch: int
    tokens: int
    heads: int
    heads_kv: int
    columns: int  # of q and k, and of v and o, together
    item_bytes: int
    gather_ranks: int = 1  # by "heads+gather", where ``ranks`` divide heads
    may_keep: bool = True  # by "gather", keys that came, for the gradients; not by "heads+gather"

    def between_hosts(self) -> Sizes:
        """Return the sizes for ranks that gather keys of the same heads, once others have divided these."""
        heads, heads_kv, tokens = self.heads // self.ranks, self.heads_kv // self.ranks, self.tokens * self.ranks
        return dataclasses.replace(
            self, ranks=self.gather_ranks, tokens=tokens, heads=heads, heads_kv=heads_kv, may_keep=False
        )

    def keeps(self, packed: PackedLayout | None) -> bool:
        """Return whether keys that came are kept, eagerly: a graph does not."""
        return self.may_keep and packed is not None and packed.keeps


def sent(strategy: str, sizes: Sizes, packed: PackedLayout | None) -> tuple[int, int]:
    """Return the bytes that a rank sends to the others in a forward and in a backward pass."""
    away = sizes.ranks - 1
    if strategy == "heads":
        row = (sizes.heads + sizes.heads_kv) * sizes.columns * sizes.item_bytes
        both = away * sizes.batch * sizes.tokens * row // sizes.ranks
        return both, both
    tokens = sizes.batch * sizes.tokens if packed is None else packed.sent
    elements = away * tokens * sizes.heads_kv * sizes.columns
    again = 0 if sizes.keeps(packed) else sizes.item_bytes
    return elements * sizes.item_bytes, elements * (again + 4)  # sums of gradients are fp32


def explain(strategy: str, sizes: Sizes, packed: PackedLayout | None, transport: str) -> list[str]:
    """Return why ranks split a call so, what each has, and what it sends."""
    if strategy == "heads+gather":
        first, *others = explain("heads", sizes, None, transport)
        across = explain("gather", sizes.between_hosts(), packed, "collectives")
        return [
            first.replace("heads", "heads+gather, by heads", 1),
            *others,
            across[0].replace("strategy", "by"),
            *across[1:],
        ]
    whole = sizes.tokens * sizes.ranks
    if strategy == "heads":
        why = f"{sizes.ranks} ranks divide {sizes.heads_kv} K/V heads; all-to-all of q, k, v and o"
    elif packed is None:
        why = f"{sizes.ranks} ranks gather K and V; their gradients travel in fp32"
    else:
        why = "ranks have whole documents where they can; K and V of the others travel, their gradients in fp32"
    lines = [
        f"strategy {strategy}: {why}",
        f"{sizes.tokens} of {whole} tokens a rank, {sizes.heads} query heads, {sizes.heads_kv} K/V heads",
    ]
    if packed is not None and strategy == "gather":
        alone = [rounds[0] for rounds in packed.rounds]
        split = len(packed.starts) - 1 - sum(alone)
        lines.append(
            f"{min(alone)} to {max(alone)} whole documents a rank, {split} split; each rank sends {packed.sent} tokens"
        )
    start, rate = _NVLINK[transport]
    keeps = strategy == "gather" and sizes.keeps(packed)
    for name, bytes_ in zip(("forward", "backward"), sent(strategy, sizes, packed), strict=True):
        exchanges = 2 if strategy == "heads" or (name == "backward" and not keeps) else 1
        ms = (exchanges * start + bytes_ / rate) if bytes_ else 0.0
        link = bytes_ / max(1, sizes.ranks - 1) / 1e6
        foreseen = f"over NVLink foreseen: {ms:.2f} ms"
        again = ", and K and V again if compiled" if name == "backward" and keeps else ""
        lines.append(f"a rank sends {bytes_ / 1e6:.1f} MB {name}{again}, {link:.1f} MB to each other; {foreseen}")
    return lines
