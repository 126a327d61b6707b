"""The database under the store: its tables, its transactions, and the schema that it is kept at.

SQLite and PostgreSQL, through SQLAlchemy. Whoever writes brings an older schema up to date first, by the migrations in
``migrations/``; whoever reads changes nothing, and can read every schema so far.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from ..errors import EvidenceError
from .evidence import NEWER

METADATA = sa.MetaData()

RUNS = sa.Table(
    "runs",
    METADATA,
    sa.Column("id", sa.String(200), primary_key=True),
    sa.Column("created_at", sa.String(40), nullable=False, index=True),  # ISO 8601 in UTC, so that text sorts as time
    sa.Column("subject", sa.String(200), nullable=False),
    sa.Column("operator", sa.String(200), nullable=False),
    sa.Column("suite", sa.String(200), nullable=False),
    sa.Column("gpu", sa.String(200), nullable=False),  # "" for none
    sa.Column("commit", sa.String(64), nullable=False),
    sa.Column("complete", sa.Boolean, nullable=False),
    sa.Column("result", sa.String(200), nullable=False),
    sa.Column("cases", sa.Integer, nullable=False),
    sa.Column("measured", sa.Integer, nullable=False),
    sa.Column("document", sa.Text, nullable=False),
)

LEDGER = sa.Table(
    "ledger",
    METADATA,
    sa.Column("id", sa.String(260), primary_key=True),  # of a gate "<run>/<gate>"
    sa.Column("at", sa.String(40), nullable=False, index=True),  # ISO 8601 in UTC
    sa.Column("run", sa.String(200), nullable=False, index=True),  # "" for what was entered by hand
    sa.Column("gate", sa.String(40), nullable=False),
    sa.Column("subject", sa.String(200), nullable=False),
    sa.Column("suite", sa.String(200), nullable=False),
    sa.Column("gpu", sa.String(200), nullable=False),
    sa.Column("gpu_seconds", sa.Float, nullable=False),
    sa.Column("dollars_per_hour", sa.Float),  # what it was booked at; NULL: the rates of whoever asks hold
    sa.Column("dollars", sa.Float),  # what was entered by hand
    sa.Column("note", sa.Text, nullable=False),
)

_VERSIONS = sa.MetaData()  # a table of Alembic's own, and as it makes it
_VERSION = sa.Table("alembic_version", _VERSIONS, sa.Column("version_num", sa.String(32), primary_key=True))

REVISIONS = ("0001", "0002")  # every schema so far, the newest last; a test holds them against migrations/versions
_UNVERSIONED = "0001"  # a store with runs and no version was made before there were migrations

_MIGRATIONS = Path(__file__).parent / "migrations"
_UPGRADE_LOCK = 0x666C6173686D6F65  # "flashmoe": whoever upgrades a PostgreSQL store holds this advisory lock
_BUSY_TIMEOUT_S = 60  # SQLite lets one process write at a time: the others wait
_CONNECT_TIMEOUT_S = 10
_SHORT = 3  # a piece of a password so long may stand in any word
_INSERT: Mapping[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
_HINT = "set FLASHMOE_STORE, or --store, to a file that you may write, or to the URL of a PostgreSQL database"


class Database:
    """One store. Making it connects to nothing.

    Args:
        url: An SQLAlchemy URL of SQLite or PostgreSQL.

    Raises:
        EvidenceError: the URL is wrong, or of another database, or its driver is not installed.
    """

    def __init__(self, url: str) -> None:
        self._shown = hide_password(url)
        self._secrets = _secrets_in(url)
        if not url.startswith("sqlite") and _authority(url).count("@") > 1:
            # The driver would take what follows the first one for the host, and say it in its errors.
            message = f"run store {self._shown}: expected one @, before the host, and got more"
            raise EvidenceError(message, hint="write an @ within a user or a password as %40, and a / as %2F")
        try:
            self._url = _with_driver(sa.make_url(url))
            self._engine = self._make_engine()
        except (sa.exc.ArgumentError, ValueError) as error:
            cause = self._without_secrets(str(error))
            raise EvidenceError(f"run store {self._shown}: cannot be used: {cause}", hint=_HINT) from error
        except ModuleNotFoundError as error:
            hint = "in a clone: pip install -e '.[proof,postgres]'"
            raise EvidenceError(f"run store {self._shown}: {error.name} is not installed", hint=hint) from error
        self._shown = self.file or self._shown

    def __str__(self) -> str:
        return self._shown

    @property
    def dialect(self) -> str:
        """``sqlite`` or ``postgresql``."""
        return self._url.get_backend_name()

    @property
    def file(self) -> str:
        """The SQLite file, or "" for PostgreSQL and for SQLite in memory."""
        database = self._url.database or ""
        if self.dialect != "sqlite" or database in ("", ":memory:"):
            return ""
        return database.removeprefix("file:") if "uri" in self._url.query else database

    def _make_engine(self) -> sa.Engine:
        if self.dialect not in _INSERT:
            raise ValueError(f"expected sqlite or postgresql, got {self.dialect}")
        if self.dialect == "postgresql":
            timeout = {} if "connect_timeout" in self._url.query else {"connect_timeout": _CONNECT_TIMEOUT_S}
            # Minutes pass between two saves, and a connection may be cut meanwhile: each makes its own.
            return sa.create_engine(self._url, connect_args=timeout, poolclass=sa.pool.NullPool)
        pool = {"poolclass": sa.pool.NullPool} if self.file else {}
        engine = sa.create_engine(self._url, connect_args={"timeout": _BUSY_TIMEOUT_S}, **pool)
        sa.event.listen(engine, "begin", _begin)
        return engine

    @contextmanager
    def reading(self) -> Iterator[sa.Connection | None]:
        """Give a connection, or None where there is no store yet. Nothing is created or upgraded."""
        if self.file and not Path(self.file).exists():
            yield None
            return
        with self._errors_explained(), self._engine.begin() as connection:
            yield connection if self._version(connection) else None

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """Give a connection to a store of the newest schema, in a transaction that is kept only as a whole."""
        with self._errors_explained():
            if self.file:
                Path(self.file).parent.mkdir(parents=True, exist_ok=True)
            with self._engine.execution_options(flashmoe_writes=True).begin() as connection:
                if self._version(connection) != REVISIONS[-1]:
                    self._upgrade(connection)
                yield connection

    def insert(
        self, connection: sa.Connection, table: sa.Table, row: Mapping[str, Any], *, keep: Sequence[str] = ()
    ) -> None:
        """Insert ``row``, or replace the one with its id: a column of ``keep`` not by None."""
        statement = _INSERT[self.dialect](table).values(**row)
        new = {name: statement.excluded[name] for name in row if name != "id"}
        new |= {name: sa.func.coalesce(new[name], table.c[name]) for name in keep}
        connection.execute(statement.on_conflict_do_update(index_elements=["id"], set_=new))

    def _version(self, connection: sa.Connection) -> str:
        """Return the schema of the store, or "" where there is no store yet."""
        tables = set(sa.inspect(connection).get_table_names())
        found = ""
        if _VERSION.name in tables:
            found = connection.scalar(sa.select(_VERSION.c.version_num)) or ""
        if not found:
            return _UNVERSIONED if RUNS.name in tables else ""
        if found not in REVISIONS:
            raise EvidenceError(
                f"run store {self} has schema {found}, and this flashmoe knows {REVISIONS[0]} to {REVISIONS[-1]}",
                hint=NEWER,
            )
        return found

    def _upgrade(self, connection: sa.Connection) -> None:
        """Make the tables, or bring them up to date. Of two processes that try, the second finds it done."""
        if self.dialect == "postgresql":  # with SQLite, a transaction that writes is alone from its beginning
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_UPGRADE_LOCK)))
        version = self._version(connection)
        if version == "":
            METADATA.create_all(connection)
            _VERSIONS.create_all(connection)
            connection.execute(sa.insert(_VERSION).values(version_num=REVISIONS[-1]))
        elif version != REVISIONS[-1]:
            self._migrate(connection, version)

    def _migrate(self, connection: sa.Connection, version: str) -> None:
        try:
            from alembic import command  # a store that is up to date does without it
            from alembic.config import Config
        except ModuleNotFoundError as error:
            message = f"run store {self} has schema {version}, and alembic, which upgrades it, is not installed"
            raise EvidenceError(message, hint="in a clone: pip install -e '.[proof]'") from error
        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
        config.attributes["connection"] = connection
        if not sa.inspect(connection).has_table(_VERSION.name):
            command.stamp(config, version)
        command.upgrade(config, REVISIONS[-1])

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        try:
            yield
        except (sa.exc.DBAPIError, OSError) as error:
            cause = " ".join(str(getattr(error, "orig", None) or error).split())
            raise EvidenceError(f"run store {self}: {self._without_secrets(cause)}", hint=_HINT) from error

    def _without_secrets(self, text: str) -> str:
        """Return what a driver says, without any piece of the password: short ones only where they are a word."""
        for secret in self._secrets:
            found = re.escape(secret)
            text = re.sub(found if len(secret) > _SHORT else rf"(?<!\w){found}(?!\w)", "***", text)
        return text


def hide_password(url: str) -> str:
    """Return a URL that may be printed: ``***`` where a password stands, even in a URL that is wrong."""
    shown = re.sub(r"(//[^/@:]*):.*@", r"\1:***@", url)  # a password may hold an @: all up to the last one
    return re.sub(r"([?&]\w*password=)[^&]*", r"\1***", shown, flags=re.IGNORECASE)


def _secrets_in(url: str) -> list[str]:
    """Return what ``hide_password`` hides, as it is written and as it is meant, and its pieces; the longest first."""
    if url.startswith("sqlite"):
        return []
    hidden = re.findall(r"//[^/@:]*:(.*)@", url)
    hidden += re.findall(r"[?&]\w*password=([^&]*)", url, flags=re.IGNORECASE)
    whole = {text for secret in hidden for text in (secret, unquote(secret))}
    pieces = {piece for text in whole for piece in (text, *re.split(r"[@/:?#&]", text)) if piece}
    return sorted(pieces, key=lambda piece: (-len(piece), piece))


def _authority(url: str) -> str:
    """Return user, password, host and path: all before the query, for a password may hold a / or a ? as well."""
    return re.split(r"\?\w+=", url.partition("://")[2])[0]


def _with_driver(url: sa.URL) -> sa.URL:
    """Return the URL with psycopg 3 as the driver, where it names none."""
    return url.set(drivername="postgresql+psycopg") if url.drivername in ("postgres", "postgresql") else url


def _begin(connection: sa.Connection) -> None:
    """Begin a transaction. One that will write takes the lock at once: to wait for it later could be a deadlock."""
    writes = connection.get_execution_options().get("flashmoe_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
