"""Two revisions of one subject in one process, each calling its own code and nothing of the other.

Our own package is imported under another name for each revision, which its relative imports make possible. The
modules of a ``kernel.toml`` keep their names, so those of revision A are guests: they are in ``sys.modules`` and on
``sys.path`` only during A's calls, and B's only outside of them. Code that cannot be kept apart is an error.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial, partialmethod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch

from ... import errors
from ...errors import InputError, SubjectError
from ...gpu.device import current_gpu
from ..worker import describe_error
from .operator import Baseline, Inputs, Operator, OurOperator, ours
from .outputs import Call
from .registry import find_operator, module_at_revision
from .subject import PACKAGE_FOLDER, Checkout, Subject, add_python_path, load_attribute

_Entry = Callable[..., Any]
# What is asked of a subject's own implementation.
_OF_THE_REVISION = ("refusal", "compile_jobs", "promised_launches", "cpu_refusal", "cpu_stand_in")


def at_revision(operator: Operator, subject: Subject) -> Operator:
    """Return ``operator`` for a subject at a revision: cases and right answers keep their meaning.

    The revision itself calls, plans and compiles its subject. The other revision is a baseline.
    """
    return cast("Operator", _AtRevision(operator, subject))


def revision_operator(operator: Operator, subject: Subject) -> OurOperator:
    """Return the operator of our own package at the subject's revision. Raises ``SubjectError``."""
    revision = _RevisionOperator.of(operator, subject)
    assert revision is not None
    return revision.own


def load_revision(subject: Subject) -> _Entry:
    """Import the entry point of a revision.

    Raises:
        SubjectError: it, or something that it imports, comes from elsewhere than the revision's checkout.
    """
    assert subject.checkout is not None
    with _operators_apart(subject.checkout):
        entry: _Entry = load_attribute(subject.entry_point)
    _check_origin(subject.entry_point.partition(":")[0], subject.checkout)
    return entry


class _AtRevision:
    """An operator whose implementations are those of one revision; all else is the operator's own."""

    def __init__(self, operator: Operator, subject: Subject) -> None:
        self._operator = operator
        self._subject = subject

    def __getattr__(self, name: str) -> Any:
        return getattr((name in _OF_THE_REVISION and self._revision) or self._operator, name)

    @cached_property
    def _revision(self) -> _RevisionOperator | None:
        return _RevisionOperator.of(self._operator, self._subject)

    def bind(self, entry: _Entry, problem: Any, inputs: Inputs) -> Call:
        if isinstance(entry, _BoundByItself):
            return entry.bind(problem, inputs)
        return (self._revision or self._operator).bind(entry, problem, inputs)

    def baselines(self) -> Mapping[str, Baseline]:
        """Return the other revision alone: the operator's own baselines are for `flashmoe prove`."""
        other = self._subject.baseline
        return {} if other is None else {other.name: cast("Baseline", _OtherRevision(self._operator, other))}


