"""How a problem may be made longer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """One way to make a problem longer: see ``proof.operator.Axis``."""

    name: str
    kind: str
    meaning: str
