"""A record that contradicts itself, another record or git is named with the check that found it."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from flashmoe_science.errors import EvidenceError
from flashmoe_science.proof.judge.claims import load_claims
from flashmoe_science.proof.judge.consistency import Consistency, contradiction
from flashmoe_science.proof.judge.judge import VerdictStatus
from flashmoe_science.proof.judge.verify import verify_claims
from flashmoe_science.proof.records.documents import parse_record, read_record, record_text, write_record
from flashmoe_science.proof.records.evidence import Record, SourceFile, SubjectInfo, TreeState

from .builders import build_record
from .repositories import commit, git

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def genuine() -> Record:
    """Return the smallest record of this repository with kernel and wall times in three processes."""
    for path in sorted((ROOT / "evidence").glob("*.json.gz"), key=lambda path: path.stat().st_size):
        record = read_record(path)
        if record.environment.gpu and len(record.cases[0].rounds) == 2 and record.settings.processes == 3:
            return record
    raise AssertionError("evidence/ holds no such record")


@pytest.fixture
def document(genuine) -> dict[str, Any]:
    """Return that record with two of its cases."""
    found: dict[str, Any] = json.loads(record_text(genuine.model_copy(update={"cases": genuine.cases[:2]})))
    return found


def failed_checks(record: Record, *others: Record, repository: Path | None = None) -> set[str]:
    records = {f"evidence/{each.id}.json": each for each in (record, *others)}
    checks = Consistency(repository, records).of(record)
    return {check.name for check in checks if check.result == "contradiction"}


def as_record(document: dict[str, Any]) -> Record:
    """Return the record of a document whose rates follow from its samples, as a careful forger has them."""
    for case in document["cases"]:
        for arm in case["arms"]:
            arm["rates"] = {}
    return parse_record(json.dumps(document), "forged.json")


def test_every_record_of_this_repository_is_consistent():
    records = {str(path): read_record(path) for path in sorted((ROOT / "evidence").glob("*.json.gz"))}
    consistency = Consistency(None, records)
    assert records
    assert {path: contradiction(consistency.of(record)) for path, record in records.items()} == dict.fromkeys(
        records, ""
    )


def columns(document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, list[float]]]]:
    for case in document["cases"]:
        for rounds in case["rounds"]:
            for arms in rounds["seconds"].values():
                yield rounds, arms


def huge_error(document):
    document["cases"][0]["arms"][0]["accuracy"]["max_error"] = (
        5000 * document["cases"][0]["arms"][0]["accuracy"]["budget"]
    )


def a_budget_without_an_end(document):
    document["cases"][0]["arms"][0]["accuracy"]["budget"] = "Infinity"


def no_number_as_the_share_of_an_element(document):
    document["cases"][0]["arms"][0]["accuracy"]["element_share"] = "NaN"


def throttled_with_an_unknown_highest_clock(document):
    document["environment"]["gpu"]["max_sm_clock_mhz"] = None
    throttled(document)


def huge_error_of_one_output(document):
    accuracy = document["cases"][0]["arms"][1]["accuracy"]
    accuracy["outputs"] = {"dq": {"max_error": 1.0, "budget": 0.1, "low_precision_error": 0.1}}


def no_error(document):
    document["cases"][0]["arms"][0]["accuracy"] = None


def one_process_copied(document):
    for _, arms in columns(document):
        for name in arms:
            arms[name] = arms[name][:10] * 3


def one_process_scaled(document):
    for _, arms in columns(document):
        for name in arms:
            arms[name][10:20] = [1.01 * seconds for seconds in arms[name][:10]]


def one_process_in_another_order(document):
    for _, arms in columns(document):
        arms["sdpa"][10:20] = arms["sdpa"][9::-1]


def one_case_copied(document):
    document["cases"][1]["rounds"][0]["seconds"] = copy.deepcopy(document["cases"][0]["rounds"][0]["seconds"])


def control_copied(document):
    for _, arms in columns(document):
        arms["sdpa#2"] = list(arms["sdpa"])


def control_copied_but_for_a_third(document):
    for _, arms in columns(document):
        arms["sdpa#2"] = [*arms["sdpa"][:20], *(1.001 * seconds for seconds in arms["sdpa"][20:])]


def subject_made_from_the_baseline(document):
    for _, arms in columns(document):
        arms["flash_attention"] = [seconds / 3 for seconds in arms["sdpa"]]


def other_settings(document):
    document["settings"] |= {"processes": 2, "rounds": 7}


def fewer_rounds(document):
    document["settings"]["rounds"] = 12


def more_processes(document):
    document["settings"]["processes"] = 6


def orders_that_never_vary(document):
    for rounds, _ in columns(document):
        rounds["order"] = [rounds["order"][0]] * len(rounds["order"])


def another_seed(document):
    document["settings"]["seed"] += 1


def throttled(document):
    for rounds, _ in columns(document):
        n = len(rounds["process"])
        rounds |= {"sm_clock_mhz": [300] * n, "throttle": ["hw_thermal_slowdown"] * n}


def clocks_above_the_highest(document):
    document["cases"][0]["rounds"][0]["sm_clock_mhz"][0] = 2500


def gates_of_no_time(document):
    for gate in document["gates"]:
        gate["seconds"] = 0.0


def a_gate_shorter_than_its_samples(document):
    document["gates"][-1] |= {"seconds": 0.001, "gpu_seconds": 0.001}


def a_gate_that_held_the_gpu_for_longer_than_it_took(document):
    document["gates"][-1]["gpu_seconds"] *= 2


def another_date(document):
    document["created_at"] = "2024-01-01T00:00:00Z"


def less_work(document):
    for case in document["cases"]:
        case["work"]["flops"] /= 100


def fewer_bytes(document):
    document["cases"][0]["work"]["bytes"] /= 100


def another_problem(document):
    document["cases"][0]["problem"]["seqlen_q"] *= 2


def smaller_inputs(document):
    for case in document["cases"]:
        case["input_set_bytes"] //= 10


def an_impossible_launch(document):
    document["launches"][0]["block"] = [2048, 1, 1]


def no_launches(document):
    document["cases"][0]["arms"][0]["launches"] = []


def fewer_launches_than_identities(document):
    document["cases"][0]["arms"][0]["identities"] = ["a" * 32, "b" * 32]


def an_arm_without_samples(document):
    for _, arms in columns(document):
        del arms["sdpa"]


def a_baseline_that_ran_is_refused(document):
    for _, arms in columns(document):
        del arms["sdpa"]
    for case in document["cases"]:
        next(arm for arm in case["arms"] if arm["name"] == "sdpa")["status"] = "refused"


def a_bench_of_its_own_that_was_kept(document):
    resumed = {"run": "20261125T165800Z-host-flash_attention-000000", "created_at": "2026-11-25T16:58:00Z"}
    document["resumed"] = [resumed]
    gate = next(gate for gate in document["gates"] if gate["name"] == "bench")
    gate |= {"seconds": 1e-3, "gpu_seconds": 1e-3, "details": [f"as run {resumed['run']} showed it"]}


FORGED = {
    huge_error: "accuracy",
    huge_error_of_one_output: "accuracy",
    a_budget_without_an_end: "accuracy",
    no_number_as_the_share_of_an_element: "accuracy",
    throttled_with_an_unknown_highest_clock: "clocks",
    no_error: "accuracy",
    one_process_copied: "copied processes",
    one_process_scaled: "copied processes",
    one_process_in_another_order: "copied processes",
    one_case_copied: "copied processes",
    control_copied: "copied control",
    control_copied_but_for_a_third: "copied control",
    subject_made_from_the_baseline: "copied arms",
    other_settings: "samples",
    fewer_rounds: "samples",
    more_processes: "samples",
    orders_that_never_vary: "orders",
    another_seed: "orders",
    throttled: "clocks",
    clocks_above_the_highest: "clocks",
    gates_of_no_time: "gates",
    a_gate_shorter_than_its_samples: "gates",
    a_gate_that_held_the_gpu_for_longer_than_it_took: "gates",
    another_date: "dates",
    less_work: "work",
    fewer_bytes: "work",
    another_problem: "work",
    smaller_inputs: "inputs",
    no_launches: "launches",
    fewer_launches_than_identities: "launches",
    an_impossible_launch: "launches",
    an_arm_without_samples: "arms",
    a_baseline_that_ran_is_refused: "arms",
    a_bench_of_its_own_that_was_kept: "gates",
}


@pytest.mark.parametrize("forge", FORGED, ids=lambda forge: forge.__name__)
def test_a_contradiction_is_found_by_its_check(document, forge):
    forge(document)
    assert FORGED[forge] in failed_checks(as_record(document))


def test_a_process_of_few_rounds_that_was_copied_is_found():
    record = build_record(speedups=[2.0], processes=10, rounds=3)
    assert failed_checks(record) == set()
    document = json.loads(record_text(record))
    for _, arms in columns(document):
        for name in arms:
            arms[name][3:6] = arms[name][:3]
    assert failed_checks(as_record(document)) == {"copied processes"}


def test_samples_on_the_steps_of_a_clock_are_no_copy(document):
    for _, arms in columns(document):
        arms["sdpa"][:20] = [1.76e-6, *[1.728e-6] * 8, 1.76e-6, *[1.728e-6] * 5, 1.76e-6, 1.76e-6, *[1.728e-6] * 3]
    assert "copied processes" not in failed_checks(as_record(document))


def test_a_clock_that_was_locked_low_is_no_contradiction(document):
    for rounds, _ in columns(document):
        rounds["sm_clock_mhz"] = [900] * len(rounds["process"])
    assert "clocks" not in failed_checks(as_record(document))


def test_only_arms_with_an_answer_need_the_time_to_compute_it(document):
    """A copy of as many bytes takes less."""
    for case in document["cases"]:
        case["work"]["flops"] = 1e15
    for _, arms in columns(document):
        arms[document["subject"]["name"]] = [10.0 + 1e-3 * i for i in range(len(arms["sdpa"]))]
    assert "clocks" in failed_checks(as_record(document))
    for case in document["cases"]:
        for arm in case["arms"]:
            arm["accuracy"] = arm["accuracy"] if arm["role"] == "subject" else None
    assert "clocks" not in failed_checks(as_record(document))


def test_clocks_that_were_not_read_are_said(document):
    for rounds, _ in columns(document):
        rounds["sm_clock_mhz"] = [None] * len(rounds["process"])
    checks = Consistency(None, {}).of(as_record(document))
    assert {check.note for check in checks} - {""} == {"the clocks of the card were not read"}


def test_a_record_of_the_future_is_not_read(document):
    document["created_at"] = "2099-01-01T00:00:00Z"
    with pytest.raises(EvidenceError, match=r"created_at: .*moment of the past"):
        as_record(document)


def test_the_samples_of_another_run_are_found(document, genuine):
    document["id"] = "20261126T120000Z-forged"
    document["cases"] = document["cases"][:1]
    forged = as_record(document)
    assert "copied runs" in failed_checks(forged, genuine)
    resumed = {"run": genuine.id, "created_at": genuine.created_at.isoformat()}
    as_resumed = {**document, "resumed": [resumed]}
    stopped = genuine.model_copy(update={"complete": False})
    assert "copied runs" in failed_checks(as_record(as_resumed), stopped)  # they would be its own
    for rounds, _ in columns(as_resumed):
        rounds["session"] = [1] * len(rounds["process"])
    assert "copied runs" not in failed_checks(as_record(as_resumed), stopped)
    assert "copied runs" in failed_checks(as_record(as_resumed), genuine)  # nothing of it was missing


@pytest.fixture
def in_git(tmp_path) -> tuple[Path, Record]:
    """Return a repository with a kernel, and a record of the commit that holds it."""
    text = "print('kernel')\n"
    made = commit(tmp_path, {"kernel.py": text}, tag="first")
    record = build_record()
    source = SourceFile(path="kernel.py", sha256=hashlib.sha256(text.encode()).hexdigest())
    state = TreeState(commit=made, dirty=False)
    subject = SubjectInfo(
        name="flash_attention", operator="attention", entry_point="a:b", sources=[source], folder="kernels", tree=state
    )
    now = datetime.now(timezone.utc)
    changes = {"subject": subject, "created_at": now, "id": f"{now:%Y%m%dT%H%M%SZ}-a"}
    return tmp_path, record.model_copy(update=changes)


def with_subject(record: Record, **changes: object) -> Record:
    return record.model_copy(update={"subject": record.subject.model_copy(update=changes)})


def test_the_hash_of_a_source_is_compared_with_git(in_git):
    repository, record = in_git
    assert failed_checks(record, repository=repository) == set()
    forged = with_subject(record, sources=[SourceFile(path="kernel.py", sha256="0" * 64)])
    assert failed_checks(forged, repository=repository) == {"sources"}
    absent = with_subject(record, sources=[SourceFile(path="a\nb blob 3", sha256="0" * 64)])
    assert failed_checks(absent, repository=repository) == {"sources"}
    outside = SourceFile(path="../../shared.cu", sha256="0" * 64)  # git is not asked for it, and tells of the others
    assert (
        failed_checks(with_subject(record, sources=[*record.subject.sources, outside]), repository=repository) == set()
    )
    assert failed_checks(with_subject(forged, sources=[outside, *forged.subject.sources]), repository=repository)
    dirty = with_subject(forged, tree=TreeState(commit=record.tree.commit, dirty=True))
    assert failed_checks(dirty, repository=repository) == set()  # which the verdict says


def test_a_run_is_not_older_than_the_commit_that_it_names(in_git):
    repository, record = in_git
    early = record.created_at - timedelta(hours=1)
    forged = record.model_copy(update={"created_at": early, "id": f"{early:%Y%m%dT%H%M%SZ}-a"})
    assert failed_checks(forged, repository=repository) == {"commit"}


@pytest.mark.parametrize("named", ["f" * 40, "HEAD", "--help", "first", None])
def test_a_commit_that_git_does_not_have_is_said(in_git, named):
    repository, record = in_git
    checks = Consistency(repository, {}).of(with_subject(record, tree=TreeState(commit=named, dirty=False)))
    assert [check.result for check in checks[-2:]] == ["not checked", "not checked"]
    why = f"git has no commit {named} here: it was rebased, or never pushed" if named else "it names no commit"
    note = f"its sources and its date were not compared with git: {why}"
    assert {check.note for check in checks} - {""} == ({note} if named in ("f" * 40, None) else set())


def test_a_shallow_clone_and_a_folder_without_git_lack_commits_without_a_note(in_git, tmp_path_factory):
    repository, record = in_git
    commit(repository, {"kernel.py": "\n"}, tag="second")
    shallow = tmp_path_factory.mktemp("shallow") / "clone"
    git(repository, "clone", "--quiet", "--depth", "1", repository.as_uri(), str(shallow))
    for folder in (shallow, tmp_path_factory.mktemp("bare")):
        checks = Consistency(folder, {}).of(record)
        assert {check.result for check in checks[-2:]} == {"not checked"}
        assert not any(check.note for check in checks)


def test_the_verdict_names_the_record_and_the_check(tmp_path, genuine):
    (tmp_path / "claims").mkdir()
    claims = [claim for claim in load_claims(ROOT / "claims") if claim.suite == genuine.suite and not claim.cases]
    claim = next(claim for claim in claims if claim.fits_gpu(genuine.environment.gpu.name))
    text = next(path.read_text() for path in (ROOT / "claims").glob("*.toml") if f'"{claim.id}"' in path.read_text())
    (tmp_path / "claims" / "a.toml").write_text(text)
    path = tmp_path / "evidence" / "a.json"
    write_record(genuine, path)
    checked: dict[str, Any] = {}
    before = {verdict.claim.id: verdict for verdict in verify_claims(tmp_path, checked=checked)}[claim.id]
    assert before.status in (VerdictStatus.DEMONSTRATED, VerdictStatus.STALE)
    assert {check.result for check in checked["evidence/a.json"]} == {"passed", "not checked"}
    whole = json.loads(record_text(genuine))
    throttled(whole)
    path.write_text(json.dumps(whole))
    after = {verdict.claim.id: verdict for verdict in verify_claims(tmp_path)}[claim.id]
    assert after.status is VerdictStatus.INVALID
    assert after.reason.startswith(
        f"record {genuine.id} contradicts itself, so nothing in it counts: check clocks: case "
    )
    assert after.evidence == "evidence/a.json"


# What is found where a number is ten times as large, by its key. docs/explanation/verdicts.md says the same.
FOUND = {
    *("schema_version", "arch", "sms", "l2_bytes", "max_sm_clock_mhz", "method", "processes", "rounds", "seed"),
    *("a gate's gpu_seconds", "the problem", "flops", "bytes", "tokens", "input_sets", "input_set_bytes"),
    *("max_error", "a rate", "process", "sm_clock_mhz", "power_w", "temperature_c"),
}
SOMETIMES = {"a sample", "a launch's index", "block", "registers", "shared_memory_bytes", "count"}
NEVER = {
    *("a gate's seconds", "memory_bytes", "power_limit_w", "graph_seconds", "graph_calls", "graph_replays"),
    *("wall_calls", "budget", "low_precision_error", "peak_bytes", "grid"),
}


def leaves(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of all numbers in a document."""
    if isinstance(value, (dict, list)):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(child, (*where, key))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield where


