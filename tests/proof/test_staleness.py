"""A claim is stale where the launches of its cases changed, or the files that its calls run, and not elsewhere."""

from __future__ import annotations

import dataclasses

import pytest

from flashmoe_science.errors import EvidenceError, InputError, UnreadableError
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.proof.judge import staleness as changes
from flashmoe_science.proof.judge.judge import VerdictStatus
from flashmoe_science.proof.judge.run_verdicts import conclude
from flashmoe_science.proof.judge.staleness import Sources, changes_since
from flashmoe_science.proof.judge.verify import verify_claims
from flashmoe_science.proof.measure import host_files
from flashmoe_science.proof.records.documents import parse_record, record_text, write_record
from flashmoe_science.proof.records.evidence import CaseRecord, SourceFile, Work, rates_of
from flashmoe_science.proof.subject.loading import load_operator
from flashmoe_science.proof.subject.operator import identities_of
from flashmoe_science.proof.subject.subject import PACKAGE_FOLDER

from .builders import H200, build_record
from .claim_builders import build_claim, claim_toml, suite_toml
from .fake_operator import OPERATOR

ATTENTION = load_operator("attention")
SOURCES = [SourceFile(path=path, sha256="0" * 64) for path in ("errors.py", "gpu/specs.py")]
FILES = "2 of 2, errors.py, gpu/specs.py"
HOST = {"attention/api.py": "a" * 32}
KERNEL, WALL = build_claim(metric="kernel"), build_claim(metric="wall")


class Now:
    """What a call launches now: the same as in the run, but for the cases of some lengths."""

    def __init__(self):
        self.asked = []
        self.other = {}  # positions -> what it answers instead, or raises

    def __call__(self, operator, subject, problem, gpu):
        self.asked.append((subject, problem.seqlen_q, gpu.sms))
        answer = self.other.get(problem.seqlen_q, [f"{problem.seqlen_q:032}"])
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def now(monkeypatch):
    now = Now()
    monkeypatch.setattr("flashmoe_science.proof.subject.operator.identities_of", now)
    monkeypatch.setattr(host_files, "changed_files", lambda ran: [path for path in ran if HOST.get(path) != ran[path]])
    changes._identities_now.cache_clear()
    yield now
    changes._identities_now.cache_clear()


def with_identities(record, *, only=None, files=HOST):
    """Return ``record`` with sources that are others now, and what the run would have written of its launches."""
    cases = []
    for number, case in enumerate(record.cases):
        problem = {**case.problem, "seqlen_q": 512 + number}
        told = {"identities": [f"{512 + number:032}"], "host_files": files} if only is None or number in only else {}
        arms = [arm.model_copy(update=told if arm.role == "subject" else {}) for arm in case.arms]
        cases.append(case.model_copy(update={"problem": problem, "arms": arms}))
    subject = record.subject.model_copy(update={"sources": SOURCES})
    return record.model_copy(update={"cases": cases, "subject": subject})


def run_of(*, only=None, files=HOST, **model):
    return with_identities(build_record(speedups=[2.5, 2.6, 2.7], **model), only=only, files=files)


@pytest.mark.parametrize("metric", ["kernel", "graph", "wall", "memory"])
def test_files_that_changed_do_not_count_where_launches_and_host_files_are_the_same(tmp_path, metric):
    assert changes_since(build_claim(metric=metric), run_of(), tmp_path) == Sources()


@pytest.mark.parametrize("metric", ["kernel", "graph", "wall", "memory"])
def test_the_cases_whose_launches_differ_are_named(tmp_path, now, metric):
    now.other = {513: ["f" * 32]}
    found = changes_since(build_claim(metric=metric), run_of(), tmp_path)
    assert found.changed == "launches differ in 1 of 3 cases: case1"


def test_only_the_first_few_cases_are_named(tmp_path, now):
    now.other = {512 + number: [] for number in range(5)}
    record = with_identities(build_record(speedups=[2.5] * 6))
    found = changes_since(KERNEL, record, tmp_path).changed
    assert found == "launches differ in 5 of 6 cases: case0, case1, case2 and 2 more"


