"""The verb ``sign``: sign records with an SSH key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ..proof.records.signing import sign as sign_record
from ..proof.records.store import Archive, Store, find_repository
from .exit_codes import HOLDS
from .options import Json, argument, option
from .terminal import Terminal, short_path


def sign(
    runs: Annotated[list[str], argument("RUN...", "Ids of runs in evidence/, or files.")],
    key: Annotated[Path, option("--key", "FILE", "A private SSH key, or a public one whose agent runs.")] = Path(
        "~/.ssh/id_ed25519"
    ),
    as_json: Json = False,
) -> None:
    """Sign records, each in a file <id>.dsse beside it: an in-toto statement of its hash, by ssh-keygen.

    `flashmoe verify` says who signed, by the file evidence/allowed_signers (see man ssh-keygen). A record that
    changes after it was signed shows nothing.

    \b
    Examples:
      flashmoe sign 20261120
      flashmoe sign evidence/*.json.gz --key ~/.ssh/release
    """
    terminal = Terminal(as_json=as_json)
    archive = Archive(Store(), find_repository())
    signed = [short_path(sign_record(archive.file(run), key.expanduser())) for run in runs]
    terminal.show(*signed)
    terminal.document({"signed": signed, "exit_code": HOLDS})
