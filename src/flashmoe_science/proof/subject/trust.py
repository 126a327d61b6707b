"""Whose code may run when a repository is only read: the user says so, once a repository, by ``--trust``."""

from __future__ import annotations

import json
from pathlib import Path

from ...errors import ProofError
from ..records.files import load_json, user_folder, write_atomically

ASK = "`flashmoe verify --trust` lets the code of this repository run when it is read, here and from now on"


def _file() -> Path:
    return user_folder("XDG_CONFIG_HOME", ".config") / "flashmoe" / "trusted.json"


def _trusted() -> list[str]:
    file = _file()
    try:
        found = load_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ProofError(f"{file}: cannot be read: {error}", hint="remove it, and trust repositories anew") from error
    if not isinstance(found, list) or not all(isinstance(folder, str) for folder in found):
        raise ProofError(f"{file}: expected a list of folders", hint="remove it, and trust repositories anew")
    return found


def is_trusted(repository: Path) -> bool:
    """Return whether the user trusts the repository at this path."""
    return str(repository.resolve()) in _trusted()


def trust(repository: Path) -> None:
    """Trust the repository at this path from now on. Raises ``ProofError`` where that cannot be kept."""
    folders = sorted({*_trusted(), str(repository.resolve())})
    try:
        write_atomically(_file(), json.dumps(folders, indent=2) + "\n")
    except OSError as error:
        raise ProofError(f"{_file()}: cannot be written: {error.strerror}", hint="see XDG_CONFIG_HOME") from error
