"""Tests of the store on both databases: SQLite, and a real PostgreSQL server where there is one."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from flashmoe_science.errors import EvidenceError
from flashmoe_science.proof import database
from flashmoe_science.proof.database import LEDGER, METADATA, REVISIONS, RUNS, Database, hide_password
from flashmoe_science.proof.evidence import Record
from flashmoe_science.proof.store import Store

from .builders import build_gates, build_record
from .postgres import PASSWORD, running_server, with_password
from .processes import python_path

ROOT = Path(__file__).parents[2]

# What the flashmoe before the first migration made, as SQLite prints it.
FIRST_SCHEMA = (
    """CREATE TABLE runs (
    id VARCHAR(200) NOT NULL,
    created_at VARCHAR(40) NOT NULL,
    subject VARCHAR(200) NOT NULL,
    operator VARCHAR(200) NOT NULL,
    suite VARCHAR(200) NOT NULL,
    gpu VARCHAR(200) NOT NULL,
    "commit" VARCHAR(64) NOT NULL,
    complete BOOLEAN NOT NULL,
    result VARCHAR(200) NOT NULL,
    cases INTEGER NOT NULL,
    measured INTEGER NOT NULL,
    document TEXT NOT NULL,
    PRIMARY KEY (id)
)""",
    "CREATE INDEX ix_runs_created_at ON runs (created_at)",
)

# A process that waits for the others before it works; what it raises is its exit code.
WORKER = """
import sys
from flashmoe_science.proof.store import Store
from tests.proof.builders import build_record
store, seed = Store(sys.argv[1]), int(sys.argv[2])
records = [build_record(day=day, seed=seed, speedups=[2.0]) for day in range(8)]
print("ready", flush=True)
sys.stdin.readline()
for record in records:
    store.save(record)
"""


def record_with_costs(**changes) -> Record:
    gates = [
        gate.model_copy(update={"gpu_seconds": 10.0 if gate.name in ("launch", "bench") else 0.0})
        for gate in build_gates()
    ]
    return build_record(gates=gates, speedups=[2.0], **changes)


@pytest.fixture(scope="module")
def server():
    with running_server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    """Return the URL of a store that does not exist yet, or of an empty database on a real server."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'runs.sqlite'}"
    server = request.getfixturevalue("server")
    name = f"test_{abs(hash(request.node.name)):x}"
    with engine_of(with_password(server)).connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f"DROP DATABASE IF EXISTS {name}")
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    return with_password(server).replace("/postgres", f"/{name}")


def engine_of(url: str) -> sa.Engine:
    return sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"), poolclass=sa.pool.NullPool)


def make_first_store(url: str, *records: Record) -> None:
    """Make the store that a flashmoe without migrations would have made of ``records``."""
    from flashmoe_science.proof.store import summarize

    with engine_of(url).begin() as connection:
        for statement in FIRST_SCHEMA:
            connection.exec_driver_sql(statement)
        for record in records:
            row = {name: value for name, value in vars(summarize(record)).items() if name in RUNS.c}
            connection.execute(sa.insert(RUNS).values(**row, document=record.model_dump_json()))


def rows_of(url: str, table: sa.Table) -> list[dict[str, Any]]:
    with engine_of(url).connect() as connection:
        return [dict(row) for row in connection.execute(sa.select(table).order_by(table.c.id)).mappings()]


def version_of(url: str) -> str | None:
    with engine_of(url).connect() as connection:
        return connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()


