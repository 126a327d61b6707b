"""Write a file so that nobody ever sees half of it; read what somebody else wrote."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

_PAGE_BYTES = 16 << 20  # of a Markdown file


def read_bounded(path: Path, most: int, opened: Callable[[BinaryIO], BinaryIO] = lambda file: file) -> bytes:
    """Return the bytes of a file that somebody else wrote, as ``opened`` reads them.

    Raises ``OSError``: it cannot be read, is no file, or has more than ``most`` bytes.
    """
    # A link may name a device.
    if path.exists() and not (path.is_file() or path.is_dir() or path.is_relative_to("/dev")):
        raise OSError(errno.EINVAL, "it is no file")
    with path.open("rb") as file:
        data = opened(file).read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"expected at most {most} bytes, got more")
    return data


def read_page(path: Path, errors: str = "strict") -> str:
    """Return the text of a Markdown file, lines ended by a line feed. Raises ``OSError``, ``UnicodeDecodeError``."""
    text = read_bounded(path, _PAGE_BYTES).decode("utf-8", errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write ``content`` to ``path``, whose folder is made: a reader sees the old file or the new one."""
    content = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.resolve() if path.is_symlink() and not path.is_relative_to("/dev") else path  # what a link names
    if path.is_relative_to("/dev") or (path.exists() and not path.is_file()):
        path.write_bytes(content)  # a pipe, or a terminal: there is nothing to replace
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():  # a temporary file is its owner's alone
            Path(temporary).chmod(path.stat().st_mode & 0o777)
        else:
            Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_shared(path: Path) -> bytes:
    """Return the content of a file that other processes may be appending to, without half of a line."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        return file.read()


def append_shared(path: Path, more: Callable[[bytes], bytes]) -> None:
    """Append what ``more`` makes of the content until now to a file, whose folder is made. Processes take turns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666), "r+b", 0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if added := more(file.read()):
            file.write(added)
            os.fsync(file.fileno())


def user_folder(variable: str, default: str) -> Path:
    """Return the folder that a variable of the XDG specification names, or ``default`` in the user's home."""
    named = os.environ.get(variable, "")
    # The specification: a relative path is invalid and has to be ignored.
    return Path(named) if Path(named).is_absolute() else Path.home() / default


def load_json(text: str | bytes) -> Any:
    """Return the document in ``text``. Raises ``ValueError`` where it is none, or nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _umask() -> int:
    mask = os.umask(0)  # there is no way to read it without setting it
    os.umask(mask)
    return mask
