"""What the host runs at a call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from flashmoe_science.proof.subject.subject import PACKAGE_FOLDER


def files_run(call: Callable[[], object]) -> set[str]:
    """Return the files of the package whose functions ``call`` runs, as records name them."""
    ran: set[Path] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            ran.add(Path(frame.f_code.co_filename))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {path.relative_to(PACKAGE_FOLDER).as_posix() for path in ran if path.is_relative_to(PACKAGE_FOLDER)}
