"""A claim is stale where what the GPU runs in its cases changed, and not where only files did."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest

from flashmoe_science.attention.fingerprints import RUN_AT_EACH_CALL, RUN_AT_EACH_CALL_WITH_FEATURES
from flashmoe_science.errors import EvidenceError, InputError
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.moe.fingerprints import (
    RUN_AT_EACH_CALL as OF_EXPERTS,
    RUN_AT_EACH_CALL_OF_GRADIENTS as OF_GRADIENTS_OF_EXPERTS,
)
from flashmoe_science.proof import changes
from flashmoe_science.proof.changes import changes_since
from flashmoe_science.proof.conclude import conclude
from flashmoe_science.proof.evidence import SourceFile, parse_record, record_text, write_record
from flashmoe_science.proof.judge import VerdictStatus
from flashmoe_science.proof.operator import allocations_of, code_of, host_files_of, load_operator
from flashmoe_science.proof.readme import claim_section
from flashmoe_science.proof.store import Store
from flashmoe_science.proof.subject import PACKAGE_FOLDER
from flashmoe_science.proof.transfer import import_records
from flashmoe_science.proof.verify import read_records, verify_claims

from .builders import H200, L4, build_record
from .claim_builders import build_claim, claim_toml, suite_toml
from .fake_operator import OPERATOR

ATTENTION = load_operator("attention")
SOURCES = [SourceFile(path=path, sha256="0" * 64) for path in ("errors.py", "gpu/specs.py")]
FILES = "2 of 2, errors.py, gpu/specs.py"
STALE = f"demonstrated at commit 000000000000, before its sources changed: {FILES}"
NOTE = "2 of its source files changed since; what runs on the GPU in its {} did not (fingerprints equal)"


def made_up_code(arm, problem, gpu):
    return hashlib.sha256(f"{arm} {problem} {gpu.sms}".encode()).hexdigest()


class Now:
    """What the operator's ``code`` answers now: the same as in the run, but for some arms and cases."""

    def __init__(self):
        self.asked = []
        self.other = {}  # (arm, positions) -> what it answers instead

    def __call__(self, arm, problem, gpu):
        self.asked.append((arm, problem.seqlen_q, gpu.sms))
        key = arm, problem.seqlen_q
        return self.other[key] if key in self.other else made_up_code(arm, problem, gpu)


@pytest.fixture(autouse=True)
def now(monkeypatch):
    """Put the made-up fingerprints in the place of our operator's."""
    now = Now()
    monkeypatch.setattr(type(ATTENTION), "code", now)
    changes._code_now.cache_clear()
    yield now
    changes._code_now.cache_clear()


def with_codes(record, *, only=None):
    """Return ``record`` with sources that are others now, and fingerprints as the run would have written them."""
    spec = SPECS["H200"]
    cases = []
    for number, case in enumerate(record.cases):
        problem = {**case.problem, "seqlen_q": 512 + number}
        parsed = ATTENTION.parse_case(problem)
        arms = [
            arm.model_copy(update={"code": "" if arm.role == "control" else made_up_code(arm.name, parsed, spec)})
            if only is None or number in only
            else arm
            for arm in case.arms
        ]
        cases.append(case.model_copy(update={"problem": problem, "arms": arms}))
    subject = record.subject.model_copy(update={"sources": SOURCES})
    return record.model_copy(update={"cases": cases, "subject": subject})


def run_of(**model):
    return with_codes(build_record(speedups=[2.5, 2.6, 2.7], **model))


KERNEL = build_claim(metric="kernel")


@pytest.mark.parametrize("metric", ["kernel", "graph"])
def test_files_that_changed_do_not_count_for_device_time_where_the_fingerprints_are_equal(tmp_path, metric):
    found = changes_since(build_claim(metric=metric), run_of(), tmp_path)
    assert (found.changed, found.notes) == ("", [NOTE.format("3 cases")])


WALL_NOTE = NOTE.replace("did not", "did not, nor what the host runs at each call")


