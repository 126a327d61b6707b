"""The verb ``lint``: what Markdown files assert, and what of it rests on a claim."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from ..proof.lint import Backing, Finding, lint_file, markdown_files
from ..proof.store import find_repository
from ..proof.words import counted
from .terminal import Terminal, short_path

ASSERTED = 1  # the exit code where something is

_STYLE = {"backed": "green", "waived": "dim", "asserted": "bold yellow"}
_LONGEST_SENTENCE = 160  # letters; the file has all of it


def run_lint(paths: Sequence[Path], *, strict: bool, as_json: bool) -> int:
    """Print what each sentence rests on, and return 1 when one is only asserted."""
    terminal = Terminal(as_json=as_json)
    files = markdown_files(paths)
    backing = Backing(find_repository(), strict=strict)
    findings = [finding for path in files for finding in lint_file(path, backing)]
    for finding in findings:
        terminal.show(_line(finding))
    counts = {status: sum(finding.status == status for finding in findings) for status in _STYLE}
    said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    terminal.show(
        f"{counted(len(findings), 'assertion')} in {counted(len(files), 'file')}{f': {said}' if said else ''}"
    )
    code = ASSERTED if counts["asserted"] else 0
    if code:
        hint = (
            "name a claim that shows it (<!-- claim: ID -->), or say why it is none (<!-- no claim: REASON -->); "
            "tables between marks are rendered anew by `flashmoe readme`"
        )
        terminal.log.print(f"hint: {hint}", soft_wrap=True)
    plain = [{**vars(finding), "file": short_path(finding.file)} for finding in findings]
    terminal.document({"findings": plain, "files": len(files), "exit_code": code})
    return code


def _line(finding: Finding) -> Text:
    sentence = finding.sentence
    if len(sentence) > _LONGEST_SENTENCE:
        sentence = f"{sentence[: _LONGEST_SENTENCE - 3]}..."
    parts = [finding.words, *([sentence] if sentence else []), finding.reason]
    where = f"{short_path(finding.file)}:{finding.line}: "
    return Text.assemble(where, (f"{finding.status:<8}", _STYLE[finding.status]), "  ", " | ".join(parts))