def test_a_claim_about_some_cases_is_judged_by_these(tmp_path, now):
    now.other = {513: ["f" * 32]}
    assert changes_since(build_claim(metric="kernel", cases=["case0", "case2"]), run_of(), tmp_path) == Sources()


@pytest.mark.parametrize(
    "answer",
    [[], InputError("it is no problem any more"), ImportError("no module named triton")],
    ids=["nothing", "refuses", "has no Triton"],
)
def test_a_case_that_launches_nothing_now_differs(tmp_path, now, answer):
    now.other = {513: answer}
    assert changes_since(KERNEL, run_of(), tmp_path).changed == "launches differ in 1 of 3 cases: case1"


def test_a_kernel_that_cannot_be_read_is_an_error(tmp_path, now):
    now.other = {513: UnreadableError("x cannot be read")}
    with pytest.raises(UnreadableError):
        changes_since(KERNEL, run_of(), tmp_path)


@pytest.mark.parametrize("metric", ["wall", "memory"])
def test_a_file_that_a_call_runs_counts_for_wall_time_and_memory(tmp_path, metric):
    record = run_of(files={**HOST, "gpu/launch.py": "c" * 32})
    found = changes_since(build_claim(metric=metric), record, tmp_path)
    assert found.changed == "files that a call runs on the host changed: gpu/launch.py"
    assert changes_since(KERNEL, record, tmp_path) == Sources()


def test_where_no_host_files_are_recorded_its_sources_count_for_wall_time(tmp_path):
    record = run_of(files={})
    assert changes_since(WALL, record, tmp_path).changed.endswith(f"are not recorded, and files changed: {FILES}")
    assert changes_since(WALL, unchanged(record), tmp_path) == Sources()


@pytest.mark.parametrize("only", [[], [0, 1]], ids=["of no case", "not of every case"])
def test_where_launches_are_not_recorded_its_sources_count(tmp_path, only):
    found = changes_since(KERNEL, run_of(only=only), tmp_path)
    assert found.changed == f"its launches are not recorded, and files changed: {FILES}"
    assert changes_since(KERNEL, unchanged(run_of(only=only)), tmp_path) == Sources()


def unchanged(record):
    return record.model_copy(update={"subject": record.subject.model_copy(update={"sources": []})})


def test_an_older_record_is_read_and_its_fields_are_ignored(tmp_path):
    record = run_of().model_copy(update={"method": "a" * 64})
    text = record_text(record).replace('"code": ""', f'"code": "{"b" * 64}"')
    assert changes_since(KERNEL, parse_record(text, "old"), tmp_path) == Sources()


@pytest.mark.parametrize("identity", ["no hash", "F" * 32, "f" * 31])
def test_what_is_no_identity_is_refused(identity):
    text = record_text(run_of()).replace(f"{512:032}", identity)
    with pytest.raises(EvidenceError, match=r"key cases\.0\.arms\.1\.identities\.0"):
        parse_record(text, "run.json")


def test_a_record_of_no_gpu_is_compared_by_its_files(tmp_path, now):
    record = run_of()
    nowhere = record.environment.model_copy(update={"gpu": None})
    assert changes_since(KERNEL, record.model_copy(update={"environment": nowhere}), tmp_path).changed == FILES
    assert now.asked == []


def test_a_subject_that_is_not_ours_is_compared_by_its_files(tmp_path, now):
    record = run_of()
    foreign = record.subject.model_copy(update={"entry_point": "mine:fast"})
    assert changes_since(KERNEL, record.model_copy(update={"subject": foreign}), tmp_path).changed == FILES
    assert now.asked == []


