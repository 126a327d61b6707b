"""Print what has become of the claims of an earlier commit: dropped, lowered, measured anew, and the verdicts of today.

``python tools/claims_since.py`` prints the table of ``docs/reference/claims.md``, about the commit that the page names.
``--check`` compares the page with it, and ``--write`` puts it there. It needs that commit, and no GPU. What the earlier
commit itself said, its own ``flashmoe verify`` tells.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashmoe_science.proof.judge.judge import Verdict, VerdictStatus
from flashmoe_science.proof.judge.verify import verify_claims
from flashmoe_science.proof.records.documents import name_of
from flashmoe_science.proof.records.git import git

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "claims.md"
_MARKS = re.compile(r"(<!-- claims_since ([0-9a-f]{7,}): begin -->\n).*(<!-- claims_since: end -->)", re.DOTALL)
_HEADER = ("claims then", "dropped", "lowered", "measured anew", "now demonstrated", "now stale")
_NEW = "new in each call"  # how the rules of a record end, where they are the newer ones


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare the page with the table")
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    options = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    found = _MARKS.search(page)
    if found is None:
        sys.exit(f"{PAGE.name} has no marks for the table")
    text = table(found[2])
    wanted = page.replace(found[0], f"{found[1]}{text}{found[3]}")
    if options.check and wanted != page:
        sys.exit(f"{PAGE.name} has another table: python tools/claims_since.py --write")
    if options.write:
        PAGE.write_text(wanted, encoding="utf-8")
    elif not options.check:
        print(text, end="")


def table(commit: str) -> str:
    """Return the table in Markdown: a row for each file of claims at ``commit``, and one for all."""
    verdicts = {verdict.claim.id: verdict for verdict in verify_claims(ROOT)}
    records = {name_of(Path(name)) for name in git(ROOT, "ls-tree", "--name-only", commit, "evidence/").splitlines()}
    files = dict(_claims_at(commit))
    then = [claim for claims in files.values() for claim in claims]
    lines = [_row("", *_HEADER), _row("---", *["---:"] * len(_HEADER))]
    for name, claims in files.items():
        lines.append(_row(f"`{name}`", *_counts(claims, verdicts, records)))
    lines.append(_row("all", *_counts(then, verdicts, records)))
    known = {claim["id"] for claim in then}
    kept = [verdict for id_, verdict in verdicts.items() if id_ in known]
    by_new_rules = sum(verdict.rule.endswith(_NEW) for verdict in kept)
    made = [verdict for id_, verdict in verdicts.items() if id_ not in known]
    stale = sum(verdict.status is VerdictStatus.STALE for verdict in made)
    shown = sum(verdict.status is VerdictStatus.DEMONSTRATED for verdict in made)
    new = sum(verdict.rule.endswith(_NEW) for verdict in made)
    lines += ["", f"{by_new_rules} of these rest on runs by the newer rules."]
    now = f"{shown} are demonstrated, {stale} stale"
    lines += [f"Since then {len(made)} claims were made, {new} by newer rules: {now}.", ""]
    return "\n".join(lines)


def _claims_at(commit: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for path in git(ROOT, "ls-tree", "--name-only", commit, "claims/").splitlines():
        if path.endswith(".toml"):
            yield Path(path).name, tomllib.loads(git(ROOT, "show", f"{commit}:{path}")).get("claim", [])


def _counts(claims: Sequence[dict[str, Any]], now: Mapping[str, Verdict], records: set[str]) -> list[str]:
    """Return the cells of a row."""
    kept = [(claim, now[claim["id"]]) for claim in claims if claim["id"] in now]
    runs = [{each.record for each in (verdict, *verdict.by_gpu) if each.record} for _, verdict in kept]
    counts = [
        len(claims),
        len(claims) - len(kept),
        sum(verdict.claim.factor < claim["factor"] for claim, verdict in kept),
        sum(bool(each - records) for each in runs),
        *(sum(v.status is status for _, v in kept) for status in (VerdictStatus.DEMONSTRATED, VerdictStatus.STALE)),
    ]
    return list(map(str, counts))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
