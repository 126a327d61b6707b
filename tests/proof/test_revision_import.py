"""Two revisions in one process: each calls its own code; what cannot be kept apart is an error."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashmoe_science.errors import InputError, SubjectError
from flashmoe_science.proof.compare.revisions import checked_out, find_revision, subjects_at
from flashmoe_science.proof.measure.arms import load_arms
from flashmoe_science.proof.measure.rounds import Case, Plan, measure_case
from flashmoe_science.proof.records.evidence import Settings
from flashmoe_science.proof.subject import revision_import as isolation
from flashmoe_science.proof.subject.loading import load_entry, operator_of
from flashmoe_science.proof.subject.operator import ours
from flashmoe_science.proof.subject.subject import PACKAGE_FOLDER, Checkout, Subject

from .doubling import GPU
from .repositories import KERNEL, commit, doubling_repository
from .simulated import SimulatedTimer


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """Leave ``sys.path`` as it was, and in ``sys.modules`` nothing of a revision."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    plain = ("kernel", "helper", "late", "new", "installed", "shared_by_both")
    for name in [name for name in sys.modules if name in plain or name.startswith("flashmoe_science_")]:
        del sys.modules[name]


@pytest.fixture
def compared(tmp_path):
    """Return a way to check out two revisions of a repository and get B's subject, which knows A's."""
    opened = []

    def compare(repository, a="first", b="second"):
        first, second = (find_revision(repository, label) for label in (a, b))
        assert first
        assert second
        opened.append(checked_out(repository.resolve(), first, second))
        checkouts = opened[-1].__enter__()
        return subjects_at(str(repository / "kernels"), *checkouts)[0]

    yield compare
    for each in opened:
        each.__exit__(None, None, None)


def measured(subject):
    operator = operator_of(subject)
    assert subject.baseline is not None
    loaded = load_arms(subject, operator, [subject.baseline.name])
    plan = Plan(Settings(rounds=4, seed=1), ["graph", "wall"], process=0)
    return measure_case(Case("n64", operator, 64), loaded, plan, SimulatedTimer(GPU), on_round=lambda *_: None)


def statuses(case):
    return {arm["role"]: (arm["status"], arm["reason"]) for arm in case["arms"]}


def test_rounds_of_two_revisions_are_interleaved_and_each_runs_its_own_code(compared, tmp_path):
    subject = compared(doubling_repository(tmp_path / "repository"))
    case = measured(subject)
    assert set(statuses(case).values()) == {("measured", "")}
    a, b = subject.baseline.name, subject.name
    seconds = case["rounds"]["seconds"]["graph"]
    assert seconds[a] == pytest.approx([5e-6] * 4)
    assert seconds[f"{a}#2"] == pytest.approx([5e-6] * 4)
    assert seconds[b] == pytest.approx([6e-6] * 4)
    assert all(sorted(order) == sorted([a, b, f"{a}#2"]) for order in case["rounds"]["order"])
    assert len({tuple(order) for order in case["rounds"]["order"]}) > 1


def test_modules_of_a_are_seen_inside_of_its_calls_only(compared, tmp_path):
    subject = compared(doubling_repository(tmp_path / "repository"))
    entry = load_entry(subject)
    (baseline,) = operator_of(subject).baselines().values()
    loaded = baseline.load()
    assert entry is not loaded
    path = list(sys.path)
    with baseline.context():
        import helper  # type: ignore[import-not-found]

        assert helper.NAME == "kernel_of_first"
        loaded(torch.ones(2))
        assert "late" in sys.modules  # imported by the call
        with baseline.context():  # again, from inside
            assert sys.modules["helper"] is helper
        assert sys.modules["helper"] is helper
    assert sys.modules["helper"].NAME == "kernel_of_second"
    assert "late" not in sys.modules
    assert sys.path == path


def test_what_only_b_has_is_not_found_by_a(compared, tmp_path):
    repository = doubling_repository(tmp_path / "repository")
    commit(repository, {"late.py": "from new import ZERO\n", "new.py": "ZERO = 0.0\n"}, tag="third")
    commit(repository, {"new.py": ""}, tag="fourth")
    (repository / "kernels" / "new.py").unlink()
    commit(repository, {}, tag="fifth")
    case = measured(compared(repository, "fifth", "third"))
    assert statuses(case)["subject"][0] == "measured"
    assert statuses(case)["baseline"][0] == "failed"
    assert "No module named 'new'" in statuses(case)["baseline"][1]


def test_code_from_outside_of_its_checkout_is_refused(compared, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "installed.py").write_text(KERNEL)
    sys.path.append(str(tmp_path / "elsewhere"))
    repository = doubling_repository(tmp_path / "repository")
    toml = (repository / "kernels" / "kernel.toml").read_text().replace("kernel:double", "installed:double")
    commit(repository, {"kernel.toml": toml}, tag="third")
    commit(repository, {"late.py": "ZERO = 0\n"}, tag="fourth")
    with pytest.raises(SubjectError, match="installed of revision fourth was not loaded from its checkout"):
        load_entry(compared(repository, "third", "fourth"))


def test_an_installation_in_development_mode_is_refused(compared, tmp_path):
    repository = doubling_repository(tmp_path / "repository")
    (repository / "lib").mkdir()
    (repository / "lib" / "shared_by_both.py").write_text("")
    sys.path.append(str(repository / "lib"))
    commit(repository, {"kernel.py": "import shared_by_both\n" + KERNEL}, tag="third")
    with pytest.raises(SubjectError, match="module shared_by_both was loaded from the repository itself"):
        load_entry(compared(repository, "first", "third"))


