"""The verb ``lint``: figures of speed and memory in Markdown that name no claim."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..proof.judge.claims import load_claims
from ..proof.records.store import find_repository
from ..proof.report.prose import check_file, markdown_files
from ..proof.text import counted
from .options import Json, argument
from .terminal import Terminal, short_path

ASSERTED = 1  # the exit code where a figure names no claim
_HINT = (
    "name a claim in the sentence or row, as `ID`, a link to claims/FILE.toml#ID or <!-- claim: ID -->; "
    "or let `flashmoe readme` render it; or delete it; or say why it needs none: <!-- no claim: REASON -->"
)


def lint(
    files: Annotated[list[Path], argument("FILE", "Markdown files, or folders that hold some.")],
    as_json: Json = False,
) -> None:
    """Find figures of speed or memory in Markdown that name no claim.

    A sentence, a row of a table or a block of HTML names a claim by its id: in the text, as code, in a link or in a
    comment, <!-- claim: ID -->. A comment on the line above counts for the whole block below. A multiple must not be
    larger than the claim's factor. A claim that selects cases needs its "n of N" in the sentence too. A comment
    <!-- no claim: REASON --> waives a sentence, a row or a block. What `flashmoe readme` renders is left out, and so
    are blocks of code. Whether a claim holds is for `flashmoe verify` to say.

    \b
    Examples:
      flashmoe lint README.md docs
      flashmoe lint README.md --json

    \b
    Exit codes:
      0  every figure names a claim    1  one does not    2  wrong usage
    """
    terminal = Terminal(as_json=as_json)
    repository = find_repository()
    claims = {claim.id: claim for claim in load_claims(repository / "claims")} if repository else {}
    pages = markdown_files(files)
    findings = [finding for path in pages for finding in check_file(path, claims)]
    counts = {"backed": 0, "waived": 0, "asserted": 0}
    for finding in findings:
        counts[finding.status] += 1
        if finding.status == "asserted":
            terminal.show(f"{short_path(finding.file)}:{finding.line}: {finding.words!r}: {finding.reason}")
    said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    terminal.show(f"{counted(len(findings), 'figure')} in {counted(len(pages), 'file')}{f': {said}' if said else ''}")
    code = ASSERTED if counts["asserted"] else 0
    if code:
        terminal.log.print(f"hint: {_HINT}", soft_wrap=True)
    plain = [{**vars(finding), "file": short_path(finding.file)} for finding in findings]
    terminal.document({"findings": plain, "files": len(pages), "exit_code": code})
    raise typer.Exit(code)
