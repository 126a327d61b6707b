"""Files appear whole, with the mode that the user's umask gives; a link and a pipe stay what they are."""

from __future__ import annotations

import os
import threading

import pytest

from flashmoe_science.proof.records.files import write_atomically


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_a_new_file_follows_the_umask(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "made" / "record.json", "{}")
    finally:
        os.umask(before)
    assert (tmp_path / "made" / "record.json").stat().st_mode & 0o777 == mode
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["record.json"]


def test_a_file_that_is_replaced_keeps_its_mode_and_a_link_its_target(tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    write_atomically(link, "new")
    assert link.is_symlink()
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("new", 0o600)


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_atomically(pipe, "all of it\n")
    reader.join(60)
    assert read == ["all of it\n"]
    assert pipe.is_fifo()