def test_files_that_changed_do_not_count_for_wall_time_where_the_host_does_not_run_them_at_each_call(tmp_path, now):
    wall = build_claim(metric="wall")
    found = changes_since(wall, run_of(), tmp_path)
    assert (found.changed, found.notes) == ("", [WALL_NOTE.format("3 cases")])
    now.other = {("flash_attention", 513): "1" * 64}
    changes._code_now.cache_clear()
    assert "what runs on the GPU is another in 1 of 3 cases: case1" in changes_since(wall, run_of(), tmp_path).changed


@pytest.mark.parametrize("files", [frozenset(("a.py", "gpu/specs.py")), None], ids=["one of them", "not known"])
def test_files_that_the_host_runs_at_each_call_count_for_wall_time(tmp_path, now, monkeypatch, files):
    monkeypatch.setattr(type(ATTENTION), "host_files", lambda _self, _subject, _problem: files)
    found = changes_since(build_claim(metric="wall"), run_of(), tmp_path)
    assert (found.changed, found.notes) == (FILES, ())
    assert now.asked == []
    assert changes_since(KERNEL, run_of(), tmp_path).changed == ""


def test_attention_s_plain_entry_and_the_experts_say_what_the_host_runs():
    table = {"batch": 1, "heads": 8, "seqlen_q": 512, "head_dim": 64, "dtype": "bf16"}
    plain, soft = (ATTENTION.parse_case({**table, **options}) for options in ({}, {"softcap": 30.0}))
    assert host_files_of(ATTENTION, "flash_attention", plain) == RUN_AT_EACH_CALL
    assert host_files_of(ATTENTION, "flash_attention", soft) == RUN_AT_EACH_CALL_WITH_FEATURES
    assert host_files_of(ATTENTION, "forward_triton", plain) is None
    assert host_files_of(load_operator("attention_varlen"), "flash_attention_varlen", plain) is None
    assert host_files_of(load_operator("moe"), "gemv_triton", None) == OF_EXPERTS
    assert host_files_of(load_operator("moe_backward"), "fused_moe_backward", None) == OF_GRADIENTS_OF_EXPERTS


MEMORY = build_claim(metric="memory")
MEMORY_NOTE = NOTE.replace("did not", "did not, nor what a call allocates")
SIZES = [1000, 3 << 20, 1 << 20, 0]  # in blocks of 512 bytes, and the second alone up to 1 MiB more
LEAST = 1024 + (4 << 20)


@pytest.fixture
def told(monkeypatch):
    """Put made-up sizes in the place of what the operator says that calls allocate, by positions."""
    told = dict.fromkeys((512, 513, 514), SIZES)
    monkeypatch.setattr(
        type(ATTENTION), "allocations", lambda _self, _subject, problem, _gpu: told[problem.seqlen_q], raising=False
    )
    return told


def that_counted(record, *peaks):
    """Return ``record`` with the peaks that its subject was counted to have, by case."""
    cases = [
        case.model_copy(
            update={
                "arms": [
                    arm.model_copy(update={"peak_bytes": peak} if arm.role == "subject" else {}) for arm in case.arms
                ]
            }
        )
        for case, peak in zip(record.cases, peaks, strict=True)
    ]
    return record.model_copy(update={"cases": cases})


def test_files_that_changed_count_for_memory_where_nobody_knows_what_a_call_allocates(tmp_path, now):
    found = changes_since(MEMORY, that_counted(run_of(), LEAST, LEAST, LEAST), tmp_path)
    untold = "nothing tells that a call allocates now what was counted in 3 of 3 cases: case0, case1, case2"
    assert (found.changed, found.notes) == (f"{FILES}; {untold}", ())
    assert now.asked == []


def test_files_that_changed_do_not_count_for_memory_where_a_call_allocates_what_was_counted(tmp_path, now, told):
    run = that_counted(run_of(), LEAST, LEAST + 4096, LEAST + (1 << 20))
    found = changes_since(MEMORY, run, tmp_path)
    assert (found.changed, found.notes) == ("", [MEMORY_NOTE.format("3 cases")])
    now.other = {("sdpa", 513): "1" * 64}
    changes._code_now.cache_clear()
    assert (
        "what runs on the GPU is another in 1 of 3 cases: case1 (sdpa)" in changes_since(MEMORY, run, tmp_path).changed
    )