def run_together(url: str) -> list[tuple[int, str]]:
    """Let two processes save eight runs each at the same time; return exit code and stderr of both."""
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT / "src", ROOT)}
    command_line = [sys.executable, "-c", WORKER, url]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [
        subprocess.Popen([*command_line, str(seed)], env=environment, text=True, **pipes)  # type: ignore[call-overload]
        for seed in (1, 2)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    return [(process.wait(300), process.communicate()[1]) for process in processes]


def test_runs_are_kept_replaced_and_found(url):
    store = Store(url)
    assert store.runs() == []
    store.save(build_record(day=3).model_copy(update={"complete": False}))
    for day in (1, 2, 3):
        store.save(build_record(day=day, suite="standard" if day == 1 else "seed"))
    assert [run.created_at[:10] for run in store.runs()] == ["2026-01-04", "2026-01-03", "2026-01-02"]
    assert all(run.complete for run in store.runs())
    assert [run.suite for run in store.runs(suite="standard")] == ["standard"]
    assert len(store.runs(gpu="h200")) == 3
    assert store.runs(gpu="h20%") == []
    assert store.load("20260104") == build_record(day=3)
    since = datetime(2026, 1, 3, tzinfo=timezone.utc)
    assert [run.created_at[:10] for run in store.runs(since=since)] == ["2026-01-04", "2026-01-03"]


def test_two_processes_that_save_at_the_same_time_lose_nothing(url):
    assert run_together(url) == [(0, ""), (0, "")]
    assert len(Store(url).runs()) == 16
    assert version_of(url) == REVISIONS[-1]


def test_a_store_of_the_first_schema_is_upgraded_in_place(url):
    old = record_with_costs()
    make_first_store(url, old)
    before = rows_of(url, RUNS)
    assert Store(url).load(old.id) == old  # reading needs no upgrade, and makes none
    assert "ledger" not in sa.inspect(engine_of(url)).get_table_names()

    Store(url).save(record_with_costs(day=1))
    assert rows_of(url, RUNS)[:1] == before
    assert version_of(url) == REVISIONS[-1]
    booked = [(entry["run"], entry["gate"], entry["gpu_seconds"]) for entry in rows_of(url, LEDGER)]
    new = record_with_costs(day=1).id
    assert booked == [(run, gate, 10.0) for run in (old.id, new) for gate in ("bench", "launch")]


def test_two_processes_that_upgrade_at_the_same_time_lose_nothing(url):
    make_first_store(url, *(record_with_costs(day=day) for day in range(30, 60)))
    assert run_together(url) == [(0, ""), (0, "")]
    assert len(Store(url).runs()) == 30 + 16
    assert len(rows_of(url, LEDGER)) == 2 * 30


def test_an_upgrade_that_fails_leaves_the_store_as_it_was(url, monkeypatch):
    make_first_store(url, record_with_costs())
    upgrade = command.upgrade

    def fail_at_the_end(*args):
        upgrade(*args)
        raise OSError("no space left")

    monkeypatch.setattr("alembic.command.upgrade", fail_at_the_end)
    with pytest.raises(EvidenceError, match="no space left"):
        Store(url).save(record_with_costs(day=1))
    assert set(sa.inspect(engine_of(url)).get_table_names()) == {"runs"}
    assert Store(url).runs()[0].id == record_with_costs().id
    monkeypatch.undo()
    Store(url).save(record_with_costs(day=1))
    assert len(Store(url).runs()) == 2


def test_a_run_that_cannot_be_read_does_not_stop_the_upgrade(url):
    make_first_store(url, record_with_costs())
    with engine_of(url).begin() as connection:
        connection.execute(sa.update(RUNS).values(document='{"half'))
    Store(url).save(record_with_costs(day=1))
    assert len(Store(url).runs()) == 2
    with pytest.raises(EvidenceError, match=r"run 20260101T000000Z-seed-flash_attention-000000 in .*: key"):
        Store(url).load("20260101")


@pytest.mark.parametrize(
    "act", [lambda store: store.runs(), lambda store: store.save(build_record(day=1))], ids=["read", "write"]
)
def test_a_store_of_a_newer_schema_is_refused(url, act):
    Store(url).save(build_record())
    with engine_of(url).begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(EvidenceError, match="has schema 9999, and this flashmoe knows 0001 to 0002\nhint: a newer"):
        act(Store(url))
    assert len(rows_of(url, RUNS)) == 1


@pytest.mark.parametrize("old", [False, True], ids=["new", "upgraded"])
def test_a_new_store_and_an_upgraded_one_have_the_tables_that_the_code_has(url, old):
    if old:
        make_first_store(url, build_record())
    Store(url).save(build_record())
    assert version_of(url) == REVISIONS[-1]
    with engine_of(url).connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, METADATA) == []


def test_every_migration_is_known():
    config = Config()
    config.set_main_option("script_location", str(Path(database.__file__).parent / "migrations"))
    scripts = ScriptDirectory.from_config(config)
    assert tuple(script.revision for script in scripts.walk_revisions())[::-1] == REVISIONS


def test_only_an_upgrade_needs_alembic(url, monkeypatch):
    monkeypatch.setitem(sys.modules, "alembic", None)
    make_first_store(url, build_record())
    with pytest.raises(
        EvidenceError, match="has schema 0001, and alembic, which upgrades it, is not installed\nhint: in a clone: pip"
    ):
        Store(url).save(build_record(day=1))
    with engine_of(url).begin() as connection:
        connection.exec_driver_sql("DROP TABLE runs")
    Store(url).save(build_record(day=1))
    assert len(Store(url).runs()) == 1


def test_the_ledger_keeps_the_rate_that_was_booked(url):
    store, record = Store(url), record_with_costs()
    store.save(record, dollars_per_hour=3.5)
    store.save(record)
    assert {entry["dollars_per_hour"] for entry in rows_of(url, LEDGER)} == {3.5}
    fewer = record.model_copy(update={"gates": record.gates[:4]})
    store.save(fewer, dollars_per_hour=4.0)
    assert [(entry["gate"], entry["dollars_per_hour"]) for entry in rows_of(url, LEDGER)] == [("launch", 4.0)]