def test_packages_beside_the_sources_and_modules_without_a_folder_are_no_code_of_a_revision(
    compared, tmp_path, monkeypatch
):
    repository = doubling_repository(tmp_path / "repository")
    commit(repository, {"kernel.py": "import only_installed\n" + KERNEL}, tag="third")
    (repository / ".packages").mkdir()
    (repository / ".packages" / "only_installed.py").write_text("")
    sys.path.append(str(repository / ".packages"))
    made_up = types.ModuleType("made_up_for_a_test")
    made_up.__file__ = "kernels/kernel.py"  # of a folder that nobody knows
    monkeypatch.setitem(sys.modules, made_up.__name__, made_up)
    monkeypatch.chdir(repository)
    try:
        assert load_entry(compared(repository, "first", "third")) is not None
    finally:
        sys.modules.pop("only_installed", None)


def test_operators_of_torch_library_do_not_replace_those_of_the_other_revision(compared, tmp_path):
    repository = doubling_repository(tmp_path / "repository")
    code = """
import torch
import helper

@torch.library.custom_op("made_for_a_test::which", mutates_args=())
def which(x: torch.Tensor) -> int:
    return int(helper.NAME == "kernel_of_first")

def double(x):
    return which(x)
"""
    commit(repository, {"kernel.py": code}, tag="third")
    commit(repository, {"helper.py": "NAME = 'kernel_of_first'"}, tag="fourth")
    subject = compared(repository, "fourth", "third")
    ours = load_entry(subject)
    (baseline,) = operator_of(subject).baselines().values()
    theirs = baseline.load()
    with baseline.context():
        assert theirs(torch.ones(1)) == 1
    assert ours(torch.ones(1)) == 0


def test_a_folder_of_any_name_gives_operators_a_namespace(tmp_path):
    checkout = Checkout("a", "0" * 40, tmp_path / "my-tree 2.0", tmp_path, tmp_path)
    with isolation._operators_apart(checkout):
        torch.library.custom_op("made_for_a_test::double", double, mutates_args=(), schema="(Tensor x) -> Tensor")
    assert torch.ops.made_for_a_test_my_tree_2_0.double(torch.ones(1)) == 2


def double(x):
    return 2 * x


# Our own package


@pytest.fixture
def own(tmp_path):
    """Return our own package as if it were checked out twice: a link to it under another name for each."""
    (tmp_path / "packages").mkdir()

    def subject(side, **changes):
        package = f"flashmoe_science_{side}"
        root = PACKAGE_FOLDER.parents[1]
        link = tmp_path / "packages" / package
        if not link.exists():
            link.symlink_to(PACKAGE_FOLDER)
        checkout = Checkout(side, "0" * 40, root, tmp_path, tmp_path, "flash_attention", package)
        made = Subject(
            f"flash_attention@{side}", "attention", f"{package}.attention.api:flash_attention", root, (), builtin=True
        )
        return replace(made, python_path=(str(tmp_path / "packages"),), checkout=checkout, **changes)

    return subject


def test_our_own_package_is_there_twice_and_each_arm_is_bound_and_planned_by_its_own(own):
    subject = own("right", baseline=own("left"))
    operator = operator_of(subject)
    problem = operator.parse_case({"batch": 1, "heads": 1, "seqlen_q": 8, "head_dim": 16, "dtype": "fp16"})
    inputs = operator.make_inputs(problem, seed=0, device="cpu")
    (baseline,) = operator.baselines().values()
    entries = load_entry(subject), baseline.load()
    calls: list[Any] = [operator.bind(entry, problem, inputs) for entry in entries]
    functions = [call.func for call in calls]
    packages = ["flashmoe_science_right", "flashmoe_science_left"]
    assert [function.__module__ for function in functions] == [f"{package}.attention.api" for package in packages]
    assert torch.equal(calls[0](), calls[1]())
    assert ours(operator).refusal(subject.name, problem, "H200") is None


def test_a_case_that_an_older_revision_does_not_know_is_refused_by_it(own, monkeypatch):
    subject = own("older")
    operator = operator_of(subject)
    problem = operator.parse_case({"batch": 1, "heads": 1, "seqlen_q": 8, "head_dim": 16, "dtype": "fp16"})
    assert ours(operator).refusal(subject.name, problem, "H200") is None
    old = sys.modules["flashmoe_science_older.operators.attention"].OPERATOR
    monkeypatch.delitem(old.keys, "softmax_scale")
    monkeypatch.delitem(old.keys, "causal")
    refusal = ours(operator).refusal(subject.name, problem, "H200")
    assert refusal is not None
    assert refusal.startswith("this revision does not know such a case: causal is not a key of a case of attention")


def test_errors_of_a_revision_are_those_of_the_harness(own):
    operator = operator_of(own("other"))
    own_operator = isolation.revision_operator(operator, own("other"))
    errors = sys.modules["flashmoe_science_other.errors"]
    assert errors.InputError is not InputError
    made = isolation._RevisionOperator(operator, own_operator, "flash_attention", "flashmoe_science_other")
    with pytest.raises(InputError, match="wrong") as caught, made._translated():
        raise errors.InputError("wrong", hint="do it right")
    assert caught.value.hint == "do it right"