@pytest.mark.parametrize("peak", [None, LEAST - 512, LEAST + (1 << 20) + 512])
def test_a_peak_that_is_not_what_a_call_allocates_counts(tmp_path, told, peak):
    found = changes_since(MEMORY, that_counted(run_of(), LEAST, peak, LEAST), tmp_path)
    assert found.changed.endswith("allocates now what was counted in 1 of 3 cases: case1")
    assert changes_since(KERNEL, that_counted(run_of(), LEAST, peak, LEAST), tmp_path).changed == ""


def test_a_case_that_is_none_any_more_counts(tmp_path, told):
    told[513] = None
    del told[514]  # planning it raises
    found = changes_since(MEMORY, that_counted(run_of(), LEAST, LEAST, LEAST), tmp_path)
    assert found.changed.endswith("in 2 of 3 cases: case1, case2")


def test_the_experts_say_what_a_call_allocates_and_attention_does_not():
    table = {"tokens": 96, "experts": 8, "top_k": 2, "hidden": 64, "inter": 32, "dtype": "bf16"}
    experts, gradients = load_operator("moe"), load_operator("moe_backward")
    sizes = allocations_of(experts, "fused_moe", experts.parse_case(table), SPECS["H200"])
    assert sizes is not None
    assert sizes[:2] == [96 * 64 * 2, 192 * 32 * 2]  # out and h
    assert allocations_of(experts, "gemv_triton", experts.parse_case(table), SPECS["H200"]) is None
    assert allocations_of(gradients, "fused_moe_backward", gradients.parse_case(table), SPECS["H200"])
    assert allocations_of(ATTENTION, "flash_attention", None, SPECS["H200"]) is None


def test_where_a_fingerprint_differs_the_cases_and_the_files_are_named(tmp_path, now):
    now.other = {("flash_attention", 513): "1" * 64}
    found = changes_since(KERNEL, run_of(), tmp_path)
    assert found.changed == f"{FILES}; what runs on the GPU is another in 1 of 3 cases: case1"
    assert found.notes == ()


def test_only_the_first_few_cases_are_named(tmp_path, now):
    now.other = {("flash_attention", 512 + number): "1" * 64 for number in range(5)}
    record = with_codes(build_record(speedups=[2.5] * 6))
    found = changes_since(KERNEL, record, tmp_path).changed
    assert found.endswith("another in 5 of 6 cases: case0, case1, case2 and 2 more")


def test_a_baseline_that_is_called_otherwise_counts_for_the_claims_about_it(tmp_path, now):
    now.other = {("fa3", 513): "1" * 64}
    record = run_of(baselines={"sdpa": 1.0, "fa3": 1.1})
    against = {
        name: changes_since(build_claim(metric="kernel", baseline=name), record, tmp_path) for name in record.baselines
    }
    assert against["sdpa"].changed == ""
    assert against["fa3"].changed.endswith("another in 1 of 3 cases: case1 (fa3)")


def refused(record, name, **changes):
    """Return ``record`` with an arm of its second case that was not measured."""
    case = record.cases[1]
    changes = {"status": "refused", "code": "", **changes}
    arms = [arm.model_copy(update=changes) if arm.name == name else arm for arm in case.arms]
    return record.model_copy(
        update={"cases": [record.cases[0], case.model_copy(update={"arms": arms}), record.cases[2]]}
    )


AGAINST_TWO = build_claim(metric="kernel", baseline=["sdpa", "fa3"])


def test_a_baseline_that_does_not_serve_a_case_does_not_count(tmp_path, now, monkeypatch):
    now.other = {("fa3", 513): "1" * 64}
    monkeypatch.setattr(ATTENTION.rivals()["fa3"], "refusal", lambda problem: f"it does not serve {problem}")
    record = refused(run_of(baselines={"sdpa": 1.0, "fa3": 1.1}), "fa3")
    assert changes_since(AGAINST_TWO, record, tmp_path).changed == ""


@pytest.mark.parametrize("problem", [{}, {"dtype": "fp8"}], ids=["it serves it now", "it is no problem any more"])
def test_a_baseline_that_would_serve_a_case_now_counts(tmp_path, problem):
    record = refused(run_of(baselines={"sdpa": 1.0, "fa3": 1.1}), "fa3")
    cases = [case.model_copy(update={"problem": {**case.problem, **problem}}) for case in record.cases]
    found = changes_since(AGAINST_TWO, record.model_copy(update={"cases": cases}), tmp_path)
    assert "case1" in found.changed