@dataclass(frozen=True)
class _RevisionOperator:
    """The operator of our own package as it is at one revision."""

    harness: Operator
    own: OurOperator
    name: str  # of the subject
    package: str

    @classmethod
    def of(cls, harness: Operator, subject: Subject) -> _RevisionOperator | None:
        checkout = subject.checkout
        assert checkout is not None
        if not checkout.package:
            return None
        add_python_path(subject)
        with _operators_apart(checkout):
            try:
                own = ours(find_operator(module_at_revision(checkout.package, subject.operator)))
            except Exception as error:
                hint = "what a harness asks of it is in proof/subject/operator.py; its own harness may still compare it"
                reason = describe_error(error)
                raise SubjectError(f"its operator does not fit this harness: {reason}", hint=hint) from error
        return cls(harness, own, checkout.own_name, checkout.package)

    def _problem(self, problem: Any) -> Any:
        """Return the revision's own description of ``problem``. Raises what its ``parse_case`` raises."""
        return self.own.parse_case(self.harness.as_table(problem))

    def bind(self, entry: _Entry, problem: Any, inputs: Inputs) -> Call:
        return self.own.bind(entry, self._problem(problem), inputs)

    def _ask(self, method: str, _subject: str, problem: Any) -> Any:
        with self._translated():
            return getattr(self.own, method)(self.name, self._problem(problem))

    promised_launches = partialmethod(_ask, "promised_launches")
    cpu_refusal = partialmethod(_ask, "cpu_refusal")
    cpu_stand_in = partialmethod(_ask, "cpu_stand_in")

    def refusal(self, _subject: str, problem: Any, gpu: str) -> str | None:
        try:
            with self._translated():
                return self.own.refusal(self.name, self._problem(problem), gpu)
        except InputError as error:  # a later revision added what this one cannot read
            return f"this revision does not know such a case: {error}"

    def compile_jobs(self, _subject: str, problems: Sequence[Any], gpus: Sequence[str]) -> Sequence[Any]:
        known = []
        for problem in problems:
            with contextlib.suppress(Exception):  # refusal says why it is left out
                known.append(self._problem(problem))

        def run(job: Any) -> Any:
            with self._translated():
                return job.run()

        with self._translated():
            jobs = self.own.compile_jobs(self.name, known, gpus)
        return [SimpleNamespace(label=job.label, gpu=job.gpu, run=partial(run, job)) for job in jobs]

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn the revision's own errors into ours of the same name: its classes are not the harness's."""
        try:
            yield
        except Exception as error:
            known = getattr(errors, type(error).__name__, None)
            if type(error).__module__ != f"{self.package}.errors" or known is None:
                raise
            hint = getattr(error, "hint", "")
            raise known(str(error).removesuffix(f"\nhint: {hint}"), hint=hint) from error


@dataclass(frozen=True)
class _BoundByItself:
    """The entry point of the other revision, which knows how its own revision binds it."""

    entry: _Entry
    bind: Callable[[Any, Inputs], Call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.entry(*args, **kwargs)


class _OtherRevision:
    """Revision A as a baseline. Fits ``operator.Baseline``."""

    def __init__(self, operator: Operator, subject: Subject) -> None:
        assert subject.checkout is not None
        self.name = subject.name
        self.kernels = tuple(kernel.pattern for kernel in subject.kernels)
        self._operator, self._subject, self._checkout = operator, subject, subject.checkout
        self._revision: _RevisionOperator | None = None
        self._guest = None if self._checkout.package else Guest(subject)

    def load(self) -> _Entry:
        if self._guest is None:
            self._revision = _RevisionOperator.of(self._operator, self._subject)
            assert self._revision is not None
            own, entry = self._revision, load_revision(self._subject)
            return _BoundByItself(entry, lambda problem, inputs: own.bind(entry, problem, inputs))
        with self._guest():
            return load_revision(self._subject)

    def version(self) -> str:
        return f"{self._checkout.label} {self._checkout.commit[:12]}"

    def refusal(self, problem: Any) -> str | None:
        gpu = current_gpu()
        return self._revision.refusal("", problem, gpu.name) if self._revision is not None and gpu is not None else None

    def context(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._guest is None else self._guest()


class Guest:
    """The modules of one revision, which are in ``sys.modules`` only inside of the context.

    Imports that a call makes late land with the right revision too. Entering costs microseconds, outside of the timing.
    """

    def __init__(self, subject: Subject) -> None:
        assert subject.checkout is not None
        self._checkout = subject.checkout
        self._path = [str((subject.folder / entry).resolve()) for entry in subject.python_path]
        self._modules: dict[str, ModuleType] = {}  # the guest's
        self._hosts: set[str] = set()  # names of modules of the other revision
        self._seen: set[str] = set()  # names that were looked at
        self._inside = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Enter; inside already, do nothing."""
        if self._inside:
            yield
            return
        for name in sys.modules.keys() - self._seen:
            self._seen.add(name)
            if _lies_in(sys.modules[name], self._checkout.shared):
                self._hosts.add(name)
        outer_path = list(sys.path)
        hosts = {name: sys.modules.pop(name) for name in self._hosts if name in sys.modules}
        sys.modules.update(self._modules)
        shared = str(self._checkout.shared)
        sys.path[:] = [*self._path, *(entry for entry in outer_path if not entry.startswith(shared))]
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            sys.path[:] = outer_path
            self._take_out()
            sys.modules.update(hosts)

    def _take_out(self) -> None:
        """Move the guest's modules out of ``sys.modules``: those known, and those that were imported inside."""
        for name in sys.modules.keys() - self._seen:
            if _lies_in(sys.modules[name], self._checkout.root):
                self._modules[name] = sys.modules[name]
            elif name not in self._hosts:
                self._seen.add(name)
        for name in self._modules:
            sys.modules.pop(name, None)


