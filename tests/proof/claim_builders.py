"""Made-up claims for tests, about the records of ``builders.py``."""

from __future__ import annotations

from flashmoe_science.proof.claims import Claim


def build_claim(**changes: object) -> Claim:
    """Return a claim that flash_attention is twice as fast as sdpa in each case of seed."""
    keys = {"id": "seed-graph", "sentence": "It is twice as fast.", "subject": "flash_attention", "baseline": "sdpa"}
    measured = {"suite": "seed", "metric": "graph", "factor": 2.0, "gpu": "H200", "scope": "each case"}
    return Claim.model_validate({**keys, **measured, **changes})


def claim_toml(**changes: object) -> str:
    """Return the same claim as a table of a claim file."""
    claim = build_claim(**changes).model_dump(exclude_defaults=True)
    baselines = ", ".join(f'"{name}"' for name in claim.pop("baseline"))
    lines = [f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}" for key, value in claim.items()]
    return "\n".join(["[[claim]]", *lines, f"baseline = [{baselines}]", ""])