def test_a_baseline_that_is_none_any_more_counts(tmp_path, monkeypatch):
    monkeypatch.delitem(ATTENTION.rivals(), "fa3")
    record = refused(run_of(baselines={"sdpa": 1.0, "fa3": 1.1}), "fa3")
    assert changes_since(AGAINST_TWO, record, tmp_path).changed.endswith("in 1 of 3 cases: case1 (fa3)")


def test_a_baseline_that_is_not_installed_does_not_count(tmp_path):
    """The judge leaves such a case open."""
    record = refused(run_of(baselines={"sdpa": 1.0, "fa3": 1.1}), "fa3", status="unavailable")
    assert changes_since(AGAINST_TWO, record, tmp_path).changed == ""


def test_a_record_of_no_gpu_is_compared_by_its_files(tmp_path, now):
    record = run_of()
    nowhere = record.environment.model_copy(update={"gpu": None})
    assert changes_since(KERNEL, record.model_copy(update={"environment": nowhere}), tmp_path).changed == FILES
    assert now.asked == []


# What counts whatever the files of the subject say


@pytest.fixture
def own_repository(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / PACKAGE_FOLDER.name).symlink_to(PACKAGE_FOLDER)
    return tmp_path


def unchanged(record):
    return record.model_copy(update={"subject": record.subject.model_copy(update={"sources": []})})


OTHERWISE = "times are taken in another way"


@pytest.mark.parametrize("metric", ["kernel", "graph", "wall", "memory"])
def test_another_way_to_take_times_counts_for_every_claim(own_repository, metric, monkeypatch):
    monkeypatch.setattr("flashmoe_science.proof.method.method_code", lambda: "b" * 64)
    for method in ("", "a" * 64):
        record = unchanged(run_of()).model_copy(update={"method": method})
        assert changes_since(build_claim(metric=metric), record, own_repository).changed == OTHERWISE
    record = run_of().model_copy(update={"method": "a" * 64})
    assert changes_since(KERNEL, record, own_repository).changed == f"{FILES}; {OTHERWISE}"


def test_the_way_of_the_record_counts_for_no_claim(own_repository, monkeypatch):
    monkeypatch.setattr("flashmoe_science.proof.method.method_code", lambda: "b" * 64)
    record = unchanged(run_of()).model_copy(update={"method": "b" * 64})
    assert changes_since(KERNEL, record, own_repository) == changes.Sources()


def test_a_way_that_cannot_be_followed_is_none_of_any_record(own_repository, monkeypatch):
    monkeypatch.setattr("flashmoe_science.proof.method.method_code", lambda: "")
    assert changes_since(KERNEL, unchanged(run_of()), own_repository).changed == OTHERWISE


def test_elsewhere_the_harness_is_a_package_with_a_version(tmp_path, monkeypatch):
    monkeypatch.setattr("flashmoe_science.proof.method.method_code", lambda: "b" * 64)
    assert changes_since(KERNEL, unchanged(run_of()), tmp_path) == changes.Sources()


def test_what_importing_changes_elsewhere_counts_for_our_own_subjects(own_repository, monkeypatch):
    monkeypatch.setattr(changes, "acts_at_import", lambda _package: "a line 1: torch.x = 1")
    monkeypatch.setattr("flashmoe_science.proof.method.method_code", lambda: "b" * 64)
    record = unchanged(run_of()).model_copy(update={"method": "b" * 64})
    found = changes_since(build_claim(metric="wall"), record, own_repository).changed
    assert found == "importing the package changes more than its own names: a line 1: torch.x = 1"
    foreign = record.model_copy(update={"subject": record.subject.model_copy(update={"entry_point": "mine:fast"})})
    assert changes_since(KERNEL, foreign, own_repository) == changes.Sources()


def test_a_claim_about_some_cases_is_judged_by_these(tmp_path, now):
    now.other = {("flash_attention", 513): "1" * 64}
    found = changes_since(build_claim(metric="kernel", cases=["case0", "case2"]), run_of(), tmp_path)
    assert (found.changed, found.notes) == ("", [NOTE.format("2 cases")])


