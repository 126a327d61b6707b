"""Signed records: the hash of a record in an in-toto statement, in a DSSE envelope that ``ssh-keygen`` signs.

The envelope of ``evidence/<id>.json.gz`` is ``evidence/<id>.dsse``. Who may sign is in a file as OpenSSH has it
(``man ssh-keygen``, ALLOWED SIGNERS). A signature says who stands for a record and that nothing in it changed since;
it does not say that the record is true. Formats: in-toto Statement v1, DSSE v1, and OpenSSH's signatures.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import EvidenceError
from .documents import name_of, read_text
from .files import load_json, write_atomically

SUFFIX = ".dsse"
_PAYLOAD_TYPE = "application/vnd.in-toto+json"
_STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
_PREDICATE_TYPE = "urn:flashmoe-science:run:v1"
_NAMESPACE = "flashmoe"  # of the signature: one that was made for something else does not count
_TIMEOUT_S = 60.0  # a key on a token waits for a finger


class SignatureError(EvidenceError):
    """A record is not signed as its envelope says."""


def envelope_of(path: Path) -> Path:
    """Return the file that holds the signature of the record in ``path``."""
    return path.with_name(f"{name_of(path)}{SUFFIX}")


def sign(path: Path, key: Path) -> Path:
    """Sign the record in ``path`` with a private key, or a public one whose other half an agent has.

    Returns the envelope's file. Raises ``EvidenceError``: the record cannot be read, or ssh-keygen refuses.
    """
    payload = json.dumps(_statement(path), sort_keys=True).encode()
    signature = _ssh_keygen(("-Y", "sign", "-f", str(key), "-n", _NAMESPACE), _to_sign(payload))
    envelope = {
        "payloadType": _PAYLOAD_TYPE,
        "payload": base64.b64encode(payload).decode(),
        "signatures": [{"sig": base64.b64encode(signature).decode()}],
    }
    write_atomically(envelope_of(path), json.dumps(envelope, indent=1) + "\n")
    return envelope_of(path)


def signer_of(path: Path, signers: Path) -> str:
    """Return who signed the record in ``path``: a name of ``signers``.

    Raises:
        SignatureError: nobody who may, or the record has changed since.
        EvidenceError: the record cannot be read, or there is no ssh-keygen.
    """
    file = envelope_of(path)
    payload, signature = _opened(file)
    with tempfile.NamedTemporaryFile() as kept:
        kept.write(signature)
        kept.flush()
        try:
            names = _ssh_keygen(("-Y", "find-principals", "-s", kept.name, "-f", str(signers)), b"").decode().split()
            name = names[0] if names else ""
            _ssh_keygen(
                ("-Y", "verify", "-f", str(signers), "-I", name, "-n", _NAMESPACE, "-s", kept.name), _to_sign(payload)
            )
        except _RefusedError as error:
            raise SignatureError(f"{file.name} is not signed by anybody in {signers.name}: {error}") from error
    if load_json(payload) != _statement(path):
        raise SignatureError(f"{path.name} has changed since {name} signed it")
    return name


def _statement(path: Path) -> dict[str, Any]:
    """Return what is signed: the hash of the record's text, compressed or not, and its id."""
    text = read_text(path)
    name = name_of(path)
    return {
        "_type": _STATEMENT_TYPE,
        "subject": [{"name": f"{name}.json", "digest": {"sha256": hashlib.sha256(text.encode()).hexdigest()}}],
        "predicateType": _PREDICATE_TYPE,
        "predicate": {"run": name},
    }


def _opened(file: Path) -> tuple[bytes, bytes]:
    """Return payload and signature of an envelope. Raises ``SignatureError`` where it is none."""
    try:
        envelope = load_json(file.read_bytes())
        (signature,) = envelope["signatures"]
        if envelope["payloadType"] == _PAYLOAD_TYPE:
            return _decoded(envelope["payload"]), _decoded(signature["sig"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SignatureError(f"{file.name} is no envelope with one signature: {error!r}") from error
    raise SignatureError(f"{file.name} is an envelope of {envelope['payloadType']!r}, expected {_PAYLOAD_TYPE}")


def _decoded(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _to_sign(payload: bytes) -> bytes:
    """Return DSSE's encoding of a payload and its type."""
    kind = _PAYLOAD_TYPE.encode()
    return b" ".join([b"DSSEv1", str(len(kind)).encode(), kind, str(len(payload)).encode(), payload])


class _RefusedError(EvidenceError):
    """What ssh-keygen said against it."""


def _ssh_keygen(arguments: Sequence[str], given: bytes) -> bytes:
    try:
        done = subprocess.run(
            ["ssh-keygen", *arguments], input=given, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except OSError as error:
        raise EvidenceError(
            f"ssh-keygen cannot be run: {error.strerror}", hint="install OpenSSH 8.2 or newer"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise EvidenceError(f"ssh-keygen took more than {_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        raise _RefusedError(said[-1] if said else f"ssh-keygen exited with status {done.returncode}")
    return done.stdout
