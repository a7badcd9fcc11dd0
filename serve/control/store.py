"""The database of the control plane: SQLite in the lake, or PostgreSQL by URL. Blocking.

Each row that other processes must know has the revision of its last change. A row that is gone leaves its name and the
revision in ``gone``, so that "what has changed since" is one query a table. Times are milliseconds since the epoch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import (
    JSON,
    BigInteger,
    Engine,
    ForeignKeyConstraint,
    Index,
    MetaData,
    String,
    create_engine,
    delete,
    event,
    select,
    update,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from lakehouse.contract.access import control_folder
from lakehouse.contract.errors import ConfigError, EnvironmentProblem
from lakehouse.contract.settings import Settings

_BUSY_S = 10
_AT_A_TIME = 1_000
_NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_name)s",
    "fk": "fk_%(table_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class ControlBase(DeclarativeBase):
    metadata = MetaData(naming_convention=_NAMING)
    type_annotation_map = {dict[str, Any]: JSON, list[str]: JSON, dict[str, str]: JSON}  # noqa: RUF012 - SQLAlchemy's


class RevisionRow(ControlBase):
    """One row: the revision of the newest change. A change locks it first, so that changes are in one order."""

    __tablename__ = "revision"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    revision: Mapped[int] = mapped_column(BigInteger)


class TenantRow(ControlBase):
    __tablename__ = "tenants"
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    title: Mapped[str] = mapped_column(String(200))
    created: Mapped[int] = mapped_column(BigInteger)
    revision: Mapped[int] = mapped_column(BigInteger, index=True)


class AppRow(ControlBase):
    """``ends``: end of life, after which no key of the app is good."""

    __tablename__ = "apps"
    __table_args__ = (ForeignKeyConstraint(["tenant"], ["tenants.name"]),)
    tenant: Mapped[str] = mapped_column(String(63), primary_key=True)
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    title: Mapped[str] = mapped_column(String(200))
    ends: Mapped[int | None] = mapped_column(BigInteger)
    created: Mapped[int] = mapped_column(BigInteger)
    revision: Mapped[int] = mapped_column(BigInteger, index=True)


class KeyRow(ControlBase):
    """``tenant`` and ``app`` are empty for a key of the operator's own."""

    __tablename__ = "keys"
    __table_args__ = (Index("ix_keys_owner", "tenant", "app"),)
    id: Mapped[str] = mapped_column(String(63), primary_key=True)
    hash: Mapped[str] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(String(200))
    tenant: Mapped[str] = mapped_column(String(63))
    app: Mapped[str] = mapped_column(String(63))
    actions: Mapped[list[str]]
    tables: Mapped[list[str]]
    rows: Mapped[dict[str, str]]
    sources: Mapped[list[str]]
    rate: Mapped[int]
    connections: Mapped[int]
    max_event_bytes: Mapped[int]
    until: Mapped[int | None] = mapped_column(BigInteger, index=True)
    created: Mapped[int] = mapped_column(BigInteger)
    revision: Mapped[int] = mapped_column(BigInteger, index=True)


class SourceRow(ControlBase):
    __tablename__ = "sources"
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    declaration: Mapped[dict[str, Any]]
    created: Mapped[int] = mapped_column(BigInteger)
    revision: Mapped[int] = mapped_column(BigInteger, index=True)


class SubscriptionRow(ControlBase):
    """``key``: id of the newest key that was made for it."""

    __tablename__ = "subscriptions"
    __table_args__ = (
        ForeignKeyConstraint(["tenant", "app"], ["apps.tenant", "apps.name"]),
        Index("ix_subscriptions_owner", "tenant", "app"),
    )
    id: Mapped[str] = mapped_column(String(63), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(63))
    app: Mapped[str] = mapped_column(String(63))
    table: Mapped[str] = mapped_column(String(63))
    where: Mapped[str]
    columns: Mapped[list[str]]
    key: Mapped[str] = mapped_column(String(63), index=True)
    created: Mapped[int] = mapped_column(BigInteger)
    revision: Mapped[int] = mapped_column(BigInteger)


class GoneRow(ControlBase):
    """``kind``: a table's name; ``name``: of the row that was in it."""

    __tablename__ = "gone"
    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    name: Mapped[str] = mapped_column(String(127), primary_key=True)
    revision: Mapped[int] = mapped_column(BigInteger, index=True)