@pytest.mark.parametrize("only", [[], [0, 1]], ids=["of no case", "not of every case"])
def test_a_record_without_fingerprints_is_compared_by_its_files(tmp_path, only):
    record = with_codes(build_record(speedups=[2.5, 2.6, 2.7]), only=only)
    assert changes_since(KERNEL, record, tmp_path).changed == FILES


def test_a_record_of_before_there_were_fingerprints_is_read_and_compared_by_its_files(tmp_path):
    text = record_text(with_codes(build_record(), only=[])).replace('     "code": "",\n', "")
    assert '"code"' not in text
    assert changes_since(KERNEL, parse_record(text, "old"), tmp_path).changed == FILES


@pytest.mark.parametrize(
    "answer",
    [None, InputError("it is no problem any more"), ImportError("no module named triton.backends"), KeyError(96)],
    ids=["cannot tell", "refuses", "has another Triton", "fails"],
)
def test_where_no_fingerprint_can_be_made_now_the_files_count(tmp_path, monkeypatch, answer):
    def code(*_arguments):
        if answer is not None:
            raise answer

    monkeypatch.setattr(type(ATTENTION), "code", code)
    found = changes_since(KERNEL, run_of(), tmp_path)
    assert found.changed.startswith(
        f"{FILES}; what runs on the GPU is another, or cannot be told here, in 3 of 3 cases: case0, "
    )


def test_an_operator_that_offers_no_fingerprints_has_none():
    assert code_of(OPERATOR, "fake_attention", None, SPECS["H200"]) == ""


def test_a_subject_that_is_not_ours_is_compared_by_its_files(tmp_path, now):
    record = run_of()
    foreign = record.subject.model_copy(update={"entry_point": "mine:fast"})
    assert changes_since(KERNEL, record.model_copy(update={"subject": foreign}), tmp_path).changed == FILES
    assert now.asked == []


def test_a_repository_with_another_copy_of_the_package_is_compared_by_its_files(tmp_path, now):
    """The fingerprints would be those of the code that runs here, and not of the repository's."""
    own = tmp_path / "src" / PACKAGE_FOLDER.name
    own.mkdir(parents=True)
    for source in SOURCES:
        (own / source.path).parent.mkdir(exist_ok=True)
        (own / source.path).write_text("changed")
    for claim in (KERNEL, MEMORY):
        found = changes_since(claim, run_of(), tmp_path)
        assert found.changed == FILES
        assert [note.partition(":")[0] for note in found.notes] == ["what runs on the GPU was not compared"]
    assert now.asked == []


def test_sources_that_are_not_here_are_not_said_to_have_changed(tmp_path):
    """As in a folder with claims and evidence alone, beside the installed package."""
    record = run_of()
    subject = record.subject.model_copy(update={"folder": f"src/{PACKAGE_FOLDER.name}"})
    found = changes_since(KERNEL, record.model_copy(update={"subject": subject}), tmp_path)
    assert found.notes[0].startswith("2 of its source files are not in this repository; what runs on the GPU in its")


def test_a_link_to_the_package_that_runs_is_no_other_copy(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / PACKAGE_FOLDER.name).symlink_to(PACKAGE_FOLDER)
    assert changes_since(KERNEL, run_of(), tmp_path).changed == ""


def test_fingerprints_are_made_for_the_card_of_the_record(tmp_path, now):
    fewer = dataclasses.replace(SPECS["H200"], sms=114).sms
    record = run_of(gpu=H200.model_copy(update={"sms": fewer}))
    found = changes_since(KERNEL, record, tmp_path)
    assert {sms for _, _, sms in now.asked} == {114}
    assert found.changed != ""  # those recorded are of 132


def test_nothing_is_asked_where_no_file_changed_and_each_case_once_for_all_claims(tmp_path, now):
    record = run_of()
    same = record.subject.model_copy(update={"sources": []})
    changes_since(KERNEL, record.model_copy(update={"subject": same}), tmp_path)
    assert now.asked == []
    for _ in range(13):
        changes_since(KERNEL, record, tmp_path)
    assert len(now.asked) == 6  # three cases, subject and baseline


# Through verify and show


