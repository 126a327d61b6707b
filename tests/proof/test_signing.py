"""A record is signed with an SSH key, and a signature that is not its own makes its claims invalid."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess

import pytest

from flashmoe_science.errors import EvidenceError
from flashmoe_science.proof.judge.consistency import Consistency
from flashmoe_science.proof.records.documents import record_path, write_record
from flashmoe_science.proof.records.signing import SignatureError, envelope_of, sign, signer_of

from .builders import build_record

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")


def make_key(folder, name):
    key = folder / name
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(key)], check=True)
    return key


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    return make_key(folder, "mine"), make_key(folder, "other")


@pytest.fixture
def signed(tmp_path, keys):
    """Return a repository, and its record that is signed."""
    record = build_record()
    path = record_path(tmp_path / "evidence", record.id)
    write_record(record, path)
    public = keys[0].with_suffix(".pub").read_text()
    (tmp_path / "evidence" / "allowed_signers").write_text(f'me@example.org namespaces="flashmoe" {public}')
    assert sign(path, keys[0]) == tmp_path / "evidence" / f"{record.id}.dsse"
    return tmp_path, path, record


def signature_of(repository, path, record):
    records = {path.relative_to(repository).as_posix(): record}
    check = Consistency(repository, records).of(record)[-1]
    assert check.name == "signature"
    return check.result, check.detail


def test_who_signed_is_said(signed):
    repository, path, record = signed
    assert signature_of(repository, path, record) == ("passed", "signed by me@example.org")
    statement = json.loads(base64.b64decode(json.loads(envelope_of(path).read_text())["payload"]))
    assert statement["subject"][0]["name"] == f"{record.id}.json"
    plain = path.with_suffix("")  # without compression it is the same record
    write_record(record, plain)
    assert signer_of(plain, repository / "evidence" / "allowed_signers") == "me@example.org"


def test_a_record_that_changed_is_found(signed):
    repository, path, record = signed
    write_record(record.model_copy(update={"command": "flashmoe prove another"}), path)
    result, detail = signature_of(repository, path, record)
    assert (result, detail) == ("contradiction", f"{path.name} has changed since me@example.org signed it")


def test_a_key_that_may_not_sign_is_found(signed, keys):
    repository, path, record = signed
    sign(path, keys[1])
    result, detail = signature_of(repository, path, record)
    assert result == "contradiction"
    assert "is not signed by anybody in allowed_signers" in detail


def test_a_signature_of_another_statement_is_found(signed):
    repository, path, record = signed
    envelope = json.loads(envelope_of(path).read_text())
    write_record(record.model_copy(update={"command": "flashmoe prove another"}), path)
    sign_again = {"payload": base64.b64encode(b'{"subject": []}').decode()}
    envelope_of(path).write_text(json.dumps(envelope | sign_again))
    assert signature_of(repository, path, record)[0] == "contradiction"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"payloadType": "x", "payload": "", "signatures": [{"sig": ""}]}'])
def test_what_is_no_envelope_is_found(signed, text):
    repository, path, record = signed
    envelope_of(path).write_text(text)
    assert signature_of(repository, path, record)[0] == "contradiction"
    with pytest.raises(SignatureError):
        signer_of(path, repository / "evidence" / "allowed_signers")


def test_without_a_signature_or_a_list_of_signers_nothing_is_said(signed):
    repository, path, record = signed
    (repository / "evidence" / "allowed_signers").unlink()
    said = "nobody said who may sign: there is no evidence/allowed_signers"
    assert signature_of(repository, path, record) == ("not checked", said)
    envelope_of(path).unlink()
    assert signature_of(repository, path, record) == ("not checked", "it is not signed")


def test_a_key_that_does_not_sign_is_one_line(signed, tmp_path):
    _, path, _ = signed
    with pytest.raises(EvidenceError, match="No such file"):
        sign(path, tmp_path / "none")
