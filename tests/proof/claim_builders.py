"""Made-up claims for tests, about the records of ``builders.py``."""

from __future__ import annotations

import tomlkit

from flashmoe_science.proof.judge.claims import Claim, claim_sentence

from . import fake_operator  # it runs here: so it may where a suite names it
from .builders import build_record


def build_claim(**changes: object) -> Claim:
    """Return a claim that flash_attention is twice as fast as sdpa in each of two cases of seed."""
    keys = {"id": "seed-graph", "sentence": "made below", "subject": "flash_attention", "baseline": "sdpa"}
    measured = {"suite": "seed", "metric": "graph", "factor": 2.0, "gpu": "H200", "scope": "each case"}
    claim = Claim.model_validate({**keys, **measured, **changes})
    return claim if "sentence" in changes else worded(claim)


def worded(claim: Claim, case_count: int = 2) -> Claim:
    """Return ``claim`` with the sentence that its fields make, for a suite of the cases case0, case1 and so on."""
    record = build_record(speedups=[2.0] * case_count)
    return claim.model_copy(update={"sentence": claim_sentence(claim, record)})


def suite_toml(name: str, *cases: str) -> str:
    """Return a suite file that has the problem of ``builders.build_case`` under each of these names."""
    keys = f'operator = "{fake_operator.__name__}"\ndescription = "Made up."\n'
    shape = 'origin = "made up"\nbatch = 1\nheads = 16\nseqlen_q = 512\nhead_dim = 64\n'
    tables = "".join(f'[[cases]]\nname = "{case}"\n' for case in cases)
    return f'name = "{name}"\n{keys}[defaults]\n{shape}{tables}'


def claim_toml(**changes: object) -> str:
    """Return the same claim as a table of a claim file."""
    claim = build_claim(**changes).model_dump(exclude_defaults=True)
    return tomlkit.dumps({"claim": [claim]})


SENTENCE = build_claim().sentence
