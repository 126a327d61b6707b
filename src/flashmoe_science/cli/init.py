"""The verb ``init``: the files of a first trial, small enough to be read at once."""

from __future__ import annotations

from enum import Enum
from importlib import resources
from pathlib import Path
from typing import Annotated

from ..errors import InputError
from .options import Json, argument, flag
from .terminal import Terminal, short_path, write_file


class Kind(str, Enum):
    """How the kernel of a first trial is written."""

    plain = "plain"
    triton = "triton"
    cuda = "cuda"


def files_of(kind: Kind) -> dict[str, str]:
    """Return the files of a first trial: name -> text. They are in ``trial/`` of the package, each as a text."""
    trial = resources.files("flashmoe_science") / "trial"
    found = [file for folder in (kind.value, "every") for file in (trial / folder).iterdir()]
    texts = {file.name.removesuffix(".txt"): file.read_text(encoding="utf-8") for file in found}
    return {name: texts[name] for name in sorted(texts, key=lambda name: (not name.endswith(".toml"), name))}


def init(
    folder: Annotated[Path, argument("FOLDER", "Where the files go; made where it is missing.")],
    kind: Annotated[
        Kind, flag("--kind", "How it is written: plain (operations of PyTorch), triton, or cuda (C++, needs nvcc).")
    ] = Kind.triton,
    as_json: Json = False,
) -> None:
    """Write the files of a first trial: a kernel of a few lines, what it means, its shapes. No file is replaced.

    \b
    Examples:
      flashmoe init trial
      flashmoe init trial --kind cuda
      flashmoe prove trial
    """
    terminal = Terminal(as_json=as_json)
    files = {folder / name: text for name, text in files_of(kind).items()}
    if there := [str(path) for path in files if path.exists()]:
        raise InputError(f"folder must hold none of the files, got {', '.join(there)}", hint="name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made: {error.strerror}") from error
    for path, text in files.items():
        write_file(path, text)
        terminal.show(short_path(path))
    terminal.log.print(f"hint: flashmoe prove {short_path(folder)}", soft_wrap=True)
    terminal.document({"files": [short_path(path) for path in files]})