class AuditRow(ControlBase):
    """Who did what. The database itself refuses to change or delete a row."""

    __tablename__ = "audit"
    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[int] = mapped_column(BigInteger)
    key: Mapped[str] = mapped_column(String(63))
    who: Mapped[str] = mapped_column(String(200))
    tenant: Mapped[str] = mapped_column(String(63), index=True)
    act: Mapped[str] = mapped_column(String(32))
    subject: Mapped[str] = mapped_column(String(200))
    detail: Mapped[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Actor:
    """Whose key was shown; an empty tenant is the operator."""

    key: str
    name: str
    tenant: str


OPERATOR = Actor("", "operator of this machine", "")


class ControlChange:
    """One transaction that changes something: its revision, and the audit log of it.

    Attributes:
        revision: of what is changed in it.
        now: ms since the epoch.
    """

    def __init__(self, session: Session, actor: Actor, now: int) -> None:
        self.session = session
        self.actor = actor
        self.now = now
        session.execute(update(RevisionRow).values(revision=RevisionRow.revision + 1))
        self.revision = session.scalars(select(RevisionRow.revision)).one()

    def log(self, act: str, subject: str, tenant: str, **detail: Any) -> None:
        who = self.actor
        self.session.add(
            AuditRow(at=self.now, key=who.key, who=who.name, tenant=tenant, act=act, subject=subject, detail=detail)
        )

    def gone(self, kind: str, name: str) -> None:
        """Other processes are to forget an entry."""
        self.session.merge(GoneRow(kind=kind, name=name, revision=self.revision))

    def back(self, kind: str, name: str) -> None:
        """There is an entry again that was gone."""
        self.session.execute(delete(GoneRow).where(GoneRow.kind == kind, GoneRow.name == name))

    def drop_keys(self, keys: Iterable[KeyRow]) -> None:
        """Revoke keys; their subscriptions go with them."""
        ids = [key.id for key in keys]
        for at in range(0, len(ids), _AT_A_TIME):
            some = ids[at : at + _AT_A_TIME]
            self.session.execute(delete(SubscriptionRow).where(SubscriptionRow.key.in_(some)))
            self.session.execute(delete(KeyRow).where(KeyRow.id.in_(some)))
            self.session.add_all(GoneRow(kind="keys", name=name, revision=self.revision) for name in some)

    def end_keys(self) -> None:
        """Drop the keys whose time is over."""
        over = select(KeyRow).where(KeyRow.until <= self.now).limit(_AT_A_TIME)
        if ended := self.session.scalars(over).all():
            for key in ended:
                self.log("key.ended", key.id, key.tenant, name=key.name)
            self.drop_keys(ended)


class ControlStore:
    """The database, opened and brought up to date.

    Raises:
        ConfigError: the URL is none, or names an unknown kind of database.
        EnvironmentProblem: the database cannot be opened or brought up to date.
    """

    def __init__(self, settings: Settings) -> None:
        given = settings.control.database
        try:
            url = make_url(given or f"sqlite:///{control_folder(settings) / 'control.db'}")
            if url.drivername == "postgresql":
                url = url.set(drivername="postgresql+psycopg")
            if url.drivername not in ("sqlite", "postgresql+psycopg"):
                raise ArgumentError(url.drivername)
        except (ArgumentError, ValueError):
            remedy = "Write postgresql://USER@HOST/NAME, sqlite:///FILE, or nothing"
            raise ConfigError("no such database", key="control.database", remedy=remedy) from None
        self.place = url.render_as_string(hide_password=True)
        try:
            if url.drivername == "sqlite":
                self._engine = _sqlite(Path(url.database or ""), str(url))
            else:
                self._engine = create_engine(url, pool_pre_ping=True)
            self._engine.connect().close()
        except (SQLAlchemyError, NoSuchModuleError, OSError, ImportError) as error:
            reason = str(error).partition("\n")[0]
            remedy = "Start it, check control.database, and install the extra `postgres` for PostgreSQL"
            raise EnvironmentProblem(f"{self.place} cannot be opened: {reason}", remedy) from None
        self._migrate()

    def _migrate(self) -> None:
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
        try:
            with self._engine.begin() as connection:
                config.attributes["connection"] = connection
                command.upgrade(config, "head")
        except Exception as error:  # noqa: BLE001 - of Alembic and of the driver alike
            reason = str(error).partition("\n")[0]
            remedy = "A database of a newer Millrace needs that Millrace; else restore a backup"
            raise EnvironmentProblem(f"{self.place} cannot be brought up to date: {reason}", remedy) from None

    def reading(self) -> Session:
        return Session(self._engine)

    @contextmanager
    def changing(self, actor: Actor) -> Iterator[ControlChange]:
        """A transaction; changes come one after the other."""
        with Session(self._engine) as session, session.begin():
            change = ControlChange(session, actor, now_ms())
            change.end_keys()
            yield change

    def close(self) -> None:
        self._engine.dispose()


def now_ms() -> int:
    return int(time.time() * 1000)


def _sqlite(path: Path, url: str) -> Engine:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(mode=0o600)
    engine = create_engine(url, connect_args={"timeout": _BUSY_S})

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # transactions begin where we say so, below
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine
