"""A PostgreSQL server for the tests that need a real one: on a free port, in a folder that goes afterwards."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..required import import_needed, missing

PASSWORD = "s3cret-of-a-test"  # what must never be printed
_TRIES = 3  # another program may take the port between the look and the start
_TIMEOUT_S = 120


def find_program(name: str) -> str | None:
    """Return the path of a program of the server. Debian keeps them off PATH."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return shutil.which(name) or next((str(f / name) for f in folders if (f / name).exists()), None)


def _other_user() -> dict[str, Any]:
    """Return how to run a program as somebody else, where this is root: the server refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            user = pwd.getpwnam(name)
            return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    return missing("postgres", "needs a user postgres or nobody: the server refuses to run as root")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def running_server() -> Iterator[str]:
    """Give the URL of a new server's database ``postgres``, without its password. Skip where there is no server."""
    programs = {name: find_program(name) for name in ("initdb", "pg_ctl", "postgres")}
    if absent := ", ".join(name for name, path in programs.items() if path is None):
        missing("postgres", f"needs a PostgreSQL server, and there is no {absent} here: apt-get install postgresql")
    import_needed("psycopg", "postgres", "needs psycopg: pip install -e '.[proof,postgres]'")
    user = _other_user()
    folder = Path(tempfile.mkdtemp(prefix="flashmoe-pg-"))  # pytest's own folders let no other user in
    data, log = folder / "data", folder / "log"
    try:
        (folder / "password").write_text(PASSWORD)
        if user:
            for path in (folder, folder / "password"):
                os.chown(path, user["user"], user["group"])

        def run(name: str, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
            command = [str(programs[name]), *args]
            # The server would keep a pipe open: what the programs say goes to a file.
            with (folder / "output").open("w+") as output:
                done = subprocess.run(
                    command, stdout=output, stderr=output, cwd=folder, timeout=_TIMEOUT_S, check=False, **user
                )
                output.seek(0)
                said = output.read()
            assert done.returncode == 0 or not check, said
            return subprocess.CompletedProcess(command, done.returncode, said)

        run("initdb", "-D", str(data), "-U", "ada", f"--pwfile={folder / 'password'}", "-A", "scram-sha-256", "-N")
        for number in range(_TRIES):
            port = _free_port()
            options = f"-c listen_addresses=127.0.0.1 -p {port} -k {folder} -F"
            last = number == _TRIES - 1
            started = run("pg_ctl", "start", "-w", "-D", str(data), "-l", str(log), "-o", options, check=last)
            if started.returncode == 0:
                break
        try:
            yield f"postgresql://ada@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", "stop", "-w", "-m", "immediate", "-D", str(data))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def with_password(url: str, password: str = PASSWORD) -> str:
    """Return ``url`` with a password."""
    return url.replace("ada@", f"ada:{password}@")