def _lies_in(module: object, folder: Path) -> bool:
    """Return whether a module was loaded from below ``folder``."""
    values = getattr(module, "__dict__", {})  # asking the module itself may import what it loads lazily
    places = [values.get("__file__"), *_search_path(values)]
    found = (resolved for place in places if (resolved := _resolved(place)) is not None)
    return any(place.is_relative_to(folder) for place in found)


def _resolved(place: object) -> Path | None:
    """Return where a module says that it lies; None where it says nothing, or a name without a folder."""
    # Made-up modules carry a bare name, e.g. "_ops.py": it does not lie where this process happens to be.
    return Path(place).resolve() if isinstance(place, str) and Path(place).is_absolute() else None


def _search_path(values: Mapping[str, Any]) -> list[Any]:
    """Return where a package looks for its modules: all that is known of one without ``__init__.py``."""
    try:
        return list(values.get("__path__") or ())
    except (TypeError, KeyError, AttributeError):  # a namespace package asks its parent, which may be gone
        return []


def _check_origin(name: str, checkout: Checkout) -> None:
    """Raise ``SubjectError`` unless the module called ``name``, and what it imported, is this revision's."""
    module = importlib.import_module(name)
    if not _lies_in(module, checkout.root):
        raise SubjectError(
            f"{name} of revision {checkout.label} was not loaded from its checkout: both revisions would run one code",
            hint="build in place, e.g. `{python} setup.py build_ext --inplace`, and install nothing",
        )
    ours = (checkout.shared, PACKAGE_FOLDER, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve())
    for other, found in list(sys.modules.items()):
        path = _resolved(getattr(found, "__dict__", {}).get("__file__"))
        if path is None or not path.is_relative_to(checkout.repository):
            continue
        # Packages may lie in a folder of the repository that git ignores: no revision has them.
        is_code = (checkout.root / path.relative_to(checkout.repository)).exists()
        if is_code and not any(path.is_relative_to(folder) for folder in ours):
            raise SubjectError(
                f"module {other} was loaded from the repository itself and not from the checkout of "
                f"{checkout.label}: both revisions would run it",
                hint="an installation in development mode does that: name its folder in python_path",
            )


@contextlib.contextmanager
def _operators_apart(checkout: Checkout) -> Iterator[None]:
    """Give what a revision registers with ``torch.library`` a namespace of its own.

    ``custom_op`` replaces an operator of the same name without a word: A would call B's.
    """
    tag = re.sub(r"\W", "_", checkout.root.name)
    kept = torch.library.custom_op, torch.library.triton_op

    def apart(register: Callable[..., Any]) -> Callable[..., Any]:
        def registered(name: str, *args: Any, **kwargs: Any) -> Any:
            namespace, colons, operator = name.partition("::")
            return register(f"{namespace}_{tag}{colons}{operator}", *args, **kwargs)

        return registered

    torch.library.custom_op, torch.library.triton_op = (apart(register) for register in kept)
    try:
        yield
    finally:
        torch.library.custom_op, torch.library.triton_op = kept