def kind_of(place: tuple[Any, ...]) -> str:
    """Return what a number is: the last key of its place that is a name."""
    if "seconds" in place and "rounds" in place:
        return "a sample"
    if "rates" in place:
        return "a rate"
    if place[0] == "launches" or "launches" in place:
        return (
            "a launch's index" if place[0] == "cases" else str(next(k for k in reversed(place) if isinstance(k, str)))
        )
    if "problem" in place:
        return "the problem"
    if place[0] == "gates":
        return f"a gate's {place[-1]}"
    return str(next(key for key in reversed(place) if isinstance(key, str)))


def is_found(document: dict[str, Any], place: tuple[Any, ...], factor: float) -> bool:
    """Return whether a number that is changed by a factor is found."""
    *way, last = place
    parent: Any = document
    for key in way:
        parent = parent[key]
    before = parent[last]
    parent[last] = type(before)(before * factor)
    try:
        if parent[last] == before:  # 0
            return True
        return bool(failed_checks(parse_record(json.dumps(document), "changed.json")))
    except EvidenceError:
        return True
    finally:
        parent[last] = before


def shares_found(document: dict[str, Any], factor: float, *, most: int) -> dict[str, tuple[int, int]]:
    """Return of each kind of number how many changes were found, and how many were tried."""
    places = defaultdict(list)
    for place in leaves(document):
        places[kind_of(place)].append(place)
    draw = random.Random(0)
    found = {}
    for kind, all_places in places.items():
        tried = draw.sample(all_places, min(most, len(all_places)))
        found[kind] = sum(is_found(document, place, factor) for place in tried), len(tried)
    return found


def test_which_numbers_that_are_ten_times_as_large_are_found(document):
    document["cases"] = document["cases"][:1]
    found = shares_found(document, 10, most=4)
    assert set(found) == FOUND | SOMETIMES | NEVER
    assert {kind for kind, (hits, tried) in found.items() if hits == tried} >= FOUND
    assert {kind for kind, (hits, _) in found.items() if hits == 0} >= NEVER
    assert {kind for kind, (hits, _) in found.items() if hits} <= FOUND | SOMETIMES