@pytest.fixture
def repository(tmp_path):
    for folder in ("claims", "evidence", "suites"):
        (tmp_path / folder).mkdir()
    (tmp_path / "claims" / "a.toml").write_text(claim_toml(metric="kernel", suite="mine"))
    suite = suite_toml("mine", "case0", "case1").replace("tests.proof.fake_operator", "attention")
    (tmp_path / "suites" / "mine.toml").write_text(
        suite.replace("head_dim = 64\n", 'head_dim = 64\ndtype = "fp16"\n') + "seqlen_q = 513\n"
    )
    record = with_codes(build_record(speedups=[2.5, 2.6], suite="mine"))
    whole = [ATTENTION.as_table(ATTENTION.parse_case(case.problem)) for case in record.cases]
    cases = [case.model_copy(update={"problem": p}) for case, p in zip(record.cases, whole, strict=True)]
    write_record(record.model_copy(update={"cases": cases}), tmp_path / "evidence" / "run.json")
    return tmp_path


def verdict_of(repository):
    (verdict,) = verify_claims(repository)
    return verdict


def test_verify_says_that_files_changed_and_leaves_the_claim_demonstrated(repository):
    verdict = verdict_of(repository)
    assert verdict.status is VerdictStatus.DEMONSTRATED
    assert verdict.notes == [NOTE.format("2 cases")]
    assert verdict.reason.endswith(f"; {verdict.notes[0]}")


def test_a_readme_does_not_count_the_files_that_do_not_count(repository):
    """Else every edit of a comment would leave it out of date."""
    assert "| **demonstrated** |" in claim_section([verdict_of(repository)], read_records(repository))


def test_verify_says_which_cases_are_stale(repository, now):
    now.other = {("flash_attention", 513): "1" * 64}
    verdict = verdict_of(repository)
    assert verdict.status is VerdictStatus.STALE
    assert verdict.notes == [f"{STALE}; what runs on the GPU is another in 1 of 2 cases: case1"]


def test_show_says_what_verify_says(repository):
    (path,) = (repository / "evidence").iterdir()
    record = parse_record(path.read_text(), path)
    (verdict,) = conclude(record, repository, since=lambda claim: changes_since(claim, record, repository))
    assert (verdict.status, verdict.notes) == (VerdictStatus.DEMONSTRATED, [NOTE.format("2 cases")])
    (expected,) = conclude(record, None, since=lambda claim: changes_since(claim, record, repository))
    assert expected.claim.metric == "graph"
    assert expected.notes == [NOTE.format("2 cases")]


# A record that somebody edited


def first_code(record):
    return record.cases[0].arms[0].code


def test_a_fingerprint_that_was_edited_is_none_of_the_code(repository):
    (path,) = (repository / "evidence").iterdir()
    text = path.read_text()
    code = first_code(parse_record(text, path))
    assert len(code) == 64
    path.write_text(text.replace(code, "f" * 64))
    assert verdict_of(repository).status is VerdictStatus.STALE


@pytest.mark.parametrize("code", ["no hash", "F" * 64, "f" * 63])
def test_what_is_no_fingerprint_is_refused(repository, code):
    (path,) = (repository / "evidence").iterdir()
    text = path.read_text()
    path.write_text(text.replace(first_code(parse_record(text, path)), code))
    with pytest.raises(EvidenceError, match=r"run\.json: key cases\.0\.arms\.0\.code"):
        verdict_of(repository)


def test_a_store_takes_no_run_whose_fingerprints_were_edited(tmp_path):
    store, record = Store(f"sqlite:///{tmp_path}/runs.db"), run_of()
    store.save(record)
    text = record_text(record).replace(first_code(record), "f" * 64)
    (tmp_path / "edited.json").write_text(text)
    (carried,) = import_records(store, [tmp_path / "edited.json"])
    assert carried.status == "failed"
    assert "with another content, and complete" in carried.reason
    assert store.load(record.id) == record


def test_a_card_that_is_not_in_the_table_has_fingerprints_too(tmp_path, now):
    unknown = L4.model_copy(update={"name": "NVIDIA H999", "arch": 90, "sms": 132})
    found = changes_since(build_claim(metric="kernel", gpu="H999"), run_of(gpu=unknown), tmp_path)
    assert now.asked
    assert found.changed == ""
