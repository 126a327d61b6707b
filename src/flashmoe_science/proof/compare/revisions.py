"""Two revisions of a git repository: checked out, taken through the gates, and timed in one run.

Each revision gets a working tree of its own in a temporary folder, which is removed whatever happens. Revision A goes
through the gates up to correct; then B goes through all of them, with A as its baseline.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import FlashmoeError, ProofError, SubjectError
from ..cost.cost import RunSize
from ..gates import Progress, ProveRequest, Run, RunMeter, prove
from ..records.evidence import Compared, Gate, GateName, Record, Revision
from ..records.git import git
from ..subject.loading import builtin_names, load_operator, load_subject
from ..subject.registry import is_user_defined
from ..subject.subject import PACKAGE_FOLDER, Checkout, Subject

_CHECKED_BEFORE_TIMING = "correct"
_LAST_WITHOUT_GPU = "import"


@dataclass(frozen=True)
class Asked:
    """One revision, as it was asked for and as git knows it."""

    label: str
    commit: str


def find_toplevel(folder: Path) -> Path:
    """Return the root of the git repository that ``folder`` lies in. Raises ``ProofError``."""
    try:
        return Path(git(folder, "rev-parse", "--show-toplevel")).resolve()
    except ProofError as error:
        hint = "run it in a clone of the repository whose revisions are compared"
        raise ProofError(f"there is no git repository here: {error}", hint=hint) from error


def find_revision(repository: Path, label: str) -> Asked | None:
    """Return the commit that ``label`` names in ``repository``, or None."""
    if label.startswith("-"):
        return None
    try:
        return Asked(
            label, git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{label}^{{commit}}")
        )
    except ProofError:
        return None


def has_uncommitted_changes(repository: Path) -> bool:
    """Return whether tracked files differ from the last commit: no revision has these changes."""
    return git(repository, "status", "--porcelain", "--untracked-files=no") != ""


@contextlib.contextmanager
def checked_out(repository: Path, a: Asked, b: Asked) -> Iterator[tuple[Checkout, Checkout]]:
    """Check both revisions out, each into a working tree of its own, and remove them in the end.

    Raises ``ProofError``: git cannot check one of them out.
    """
    shared = Path(tempfile.mkdtemp(prefix="flashmoe-compare-")).resolve()
    try:
        (shared / "packages").mkdir()
        trees = []
        for name, asked in (("a", a), ("b", b)):
            tree = shared / name
            try:
                git(repository, "worktree", "add", "--detach", "--quiet", str(tree), asked.commit)
                if (tree / ".gitmodules").exists():
                    git(tree, "submodule", "update", "--init", "--recursive", "--quiet")
            except ProofError as error:
                hint = "`git worktree add` and `git submodule update` have to work in this repository"
                raise ProofError(f"revision {asked.label} cannot be checked out: {error}", hint=hint) from error
            trees.append(Checkout(asked.label, asked.commit, tree, shared, repository))
        yield trees[0], trees[1]
    finally:
        _remove(repository, shared)


def _remove(repository: Path, shared: Path) -> None:
    """Remove the working trees and what git remembers of them."""
    shutil.rmtree(shared, ignore_errors=True)
    with contextlib.suppress(ProofError):  # prune only tidies: git does the same by itself, later
        git(repository, "worktree", "prune")


def subjects_at(text: str, a: Checkout, b: Checkout) -> tuple[Subject, Subject]:
    """Return the subject called ``text``, one of ours or a ``kernel.toml`` in the repository, at both revisions.

    B's is the one on trial, and knows A's as its baseline.

    Raises:
        SubjectError: a revision lacks it, its file is wrong, or the two are not implementations of one operator.
    """
    own = len(Path(text).parts) == 1 and text in builtin_names()
    relative = None if own else _inside(text, a.repository)
    # B first: an operator of the user's own is imported once in this process, and B's is the one that is described.
    found = {}
    for checkout in (b, a):
        try:
            with _path_restored():
                found[checkout.root] = _our_own(text, checkout) if relative is None else _from_file(relative, checkout)
        except FlashmoeError as error:
            message = error.message.replace(f"{checkout.root}{os.sep}", "")
            raise SubjectError(f"revision {checkout.label}: {message}", hint=error.hint) from error
    ours, theirs = found[b.root], found[a.root]
    if ours.operator != theirs.operator:
        raise SubjectError(
            f"A is of operator {theirs.operator!r} and B of {ours.operator!r}: neither computes the other's"
        )
    if changed := _changed_operator(ours, theirs):
        hint = "commit the change of the operator before A, e.g. on a branch from A"
        raise SubjectError(f"{changed} differs between A and B: they mean different things", hint=hint)
    theirs = _named(theirs, a, "" if a.commit != b.commit else ".a")
    return replace(_named(ours, b, ""), baseline=theirs), theirs


@contextlib.contextmanager
def _path_restored() -> Iterator[None]:
    """Put ``sys.path`` back: workers inherit it, and those of one revision must not find modules of the other."""
    path = list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = path


def _inside(text: str, repository: Path) -> Path:
    """Return the path of a kernel.toml from the root of the repository. Raises ``SubjectError``."""
    path = Path(text)
    path = (path / "kernel.toml" if path.is_dir() else path).resolve()
    if not path.exists() and len(Path(text).parts) == 1:
        load_subject(text)  # says which names there are
    if not path.is_relative_to(repository):
        raise SubjectError(f"{text} does not lie in the repository whose revisions are compared")
    return path.relative_to(repository)


def _from_file(relative: Path, checkout: Checkout) -> Subject:
    if not (checkout.root / relative).exists():
        raise SubjectError(f"it has no {relative.as_posix()}")
    subject = load_subject(str(checkout.root / relative))
    return replace(subject, checkout=replace(checkout, own_name=subject.name))


def _our_own(name: str, checkout: Checkout) -> Subject:
    """Return one of our own subjects as the package in ``checkout`` has it, under a name of its own."""
    folder = checkout.root / "src" / PACKAGE_FOLDER.name
    if not folder.is_dir():
        hint = "name a kernel.toml with --subject"
        raise SubjectError(f"it has no src/{PACKAGE_FOLDER.name}, where our own subjects are", hint=hint)
    packages = checkout.shared / "packages"
    package = f"{PACKAGE_FOLDER.name}_{checkout.root.name}"
    (packages / package).symlink_to(folder)
    checkout = replace(checkout, own_name=name, package=package)
    subject = replace(load_subject(name), folder=folder, python_path=(str(packages),), sources=(), checkout=checkout)
    from ..subject.revision_import import revision_operator

    own = revision_operator(load_operator(subject.operator), subject)
    entry_points = own.entry_points()
    if name not in entry_points:
        raise SubjectError(f"it has no subject {name}: it has {', '.join(entry_points)}")
    return replace(subject, entry_point=entry_points[name], sources=tuple(own.sources(name)))


def _named(subject: Subject, checkout: Checkout, suffix: str) -> Subject:
    """Return the subject under the name of its arm, without the speedup it expects over another baseline."""
    return replace(subject, name=f"{subject.name}@{checkout.commit[:12]}{suffix}", expected_speedup=None)


def _changed_operator(ours: Subject, theirs: Subject) -> str:
    """Return the file of a user's own operator where it differs between the revisions, or an empty text."""
    if not is_user_defined(ours.operator):
        return ""
    relative = Path(*ours.operator.partition(":")[0].split(".")).with_suffix(".py")
    for entry in dict.fromkeys([*ours.python_path, *theirs.python_path]):
        files = [subject.folder / entry / relative for subject in (ours, theirs)]
        contents = [file.read_bytes() if file.is_file() else None for file in files]
        if contents[0] != contents[1]:
            return relative.as_posix()
    return ""


