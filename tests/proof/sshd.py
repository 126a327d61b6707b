"""A real SSH server on a loopback port, with keys of its own, and a proxy before it that can cut the connection."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

SSHD = shutil.which("sshd") or next((path for path in ("/usr/sbin/sshd",) if Path(path).exists()), None)
WHY_NOT = "needs an SSH server and client: apt-get install openssh-server"


def is_possible() -> bool:
    """Return whether there is an SSH server and a client here."""
    return SSHD is not None and shutil.which("ssh") is not None


def _key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)], check=True)
    return path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """An SSH server in ``folder``. Under the names of ``config`` the client reaches it."""

    folder: Path
    port: int = field(default_factory=_free_port)
    environment: dict[str, str] = field(default_factory=dict)  # of what runs there

    def start(self) -> None:
        """Make keys and configuration, and listen."""
        self.folder.mkdir(parents=True)
        host, client, stranger = (_key(self.folder / name) for name in ("host_key", "client_key", "stranger_key"))
        shutil.copy(f"{client}.pub", self.folder / "authorized_keys")
        # A client's configuration file has no quoting for some letters: the folder of a test has none of them.
        lines = [f"HostKey {host}", f"ListenAddress 127.0.0.1:{self.port}", f"PidFile {self.folder / 'pid'}"]
        lines += [f"AuthorizedKeysFile {self.folder / 'authorized_keys'}", "UsePAM no", "StrictModes no"]
        lines += ["PasswordAuthentication no", "PermitRootLogin yes", "MaxStartups 50"]
        if self.environment:
            lines.append("SetEnv " + " ".join(f'"{name}={value}"' for name, value in self.environment.items()))
        (self.folder / "sshd_config").write_text("\n".join([*lines, ""]))
        if os.getuid() == 0:  # where the server separates its privileges
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        log = (self.folder / "log").open("w")
        argv = [str(SSHD), "-D", "-e", "-f", str(self.folder / "sshd_config")]
        self._process = subprocess.Popen(argv, stdout=log, stderr=log)
        log.close()
        public = Path(f"{host}.pub").read_text().split()[:2]
        (self.folder / "known_hosts").write_text(" ".join(["machine", *public, "\n"]))
        (self.folder / "no_hosts").write_text("")
        other = Path(f"{stranger}.pub").read_text().split()[:2]
        (self.folder / "other_hosts").write_text(" ".join(["machine", *other, "\n"]))
        self._wait_until_it_listens()

    def _wait_until_it_listens(self) -> None:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            assert self._process.poll() is None, (self.folder / "log").read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.05)
        raise TimeoutError((self.folder / "log").read_text())

    def stop(self) -> None:
        """Stop listening. Sessions that are open go on."""
        self._process.terminate()
        self._process.wait(30)

    def command(self, **hosts: dict[str, object]) -> str:
        """Return an SSH command that knows these names: each with what differs from the ordinary."""
        blocks = []
        for name, changes in hosts.items():
            options: dict[str, object] = {
                "HostName": "127.0.0.1",
                "Port": self.port,
                "User": getpass.getuser(),
                "HostKeyAlias": "machine",
                "IdentityFile": self.folder / "client_key",
                "IdentitiesOnly": "yes",
                "IdentityAgent": "none",
                "UserKnownHostsFile": self.folder / "known_hosts",
                "GlobalKnownHostsFile": "none",
                **changes,
            }
            blocks.append("\n".join([f"Host {name}", *(f"  {key} {value}" for key, value in options.items()), ""]))
        config = self.folder / "config"
        config.write_text("\n".join(blocks))
        return f"ssh -F {config}"


class Proxy:
    """Forwards one port to another until it is cut: it then forwards nothing more, and closes nothing either."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._silent = threading.Event()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not self._silent.is_set():
                    sink.sendall(data)

    def fall_silent(self) -> None:
        """Lose everything from here on, as a network does that went away."""
        self._silent.set()

    def cut(self) -> None:
        """Close every connection."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close everything."""
        self._listener.close()
        self.cut()
        for each in self._sockets:
            each.close()