def test_a_read_only_file_can_be_read_and_says_why_it_cannot_be_written(tmp_path):
    writable = Store(f"sqlite:///{tmp_path / 'runs.sqlite'}")
    writable.save(build_record())
    store = Store(f"sqlite:///file:{tmp_path / 'runs.sqlite'}?mode=ro&uri=true")
    assert len(store.runs()) == 1
    with pytest.raises(EvidenceError, match="attempt to write a readonly database\nhint: set FLASHMOE_STORE"):
        store.save(build_record(day=1))
    old = f"sqlite:///{tmp_path / 'old.sqlite'}"
    make_first_store(old, build_record())
    assert len(Store(old.replace("sqlite:///", "sqlite:///file:") + "?mode=ro&uri=true").runs()) == 1


def test_a_folder_with_a_percent_sign_holds_a_store_too(tmp_path, monkeypatch):
    monkeypatch.setattr(database, "_MIGRATIONS", tmp_path / "100%" / "migrations")
    shutil.copytree(Path(database.__file__).parent / "migrations", tmp_path / "100%" / "migrations")
    Store(str(tmp_path / "50%.sqlite")).save(build_record())
    assert sqlite3.connect(tmp_path / "50%.sqlite").execute("SELECT count(*) FROM runs").fetchone() == (1,)


# passwords


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ada:a@b:c@host/db", "postgresql://ada:***@host/db"),
        ("postgresql://host/db?user=ada&password=abc&x=1", "postgresql://host/db?user=ada&password=***&x=1"),
        ("postgresql://ada:abc@host:nothing/db", "postgresql://ada:***@host:nothing/db"),
        ("postgresql://host/db?sslpassword=abc", "postgresql://host/db?sslpassword=***"),
        ("postgresql://ada@host:5432/db", "postgresql://ada@host:5432/db"),
        ("sqlite:////a/b.sqlite", "sqlite:////a/b.sqlite"),
    ],
)
def test_passwords_are_hidden(url, shown):
    assert hide_password(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ada:abcdef@host:nothing/db",
        "nosuchdatabase://ada:abcdef@host/db",
        "mysql://ada:abcdef@host/db",
        "postgresql+psycopg2://ada:abcdef@host/db",
        "postgresql://ada:abcdef@127.0.0.1:1/db",
        "postgresql://ada@127.0.0.1:1/db?password=abcdef",
    ],
)
def test_no_error_says_the_password(url):
    with pytest.raises(EvidenceError) as caught:
        Store(url).runs()
    assert "abcdef" not in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ada:p@ssSECRET@127.0.0.1/db",
        "postgresql://ada:p@ss/SECRET@127.0.0.1/db",
        "postgresql://ada:p@ss?SECRET@127.0.0.1/db",
        "postgresql://ada:p/q@ss:SECRET@127.0.0.1/db",
    ],
)
def test_an_at_sign_within_a_password_is_refused_and_says_how_it_is_written(url):
    with pytest.raises(EvidenceError, match="%40") as caught:
        Store(url).ids()
    assert "SECRET" not in str(caught.value)
    assert "ss" not in str(caught.value).replace("password", "").replace("flashmoe", "")


def test_at_signs_elsewhere_are_no_part_of_a_password(tmp_path):
    (tmp_path / "a@b@c").mkdir()
    assert Store(f"sqlite:///{tmp_path}/a@b@c/runs.sqlite").ids() == []
    assert Database("postgresql://ada:p%40ss@host/db?application_name=a@b").dialect == "postgresql"


@pytest.mark.parametrize(
    ("secret", "said", "shown"),
    [
        ("p%40ssSECRET", "cannot resolve p@ssSECRET", "cannot resolve ***"),
        ("p%40ssSECRET", "cannot resolve ssSECRET", "cannot resolve ***"),
        ("p%40ssSECRET", 'no option "p%40ssSECRET"', 'no option "***"'),
        ("a", "a database of ada", "*** database of ada"),
    ],
)
def test_no_piece_of_a_password_is_in_what_a_driver_says(monkeypatch, secret, said, shown):
    store = Database(f"postgresql://ada:{secret}@host/db")

    def refuse():
        raise OSError(said)

    monkeypatch.setattr(store, "_engine", type("Engine", (), {"begin": staticmethod(refuse)}))
    with pytest.raises(EvidenceError) as caught, store.reading():
        pass
    assert f": {shown}\n" in str(caught.value)


def test_a_server_that_refuses_the_password_says_so_and_not_the_password(server):
    with pytest.raises(EvidenceError, match='password authentication failed for user "ada"') as caught:
        Store(with_password(server, "wr0ng")).runs()
    assert "wr0ng" not in str(caught.value)
    assert PASSWORD not in str(Store(with_password(server)))


def test_a_driver_that_is_missing_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(
        EvidenceError, match=r"psycopg is not installed\nhint: in a clone: pip install -e '\.\[proof,postgres\]'"
    ):
        Database("postgresql://host/db")