def prove_revisions(
    request: ProveRequest,
    *,
    tolerance: float,
    progress: Progress,
    announce: Callable[[str], None],
    save: Callable[[Record], None],
) -> Record:
    """Take revision A through the gates up to correct, then B through all of them with A as its baseline.

    Where A fails, B still runs up to gate correct, and nothing is timed. The record is that of B, with A's gates.

    Args:
        request: its subject is B's, from ``subjects_at``. Its baselines are not used.
        tolerance: the smallest effect that matters.
        progress: gets the progress of the gates.
        announce: gets a line before each revision.
        save: gets the record after every gate of either revision and every measured case, an interrupted one too.
    """
    b, a = request.subject, request.subject.baseline
    assert a is not None
    assert a.checkout is not None
    assert b.checkout is not None
    second = replace(request, subject=b, baselines=[a.name], repository=b.checkout.root)
    comparison = _Comparison(second, a, tolerance, progress)
    if request.meter is not None:
        second = replace(second, meter=_MeterOfBoth(request.meter, comparison.of_b))
    announce(f"A: {a.checkout.label} ({a.checkout.commit[:12]})")
    alone = replace(request, subject=a, baselines=[], until=_CHECKED_BEFORE_TIMING, repository=a.checkout.root)
    with _path_restored():
        first = prove(alone, progress=progress, save=lambda found: save(comparison.before_b(found)))
    if first.failed_gate:
        second = replace(second, until=_CHECKED_BEFORE_TIMING)
    elif not first.complete:  # its budget ended it, and B may not spend what A lacked
        second = replace(second, until=_LAST_WITHOUT_GPU)
    announce(f"B: {b.checkout.label} ({b.checkout.commit[:12]})")
    with _path_restored():
        record = prove(second, progress=progress, save=lambda found: save(comparison.of_b(found)))
    record = comparison.of_b(record)
    if record.complete and not first.complete:
        reason = f"A ({a.checkout.label}): {first.incomplete_reason}"
        record = record.model_copy(update={"complete": False, "incomplete_reason": reason})
        save(record)
    return record


