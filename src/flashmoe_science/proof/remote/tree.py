"""What is sent to a borrowed machine: the files that git lists, and this package where it is not among them."""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

from ...errors import ProofError, RemoteError
from ..gates import ProveRequest
from ..measure.environment import subject_tree, tree_commit
from ..records.git import git
from ..subject.suites import list_suites
from .agent import AS_IT_IS, RemoteRequest

PACKAGE_FOLDER = Path(__file__).resolve().parent.parent.parent

_PACKAGE_PATTERNS = ("**/*.py", "**/*.toml", "py.typed")


@dataclass(frozen=True)
class Tree:
    """The files of one git working tree, relative to its root."""

    root: Path
    files: tuple[str, ...]

    @property
    def package(self) -> str:
        """Where, in what is sent, the folder lies that holds this package."""
        if (PACKAGE_FOLDER / "__init__.py").is_relative_to(self.root):
            place = PACKAGE_FOLDER.relative_to(self.root).as_posix()
            if f"{place}/__init__.py" in set(self.files):
                return f"tree/{place}/.."
        return "package"

    def pack(self) -> bytes:
        """Return everything as one compressed archive."""
        buffer = io.BytesIO()
        # Level 1: what is sent is mostly small, and a rented machine waits for it.
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
            for name in self.files:
                tar.add(self.root / name, f"tree/{name}", recursive=False, filter=_without_owner)
            if self.package == "package":
                for path in _package_files():
                    place = f"package/{PACKAGE_FOLDER.name}/{path.relative_to(PACKAGE_FOLDER).as_posix()}"
                    tar.add(path, place, filter=_without_owner)
        return buffer.getvalue()

    def request(self, request: ProveRequest, folder: Path) -> RemoteRequest:
        """Return ``request`` as it travels; ``folder`` is the current one.

        Raises:
            RemoteError: a file that it names is not in this tree.
        """
        subject, suite, repository = request.subject, request.suite, request.repository
        packaged = list_suites().get(suite.name) == suite.path
        commit, dirty = tree_commit()
        suffix = {True: "-dirty", False: "-clean", None: ""}[dirty]
        return RemoteRequest(
            subject=subject.name if subject.builtin else self._place(subject.folder / subject.sources[0]),
            suite=suite.name if packaged else self._place(suite.path),
            **{name: getattr(request, name) for name in AS_IT_IS},
            repository=self._folder(repository) if repository is not None else None,
            folder=self._folder(folder) or ".",
            commit=f"{commit}{suffix}" if commit else "",
            tree=subject_tree(subject),
            time_limit=request.time_limit,
        )

    def _place(self, path: Path) -> str:
        path = path.resolve()
        place = path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else ""
        if place not in set(self.files):
            hint = "only what git lists is sent: put it there, and out of .gitignore"
            raise RemoteError(f"{path} must lie in the git working tree {self.root}", hint=hint)
        return place

    def _folder(self, folder: Path) -> str | None:
        folder = folder.resolve()
        return folder.relative_to(self.root).as_posix() if folder.is_relative_to(self.root) else None


def find_tree(folder: Path) -> Tree:
    """Return the working tree around ``folder``: tracked files, and those untracked that git does not ignore.

    Raises:
        RemoteError: there is none.
    """
    try:
        root = Path(git(folder, "rev-parse", "--show-toplevel"))
    except ProofError as error:
        hint = "`git init` is enough: nothing has to be committed, and .gitignore says what stays here"
        raise RemoteError(f"{folder} must lie in a git working tree, whose files are sent", hint=hint) from error
    return Tree(root, tuple(_list(root)))


def _list(root: Path) -> list[str]:
    """Return the files of a tree, those of its submodules too. What was deleted and is still tracked is left out."""
    listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    files: list[str] = []
    for name in sorted({name for name in listed if name}):
        path = root / name
        if path.is_dir() and not path.is_symlink():
            files += [f"{name.rstrip('/')}/{inner}" for inner in _list(path)] if (path / ".git").exists() else []
        elif path.is_symlink() or path.exists():
            files.append(name)
    return files


def _package_files() -> list[Path]:
    return sorted({path for pattern in _PACKAGE_PATTERNS for path in PACKAGE_FOLDER.glob(pattern) if path.is_file()})


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Take the user's name out: files belong to whoever unpacks them."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
