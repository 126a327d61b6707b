"""Signed records: the signature of a record's text, in a file beside it, by ``ssh-keygen``.

The signature of ``evidence/<id>.json.gz`` is ``evidence/<id>.sig``, in OpenSSH's format. Who may sign is in a file as
OpenSSH has it (``man ssh-keygen``, ALLOWED SIGNERS). A signature says who stands for a record and that nothing in it
changed since; it does not say that the record is true.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from ...errors import EvidenceError
from .documents import name_of, read_text
from .files import write_atomically

_NAMESPACE = "flashmoe"  # of the signature: one that was made for something else does not count
_TIMEOUT_S = 60.0  # a key on a token waits for a finger


class SignatureError(EvidenceError):
    """A record is not signed as the file beside it says."""


def signature_file(path: Path) -> Path:
    """Return the file that holds the signature of the record in ``path``."""
    return path.with_name(f"{name_of(path)}.sig")


def sign(path: Path, key: Path) -> Path:
    """Sign the record in ``path`` with a private key, or a public one whose other half an agent has.

    Returns the file of the signature. Raises ``EvidenceError``: the record cannot be read, or ssh-keygen refuses.
    """
    signature = _ssh_keygen(("-Y", "sign", "-f", str(key), "-n", _NAMESPACE), read_text(path))
    write_atomically(signature_file(path), signature)
    return signature_file(path)


def signer_of(path: Path, signers: Path) -> str:
    """Return who signed the record in ``path``: a name of ``signers``.

    Raises:
        SignatureError: nobody who may, or the record has changed since.
        EvidenceError: the record cannot be read, or there is no ssh-keygen.
    """
    file = signature_file(path)
    with_file = ("-s", str(file), "-f", str(signers))
    name = ""
    try:
        name = _ssh_keygen(("-Y", "find-principals", *with_file), "").split()[0]
        _ssh_keygen(("-Y", "verify", *with_file, "-I", name, "-n", _NAMESPACE), read_text(path))
    except (_RefusedError, IndexError) as error:
        if not name:
            raise SignatureError(f"{file.name} is not signed by anybody in {signers.name}: {error}") from error
        raise SignatureError(f"{path.name} is not what {name} signed: {error}") from error
    return name


class _RefusedError(EvidenceError):
    """What ssh-keygen said against it."""


def _ssh_keygen(arguments: Sequence[str], given: str) -> str:
    try:
        done = subprocess.run(
            ["ssh-keygen", *arguments], input=given.encode(), capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except OSError as error:
        hint = "install OpenSSH 8.2 or newer"
        raise EvidenceError(f"ssh-keygen cannot be run: {error.strerror}", hint=hint) from error
    except subprocess.TimeoutExpired as error:
        raise EvidenceError(f"ssh-keygen took more than {_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        raise _RefusedError(said[-1] if said else f"ssh-keygen exited with status {done.returncode}")
    return done.stdout.decode(errors="replace")