class _MeterOfBoth:
    """The meter of B: what A has spent is spent."""

    def __init__(self, meter: RunMeter, as_comparison: Callable[[Record], Record]) -> None:
        self._meter, self._as_comparison = meter, as_comparison

    def start(self, record: Record, size: RunSize) -> None:
        """Take note of the run that begins."""
        self._meter.start(record, size)

    def refusal(self, gate: GateName, record: Record) -> str:
        """Return why ``gate`` may not begin, or an empty text."""
        return self._meter.refusal(gate, self._as_comparison(record))

    def seconds_left(self, record: Record) -> float | None:
        """Return for how long B may still hold its GPU after the gates of ``record``; None: there is no end."""
        return self._meter.seconds_left(self._as_comparison(record))


class _Comparison:
    """The one record of a comparison: B's, with A's gates in it from the first of them on."""

    def __init__(self, second: ProveRequest, a: Subject, tolerance: float, progress: Progress) -> None:
        self._second, self._a, self._progress = second, a, progress
        self._b = second.subject
        self._compared = Compared(a=_revision(a, [], None), b=_revision(self._b, [], None), tolerance=tolerance)
        self._blank: Record | None = None  # of B, of which nothing is known yet; its id is that of the comparison

    def before_b(self, first: Record) -> Record:
        """Return the record while A is looked at, or was left: ``first`` is A's own."""
        if self._blank is None:
            with _path_restored():  # asking B's operator may add B's folders, and A's workers are still to come
                run = Run(self._second, environment=first.environment, progress=self._progress, save=lambda _: None)
            self._blank = run.record()
        revision = _revision(self._a, first.gates, first)
        self._compared = self._compared.model_copy(update={"a": revision})
        found = self.of_b(self._blank)
        if first.complete:
            return found
        return found.model_copy(update={"incomplete_reason": f"A ({revision.label}): {first.incomplete_reason}"})

    def of_b(self, record: Record) -> Record:
        """Return the record that ``record``, B's own, makes."""
        if self._blank is not None:
            record = record.model_copy(update={"id": self._blank.id, "created_at": self._blank.created_at})
        return _as_comparison(record, self._b, self._compared)


def _revision(subject: Subject, gates: Sequence[Gate], record: Record | None) -> Revision:
    assert subject.checkout is not None
    sources = record.subject.sources if record is not None else []
    checkout = subject.checkout
    return Revision(label=checkout.label, commit=checkout.commit, arm=subject.name, sources=sources, gates=list(gates))


def _as_comparison(record: Record, b: Subject, compared: Compared) -> Record:
    """Return the record of B as that of a comparison: what ran is the commit of B, not the harness's own."""
    assert b.checkout is not None
    entry_point = record.subject.entry_point
    if b.checkout.package:
        entry_point = entry_point.replace(b.checkout.package, PACKAGE_FOLDER.name, 1)
    subject = record.subject.model_copy(update={"entry_point": entry_point, "tree": None})
    environment = record.environment.model_copy(update={"commit": b.checkout.commit, "dirty": False})
    compared = compared.model_copy(update={"b": compared.b.model_copy(update={"sources": record.subject.sources})})
    return record.model_copy(update={"subject": subject, "environment": environment, "compared": compared})