def test_a_repository_with_another_copy_of_the_package_is_compared_by_its_files(tmp_path, now):
    """The identities would be those of the code that runs here, and not of the repository's."""
    own = tmp_path / "src" / PACKAGE_FOLDER.name
    own.mkdir(parents=True)
    for source in SOURCES:
        (own / source.path).parent.mkdir(exist_ok=True)
        (own / source.path).write_text("changed")
    found = changes_since(KERNEL, run_of(), tmp_path)
    assert found.changed == FILES
    assert [note.partition(":")[0] for note in found.notes] == ["what runs on the GPU was not compared"]
    assert now.asked == []


def test_a_link_to_the_package_that_runs_is_no_other_copy(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / PACKAGE_FOLDER.name).symlink_to(PACKAGE_FOLDER)
    assert changes_since(KERNEL, run_of(), tmp_path) == Sources()


def test_identities_are_made_for_the_card_of_the_record_and_once_for_all_claims(tmp_path, now):
    fewer = dataclasses.replace(SPECS["H200"], sms=114).sms
    for _ in range(3):
        changes_since(KERNEL, run_of(gpu=H200.model_copy(update={"sms": fewer})), tmp_path)
    assert now.asked == [("flash_attention", 512 + number, 114) for number in range(3)]


def test_an_operator_that_does_not_tell_its_launches_has_no_identities():
    assert identities_of(OPERATOR, "fake_attention", None, SPECS["H200"]) == []


# Through verify and show


def with_the_work_of_its_problem(case: CaseRecord) -> CaseRecord:
    problem = ATTENTION.parse_case(case.problem)
    work = ATTENTION.work(problem)
    counted = Work(flops=work.flops, bytes=work.bytes, tokens=work.tokens)
    case = case.model_copy(update={"problem": ATTENTION.as_table(problem), "work": counted})
    arms = [arm.model_copy(update={"rates": rates_of(case, arm.name)}) for arm in case.arms]
    return case.model_copy(update={"arms": arms})


@pytest.fixture
def repository(tmp_path):
    for folder in ("claims", "evidence", "suites"):
        (tmp_path / folder).mkdir()
    (tmp_path / "claims" / "a.toml").write_text(claim_toml(metric="kernel", suite="mine"))
    suite = suite_toml("mine", "case0", "case1").replace("tests.proof.fake_operator", "attention")
    (tmp_path / "suites" / "mine.toml").write_text(
        suite.replace("head_dim = 64\n", 'head_dim = 64\ndtype = "fp16"\n') + "seqlen_q = 513\n"
    )
    record = with_identities(build_record(speedups=[2.5, 2.6], suite="mine"))
    cases = [with_the_work_of_its_problem(case) for case in record.cases]
    write_record(record.model_copy(update={"cases": cases}), tmp_path / "evidence" / "run.json")
    return tmp_path


def verdict_of(repository):
    (verdict,) = verify_claims(repository)
    return verdict


def test_verify_leaves_a_claim_demonstrated_whose_files_alone_changed(repository):
    verdict = verdict_of(repository)
    assert (verdict.status, verdict.notes) == (VerdictStatus.DEMONSTRATED, [])


def test_verify_and_show_say_which_cases_are_stale(repository, now):
    now.other = {513: ["f" * 32]}
    verdict = verdict_of(repository)
    assert verdict.status is VerdictStatus.STALE
    stale = "demonstrated at commit 000000000000, before its sources changed: launches differ in 1 of 2 cases: case1"
    assert verdict.notes == [stale]
    (path,) = (repository / "evidence").iterdir()
    record = parse_record(path.read_text(), path)
    (shown,) = conclude(record, repository, since=lambda claim: changes_since(claim, record, repository))
    assert (shown.status, shown.notes) == (verdict.status, verdict.notes)


def test_verify_says_what_cannot_be_read(repository, now):
    now.other = {513: UnreadableError("x of a:b cannot be read")}
    verdict = verdict_of(repository)
    assert (verdict.status, verdict.reason) == (VerdictStatus.INCONCLUSIVE, "x of a:b cannot be read")
